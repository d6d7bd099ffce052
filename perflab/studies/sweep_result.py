"""What a sweep left: its points and what they say, read from the runs that it wrote.

Owns the result and the content of `sweep.json`. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perflab.measure import capacity, metrics
from perflab.measure.capacity import By, Found, Point
from perflab.studies import store
from perflab.studies.store import Run
from perflab.studies.sweep_plan import Shape

FORMAT = 1


@dataclass(slots=True)
class SweepResult:
    """What a sweep found. `points` in the order in which they were measured, unusable ones among them."""

    declaration: dict[str, Any]
    out_dir: Path
    points: list[Point]
    capacity: Found
    knee: Found
    saturation: float | None
    frontier: list[Point] = field(default_factory=list)
    finished: bool = False
    interrupted: bool = False
    message: str = ""

    @property
    def by(self) -> By:
        return "users" if self.declaration["sweep"]["by"] == "users" else "rate"

    @property
    def slo(self) -> metrics.SLO:
        return metrics.SLO(**self.declaration["load"]["slo"])

    @property
    def usable(self) -> list[Point]:
        """The points that count, by level."""
        return capacity.usable(self.points, self.declaration["sweep"]["allow_invalid"])


def point_of(run: Run) -> Point:
    """The point that a stored run of a sweep is."""
    facts = run.manifest["sweep"]
    return capacity.point(
        run.requests,
        facts["level"],
        metrics.SLO(**run.manifest["slo"]) if any(run.manifest["slo"].values()) else None,
        run.reasons,
        run.manifest["validity"]["notes"],
        run.path.name if run.path else "",
    )


def load_sweep(out_dir: Path) -> SweepResult:
    """The result of a finished or interrupted sweep, from its runs. Raises StoreError where there is none."""
    out_dir = Path(out_dir)
    held = store.read_json(out_dir / "sweep.json")
    runs = [store.read_run(path) for path in store.run_dirs(out_dir)]
    points = [point_of(run) for run in runs if not run.manifest["sweep"]["probe"]]
    sweep = held["declaration"]["sweep"]
    good = capacity.usable(points, sweep["allow_invalid"])
    return SweepResult(
        held["declaration"],
        out_dir,
        points,
        capacity.capacity(good, sweep["attain"]),
        capacity.knee(good),
        capacity.saturation(good),
        capacity.frontier(good),
        bool(held["plan"].get("finished")),
    )


def summary(points: Sequence[Point], shape: Shape) -> dict[str, Any]:
    """What `sweep.json` says of its points, as JSON values; infinite latencies are the text "inf"."""
    good = capacity.usable(points, shape.allow_invalid)
    best = {p.run for p in capacity.frontier(good)}
    return store.plain(
        {
            "capacity": asdict(capacity.capacity(good, shape.wanted or 1.0)),
            "knee": asdict(capacity.knee(good)),
            "saturation_per_s": capacity.saturation(good),
            "points": [
                {
                    **asdict(p),
                    "usable": p in good,
                    "on_frontier": p.run in best,
                    "met": None if shape.wanted is None else capacity.met(p, shape.wanted),
                }
                for p in points
            ],
        }
    )
