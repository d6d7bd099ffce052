"""Sweeps over services whose capacity is known: a queue in virtual time."""

from __future__ import annotations

import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perflab.clock import NS_PER_S
from perflab.errors import StoreError, WorkloadError
from perflab.load.arrivals import Arrivals
from perflab.measure import capacity
from perflab.measure.metrics import SLO
from perflab.measure.stats import Estimate
from perflab.studies.service_run import LoadChoice, ServiceChoice
from perflab.studies.store import Run
from perflab.studies.sweep import Sweep, at_rate, run_sweep
from perflab.studies.sweep_plan import Shape, next_turn, rate_ladder
from perflab.studies.sweep_result import load_sweep
from perflab.types import RequestRecord


class Queue:
    """`servers` places that take `service_s` for a request (M/D/c under Poisson arrivals), in virtual time.

    `verdict(load, number)` gives the reasons of a run's verdict.
    """

    def __init__(self, service_s=0.1, servers=1, verdict=lambda load, number: ()):
        self.service_s, self.servers, self.verdict = service_s, servers, verdict
        self.now_s, self.loads, self.stop_at = 0.0, [], None

    def now(self) -> float:
        return self.now_s

    def __call__(self, load: LoadChoice, name: str, number: int) -> Run:
        self.loads.append(load)
        if load.users:
            times = self.closed(load)
        else:
            count = round(load.rate_per_s * load.duration_s)
            arrivals = Arrivals("poisson", load.rate_per_s).times(count, load.seed)
            free, times = [0.0] * self.servers, []
            for arrival in arrivals:
                begin = max(arrival, min(free))
                free[free.index(min(free))] = begin + self.service_s
                times.append((arrival, begin, begin + self.service_s))
        self.now_s += max(end for *_, end in times)
        records = [record(f"{number}-{i}", *t) for i, t in enumerate(times)]
        reasons = [list(r) for r in self.verdict(load, number)]
        slo = {"ttft_s": load.slo.ttft_s, "tpot_s": load.slo.tpot_s, "e2e_s": load.slo.e2e_s}
        manifest = {
            "kind": "sweep",
            "variant": name,
            "validity": {"reasons": reasons, "notes": []},
            "slo": slo,
        }
        manifest["interrupted"] = number == self.stop_at
        return Run(manifest, records, [], [])

    def closed(self, load: LoadChoice):
        slots, times = [0.0] * min(load.users, self.servers), []
        while min(slots) < load.duration_s:
            i = slots.index(min(slots))
            wait = max(0, load.users - self.servers) * self.service_s / self.servers
            times.append((slots[i] - wait, slots[i], slots[i] + self.service_s))
            slots[i] += self.service_s
        return times


def record(name: str, arrival: float, begin: float, end: float) -> RequestRecord:
    start, first, last = (round(t * NS_PER_S) for t in (arrival, begin + (end - begin) / 10, end))
    return RequestRecord(
        name,
        start,
        start,
        8,
        first_token_ns=first,
        last_token_ns=last,
        end_ns=last,
        output_tokens=2,
        token_ns=[first, last],
        chunk_tokens=[1, 1],
        outcome="completed",
        finish_reason="length",
    )


def swept(tmp_path: Path, queue: Queue, sweep: Sweep | None = None, slo: SLO | None = None, **options):
    return run_sweep(
        ServiceChoice("http://127.0.0.1:1"),
        LoadChoice(slo=slo or SLO()),
        sweep or Sweep(minutes=3),
        tmp_path / "sweep",
        measure_point=queue,
        now=queue.now,
        **options,
    )


def md1_limit(service_s: float, limit_s: float, wanted: float) -> float:
    """The Poisson rate at which a share `wanted` is served within `limit_s`, by a long simulation."""
    low, high = 0.01 / service_s, 1 / service_s
    gaps = np.random.default_rng(0).exponential(1.0, 40_000)
    for _ in range(10):
        rate = (low + high) / 2
        wait, over = 0.0, 0
        for gap in gaps:
            wait = max(0.0, wait + service_s - gap / rate)
            over += wait + service_s > limit_s
        low, high = (rate, high) if over / gaps.size <= 1 - wanted else (low, rate)
    return low


@pytest.mark.parametrize(
    ("service_s", "off"), [(0.1, 1.15), (0.4, 1.3)]
)  # four times the samples, half as far off
def test_capacity_within_slos_is_that_of_the_queue(tmp_path, service_s, off):
    limit = 4 * service_s
    found = swept(tmp_path, Queue(service_s), Sweep(attain=0.95), SLO(e2e_s=limit))
    truth = md1_limit(service_s, limit, 0.95)
    assert found.capacity.low <= found.capacity.level < found.capacity.high
    assert found.capacity.high / found.capacity.low < 1.3
    assert truth / off < found.capacity.level < truth * off
    assert found.saturation == pytest.approx(1 / service_s, rel=0.05)


