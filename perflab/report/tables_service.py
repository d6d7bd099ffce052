"""Tables of runs against a service: results with the success rate beside latency, what changed, rates
with their window, service levels by class, and how the client held up.

Owns columns and wording of cells. Metrics are `measure`'s, groups `analysis`'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from perflab.clock import NS_PER_S
from perflab.measure import metrics, stats
from perflab.measure.metrics import Rate
from perflab.measure.stats import samples_needed
from perflab.report import units
from perflab.report.analysis import Analysis
from perflab.report.summary import MEASURES, QUANTILES, Measure, Summary, compare_runs, goodput_of, slo_of
from perflab.report.tables import Cell, Table, completed, estimate, rate, ratio, runs_cell, verdict
from perflab.report.telemetry import named
from perflab.studies.compare_result import METRICS
from perflab.studies.store import Run
from perflab.studies.sweep_result import SweepResult

MISSING = Cell(units.MISSING, tone="muted")


def results(analysis: Analysis) -> Table:
    """One line a group: completed share, rates, main percentiles, the verdict against the first."""
    several = len(analysis.summaries) > 1
    headers = [
        "run",
        "completed",
        "requests/s",
        "output tokens/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "E2E p50",
        "E2E p99",
    ]
    rows = []
    for s in analysis.summaries:
        shown = (("TTFT", 0.5), ("TTFT", 0.99), ("TPOT", 0.5), ("E2E", 0.5), ("E2E", 0.99))
        cells = [
            Cell(s.name, s.description),
            completed(s),
            rate(s.requests_per_s),
            rate(s.tokens_per_s),
            *(estimate(s.latencies[metric][q], units.seconds, samples_needed(q)) for metric, q in shown),
        ]
        rows.append((*cells, *([verdict(s.first)] if several else []), runs_cell(s)))
    tail = [f"{analysis.measure.name} against the first"] if several else []
    return Table((*headers, *tail, "valid runs"), tuple(rows), words=(0, *([9] if several else [])))


def changes(analysis: Analysis) -> Table:
    """Every measure of each further group beside the first's, with ratio, answer and detectable change."""
    rows = []
    for other in analysis.summaries[1:]:
        for index, (measure, values, found) in enumerate(changes_of(analysis, other)):
            judged = "judged on this" if measure.name == analysis.measure.name else ""
            rows.append(
                (
                    Cell(other.name if index == 0 else ""),
                    Cell(measure.name, judged),
                    *(Cell(measure.shape(value)) for value in values),
                    ratio(found),
                    verdict(found),
                    Cell(units.detectable(found), tone="muted"),
                )
            )
    headers = ("run", "measure", "before", "after", "times as fast", "answer", "detectable")
    return Table(headers, tuple(rows), words=(0, 1, 5))


class Change(NamedTuple):
    """One figure before and after, and whether the runs prove that it changed."""

    measure: Measure
    values: tuple[float | None, float | None]
    comparison: stats.Comparison


def changes_of(analysis: Analysis, other: Summary) -> list[Change]:
    """Every figure that the first group and `other` both have."""
    if (found := analysis.compared) is not None:
        shapes = {True: units.number, False: units.seconds}
        return [
            Change(
                Measure(m.name, lambda run: None, m.higher_is_better, shapes[m.higher_is_better]),
                found.medians[key],
                replace(one, answer="cannot tell", reason=found.refused) if found.refused else one,
            )
            for key, one in found.by_metric.items()
            if None not in found.medians[key]
            for m in [METRICS[key]]
        ]
    base = analysis.baseline
    made = [(m, (_typical(base, m), _typical(other, m))) for m in MEASURES]
    return [
        Change(m, values, compare_runs(base, other, analysis.compare_invalid, m))
        for m, values in made
        if None not in values
    ]


def _typical(s: Summary, measure: Measure) -> float | None:
    """The geometric mean over the group's runs, so that two of them have the ratio of their pairs."""
    values = [v for run in s.used if (v := measure.of(run))]
    return math.inf if math.inf in values else stats.geometric_mean(values).value


