"""What a step's time is made of: torch's operators by their shapes, and the parts of every layer.

Owns the operators: which steps torch.profiler sees, what that costs, how bytes and operations follow
from shapes. To torch.profiler a native step is one opaque call; the parts of its layers come from
`layer_parts`. Draws nothing.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perflab.clock import NS_PER_S, WallClock
from perflab.config import EngineConfig
from perflab.engine.executor import LocalExecutor
from perflab.errors import ConfigError
from perflab.models.native import NativeRunner
from perflab.models.runners import Runner, make_runner
from perflab.studies.layer_parts import parts
from perflab.studies.steps import Stage, Steps, config_for
from perflab.types import StepRecord

MAX_ACTIVE = 10
"""Most steps under torch.profiler: some thousand events each, so that a trace stays in megabytes."""


def look(
    model: Any,
    config: EngineConfig,
    stages: Sequence[Stage],
    *,
    repeats: int = 12,
    trace_dir: Path | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """Each stage: its parts by layer, torch's operators, and plain steps to compare with. JSON values."""
    runner = make_runner(model, config)
    found = []
    for stage in stages:
        say(f"operators: a {stage.name} step")
        wide = config_for(config, stage, runner)
        executor = LocalExecutor.for_config(runner, wide, WallClock())
        steps = Steps(model, wide, stage, executor)
        trace = trace_dir / f"operators-{stage.name}.trace.json" if trace_dir else None
        operators = profiled(steps, active=min(MAX_ACTIVE, 3), plain=repeats, trace=trace)
        found.append(
            {
                "stage": asdict(stage),
                "runner": "native" if isinstance(runner, NativeRunner) else "torch",
                "weights": _format(runner),
                "operators": operators,
                "parts": parts(model, wide, stage, runner, executor, repeats),
            }
        )
    return found


def _format(runner: Runner) -> str:
    if isinstance(runner, NativeRunner):
        return runner.shape.layer_format
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[runner.dtype]


def profiled(
    steps: Steps, active: int = 3, warm_up: int = 2, plain: int = 12, trace: Path | None = None
) -> dict[str, Any]:
    """Operators of `active` steps by name and shapes, per step; before and after, `plain` / 2 steps
    without the profiler say what it costs (`overhead`) and how much they differ among themselves (`spread`,
    their interquartile range over their median).

    The schedule waits one step and warms up for `warm_up`: these are not kept, so memory and trace
    hold `active` steps however long the engine runs. Raises ConfigError for more than MAX_ACTIVE.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    if not 1 <= active <= MAX_ACTIVE:
        raise ConfigError(f"active={active}: 1 to {MAX_ACTIVE} steps; a capture of more only grows the file")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    waiting = 1
    steps.prepare(2 * plain + waiting + warm_up + active)
    without = [_seconds(steps.step()) for _ in range(2 + plain // 2)][2:]
    plan = schedule(wait=waiting, warmup=warm_up, active=active, repeat=1)
    with profile(activities=activities, schedule=plan, record_shapes=True, with_flops=True) as profiler:
        observed = []
        for number in range(waiting + warm_up + active):
            seconds = _seconds(steps.step())
            if number >= waiting + warm_up:
                observed.append(seconds)
            profiler.step()
    without += [_seconds(steps.step()) for _ in range(plain // 2)]
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    events = [
        e
        for e in profiler.events() or ()
        if e.device_type.name == "CPU" and not e.key.startswith("ProfilerStep")
    ]
    plain_s, observed_s = statistics.median(without), statistics.median(observed)
    return {
        "schedule": {"wait": waiting, "warm_up": warm_up, "active": active},
        "step_s": plain_s,
        "observed_step_s": observed_s,
        "overhead": observed_s / plain_s - 1,
        "spread": float(np.subtract(*np.quantile(without, (0.75, 0.25)))) / plain_s,
        "events": len(events),
        "trace_bytes": trace.stat().st_size if trace is not None else None,
        "rows": operator_rows(events, active),
    }


def _seconds(step: StepRecord) -> float:
    return (step.delivered_ns - step.start_ns) / NS_PER_S


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_linear_pointwise", "matmul"}
_POINTWISE = {"add", "sub", "mul", "div", "pow", "silu", "gelu", "rsqrt", "neg", "softmax", "_softmax", "cat"}
_POINTWISE |= {"copy_", "add_", "mul_", "div_", "sum", "mean", "sigmoid", "tanh"}
_ITEM = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "long": 8, "long int": 8, "int": 4}
_ITEM |= {"bool": 1, "signed char": 1, "unsigned char": 1}


def operator_rows(events: Sequence[Any], steps: int, most: int = 60) -> list[dict[str, Any]]:
    """Operators by name and input shapes: calls, own seconds, bytes and operations, each per step.

    Bytes are counted from shapes and dtypes for products (both operands and the result) and pointwise
    operators (operands, and a result as large as the largest), operations for products; others have
    none. On a GPU the seconds are its own. The `most` with most time, then one row of the others.
    """
    groups: dict[tuple[str, str], list[Any]] = {}
    for event in events:
        shapes = [shape for shape in event.input_shapes or [] if shape]
        groups.setdefault((event.key, str(shapes).replace(" ", "")), []).append(event)
    rows = []
    for (name, shapes_text), members in groups.items():
        own_us = sum(e.self_device_time_total or e.self_cpu_time_total for e in members)
        size, operations = work_of(name, members[0].input_shapes or [], members[0].input_dtypes or [])
        calls = len(members) / steps
        rows.append(
            {
                "operator": name,
                "shapes": shapes_text,
                "calls": calls,
                "seconds": own_us / 1e6 / steps,
                "bytes": size and size * calls,
                "operations": operations and operations * calls,
            }
        )
    rows.sort(key=lambda row: -row["seconds"])
    rest = rows[most:]
    if rest:
        others = {"operator": f"{len(rest)} others", "shapes": "", "bytes": None, "operations": None}
        sums = {key: sum(row[key] for row in rest) for key in ("calls", "seconds")}
        rows[most:] = [others | sums]
    return rows


def work_of(
    name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]
) -> tuple[float | None, float | None]:
    """(bytes, operations) of one call; None for what the shapes do not tell."""
    short = name.rpartition("::")[2]
    tensors = [(s, _ITEM.get(d, 0)) for s, d in zip(shapes, dtypes, strict=False) if s and d in _ITEM]
    if not tensors or any(not all(isinstance(n, int) for n in s) for s, _ in tensors):
        return None, None
    if short in _PRODUCTS and len(tensors) >= 2:
        (a, item), (b, _) = tensors[-2:] if short in ("addmm", "baddbmm") else tensors[:2]
        transposed = short in ("linear", "_linear_pointwise")  # [outputs, inputs]
        if len(a) < 2 or len(b) < 2:
            return None, None
        rows, inner, columns = prod(a[:-1]), a[-1], b[0] if transposed else b[-1]
        size = sum(prod(s) * i for s, i in tensors) + rows * columns * item
        return float(size), 2.0 * rows * inner * columns
    if short in _POINTWISE:
        largest = max(prod(s) * i for s, i in tensors)
        return float(sum(prod(s) * i for s, i in tensors) + largest), None
    return None, None