def test_shape_is_flat_then_knee_then_collapse(tmp_path):
    found = swept(tmp_path, Queue(0.05))
    assert found.finished
    rates = [p.level for p in found.usable]
    p99 = {p.level: p.p99_s for p in found.usable}
    assert rates[0] < 0.3 * 20
    assert rates[-1] > 1.1 * 20
    # of M/D/1 the most power by P99 is at 0.5 to 0.6 of its service rate, and flat around that
    assert 0.35 * 20 < found.knee.level < 0.8 * 20
    assert found.knee.low < 0.55 * 20 < found.knee.high
    assert p99[rates[0]] < 0.25 < 10 * 0.25 < p99[rates[-1]]
    assert found.capacity.level is None
    assert "no limits" in found.capacity.reason
    frontier = [(p.rate, p.p99_s) for p in found.frontier]
    assert frontier == sorted(frontier)
    assert len(frontier) >= 3


def test_a_sweep_keeps_its_time_and_says_it_first(tmp_path):
    queue, said = Queue(0.2), []
    swept(tmp_path, queue, Sweep(minutes=5), progress=said.append)
    assert queue.now_s <= 300
    assert "at most 5.0 min" in said[0].message
    plan = next(p.message for p in said if p.stage == "plan")
    assert "8 levels" in plan
    assert "requests/s" in plan


def test_a_point_is_not_bounded_by_the_probe_before_it(tmp_path):
    queue = Queue(0.04, servers=20)  # one user gives 25 requests/s, the house 500
    found = swept(tmp_path, queue, Sweep(minutes=1))
    alone, full, *rest = queue.loads
    assert alone.users == 1
    assert full.users == 32
    assert all(load.requests is None and load.rate_per_s for load in rest)
    assert len(load_sweep(found.out_dir).points[0].latencies) == 3
    sizes = {p.level: p.samples for p in found.points}
    for load in rest:
        assert sizes[load.rate_per_s] == pytest.approx(load.rate_per_s * load.duration_s, rel=0.02)
    assert found.saturation == pytest.approx(500, rel=0.05)
    assert len({load.seed for load in queue.loads}) == len(queue.loads), "no point repeats another's prompts"


def test_users_as_levels(tmp_path):
    queue = Queue(0.1, servers=8)
    found = swept(tmp_path, queue, Sweep(by="users", minutes=3, users=64), SLO(e2e_s=0.25))
    assert [p.level for p in found.usable][:4] == [1, 2, 4, 8]
    assert all(load.users and load.rate_per_s is None for load in queue.loads)
    assert found.saturation == pytest.approx(80, rel=0.1)
    assert found.knee.level == 8, "beyond 8 users nothing but waiting is won"
    assert 16 <= found.capacity.level <= 20
    assert found.capacity.high <= 21


def test_fixed_levels_are_all_that_is_measured(tmp_path):
    queue = Queue(0.1)
    found = swept(tmp_path, queue, Sweep(levels=(12.0, 3.0, 6.0), seconds=20.0))
    assert [p.level for p in found.points] == [3.0, 6.0, 12.0]
    assert [load.duration_s for load in queue.loads] == [20.0, 20.0, 20.0]


@pytest.mark.parametrize("name", ["client-bound", "too few samples", "machine too noisy"])
def test_invalid_points_are_shown_not_used_and_tried_again_with_more_samples(tmp_path, name):
    seen = []

    def verdict(load, number):
        bad = load.rate_per_s and 8 < load.rate_per_s < 12 and load.rate_per_s not in seen
        if bad:
            seen.append(load.rate_per_s)
        return [(name, "so it was")] if bad else []

    found = swept(tmp_path, Queue(0.05, verdict=verdict), Sweep(minutes=6))
    bad = [p for p in found.points if not p.usable]
    assert bad
    assert all(p.reasons == ((name, "so it was"),) for p in bad)
    for one in bad:
        again = [p for p in found.points if p.level == one.level and p is not one]
        assert len(again) == 1
        assert again[0].samples > 1.5 * one.samples
        assert one not in found.usable


