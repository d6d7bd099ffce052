"""How much load a service bears: points of a sweep, the capacity within limits, the knee, the frontier.

Owns the definitions. A point is what the requests of one run at one level of load amount to; levels are
requests per second (open loop) or users (closed loop). Sends nothing and chooses no level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from perflab.clock import NS_PER_S
from perflab.measure import metrics
from perflab.measure.stats import Estimate
from perflab.types import RequestRecord

By = Literal["rate", "users"]
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

OVERLOAD = frozenset({"failures", "no steady state"})
"""Reasons of a verdict that are the service's answer to the load. They make a point a miss, not unusable."""

FORMULAS: dict[str, str] = {
    "capacity": "the highest level at which the wanted share of the requests met every SLO, failures being "
    "misses, the shares made to fall with the level (pooled adjacent violators, Ayer et al. 1955). Its "
    "interval is the last level that met and the first that missed.",
    "knee": "the level with the most power, achieved requests/s ÷ P99 of E2E (Kleinrock 1979), P99 made to "
    "rise with the level (pooled adjacent violators): where the line from the origin touches the curve of "
    "latency over throughput. Its interval spans the levels whose power, by the lower bound of their P99, "
    "reaches the best one's.",
    "saturation": "the highest rate of completions that any usable point reached.",
    "frontier": "points than which no other is both faster (P99 of E2E) and of more completions per second.",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One run at one level. Rates are per second, latencies seconds; +inf is a share that never ended.

    offered: requests per second that were to be sent; rate: completed, over the steady window where
    there is one; attained: share of requests within every SLO (None without SLOs).
    """

    level: float
    samples: int
    offered: float | None
    rate: float | None
    tokens_per_s: float | None
    latencies: dict[str, dict[str, Estimate]]
    goodput_per_s: float | None = None
    attained: Estimate | None = None
    seconds: float = 0.0
    reasons: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    run: str = ""

    @property
    def p99_s(self) -> float | None:
        """P99 of E2E, failures as +inf."""
        return self.latencies["E2E"]["p99"].value

    @property
    def usable(self) -> bool:
        """Whether the measurement can be trusted, whatever it says about the service."""
        return bool(self.samples) and all(name in OVERLOAD for name, _ in self.reasons)

    @property
    def slack(self) -> float:
        """How many times lower P99 of E2E may be by its interval."""
        estimate = self.latencies["E2E"]["p99"]
        finite = estimate.value and estimate.low and math.isfinite(estimate.value)
        return estimate.value / estimate.low if finite and estimate.value and estimate.low else 1.0


def point(
    records: Sequence[RequestRecord],
    level: float,
    slo: metrics.SLO | None = None,
    reasons: Sequence[Sequence[str]] = (),
    notes: Sequence[str] = (),
    run: str = "",
) -> Point:
    """What the requests of one run say about its level."""
    whole = metrics.throughput(records)
    rate = metrics.steady_throughput(records) or whole
    starts = [r.intended_ns for r in records]
    window = (max(starts) - min(starts)) / NS_PER_S if starts else 0.0
    reached = metrics.goodput(records, slo) if slo is not None else None
    return Point(
        level,
        len(metrics.counted(records)),
        (len(records) - 1) / window if window > 0 else None,
        rate.requests_per_s if rate else None,
        rate.output_tokens_per_s if rate else None,
        {name: {q: of(records, share) for q, share in QUANTILES.items()} for name, of in _LATENCIES.items()},
        reached.requests_per_s if reached else None,
        reached.share if reached else None,
        whole.seconds if whole else 0.0,
        tuple((name, detail) for name, detail in reasons),
        tuple(notes),
        run,
    )


_LATENCIES = {name: metrics.LATENCIES[name] for name in ("TTFT", "TPOT", "E2E")}


@dataclass(frozen=True, slots=True)
class Found:
    """A level with its interval; None bounds: no point on that side."""

    level: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""


def met(point: Point, wanted: float) -> bool:
    """Whether the wanted share of its requests was within every SLO."""
    return point.attained is not None and (point.attained.value or 0.0) >= wanted


def usable(points: Sequence[Point], allow_invalid: bool = False) -> list[Point]:
    """The points that count, by level; of several at one level the one with the most samples."""
    best: dict[float, Point] = {}
    for one in points:
        held = best.get(one.level)
        if (one.usable or (allow_invalid and one.samples)) and (held is None or one.samples > held.samples):
            best[one.level] = one
    return [best[level] for level in sorted(best)]


def attainment(points: Sequence[Point]) -> list[float]:
    """The share within the SLOs at each level, made to fall with the level; `points` in order of level.

    A chance miss below levels that met is averaged with them instead of ending the search.
    """
    shares = [-(p.attained.value or 0.0) if p.attained else 0.0 for p in points]
    return [-share for share in rising(shares, [p.samples for p in points])]


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest values that never fall, by weighted squares: pooled adjacent violators (Ayer et al.
    1955)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, float(weight), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (b, m, j), (a, n, i) = pools.pop(), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m, i + j))
    return [mean for mean, _, count in pools for _ in range(count)]


def capacity(points: Sequence[Point], wanted: float) -> Found:
    """The highest level whose `attainment` is the wanted one; `points` are usable and in order of level."""
    judged = [p for p in points if p.attained is not None]
    if not judged:
        reason = "no limits were given, so no level can miss them" if points else "no usable point"
        return Found(None, reason=reason)
    shares = attainment(judged)
    passed = [p.level for p, share in zip(judged, shares, strict=True) if share >= wanted]
    missed = [p.level for p, share in zip(judged, shares, strict=True) if share < wanted]
    if not passed:
        return Found(None, high=missed[0], reason="the lowest level misses the limits already")
    reason = "" if missed else "every level that was tried meets the limits: it is higher"
    if any(met(p, wanted) != (p.level <= passed[-1]) for p in judged):
        reason = (
            "some levels met and missed out of order: near the edge chance decides, more samples would tell"
        )
    return Found(passed[-1], passed[-1], missed[0] if missed else None, reason)


def knee(points: Sequence[Point]) -> Found:
    """The level with the most power; `points` are usable and in order of level.

    power = achieved requests/s ÷ P99 of E2E (L. Kleinrock, Power and deterministic rules of thumb for
    probabilistic problems in computer communications, ICC 1979). It has no factor to choose and doesn't
    depend on how far beyond the knee was measured, as normalised curves do. P99 of few samples jumps, so
    its logarithm is first made to rise with the level.
    """
    if len(points) < 3:
        return Found(None, reason=f"{len(points)} usable points; three at least show a knee")
    known = [p.p99_s for p in points if p.p99_s and math.isfinite(p.p99_s)]
    if not known:
        return Found(None, reason="no point completed 99 % of its requests")
    lost = 10 * max(known)  # stands for an infinite P99
    logs = [math.log(p.p99_s if p.p99_s and math.isfinite(p.p99_s) else lost) for p in points]
    smooth = [math.exp(x) for x in rising(logs, [p.samples for p in points])]
    powers = [min(p.rate or 0.0, p.offered or math.inf) / p99 for p, p99 in zip(points, smooth, strict=True)]
    at = max(range(len(points)), key=lambda i: powers[i])
    near = [p.level for p, power in zip(points, powers, strict=True) if power * p.slack >= powers[at]]
    reason = ""
    if at == len(points) - 1:
        reason = "the highest level has the most power: the knee may lie beyond it"
    elif at == 0:
        reason = "the lowest level has the most power: the knee may lie below it"
    return Found(points[at].level, min(near), max(near), reason)


def saturation(points: Sequence[Point]) -> float | None:
    """The highest rate of completions, requests/s."""
    return max((p.rate for p in points if p.rate is not None), default=None)


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points that no other one beats in P99 of E2E and in rate, slowest rate first."""
    known = [p for p in points if p.rate is not None and p.p99_s is not None and math.isfinite(p.p99_s)]
    kept: list[Point] = []
    for one in sorted(known, key=lambda p: (-(p.rate or 0.0), p.p99_s or 0.0)):
        if not kept or (one.p99_s or 0.0) < (kept[-1].p99_s or 0.0):
            kept.append(one)
    return kept[::-1]


def low_load_p99_s(points: Sequence[Point]) -> float | None:
    """P99 of E2E where there is hardly any load: the lowest over the lower half of the levels."""
    lower = points[: max(1, len(points) // 2)]
    return min((p.p99_s for p in lower if p.p99_s is not None), default=None)


def beyond(point: Point, low_load_s: float | None, by: By) -> bool:
    """Whether a point is past the knee for certain, so that higher ones only repeat it.

    An open loop: completions stay 10 % behind what was offered, or P99 of E2E is five times that
    without load. A closed loop cannot fall behind: five times alone.
    """
    late = point.p99_s is None or (low_load_s is not None and point.p99_s > 5 * low_load_s)
    behind = by == "rate" and point.offered is not None and (point.rate or 0.0) < 0.9 * point.offered
    return late or behind