def percentiles(summaries: Sequence[Summary]) -> Table:
    """Each latency's percentiles with failures as +∞, and those of successes alone where they differ."""
    failed = any((s.completed_share or 0.0) < 1 for s in summaries)
    rows = []
    for s in summaries:
        for index, (metric, found) in enumerate(_with_sent(s).items()):
            cells = [estimate(found[q], units.seconds, samples_needed(q)) for q in QUANTILES]
            alone = [_alone(s, metric, q) for q in QUANTILES] if failed else []
            first = index == 0
            rows.append(
                (
                    Cell(s.name if first else ""),
                    Cell(metric),
                    *cells,
                    completed(s) if first else Cell(""),
                    *alone,
                    Cell(f"{found[0.5].n:,}"),
                )
            )
    marks = [f"p{100 * q:.0f}" for q in QUANTILES]
    alone_marks = [f"{mark}, successes only" for mark in marks] if failed else []
    return Table(("run", "metric", *marks, "completed", *alone_marks, "samples"), tuple(rows), words=(0, 1))


FROM_SENT = "TTFT from sent"
PER_REQUEST: dict[str, Any] = {
    "TTFT": metrics.ttft_s,
    FROM_SENT: metrics.ttft_from_sent_s,
    "E2E": metrics.e2e_s,
}


def _with_sent(s: Summary) -> dict[str, dict[float, stats.Estimate]]:
    """The group's latencies with TTFT from the actual send beside that from the intended one."""
    sent = metrics.samples(s.records, metrics.ttft_from_sent_s)
    return {
        "TTFT": s.latencies["TTFT"],
        FROM_SENT: {q: stats.percentile(sent, q) for q in QUANTILES},
        **{name: found for name, found in s.latencies.items() if name != "TTFT"},
    }


def _alone(s: Summary, metric: str, q: float) -> Cell:
    if metric not in PER_REQUEST:
        return MISSING
    values = metrics.samples(s.records, PER_REQUEST[metric], success_only=True)
    return Cell(units.seconds(stats.percentile(values, q).value))


def windows(analysis: Analysis) -> Table:
    """Rates of each whole run and, below, of its steady window with its bounds."""
    rows = []
    for s in analysis.summaries:
        for run in s.runs:
            origin = origin_ns(run)
            name = s.name if len(s.runs) == 1 else f"{s.name}, round {run.round + 1}"
            whole, steady = metrics.throughput(run.requests), metrics.steady_throughput(run.requests)
            rows.append((Cell(name), Cell("whole run"), *_rate_cells(whole, origin)))
            rows.append(
                (Cell(""), Cell("steady window", "" if steady else "none"), *_rate_cells(steady, origin))
            )
    headers = ("run", "window", "from", "to", "requests completed", "requests/s", "output tokens/s")
    return Table(headers, tuple(rows), words=(0, 1))


def _rate_cells(found: Rate | None, origin: int) -> list[Cell]:
    if found is None:
        return [MISSING] * 5
    return [
        *(Cell(units.seconds((t - origin) / NS_PER_S)) for t in (found.start_ns, found.end_ns)),
        Cell(f"{found.completed:,}", units.percent(found.share_of_requests, 0)),
        Cell(units.number(found.requests_per_s)),
        Cell(units.number(found.output_tokens_per_s)),
    ]


def origin_ns(run: Run) -> int:
    """When the run began, for a time axis that starts at 0."""
    return int(run.manifest.get("started_ns") or min((r.intended_ns for r in run.requests), default=0))


def classes(analysis: Analysis) -> Table:
    """Goodput of each request class under its limits: met, share of all sent, per second."""
    rows = []
    for s in analysis.summaries:
        names = list(dict.fromkeys(r.request_class for r in s.records))
        for index, name in enumerate(names):
            good = goodput_of(s.used, name)
            if good is None:
                continue
            records = [r for r in s.records if r.request_class == name]
            limits = asdict(slo_of(s.runs[0], name)).items()
            told = ", ".join(f"{k.removesuffix('_s').upper()} {units.seconds(v)}" for k, v in limits if v)
            rows.append(
                (
                    Cell(s.name if index == 0 else ""),
                    Cell(name, told),
                    Cell(f"{good.sent:,}"),
                    Cell(f"{good.met:,}"),
                    estimate(good.share, units.percent),
                    Cell(units.number(good.requests_per_s)),
                    *(
                        Cell(units.seconds(metrics.LATENCIES[metric](records, 0.9).value))
                        for metric in ("TTFT", "TPOT", "E2E")
                    ),
                )
            )
    headers = (
        "run",
        "class and limits",
        "sent",
        "met every SLO",
        "share",
        "goodput, requests/s",
        "TTFT p90",
        "TPOT p90",
        "E2E p90",
    )
    return Table(headers, tuple(rows), words=(0, 1))