def test_a_level_that_stays_invalid_is_given_up(tmp_path):
    def verdict(load, number):
        return [("client-bound", "always")] if load.rate_per_s and load.rate_per_s > 15 else []

    found = swept(tmp_path, Queue(0.05, verdict=verdict), Sweep(minutes=15, seconds=10.0), SLO(e2e_s=0.2))
    assert found.finished
    assert max(p.level for p in found.usable) <= 15
    levels = [p.level for p in found.points if not p.usable]
    assert max(map(levels.count, levels)) == 2
    assert found.capacity.low is not None
    asked = swept(
        tmp_path / "all", Queue(0.05, verdict=verdict), Sweep(minutes=15, seconds=10.0, allow_invalid=True)
    )
    assert max(p.level for p in asked.usable) > 20


def test_overload_that_fails_is_a_miss_and_no_refusal(tmp_path):
    queue = Queue(
        0.05, verdict=lambda load, number: [("failures", "many")] if (load.rate_per_s or 0) > 18 else []
    )
    found = swept(tmp_path, queue, slo=SLO(e2e_s=1.0))
    assert max(p.level for p in found.usable) > 18


def test_interrupted_and_resumed(tmp_path):
    whole = swept(tmp_path / "whole", Queue(0.05))
    queue = Queue(0.05)
    queue.stop_at = 5
    cut = swept(tmp_path, queue)
    assert cut.interrupted
    assert len(cut.points) == 3
    assert "goes on" in cut.message
    kept = sorted(p.name for p in (cut.out_dir / "runs").iterdir())
    queue.stop_at = None
    done = swept(tmp_path, queue)
    assert sorted(p.name for p in (done.out_dir / "runs").iterdir())[: len(kept)] == kept
    assert [p.level for p in done.points] == [p.level for p in whole.points]
    before = len(queue.loads)
    assert swept(tmp_path, queue).knee == done.knee
    assert len(queue.loads) == before, "a finished sweep measures nothing"


def test_another_sweep_or_a_full_directory_is_refused(tmp_path):
    swept(tmp_path, Queue(0.05), Sweep(minutes=1))
    with pytest.raises(StoreError, match="another sweep"):
        swept(tmp_path, Queue(0.05), Sweep(minutes=1, attain=0.5))
    (tmp_path / "full" / "sweep").mkdir(parents=True)
    (tmp_path / "full" / "sweep" / "mine.txt").write_text("x")
    with pytest.raises(StoreError, match="not empty"):
        swept(tmp_path / "full", Queue(0.05))


def test_sweep_json_says_what_the_points_rest_on(tmp_path):
    found = swept(tmp_path, Queue(0.05), slo=SLO(e2e_s=0.3))
    held = json.loads((found.out_dir / "sweep.json").read_text())
    assert held["knee"]["level"] == found.knee.level
    assert held["capacity"]["level"] == found.capacity.level
    for row in held["points"]:
        assert row["samples"] > 0
        assert row["usable"]
        assert row["met"] in (True, False)
        assert (found.out_dir / "runs" / row["run"] / "manifest.json").is_file()
        assert row["latencies"]["E2E"]["p99"]["n"] == row["samples"]


@pytest.mark.parametrize(
    "bad", [{"by": "load"}, {"minutes": 0}, {"points": 2}, {"attain": 0.0}, {"levels": (0.0,)}]
)
def test_impossible_sweeps_are_refused(bad):
    with pytest.raises(WorkloadError, match=next(iter(bad))):
        Sweep(**bad)


# the pieces


def made(level, p99, rate=None, attained=None, reasons=(), samples=400):
    estimate = Estimate(p99, p99 * 0.95, p99 * 1.05, samples)
    latencies = {
        name: {"p50": estimate, "p90": estimate, "p99": estimate} for name in ("TTFT", "TPOT", "E2E")
    }
    share = None if attained is None else Estimate(attained, n=samples)
    return capacity.Point(
        level, samples, level, rate or level, None, latencies, None, share, 1.0, tuple(reasons)
    )


def test_knee_is_where_power_is_highest():
    points = [made(1, 1.0), made(2, 1.0), made(4, 1.1), made(8, 1.5), made(10, 4.0), made(12, 30.0, rate=10)]
    assert capacity.knee(points) == capacity.Found(8, 8, 8)
    assert capacity.knee([*points, made(14, 90.0, rate=10)]).level == 8, (
        "what lies far beyond changes nothing"
    )
    assert "beyond" in capacity.knee(points[:4]).reason
    assert "below" in capacity.knee([made(1, 1.0), made(2, 9.0), made(3, 20.0)]).reason
    assert capacity.knee(points[:2]).level is None
    jumps = [
        made(1, 1.0),
        made(2, 1.0),
        made(4, 3.0),
        made(5, 0.5),
        made(8, 1.5),
        made(10, 4.0),
        made(12, 30.0, rate=10),
    ]
    assert capacity.knee(jumps).level == 8, "a P99 that jumps is no knee"
    assert capacity.knee([made(i, math.inf) for i in (1, 2, 3)]).level is None


