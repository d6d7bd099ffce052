"""What passes between scheduler and executor: the rows of a step, and what became of them.

Owns no logic. Any executor, the real one or a model of one, takes a `Plan` and returns a `StepResult`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perflab.engine.sequence import Sequence
from perflab.types import TokenLogprob


@dataclass(slots=True)
class Plan:
    """The rows of one step: `seqs[i]` computes its next `counts[i]` tokens, from its counter on.

    `samples[i]` says whether these reach the newest token, so that a new one follows. `room` is what
    the token budget has left; `drafts` of the tokens are guesses, the last ones of their rows
    (`seqs[i].draft`), to be compared with what the model draws.
    """

    seqs: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    prefill_tokens: int = 0
    preempted: int = 0
    room: int = 0
    drafts: int = 0

    def part(self, start: int, end: int) -> Plan:
        return Plan(self.seqs[start:end], self.counts[start:end], self.samples[start:end])


@dataclass(slots=True)
class StepResult:
    """What an executor returns, row by row of its plan; no logits.

    `token_ids[i]`: new tokens of row i, empty where it did not sample; `accepted[i]` of row i's guesses
    are among them, for each row that had any. `features[i]`, where the executor was told to keep them:
    what went into the head at each of row i's tokens, [counts[i], hidden]. `deferred` rows were not
    computed for want of memory and come again; `errors` rows failed and say why. Log-probabilities of
    a prompt come with the position of the first one.
    """

    token_ids: list[list[int]]
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprob]]] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    deferred: set[int] = field(default_factory=set)
    accepted: dict[int, int] = field(default_factory=dict)
    features: dict[int, Any] = field(default_factory=dict)
    out_of_memory: bool = False
    batched_ns: int = 0
    forwarded_ns: int = 0
    sampled_ns: int = 0
