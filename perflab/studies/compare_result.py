"""What a comparison left: each side's short runs joined to one, pairs of values, the answer.

Owns `compare.json` and the metrics that are compared. Measures nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perflab.clock import NS_PER_S
from perflab.errors import StoreError
from perflab.load.run import RunRecords
from perflab.load.workloads import Workload
from perflab.measure import metrics, paired, stats
from perflab.measure.stats import Comparison, Estimate
from perflab.studies import store
from perflab.studies.store import Run
from perflab.types import ClientHealth, EventRecord, RequestRecord, Span, StepRecord

if TYPE_CHECKING:
    from perflab.studies.compare import Compare
    from perflab.studies.service_run import LoadChoice

FORMAT = 1


class Metric(NamedTuple):
    """What two sides are compared by: one value a run, or None where it has none."""

    name: str
    unit: str
    higher_is_better: bool
    of: Callable[[Sequence[RequestRecord]], float | None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _tokens_per_s(records: Sequence[RequestRecord]) -> float | None:
    rate = metrics.throughput(records)
    return rate.output_tokens_per_s or None if rate else None


METRICS: dict[str, Metric] = {
    "tokens": Metric("output tokens/s", "1/s", True, _tokens_per_s),
    "ttft": Metric(
        "mean TTFT", "s", False, lambda r: _mean(metrics.samples(r, metrics.ttft_s, success_only=True))
    ),
    "tpot": Metric("mean TPOT", "s", False, lambda r: _mean(metrics.per_token_samples(r))),
    "e2e": Metric(
        "mean E2E", "s", False, lambda r: _mean(metrics.samples(r, metrics.e2e_s, success_only=True))
    ),
}
"""By the name that `--metric` takes. Means, since one run holds few requests."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One short run of one side. `first`: whether it was the first of its pair."""

    number: int
    workload: Workload
    records: RunRecords
    first: bool = True

    def facts(self) -> dict[str, Any]:
        """Where its true times were, for the manifest."""
        run = self.records
        return {
            "pair": self.number,
            "first": self.first,
            "started_ns": run.started_ns,
            "ended_ns": run.ended_ns,
            "requests": len(run.requests),
        }


