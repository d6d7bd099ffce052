"""What the lessons show, on a tiny model: figures that follow the records, counts that come out by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from perflab.clock import seconds_to_ns
from perflab.config import EngineConfig
from perflab.errors import PerflabError
from perflab.load.run import RunRecords
from perflab.load.workloads import synthetic
from perflab.measure import capacity
from perflab.measure.metrics import SLO
from perflab.measure.stats import Estimate
from perflab.models.tiny import tiny
from perflab.studies.service_run import LoadChoice, ServiceChoice, measure
from perflab.studies.store import Run, write_run
from perflab.studies.sweep import Sweep
from perflab.studies.sweep_result import SweepResult
from perflab.types import RequestRecord
from perflab.widgets import batching, kv_cache, lessons, panels, service
from perflab.widgets import capacity as views


@pytest.fixture(scope="module")
def bench() -> lessons.Bench:
    return lessons.Bench(tiny("llama"))


def bars(figure: Any, name: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name == name]


def test_rounds_turn_around(bench: lessons.Bench) -> None:
    said: list[str] = []
    cases = {n: (EngineConfig(max_num_seqs=n), synthetic(n, 4, (2,))) for n in (1, 2, 3)}
    runs = bench.rounds(cases, 2, said.append)
    assert [line.split(": ")[1] for line in said if line.startswith("round")] == list("123321")
    assert {n: [len(run.requests) for run in done] for n, done in runs.items()} == {
        1: [1, 1],
        2: [2, 2],
        3: [3, 3],
    }


@pytest.fixture(scope="module")
def mixed(bench: lessons.Bench) -> dict[str, RunRecords]:
    load = synthetic(6, 8, (2, 5))
    return {
        name: bench.run(EngineConfig(max_num_seqs=2, batching=name, prefix_cache=False), load)  # type: ignore[arg-type]
        for name in ("static", "continuous")
    }


def test_a_static_batch_keeps_its_seats(mixed: dict[str, RunRecords]) -> None:
    static, continuous = mixed["static"], mixed["continuous"]
    assert len(static.steps) == 3 * 5
    assert lessons.empty_seats(static, 2) == pytest.approx(1 - 3 * 7 / 30)
    assert lessons.empty_seats(continuous, 2) < lessons.empty_seats(static, 2)
    assert [len(batch) for batch in lessons.batches(static.requests)] == [2, 2, 2]


def test_seats_are_drawn_step_by_step(mixed: dict[str, RunRecords]) -> None:
    figure = batching.seats(mixed, kept=["static"])
    kept, free = bars(figure, "empty seat")
    assert list(kept.x) == [3, 0, 3, 0, 3, 0]
    assert list(kept.base) == [2, 5, 7, 10, 12, 15]
    assert set(free.x) == {0}
    assert list(bars(figure, "waits")[0].x) == [0, 0, 5, 5, 10, 10]
    whole = [sum(trace.x[i] for trace in figure.data[:3]) for i in range(6)]
    assert whole == [record.last_step + 1 for record in mixed["static"].requests]
    assert "static: 15 steps, 30.0" in figure.layout.annotations[0].text


def test_sizes_stand_beside_what_would_be_free(bench: lessons.Bench) -> None:
    cases = {n: (EngineConfig(max_num_seqs=n), synthetic(n, 4, (3,))) for n in (2, 4)}
    runs = bench.rounds(cases, 2)
    ideal, rates, gaps = batching.sizes(runs).data
    assert ideal.y[0] == rates.y[0]
    assert ideal.y[1] == 2 * rates.y[0]
    low, high = sorted(lessons.tokens_per_s(run) for run in runs[4])
    assert low <= rates.y[1] <= high
    assert len(gaps.y) == 2


def test_the_policies_are_explored_one_by_one(bench: lessons.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "display", lambda *shown: None)
    explorer = batching.explore_arrivals(bench, 3, 4, (2,), (1, 2, 4), (0, 1, 5), (2, 1))
    assert list(explorer.results) == [(policy, 2, 1, 1) for policy in ("static", "dynamic", "continuous")]
    names = ["static 2, gap 1 ms", "dynamic 2, 1 ms, gap 1 ms", "continuous 2, gap 1 ms"]
    assert list(explorer.figure.data[0].y) == names
    assert "tokens/s</b>" in explorer.caption.value
    assert all(r.outcome == "completed" for run in explorer.results.values() for r in run.requests)


def test_without_a_cache_every_token_costs_one_more(bench: lessons.Bench) -> None:
    load = synthetic(1, 7, (5,))
    runs = {name: bench.run(EngineConfig(kv_cache=name == "cached"), load) for name in ("none", "cached")}
    assert lessons.tokens_computed(runs["none"]) == 7 + 8 + 9 + 10 + 11
    assert lessons.tokens_computed(runs["cached"]) == 7 + 4
    work, _, cached, _ = kv_cache.growth(runs).data
    assert list(work.y) == [7, 8, 9, 10, 11]
    assert list(cached.y) == [7, 1, 1, 1, 1]


def test_memory_holds_what_blocks_have_room_for(bench: lessons.Bench) -> None:
    run = bench.run(EngineConfig(block_size=4, prefix_cache=False), synthetic(2, 6, (2, 4)))
    assert lessons.tokens_held(run) == [12, 7, 8, 0]  # tokens whose keys were computed, of who still runs
    figure = kv_cache.memory(run, 4, longest=10)
    assert {trace.name: list(trace.y) for trace in figure.data} == {
        "blocks of running requests": [16, 8, 8, 0],
        "tokens held": [12, 7, 8, 0],
        "set aside without pages": [20, 10, 10, 0],
    }
    assert "the pool" in {trace.name for trace in kv_cache.memory(run, 4).data}


def test_a_short_pool_computes_again(bench: lessons.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "display", lambda *shown: None)
    explorer = kv_cache.explore_pool(bench, synthetic(3, 8, (9,)), (16, 4), (4, 8), seats=3)
    assert "At most <b>3 requests" in explorer.caption.value
    assert "put back <b>0 times</b>, and 0 tokens" in explorer.caption.value
    explorer.sliders["pool, tokens"].value = 16
    assert "At most <b>2 requests" in explorer.caption.value
    assert "put back <b>0 times" not in explorer.caption.value
    pools = [trace for trace in explorer.figure.data if trace.name == "the pool"]
    assert set(pools[0].y) == {16}


def test_sharing_is_counted_and_shown(bench: lessons.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "display", lambda *shown: None)
    explorer = kv_cache.explore_sharing(bench, 4, 64, 2, seats=2)
    first = explorer.results[48, 2]
    assert [r.cached_tokens for r in first.requests] == [0, 0, 48, 48]
    assert lessons.cached_share(first) == pytest.approx(96 / 256)
    explorer.sliders["shared tokens"].value = 0
    assert "<b>0" in explorer.caption.value
    computed, cached, waits = explorer.figure.data
    assert list(computed.y) == ["48 shared, 2 documents", "0 shared, 2 documents"]
    assert list(computed.x) == [160, 256]
    assert list(cached.x) == [96, 0]
    assert waits.x[0] == pytest.approx(1e3 * kv_cache.mean_ttft_s(first))


def test_a_service_can_be_measured_from_a_cell(bench: lessons.Bench) -> None:
    choice, load = ServiceChoice(), LoadChoice(input_tokens=4, output_tokens=2, requests=3)
    vars(choice)["loaded"] = bench.model  # as it would be, had it been loaded by name

    async def cell() -> Run:
        return measure(choice, load)

    run = asyncio.run(cell())
    assert [(r.outcome, r.output_tokens) for r in run.requests] == [("completed", 2)] * 3
    assert not run.manifest["interrupted"]


def answered(latency_s: float, start_s: float, index: int) -> RequestRecord:
    start, end = seconds_to_ns(start_s), seconds_to_ns(start_s + latency_s)
    return RequestRecord(
        f"r{index}",
        start,
        start,
        4,
        None,
        end,
        end,
        end,
        1,
        token_ns=[end],
        chunk_tokens=[1],
        outcome="completed",
    )


@pytest.fixture
def swept(tmp_path: Path) -> lessons.Swept:
    """Levels of 1, 2, 4 and 8 requests/s: half of each take 0.1 s, the others 0.1, 0.2, 0.4 and 3.2 s."""
    slow = {1.0: 0.1, 2.0: 0.2, 4.0: 0.4, 8.0: 3.2}
    requests = {
        level: [answered((0.1, latency)[i % 2], i / level, i) for i in range(40)]
        for level, latency in slow.items()
    }
    points = [capacity.point(records, level) for level, records in requests.items()]
    facts: dict[str, Any] = {"sweep": {"allow_invalid": True, "by": "rate"}, "load": {"slo": {}}}
    found = SweepResult(
        facts,
        tmp_path,
        points,
        capacity.Found(None),
        capacity.knee(points),
        capacity.saturation(points),
        capacity.frontier(points),
    )
    return lessons.Swept(found, requests)


def test_a_promise_moves_the_capacity(swept: lessons.Swept) -> None:
    assert swept.capacity(SLO(e2e_s=0.15), 0.95).level == 1
    assert swept.capacity(SLO(e2e_s=0.25), 0.95).level == 2
    assert swept.capacity(SLO(e2e_s=0.25), 0.5).level == 8
    assert swept.capacity(SLO(e2e_s=0.05), 0.5).level is None


def test_the_limit_is_moved_without_running_anything(
    swept: lessons.Swept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "display", lambda *shown: None)
    explorer = views.explore_limit(swept, (150, 250, 500), (50, 95, 99))
    line, area = explorer.figure.layout.shapes
    assert (line.y0, area.x1) == (250, 2)
    assert list(explorer.figure.data[0].y) == pytest.approx([100, 200, 400, 3200])
    explorer.share.value = 50
    assert explorer.figure.layout.shapes[1].x1 == 8
    assert list(explorer.figure.data[0].y) == pytest.approx([100] * 4)
    explorer.limit.value = 150
    explorer.share.value = 99
    assert "Capacity: 1.00 requests/s" in explorer.caption.value


def test_the_curves_show_what_averages_hide(swept: lessons.Swept) -> None:
    lines = {trace.name: list(trace.y) for trace in views.curves(swept).data}
    assert lines["E2E, mean"] == pytest.approx([100, 150, 250, 1650])
    assert lines["E2E, p50"] == pytest.approx([100] * 4)
    assert lines["E2E, p99"] == pytest.approx([100, 200, 400, 3200])
    assert lines["all that was asked"] == [1, 2, 4, 8]
    told = views.describe_averages(swept)
    assert "the mean is 1.65\u202fs; 50\u202f% of the requests took longer" in told
    assert "P99s of all levels average 975\u202fms" in told  # (0.1 + 0.2 + 0.4 + 3.2) / 4
    assert "all requests together is 3.20\u202fs" in told
    assert "4 levels, 40 to 40 requests each" in views.describe(swept)


def test_the_frontier_leaves_out_what_is_beaten(swept: lessons.Swept) -> None:
    line, points = views.frontier(swept).data
    assert list(points.text) == ["1.00", "2.00", "4.00", "8.00"]
    assert set(zip(line.x, line.y, strict=True)) <= set(zip(points.x, points.y, strict=True))
    assert list(line.x) == sorted(line.x)
    assert list(line.y) == sorted(line.y)
    lost = [colour for colour in points.marker.color if colour != points.marker.color[0]]
    assert len(lost) == 4 - len(line.x)


def test_the_knee_is_a_share_of_the_most(swept: lessons.Swept) -> None:
    knee, most = swept.result.knee, swept.result.saturation
    assert knee.level is not None
    assert most is not None
    assert swept.knee_share.value == pytest.approx(100 * knee.level / most)
    unknown = dataclasses.replace(swept.result, knee=capacity.Found(None, reason="none"))
    assert lessons.Swept(unknown, {}).knee_share.value is None
    assert "No knee: none." in views.describe(lessons.Swept(unknown, {}))


def test_a_sweep_keeps_its_requests_in_memory(bench: lessons.Bench) -> None:
    choice, load = ServiceChoice(), LoadChoice(input_tokens=4, output_tokens=2)
    vars(choice)["loaded"] = bench.model
    plan = Sweep(minutes=1, levels=(8.0, 32.0), seconds=1, allow_invalid=True)
    found = lessons.swept(choice, load, plan)
    assert list(found.requests) == [8.0, 32.0]
    assert [len(r) for r in found.requests.values()] == [p.samples for p in found.result.usable]
    assert not found.result.out_dir.exists()


def test_an_explorer_says_what_went_wrong() -> None:
    def measure(n: int) -> int:
        if n == 2:
            raise PerflabError("no server <answers>")
        return n

    explorer = panels.Explorer({"n": (1, 2)}, measure, lambda found: go.Figure(), str)
    explorer.sliders["n"].value = 2
    assert "no server &lt;answers&gt;" in explorer.caption.value
    explorer.sliders["n"].value = 1
    assert ">1<" in explorer.caption.value


FAKE = """#!{python}
import http.server, socketserver
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404); self.end_headers()
    def log_message(self, *_): pass
