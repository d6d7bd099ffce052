"""The fast path of Llama-shaped models on a CPU: packed weights, and a whole step in one native call.

Owns the weights (from the disk cache where they were packed before) and the team of threads. Knows
nothing of requests: whoever calls brings the step's rows and the KV pool as arrays.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from perflab.errors import NotNative
from perflab.models import kernels, packed_cache
from perflab.models.kernels import FORMATS, Team, address
from perflab.models.loaded import LoadedModel
from perflab.models.packing import LAYOUT, Shape, pack, scheme_of, why_not
from perflab.models.runner import Best, KVShape, RunnerOutput

_WORTH_KEEPING = 8 << 20  # bytes; less is packed again as fast as it is read


@dataclass(slots=True)
class StepRows:
    """A step's inputs as contiguous arrays. B rows, T tokens, R of them sampled.

    token_ids int64 [T]; query_start int32 [B + 1]; kv_len int32 [B], the context with the step's own
    tokens; tables int32 [B, width]; sample_rows int32 [R], indices into T.
    """

    token_ids: np.ndarray
    query_start: np.ndarray
    kv_len: np.ndarray
    tables: np.ndarray
    sample_rows: np.ndarray

    def struct(self) -> kernels.Step:
        return kernels.Step(
            rows=len(self.kv_len),
            tokens=len(self.token_ids),
            query_start=address(self.query_start),
            kv_len=address(self.kv_len),
            tables=address(self.tables),
            table_width=self.tables.shape[1],
            token_ids=address(self.token_ids),
            sample_rows=address(self.sample_rows),
            samples=len(self.sample_rows),
        )


class _Buffers(threading.local):
    """Outputs that a caller's next step overwrites: fresh pages at every step would cost milliseconds."""

    def __init__(self) -> None:
        self.logits = np.empty(0, np.float32)

    def logits_of(self, rows: int, vocabulary: int) -> np.ndarray:
        if self.logits.size < rows * vocabulary:
            self.logits = np.empty(rows * vocabulary, np.float32)
        return self.logits[: rows * vocabulary].reshape(rows, vocabulary)


