"""Whether one of two is faster, from short runs in pairs whose order was drawn by lot.

Owns Wilcoxon's signed-rank test on the log-ratios of the pairs, its interval, and the verdict of a gate.
With the order of each pair drawn, equal variants are exchangeable within it, whatever else the machine
does: the level is exact under background noise that comes in bursts, drifts or has heavy tails, where
Student's t on few runs is neither exact nor powerful.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from perflab.measure.stats import Comparison, Estimate, normal_quantile, t_quantile

FEWEST_PAIRS = 6
"""With fewer no outcome is rarer than 1 in 20: all six on one side has probability 2 / 2⁶."""

FORMULA = (
    "median of the averages of all two log-ratios of pairs (Hodges & Lehmann 1963); 95 % interval from "
    "Wilcoxon's signed-rank distribution, exact because the order within each pair was drawn by lot"
)

Gate = Literal["pass", "slower", "cannot tell"]


def compare_pairs(
    a: Sequence[float], b: Sequence[float], confidence: float = 0.95, higher_is_better: bool = True
) -> Comparison:
    """How many times as fast `b` is, from pairs of short runs; `a[i]` and `b[i]` ran one after the other.

    d_i = ln(b_i / a_i), turned around where lower is better. The ratio is exp of the median of the Walsh
    averages (d_i + d_j) / 2, i ≤ j; its interval are the averages of ranks k + 1 from both ends, where k
    is the largest with 2·P(W ≤ k) ≤ 1 − confidence for the signed-rank statistic W of as many pairs. The
    detectable effect is exp((z₁₋α/₂ + z₀.₈) · σ) − 1, σ the interval's half width over z₁₋α/₂.
    """
    if len(a) != len(b):
        raise ValueError(f"paired runs differ in number: {len(a)} and {len(b)}")
    if any(x <= 0 or not math.isfinite(x) for x in (*a, *b)):
        raise ValueError("a ratio needs finite values above 0")
    if not higher_is_better:
        a, b = b, a
    n = len(a)
    logs = np.log(np.asarray(b, float)) - np.log(np.asarray(a, float))
    averages = np.sort(((logs[:, None] + logs[None, :]) / 2)[np.triu_indices(n)])
    k = critical(n, confidence)
    if k is None:
        middle = float(np.exp(np.median(averages))) if n else None
        reason = f"{n} pairs; at least {FEWEST_PAIRS} are needed"
        return Comparison("cannot tell", Estimate(middle, n=n, confidence=confidence), None, reason)
    low, high = float(averages[k]), float(averages[averages.size - 1 - k])
    z = normal_quantile((1 + confidence) / 2)
    reach = (z + normal_quantile(0.8)) * (high - low) / (2 * z)
    centre = float(np.median(averages))
    ratio = Estimate(math.exp(centre), math.exp(low), math.exp(high), n, confidence)
    detectable = math.expm1(reach) if reach < 50 else math.inf
    return _answered(ratio, detectable)


@lru_cache(maxsize=64)
def critical(n: int, confidence: float) -> int | None:
    """The largest k with 2·P(W ≤ k) ≤ 1 − confidence, W the sum of those ranks 1 … n that a fair coin
    chose; None where there is none. Counts subsets by their sum."""
    ways = np.zeros(n * (n + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, n + 1):
        ways[rank:] = ways[rank:] + ways[:-rank]
        ways /= 2.0  # probabilities, so that 2ⁿ need not fit
    below = np.flatnonzero(2 * np.cumsum(ways) <= 1 - confidence + 1e-12)
    return int(below[-1]) if below.size else None


def gate(found: Comparison, margin: float = 0.0, strict: bool = False) -> Gate:
    """Whether `b` may pass: `slower` where it is so for certain by more than `margin` (a share of a's speed).

    `strict` passes only what is for certain not slower than that, and else cannot tell.
    """
    limit = 1 - margin
    if found.ratio.high is not None and found.ratio.high < limit:
        return "slower"
    if strict and (found.ratio.low is None or found.ratio.low < limit):
        return "cannot tell"
    return "pass"


def compare_unpaired(
    a: Sequence[float], b: Sequence[float], confidence: float = 0.95, higher_is_better: bool = True
) -> Comparison:
    """How many times as fast `b` is, from runs that were not interleaved: what drifted between the two
    counts as a difference. Welch's t of the logarithms (Welch 1947), Satterthwaite's degrees of freedom."""
    if any(x <= 0 or not math.isfinite(x) for x in (*a, *b)):
        raise ValueError("a ratio needs finite values above 0")
    if not higher_is_better:
        a, b = b, a
    n = min(len(a), len(b))
    if n < 2:
        return Comparison("cannot tell", Estimate(None, n=n), None, "needs two runs or more of each")
    logs = [np.log(np.asarray(x, float)) for x in (a, b)]
    shares = [float(x.var(ddof=1)) / x.size for x in logs]
    total, centre = sum(shares), float(logs[1].mean() - logs[0].mean())
    freedom = n - 1
    if total > 0:
        freedom = int(total**2 / sum(s * s / (x.size - 1) for s, x in zip(shares, logs, strict=True)))
    t, spread = t_quantile((1 + confidence) / 2, max(1, freedom)), math.sqrt(total)
    low, high = math.exp(centre - t * spread), math.exp(centre + t * spread)
    ratio = Estimate(math.exp(centre), low, high, n, confidence)
    detectable = math.expm1((t + t_quantile(0.8, max(1, freedom))) * spread)
    return _answered(ratio, detectable)


def _answered(ratio: Estimate, detectable: float) -> Comparison:
    assert ratio.low is not None
    assert ratio.high is not None
    if ratio.low > 1:
        return Comparison("faster", ratio, detectable)
    if ratio.high < 1:
        return Comparison("slower", ratio, detectable)
    return Comparison("cannot tell", ratio, detectable, "the interval of the ratio contains 1")
