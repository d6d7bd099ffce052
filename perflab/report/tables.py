"""Tables of a report: rows of text with notes and tones, for HTML and Markdown alike.

Owns columns and wording of cells. Computes nothing that `analysis` has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perflab.clock import NS_PER_S
from perflab.measure import metrics
from perflab.measure.stats import Comparison, Estimate, samples_needed
from perflab.report import units
from perflab.report.analysis import Analysis
from perflab.report.summary import CLOSE_KL, NOT_THE_MODELS, QUANTILES, SAME_KL, Summary, rate_of
from perflab.studies.store import Run


class Cell(NamedTuple):
    """`text` is the value, `note` what qualifies it (an interval, a reason), `tone` how it reads."""

    text: str
    note: str = ""
    tone: str = ""  # good, bad, unsure, muted, flag


@dataclass(frozen=True, slots=True)
class Table:
    """Headers and rows; columns of numbers are aligned right, those in `words` left."""

    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    words: tuple[int, ...] = (0,)

    def markdown(self) -> str:
        """The same table in Markdown, notes in brackets."""
        lines = ["| " + " | ".join(self.headers) + " |"]
        lines.append(
            "|" + "|".join("---" if i in self.words else "---:" for i in range(len(self.headers))) + "|"
        )
        for row in self.rows:
            cells = (f"{c.text} ({c.note})" if c.note else c.text for c in row)
            lines.append("| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |")
        return "\n".join(lines)


TONE_OF = {"faster": "good", "slower": "bad", "cannot tell": "unsure"}


def verdict(comparison: Comparison | None) -> Cell:
    """A comparison's answer, with the reason where it cannot tell."""
    if comparison is None:
        return Cell("baseline", tone="muted")
    note = comparison.reason if comparison.answer == "cannot tell" and comparison.detectable is None else ""
    if "valid" in comparison.reason:
        note = comparison.reason
    return Cell(comparison.answer, note, TONE_OF[comparison.answer])


def ratio(comparison: Comparison | None) -> Cell:
    """A ratio with its interval."""
    if comparison is None or comparison.ratio.value is None:
        return Cell(units.MISSING, tone="muted")
    return Cell(units.times(comparison.ratio.value), units.interval(comparison.ratio, _bounded_times))


def _bounded_times(value: float) -> str:
    return "below 0.01×" if value < 0.01 else "above 100×" if value > 100 else units.times(value)


def estimate(value: Estimate, shape: Any = units.number, need: int = 0) -> Cell:
    """A value with its interval, flagged where the samples do not bound it."""
    if value.value is None:
        return Cell(units.MISSING, tone="muted")
    few = not value.bounded and (not need or value.n < need)
    note = units.interval(value, shape)
    if few and not need:
        note = f"{note}; {value.n} samples".removeprefix("; ")
    return Cell(shape(value.value), note, "flag" if few else "")


def rate(value: Estimate) -> Cell:
    """A rate with its interval, unless that is too wide to say anything."""
    if value.value is not None and value.low and value.high and value.high > 100 * value.low:
        return Cell(units.number(value.value), f"{value.n} runs, far apart", "flag")
    cell = estimate(value)
    return cell._replace(note=cell.note.replace(" samples", " run" if value.n == 1 else " runs"))


def ladder(analysis: Analysis) -> Table:
    """Rung, throughput, step against the rung below with its verdict, total against the baseline, quality."""
    rows = []
    for s in analysis.summaries:
        rows.append(
            (
                Cell(s.name, s.description),
                rate(s.tokens_per_s),
                ratio(s.previous),
                verdict(s.previous),
                Cell(units.detectable(s.previous), tone="muted"),
                ratio(s.first),
                Cell(units.seconds(s.latencies["TTFT"][0.5].value)),
                Cell(units.seconds(s.latencies["ITL"][0.99].value)),
                _quality(s),
                runs_cell(s),
            )
        )
    headers = (
        "rung",
        "output tokens/s",
        "step",
        "verdict on the step",
        "detectable",
        "total",
        "TTFT p50",
        "ITL p99",
        "top-1",
        "valid runs",
    )
    return Table(headers, tuple(rows), words=(0, 3))


