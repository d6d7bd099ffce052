"""The records that hold the house together: what goes into an engine and what comes out.

Owns no behaviour beyond validation. Whatever ran (our engine, a remote server, the simulator),
its result is lists of `RequestRecord`, `StepRecord` and `EventRecord`; every metric, figure and
verdict is a function of these. All times are integer nanoseconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled", "deadline", "rejected", "error"]
"""Why a request ended: `stop` is an end token or a stop string, `length` its token limit."""

Outcome = Literal["completed", "rejected", "timed_out", "failed", "cancelled"]
"""How a request counts: exactly one of these, for every request that was ever submitted."""

OUTCOME_OF: Mapping[FinishReason, Outcome] = {
    "stop": "completed",
    "length": "completed",
    "cancelled": "cancelled",
    "deadline": "timed_out",
    "rejected": "rejected",
    "error": "failed",
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. The default is greedy.

    The order is fixed: logit bias, repetition penalty (Keskar et al. 2019, over prompt and
    output), presence and frequency penalties (OpenAI's, over the output), the `min_tokens` mask,
    temperature, top-k, top-p, min-p, then one draw. Log-probabilities are those of the model's
    own distribution, before any of it.

    A token stream depends on `seed` and the request's own logits alone, never on batch mates.
    Without a seed the engine draws one and keeps it in the record.

    Raises ValueError for a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 256  # None: up to the model's or the KV pool's limit
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # this many alternatives per output token; 0: the chosen one only
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0")
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "in [-2, 2]")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "in [-2, 2]")
        _require(self.n >= 1, "n", self.n, "1 or more")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"at most max_tokens ({self.max_tokens})",
        )
        _require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", self.logprobs, "0 to 20")
        _require(
            self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20,
            "prompt_logprobs",
            self.prompt_logprobs,
            "0 to 20",
        )
        _require(all(self.stop), "stop", self.stop, "non-empty strings")


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: must be {allowed}")


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a caller states it. Priorities: a lower number is served first."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = SamplingParams()
    priority: int = 0
    intended_ns: int | None = None  # when the load meant to send it; None: when it is submitted
    deadline_ns: int | None = None  # absolute, on the engine's clock
    cache_keys: tuple[tuple[str, str], ...] = ()  # tagged keys of the prefix cache: ("salt", "x"), …
    request_class: str = "default"  # SLO class of a mixed load
    spans: tuple[Span, ...] = ()  # what the caller already spent: client queue, tokenise, …


class Span(NamedTuple):
    """An exclusive segment of a request's critical path, [start_ns, end_ns)."""

    name: str
    start_ns: int
    end_ns: int


class TokenLogprob(NamedTuple):
    """Log-probability of one token at one position, with its best alternatives."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first


@dataclass(slots=True)
class TokenEvent:
    """What one step brought for one request; the last one carries `finish_reason`.

    The scheduler makes it, delivery fills in `time_ns` and `text`; from then on it is read only.
    """

    request_id: str
    token_ids: Sequence[int]
    time_ns: int = 0
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    error: Exception | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None  # with the first token; [0] is None


@dataclass(slots=True)
class RequestRecord:
    """One request, from its intended start to its end. None is missing, never 0.

    `token_ns[i]` is when the i-th chunk was delivered and `chunk_tokens[i]` how many tokens it
    brought; their sum is `output_tokens`. Step indices point into the engine's `StepRecord`s and
    are -1 where no engine of ours ran.
    """

    request_id: str
    intended_ns: int
    sent_ns: int
    prompt_tokens: int
    admitted_ns: int | None = None  # first time its tokens were in a step's plan
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    end_ns: int | None = None  # end of the stream, which may come after the last token
    output_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache at first admission
    token_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    outcome: Outcome | None = None  # None: still running
    finish_reason: FinishReason | None = None
    error: str | None = None
    preemptions: int = 0
    priority: int = 0
    request_class: str = "default"
    seed: int | None = None
    deadline_ns: int | None = None
    first_step: int = -1
    first_token_step: int = -1
    last_step: int = -1
    spans: list[Span] = field(default_factory=list)  # client_queue, tokenise, queue, requeue, …
    count_source: str = "token_ids"  # token_ids > usage > retokenised > chunks
    first_content_ns: int | None = None  # first chunk of the content channel; reasoning is not content
    server_prompt_tokens: int | None = None  # as the server counted them
    server_output_tokens: int | None = None
    retokenised_tokens: int | None = None  # of the output, with the client's tokenizer
    requested_tokens: int | None = None  # the most tokens that were asked for
    reasoning_tokens: int | None = None  # of `output_tokens`, as the server counted them
    attempts: int = 1  # sends, retries among them; the time of all is in the record
    session_id: str | None = None
    turn: int = 0  # within the session
    # Draft tokens by their place in a draft: proposed, reached (all before it accepted), accepted.
    draft_proposed: list[int] = field(default_factory=list)
    draft_reached: list[int] = field(default_factory=list)
    draft_accepted: list[int] = field(default_factory=list)
    forced_acceptance: float | None = None  # drafts were taken at this rate: not the model's output


@dataclass(slots=True)
class StepRecord:
    """One engine step, stamped around its hops; segments are exclusive and in this order.

    [start, planned) plan, [planned, batched) batch tensors, [batched, forwarded) the model,
    [forwarded, sampled) sampling and the move of results, [sampled, committed) commit,
    [committed, delivered) detokenizing and delivery, [delivered, handed) the driver's hand-over to those
    who wait for events (it holds up the next step, nobody's token; 0 where no thread drives the engine).
    """

    index: int
    start_ns: int
    planned_ns: int = 0
    batched_ns: int = 0
    forwarded_ns: int = 0
    sampled_ns: int = 0
    committed_ns: int = 0
    delivered_ns: int = 0
    rows: int = 0  # requests with tokens in the step
    prefill_tokens: int = 0  # pending tokens of rows that had more than their newest one to compute
    decode_tokens: int = 0  # of the other rows, guesses to be verified among them
    sampled_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0  # referenced by a running request
    kv_blocks_cached: int = 0  # held by the prefix cache alone, free to evict
    kv_blocks_total: int = 0
    preempted: int = 0
    failed_rows: int = 0
    handed_ns: int = 0
    draft_tokens: int = 0  # of `decode_tokens`: guesses that the step verified
    accepted_tokens: int = 0  # of these
    draft_ns: int = 0  # within [start, planned): the drafter's guessing
    verify_ns: int = 0  # [forwarded, sampled) of a step with drafts: drawing and comparing
    rollback_ns: int = 0  # within [sampled, committed): the drafter drops what was rejected


class Sample(NamedTuple):
    """One reading of a quantity that was sampled beside a run: scraped from a server or of the machine."""

    time_ns: int
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Whether the load generator kept up: it must not be what a run measures. Seconds; shares of one core.

    `loop_lag_p99_s` is how late the event loop woke up, `send_lateness_p99_s` how late requests
    were sent against their intended start, their wait for a free slot (`max_in_flight`) left out.
    """

    loop_lag_p99_s: float | None = None
    send_lateness_p99_s: float | None = None
    cpu_share: float | None = None


@dataclass(slots=True)
class EventRecord:
    """Something that happened to the service rather than to one request's tokens."""

    time_ns: int
    kind: str  # preempted, step_failed, recovered, batch_shrunk, fault, …
    subject: str
    detail: dict[str, Any] = field(default_factory=dict)
