"""Rates of a run: over all of it, and over the window in which it was steady.

Owns the window and its bounds. Knows no engine and no load: `RequestRecord`s in, numbers in SI units out.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perflab.clock import NS_PER_S
from perflab.measure.stats import t_quantile
from perflab.types import RequestRecord


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens and requests per second over [start_ns, end_ns]; None where nothing can be said."""

    start_ns: int
    end_ns: int
    output_tokens: int
    completed: int
    output_tokens_per_s: float | None
    requests_per_s: float | None
    share_of_requests: float

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_S


def throughput(records: Sequence[RequestRecord]) -> Rate | None:
    """Rates over the whole run, from the first intended start to the last token or end.

    Every delivered token counts, whatever became of its request; requests count if completed.
    None for a run without requests or without extent.
    """
    if not records:
        return None
    start = min(r.intended_ns for r in records)
    return _rate(records, start - 1, max(_end_ns(r) for r in records), start)


def steady_throughput(
    records: Sequence[RequestRecord], share_of_peak: float = 0.5, at_least: int = 8
) -> Rate | None:
    """Rates over the steady window; None where there is no steady state.

    The window is (a, b]: `b` is the last completion before the requests in flight fall for good
    below `share_of_peak` of their peak (the drain), `a` the first completion (before it the
    pipeline fills). Where completions come in bursts, as static batches make them, `a` and `b`
    are the ends of bursts, so that whole bursts are divided by whole periods. None where fewer than
    `at_least` completions fall into the window.
    """
    ends = sorted(_end_ns(r) for r in records if r.outcome == "completed")
    if len(ends) <= at_least:
        return None
    burst_ends = _burst_ends(ends)
    last = bisect.bisect_left(burst_ends, _drain_start(records, share_of_peak))
    a, b = burst_ends[0], burst_ends[min(last, len(burst_ends) - 1)]
    rate = _rate(records, a, b, a)
    return rate if rate is not None and rate.completed >= at_least else None


def _rate(records: Sequence[RequestRecord], after_ns: int, until_ns: int, start_ns: int) -> Rate | None:
    """Rates of what was delivered in (after_ns, until_ns], divided by [start_ns, until_ns]."""
    if until_ns <= start_ns:
        return None
    seconds = (until_ns - start_ns) / NS_PER_S
    done = sum(1 for r in records if r.outcome == "completed" and after_ns < _end_ns(r) <= until_ns)
    tokens = sum(
        sum(
            r.chunk_tokens[
                bisect.bisect_right(r.token_ns, after_ns) : bisect.bisect_right(r.token_ns, until_ns)
            ]
        )
        for r in records
    )
    return Rate(start_ns, until_ns, tokens, done, tokens / seconds, done / seconds, done / len(records))


def _end_ns(record: RequestRecord) -> int:
    return max(t for t in (record.sent_ns, record.last_token_ns, record.end_ns) if t is not None)


def _drain_start(records: Sequence[RequestRecord], share_of_peak: float) -> int:
    """When the requests in flight last fell below a share of their peak; the run's end if they never did."""
    last = max(_end_ns(r) for r in records)
    open_ended = [r for r in records if r.outcome is None]
    changes = sorted(
        [(r.sent_ns, 1) for r in records] + [(_end_ns(r), -1) for r in records if r.outcome is not None]
    )
    flying, peak, levels = 0, 0, []
    for time_ns, change in changes:
        flying += change
        peak = max(peak, flying)
        levels.append((time_ns, flying))
    if len(open_ended) >= share_of_peak * peak:
        return last
    for (time_ns, _), (_, before) in zip(reversed(levels), reversed([(0, 0), *levels[:-1]]), strict=True):
        if before >= share_of_peak * peak:
            return time_ns
    return last


def _burst_ends(ends: list[int]) -> list[int]:
    """The completions after which a burst is over; every completion where they come one by one.

    Bursts are there when more than half of the span lies in gaps above four times the mean gap
    (9 % in a Poisson stream).
    """
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    limit = 4 * sum(gaps) / len(gaps)
    if 2 * sum(g for g in gaps if g > limit) <= sum(gaps):
        return ends
    return [end for end, gap in zip(ends, [*gaps, limit + 1], strict=True) if gap > limit]


TREND_PARTS = 8
TREND_LEAST = 0.3


def trend(records: Sequence[RequestRecord], window: Rate) -> float | None:
    """Relative change of the rate of completions from one end of a window to the other, where it is no
    accident; None where the rate may as well be constant.

    A line is fitted by least squares to the completions in eight equal parts of the window. The change
    counts if its slope differs from 0 at the 99.9 % level (Student's t, 6 degrees of freedom) and it is
    more than 30 % of the mean. Bursts widen the spread of the counts, and with it what counts.
    """
    ends = [_end_ns(r) for r in records if r.outcome == "completed"]
    counts, _ = np.histogram(ends, TREND_PARTS, (window.start_ns, window.end_ns))
    x = np.arange(TREND_PARTS) - (TREND_PARTS - 1) / 2
    slope, mean = float(x @ counts) / float(x @ x), float(counts.mean())
    left = counts - mean - slope * x
    spread = float(np.sqrt(left @ left / (TREND_PARTS - 2) / (x @ x)))
    change = slope * TREND_PARTS / mean if mean else 0.0
    sure = abs(slope) > t_quantile(0.9995, TREND_PARTS - 2) * spread
    return change if sure and abs(change) > TREND_LEAST else None
