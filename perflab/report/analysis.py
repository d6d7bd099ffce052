"""From runs to what a report says: one summary per variant, comparisons, the headline.

Owns which runs are pooled and which comparisons are allowed. Draws and formats nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perflab.measure import latency, metrics, stats
from perflab.measure.metrics import SLO
from perflab.report import units
from perflab.studies import quality, store
from perflab.studies.store import Run
from perflab.types import RequestRecord

QUANTILES = (0.5, 0.9, 0.99)
SAME_KL = 1e-4
CLOSE_KL = 0.02


@dataclass(slots=True, eq=False)
class Summary:
    """One variant: its runs by round and what they amount to. Latencies pool the requests of its
    valid runs, or of all where none is valid."""

    name: str
    runs: list[Run]
    quality: Mapping[str, Any] | None = None
    previous: stats.Comparison | None = None
    first: stats.Comparison | None = None
    previous_name: str = ""
    latencies: dict[str, dict[float, stats.Estimate]] = field(default_factory=dict)
    time: latency.Decomposition | None = None
    tokens_per_s: stats.Estimate = field(default_factory=lambda: stats.Estimate(None))
    requests_per_s: stats.Estimate = field(default_factory=lambda: stats.Estimate(None))
    goodput: metrics.Goodput | None = None
    greedy: stats.Estimate = field(default_factory=lambda: stats.Estimate(None))

    @property
    def used(self) -> list[Run]:
        """The runs whose requests are pooled."""
        return [run for run in self.runs if run.valid] or self.runs

    @property
    def records(self) -> list[RequestRecord]:
        return [record for run in self.used for record in run.requests]

    @property
    def description(self) -> str:
        return str(self.runs[0].manifest.get("description", ""))

    @property
    def dtype(self) -> str:
        return str(self.runs[0].manifest.get("model", {}).get("dtype", ""))

    @property
    def typical(self) -> Run:
        """The run of median throughput, for pictures of one run."""
        ranked = sorted(self.used, key=lambda run: rate_of(run) or 0.0)
        return ranked[len(ranked) // 2]

    @property
    def kl_nats(self) -> float | None:
        return None if self.quality is None else self.quality["kl_nats"]["value"]

    @property
    def top1(self) -> float | None:
        return None if self.quality is None else self.quality["top1"]["value"]


def rate_of(run: Run) -> float | None:
    """Output tokens/s of a run: steady window of an open-loop run, whole run otherwise."""
    steady = run.manifest.get("workload", {}).get("open_loop") and metrics.steady_throughput(run.requests)
    rate = steady or metrics.throughput(run.requests)
    return rate.output_tokens_per_s if rate else None


@dataclass(slots=True, eq=False)
class Analysis:
    """Everything a report says about some runs, in the order of their variants."""

    summaries: list[Summary]
    study: Mapping[str, Any]
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def baseline(self) -> Summary:
        return self.summaries[0]

    @property
    def best(self) -> Summary:
        """The variant with the highest proven speed-up over the baseline among those whose quality is
        close to the reference (or not measured), else among all; the baseline if none is proven."""
        close = [s for s in self.proven if (s.kl_nats or 0.0) <= CLOSE_KL]
        return next(iter(close or self.proven), self.baseline)

    @property
    def proven(self) -> list[Summary]:
        """The variants that are proven faster than the baseline, fastest first."""
        found = [s for s in self.summaries if s.first is not None and s.first.answer == "faster"]
        return sorted(found, key=lambda s: -((s.first and s.first.ratio.value) or 0.0))

    @property
    def runs(self) -> list[Run]:
        return [run for summary in self.summaries for run in summary.runs]


def analyse(paths: Sequence[Path], compare_invalid: bool = False) -> Analysis:
    """Read run or study directories and summarise them by variant.

    Comparisons take rounds in which both runs are valid, or all with `compare_invalid`. Raises
    StoreError where a directory holds no run or a damaged one.
    """
    study: dict[str, Any] = {}
    found: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for path in map(Path, paths):
        if (path / "study.json").exists():
            study = study or store.read_json(path / "study.json")["declaration"]
        for name, target in (("quality.json", found), ("failures.json", failures)):
            if (path / name).exists():
                target.update(store.read_json(path / name))
    groups: dict[str, list[Run]] = {}
    for path in store.find_runs(paths):
        run = store.read_run(path)
        groups.setdefault(run.variant, []).append(run)
    order = {v["name"]: i for i, v in enumerate(study.get("variants", []))}
    names = sorted(groups, key=lambda name: order.get(name, len(order)))
    summaries = [summarise(name, groups[name], found.get(name)) for name in names]
    for before, summary in itertools.pairwise(summaries):
        summary.previous, summary.previous_name = compare_runs(before, summary, compare_invalid), before.name
        summary.first = compare_runs(summaries[0], summary, compare_invalid)
    return Analysis(summaries, study, failures)


def summarise(name: str, runs: Sequence[Run], found_quality: Mapping[str, Any] | None = None) -> Summary:
    """Pool a variant's runs. Throughput is the geometric mean over runs, as a ratio of two variants is
    that of their pairs; latencies are percentiles over requests."""
    summary = Summary(name, sorted(runs, key=lambda run: run.round), found_quality)
    used = summary.used
    summary.tokens_per_s = stats.geometric_mean([r for run in used if (r := rate_of(run))])
    rates = [metrics.throughput(run.requests) for run in used]
    summary.requests_per_s = stats.geometric_mean([r.requests_per_s for r in rates if r and r.requests_per_s])
    summary.latencies = {
        metric: {q: percentile_of(summary.records, q) for q in QUANTILES}
        for metric, percentile_of in metrics.LATENCIES.items()
    }
    parts = [d for run in used if (d := latency.average(run.requests, run.steps)) is not None]
    summary.time = latency.average_of(parts)
    slo = SLO(**runs[0].manifest.get("slo", {}))
    summary.goodput = metrics.goodput(summary.records, slo) if any(vars_of(slo)) else None
    matches = [m for run in used if (m := run.manifest.get("greedy_match"))]
    summary.greedy = quality.match_share(matches) if matches else stats.Estimate(None)
    return summary


def vars_of(slo: SLO) -> list[float | None]:
    return [slo.ttft_s, slo.tpot_s, slo.e2e_s]


def compare_runs(a: Summary, b: Summary, compare_invalid: bool = False) -> stats.Comparison:
    """Paired comparison of output tokens/s over the rounds that both have.

    Where invalid runs leave fewer than two pairs the answer is `cannot tell` and names the reason;
    the ratio is then that of all pairs, to look at and not to quote.
    """
    rounds_a, rounds_b = ({run.round: run for run in s.runs} for s in (a, b))
    pairs = [(rounds_a[r], rounds_b[r]) for r in sorted(rounds_a.keys() & rounds_b.keys())]
    pairs = [(x, y) for x, y in pairs if rate_of(x) and rate_of(y)]
    valid = pairs if compare_invalid else [(x, y) for x, y in pairs if x.valid and y.valid]
    chosen = valid if len(valid) >= 2 else pairs
    result = stats.compare([rate_of(x) or 0.0 for x, _ in chosen], [rate_of(y) or 0.0 for _, y in chosen])
    if len(valid) < 2 and len(pairs) > len(valid):
        names = sorted({reason[0] for pair in pairs for run in pair for reason in run.reasons})
        why = f"{len(valid) or 'none'} of {len(pairs)} pairs of runs valid: {', '.join(names)}"
        return stats.Comparison("cannot tell", result.ratio, result.detectable, why)
    return result


def quality_words(summary: Summary) -> str:
    """One phrase on a variant's distance from the fp32 reference."""
    kl, top1 = summary.kl_nats, summary.top1
    if kl is None or top1 is None:
        return "quality not measured"
    if kl <= SAME_KL and top1 >= 0.999:
        return "same quality"
    kind = "nearly the same quality" if kl <= CLOSE_KL else "different quality"
    return f"{kind} (top-1 agreement {units.percent(top1)}, KL {units.number(kl, 2)} nats)"


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict in one line, a sentence below it, and how it reads: good, unsure or bad."""

    title: str
    detail: str
    tone: str


def headline(analysis: Analysis) -> Headline:
    """What the study found, no stronger than its weakest part."""
    best, base = analysis.best, analysis.baseline
    if len(analysis.summaries) == 1:
        rate = base.tokens_per_s.value
        title = "Nothing was measured" if rate is None else f"{units.number(rate)} output tokens/s"
        return Headline(
            title, f"One configuration, {base.name}; there is nothing to compare it with.", "unsure"
        )
    if best is not base and best.first is not None and best.first.ratio.value is not None:
        ratio = best.first.ratio
        tone = "good" if (best.kl_nats or 0.0) <= CLOSE_KL else "unsure"
        title = f"{units.times(ratio.value)} the output tokens/s of the baseline, {quality_words(best)}"
        detail = (
            f"“{best.name}” against “{base.name}”, 95 % interval {units.interval(ratio, units.times)} "
            f"from {ratio.n} paired rounds."
        )
        fastest = analysis.proven[0]
        if fastest is not best and fastest.first is not None:
            speed = units.times(fastest.first.ratio.value)
            detail += f" “{fastest.name}” reaches {speed}, with {quality_words(fastest)}."
        return Headline(title, detail, tone)
    answers = [s.first for s in analysis.summaries[1:] if s.first is not None]
    if answers and all(c.answer == "slower" for c in answers):
        return Headline("Every variant is slower than the baseline", f"The baseline is “{base.name}”.", "bad")
    reasons = sorted({c.reason for c in answers if c.answer == "cannot tell" and c.reason})
    seen = _highest_seen(analysis)
    if steps := takeaway_steps(analysis):
        names = ", ".join(f"“{s.name}” {units.times(c.ratio.value)}" for s, c in steps)
        title = f"{len(steps)} of {len(answers)} steps are proven, the total is not"
        return Headline(title, f"Against the rung below: {names}. {why_not(reasons)}{seen}", "unsure")
    spoilt = any(not run.valid for run in analysis.runs)
    title = "Cannot tell: too few valid runs" if spoilt else "Cannot tell: no variant is proven faster"
    return Headline(title, f"{why_not(reasons)}{seen}", "unsure")


def _highest_seen(analysis: Analysis) -> str:
    """The highest ratio of all, where none is proven, with its quality where that is different."""
    ratios = {s: value for s in analysis.summaries[1:] if s.first and (value := s.first.ratio.value)}
    known = [s for s, value in ratios.items() if math.isfinite(value)]
    if not known:
        return ""
    top = max(known, key=ratios.__getitem__)
    quality = f", with {quality_words(top)}" if (top.kl_nats or 0.0) > CLOSE_KL else ""
    return f" The highest ratio seen, unproven, is {units.times(ratios[top])} by “{top.name}”{quality}."


def why_not(reasons: Sequence[str]) -> str:
    """The reasons of comparisons that cannot tell, as sentences."""
    why = "; ".join(reasons[:2]) or "no two runs could be paired"
    advice = " Run it again on a quiet machine." if "noisy" in why else ""
    return f"{why[0].upper()}{why[1:]}.{advice}"


def takeaway_steps(analysis: Analysis) -> list[tuple[Summary, stats.Comparison]]:
    """Rungs whose gain over the rung below is proven, largest first."""
    proven = [(s, s.previous) for s in analysis.summaries if s.previous and s.previous.answer == "faster"]
    return sorted(proven, key=lambda pair: -(pair[1].ratio.value or 0.0))
