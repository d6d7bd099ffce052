"""Notebooks as files, and the logic behind their widgets on a tiny model (nbval runs the cells)."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from perflab.config import EngineConfig
from perflab.load.workloads import synthetic
from perflab.measure.latency import Decomposition
from perflab.measure.roofline import Sizes, decode
from perflab.measure.stats import Estimate
from perflab.models import kernels
from perflab.models.tiny import tiny
from perflab.types import SamplingParams
from perflab.widgets import lessons, limit_panels, limits, panels

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def bench() -> lessons.Bench:
    return lessons.Bench(tiny("llama"))


def test_there_are_notebooks() -> None:
    assert {path.name for path in NOTEBOOKS} >= {
        "00_quickstart.ipynb",
        "01_where_the_time_goes.ipynb",
        "02_batching.ipynb",
        "03_kv_cache.ipynb",
        "06_throughput_and_tail_latency.ipynb",
        "10_hardware_limits.ipynb",
        "12_your_own_service.ipynb",
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    book = json.loads(text)
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    assert "widgets" not in book["metadata"]
    assert len(text) < 100_000
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            # outputs are kept only where nbval compares them, and it does so only for cells with a count
            compared = "NBVAL_CHECK_OUTPUT" in source
            assert bool(cell["outputs"]) == compared, source
            assert (cell["execution_count"] is not None) == compared, source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_a_lesson(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    prose = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert prose.startswith("# ")
    for part in ("prediction", "## The experiment", "## Verdict", "## Exercise"):
        assert part in prose
    assert [c for c in cells if "parameters" in c["metadata"].get("tags", [])], "no cell tagged parameters"
    assert not any("def " in source or "class " in source for source in code), "logic belongs in the package"


GUESS = lessons.Prediction("How many times?", 3.0, "×")


@pytest.mark.parametrize(
    ("measured", "answer", "words"),
    [
        (Estimate(3.2, 2.9, 3.5, 3), "holds", "holds"),
        (Estimate(3.2, 3.15, 3.25, 3), "holds", "holds"),
        (Estimate(3.2, None, None, 1), "holds", "without an interval"),
        (Estimate(9.0, None, None, 1), "too low", "without an interval"),
        (Estimate(5.0, 4.0, 6.0, 3), "too low", "was too low"),
        (Estimate(5.0, 2.0, 8.0, 3), "cannot tell", "so does much else"),
        (Estimate(1.5, 1.4, 1.6, 3), "too high", "was too high"),
        (Estimate(None), "cannot tell", "Nothing was measured"),
        (lessons.counted(4.0), "too low", "counted 4×"),
        (Estimate(13_612.0, 13_100.0, 15_300.0, 9), "too low", "13,612× (95% interval 13,100 to 15,300)"),
    ],
)
def test_judging_a_prediction(measured: Estimate, answer: str, words: str) -> None:
    verdict = lessons.judge(GUESS, measured)
    assert verdict.answer == answer
    assert words in verdict.text


def test_paired_runs_do_the_same_work_in_turn(bench: lessons.Bench) -> None:
    said: list[str] = []
    variants = {"alone": EngineConfig(max_num_seqs=1), "together": EngineConfig(max_num_seqs=4)}
    result = bench.paired(variants, synthetic(4, 8, (3, 5)), rounds=2, progress=said.append)
    turns = [line.split(": ")[1] for line in said if line.startswith("round")]
    assert turns == ["alone", "together", "together", "alone"]
    assert result.comparison.ratio.n == 2
    assert [len(rates) for rates in result.rates] == [2, 2]
    outputs = [[r.output_tokens for r in run.requests] for run in result.runs]
    assert outputs == [[3, 5, 3, 5]] * 2
    assert max(step.rows for step in result.runs[0].steps) == 1
    assert max(step.rows for step in result.runs[1].steps) == 4
    assert result.runs[0].outputs == result.runs[1].outputs


def test_a_pair_is_two(bench: lessons.Bench) -> None:
    with pytest.raises(ValueError, match="a pair needs two"):
        bench.paired({"alone": EngineConfig()}, synthetic(2, 8, (2,)))


def test_split_has_the_queue_only_where_seats_are_short(bench: lessons.Bench) -> None:
    seats = EngineConfig(max_num_seqs=2, prefix_cache=False)
    few, many = (bench.split(16, count, 4, seats) for count in (2, 6))
    assert {"prefill forward", "decode forward"} <= set(few.segments)
    assert many.segments["queue"] > few.segments.get("queue", 0.0)
    assert 0 <= lessons.outside_model(few) <= 1


def test_outside_model_leaves_waiting_aside() -> None:
    parts = Decomposition(
        "x", 10.0, {"queue": 5.0, "prefill forward": 2.0, "decode forward": 2.0, "sample": 1.0}
    )
    assert lessons.outside_model(parts) == pytest.approx(0.2)
    assert lessons.largest(parts) == ("queue", 0.5)


def test_stream_panel_shows_the_whole_text(bench: lessons.Bench, capsys: pytest.CaptureFixture[str]) -> None:
    events = list(bench.stream("hello", SamplingParams(max_tokens=6, ignore_eos=True)))
    record = panels.stream(iter(events))
    assert record.output_tokens == 6
    figure = panels.token_times(record)
    assert len(figure.data[0].y) == 6
    assert record.last_token_ns is not None
    assert sum(figure.data[0].y) == pytest.approx((record.last_token_ns - record.intended_ns) / 1e6)


def test_explorer_measures_each_setting_once() -> None:
    asked: list[tuple[int, int]] = []

    def measure(tokens: int, requests: int) -> Decomposition:
        asked.append((tokens, requests))
        return Decomposition("x", tokens * 1e-3, {"prefill forward": tokens * 0.9e-3})

    explorer = panels.explore_split(measure, (16, 64), (1, 2))
    prompt, requests = explorer.sliders.values()
    prompt.value = 64
    requests.value = 2
    prompt.value = 16
    requests.value = 1
    assert asked == [(16, 1), (64, 1), (64, 2), (16, 2)]
    bars = explorer.figure.data[0].y
    assert list(bars) == ["64 tokens × 1", "64 tokens × 2", "16 tokens × 2", "16 tokens × 1"]


def test_explorer_shows_shares_without_measuring_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(panels, "display", shown.append)
    parts = Decomposition("x", 2.0, {"prefill forward": 1.8})
    explorer = panels.explore_split(lambda tokens, requests: parts, (16,), (1,))
    assert explorer.figure.data[0].x[0] == pytest.approx(1.8)
    shares = shown[0].children[0].children[1]
    shares.value = True
    assert explorer.figure.data[0].x[0] == pytest.approx(90)
    assert len(explorer.results) == 1


def test_verdict_panel_reads_the_slider_when_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr(panels, "display", shown.append)
    guess = panels.predict("How many <times>?", 1, 10, 2, unit="×")
    guess._slider.value = 4.0
    panels.verdict(guess, Estimate(4.1, 3.9, 4.3, 3))
    text = shown[-1].value  # type: ignore[attr-defined]
    assert "Your prediction of 4× holds" in text
    assert "&lt;times&gt;" in text


CEILINGS = limits.Limits(10e9, {"fp32": 100e9, "bf16": 200e9, "int8-dynamic": 400e9, "int4": 400e9})


def test_without_native_kernels_the_lesson_keeps_the_torch_runner_and_says_why(
    bench: lessons.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "why_missing", lambda: "none were built")
    found, why = limits.variants(bench)
    assert [variant.name for variant in found] == ["torch, fp32"]
    assert why == "none were built"


def test_a_regimes_decode_steps_have_its_context_behind_them() -> None:
    regime = limits.Regime("x", 3, 64)
    load = regime.workload(12)
    (length,) = {request.prompt_length for request in load.requests}
    (outputs,) = {request.output_length for request in load.requests}
    assert (len(load.requests), outputs) == (3, 13)
    assert length is not None
    assert length + 12 // 2 == 64  # the first token comes with the prompt, twelve more from decode steps


def test_steps_are_measured_beside_their_floors(bench: lessons.Bench) -> None:
    variants, why = limits.variants(bench)
    assert len(variants) == (1 if why else 3)
    regimes = limits.regimes(requests=3, context=16, prompt=40)
    later = limits.Limits(20e9, {**CEILINGS.operations_per_s, "fp32": 50e9})
    points, found = limits.measure(bench, variants, regimes, CEILINGS, steps=4, rounds=2, again=lambda: later)
    assert found == limits.Limits(20e9, CEILINGS.operations_per_s)
    assert [(p.variant.name, p.regime.name) for p in points] == [
        (v.name, r.name) for v in variants for r in regimes
    ]
    sizes = Sizes.of(bench.model.config)
    for point in points:
        assert len(point.seconds) == 2
        assert point.share == pytest.approx(point.floor.seconds / point.step_s)
        assert point.floor == limits.roofline.floor(point.work, found.of(point.variant.weights))
        assert point.times_floor.bounded
    assert points[1].work == decode(sizes, 3, 16, "fp32", "fp32")
    assert points[0].work.intensity < points[1].work.intensity < points[2].work.intensity


def some_points() -> list[limits.Point]:
    sizes = Sizes(30, 576, 9, 3, 64, 1536, 49_152)
    points = []
    for weights, factor in (("bf16", 3.0), ("int8-dynamic", 1.5)):
        variant = limits.Variant(f"ours, {weights}", {}, weights, "bf16")
        for regime in limits.regimes():
            work = regime.work(sizes, weights, "bf16")
            least = limits.roofline.floor(work, CEILINGS.of(weights))
            points.append(limits.Point(variant, regime, work, least, (factor * least.seconds,)))
    return points


def test_every_step_stands_under_its_roof() -> None:
    figure = limit_panels.roof(some_points(), CEILINGS)
    traces = {trace.name: trace for trace in figure.data}
    for weights, factor in (("bf16", 3.0), ("int8-dynamic", 1.5)):
        roof, mine = traces[f"the roof, {weights}"], traces[f"ours, {weights}"]
        assert roof.x[1] == CEILINGS.of(weights).ridge
        assert roof.y[1] == roof.y[2] == CEILINGS.operations_per_s[weights] / 1e9
        under = [CEILINGS.of(weights).attainable(x) / 1e9 / y for x, y in zip(mine.x, mine.y, strict=True)]
        assert under == pytest.approx([factor] * 3)
    bars = limit_panels.shares(some_points()).data
    assert [list(bar.y) for bar in bars] == [pytest.approx([100 / 3] * 3), pytest.approx([200 / 3] * 3)]
    assert "ridge at 20 operations per byte" in limit_panels.describe(CEILINGS)


def test_the_floor_follows_the_sliders() -> None:
    explorer = limit_panels.explore_floor(Sizes(30, 576, 9, 3, 64, 1536, 49_152), CEILINGS, "bf16")
    curves = {trace.name: list(trace.y) for trace in explorer.figure.data}
    assert set(curves) == set(CEILINGS.operations_per_s)
    assert all(later >= earlier for curve in curves.values() for earlier, later in itertools.pairwise(curve))
    assert curves["int4"][0] > curves["int8-dynamic"][0] > curves["bf16"][0] > curves["fp32"][0]
    explorer.requests.value = 128
    assert "128 × 64 tokens" in explorer.caption.value
    assert "bound by arithmetic" in explorer.caption.value
    explorer.context.value = 4096
    assert explorer.figure.data[0].y[0] < curves["fp32"][0]
