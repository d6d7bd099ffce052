"""Which chapters a part of a report has: each is a function of its runs, and absent where they hold
nothing for it.

Owns order and notes. Figures, tables and sentences are made by their own modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perflab.measure.stats import samples_needed
from perflab.report import (
    figures,
    figures_service,
    figures_sweep,
    speculation,
    tables,
    tables_service,
    takeaways,
)
from perflab.report.analysis import Analysis
from perflab.report.headlines import headline
from perflab.report.manifest import model_notes
from perflab.report.section import Section
from perflab.report.summary import CLOSE_KL
from perflab.report.timeline import timeline, worth_showing

Chapter = Callable[[Analysis], Section | list[Section] | None]


def sections(analysis: Analysis) -> list[Section]:
    """The chapters of one part in reading order."""
    first: dict[str, list[Chapter]] = {"study": [ladder, latency, frontier], "sweep": [sweep, latency]}
    chapters = first.get(analysis.kind, [results, changes, percentiles, frontier])
    chapters = [*chapters, levels, rates, time, speculation.chapter, over_time, quality]
    chapters = [*chapters, client, profiles, validity]
    if analysis.kind == "profile":
        chapters = [profiles, over_time, validity]
    return [section for make in chapters for section in _several(make(analysis))]


def _several(made: Section | list[Section] | None) -> list[Section]:
    return made if isinstance(made, list) else [made] if made else []


def ladder(analysis: Analysis) -> Section:
    """Each variant of a study against the one before and the first."""
    return Section(
        "ladder",
        "The ladder",
        takeaways.ladder(analysis),
        figures.ladder(analysis.summaries),
        tables.ladder(analysis),
        note="“Step” compares with the rung below, “total” with the baseline; both are ratios of output "
        "tokens/s over paired, interleaved rounds with a 95 % interval. Amber in “top-1”: the "
        f"distribution is not close to the reference's (KL above {CLOSE_KL} nats).",
    )


FEW = (
    "Amber: too few samples for an interval bounded on both sides "
    f"(p50 needs {samples_needed(0.5)}, p90 {samples_needed(0.9)}, p99 {samples_needed(0.99)})."
)


def latency(analysis: Analysis) -> Section:
    """Percentiles of each variant or point."""
    summaries = analysis.summaries
    if analysis.kind == "sweep":  # the points' table has them
        return Section(
            "latency", "Latency by level", takeaways.latencies(analysis), figures.latencies(summaries)
        )
    return Section(
        "latency",
        "Latency",
        takeaways.latencies(analysis),
        figures.latencies(summaries),
        tables.latencies(summaries),
        (
            ("All percentiles", tables.all_latencies(summaries)),
            ("Service levels, goodput and cache hits", tables.service(summaries)),
        ),
        note=f"Percentiles pool the requests of all valid runs. {FEW}",
    )


def results(analysis: Analysis) -> Section:
    """What each service did: success beside speed."""
    return Section(
        "results",
        "Results",
        takeaways.results(analysis),
        table=tables_service.results(analysis),
        note="Percentiles count a request that failed, timed out or was refused as +∞, so that refusing "
        f"makes nobody fast. {FEW}",
    )


def changes(analysis: Analysis) -> Section | None:
    """Before and after, figure by figure."""
    if len(analysis.summaries) < 2:
        return None
    base, last = analysis.baseline, analysis.summaries[-1]
    found = [(c.measure.name, c.comparison) for c in tables_service.changes_of(analysis, last)]
    return Section(
        "change",
        f"Before and after: “{base.name}” against “{last.name}”",
        takeaways.changes(analysis),
        figures_service.changes(found, base.name) if any(c.ratio.bounded for _, c in found) else None,
        tables_service.changes(analysis),
        note=f"The answer of the report rests on {analysis.measure.name} alone; of several figures looked at "
        "together, one in twenty would seem to change by chance.",
    )


def percentiles(analysis: Analysis) -> Section:
    """How many requests were answered within which time."""
    return Section(
        "latency",
        "Latency, failures included",
        takeaways.percentiles(analysis),
        figures_service.reached(analysis.summaries),
        more=(("All percentiles", tables_service.percentiles(analysis.summaries)),),
        unfolded=len(analysis.summaries) <= 3,
        note="From the intended start, so a wait inside the client counts; “from sent” leaves it out. "
        "Dashed: the limit that requests were judged by.",
    )


def frontier(analysis: Analysis) -> Section | None:
    """Throughput against latency, where there are enough points to choose from."""
    if len(analysis.summaries) < (2 if analysis.kind == "study" else 3):
        return None
    return Section(
        "frontier",
        "Throughput against latency",
        takeaways.frontier(analysis.summaries),
        figures.frontier(analysis.summaries),
    )


def levels(analysis: Analysis) -> Section | None:
    """Goodput of each class under its limits."""
    table = tables_service.classes(analysis)
    classes = {r.request_class for s in analysis.summaries for r in s.records}
    told = analysis.kind == "sweep" or (analysis.kind == "study" and len(classes) == 1)  # in their tables
    if not table.rows or told:
        return None
    return Section(
        "goodput",
        "Service levels and goodput",
        takeaways.levels(analysis),
        table=table,
        note="A request counts as good if it completed within every limit of its class. The share is of all "
        "requests sent; the rate is per second of the sending window.",
    )


def rates(analysis: Analysis) -> Section | None:
    """Whole run and steady window, for loads that have one."""
    if analysis.kind in ("study", "sweep"):
        return None
    return Section(
        "rates",
        "Rates: whole run and steady window",
        takeaways.rates(analysis),
        more=(("Windows", tables_service.windows(analysis)),),
        unfolded=len(analysis.runs) <= 8,
        note="The steady window leaves out ramp and drain; its bounds are seconds since the run's start.",
    )


def time(analysis: Analysis) -> Section | None:
    """Where an average request's time goes, where somebody stamped it."""
    summaries = analysis.summaries
    if not any(s.time is not None and s.time.segments for s in summaries):
        return None
    return Section(
        "time",
        "Where an average request's time goes",
        takeaways.where_time_goes(analysis),
        figures.where_time_goes(summaries),
        more=(("Seconds by segment", tables.time_shares(summaries)),),
        note="Exclusive segments, each stamped at both ends; the residual is what no stamp covers. A "
        "request waits for its whole step, so a step's time counts in full for each of its rows.",
    )


