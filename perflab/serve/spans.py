"""A request's critical path inside the server, from the first byte to the last token's write.

Owns which stamps make which span, and how they travel to a client. Spans are exclusive, each stamped
at both ends; what no stamp covers stays uncovered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from perflab.clock import clock_id
from perflab.types import RequestRecord, Span, StepRecord


def server_spans(
    record: RequestRecord, steps: Sequence[StepRecord], after: Iterable[Span]
) -> tuple[list[Span], list[int]]:
    """Spans of one sample in order of time, and the indices of its steps.

    record.spans hold what came before its first step (receive, parse, tokenise, hand_over, queue) and
    where it was preempted; `after` is what came after its last (hand_back, serialise, write).
    """
    spans, indices = list(record.spans), []
    end = record.last_token_ns or 0
    away = [span for span in record.spans if span.name == "requeue"]
    first = record.first_step - steps[0].index if steps else 0
    if record.first_step >= 0:
        for step in steps[max(0, first) : max(0, first + record.last_step + 1 - record.first_step)]:
            if any(span.start_ns <= step.start_ns < span.end_ns for span in away):
                continue
            indices.append(step.index)
            forward = "prefill forward" if step.index <= record.first_token_step else "decode forward"
            spans += (
                Span("schedule", step.start_ns, step.planned_ns),
                Span("batch", step.planned_ns, step.batched_ns),
                Span(forward, step.batched_ns, step.forwarded_ns),
                Span("sample", step.forwarded_ns, step.sampled_ns),
                Span("commit", step.sampled_ns, step.committed_ns),
                Span("detokenise", step.committed_ns, min(step.delivered_ns, end)),
            )
    spans += after
    return sorted(spans, key=lambda span: span.start_ns), indices


def as_extra(spans: Sequence[Span], indices: Sequence[int]) -> dict[str, Any]:
    """What a client finds under `perflab` in the chunk or body that has `usage`."""
    return {"clock_id": clock_id(), "spans": spans, "step_indices": indices}


def server_timing(spans: Iterable[Span]) -> bytes:
    """A Server-Timing header (W3C): milliseconds by span name, in the order of their first appearance."""
    total: dict[str, int] = {}
    for span in spans:
        total[span.name] = total.get(span.name, 0) + span.end_ns - span.start_ns
    return ", ".join(f"{name.replace(' ', '_')};dur={ns / 1e6:.3f}" for name, ns in total.items()).encode()