def _quality(summary: Summary) -> Cell:
    """Top-1 agreement with the reference, the divergence beside it; flagged where it is not close."""
    kl = summary.kl_nats
    if summary.forced:
        return Cell("not the model's output", tone="flag")
    if kl is None:
        return Cell(units.MISSING, tone="muted")
    return Cell(
        units.percent(summary.top1),
        "" if kl <= SAME_KL else f"KL {units.number(kl, 2)}",
        "flag" if kl > CLOSE_KL else "",
    )


def runs_cell(summary: Summary) -> Cell:
    valid, whole = sum(run.valid for run in summary.runs), len(summary.runs)
    return Cell(f"{valid} of {whole}", tone="" if valid == whole else "flag")


SHOWN = (("TTFT", 0.5), ("TTFT", 0.9), ("ITL", 0.5), ("ITL", 0.99), ("TPOT", 0.5), ("E2E", 0.5), ("E2E", 0.9))
"""The percentiles of the short latency table."""


def completed(summary: Summary) -> Cell:
    """The share of requests that completed, with what became of the others."""
    count = metrics.counts(summary.records)
    kinds = (
        (count.failed, "failed"),
        (count.timed_out, "timed out"),
        (count.rejected, "refused"),
        (count.unfinished, "unfinished"),
        (count.cancelled, "cancelled by users"),
    )
    share = summary.completed_share
    others = ", ".join(f"{number} {kind}" for number, kind in kinds if number)
    return Cell(units.percent(share), others, "" if share == 1 else "flag")


def latencies(summaries: Sequence[Summary]) -> Table:
    """The main percentiles with intervals, one line a variant, the success rate on the same line."""
    rows = tuple(
        (
            Cell(s.name),
            *(estimate(s.latencies[metric][q], units.seconds, samples_needed(q)) for metric, q in SHOWN),
            completed(s),
        )
        for s in summaries
    )
    return Table(("variant", *(f"{metric} p{100 * q:.0f}" for metric, q in SHOWN), "completed"), rows)


def all_latencies(summaries: Sequence[Summary]) -> Table:
    """Every percentile of every latency metric with its interval and number of samples."""
    rows = []
    for s in summaries:
        for metric, found in s.latencies.items():
            first = metric == next(iter(s.latencies))
            cells = [estimate(found[q], units.seconds, samples_needed(q)) for q in QUANTILES]
            rows.append(
                (
                    Cell(s.name if first else ""),
                    Cell(metric),
                    *cells,
                    Cell(f"{found[0.5].n:,}"),
                )
            )
    return Table(("variant", "metric", "p50", "p90", "p99", "samples"), tuple(rows), words=(0, 1))


def service(summaries: Sequence[Summary]) -> Table:
    """Goodput under the study's limits, requests/s, success-only E2E beside the inclusive one."""
    rows = []
    for s in summaries:
        both = [
            metrics.stats.percentile(metrics.samples(s.records, metrics.e2e_s, success_only=only), 0.9)
            for only in (False, True)
        ]
        good = s.goodput
        rows.append(
            (
                Cell(s.name),
                rate(s.requests_per_s),
                Cell(units.MISSING, tone="muted") if good is None else estimate(good.share, units.percent),
                Cell(units.number(good.requests_per_s if good else None)),
                Cell(units.seconds(both[0].value)),
                Cell(units.seconds(both[1].value)),
                Cell(units.number(_chunk_tokens(s))),
                Cell(units.percent(_cached_share(s))),
            )
        )
    headers = (
        "variant",
        "requests/s",
        "met every SLO",
        "goodput, requests/s",
        "E2E p90",
        "E2E p90, successes only",
        "tokens per chunk",
        "prompt tokens from cache",
    )
    return Table(headers, tuple(rows))


def _chunk_tokens(summary: Summary) -> float | None:
    sizes = [n for r in summary.records for n in metrics.tokens_per_chunk(r)]
    return sum(sizes) / len(sizes) if sizes else None


