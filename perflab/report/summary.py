"""One group of runs of the same thing, what they amount to, and how two groups compare.

Owns which runs are pooled and which comparisons are allowed. Reads no directory, draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from perflab.clock import NS_PER_S
from perflab.measure import latency, metrics, stats
from perflab.measure.metrics import SLO
from perflab.measure.paired import compare_unpaired
from perflab.report import units
from perflab.studies import quality
from perflab.studies.store import Run
from perflab.types import RequestRecord

QUANTILES = (0.5, 0.9, 0.99)
SAME_KL = 1e-4
CLOSE_KL = 0.02
NOT_THE_MODELS = "output that is not the model's: guesses were accepted by force"


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
    def valid(self) -> bool:
        """Whether any of its runs is."""
        return any(run.valid for run in self.runs)

    @property
    def used(self) -> list[Run]:
        """The runs whose requests are pooled."""
        return [run for run in self.runs if run.valid] or self.runs

    @property
    def records(self) -> list[RequestRecord]:
        return [record for run in self.used for record in run.requests]

    @property
    def description(self) -> str:
        told = [str(self.runs[0].manifest.get("description", "")), NOT_THE_MODELS if self.forced else ""]
        return "; ".join(filter(None, told))

    @property
    def drafter(self) -> str:
        """Who guessed ahead, as the engine's configuration names it; `off` too where none is known."""
        facts = self.runs[0].manifest
        engine = facts.get("engine") or (facts.get("service") or {}).get("engine") or {}
        return str(engine.get("drafter", "off"))

    @property
    def forced(self) -> bool:
        """Whether guesses were accepted at a given rate, so that the output is not the model's."""
        return any(r.forced_acceptance is not None for run in self.runs for r in run.requests)

    @property
    def dtype(self) -> str:
        return str(self.runs[0].manifest.get("model", {}).get("dtype", ""))

    @property
    def open_loop(self) -> bool:
        return bool(self.runs[0].manifest.get("workload", {}).get("open_loop"))

    @property
    def completed_share(self) -> float | None:
        """Completed requests of all that their user did not cancel."""
        return metrics.success(self.records).value

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


class Measure(NamedTuple):
    """A figure that each run has one of, for comparing groups of runs."""

    name: str
    of: Callable[[Run], float | None]
    higher_is_better: bool
    shape: Callable[[float | None], str]


def _latency(metric: str, q: float) -> Measure:
    return Measure(
        f"{metric} p{100 * q:.0f}",
        lambda run: metrics.LATENCIES[metric](run.requests, q).value,
        False,
        units.seconds,
    )


RATE = Measure("output tokens/s", rate_of, True, units.number)
E2E = _latency("E2E", 0.5)
MEASURES = (
    RATE,
    _latency("TTFT", 0.5),
    _latency("TTFT", 0.9),
    _latency("TPOT", 0.5),
    E2E,
    _latency("E2E", 0.9),
)
"""What a table of changes holds. Under an open-loop load the rate is the load's, so latency decides."""


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
    summary.goodput = goodput_of(used)
    matches = [m for run in used if (m := run.manifest.get("greedy_match"))]
    summary.greedy = quality.match_share(matches) if matches else stats.Estimate(None)
    return summary


def slo_of(run: Run, request_class: str = "") -> SLO:
    """The limits that a run's requests of a class were judged by; the run's own where it has none."""
    by_class = run.manifest.get("slos") or {}
    return SLO(**(by_class.get(request_class) or run.manifest.get("slo") or {}))


def goodput_of(runs: Sequence[Run], request_class: str | None = None) -> metrics.Goodput | None:
    """Goodput of the runs' requests, of one class or all, each under the limits of its class.

    The share pools the requests, the rate is the mean of the runs' own. None without any limit.
    """
    met = sent = 0
    rates = []
    limited = False
    for run in runs:
        judged = [r for r in metrics.counted(run.requests) if request_class in (None, r.request_class)]
        slos = {name: slo_of(run, name) for name in {r.request_class for r in judged}}
        limited |= any(any(asdict(slo).values()) for slo in slos.values())
        good = sum(slos[r.request_class].met_by(r) for r in judged)
        starts = [r.intended_ns for r in judged]
        if starts and max(starts) > min(starts):
            rates.append(good * NS_PER_S / (max(starts) - min(starts)))
        met, sent = met + good, sent + len(judged)
    if not limited:
        return None
    return metrics.Goodput(met, sent, sum(rates) / len(rates) if rates else None, stats.share(met, sent))


