"""One self-contained HTML file, and its Markdown summary, from run directories.

Owns the page. Works offline: plotly.js is inlined once, figures are JSON, nothing is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from perflab.errors import StoreError
from perflab.measure import metrics, quality
from perflab.measure.stats import samples_needed
from perflab.measure.validity import REASONS
from perflab.report import figures, tables, takeaways, units
from perflab.report.analysis import CLOSE_KL, Analysis, analyse, headline, quality_words
from perflab.report.glossary import GLOSSARY
from perflab.report.tables import Table
from perflab.report.timeline import timeline


@dataclass(frozen=True, slots=True)
class Section:
    """A chapter of the report: its takeaway, a figure, a table; `more` holds folded tables by title."""

    anchor: str
    title: str
    takeaway: str
    figure: go.Figure | None = None
    table: Table | None = None
    more: tuple[tuple[str, Table], ...] = ()
    unfolded: bool = False
    note: str = ""


def write_report(run_dirs: Sequence[Path], out: Path, compare_invalid: bool = False) -> Path:
    """Render run or study directories into one HTML file; returns its path.

    The file appears whole or not at all. Raises StoreError where there is nothing to report or
    `out` cannot be written.
    """
    page = render(analyse(run_dirs, compare_invalid))
    out = Path(out)
    draft = out.with_name(f".{out.name}.draft")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, out)
    except OSError as error:
        raise StoreError(f"{out}: cannot be written ({error})") from None
    return out


def render(analysis: Analysis) -> str:
    """The page as text."""
    chapters = sections(analysis)
    drawn = {s.anchor: json.loads(s.figure.to_json()) for s in chapters if s.figure is not None}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perflab.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.jinja").render(
        title=analysis.study.get("name") or "run report",
        about=about(analysis),
        headline=headline(analysis),
        tiles=tiles(analysis),
        sections=chapters,
        failures=analysis.failures,
        notes=[*analysis.study.get("notes", []), *_model_notes(analysis)],
        manifest=manifest(analysis),
        formulas=metrics.FORMULAS | quality.FORMULAS,
        reasons=REASONS,
        glossary=GLOSSARY,
        css=resources.files("perflab.report").joinpath("templates/report.css").read_text(encoding="utf-8"),
        plotly_js=get_plotlyjs(),
        figures_json=json.dumps(drawn, allow_nan=False).replace("<", "\\u003c"),
    )


def sections(analysis: Analysis) -> list[Section]:
    """The chapters in reading order."""
    summaries = analysis.summaries
    typical = [s.typical for s in summaries]
    scored = any(s.quality is not None for s in summaries)
    return [
        Section(
            "ladder",
            "The ladder",
            takeaways.ladder(analysis),
            figures.ladder(summaries),
            tables.ladder(analysis),
            note="“Step” compares with the rung below, “total” with the baseline; both are ratios of output "
            "tokens/s over paired, interleaved rounds with a 95 % interval. Amber in “top-1”: the "
            f"distribution is not close to the reference's (KL above {CLOSE_KL} nats).",
        ),
        Section(
            "latency",
            "Latency",
            takeaways.latencies(analysis),
            figures.latencies(summaries),
            tables.latencies(summaries),
            (
                ("All percentiles", tables.all_latencies(summaries)),
                ("Service levels, goodput and cache hits", tables.service(summaries)),
            ),
            note="Percentiles pool the requests of all valid runs. Amber: too few samples for an interval "
            f"bounded on both sides (p50 needs {samples_needed(0.5)}, p90 {samples_needed(0.9)}, "
            f"p99 {samples_needed(0.99)}).",
        ),
        Section(
            "frontier",
            "Throughput against latency",
            takeaways.frontier(summaries),
            figures.frontier(summaries),
        ),
        Section(
            "time",
            "Where an average request's time goes",
            takeaways.where_time_goes(analysis),
            figures.where_time_goes(summaries),
            more=(("Seconds by segment", tables.time_shares(summaries)),),
            note="Exclusive segments, each stamped at both ends; the residual is what no stamp covers. A "
            "request waits for its whole step, so a step's time counts in full for each of its rows.",
        ),
        Section(
            "timeline",
            "Batches, KV blocks and requests over time",
            takeaways.timeline(analysis),
            timeline(typical, summaries.index(takeaways.shown_in_timeline(analysis)))
            if any(run.steps for run in typical)
            else None,
            more=(("Events", events),) if (events := tables.events(analysis)).rows else (),
            note="The run of median throughput of each variant.",
        ),
        Section(
            "quality",
            "Quality beside speed",
            takeaways.quality(analysis),
            figures.speed_and_quality(summaries) if scored else None,
            tables.qualities(summaries) if scored else None,
            note="The reference is the same model in fp32 with plain attention and plain weights, "
            "one request at a time. KL, agreement and perplexity come from whole texts, the greedy match "
            "from the measured runs themselves."
            if scored
            else "",
        ),
        Section(
            "validity",
            "Validity of each run",
            takeaways.validity(analysis),
            more=(("Runs", tables.validity(analysis)),),
            unfolded=not all(run.valid for run in analysis.runs),
            note="; ".join(note[0].upper() + note[1:] for note in tables.common_notes(analysis)),
        ),
    ]


def tiles(analysis: Analysis) -> list[dict[str, str]]:
    """The four numbers at the top: before and after."""
    base, best = analysis.baseline, analysis.best

    def tile(label: str, before: str, after: str, unit: str = "") -> dict[str, str]:
        return {"label": label, "before": before if best is not base else "", "after": after, "unit": unit}

    found = [tile("output tokens/s", *(units.number(s.tokens_per_s.value) for s in (base, best)))]
    for metric, name in (("TTFT", "time to first token, p50"), ("TPOT", "time per output token, p50")):
        found.append(tile(name, *(units.seconds(s.latencies[metric][0.5].value) for s in (base, best))))
    agreement = units.percent(best.top1) if best.top1 is not None else units.MISSING
    found.append({"label": "top-1 agreement with fp32", "before": "", "after": agreement, "unit": ""})
    return found


def about(analysis: Analysis) -> list[tuple[str, str]]:
    """What was measured on what, in a line or two."""
    first = analysis.runs[0].manifest
    machine, workload, model = (first.get(key, {}) for key in ("machine", "workload", "model"))
    cores = machine.get("usable_cores")
    hardware = ", ".join(map(str, machine.get("gpus") or [])) or str(machine.get("cpu", ""))
    threads = f", {cores} cores" if cores else ""
    when = max(str(run.manifest.get("ended_at", "")) for run in analysis.runs)
    asked = [
        f"{workload.get('requests', len(analysis.runs[0].requests))} requests a run",
        str(workload.get("description", "")),
    ]
    return [
        ("model", str(model.get("name", ""))),
        ("machine", f"{hardware}{threads}"),
        ("workload", "; ".join(part for part in asked if part)),
        ("measured", f"{len(analysis.runs)} runs, {when[:16].replace('T', ' ')} UTC" if when else ""),
    ]


def manifest(analysis: Analysis) -> list[tuple[str, list[tuple[str, str]]]]:
    """What every run shares, then what each variant's engine was set to."""
    first = analysis.runs[0].manifest
    shared: dict[str, Any] = {
        key: first[key]
        for key in ("model", "workload", "slo", "seed", "machine", "environment")
        if key in first
    }
    groups = [("shared by all runs", tables.flat(shared))]
    base = first.get("engine", {})
    for index, s in enumerate(analysis.summaries):
        engine = s.runs[0].manifest.get("engine", {})
        changed = {k: v for k, v in engine.items() if index == 0 or base.get(k) != v}
        lines = tables.flat({"dtype": s.dtype, **changed})
        groups.append(
            (s.name if index == 0 else f"{s.name}, where it differs from {analysis.baseline.name}", lines)
        )
    return groups


def _model_notes(analysis: Analysis) -> list[str]:
    return [str(note) for note in analysis.runs[0].manifest.get("model", {}).get("notes", [])]


def summary_markdown(run_dirs: Sequence[Path], compare_invalid: bool = False) -> str:
    """The report's words and main tables in Markdown, for a terminal or a pull request."""
    analysis = analyse(run_dirs, compare_invalid)
    top = headline(analysis)
    lines: list[Any] = [
        f"# {analysis.study.get('name') or 'run report'}",
        "",
        f"**{top.title}.** {top.detail}",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in about(analysis)]
    if analysis.best is not analysis.baseline:
        lines.append(f"- quality of “{analysis.best.name}”: {quality_words(analysis.best)}")
    lines += [f"- “{name}” could not run here: {why}" for name, why in analysis.failures.items()]
    for section in sections(analysis):
        lines += ["", f"## {section.title}", "", section.takeaway]
        if section.table is not None:
            lines += ["", section.table.markdown()]
    return "\n".join(lines) + "\n"