def _cached_share(summary: Summary) -> float:
    whole = sum(r.prompt_tokens for r in summary.records)
    return sum(r.cached_tokens for r in summary.records) / whole if whole else 0.0


def time_shares(summaries: Sequence[Summary]) -> Table:
    """Seconds of an average request by segment, with the residual and E2E."""
    from perflab.measure import latency

    known = [(s, s.time) for s in summaries if s.time is not None]
    names = latency.ordered(name for _, time in known for name in time.segments)
    rows = []
    for s, time in known:
        parts = [Cell(units.seconds(time.segments.get(name))) for name in names]
        left = Cell(
            units.seconds(time.residual_s),
            units.percent(time.residual_s / time.e2e_s if time.e2e_s else None),
        )
        rows.append((Cell(s.name), *parts, left, Cell(units.seconds(time.e2e_s))))
    return Table(("variant", *names, "residual", "E2E"), tuple(rows))


def qualities(summaries: Sequence[Summary]) -> Table:
    """Distance from the fp32 reference beside speed."""
    rows = []
    for s in summaries:
        held = s.quality
        if held is None:
            rows.append((Cell(s.name), ratio(s.first), *[Cell(units.MISSING, tone="muted")] * 4, Cell("")))
            continue
        kl, top1, ppl = (Estimate(**held[key]) for key in ("kl_nats", "top1", "perplexity"))
        rows.append(
            (
                Cell(s.name, NOT_THE_MODELS if s.forced else ""),
                ratio(s.first),
                estimate(kl, lambda v: units.number(v, 2)),
                estimate(top1, units.percent),
                Cell(
                    units.number(ppl.value, 4), f"reference {units.number(held['reference_perplexity'], 4)}"
                ),
                estimate(s.greedy, units.percent),
                Cell(held.get("key", ""), tone="muted"),
            )
        )
    headers = (
        "variant",
        "total speed-up",
        "KL, nats",
        "top-1 agreement",
        "perplexity",
        "greedy match",
        "numerics",
    )
    return Table(headers, tuple(rows), words=(0, 6))


def validity(analysis: Analysis) -> Table:
    """One line per run: rate, what else the machine did, the verdict and its reasons."""
    rows = []
    common = set(common_notes(analysis))
    for s in analysis.summaries:
        for run in s.runs:
            noise = run.manifest.get("noise", {}).get("others_share")
            why = "; ".join(f"{name}: {detail}" for name, detail in run.reasons)
            own = [note for note in notes_of(run) if note not in common]
            rows.append(
                (
                    Cell(s.name),
                    Cell(str(run.round + 1)),
                    Cell(units.number(rate_of(run))),
                    Cell(units.percent(noise, 0)),
                    Cell("valid" if run.valid else why, "; ".join(own), "good" if run.valid else "bad"),
                )
            )
    headers = ("variant", "round", "output tokens/s", "cores taken by others", "verdict")
    return Table(headers, tuple(rows), words=(0, 4))


MAX_EVENTS = 60


def events(analysis: Analysis) -> Table:
    """What happened to the service during the typical run of each variant, at most `MAX_EVENTS` lines."""
    rows = []
    for s in analysis.summaries:
        run = s.typical
        for event in run.events:
            since = (event.time_ns - int(run.manifest.get("started_ns", 0))) / NS_PER_S
            detail = ", ".join(f"{name} {value}" for name, value in event.detail.items())
            rows.append(
                (Cell(s.name), Cell(units.seconds(since)), Cell(event.kind), Cell(event.subject, detail))
            )
    return Table(("variant", "time", "event", "subject"), tuple(rows[:MAX_EVENTS]), words=(0, 2, 3))


def notes_of(run: Run) -> list[str]:
    """What is worth knowing of a run without making it invalid."""
    return list(run.manifest.get("validity", {}).get("notes", []))


def common_notes(analysis: Analysis) -> list[str]:
    """The notes that every run has; said once instead of on every line."""
    return [
        note for note in notes_of(analysis.runs[0]) if all(note in notes_of(run) for run in analysis.runs)
    ]