def compare_runs(
    a: Summary, b: Summary, compare_invalid: bool = False, measure: Measure = RATE
) -> stats.Comparison:
    """Paired comparison of one figure over the rounds that both have; of runs that did not alternate, a
    comparison of the two groups (Welch), for which drift counts as a difference.

    Where invalid runs leave fewer than two pairs the answer is `cannot tell` and names the reason;
    the ratio is then that of all pairs, to look at and not to quote.
    """
    if not interleaved(a, b):
        return _apart(a, b, compare_invalid, measure)
    rounds_a, rounds_b = ({run.round: run for run in s.runs} for s in (a, b))
    shared = sorted(rounds_a.keys() & rounds_b.keys())
    found = [(rounds_a[r], rounds_b[r], measure.of(rounds_a[r]), measure.of(rounds_b[r])) for r in shared]
    pairs = [(x, y, u, v) for x, y, u, v in found if u and v and math.isfinite(u) and math.isfinite(v)]
    valid = pairs if compare_invalid else [pair for pair in pairs if pair[0].valid and pair[1].valid]
    chosen = valid if len(valid) >= 2 else pairs
    result = stats.compare(
        [u for *_, u, _ in chosen], [v for *_, v in chosen], higher_is_better=measure.higher_is_better
    )
    if not same_load(a, b):
        return replace(result, answer="cannot tell", reason="the two were measured under different loads")
    if len(valid) < 2 and len(pairs) > len(valid):
        names = sorted({reason[0] for pair in pairs for run in pair[:2] for reason in run.reasons})
        share = f"{len(valid) or 'none'} of {len(pairs)} pairs of runs valid"
        why = f"{share if len(pairs) > 1 else 'the only pair of runs is invalid'}: {', '.join(names)}"
        return replace(result, answer="cannot tell", reason=why)
    return result


def _apart(a: Summary, b: Summary, compare_invalid: bool, measure: Measure) -> stats.Comparison:
    """Groups that were measured one after the other."""
    chosen = [[run for run in s.runs if run.valid or compare_invalid] for s in (a, b)]
    before, after = ([v for run in runs if (v := measure.of(run)) and math.isfinite(v)] for runs in chosen)
    result = compare_unpaired(before, after, higher_is_better=measure.higher_is_better)
    if not same_load(a, b):
        return replace(result, answer="cannot tell", reason="the two were measured under different loads")
    if min(len(before), len(after)) < 2 and not (a.used[0].valid and b.used[0].valid):
        names = sorted({reason[0] for s in (a, b) for run in s.runs for reason in run.reasons})
        return replace(result, reason=f"too few valid runs: {', '.join(names)}")
    return result


def same_load(a: Summary, b: Summary) -> bool:
    """Whether two groups were asked the same. Salt and seed may differ from run to run."""
    return load_of(a.runs[0]) == load_of(b.runs[0])


def load_of(run: Run) -> dict[str, Any]:
    """What identifies the load of a run: its declaration where it has one, without the random seed."""
    declared = run.manifest.get("load")
    workload = run.manifest.get("workload", {})
    wanted = ("name", "description", "requests", "open_loop")
    return {k: v for k, v in (declared or {w: workload.get(w) for w in wanted}).items() if k != "seed"}


def interleaved(a: Summary, b: Summary) -> bool:
    """Whether the runs of two groups alternated in time, so that a drift of the machine cancels."""
    times = [sorted(str(run.manifest.get("ended_at", "")) for run in s.runs) for s in (a, b)]
    return times[0][0] <= times[1][-1] and times[1][0] <= times[0][-1]


def quality_words(summary: Summary) -> str:
    """One phrase on a variant's distance from the fp32 reference."""
    if summary.forced:
        return NOT_THE_MODELS
    kl, top1 = summary.kl_nats, summary.top1
    if kl is None or top1 is None:
        return "quality not measured"
    if kl <= SAME_KL and top1 >= 0.999:
        return "same quality"
    kind = "nearly the same quality" if kl <= CLOSE_KL else "different quality"
    return f"{kind} (top-1 agreement {units.percent(top1)}, KL {units.number(kl, 2)} nats)"
