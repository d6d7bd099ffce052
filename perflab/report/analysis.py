"""From directories to what a report is about: runs in groups, groups in parts, each part compared.

Owns which runs belong together. A part is what one table can hold: the variants of a study, the
services that were benchmarked, the points of a sweep. Draws and words nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perflab.errors import StoreError
from perflab.report import units
from perflab.report.summary import CLOSE_KL, E2E, RATE, Measure, Summary, compare_runs, summarise
from perflab.studies import store
from perflab.studies.compare_result import METRICS, Compared, judge
from perflab.studies.store import Run
from perflab.studies.sweep_result import SweepResult, load_sweep

KINDS = ("study", "compare", "bench", "sweep", "profile")
"""The commands that leave runs, in the order in which a report tells of them."""


@dataclass(slots=True, eq=False)
class Analysis:
    """One part of a report: groups of runs in the order of their variants, or as they were given."""

    summaries: list[Summary]
    study: Mapping[str, Any]
    failures: Mapping[str, str] = field(default_factory=dict)
    kind: str = "study"
    measure: Measure = RATE
    paths: tuple[Path, ...] = ()
    sweep: SweepResult | None = None
    compared: Compared | None = None
    compare_invalid: bool = False

    @property
    def title(self) -> str:
        """What the part is called."""
        models = dict.fromkeys(str(run.manifest.get("model", {}).get("name", "")) for run in self.runs)
        named = self.study.get("name") or " and ".join(name for name in models if name) or "run"
        return str(named) if self.kind == "study" else f"{self.kind} of {named}"

    @property
    def baseline(self) -> Summary:
        return self.summaries[0]

    @property
    def best(self) -> Summary:
        """The variant with the highest proven gain over the baseline among those whose quality is
        close to the reference (or not measured), else among all; the baseline if none is proven."""
        close = [s for s in self.proven if (s.kl_nats or 0.0) <= CLOSE_KL]
        return next(iter(close or self.proven), self.baseline)

    @property
    def proven(self) -> list[Summary]:
        """The variants that are proven faster than the baseline, fastest first; none whose output is not
        the model's."""
        found = [s for s in self.summaries if s.first and s.first.answer == "faster" and not s.forced]
        return sorted(found, key=lambda s: -((s.first and s.first.ratio.value) or 0.0))

    @property
    def runs(self) -> list[Run]:
        return [run for summary in self.summaries for run in summary.runs]


def analyse(paths: Sequence[Path], compare_invalid: bool = False) -> Analysis:
    """The first part of `parts`, for callers whose directories hold one."""
    return parts(paths, compare_invalid)[0]


def parts(paths: Sequence[Path], compare_invalid: bool = False) -> list[Analysis]:
    """Read run, study, sweep, compare or profile directories and summarise them, one part for each
    kind of run and each study.

    Groups are in the order given, the first being what the others are compared with. Comparisons
    take rounds in which both runs are valid, or all with `compare_invalid`. Raises StoreError where
    a directory holds no run or a damaged one.
    """
    found: dict[tuple[str, str], list[_Source]] = {}
    for path in dict.fromkeys(Path(p) for p in paths):
        source = _read(path)
        for kind in dict.fromkeys(map(kind_of, source.runs)):
            name = str(source.study.get("name") or path) if kind in ("study", "sweep", "compare") else ""
            runs = [run for run in source.runs if kind_of(run) == kind]
            if kind in ("sweep", "compare") and not (path / f"{kind}.json").exists():
                kind, name = "bench", ""  # one of its runs alone is a run like any other
            if kind == "study" and not source.study:
                name = str(runs[0].manifest.get("study", ""))
            found.setdefault((kind, name), []).append(_Source(path, runs, source.study, source.extra))
    order = sorted(found, key=lambda key: KINDS.index(key[0]))
    made = []
    for key in order:
        with _damage_named(found[key][0].path):
            made.append(_part(key[0], found[key], compare_invalid))
    return made


def kind_of(run: Run) -> str:
    """Which command made it."""
    kind = str(run.manifest.get("kind", "study"))
    return kind if kind in KINDS else "bench"


@dataclass(frozen=True, slots=True)
class _Source:
    """One directory that was given: its runs and the files beside them."""

    path: Path
    runs: list[Run]
    study: Mapping[str, Any]
    extra: Mapping[str, Mapping[str, Any]]


