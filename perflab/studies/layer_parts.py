"""The parts of every layer in a step, timed: qkv, attention, its output, gate and up, down, norms, head.

Owns two ways: stamps around the modules of a torch runner, and the native kernels one by one on the
model's own weights, since a native step is a single call. Each says what it cannot see.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import byref
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from perflab.clock import NS_PER_S, Clock, WallClock
from perflab.config import EngineConfig
from perflab.engine.executor import LocalExecutor, TorchForward
from perflab.engine.native import pool_of
from perflab.measure.roofline import BYTES
from perflab.models import kernels
from perflab.models.kernels import FORMATS, address
from perflab.models.native import NativeRunner, StepRows
from perflab.models.packing import pack_matrix
from perflab.models.runner import Attend, HFRunner, RunnerOutput
from perflab.models.runners import Runner
from perflab.studies.steps import Stage, Steps

_NAMES = MappingProxyType({code: name for name, code in FORMATS.items()})


class Part(NamedTuple):
    """A part of one layer, or of none: median seconds in a step; bytes and operations it cannot do
    without, None where that is not counted."""

    layer: int | None
    part: str
    seconds: float
    bytes: float | None = None
    operations: float | None = None


def parts(
    model: Any,
    config: EngineConfig,
    stage: Stage,
    runner: Runner,
    executor: LocalExecutor,
    repeats: int,
) -> dict[str, Any]:
    """Median seconds of every part of a step, by layer, and of the model's whole forward pass."""
    if isinstance(runner, NativeRunner):
        found, whole, call = _native(stage, runner, executor, repeats)
        return {
            "method": "each native kernel by itself, in the order of a step, on the model's own weights",
            "unseen": "norms are inside the products that follow them; rotation, residual sums and the "
            "conversion of inputs are in none. A kernel called alone starts its threads each time, which "
            "a step does once",
            "forward_s": whole,
            "call_s": call,
            "rows": [part._asdict() for part in found],
        }
    watch = _Watch(runner, WallClock())
    observed = LocalExecutor(
        watch,  # type: ignore[arg-type]
        executor.kv,
        TorchForward(watch, config.attention, config.num_threads),  # type: ignore[arg-type]
        WallClock(),
        can_defer=config.chunked_prefill,
    )
    steps = Steps(model, config, stage, observed)
    steps.prepare(repeats + 2)
    taken: list[dict[tuple[int | None, str], float]] = []
    forwards = []
    with watch.on():
        for number in range(repeats + 2):
            watch.found = {}
            record = steps.step()
            if number >= 2:
                taken.append(watch.found)
                forwards.append((record.forwarded_ns - record.batched_ns) / NS_PER_S)
    keys = dict.fromkeys(key for found in taken for key in found)
    tokens = stage.rows if stage.decode else stage.tokens
    rows = []
    for layer, part in keys:
        seconds = statistics.median(found.get((layer, part), 0.0) for found in taken)
        weights = watch.weights.get((layer, part))
        samples = stage.rows if part == "head" else tokens
        operations = 2.0 * samples * weights.numbers if weights else None
        rows.append(Part(layer, part, seconds, weights and float(weights.bytes), operations)._asdict())
    return {
        "method": "stamps before and after each module and around attention",
        "unseen": "what happens between modules (residual sums, reshapes, rotation) is the difference to the "
        "forward pass; stamps make small modules look longer than they are",
        "forward_s": statistics.median(forwards),
        "call_s": None,
        "rows": rows,
    }


_PART_OF: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "qkv"),
    "o_proj": "attention out",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "gate and up"),
    "down_proj": "down",
    "act_fn": "activation",
    "experts": "experts",
    "gate": "router",
    "router": "router",
    "rotary_emb": "rotary table",
    "embed_tokens": "embedding",
    "lm_head": "head",
}


class _Weights(NamedTuple):
    numbers: int
    bytes: int


class _Watch:
    """Stands before an `HFRunner` and stamps its modules and attention; synchronises a GPU at each stamp."""

    def __init__(self, runner: HFRunner, clock: Clock) -> None:
        self.runner, self._clock = runner, clock
        self.device, self.dtype, self.vocab_size = runner.device, runner.dtype, runner.vocab_size
        self.query_heads, self.kv_shape = runner.query_heads, runner.kv_shape
        self.found: dict[tuple[int | None, str], float] = {}
        self.weights: dict[tuple[int | None, str], _Weights] = {}

    def now(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._clock.now()

    def add(self, key: tuple[int | None, str], start: int) -> None:
        self.found[key] = self.found.get(key, 0.0) + (self.now() - start) / NS_PER_S

    def forward(
        self, ids: Any, positions: Any, attention: Attend, sample_rows: Any, *, features: bool = False
    ) -> RunnerOutput:
        timed = _TimedAttend(attention, self)
        return self.runner.forward(ids, positions, timed, sample_rows, features=features)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Hooks on the runner's own view of the modules, taken off at the end."""
        hooks = []
        for name, module in self.runner.module.named_modules():
            last = name.rpartition(".")[2]
            part = _PART_OF.get(last) or ("norm" if "norm" in last else None)
            if part is None:
                continue
            numbers = [text for text in name.split(".") if text.isdigit()]
            key = (int(numbers[0]) if numbers else None, part)
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor) and weight.ndim == 2 and part != "embedding":
                before = self.weights.get(key, _Weights(0, 0))
                more = _Weights(weight.numel(), weight.numel() * weight.element_size())
                self.weights[key] = _Weights(before.numbers + more.numbers, before.bytes + more.bytes)
            started: list[int] = []
            hooks.append(module.register_forward_pre_hook(lambda *_, s=started: s.append(self.now())))
            hooks.append(module.register_forward_hook(lambda *_, s=started, key=key: self.add(key, s.pop())))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _TimedAttend:
    def __init__(self, attend: Attend, watch: _Watch) -> None:
        self._attend, self._watch = attend, watch

    def attend(self, layer: int, *tensors: Any, **options: Any) -> Any:
        start = self._watch.now()
        out = self._attend.attend(layer, *tensors, **options)
        self._watch.add((layer, "attention"), start)
        return out