def test_capacity_takes_the_shares_as_falling():
    points = [made(i + 1, 1, attained=a) for i, a in enumerate((1.0, 0.985, 1.0, 0.9, 0.92))]
    assert capacity.attainment(points) == pytest.approx([1.0, 0.9925, 0.9925, 0.91, 0.91])
    found = capacity.capacity(points, 0.99)
    assert (found.level, found.low, found.high) == (3, 3, 4)
    assert "out of order" in found.reason
    assert capacity.capacity(points, 0.95).reason == ""
    assert capacity.capacity(points[:1], 0.99).high is None
    assert capacity.capacity(points[3:], 0.99).level is None


def test_frontier_keeps_what_nothing_beats():
    points = [made(1, 1.0), made(2, 3.0), made(3, 2.0), made(4, 2.5, rate=2.5), made(5, math.inf)]
    assert [p.level for p in capacity.frontier(points)] == [1, 3]


def test_failures_leave_power_and_capacity():
    ends = [record(str(i), 0.1 * i, 0.1 * i, 0.1 * i + 0.05) for i in range(100)]
    lost = replace(ends[5], outcome="failed", last_token_ns=None, first_token_ns=None)
    point = capacity.point([*ends, lost, replace(lost, request_id="x")], 10.0, SLO(e2e_s=0.1))
    assert point.p99_s == math.inf
    assert point.attained.value == pytest.approx(100 / 102)
    assert capacity.point([], 1.0, SLO(e2e_s=0.1)).usable is False


def test_ladder_reaches_both_sides_of_the_knee():
    ladder = rate_ladder(10.0, 1.0, 8)
    assert ladder[0] < 0.55
    assert ladder[-1] == 16.0
    steps = [b / a for a, b in itertools.pairwise(ladder)]
    assert max(steps) / min(steps) < 1.01


def test_a_wrong_estimate_is_made_up_for():
    shape = Shape("rate", (1.0, 2.0, 3.0), None)
    flat = [made(level, 1.0) for level in (1.0, 2.0, 3.0)]
    assert next_turn(flat, shape).level == 4.5
    over = [made(1.0, 50.0, rate=0.2), made(2.0, 90.0, rate=0.2)]
    assert next_turn(over, shape).level == 0.4


def test_a_miss_below_levels_that_met_is_measured_again():
    shape = Shape("rate", (1.0, 2.0, 3.0, 4.0), 0.99)
    shares = (1.0, 0.6, 1.0, 0.1)
    points = [
        made(level, 9.0 if level == 4 else 1.0, attained=a)
        for level, a in zip(shape.ladder, shares, strict=True)
    ]
    turn = next_turn(points, shape)
    assert (turn.level, turn.longer) == (2.0, 2.0)
    again = made(2.0, 1.0, attained=1.0, samples=800)
    assert capacity.capacity(capacity.usable([*points, again]), 0.99).level == 3.0
    assert next_turn([*points, again], shape).level == pytest.approx(12**0.5, rel=0.01)


def test_a_points_arrivals_have_the_rate_that_was_asked():
    asked = LoadChoice(rate_per_s=3.0, duration_s=10.0).workload()
    made = at_rate(asked, 3.0)
    times = [r.arrival_s for r in made.requests]
    assert (len(times) - 1) / times[-1] == pytest.approx(3.0)
    gaps = [b / a for a, b in zip((r.arrival_s for r in asked.requests), times, strict=True) if a]
    assert max(gaps) == pytest.approx(min(gaps)), "bursts stay"
    assert at_rate(asked.first(1), 3.0) == asked.first(1)


def test_a_sweep_is_told_in_words_and_drawn(tmp_path):
    from rich.console import Console

    from perflab.cli.capacity import conclusions, points_table
    from perflab.report.figures_sweep import load_and_latency

    def verdict(load, number):
        return [("client-bound", "so it was")] if number == 4 else []

    found = swept(tmp_path, Queue(0.2, verdict=verdict), Sweep(minutes=4), SLO(e2e_s=1.2))
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(points_table(found))
    console.print("\n".join(conclusions(found)))
    text = console.export_text()
    assert "capacity" in text
    assert "knee" in text
    assert "Not used (grey), client-bound" in text
    figure = load_and_latency(found)
    names = [trace.name for trace in figure.data]
    assert names[:3] == ["E2E p99", "E2E p50", "TTFT p99"]
    assert "not used" in names
    lines = {
        round(shape.x0, 6) for shape in figure.layout.shapes if shape.type == "line" and shape.x0 == shape.x1
    }
    assert lines >= {round(found.knee.level, 6), round(found.capacity.level, 6)}