def over_time(analysis: Analysis) -> Section | None:
    """One run of each group on a time axis."""
    typical = [s.typical for s in analysis.summaries]
    if not any(map(worth_showing, typical)):
        return None
    shown = analysis.summaries.index(takeaways.shown_in_timeline(analysis))
    more = (
        ("Events", tables.events(analysis)),
        ("What the server says of itself", tables_service.server(analysis)),
    )
    return Section(
        "timeline",
        "The run over time",
        takeaways.timeline(analysis),
        timeline(typical, shown, [s.name for s in analysis.summaries]),
        more=tuple((title, table) for title, table in more if table.rows),
        note="The run of median throughput of each group." if len(analysis.runs) > len(typical) else "",
    )


def quality(analysis: Analysis) -> Section | None:
    """Distance from the fp32 reference beside speed."""
    summaries = analysis.summaries
    if not any(s.quality is not None for s in summaries):
        return None
    return Section(
        "quality",
        "Quality beside speed",
        takeaways.quality(analysis),
        figures.speed_and_quality(summaries),
        tables.qualities(summaries),
        note="The reference is the same model in fp32 with plain attention and plain weights, "
        f"one request at a time{_dequantised(analysis)}. KL, agreement and perplexity come from whole texts, "
        "the greedy match from the measured runs themselves.",
    )


def _dequantised(analysis: Analysis) -> str:
    """What the reference is itself made of, where the model's file holds quantized weights."""
    told = [note for note in model_notes(analysis.runs[0]) if note.startswith("weights are dequantised")]
    return "".join(f"; its own {note}, and what that lost is in no figure here" for note in told)


def client(analysis: Analysis) -> Section | None:
    """Whether the client was fast enough to measure the service."""
    if not any(run.manifest.get("client") for run in analysis.runs):
        return None
    return Section(
        "client",
        "The client's own health",
        takeaways.client(analysis),
        table=tables_service.client(analysis),
        note="A client that sends late or stalls measures itself; beyond its limits a run is invalid as "
        "“client-bound”. Lateness counts into every latency.",
    )


def sweep(analysis: Analysis) -> list[Section]:
    """The points of a sweep: rate or users against tail latency."""
    if analysis.sweep is None:
        return []
    return [
        Section(
            "points",
            "How much load the service bears",
            headline(analysis).detail,
            figures_sweep.load_and_latency(analysis.sweep),
            tables_service.points(analysis.sweep),
            note=f"{FEW} A point whose run is invalid for reasons that are not the load's does not count.",
        )
    ]


def profiles(analysis: Analysis) -> list[Section]:
    """What `perflab profile` found, run by run; numbered where there are several."""
    if analysis.kind != "profile":
        return []
    from perflab.report.profile import sections_of

    several = len(analysis.runs) > 1
    return [
        replace(s, anchor=f"{s.anchor}{n}", title=f"{s.title} ({run.variant}, {n})") if several else s
        for n, run in enumerate(analysis.runs, 1)
        for s in sections_of(run)
    ]


def validity(analysis: Analysis) -> Section:
    """Every run's verdict with all its reasons."""
    return Section(
        "validity",
        "Validity of each run",
        takeaways.validity(analysis),
        more=(("Runs", tables.validity(analysis)),),
        unfolded=not all(run.valid for run in analysis.runs),
        note="; ".join(note[0].upper() + note[1:] for note in tables.common_notes(analysis)),
    )
