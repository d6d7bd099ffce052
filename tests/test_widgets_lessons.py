"""What the lessons show, on a tiny model: figures that follow the records, counts that come out by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perflab.config import EngineConfig
from perflab.load.run import RunRecords
from perflab.load.workloads import synthetic
from perflab.models.tiny import tiny
from perflab.studies.service_run import LoadChoice, ServiceChoice, measure
from perflab.studies.store import Run
from perflab.widgets import batching, kv_cache, lessons, panels


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
    first = explorer.results[56, 2]  # of 56 shared tokens three blocks of 16 are full
    assert [r.cached_tokens for r in first.requests] == [0, 0, 48, 48]
    assert lessons.cached_share(first) == pytest.approx(96 / 256)
    explorer.sliders["shared tokens"].value = 0
    assert "<b>0" in explorer.caption.value
    computed, cached, waits = explorer.figure.data
    assert list(computed.y) == ["56 shared, 2 documents", "0 shared, 2 documents"]
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
