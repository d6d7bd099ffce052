"""Intervals and verdicts from samples: percentiles, means, ratios of interleaved runs.

Owns the statistics and their formulas. Knows no record, run or engine: numbers in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np

Answer = Literal["faster", "slower", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its confidence interval. None bounds: the samples cannot give one."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    confidence: float = 0.95

    @property
    def bounded(self) -> bool:
        """Whether both ends of the interval could be had from the samples."""
        return self.low is not None and self.high is not None

    @property
    def arms(self) -> tuple[float | None, float | None]:
        """Lengths of the interval below and above the value, for error bars; None where it is open."""
        if self.value is None or self.low is None or self.high is None:
            return None, None
        return self.value - self.low, self.high - self.value


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many times faster `b` is than `a`, from paired runs.

    `ratio` is the geometric mean of b/a (with higher meaning better); `detectable` the smallest
    relative change that this many pairs of this spread would find four times out of five.
    """

    answer: Answer
    ratio: Estimate
    detectable: float | None
    reason: str = ""


def percentile(samples: Sequence[float], q: float, confidence: float = 0.95) -> Estimate:
    """The q-quantile (0 < q < 1) by the inverse empirical distribution, with an exact interval.

    value = x₍⌈nq⌉₎, the smallest sample that at least a share q of the samples does not exceed;
    no interpolation, so +inf (a failure) is handled as what it is. The interval is
    [x₍l₎, x₍u₎] with P(l ≤ B < u) ≥ confidence for B ~ Binomial(n, q) (Hahn & Meeker 1991,
    §5.2.1), each tail holding at most half of the rest. A bound is None where the samples are too
    few to give it.
    """
    if not 0 < q < 1:
        raise ValueError(f"q={q}: a quantile lies strictly between 0 and 1 (0.99 for the 99th percentile)")
    n = len(samples)
    if n == 0:
        return Estimate(None, n=0, confidence=confidence)
    ordered = sorted(samples)
    low, high = _order_bounds(n, q, confidence)
    return Estimate(
        percentile_value(ordered, q),
        None if low is None else ordered[low - 1],
        None if high is None else ordered[high - 1],
        n,
        confidence,
    )


def percentile_value(samples: Sequence[float] | np.ndarray, q: float) -> float:
    """x₍⌈nq⌉₎ of at least one sample."""
    ordered = np.sort(np.asarray(samples, dtype=float))
    return float(ordered[min(ordered.size, max(1, math.ceil(ordered.size * q - 1e-9))) - 1])


@lru_cache(maxsize=256)
def _order_bounds(n: int, q: float, confidence: float) -> tuple[int | None, int | None]:
    """Ranks (1-based) of the order statistics that bound the q-quantile; None where there is none."""
    tail = (1 - confidence) / 2
    cdf = np.cumsum(_binomial_pmf(n, q))  # cdf[k] = P(B <= k)
    below = np.flatnonzero(cdf[:-1] <= tail)  # P(x_(l) > quantile) = P(B <= l - 1)
    low = int(below[-1]) + 1 if below.size else None
    above = np.flatnonzero(1 - cdf[:-1] <= tail + 1e-15)  # P(x_(u) < quantile) = P(B >= u)
    high = int(above[0]) + 1 if above.size else None
    return low, high


def _binomial_pmf(n: int, p: float) -> np.ndarray:
    k = np.arange(n + 1)
    log_choose = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k])
    return np.exp(log_choose + k * math.log(p) + (n - k) * math.log1p(-p))


def samples_needed(q: float, confidence: float = 0.95) -> int:
    """The fewest samples with which the q-quantile has an interval bounded on both sides."""
    tail = (1 - confidence) / 2
    return max(math.ceil(math.log(tail) / math.log(p)) for p in (q, 1 - q))


def mean(samples: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Arithmetic mean with Student's t interval; no interval from fewer than two samples."""
    n = len(samples)
    if n == 0:
        return Estimate(None, n=0, confidence=confidence)
    centre = math.fsum(samples) / n
    if n == 1 or not math.isfinite(centre):
        return Estimate(centre, n=n, confidence=confidence)
    half = t_quantile((1 + confidence) / 2, n - 1) * float(np.std(samples, ddof=1)) / math.sqrt(n)
    return Estimate(centre, centre - half, centre + half, n, confidence)


def geometric_mean(samples: Sequence[float], confidence: float = 0.95) -> Estimate:
    """exp of the mean logarithm of values above 0, with Student's t interval of the logarithms."""
    if any(x <= 0 or not math.isfinite(x) for x in samples):
        raise ValueError("a geometric mean needs finite values above 0")
    logs = mean([math.log(x) for x in samples], confidence)
    raised = [None if x is None else _exp(x) for x in (logs.value, logs.low, logs.high)]
    return Estimate(raised[0], raised[1], raised[2], logs.n, confidence)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def share(hits: int, n: int, confidence: float = 0.95) -> Estimate:
    """hits / n with Wilson's score interval (Wilson 1927)."""
    if n == 0:
        return Estimate(None, n=0, confidence=confidence)
    z = normal_quantile((1 + confidence) / 2)
    p, spread = hits / n, z * z / n
    centre = (p + spread / 2) / (1 + spread)
    half = z * math.sqrt(p * (1 - p) / n + spread / (4 * n)) / (1 + spread)
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half), n, confidence)


