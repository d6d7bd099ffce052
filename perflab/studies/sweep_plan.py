"""Which level of load a sweep measures next, and for how long: a ladder, then bisection.

Owns the arithmetic. Stateless: everything follows from the points that are there, so a sweep that was
interrupted goes on where it stopped. Measures nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perflab.measure import capacity
from perflab.measure.capacity import By, Point

LOWEST, HIGHEST = 0.2, 1.6
"""Rates of the ladder as multiples of the estimated saturation: from well below to beyond the knee."""

MOST_USERS = 512
EDGE = 1.05
"""The capacity is known when the first miss is at most this many times the last level that met."""

KNEE_EDGE = 1.12
RETRY_SAMPLES = 2.0
"""How many times as long a point is measured again whose verdict was invalid."""


class Turn(NamedTuple):
    """What to measure next: `longer` multiplies a point's usual seconds."""

    level: float
    why: str
    longer: float = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a sweep is about: levels of what, the first ladder, and the share that must meet the SLOs
    (None: no SLO, so only the knee is looked for). `fixed`: the ladder is all that is asked for."""

    by: By
    ladder: tuple[float, ...]
    wanted: float | None
    allow_invalid: bool = False
    fixed: bool = False


def rate_ladder(saturation: float, slowest: float, points: int) -> tuple[float, ...]:
    """Geometric rates from well below to beyond the estimated saturation, requests/s.

    slowest: the rate of one user who never waits; a service that gains nothing from company has its
    knee there, so the ladder starts below it too.
    """
    low, high = LOWEST * saturation, HIGHEST * saturation
    low = min(low, 0.5 * slowest) if slowest > 0 else low
    low = max(low, high / 30)  # a point that takes an hour for its samples says nothing more
    step = (high / low) ** (1 / (points - 1))
    return tuple(float(f"{low * step**i:.4g}") for i in range(points))


def users_ladder(points: int, most: int = MOST_USERS) -> tuple[float, ...]:
    """1, 2, 4, … users."""
    return tuple(float(min(2**i, most)) for i in range(points) if 2**i <= most)


def next_turn(points: Sequence[Point], shape: Shape) -> Turn | None:
    """The level that teaches most, or None where nothing is left to learn.

    The ladder upwards until two usable points in a row are beyond the knee; then further up or down
    where it didn't reach both sides; then levels that missed below others that met; then halves of the
    interval that holds the edge of the SLOs; then of the gaps beside the knee. A level whose points are
    all invalid is tried once again.
    """
    tried = sorted({p.level for p in points})
    good = capacity.usable(points, shape.allow_invalid)
    base = capacity.low_load_p99_s(good)
    far = [capacity.beyond(p, base, shape.by) for p in good]
    full = not shape.fixed and len(far) >= 2 and far[-1] and far[-2]
    if not full:
        for level in shape.ladder:
            if level not in tried and (not good or level > min(p.level for p in good)):
                return Turn(level, "ladder")
    if turn := _again(points, good):
        return turn
    if not good or shape.fixed:
        return None
    up = not far[-1] and len(tried) < len(shape.ladder) + 4
    if up and (turn := _fresh(_times(good[-1].level, 1.5, shape), tried, "further up, to find the end")):
        return turn
    down = far[0] or (shape.wanted is not None and not capacity.met(good[0], shape.wanted))
    if down and (turn := _fresh(_times(good[0].level, 0.4, shape), tried, "further down, to find the start")):
        return turn
    return _odd(points, good, shape) or _edge(good, tried, shape) or _beside_knee(good, tried, shape)


def _again(points: Sequence[Point], good: Sequence[Point]) -> Turn | None:
    """A level without a usable point that was tried once."""
    known = {p.level for p in good}
    levels = [p.level for p in points]
    for p in points:
        if p.level not in known and levels.count(p.level) == 1:
            return Turn(
                p.level,
                f"again, with more samples: {p.reasons[0][0] if p.reasons else 'no samples'}",
                RETRY_SAMPLES,
            )
    return None


def _odd(points: Sequence[Point], good: Sequence[Point], shape: Shape) -> Turn | None:
    """A level, tried once, that missed although a higher one met: a moment's disturbance, or the edge."""
    if shape.wanted is None:
        return None
    highest = max((p.level for p in good if capacity.met(p, shape.wanted)), default=0.0)
    once = [p for p in good if sum(other.level == p.level for other in points) == 1]
    odd = [p.level for p in once if p.level < highest and not capacity.met(p, shape.wanted)]
    why = "again, with more samples: it missed, and a higher level met"
    return Turn(odd[0], why, RETRY_SAMPLES) if odd else None


def _edge(good: Sequence[Point], tried: Sequence[float], shape: Shape) -> Turn | None:
    if shape.wanted is None:
        return None
    found = capacity.capacity(good, shape.wanted)
    if found.low is None or found.high is None or found.high / found.low <= EDGE:
        return None
    return _fresh(
        _between(found.low, found.high, shape), tried, "between the last that met and the first miss"
    )


def _beside_knee(good: Sequence[Point], tried: Sequence[float], shape: Shape) -> Turn | None:
    knee = capacity.knee(good).level
    if knee is None:
        return None
    levels = [p.level for p in good]
    at = levels.index(knee)
    gaps = [
        (b / a, a, b)
        for a, b in zip(levels[max(0, at - 1) : at + 1], levels[max(0, at - 1) + 1 : at + 2], strict=False)
    ]
    for ratio, low, high in sorted(gaps, reverse=True):
        if ratio > KNEE_EDGE and (turn := _fresh(_between(low, high, shape), tried, "beside the knee")):
            return turn
    return None


def _between(low: float, high: float, shape: Shape) -> float:
    middle = math.sqrt(low * high)
    return float(round(middle)) if shape.by == "users" else float(f"{middle:.4g}")


def _times(level: float, factor: float, shape: Shape) -> float:
    if shape.by == "users":
        return float(min(MOST_USERS, max(1, round(level * factor))))
    return float(f"{level * factor:.4g}")


def _fresh(level: float, tried: Sequence[float], why: str) -> Turn | None:
    return Turn(level, why) if all(abs(level / other - 1) > 0.01 for other in tried) else None


def seconds_each(left_s: float, shape: Shape, saturation: float, drain_s: float, refine: int) -> float:
    """Seconds of sending per point such that ladder and `refine` more points fit into `left_s`.

    A point beyond saturation takes rate / saturation times as long to end as to send; each then waits
    `drain_s` for its last answers.
    """
    costs = [over(level, shape.by, saturation) for level in shape.ladder]
    sending = left_s - drain_s * (len(costs) + refine)
    return max(sending, left_s / 2) / (sum(costs) + refine)


def over(level: float, by: By, saturation: float) -> float:
    """How many times as long a point takes to end as to send."""
    return max(1.0, level / saturation) if by == "rate" else 1.0
