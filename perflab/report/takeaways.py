"""One sentence per figure, computed from the data that the figure shows.

Owns the wording. A sentence says no more than the intervals allow.
"""

from __future__ import annotations

from collections.abc import Sequence

from perflab.report import units
from perflab.report.analysis import Analysis, Summary, quality_words, takeaway_steps
from perflab.report.figures import pareto


def ladder(analysis: Analysis) -> str:
    """Which steps are proven, which are not."""
    if len(analysis.summaries) < 2:
        return "One configuration was measured; a ladder needs two."
    steps = takeaway_steps(analysis)
    unsure = [s.name for s in analysis.summaries if s.previous and s.previous.answer == "cannot tell"]
    slower = [s.name for s in analysis.summaries if s.previous and s.previous.answer == "slower"]
    parts = []
    if steps:
        best, comparison = steps[0]
        said = quality_words(best)
        parts.append(
            f"The largest proven step is “{best.name}”: {units.times(comparison.ratio.value)} "
            f"({units.interval(comparison.ratio, units.times)}) the throughput of the rung below"
            + (f", with {said}" if "different" in said else "")
        )
    else:
        parts.append("No step is proven faster than the rung below it")
    if slower:
        parts.append(f"{listing(slower)} {'is' if len(slower) == 1 else 'are'} slower under this workload")
    if unsure:
        parts.append(f"{listing(unsure)}: cannot tell at this number of runs")
    return "; ".join(parts) + "."


def latencies(analysis: Analysis) -> str:
    """How first token and gaps moved from the baseline to the best variant, and a warning on tails."""
    base, best = analysis.baseline, analysis.best
    few = base.latencies["TTFT"][0.99]
    warning = "" if few.bounded else f" With {few.n} requests a p99 is the slowest but few: read it as such."
    if best is base:
        return f"TTFT p50 of “{base.name}” is {units.seconds(base.latencies['TTFT'][0.5].value)}.{warning}"
    moved = [
        f"{metric} p50 from {units.seconds(base.latencies[metric][0.5].value)} to "
        f"{units.seconds(best.latencies[metric][0.5].value)}"
        for metric in ("TTFT", "ITL", "E2E")
    ]
    return f"From “{base.name}” to “{best.name}”: {', '.join(moved)}.{warning}"


def frontier(summaries: Sequence[Summary]) -> str:
    """Which variants no other beats in both throughput and latency."""
    points = {
        (s.tokens_per_s.value, s.latencies["E2E"][0.5].value or 0.0): s.name
        for s in summaries
        if s.tokens_per_s.value
    }
    kept = [points[p] for p in pareto(list(points))]
    if not kept:
        return "No variant has both a throughput and a latency."
    if len(kept) == 1:
        return f"“{kept[0]}” has the highest throughput and the lowest median E2E at once."
    return f"No other variant beats {listing(kept)} in both throughput and median E2E."


def where_time_goes(analysis: Analysis) -> str:
    """The largest part before and after, and how well the spans close."""
    known = [s for s in analysis.summaries if s.time is not None]
    if not known:
        return "No request completed, so there is no time to split."
    parts = []
    last = analysis.best if analysis.best is not analysis.baseline and analysis.best.time else known[-1]
    for s in dict.fromkeys((known[0], last)):
        assert s.time is not None
        name, value = max(s.time.segments.items(), key=lambda item: item[1], default=("nothing", 0.0))
        parts.append(
            f"“{s.name}” spends {units.percent(value / s.time.e2e_s, 0)} of a request's time in {name}"
        )
    worst = max(abs(s.time.residual_s / s.time.e2e_s) for s in known if s.time and s.time.e2e_s)
    left = units.percent(worst)
    most = left.replace("below", "less than") if "below" in left else f"at most {left}"
    return f"{'; '.join(parts)}. The spans leave {most} of E2E unexplained."


def shown_in_timeline(analysis: Analysis) -> Summary:
    """The best variant, or the last one where none is proven better than the baseline."""
    return analysis.best if analysis.best is not analysis.baseline else analysis.summaries[-1]


def timeline(analysis: Analysis) -> str:
    """How full the best variant's batches and KV pool were."""
    shown = shown_in_timeline(analysis)
    run = shown.typical
    if not run.steps:
        return "No engine of ours ran, so there are no steps to show."
    rows = sum(s.rows for s in run.steps) / len(run.steps)
    peak = max((s.kv_blocks_used / s.kv_blocks_total for s in run.steps if s.kv_blocks_total), default=None)
    kv = "" if peak is None else f"; running requests held at most {units.percent(peak, 0)} of the KV blocks"
    return f"“{shown.name}” computed {units.number(rows)} requests a step on average{kv}."


def quality(analysis: Analysis) -> str:
    """Worst distance from the reference among the variants."""
    known = [s for s in analysis.summaries if s.kl_nats is not None]
    if not known:
        return "Quality was not measured in this study."
    worst = max(known, key=lambda s: s.kl_nats or 0.0)
    if (worst.kl_nats or 0.0) <= 1e-4:
        return "Every variant gives the distribution of the fp32 reference, up to rounding."
    return (
        f"“{worst.name}” is farthest from the fp32 reference: KL {units.number(worst.kl_nats, 2)} nats, "
        f"the same most likely token at {units.percent(worst.top1)} of positions."
    )


def validity(analysis: Analysis) -> str:
    """How many runs are valid, and what spoils the others."""
    runs = analysis.runs
    bad = [run for run in runs if not run.valid]
    if not bad:
        return f"All {len(runs)} runs are valid."
    names = sorted({reason[0] for run in bad for reason in run.reasons})
    return (
        f"{len(bad)} of {len(runs)} runs {'is' if len(bad) == 1 else 'are'} invalid ({', '.join(names)}); "
        f"comparisons leave {'it' if len(bad) == 1 else 'them'} out "
        "and answer “cannot tell” where fewer than two pairs remain."
    )


def listing(names: Sequence[str]) -> str:
    """“a”, “b” and “c”."""
    quoted = [f"“{name}”" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