@dataclass(slots=True)
class Compared:
    """The answer about `b` against `a`. `by_metric` holds every metric, `answer` the one that was asked
    about; `refused` says why there is none. `spread`: standard deviation of a pair's log-ratio, robust."""

    names: tuple[str, str]
    metric: str
    found: Comparison
    by_metric: dict[str, Comparison]
    medians: dict[str, tuple[float | None, float | None]]
    pairs: int
    spread: float | None = None
    invalid: dict[str, list[list[str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    quality: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    interrupted: bool = False
    out_dir: Path | None = None

    @property
    def answer(self) -> stats.Answer:
        return self.found.answer


def joined(slices: Sequence[Slice]) -> tuple[Workload, RunRecords]:
    """Slices end to end, as if nothing had run between them: times are moved, differences kept.

    What one side did is then a run like any other; where each slice truly was is in the manifest. The
    client's health is that of the median slice.
    """
    if not slices:
        empty = RunRecords([], [], [], 0, 0, 0, interrupted=True)
        return Workload("nothing", ()), empty
    start = end = slices[0].records.started_ns
    asked, whole = [], RunRecords([], [], [], start, start, 0)
    for one in slices:
        run = one.records
        by = end - run.started_ns
        whole.requests += [_moved(r, by) for r in run.requests]
        whole.steps += [_moved_step(s, by) for s in run.steps]
        whole.events += [EventRecord(e.time_ns + by, e.kind, e.subject, e.detail) for e in run.events]
        asked += [replace(r, arrival_s=r.arrival_s + (end - start) / NS_PER_S) for r in one.workload.requests]
        whole.planned += run.planned
        end += run.ended_ns - run.started_ns
    whole.ended_ns = end
    whole.client = ClientHealth(
        *(_median(values) for values in zip(*(astuple(one.records.client) for one in slices), strict=True))
    )
    first = slices[0].workload
    return replace(first, requests=tuple(sorted(asked, key=lambda r: r.arrival_s))), whole


def _moved(record: RequestRecord, by: int) -> RequestRecord:
    times: dict[str, Any] = {
        name: None if (value := getattr(record, name)) is None else value + by
        for name in (
            "intended_ns",
            "sent_ns",
            "admitted_ns",
            "first_token_ns",
            "last_token_ns",
            "end_ns",
            "deadline_ns",
            "first_content_ns",
        )
    }
    spans = [Span(s.name, s.start_ns + by, s.end_ns + by) for s in record.spans]
    return replace(record, **times, spans=spans, token_ns=[t + by for t in record.token_ns])


def _moved_step(step: StepRecord, by: int) -> StepRecord:
    times = {name: value + by for name, value in asdict(step).items() if name.endswith("_ns") and value}
    return replace(step, **times)


def slices_of(run: Run) -> list[list[RequestRecord]]:
    """The requests of each pair of a joined run, in order."""
    parts, start = [], 0
    for one in run.manifest["slices"]:
        parts.append(run.requests[start : start + one["requests"]])
        start += one["requests"]
    return parts


def conclude(
    sides: Sequence[Run],
    compare: Compare,
    load: LoadChoice,
    out_dir: Path,
    quality: Mapping[str, Any] = {},
    interrupted: bool = False,
) -> Compared:
    """The answer from both sides' runs; writes them and `compare.json`. Raises StoreError where `out_dir`
    holds something."""
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise StoreError(f"{out_dir} is not empty; choose another directory")
    metric = compare.metric or ("tokens" if load.rate_per_s is None else "e2e")
    found = judge(sides, metric, compare.confidence, compare.allow_invalid)
    found.quality, found.interrupted, found.out_dir = dict(quality), interrupted, out_dir
    for side, run in zip("ab", sides, strict=True):
        store.write_run(out_dir / "runs" / f"{side}", run)
    facts = asdict(found) | {"out_dir": None, "answer": found.answer, "compare": asdict(compare)}
    store.write_json(
        out_dir / "compare.json", {"format": FORMAT, "load": load.describe(), **store.plain(facts)}
    )
    return found


def judge(sides: Sequence[Run], metric: str, confidence: float, allow_invalid: bool) -> Compared:
    """The comparison of two joined runs, pair by pair; pairs without a value on both sides are left out."""
    values = {
        name: _both(
            [m.of(part) for part in slices_of(sides[0])], [m.of(part) for part in slices_of(sides[1])]
        )
        for name, m in METRICS.items()
    }
    by_metric = {
        name: paired.compare_pairs(a, b, confidence, METRICS[name].higher_is_better)
        for name, (a, b) in values.items()
    }
    return settled(sides, metric, by_metric, values, allow_invalid)


def settled(
    sides: Sequence[Run],
    metric: str,
    by_metric: dict[str, Comparison],
    values: Mapping[str, tuple[list[float], list[float]]],
    allow_invalid: bool,
) -> Compared:
    """The answer of the metric that was asked about, or why there is none."""
    invalid = {
        f"{letter}: {run.variant}": run.reasons
        for letter, run in zip("AB", sides, strict=True)
        if run.reasons
    }
    found, refused = by_metric[metric], ""
    if invalid and not allow_invalid:
        why = "; ".join(f"{who}: {', '.join(name for name, _ in r)}" for who, r in invalid.items())
        refused = f"an invalid run is not compared unless asked for ({why})"
        found = Comparison("cannot tell", Estimate(None, n=found.ratio.n), None, refused)
    a, b = values[metric]
    logs = np.log(b) - np.log(a) if len(a) == len(b) else np.array([])
    return Compared(
        (sides[0].variant, sides[1].variant),
        metric,
        found,
        by_metric,
        {name: (_median(x), _median(y)) for name, (x, y) in values.items()},
        len(a),
        float(np.subtract(*np.percentile(logs, [75, 25]))) / 1.349 if logs.size > 3 else None,
        invalid,
        sorted({note for run in sides for note in run.manifest["validity"]["notes"]}),
        refused=refused,
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _both(a: Sequence[float | None], b: Sequence[float | None]) -> tuple[list[float], list[float]]:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x and y]
    return [x for x, _ in pairs], [y for _, y in pairs]