with socketserver.TCPServer(("127.0.0.1", 0), Ready) as server:
    print("fake at http://127.0.0.1:%d/v1" % server.server_address[1], flush=True)
    server.serve_forever()
"""


def program(path: Path, text: str) -> str:
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def test_a_server_is_ready_when_it_is_there_and_gone_when_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perflab.widgets.service.sys.executable", program(tmp_path / "fake", FAKE))
    with service.Server() as server:
        assert urllib.request.urlopen(f"{server.url}/ready").status == 200
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{server.url}/ready")
    server.close()


def test_a_server_that_dies_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = program(tmp_path / "dying", "#!{python}\nraise SystemExit('no memory left')\n")
    monkeypatch.setattr("perflab.widgets.service.sys.executable", dying)
    with pytest.raises(PerflabError, match="no memory left"):
        service.Server()


def test_a_server_elsewhere_is_left_alone() -> None:
    with service.Server("http://127.0.0.1:9") as server:
        assert server.url == "http://127.0.0.1:9"


def test_chapters_of_a_run_are_looked_at(
    bench: lessons.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, load = ServiceChoice(), LoadChoice(input_tokens=4, output_tokens=3, requests=6)
    vars(choice)["loaded"] = bench.model
    told: list[str] = []
    shown: list[Any] = []
    monkeypatch.setattr(panels, "note", told.append)
    monkeypatch.setattr(panels, "show", shown.append)
    monkeypatch.setattr(service, "display", shown.append)
    run = measure(choice, load, variant="mine")
    assert "<b>6 of 6</b> completed" in service.describe(run)
    folder = write_run(tmp_path / "run", run)
    service.look([folder], "latency", "validity", "nothing of the kind")
    assert len(told) == 2
    assert told[0].startswith("“mine”: half of all answers within")
    assert len(shown) == 1
    written = service.report([folder], tmp_path / "report.html")
    assert "mine" in written.read_text(encoding="utf-8")
    assert str(written) in str(shown[-1].path)


def test_estimates_in_milliseconds() -> None:
    assert lessons.in_ms(Estimate(0.5, 0.25, None, 9)) == Estimate(500.0, 250.0, None, 9)
