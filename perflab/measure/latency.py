"""Where a request's time goes: exclusive stamped segments from intended start to last token.

Owns the decomposition of E2E into named segments and its residual. Works on records alone; no
segment is computed as a difference of others, so the residual is real, and it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perflab.clock import NS_PER_S
from perflab.measure.stats import percentile_value
from perflab.types import RequestRecord, Span, StepRecord

SEGMENTS = (
    "client queue",
    "tokenise",
    "retry",
    "connect",
    "network up",
    "receive",
    "parse",
    "server tokenise",
    "hand over",
    "queue",
    "requeue",
    "schedule",
    "batch",
    "prefill forward",
    "decode forward",
    "sample",
    "commit",
    "detokenise",
    "hand on",
    "hand back",
    "serialise",
    "write",
    "network down",
    "send",
    "unattributed",
)
"""In the order of a request's life. `prefill forward` is the model's time up to the step of the first
token, `decode forward` after it; the queue ends when the first step that holds the request starts.
`network up` is from the start of the send to the server's first stamp and `network down` from its last
write to the last token's arrival: both ends are stamped, by two processes on one clock. `unattributed`
is what a server with a clock of its own took."""

SPAN_SEGMENT = {
    "client_queue": "client queue",
    "server.tokenise": "server tokenise",
    "server.hand_over": "hand over",
    "server.hand_back": "hand back",
    "server_wait": "unattributed",
    "first_byte": "unattributed",
    "stream": "unattributed",
}
"""Span names of a record that read differently in a report; all others keep their name, without `server.`"""

SERVER = "server."
CROSSING = ("send", "server_wait", "first_byte", "stream")
"""The client's spans from the send on; the server's own say more where they are known."""

LAST_WORDS = ("server.serialise", "server.write")


@dataclass(frozen=True, slots=True)
class Decomposition:
    """One request's E2E, seconds by segment; `residual` is what no stamp covers (may be negative
    where stamps overlap)."""

    request_id: str
    e2e_s: float
    segments: Mapping[str, float]

    @property
    def residual_s(self) -> float:
        """E2E − sum of the segments, seconds."""
        return self.e2e_s - sum(self.segments.values())


def segments(record: RequestRecord, steps: Sequence[StepRecord] | Mapping[int, StepRecord]) -> list[Span]:
    """A request's way from its intended start to its last token as exclusive segments, in order of time.

    Steps from `first_step` to `last_step` belong to the request, but for those inside a `requeue`
    span (it was preempted then). Nothing reaches beyond the last token. Where the record holds a
    server's spans, these and the network on both sides stand for the client's wait. Empty for a
    request without a token.
    """
    if record.last_token_ns is None:
        return []
    by_index = steps if isinstance(steps, Mapping) else index_steps(steps)
    served = sorted((s for s in record.spans if s.name.startswith(SERVER)), key=lambda s: s.start_ns)
    own = [s for s in record.spans if not s.name.startswith(SERVER)]
    found = [*_crossed(own, served, record.last_token_ns), *_stepped(record, by_index)]
    end = record.last_token_ns
    cut = (Span(s.name, s.start_ns, min(s.end_ns, end)) for s in found)
    return sorted((s for s in cut if s.end_ns > s.start_ns), key=lambda s: s.start_ns)


def _crossed(own: Sequence[Span], served: Sequence[Span], end: int) -> list[Span]:
    """The client's spans, and the server's between the two ways over the network."""
    if not served:
        return [_named(s) for s in own]
    sent = min((s.start_ns for s in own if s.name in CROSSING), default=served[0].start_ns)
    found = [_named(s) for s in own if s.name not in CROSSING]
    found.append(Span("network up", sent, served[0].start_ns))
    found += [_named(s) for s in served]
    if any(s.name in LAST_WORDS for s in served):
        found.append(Span("network down", max(s.end_ns for s in served), end))
    return found


def _named(span: Span) -> Span:
    return span._replace(name=SPAN_SEGMENT.get(span.name, span.name.removeprefix(SERVER)))


def _stepped(record: RequestRecord, steps: Mapping[int, StepRecord]) -> list[Span]:
    """The hops of the steps that held the request, where the engine is in this process."""
    found: list[Span] = []
    away = [span for span in record.spans if span.name == "requeue"]
    for index in range(record.first_step, record.last_step + 1) if record.first_step >= 0 else ():
        step = steps.get(index)
        if step is None or _inside(step.start_ns, away):
            continue
        forward = "prefill forward" if index <= record.first_token_step else "decode forward"
        found += (
            Span("schedule", step.start_ns, step.planned_ns),
            Span("batch", step.planned_ns, step.batched_ns),
            Span(forward, step.batched_ns, step.forwarded_ns),
            Span("sample", step.forwarded_ns, step.sampled_ns),
            Span("commit", step.sampled_ns, step.committed_ns),
            Span("detokenise", step.committed_ns, step.delivered_ns),
            Span("hand on", step.delivered_ns, step.handed_ns),
        )
    return found


def decompose(
    record: RequestRecord, steps: Sequence[StepRecord] | Mapping[int, StepRecord] = ()
) -> Decomposition | None:
    """Split last token − intended start into the `segments` of its kinds; None for a request without
    a token."""
    if record.last_token_ns is None:
        return None
    found: dict[str, int] = {}
    for span in segments(record, steps):
        found[span.name] = found.get(span.name, 0) + span.end_ns - span.start_ns
    return Decomposition(
        record.request_id,
        (record.last_token_ns - record.intended_ns) / NS_PER_S,
        {name: found[name] / NS_PER_S for name in ordered(found)},
    )


@dataclass(frozen=True, slots=True)
class Closing:
    """How well stamps cover the latency of many requests: |residual| / E2E, a share."""

    requests: int
    median: float
    p99: float


def closing(parts: Sequence[Decomposition]) -> Closing | None:
    """Median and 99th percentile (inverse empirical distribution) of |residual| / E2E; None for none."""
    shares = [abs(part.residual_s) / part.e2e_s for part in parts if part.e2e_s > 0]
    if not shares:
        return None
    return Closing(len(shares), percentile_value(shares, 0.5), percentile_value(shares, 0.99))


def _inside(time_ns: int, spans: Iterable[Span]) -> bool:
    return any(span.start_ns <= time_ns < span.end_ns for span in spans)


def index_steps(steps: Iterable[StepRecord]) -> dict[int, StepRecord]:
    """Steps by their index, to decompose many requests of one run."""
    return {step.index: step for step in steps}


def ordered(names: Iterable[str]) -> list[str]:
    """Segment names in the order of a request's life, unknown ones last."""
    rank = {name: i for i, name in enumerate(SEGMENTS)}
    return sorted(set(names), key=lambda name: (rank.get(name, len(rank)), name))


