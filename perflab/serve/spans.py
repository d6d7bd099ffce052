"""A request's critical path inside the server, from the first byte to the last token's write.

Owns which stamps make which span, and how they travel to a client. Spans are exclusive, each stamped
at both ends; what no stamp covers stays uncovered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from perflab.clock import clock_id
from perflab.measure.latency import segments
from perflab.types import RequestRecord, Span, StepRecord


def server_spans(
    record: RequestRecord, steps: Sequence[StepRecord], around: Iterable[Span]
) -> tuple[list[Span], list[int]]:
    """Spans of one sample in order of time, and the indices of its steps.

    The record holds what came before its first step (receive, parse, tokenise, queue) and the steps what
    followed; `around` is what the engine does not stamp (hand_over, hand_back, serialise, write).
    """
    base = steps[0].index if steps else 0
    own = (
        steps[max(0, record.first_step - base) : record.last_step + 1 - base]
        if record.first_step >= 0
        else []
    )
    spans = [*segments(record, own), *around]
    return sorted(spans, key=lambda span: span.start_ns), [step.index for step in own]


def as_extra(spans: Sequence[Span], indices: Sequence[int]) -> dict[str, Any]:
    """What a client finds under `perflab` in the chunk or body that has `usage`."""
    return {"clock_id": clock_id(), "spans": spans, "step_indices": indices}


def server_timing(spans: Iterable[Span]) -> bytes:
    """A Server-Timing header (W3C): milliseconds by span name, in the order of their first appearance."""
    total: dict[str, int] = {}
    for span in spans:
        total[span.name] = total.get(span.name, 0) + span.end_ns - span.start_ns
    return ", ".join(f"{name.replace(' ', '_')};dur={ns / 1e6:.3f}" for name, ns in total.items()).encode()