def _native(
    stage: Stage, runner: NativeRunner, executor: LocalExecutor, repeats: int
) -> tuple[list[Part], float, float]:
    """The parts, seconds of the whole step in one call, and of a call that has next to nothing to do.

    The layers' matrices are called in the order in which a step reads them, so that each comes from
    where it would come from there: from memory, where a layer's weights exceed the caches.
    """
    kv, shape, team = executor.kv, runner.shape, runner.team
    assert kv is not None, "a step of native kernels keeps keys and values"
    model, pool = runner.structure, pool_of(kv)
    queries = 1 if stage.decode else stage.tokens
    tokens, context = stage.rows * queries, stage.tokens + stage.decode
    blocks = -(-context // kv.block_size)
    rows = StepRows(
        token_ids=np.zeros(tokens, np.int64),
        query_start=np.arange(0, tokens + 1, queries, dtype=np.int32),
        kv_len=np.full(stage.rows, context, np.int32),
        tables=np.arange(stage.rows * blocks, dtype=np.int32).reshape(stage.rows, blocks),
        sample_rows=np.arange(queries - 1, tokens, queries, dtype=np.int32),
    )
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    random = np.random.default_rng(0)
    arrays = {
        name: random.standard_normal((tokens, columns), np.float32)
        for name, columns in (("x", shape.hidden), ("key", kv_width), ("value", kv_width), ("context", width))
    }
    qkv = random.standard_normal((tokens, width + 2 * kv_width), np.float32)
    activation = np.empty((tokens, shape.intermediate), np.float32)
    last = random.standard_normal((stage.rows, shape.hidden), np.float32)
    logits = np.empty((stage.rows, shape.vocabulary), np.float32)
    step = rows.struct()
    attention = kernels.Attention(
        *(address(qkv), qkv.shape[1], shape.heads, 0, shape.scaling, 0.0, None),
        *(address(arrays["context"]), width, FORMATS["fp32"]),
    )
    pairs = stage.rows * (context if stage.decode else context * (context + 1) // 2)
    kv_bytes = stage.rows * context * runner.kv_shape.bytes_per_token(kv.key.dtype) / len(shape.windows)
    calls: list[tuple[int | None, str, Callable[[], None], float, float]] = []

    def product(
        layer: int | None, part: str, matrix: kernels.Matrix, *places: np.ndarray, finish: int
    ) -> None:
        x, out = places
        call = partial(kernels.multiply, team, matrix, x, out, finish)
        size = matrix.n * matrix.k * BYTES[_NAMES[matrix.format]]
        calls.append((layer, part, call, size, 2.0 * len(x) * matrix.n * matrix.k))

    for number in range(len(shape.windows)):
        layer = model.layer[number]
        product(number, "qkv", layer.qkv, arrays["x"], qkv, finish=kernels.STORE)
        attend = partial(
            team.call,
            "pl_attend",
            byref(pool),
            number,
            byref(step),
            address(arrays["key"]),
            address(arrays["value"]),
            byref(attention),
        )
        calls.append((number, "attention", attend, kv_bytes, 4.0 * width * pairs))
        # After the last layer's attention only the tokens go on whose logits are wanted.
        kept = slice(None) if number < len(shape.windows) - 1 else slice(stage.rows)
        mixed, x, gated = arrays["context"][kept], arrays["x"][kept], activation[kept]
        product(number, "attention out", layer.out, mixed, x, finish=kernels.ADD)
        product(number, "gate and up", layer.gate_up, x, gated, finish=kernels.SILU_MUL)
        product(number, "down", layer.down, gated, x, finish=kernels.ADD)
    product(None, "head", model.head, last, logits, finish=kernels.STORE)
    taken, wholes = [], []
    for _ in range(repeats + 1):
        taken.append(_timed([call for _, _, call, _, _ in calls]))
        wholes += _timed([partial(runner.forward, rows, pool)])
    seconds = [statistics.median(times[1:]) for times in zip(*taken, strict=True)]
    small = np.ones((1, kernels.PANEL), np.float32)
    data, scale = pack_matrix("fp32", np.ones((kernels.PANEL, kernels.PANEL), np.float32))
    least = kernels.Matrix(FORMATS["fp32"], kernels.PANEL, kernels.PANEL, address(data), address(scale), None)
    idle = [_timed([partial(kernels.multiply, team, least, small, small.copy())])[0] for _ in range(99)]
    found = [Part(c[0], c[1], s, c[3], c[4]) for c, s in zip(calls, seconds, strict=True)]
    return found, statistics.median(wholes[1:]), statistics.median(idle)


def _timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each call, one after the other."""
    marks = [WallClock.now()]
    for call in calls:
        call()
        marks.append(WallClock.now())
    return [(end - start) / NS_PER_S for start, end in pairwise(marks)]