def average(records: Iterable[RequestRecord], steps: Sequence[StepRecord]) -> Decomposition | None:
    """The mean over completed requests, segment by segment; None where none completed."""
    by_index = index_steps(steps)
    parts = [d for r in records if r.outcome == "completed" and (d := decompose(r, by_index)) is not None]
    return average_of(parts)


def average_of(parts: Sequence[Decomposition]) -> Decomposition | None:
    """Mean of decompositions; a segment that a request does not have counts as 0 s of its time."""
    if not parts:
        return None
    names = ordered(name for part in parts for name in part.segments)
    return Decomposition(
        "average",
        sum(part.e2e_s for part in parts) / len(parts),
        {name: sum(part.segments.get(name, 0.0) for part in parts) / len(parts) for name in names},
    )


STEP_SEGMENTS = ("schedule", "batch", "forward", "sample", "commit", "detokenise")


def step_shares(steps: Iterable[StepRecord]) -> dict[str, float] | None:
    """Share of all steps' time by hop; their sum is 1. None where no step has extent."""
    totals = dict.fromkeys(STEP_SEGMENTS, 0)
    for s in steps:
        stamps = (
            s.start_ns,
            s.planned_ns,
            s.batched_ns,
            s.forwarded_ns,
            s.sampled_ns,
            s.committed_ns,
            s.delivered_ns,
        )
        for name, begin, end in zip(STEP_SEGMENTS, stamps, stamps[1:], strict=False):
            totals[name] += end - begin
    whole = sum(totals.values())
    return {name: value / whole for name, value in totals.items()} if whole else None
