"""Numbers for people: units, intervals, missing and infinite values.

Owns formatting alone. Seconds come in, the unit that reads best goes out.
"""

from __future__ import annotations

import math

from perflab.measure.stats import Comparison, Estimate

MISSING = "–"
THIN = "\u202f"
"""A narrow space that never breaks a line, between a number and its unit."""


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, thousands apart: 0.0123, 12.3, 1,230."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    if places > 6:
        return f"{value:.1e}"
    return f"{value:,.{places}f}"


def seconds(value: float | None, digits: int = 3) -> str:
    """µs, ms or s."""
    if value is None or not math.isfinite(value):
        return number(value)
    for unit, scale in (("µs", 1e-6), ("ms", 1e-3)):
        if 0 < abs(value) < 999.5 * scale:
            return f"{number(value / scale, digits)}{THIN}{unit}"
    return f"{number(value, digits)}{THIN}s"


def times(value: float | None) -> str:
    """A ratio: 1.42×."""
    return number(value) if value is None or not math.isfinite(value) else f"{number(value)}×"


def percent(value: float | None, digits: int = 1) -> str:
    """A share of 1 as per cent; rounds neither up to 100 % nor down to 0."""
    if value is None or not math.isfinite(value):
        return MISSING
    least = 10**-digits
    if 0 < abs(100 * value) < least / 2:
        return f"below {least:.{digits}f}{THIN}%"
    shown = f"{100 * value:.{digits}f}"
    if value < 1 and float(shown) >= 100:
        shown = f"{100 - 10**-digits:.{digits}f}"
    return f"{shown}{THIN}%"


def interval(estimate: Estimate, shape: object = number) -> str:
    """[low, high]; an open end where the samples give no bound; empty without any."""
    if estimate.low is None and estimate.high is None:
        return ""
    assert callable(shape)
    low = "…" if estimate.low is None else shape(estimate.low)
    high = "…" if estimate.high is None else shape(estimate.high)
    return f"{low} to {high}"


def detectable(comparison: Comparison | None) -> str:
    """The minimum detectable effect, as ± per cent."""
    if comparison is None or comparison.detectable is None:
        return MISSING
    value = comparison.detectable
    return f"over 1000{THIN}%" if value > 10 else percent(value)
