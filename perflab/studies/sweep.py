"""Finds how much load a service bears: probes, a ladder of levels, bisection, each point a run on disk.

Owns the order of things, the time they may take and the directory they fill. Which level comes next is
`sweep_plan`'s, what the points mean `measure.capacity`'s.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perflab.config import check_types
from perflab.errors import StoreError, WorkloadError
from perflab.load.workloads import Workload
from perflab.measure.capacity import By, Point
from perflab.studies import store, sweep_plan
from perflab.studies.kept import kept
from perflab.studies.service_run import LoadChoice, ServiceChoice, measure, warm
from perflab.studies.session import Progress, duration, slug
from perflab.studies.store import Run
from perflab.studies.sweep_plan import Shape
from perflab.studies.sweep_result import FORMAT, SweepResult, load_sweep, point_of, summary

PROBE_SHARE = 0.05
"""Share of the time for each of the two probes: one user, and as many as keep the service full."""

REFINE = 4
"""Points beside those of the ladder that the time is planned for."""

LEAST_S = 1.0
"""Seconds below which no point is begun."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """How a sweep goes. Levels are requests per second, or users who wait for their answers.

    minutes: all of it, loading left out. points: of the ladder; more follow beside the edge and the
    knee. levels: these alone instead of a ladder around an estimate. seconds: of sending per point; None
    divides the time. attain: share of the requests that must meet every SLO. users: of the probe that
    estimates saturation, and the most of a ladder of users. allow_invalid: use points whatever their verdict.
    """

    by: By = "rate"
    minutes: float = 10.0
    points: int = 8
    levels: tuple[float, ...] = ()
    seconds: float | None = None
    attain: float = 0.99
    users: int = 32
    allow_invalid: bool = False

    def __post_init__(self) -> None:
        check_types(self, WorkloadError)
        if self.by not in ("rate", "users"):
            raise WorkloadError(f"by={self.by!r}: choose rate or users")
        if self.minutes <= 0 or (self.seconds is not None and self.seconds <= 0):
            raise WorkloadError(f"minutes={self.minutes}, seconds={self.seconds}: must be above 0")
        if self.points < 3 or self.users < 1 or not 0 < self.attain <= 1:
            raise WorkloadError(
                f"points={self.points} must be 3 or more, users={self.users} 1 or more, "
                f"attain={self.attain} a share above 0"
            )
        if any(level <= 0 for level in self.levels):
            raise WorkloadError(f"levels={self.levels}: each must be above 0")


MeasurePoint = Callable[[LoadChoice, str, int], Run]
"""Measures one load and gives the run with its verdict: load, name of the variant, number."""


def run_sweep(
    service: ServiceChoice,
    load: LoadChoice,
    sweep: Sweep,
    out_dir: Path,
    progress: Callable[[Progress], None] = lambda _: None,
    *,
    measure_point: MeasurePoint | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> SweepResult:
    """Measure levels until the capacity and the knee are known or the time is up; writes `sweep.json`.

    The load's own rate, users, duration and requests do not count. The same call into the same
    directory goes on where it stopped. Ctrl-C keeps every finished point. `measure_point` and `now`
    stand in for the service and the clock in tests. Raises StoreError where `out_dir` holds something else.
    """
    load = replace(load, rate_per_s=None, users=None, duration_s=None, requests=None)
    session = _Session(service, load, sweep, Path(out_dir), progress, now)
    with ExitStack() as stack:
        if not session.finished:
            session.say("load", f"This sweep takes at most {duration(60 * sweep.minutes)}.")
        session.measure_point = measure_point or _measurer(service, load, stack, session)
        session.run()
    result = load_sweep(session.out_dir)
    result.interrupted = session.interrupted
    if session.interrupted:
        result.message = (
            f"Stopped; {len(result.points)} points are kept in {out_dir}. "
            "The same sweep into the same directory goes on from there."
        )
    return result


def _measurer(service: ServiceChoice, load: LoadChoice, stack: ExitStack, session: _Session) -> MeasurePoint:
    """Points on one warm service, which is made when the first of them is asked for."""
    makers: list[Any] = []

    def one(point: LoadChoice, name: str, number: int) -> Run:
        if not makers:
            makers.append(stack.enter_context(kept(service)))
            full = replace(load, users=session.sweep.users)
            warm(service, full, full.workload(), makers[0])
            session.began = session.now()  # loading does not count
        asked = point.workload()
        if point.rate_per_s:
            asked = at_rate(asked, point.rate_per_s)
        return measure(
            service, point, kind="sweep", variant=name, number=number, workload=asked, make=makers[0]
        )

    return one


def at_rate(workload: Workload, rate_per_s: float) -> Workload:
    """The same arrivals, stretched so that their mean rate is exactly the one that was asked: that of 30
    Poisson arrivals is 18 % off by chance, which would move a point as far along the axis."""
    last = workload.requests[-1].arrival_s
    if last <= 0:
        return workload
    stretch = (len(workload.requests) - 1) / rate_per_s / last
    return replace(
        workload, requests=tuple(replace(r, arrival_s=r.arrival_s * stretch) for r in workload.requests)
    )


class _Session:
    """One execution of a sweep; owns its directory and its time."""

    measure_point: MeasurePoint

    def __init__(
        self,
        service: ServiceChoice,
        load: LoadChoice,
        sweep: Sweep,
        out_dir: Path,
        progress: Callable[[Progress], None],
        now: Callable[[], float],
    ) -> None:
        self.load, self.sweep, self.out_dir, self.progress, self.now = load, sweep, out_dir, progress, now
        self.declaration = {
            "service": {"url": service.url, "model": service.model, "engine": asdict(service.config)},
            "load": load.describe(),
            "sweep": asdict(sweep),
        }
        self.interrupted = False
        self.plan: dict[str, Any] = {}
        self.open()
        self.began = now()

    def open(self) -> None:
        """Claim the directory: a new one, or one that holds this very sweep."""
        facts = json.loads(json.dumps(self.declaration, default=str))
        limited = {**facts, "sweep": {k: v for k, v in facts["sweep"].items() if k != "minutes"}}
        self.fingerprint = hashlib.sha256(json.dumps(limited, sort_keys=True).encode()).hexdigest()[:16]
        file = self.out_dir / "sweep.json"
        if file.exists():
            held = store.read_json(file)
            if held.get("fingerprint") != self.fingerprint:
                raise StoreError(f"{self.out_dir} holds another sweep; choose another directory with --out")
            self.plan = held["plan"]
        elif self.out_dir.exists() and (not self.out_dir.is_dir() or any(self.out_dir.iterdir())):
            raise StoreError(f"{self.out_dir} is not empty and holds no sweep; choose another directory")
        (self.out_dir / "runs").mkdir(parents=True, exist_ok=True)
        held_runs = [store.read_run(path) for path in store.run_dirs(self.out_dir)]
        self.points = [point_of(run) for run in held_runs if not run.manifest["sweep"]["probe"]]
        self.count = len(held_runs)
        self.spent_before = sum(run.manifest["sweep"]["cost_s"] for run in held_runs)

    @property
    def finished(self) -> bool:
        return bool(self.plan.get("finished"))

    @property
    def left_s(self) -> float:
        return 60 * self.sweep.minutes - self.spent_before - (self.now() - self.began)

    def say(self, stage: str, message: str) -> None:
        whole = 60 * self.sweep.minutes
        left = max(0.0, min(whole, self.left_s if self.count or stage != "load" else whole))
        self.progress(Progress(stage, message, 1 - left / whole, left))

    # the whole

    def run(self) -> None:
        self.save()
        try:
            if not self.finished:
                self.probe()
                self.climb()
        except KeyboardInterrupt:
            self.interrupted = True
        self.save()
        self.say("done", "Stopped." if self.interrupted else f"{len(self.points)} points measured.")

    def probe(self) -> None:
        """Estimate the range from one user and from a full house; the plan is kept for a resumed sweep.

        Each probe has a time of its own and no number of requests, so that none bounds what comes after.
        """
        if "ladder" in self.plan:
            return
        sweep, points = self.sweep, self.sweep.points
        saturation, drain = 1.0, 0.0
        if sweep.levels:
            ladder = tuple(sorted(sweep.levels))
            saturation = ladder[-1]
        elif sweep.by == "users":
            ladder = sweep_plan.users_ladder(points, sweep.users)
        else:
            seconds = PROBE_SHARE * 60 * sweep.minutes
            slowest = self.one(replace(self.load, users=1, duration_s=seconds), "one user", probe=True)
            full = self.one(
                replace(self.load, users=sweep.users, duration_s=seconds), f"{sweep.users} users", probe=True
            )
            saturation = max(full.rate or 0.0, slowest.rate or 0.0)
            drain = full.latencies["E2E"]["p50"].value or 0.0
            drain = drain if math.isfinite(drain) else 0.0
            if not saturation:
                raise WorkloadError(f"no request of the two probes completed: see {self.out_dir / 'runs'}")
            ladder = sweep_plan.rate_ladder(saturation, slowest.rate or saturation, points)
        shape = replace(self.shape, ladder=ladder)
        seconds = sweep.seconds or sweep_plan.seconds_each(self.left_s, shape, saturation, drain, REFINE)
        self.plan = {"ladder": list(ladder), "saturation": saturation, "seconds": seconds, "drain": drain}
        self.save()

    @property
    def shape(self) -> Shape:
        limited = any(limit is not None for limit in asdict(self.load.slo).values())
        return Shape(
            self.sweep.by,
            tuple(self.plan.get("ladder", ())),
            self.sweep.attain if limited else None,
            self.sweep.allow_invalid,
            fixed=bool(self.sweep.levels),
        )

    def climb(self) -> None:
        """Point after point until all is known or the time is up."""
        seconds = self.plan["seconds"]
        unit = "requests/s" if self.sweep.by == "rate" else "users"
        self.say(
            "plan",
            f"{len(self.plan['ladder'])} levels from {self.plan['ladder'][0]:g} to "
            f"{self.plan['ladder'][-1]:g} {unit}, {duration(seconds)} each, then points beside the "
            f"edge and the knee while time is left ({duration(max(0.0, self.left_s))}).",
        )
        while (turn := sweep_plan.next_turn(self.points, self.shape)) is not None:
            over = sweep_plan.over(turn.level, self.sweep.by, self.plan["saturation"])
            wanted = min(seconds * turn.longer, (self.left_s - self.plan["drain"]) / over)
            if wanted < max(LEAST_S, seconds / 2):
                return
            self.say("run", f"{turn.level:g} {unit}: {turn.why}")
            level = {"rate_per_s": turn.level} if self.sweep.by == "rate" else {"users": round(turn.level)}
            self.one(replace(self.load, duration_s=wanted, **level), f"{turn.level:g} {unit}", turn.level)
        self.plan["finished"] = True

    def one(self, load: LoadChoice, name: str, level: float = 0.0, probe: bool = False) -> Point:
        """Measure one load and write its run. Raises KeyboardInterrupt where Ctrl-C cut it short."""
        number = self.count
        if probe:
            self.say("probe", f"Probe: {name}")
        began = self.now()
        run = self.measure_point(replace(load, seed=self.load.seed + 101 * (number + 1)), name, number)
        if run.manifest.get("interrupted"):
            raise KeyboardInterrupt
        cost = self.now() - max(began, self.began)
        run.manifest["sweep"] = {"by": self.sweep.by, "level": level, "probe": probe, "cost_s": cost}
        path = self.out_dir / "runs" / f"{number:02d}-{slug(name)}"
        run.path = store.write_run(path, run)
        self.count += 1
        found = point_of(run)
        if not probe:
            self.points.append(found)
        self.save()
        return found

    def save(self) -> None:
        """Write `sweep.json`; what it says of the points follows from the runs beside it."""
        facts = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "declaration": self.declaration,
            "plan": self.plan,
            **summary(self.points, self.shape),
        }
        store.write_json(self.out_dir / "sweep.json", facts)
