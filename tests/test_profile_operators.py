"""Operators and parts: work follows from shapes, every part of every layer is there, captures stay small."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perflab.clock import WallClock
from perflab.config import EngineConfig
from perflab.engine.executor import LocalExecutor
from perflab.errors import ConfigError
from perflab.models import kernels
from perflab.models.runners import make_runner
from perflab.models.tiny import tiny
from perflab.studies.operators import MAX_ACTIVE, look, operator_rows, profiled, work_of
from perflab.studies.steps import Stage, Steps, config_for

TORCH = EngineConfig(runner="torch", num_threads=1, kv_bytes=1 << 20)
NATIVE = EngineConfig(runner="native", num_threads=1, kv_bytes=1 << 20)
DECODE, PREFILL = Stage("decode", 3, 20), Stage("prefill", 1, 40)
needs_kernels = pytest.mark.skipif(kernels.library() is None, reason="the native kernels are not built")


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "work"),
    [
        ("aten::mm", [[5, 7], [7, 3]], ["float", "float"], (4 * (35 + 21 + 15), 2 * 5 * 7 * 3)),
        ("aten::addmm", [[3], [5, 7], [7, 3], [], []], ["float"] * 3 + ["Scalar"] * 2, (4 * 74, 210)),
        ("aten::bmm", [[2, 5, 7], [2, 7, 3]], ["double", "double"], (8 * (70 + 42 + 30), 420)),
        (
            "mkldnn::_linear_pointwise",
            [[1, 5, 7], [3, 7], [], []],
            ["c10::BFloat16", "c10::BFloat16", "", ""],
            (2 * (35 + 21 + 15), 210),
        ),
        ("aten::mul", [[4, 8], [8]], ["float", "float"], (4 * (32 + 8 + 32), None)),
        ("aten::index_select", [[4098, 16, 12], [], [8]], ["float", "", "long"], (None, None)),
        ("aten::mm", [], [], (None, None)),
        ("aten::cat", [[[2, 3], [2, 3]], []], ["TensorList", "Scalar"], (None, None)),
    ],
)
def test_work_follows_from_shapes(name: str, shapes: Any, dtypes: list[str], work: Any) -> None:
    assert work_of(name, shapes, dtypes) == work


def event(name: str, shapes: Any, us: float) -> Any:
    return SimpleNamespace(
        key=name,
        input_shapes=shapes,
        input_dtypes=["float"] * len(shapes),
        self_cpu_time_total=us,
        self_device_time_total=0.0,
    )


def test_operators_are_summed_by_name_and_shapes_per_step() -> None:
    mm = [[2, 4], [4, 8]]
    events = [event("aten::mm", mm, 30.0)] * 4 + [event("aten::mm", [[1, 4], [4, 8]], 5.0)] * 2
    events += [event(f"aten::op{i}", [[1]], 1.0) for i in range(10)]
    rows = operator_rows(events, steps=2, most=3)
    first = rows[0]
    assert (first["operator"], first["calls"], first["seconds"]) == ("aten::mm", 2.0, pytest.approx(60e-6))
    assert (first["bytes"], first["operations"]) == (2 * 4 * (8 + 32 + 16), 2 * 2 * 2 * 4 * 8)
    assert rows[-1]["operator"] == "9 others"
    assert sum(row["seconds"] for row in rows) == pytest.approx((4 * 30 + 2 * 5 + 10) / 2 / 1e6)


def one_stage(config: EngineConfig, stage: Stage, tmp_path: Path) -> dict[str, Any]:
    (found,) = look(tiny(), config, [stage], repeats=4, trace_dir=tmp_path)
    return found


@pytest.mark.parametrize("stage", [DECODE, PREFILL], ids=lambda stage: stage.name)
def test_on_torch_every_part_of_every_layer_is_there(stage: Stage, tmp_path: Path) -> None:
    found = one_stage(TORCH, stage, tmp_path)
    rows = found["parts"]["rows"]
    per_layer = {"qkv", "attention", "attention out", "gate and up", "activation", "down", "norm"}
    assert {(r["layer"], r["part"]) for r in rows if r["layer"] is not None} == {
        (layer, part) for layer in (0, 1) for part in per_layer
    }
    assert {r["part"] for r in rows if r["layer"] is None} == {"embedding", "rotary table", "norm", "head"}
    assert all(r["seconds"] > 0 for r in rows)
    by_key = {(r["layer"], r["part"]): r for r in rows}
    tokens = stage.rows if stage.decode else stage.tokens
    assert by_key[1, "qkv"]["operations"] == 2 * tokens * 48 * (48 + 2 * 24)
    assert by_key[1, "qkv"]["bytes"] == 4 * 48 * (48 + 2 * 24)
    assert by_key[None, "head"]["operations"] == 2 * stage.rows * 48 * 320
    products = [r for r in found["operators"]["rows"] if r["operator"] == "mkldnn::_linear_pointwise"]
    if products:
        assert sum(r["operations"] for r in products) == pytest.approx(
            2 * tokens * 2 * 48 * (48 + 2 * 24 + 48 + 3 * 96) + 2 * stage.rows * 48 * 320
        )


@needs_kernels
@pytest.mark.parametrize("stage", [DECODE, PREFILL], ids=lambda stage: stage.name)
def test_native_kernels_are_timed_one_by_one(stage: Stage, tmp_path: Path) -> None:
    found = one_stage(NATIVE, stage, tmp_path)
    rows = {(r["layer"], r["part"]): r for r in found["parts"]["rows"]}
    per_layer = {"qkv", "attention", "attention out", "gate and up", "down"}
    assert set(rows) == {(layer, part) for layer in (0, 1) for part in per_layer} | {(None, "head")}
    assert all(r["seconds"] > 0 for r in rows.values())
    tokens = stage.rows if stage.decode else stage.tokens
    assert rows[0, "qkv"]["operations"] == 2 * tokens * 48 * (48 + 2 * 24)
    # After the last layer's attention only sampled tokens go on.
    assert rows[1, "down"]["operations"] == 2 * stage.rows * 48 * 96
    assert rows[None, "head"]["bytes"] == 4 * 48 * 320
    pairs = stage.rows * 21 if stage.decode else 40 * 41 // 2
    assert rows[0, "attention"]["operations"] == 4 * 48 * pairs
    assert rows[0, "attention"]["bytes"] == (3 * 21 if stage.decode else 40) * 2 * 24 * 4
    # What torch.profiler sees of a native step is next to nothing, which is why this exists.
    assert found["operators"]["events"] < 100


def test_hooks_leave_the_runner_as_it_was() -> None:
    model = tiny()
    runner = make_runner(model, TORCH)
    look(model, TORCH, [DECODE], repeats=2)
    hooked = [m for m in runner.module.modules() if m._forward_hooks or m._forward_pre_hooks]  # type: ignore[union-attr]
    assert len(hooked) == 1  # the runner's own, on the head


def test_a_capture_is_as_large_as_its_schedule_not_as_the_run(tmp_path: Path) -> None:
    runner = make_runner(tiny(), TORCH)

    def capture(plain: int, active: int) -> dict[str, Any]:
        config = config_for(TORCH, DECODE, runner)
        steps = Steps(tiny(), config, DECODE, LocalExecutor.for_config(runner, config, WallClock()))
        return profiled(steps, active=active, plain=plain, trace=tmp_path / f"{plain}-{active}.json")

    short, long, more = capture(2, 2), capture(60, 2), capture(2, 4)
    assert long["events"] == short["events"]
    assert more["events"] == 2 * short["events"]
    assert long["trace_bytes"] < 1.2 * short["trace_bytes"]
    assert short["trace_bytes"] < 5 << 20
    assert short["schedule"] == {"wait": 1, "warm_up": 2, "active": 2}
    assert short["overhead"] > -1
    with pytest.raises(ConfigError, match="active"):
        capture(2, MAX_ACTIVE + 1)


def test_a_stage_that_does_not_fit_is_refused() -> None:
    runner = make_runner(tiny(), TORCH)
    with pytest.raises(ConfigError, match="choose fewer"):
        config_for(TORCH, Stage("prefill", 1, 4000), runner)