class NativeRunner:
    """Runs a Llama-shaped model; engines may share one, from one thread or several.

    weights: `model`, `int8` or `int4` (see `scheme_of`). threads: None for torch's number. isa: an
    instruction set to use instead of the processor's best. Raises NotNative where there are no
    kernels or the model has another shape.
    """

    def __init__(
        self,
        model: LoadedModel,
        weights: str = "model",
        threads: int | None = None,
        isa: str | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.device, self.dtype, self.weights = model.device, model.dtype, weights
        self.team = Team(threads or torch.get_num_threads(), isa=isa)
        self.shape, self._arrays = _packed(model, weights, progress)
        shape = self.shape
        self.kv_shape = KVShape(len(shape.windows), shape.kv_heads, shape.head_dim, shape.head_dim)
        self.vocab_size: int = shape.vocabulary
        self.max_positions = min(model.max_model_len, shape.positions)
        self._model, self._layers = structure(shape, self._arrays)
        self._lock = threading.Lock()
        self._buffers = _Buffers()

    @property
    def weight_bytes(self) -> int:
        """Bytes of matrices that one step reads: the layers' and the head's."""
        return sum(
            a.nbytes
            for name, a in self._arrays.items()
            if name.endswith(".data") and name != "embedding.data"
        )

    @property
    def structure(self) -> kernels.Model:
        """The model as the kernels see it; valid as long as the runner lives."""
        return self._model

    @torch.inference_mode()
    def forward(self, rows: StepRows, pool: kernels.Pool, *, features: bool = False) -> RunnerOutput:
        """Write the step's keys and values into the pool; logits fp32 [R, vocabulary] are valid until the
        same thread's next step. features: those of every token are wanted."""
        samples, shape = len(rows.sample_rows), self.shape
        logits = self._buffers.logits_of(samples, shape.vocabulary)
        hidden = np.empty((samples, shape.hidden), np.float32)
        states = np.empty((len(rows.token_ids), shape.hidden), np.float32) if features else None
        best, best_value = np.empty(samples, np.int32), np.empty(samples, np.float32)
        finite = np.empty(len(rows.kv_len), np.uint8)
        step = rows.struct()
        step.logits, step.hidden, step.features = address(logits), address(hidden), address(states)
        step.best, step.best_value, step.finite = address(best), address(best_value), address(finite)
        with self._lock:
            self.team.call("pl_step", byref(self._model), byref(pool), byref(step))
        return RunnerOutput(
            torch.from_numpy(logits),
            torch.from_numpy(hidden),
            Best(best.tolist(), np.isfinite(best_value).tolist()),
            finite.astype(bool).tolist(),
            None if states is None else torch.from_numpy(states),
        )


def _key(model: LoadedModel, weights: str) -> str:
    scheme = scheme_of(weights, model.dtype)
    return f"{model.fingerprint}-{scheme.layers}-{scheme.head}-v{LAYOUT}"


def _packed(
    model: LoadedModel, weights: str, progress: Callable[[str], None] | None
) -> tuple[Shape, Mapping[str, np.ndarray]]:
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        raise NotNative(f"native kernels run fp32 and bf16 on a CPU, not {model.dtype} on {model.device}")
    key = _key(model, weights)
    if (found := packed_cache.load(key)) is not None:
        return Shape.from_meta(found[0]), found[1]
    if reason := why_not(model.module):
        raise NotNative(f"{model.name}: {reason}")
    shape, arrays = pack(model.module, scheme_of(weights, model.dtype), progress)
    if sum(array.nbytes for array in arrays.values()) >= _WORTH_KEEPING:
        packed_cache.save(key, shape.to_meta(), arrays)
    return shape, arrays


def structure(shape: Shape, arrays: Mapping[str, np.ndarray]) -> tuple[kernels.Model, Any]:
    """The C structures over the arrays, which must outlive them."""

    def matrix(name: str, format: str, n: int, k: int) -> kernels.Matrix:
        data, scale, bias = (address(arrays.get(f"{name}.{part}")) for part in ("data", "scale", "bias"))
        return kernels.Matrix(FORMATS[format], n, k, data, scale, bias)

    count, width = len(shape.windows), shape.heads * shape.head_dim
    layers = (kernels.Layer * count)()
    for number, layer in enumerate(layers):
        name, format = f"layers.{number}", shape.layer_format
        for norm in ("input_norm", "post_norm", "query_norm", "key_norm"):
            setattr(layer, norm, address(arrays.get(f"{name}.{norm}")))
        layer.qkv = matrix(f"{name}.qkv", format, width + 2 * shape.kv_heads * shape.head_dim, shape.hidden)
        layer.out = matrix(f"{name}.out", format, shape.hidden, width)
        layer.gate_up = matrix(f"{name}.gate_up", format, 2 * shape.intermediate, shape.hidden)
        layer.down = matrix(f"{name}.down", format, shape.hidden, shape.intermediate)
        layer.window = shape.windows[number]
    head = matrix("head", shape.head_format, shape.vocabulary, shape.hidden)
    embedding = head if shape.tied else matrix("embedding", shape.head_format, shape.vocabulary, shape.hidden)
    model = kernels.Model(
        layers=count,
        layer=ctypes.cast(layers, ctypes.POINTER(kernels.Layer)),
        final_norm=address(arrays["final_norm"]),
        embedding=embedding,
        head=head,
        cos=address(arrays["cos"]),
        sin=address(arrays["sin"]),
        **{
            name: getattr(shape, name)
            for name in (
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "intermediate",
                "vocabulary",
                "rotary_half",
            )
        },
        eps=shape.eps,
        scaling=shape.scaling,
    )
    return model, layers
