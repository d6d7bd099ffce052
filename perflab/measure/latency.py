"""Where a request's time goes: exclusive stamped segments from intended start to last token.

Owns the decomposition of E2E into named segments and its residual. Works on records alone; no
segment is computed as a difference of others, so the residual is real, and it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perflab.clock import NS_PER_S
from perflab.types import RequestRecord, Span, StepRecord

SEGMENTS = (
    "client queue",
    "tokenise",
    "queue",
    "requeue",
    "schedule",
    "batch",
    "prefill forward",
    "decode forward",
    "sample",
    "commit",
    "detokenise",
)
"""In the order of a request's life. `prefill forward` is the model's time up to the step of the first
token, `decode forward` after it; the queue ends when the first step that holds the request starts."""

SPAN_SEGMENT = {"client_queue": "client queue"}
"""Span names of a record that read differently in a report; all others keep their name."""


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


def decompose(
    record: RequestRecord, steps: Sequence[StepRecord] | Mapping[int, StepRecord]
) -> Decomposition | None:
    """Split last token − intended start into spans and step segments.

    Steps from `first_step` to `last_step` belong to the request, but for those inside a `requeue`
    span (it was preempted then). The last step is cut off at the delivery of the last token. None
    for a request without a token.
    """
    if record.last_token_ns is None:
        return None
    by_index = steps if isinstance(steps, Mapping) else index_steps(steps)
    end = record.last_token_ns
    found: dict[str, int] = {}

    def add(name: str, start_ns: int, end_ns: int) -> None:
        length = min(end_ns, end) - start_ns
        if length > 0:
            found[name] = found.get(name, 0) + length

    for span in record.spans:
        add(SPAN_SEGMENT.get(span.name, span.name), span.start_ns, span.end_ns)
    away = [span for span in record.spans if span.name == "requeue"]
    for index in range(record.first_step, record.last_step + 1) if record.first_step >= 0 else ():
        step = by_index.get(index)
        if step is None or _inside(step.start_ns, away):
            continue
        forward = "prefill forward" if index <= record.first_token_step else "decode forward"
        add("schedule", step.start_ns, step.planned_ns)
        add("batch", step.planned_ns, step.batched_ns)
        add(forward, step.batched_ns, step.forwarded_ns)
        add("sample", step.forwarded_ns, step.sampled_ns)
        add("commit", step.sampled_ns, step.committed_ns)
        add("detokenise", step.committed_ns, step.delivered_ns)
    return Decomposition(
        record.request_id,
        (end - record.intended_ns) / NS_PER_S,
        {name: found[name] / NS_PER_S for name in ordered(found)},
    )


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
