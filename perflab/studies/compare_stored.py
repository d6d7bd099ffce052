"""Compares runs that are on disk already: two studies, two variants of one, two folders of runs.

Owns the pairing. Runs of one study were interleaved and are paired by round; others are not paired, and
what drifted between them counts as a difference.
"""

from __future__ import annotations

from pathlib import Path

from perflab.errors import StoreError
from perflab.measure import paired, stats
from perflab.measure.stats import Comparison
from perflab.studies import store
from perflab.studies.compare_result import METRICS, Compared, judge, settled
from perflab.studies.store import Run


def compare_stored(
    a: str, b: str, metric: str = "tokens", confidence: float = 0.95, allow_invalid: bool = False
) -> Compared:
    """Each a folder of runs, of a study, or `FOLDER@VARIANT` where it holds several variants.

    Raises StoreError for a folder without runs or with several variants, naming them.
    """
    sides = _runs(a), _runs(b)
    if all(len(runs) == 1 and "slices" in runs[0].manifest for runs in sides):
        first, second = sides[0][0], sides[1][0]
        if first.manifest["slices"] and len(first.manifest["slices"]) == len(second.manifest["slices"]):
            return judge((first, second), metric, confidence, allow_invalid)
    together = sides[0][0].manifest.get("study") is not None and _folder(a) == _folder(b)
    if together:
        rounds = {run.round for run in sides[0]} & {run.round for run in sides[1]}
        sides = tuple([run for run in runs if run.round in rounds] for runs in sides)  # type: ignore[assignment]
    by_metric: dict[str, Comparison] = {}
    values: dict[str, tuple[list[float], list[float]]] = {}
    for name, m in METRICS.items():
        x, y = ([v for run in runs if (v := m.of(run.requests))] for runs in sides)
        values[name] = (x, y)
        compare = stats.compare if together and len(x) == len(y) else paired.compare_unpaired
        by_metric[name] = compare(x, y, confidence, m.higher_is_better)
    worst = [next((run for run in runs if not run.valid), runs[0]) for runs in sides]
    found = settled(worst, metric, by_metric, values, allow_invalid)
    if not together:
        found.notes.append(
            "these runs were not interleaved: what drifted between them counts as a difference"
        )
    return found


def _folder(text: str) -> Path:
    return Path(text.rpartition("@")[0] if "@" in text and not Path(text).exists() else text).resolve()


def _runs(text: str) -> list[Run]:
    folder = _folder(text)
    wanted = text.rpartition("@")[2] if folder != Path(text).resolve() else None
    runs = [store.read_run(path) for path in store.find_runs([folder])]
    names = list(dict.fromkeys(run.variant for run in runs))
    if wanted is not None:
        runs = [run for run in runs if run.variant == wanted]
        if not runs:
            raise StoreError(f"{folder} holds no variant {wanted!r}; it holds {', '.join(names)}")
    elif len(names) > 1:
        raise StoreError(
            f"{folder} holds several variants: say which as {folder.name}@{names[0]!r}, of {', '.join(names)}"
        )
    return sorted(runs, key=lambda run: run.round)
