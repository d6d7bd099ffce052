"""Requests whose right values are known by hand."""

from __future__ import annotations

from perflab.clock import NS_PER_S
from perflab.types import RequestRecord


def request(
    name: str = "r",
    intended: float = 0.0,
    first: float | None = 0.1,
    gap: float = 0.02,
    chunks: int = 10,
    per_chunk: int = 1,
    outcome: str = "completed",
    sent: float | None = None,
    first_chunk: int | None = None,
    **more,
) -> RequestRecord:
    """A request from seconds: first chunk at intended + first, then one per gap."""
    start = round(intended * NS_PER_S)
    times = [] if first is None else [start + round((first + i * gap) * NS_PER_S) for i in range(chunks)]
    sizes = [per_chunk] * len(times)
    if first_chunk is not None and sizes:
        sizes[0] = first_chunk
    return RequestRecord(
        request_id=name,
        intended_ns=start,
        sent_ns=start if sent is None else round(sent * NS_PER_S),
        prompt_tokens=8,
        first_token_ns=times[0] if times else None,
        last_token_ns=times[-1] if times else None,
        end_ns=times[-1] if times else start,
        output_tokens=sum(sizes),
        token_ns=times,
        chunk_tokens=sizes,
        outcome=outcome,
        **more,
    )
