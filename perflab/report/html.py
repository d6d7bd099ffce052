"""One self-contained HTML file, and its Markdown summary, from any number of runs of any kind.

Owns the page: header, the answer of each part, its chapters, what was run. Works offline: plotly.js
is inlined once, figures are JSON, nothing is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from perflab.errors import StoreError
from perflab.measure import capacity, metrics, paired, quality, speculation
from perflab.measure.validity import REASONS
from perflab.report import takeaways, units
from perflab.report.analysis import Analysis, parts
from perflab.report.glossary import GLOSSARY, elsewhere
from perflab.report.headlines import Headline, headline
from perflab.report.manifest import about, asked, manifest, notes
from perflab.report.section import Section
from perflab.report.sections import sections
from perflab.report.speculation import speculations
from perflab.report.summary import Summary, quality_words

__all__ = ["Section", "render", "summary_markdown", "write_report"]


@dataclass(frozen=True, slots=True)
class Part:
    """What the page says of one part, ready to be laid out."""

    title: str
    anchor: str
    asked: str
    headline: Headline
    validity: str
    valid: bool  # every run
    counts: bool  # any run
    tiles: list[dict[str, str]]
    sections: list[Section]
    failures: dict[str, str]


def write_report(run_dirs: Sequence[Path], out: Path, compare_invalid: bool = False) -> Path:
    """Render directories of runs, of any kinds and any number, into one HTML file; returns its path.

    Where `out` is a directory the file is `report.html` in it. It appears whole or not at all.
    Raises StoreError where there is nothing to report, a directory is damaged or `out` cannot be
    written.
    """
    return save(render(parts(run_dirs, compare_invalid)), Path(out))


def save(text: str, out: Path, name: str = "report.html") -> Path:
    """Write a whole file or none of it; as `name` where `out` is a directory. Raises StoreError."""
    out = out / name if out.is_dir() else out
    draft = out.with_name(f".{out.name}.draft")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, out)
    except OSError as error:
        raise StoreError(f"{out}: cannot be written ({error})") from None
    finally:
        if draft.parent.is_dir():
            draft.unlink(missing_ok=True)
    return out


def render(analyses: Sequence[Analysis]) -> str:
    """The page as text."""
    laid = [_part(analysis, index, len(analyses)) for index, analysis in enumerate(analyses)]
    drawn = {
        s.anchor: json.loads(s.figure.to_json())
        for part in laid
        for s in part.sections
        if s.figure is not None
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perflab.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.jinja").render(
        title=title_of(analyses),
        about=about(analyses),
        parts=laid,
        notes=notes(analyses),
        manifest=manifest(analyses),
        formulas=formulas(analyses),
        reasons=REASONS,
        glossary=GLOSSARY,
        elsewhere=elsewhere(),
        css=resources.files("perflab.report").joinpath("templates/report.css").read_text(encoding="utf-8"),
        plotly_js=get_plotlyjs(),
        figures_json=json.dumps(drawn, allow_nan=False).replace("<", "\\u003c"),
    )


def formulas(analyses: Sequence[Analysis]) -> dict[str, str]:
    """How the figures that the page holds are defined."""
    kinds = {analysis.kind for analysis in analyses}
    scored = any(s.quality is not None for analysis in analyses for s in analysis.summaries)
    guessed = any(speculations(analysis.summaries) for analysis in analyses)
    return {
        **metrics.FORMULAS,
        **(capacity.FORMULAS if "sweep" in kinds else {}),
        **({"times as fast, compared in pairs": paired.FORMULA} if "compare" in kinds else {}),
        **(quality.FORMULAS if scored else {}),
        **(speculation.FORMULAS if guessed else {}),
    }


def title_of(analyses: Sequence[Analysis]) -> str:
    """The report's name: that of its one part, or of what its parts are."""
    titles = list(dict.fromkeys(analysis.title for analysis in analyses))
    return titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more"


def _part(analysis: Analysis, index: int, count: int) -> Part:
    """Anchors of several parts are told apart by a number."""
    prefix = f"{index + 1}-" if count > 1 else ""
    return Part(
        analysis.title,
        f"part-{index + 1}",
        asked(analysis),
        headline(analysis),
        takeaways.validity(analysis),
        all(run.valid for run in analysis.runs),
        any(run.valid for run in analysis.runs),
        tiles(analysis),
        [replace(s, anchor=f"{prefix}{s.anchor}") for s in sections(analysis)],
        dict(analysis.failures),
    )


def after(analysis: Analysis) -> Summary:
    """The group whose numbers stand at the top: what is proven best, or simply what came last."""
    if analysis.kind == "study" or len(analysis.summaries) > 2:
        return analysis.best
    return analysis.summaries[-1]


def tiles(analysis: Analysis) -> list[dict[str, str]]:
    """The four numbers at the top: before and after."""
    if analysis.kind in ("sweep", "profile"):
        return []
    base, best = analysis.baseline, after(analysis)
    word = "baseline" if analysis.kind == "study" else "before"

    def tile(label: str, before: str, after: str) -> dict[str, str]:
        return {"label": label, "before": f"{word} {before}" if best is not base else "", "after": after}

    def latency(metric: str, q: float, name: str) -> dict[str, str]:
        return tile(name, *(units.seconds(s.latencies[metric][q].value) for s in (base, best)))

    found = [
        tile("output tokens/s", *(units.number(s.tokens_per_s.value) for s in (base, best))),
        latency("TTFT", 0.5, "time to first token, p50"),
        latency("TPOT", 0.5, "time per output token, p50"),
    ]
    if analysis.kind == "study":
        agreement = units.percent(best.top1) if best.top1 is not None else units.MISSING
        return [*found, {"label": "top-1 agreement with fp32", "before": "", "after": agreement}]
    good = [s.goodput.share.value if s.goodput else s.completed_share for s in (base, best)]
    label = "met every SLO" if best.goodput and base.goodput else "requests completed"
    return [tile(label, *map(units.percent, good)), *found, latency("E2E", 0.99, "whole answer, p99")]


def summary_markdown(run_dirs: Sequence[Path], compare_invalid: bool = False) -> str:
    """The report's words and main tables in Markdown, for a terminal or a pull request."""
    analyses = parts(run_dirs, compare_invalid)
    lines: list[Any] = [f"# {title_of(analyses)}", ""]
    lines += [f"- {name}: {value}" for name, value in about(analyses) if value]
    for analysis in analyses:
        top = headline(analysis)
        if len(analyses) > 1:
            lines += ["", f"# {analysis.title}"]
        lines += ["", f"**{top.title}.** {top.detail}", "", takeaways.validity(analysis)]
        if analysis.best is not analysis.baseline and analysis.best.quality is not None:
            lines += ["", f"Quality of “{analysis.best.name}”: {quality_words(analysis.best)}."]
        lines += [f"\n“{name}” could not run here: {why}" for name, why in analysis.failures.items()]
        for section in sections(analysis):
            lines += ["", f"## {section.title}", "", section.takeaway]
            tables = [section.table] if section.table else [t for _, t in section.more if section.unfolded]
            for table in tables:
                lines += ["", table.markdown()]
    return "\n".join(lines) + "\n"
