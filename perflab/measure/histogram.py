"""Percentiles from a server's own histograms: bounds, because buckets hold nothing finer.

Owns the reading of Prometheus buckets. Scrapes nothing: samples in, bounds out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perflab.types import Sample


@dataclass(frozen=True, slots=True)
class Bounds:
    """The q-quantile lies in (low, high]; `low` is None in the first bucket, `high` +inf in the last."""

    low: float | None
    high: float
    n: int

    def __str__(self) -> str:
        if self.low is None:
            return f"<= {self.high:g}"
        return f"> {self.low:g}" if math.isinf(self.high) else f"{self.low:g} to {self.high:g}"


def percentile(buckets: Sequence[tuple[float, float]], q: float) -> Bounds | None:
    """The bucket that holds the ⌈nq⌉-th of n samples; None for an empty histogram.

    buckets: (upper bound, samples at or below it), cumulative as Prometheus has them, the last bound
    +inf. PromQL's `histogram_quantile` interpolates inside the bucket, in the first one from 0: samples
    that all took between 9 and 10 ms then read as 5.
    Raises ValueError for a q outside (0, 1) and for counts that fall.
    """
    if not 0 < q < 1:
        raise ValueError(f"q={q}: a quantile lies strictly between 0 and 1 (0.99 for the 99th percentile)")
    ordered = sorted(buckets)
    counts = [count for _, count in ordered]
    if any(b < a for a, b in itertools.pairwise(counts)):
        raise ValueError(f"bucket counts {counts} fall: cumulative counts are needed")
    if not counts or counts[-1] <= 0:
        return None
    rank = max(1, math.ceil(counts[-1] * q - 1e-9))
    at = next(i for i, count in enumerate(counts) if count >= rank)
    return Bounds(ordered[at - 1][0] if at else None, ordered[at][0], int(counts[-1]))


def of_run(samples: Iterable[Sample], name: str) -> list[tuple[float, float]]:
    """What a histogram counted while samples of `name`_bucket were taken: last reading − first, summed
    over all other labels. A counter that fell was reset by a restart and counts from 0 (as PromQL's
    `increase` has it)."""
    lines: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        if sample.name == f"{name}_bucket" and "le" in sample.labels:
            lines.setdefault(tuple(sorted(sample.labels.items())), []).append(sample)
    totals: dict[float, float] = {}
    for labels, readings in lines.items():
        values = [s.value for s in sorted(readings, key=lambda s: s.time_ns)]
        grown = sum(b - a if b >= a else b for a, b in itertools.pairwise(values))
        bound = float(dict(labels)["le"])
        totals[bound] = totals.get(bound, 0.0) + grown
    return sorted(totals.items())


def percentiles(samples: Iterable[Sample], name: str, qs: Sequence[float]) -> Mapping[float, Bounds | None]:
    """Several quantiles of a histogram over a run."""
    buckets = of_run(samples, name)
    return {q: percentile(buckets, q) for q in qs}