def _read(path: Path) -> _Source:
    study: Mapping[str, Any] = {}
    extra = {}
    with _damage_named(path):
        if (path / "study.json").exists():
            study = store.read_json(path / "study.json")["declaration"]
            [v["name"] for v in study.get("variants", [])]
        for name in ("quality", "failures"):
            file = path / f"{name}.json"
            extra[name] = dict(store.read_json(file)) if file.exists() else {}
        return _Source(path, _numbered([store.read_run(p) for p in _run_dirs(path)]), study, extra)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turns what a file of another shape leads to into a StoreError that names the directory."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"{path}: its JSON files do not hold what perflab writes ({type(error).__name__}: {error}); "
            "delete the directory and run again"
        ) from None


def _run_dirs(path: Path) -> list[Path]:
    """The runs of a directory: itself, those of a study, or those of a plain folder of runs."""
    inside = sorted(p.parent for p in path.glob("[!.]*/manifest.json"))
    return inside if inside and not (path / "manifest.json").exists() else store.find_runs([path])


def _numbered(runs: list[Run]) -> list[Run]:
    """Runs of a folder that were made one by one, each round 0: their order is their round."""
    for name in dict.fromkeys(run.variant for run in runs):
        same = [run for run in runs if run.variant == name]
        if len({run.round for run in same}) < len(same):
            for number, run in enumerate(sorted(same, key=lambda run: str(run.manifest.get("ended_at", "")))):
                run.manifest["round"] = number
    return runs


def _part(kind: str, sources: Sequence[_Source], compare_invalid: bool) -> Analysis:
    study = next((s.study for s in sources if s.study), {})
    failures = {name: why for s in sources for name, why in s.extra["failures"].items()}
    found = load_sweep(sources[0].path) if kind == "sweep" else None
    if found is not None:
        runs = [run for run in sources[0].runs if not run.manifest["sweep"]["probe"]]
        runs.sort(key=lambda run: run.manifest["sweep"]["level"])
        sources = [replace(sources[0], runs=runs or sources[0].runs)]
    summaries = [summarise(*group) for group in _groups(sources, study)]
    compared = _compared(sources[0].path, summaries) if kind == "compare" else None
    measure = E2E if kind == "bench" and summaries[0].open_loop else RATE
    if compared is not None:
        metric = METRICS[compared.metric]
        shape = units.number if metric.higher_is_better else units.seconds
        measure = Measure(metric.name, lambda run: metric.of(run.requests), metric.higher_is_better, shape)
    elif kind not in ("sweep", "profile"):
        for before, summary in itertools.pairwise(summaries):
            summary.previous_name = before.name
            summary.previous = compare_runs(before, summary, compare_invalid, measure)
            summary.first = compare_runs(summaries[0], summary, compare_invalid, measure)
    return Analysis(
        summaries,
        study,
        failures,
        kind,
        measure,
        tuple(s.path for s in sources),
        found,
        compared,
        compare_invalid,
    )


def _compared(path: Path, summaries: Sequence[Summary]) -> Compared:
    """The answer that `perflab compare` gave, from the runs it wrote; quality as it found it."""
    held = store.read_json(path / "compare.json")
    asked = held["compare"]
    sides = [summary.runs[0] for summary in summaries]
    found = judge(sides, held["metric"], asked["confidence"], asked["allow_invalid"])
    found.quality = held["quality"]
    for summary in summaries:
        summary.quality = found.quality.get("fidelity", {}).get(summary.name)
    summaries[1].first = summaries[1].previous = found.found
    return found


def _groups(sources: Sequence[_Source], study: Mapping[str, Any]) -> list[tuple[str, list[Run], Any]]:
    """Runs by variant, in the study's order. The same variant of a further directory joins where its
    rounds are new ones; where they are not, the two are before and after, named by directory."""
    groups: list[tuple[Path, list[Run], Any]] = []
    for source in sources:
        for name in dict.fromkeys(run.variant for run in source.runs):
            runs = [run for run in source.runs if run.variant == name]
            taken = {run.round for _, group, _ in groups for run in group if run.variant == name}
            last = next((group for _, group, _ in reversed(groups) if group[0].variant == name), None)
            if last is not None and not taken & {run.round for run in runs}:
                last.extend(runs)
            else:
                groups.append((source.path, runs, source.extra["quality"].get(name)))
    order = {v["name"]: i for i, v in enumerate(study.get("variants", []))}
    groups.sort(key=lambda group: order.get(group[1][0].variant, len(order)))
    variants = [runs[0].variant for _, runs, _ in groups]
    named = []
    for (path, runs, quality), variant in zip(groups, variants, strict=True):
        own = f"{path.resolve().name}: {variant}" if len(set(variants)) > 1 else path.resolve().name
        named.append((variant if variants.count(variant) == 1 else own, runs, quality))
    return named
