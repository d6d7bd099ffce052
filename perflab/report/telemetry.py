"""What was sampled beside a run, and what its requests amount to over time, as traces of a timeline.

Owns which sampled quantity belongs to which panel. Pure: a run in, plotly traces out.
"""

from __future__ import annotations

from typing import Any

from perflab.studies.store import Run


def token_rate(run: Run, origin: int) -> list[Any]:
    """Output tokens/s in equal bins, tokens and not chunks, for runs without steps of their own."""
    return []


def in_flight(run: Run, origin: int) -> list[Any]:
    """Requests with and without a first token as the client sees them, and what the server says of itself."""
    return []


def kv_use(run: Run, origin: int) -> list[Any]:
    """The share of the KV cache that a server says it uses."""
    return []


def machine(run: Run, origin: int) -> list[Any]:
    """Processor and GPU utilisation, and whatever else was sampled in per cent of something."""
    return []