def bootstrap(
    groups: Sequence[Sequence[float]],
    statistic: Callable[[np.ndarray], float],
    confidence: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Percentile bootstrap over whole groups (Davison & Hinkley 1997, §3.8).

    Values inside a group (the gaps of one request, the positions of one text) depend on each
    other, so groups are drawn with replacement and pooled. Fewer than five groups give no interval.
    """
    arrays = [np.asarray(group, dtype=float) for group in groups if len(group)]
    if not arrays:
        return Estimate(None, n=0, confidence=confidence)
    pooled = np.concatenate(arrays)
    value = float(statistic(pooled))
    if len(arrays) < 5:
        return Estimate(value, n=pooled.size, confidence=confidence)
    rng = np.random.default_rng(seed)
    draws = max(100, min(draws, 20_000_000 // pooled.size))  # millions of gaps need fewer to settle
    picks = rng.integers(0, len(arrays), size=(draws, len(arrays)))
    values = [float(statistic(np.concatenate([arrays[i] for i in pick]))) for pick in picks]
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail], method="inverted_cdf")
    return Estimate(value, float(low), float(high), pooled.size, confidence)


def paired_ratio(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Geometric mean of b/a over pairs, with Student's t interval of the log-ratios.

    `a[i]` and `b[i]` are of the same round of interleaved runs, so that slow drifts of the machine
    cancel. ratio = exp(mean(log(b_i / a_i))). No interval from one pair.
    """
    if len(a) != len(b):
        raise ValueError(f"paired runs differ in number: {len(a)} and {len(b)}")
    if any(x <= 0 or not math.isfinite(x) for x in (*a, *b)):
        raise ValueError("a ratio needs finite values above 0")
    return geometric_mean([y / x for x, y in zip(a, b, strict=True)], confidence)


def compare(
    a: Sequence[float], b: Sequence[float], confidence: float = 0.95, higher_is_better: bool = True
) -> Comparison:
    """Whether `b` is faster than `a`: only if the whole interval of the ratio lies on one side of 1.

    The minimum detectable effect is exp((t₁₋α/₂ + t₀.₈)·s/√n) − 1 for the standard deviation s of
    the log-ratios of n pairs: power 80 % (Cohen 1988).
    """
    if not higher_is_better:
        a, b = b, a
    ratio = paired_ratio(a, b, confidence)
    if ratio.low is None or ratio.high is None:
        return Comparison("cannot tell", ratio, None, f"needs two paired runs or more, has {ratio.n}")
    n = ratio.n
    spread = float(np.std([math.log(y / x) for x, y in zip(a, b, strict=True)], ddof=1)) / math.sqrt(n)
    reach = (t_quantile((1 + confidence) / 2, n - 1) + t_quantile(0.8, n - 1)) * spread
    detectable = math.expm1(reach) if reach < 50 else math.inf
    if ratio.low > 1:
        return Comparison("faster", ratio, detectable)
    if ratio.high < 1:
        return Comparison("slower", ratio, detectable)
    return Comparison("cannot tell", ratio, detectable, "the interval of the ratio contains 1")


def normal_quantile(p: float) -> float:
    """Quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(p)


@lru_cache(maxsize=256)
def t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t with `df` degrees of freedom, by bisection of its distribution."""
    if not (0 < p < 1 and df >= 1):
        raise ValueError(f"p={p} must lie in (0, 1) and df={df} be 1 or more")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while _t_cdf(high, df) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, df: int) -> float:
    """P(T <= t) for t >= 0 by the finite sums of Abramowitz & Stegun 26.7.3 and 26.7.4."""
    theta = math.atan2(t, math.sqrt(df))
    sin, cos = math.sin(theta), math.cos(theta)
    if df % 2:
        term, total = cos, cos if df > 1 else 0.0
        for k in range(3, df - 1, 2):
            term *= cos * cos * (k - 1) / k
            total += term
        inside = 2 / math.pi * (theta + sin * total)
    else:
        term = total = 1.0
        for k in range(2, df - 1, 2):
            term *= cos * cos * (k - 1) / k
            total += term
        inside = sin * total
    return 0.5 + inside / 2
