"""One sentence per figure, computed from the data that the figure shows.

Owns the wording. A sentence says no more than the intervals allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from perflab.measure import metrics
from perflab.measure.timeline import timeline as parts
from perflab.report import units
from perflab.report.analysis import Analysis
from perflab.report.figures import pareto
from perflab.report.headlines import takeaway_steps
from perflab.report.summary import Summary, interleaved, quality_words
from perflab.types import RequestRecord


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
            + (f", with {said}" if "different" in said or best.forced else "")
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
    base, best = analysis.baseline, analysis.best if analysis.kind == "study" else analysis.summaries[-1]
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
        where = "the server and on the way, where no stamp is shared" if name == "unattributed" else name
        share = units.percent(value / s.time.e2e_s, 0)
        parts.append(f"“{s.name}” spends {share} of a request's time in {where}")
    worst = max(abs(s.time.residual_s / s.time.e2e_s) for s in known if s.time and s.time.e2e_s)
    left = units.percent(worst)
    most = left.replace("below", "less than") if "below" in left else f"at most {left}"
    return f"{'; '.join(parts)}. The spans leave {most} of E2E unexplained."


def shown_in_timeline(analysis: Analysis) -> Summary:
    """The best variant, or the last one where none is proven better than the baseline or it is no study."""
    if analysis.kind != "study":
        return analysis.summaries[-1]
    return analysis.best if analysis.best is not analysis.baseline else analysis.summaries[-1]


def timeline(analysis: Analysis) -> str:
    """How full the best variant's batches and KV pool were."""
    shown = shown_in_timeline(analysis)
    run = shown.typical
    if not run.steps:
        flying = in_flight_peak(run.requests)
        found = parts(run.requests)
        most = (
            f"; its busiest second brought {units.number(found.peak_tokens_per_s)} tokens/s" if found else ""
        )
        return f"“{shown.name}” had at most {flying} requests in flight{most}."
    rows = sum(s.rows for s in run.steps) / len(run.steps)
    peak = max((s.kv_blocks_used / s.kv_blocks_total for s in run.steps if s.kv_blocks_total), default=None)
    kv = "" if peak is None else f"; running requests held at most {units.percent(peak, 0)} of the KV blocks"
    return f"“{shown.name}” computed {units.number(rows)} requests a step on average{kv}."


def in_flight_peak(records: Sequence[RequestRecord]) -> int:
    """The most requests that were sent and had not ended."""
    changes = [(r.sent_ns, 1) for r in records] + [(r.end_ns, -1) for r in records if r.end_ns is not None]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


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
        return f"All {len(runs)} runs are valid." if len(runs) > 1 else "The run is valid."
    names = sorted({reason[0] for run in bad for reason in run.reasons})
    if len(runs) == 1:
        return f"The run is invalid ({', '.join(names)})."
    if analysis.kind not in ("study", "bench", "compare"):
        return (
            f"{len(bad)} of {len(runs)} runs {'is' if len(bad) == 1 else 'are'} invalid ({', '.join(names)})."
        )
    return (
        f"{len(bad)} of {len(runs)} runs {'is' if len(bad) == 1 else 'are'} invalid ({', '.join(names)}); "
        f"comparisons leave {'it' if len(bad) == 1 else 'them'} out "
        "and answer “cannot tell” where fewer than two pairs remain."
    )


def listing(names: Sequence[str]) -> str:
    """“a”, “b” and “c”."""
    quoted = [f"“{name}”" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def results(analysis: Analysis) -> str:
    """Success and speed of each group in one breath."""
    told = []
    for s in analysis.summaries[:4]:
        speed = f"{units.number(s.tokens_per_s.value)} output tokens/s, TTFT p50 {_p(s, 'TTFT', 0.5)}"
        spoilt = "" if s.valid else ", in invalid runs only"
        told.append(f"“{s.name}” completed {units.percent(s.completed_share)} at {speed}{spoilt}")
    return f"{'; '.join(told)}."


def _p(s: Summary, metric: str, q: float) -> str:
    return units.seconds(s.latencies[metric][q].value)


def changes(analysis: Analysis) -> str:
    """The answer on the measure that decides, and whether the runs alternated."""
    base, last = analysis.baseline, analysis.summaries[-1]
    if last.first is None:
        return ""
    answer, ratio = last.first.answer, last.first.ratio
    name = analysis.measure.name
    if answer == "cannot tell":
        words = f"On {name} the runs cannot tell which is faster: {last.first.reason}"
    else:
        span = units.interval(ratio, units.times)
        words = f"On {name} “{last.name}” is {answer}: {units.times(ratio.value)} as fast ({span})"
    if len(base.runs) > 1 and not interleaved(base, last):
        words += ". The runs did not alternate, so a drift of the machine counts as a change"
    return f"{words}."


def percentiles(analysis: Analysis) -> str:
    """Where the median and the tail lie, and how many requests never got there."""
    told = []
    for s in analysis.summaries[:3]:
        never = 1 - (s.completed_share if s.completed_share is not None else 1.0)
        lost = f", {units.percent(never)} never" if never > 0 else ""
        most = f"99 % within {_p(s, 'E2E', 0.99)}" if _p(s, "E2E", 0.99) != "∞" else "99 % not at all"
        told.append(f"“{s.name}”: half of all answers within {_p(s, 'E2E', 0.5)}, {most}{lost}")
    few = [s for s in analysis.summaries if not s.latencies["E2E"][0.99].bounded]
    warning = (
        f" With {few[0].latencies['E2E'][0.99].n} requests a p99 is the slowest but few: read it as such."
        if few
        else ""
    )
    return f"{'; '.join(told)}.{warning}"


def levels(analysis: Analysis) -> str:
    """The share of requests that met every limit, by group."""
    told = [
        f"“{s.name}”: {units.percent(s.goodput.share.value)} of {s.goodput.sent:,} requests met every limit"
        for s in analysis.summaries
        if s.goodput is not None
    ]
    return f"{'; '.join(told)}."


def rates(analysis: Analysis) -> str:
    """How far the steady window is from the whole run."""
    known = [(run, metrics.steady_throughput(run.requests)) for s in analysis.summaries for run in s.runs]
    steady = [(run, rate) for run, rate in known if rate is not None]
    if not steady:
        return "No run reached a steady state; its rates are those of the whole run, ramp and drain included."
    run, rate = steady[-1]
    whole = metrics.throughput(run.requests)
    ratio = (
        rate.output_tokens_per_s / whole.output_tokens_per_s
        if whole and whole.output_tokens_per_s and rate.output_tokens_per_s
        else None
    )
    words = f"The steady window holds {units.percent(rate.share_of_requests, 0)} of the requests"
    words += f"; its output tokens/s is {units.times(ratio)} that of the whole run" if ratio else ""
    missing = len(known) - len(steady)
    return f"{words}." + (f" {missing} of {len(known)} runs have no steady state." if missing else "")


def client(analysis: Analysis) -> str:
    """The worst lateness of all runs, and whether it spoilt one."""
    bound = [run for run in analysis.runs if any(name == "client-bound" for name, _ in run.reasons)]
    late = [
        metrics.stats.percentile_value([metrics.lateness_s(r) for r in run.requests], 0.99)
        for run in analysis.runs
        if run.requests
    ]
    worst = units.seconds(max(late, default=None))
    if bound:
        share = f"{len(bound)} of {len(analysis.runs)} runs"
        return f"The client was too slow in {share}: its sends were up to {worst} late (p99)."
    return f"99 % of requests left within {worst} of their intended start: the client was no bottleneck."
