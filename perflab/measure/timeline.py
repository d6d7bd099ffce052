"""What a run did over time, as arrays on one axis: requests, tokens, KV use.

Owns the division of time and what falls into each part. Draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perflab.clock import NS_PER_S
from perflab.measure.rates import throughput
from perflab.types import RequestRecord, Sample, StepRecord

MAX_PARTS = 2000


@dataclass(frozen=True, slots=True)
class Timeline:
    """Equal parts of a run, [edges[i], edges[i + 1]) in seconds since the first intended start.

    in_flight and without_token: requests sent and not ended, and those of them whose first token had
    not come, time-weighted means over each part. tokens_per_s: delivered tokens, not chunks.
    """

    edges_s: np.ndarray  # [n + 1]
    in_flight: np.ndarray  # [n]
    without_token: np.ndarray  # [n]
    tokens_per_s: np.ndarray  # [n]

    @property
    def peak_tokens_per_s(self) -> float:
        """Of the busiest part. Since parts are equal and cover the run, never below the run's mean."""
        return float(self.tokens_per_s.max())


def timeline(records: Sequence[RequestRecord], part_s: float = 1.0) -> Timeline | None:
    """A run in equal parts of at most `part_s` seconds (of more where that gave more than 2,000); None
    for a run without requests or without extent."""
    whole = throughput(records)
    if whole is None:
        return None
    parts = min(MAX_PARTS, max(1, math.ceil(whole.seconds / part_s - 1e-9)))
    edges = np.linspace(0, whole.end_ns - whole.start_ns, parts + 1)
    times = np.array([t for r in records for t in r.token_ns], dtype=np.int64) - whole.start_ns
    tokens = np.array([n for r in records for n in r.chunk_tokens], dtype=float)
    held, _ = np.histogram(times, edges, weights=tokens)
    end = whole.end_ns
    sent = [(r.sent_ns, r.end_ns or r.last_token_ns or end) for r in records]
    first = [
        (start, min(stop, r.first_token_ns or stop)) for r, (start, stop) in zip(records, sent, strict=True)
    ]
    return Timeline(
        edges / NS_PER_S,
        _present(sent, whole.start_ns, edges),
        _present(first, whole.start_ns, edges),
        held / ((edges[1] - edges[0]) / NS_PER_S),
    )


def _present(spans: Sequence[tuple[int, int]], origin: int, edges: np.ndarray) -> np.ndarray:
    """Mean number of [start, end) that hold, in each part: the difference of their integral at its edges."""

    def passed(moments: Sequence[int]) -> np.ndarray:
        """Time since each moment, summed over the moments gone by, at each edge."""
        gone = np.sort(np.array(moments, dtype=np.int64) - origin)
        count = np.searchsorted(gone, edges)
        return count * edges - np.concatenate(([0.0], np.cumsum(gone)))[count]

    integral = passed([start for start, _ in spans]) - passed([stop for _, stop in spans])
    return np.diff(integral) / np.diff(edges)


def of_steps(steps: Sequence[StepRecord], edges_s: np.ndarray, origin_ns: int) -> dict[str, np.ndarray]:
    """Running, waiting and the share of KV blocks in use after the last step of each part; a part
    without a step keeps the value before it, NaN before the first."""
    ends = np.array([s.delivered_ns for s in steps], dtype=np.int64)
    use = [s.kv_blocks_used / s.kv_blocks_total if s.kv_blocks_total else math.nan for s in steps]
    return {
        "running": _held(ends - origin_ns, [s.running for s in steps], edges_s),
        "waiting": _held(ends - origin_ns, [s.waiting for s in steps], edges_s),
        "kv_use": _held(ends - origin_ns, use, edges_s),
    }


def of_samples(samples: Sequence[Sample], edges_s: np.ndarray, origin_ns: int) -> np.ndarray:
    """One sampled quantity, as `of_steps` holds its own: the newest reading of each part."""
    ordered = sorted(samples, key=lambda s: s.time_ns)
    times = np.array([s.time_ns for s in ordered], dtype=np.int64) - origin_ns
    return _held(times, [s.value for s in ordered], edges_s)


def _held(times_ns: np.ndarray, values: Sequence[float], edges_s: np.ndarray) -> np.ndarray:
    newest = np.searchsorted(times_ns, edges_s[1:] * NS_PER_S, side="right") - 1
    known = np.array([math.nan, *values], dtype=float)
    return known[newest + 1]
