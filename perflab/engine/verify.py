"""Which guesses of a step the model would have made itself, and the token that follows them.

Sample and compare: at each place of a draft the row's own sampler draws the token, with the same uniform
of seed and position as without a draft. While the draw equals the guess, the next place's logits count;
the first other draw is kept and the rest of the draft is dropped. So a request's tokens are those of the
run without drafts, whatever it asks of the sampler, and a fixed guess x is accepted with the target's own
probability p(x): the most that any exact rule can reach (Leviathan et al. 2023, with q(x) = 1).
Owns nothing. Knows no drafters.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

from torch import Tensor

from perflab.engine.logits import SamplingRow
from perflab.engine.sampler import best_of, sample, uniform
from perflab.engine.sequence import Sequence
from perflab.models.runner import Best
from perflab.types import SamplingParams, TokenLogprob

_FORCE = 1  # the stream of uniforms that force acceptance


class Verified(NamedTuple):
    """Per row: its new tokens, log-probabilities of each where asked for, and how many guesses are among
    them. `bad_rows` have no token: their logits are not finite, or no token is left to choose."""

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprob]]
    accepted: list[int]
    bad_rows: list[int]


class _Ahead:
    """A sequence as the sampler sees it once the first guesses of its draft count as output."""

    __slots__ = ("_count", "_seq")

    def __init__(self, seq: Sequence, count: int) -> None:
        self._seq, self._count = seq, count

    @property
    def params(self) -> SamplingParams:
        return self._seq.params

    @property
    def seed(self) -> int:
        return self._seq.seed

    @property
    def tokens(self) -> list[int]:
        return [*self._seq.tokens, *self._seq.draft[: self._count]]

    @property
    def num_prompt_tokens(self) -> int:
        return self._seq.num_prompt_tokens

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._seq.stop_token_ids


def verify(
    logits: Tensor, seqs: Rows[Sequence], starts: Rows[int], best: Best | None, forced: float | None = None
) -> Verified:
    """The new tokens of `seqs` from logits [count, vocab]; row i's are those from `starts[i]` on, one more
    than it has guesses. forced: accept this share of the guesses, whatever the model draws."""
    if best is None:
        best = best_of(logits)
    token_ids: list[list[int]] = [[] for _ in seqs]
    logprobs: list[list[TokenLogprob]] = [[] for _ in seqs]
    accepted = [0] * len(seqs)
    bad: list[int] = []
    alive, place = list(range(len(seqs))), 0
    while alive:
        rows: list[SamplingRow] = [_Ahead(seqs[i], place) if place else seqs[i] for i in alive]
        drawn = sample(logits, rows, best, [starts[i] + place for i in alive])
        going = []
        for index, i in enumerate(alive):
            if index in drawn.bad_rows:
                if not place:  # else the guesses before it stand, and the next step meets it again
                    bad.append(i)
                continue
            token, draft = drawn.token_ids[index], seqs[i].draft
            if place < len(draft):
                take = token == draft[place] if forced is None else _taken(seqs[i], place, forced)
                if take:
                    token = draft[place]
                    accepted[i] += 1
                    going.append(i)
            token_ids[i].append(token)
            logprob = drawn.logprobs[index]
            if logprob is not None:
                logprobs[i].append(logprob)
        alive, place = going, place + 1
    return Verified(token_ids, logprobs, accepted, bad)


def _taken(seq: Sequence, place: int, share: float) -> bool:
    return uniform(seq.seed, seq.num_output_tokens + place, _FORCE) < share