GAUGES = {"running": "requests running", "waiting": "requests waiting", "kv_use": "KV cache in use"}
TOTALS = {
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "preemptions": "preemptions",
    "prefix_cache_hits": "prefix cache hits",
    "prefix_cache_queries": "prefix cache queries",
    "draft_tokens": "guesses verified",
    "accepted_tokens": "guesses that held",
}


def server(analysis: Analysis) -> Table:
    """What servers said of themselves during the typical run of each group, beside the client's count."""
    rows: list[tuple[Cell, ...]] = []
    for s in analysis.summaries:
        run = s.typical
        mine = {
            "prompt_tokens": sum(r.prompt_tokens for r in run.requests),
            "output_tokens": sum(r.output_tokens for r in run.requests),
        }
        for name, label in {**GAUGES, **TOTALS}.items():
            lines = [found for _, _, found in named(run, name)]
            if not lines:
                continue
            shape = (lambda v: units.percent(v, 0)) if name == "kv_use" else units.number
            if name in GAUGES:
                values = [sample.value for found in lines for sample in found]
                text, note = shape(max(values)), f"mean {shape(sum(values) / len(values))}"
                cells = Cell("highest"), Cell(text, note)
            else:
                grown = sum(found[-1].value - found[0].value for found in lines)
                cells = Cell("added during the run"), Cell(f"{grown:,.0f}")
            told = f"{mine[name]:,}" if name in mine else ""
            first = not rows or s.name not in [row[0].text for row in rows]
            rows.append((Cell(s.name if first else ""), Cell(label), *cells, Cell(told)))
    headers = ("run", "the server's own", "", "value", "the client counted")
    return Table(headers, tuple(rows), words=(0, 1, 2))


def points(found: SweepResult) -> Table:
    """One line a point of a sweep, by level: what was asked, what was done, at which latency."""
    rows = []
    good = found.usable
    limited = any(p.attained is not None for p in found.points)
    for p in sorted(found.points, key=lambda p: p.level):
        shown = (("TTFT", "p50", 0.5), ("TTFT", "p99", 0.99), ("E2E", "p50", 0.5), ("E2E", "p99", 0.99))
        marks = [n for n, one in (("capacity", found.capacity), ("knee", found.knee)) if one.level == p.level]
        why = "; ".join(f"{name}: {detail}" for name, detail in p.reasons)
        rows.append(
            (
                Cell(units.number(p.level)),
                Cell(", ".join(marks) or units.MISSING, why, "good" if marks else "muted")
                if p in good
                else Cell("not used", why, "bad"),
                Cell(units.number(p.rate)),
                Cell(units.number(p.tokens_per_s)),
                *(estimate(p.latencies[m][q], units.seconds, samples_needed(share)) for m, q, share in shown),
                *([estimate(p.attained, units.percent) if p.attained else MISSING] if limited else []),
                Cell(f"{p.samples:,}"),
            )
        )
    level = "users" if found.by == "users" else "asked, requests/s"
    rates = (level, "", "done, requests/s", "output tokens/s")
    latencies = ("TTFT p50", "TTFT p99", "E2E p50", "E2E p99")
    tail = (*(("met every SLO",) if limited else ()), "requests")
    return Table((*rates, *latencies, *tail), tuple(rows), words=(1,))


def client(analysis: Analysis) -> Table:
    """How late requests were sent, how long the client's loop stalled, how busy the client was."""
    rows = []
    for s in analysis.summaries:
        for run in s.runs:
            late = [metrics.lateness_s(r) for r in run.requests]
            held = run.manifest.get("client") or {}
            rows.append(
                (
                    Cell(s.name if len(s.runs) == 1 else f"{s.name}, round {run.round + 1}"),
                    *(
                        Cell(units.seconds(stats.percentile_value(late, q)) if late else units.MISSING)
                        for q in (0.5, 0.99)
                    ),
                    Cell(units.seconds(max(late, default=None))),
                    Cell(units.seconds(held.get("loop_lag_p99_s"))),
                    Cell(units.percent(held.get("cpu_share"), 0)),
                )
            )
    headers = ("run", "sent late, p50", "sent late, p99", "latest", "loop lag, p99", "client CPU, of a core")
    return Table(headers, tuple(rows))
