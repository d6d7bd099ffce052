"""What the native kernels need of a step: its rows as arrays, the KV pool as pointers.

Owns the translation, both for the runner of whole steps and for attention inside transformers'
modules. Knows nothing of weights.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from perflab.engine.batch import Batch
from perflab.engine.kv_tensors import KVTensors
from perflab.models import kernels
from perflab.models.kernels import KV_FORMATS, Team
from perflab.models.native import NativeRunner, StepRows
from perflab.models.runner import KVShape, RunnerOutput

_SCRATCH_BLOCK = 16
_DTYPE_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}


def pool_of(kv: KVTensors) -> kernels.Pool:
    """The KV pool's memory as the kernels see it; valid as long as `kv` lives."""
    key_scale = kv.key_scale.data_ptr() if kv.key_scale is not None else None
    value_scale = kv.value_scale.data_ptr() if kv.value_scale is not None else None
    return kernels.Pool(
        key=kv.key.data_ptr(),
        value=kv.value.data_ptr(),
        key_scale=key_scale,
        value_scale=value_scale,
        format=KV_FORMATS[_DTYPE_FORMATS[kv.key.dtype]],
        blocks=kv.key.shape[1],
        block_size=kv.block_size,
        kv_heads=kv.shape.kv_heads,
        key_dim=kv.shape.key_dim,
        value_dim=kv.shape.value_dim,
        tiled=kv.tiled,
    )


def step_rows(batch: Batch, block_size: int) -> StepRows:
    blocks = [-(-length // block_size) for length in batch.kv_len]
    tables = np.zeros((len(blocks), max(blocks, default=0)), np.int32)
    for row, (table, count) in enumerate(zip(batch.block_tables, blocks, strict=True)):
        tables[row, :count] = table[:count]
    return StepRows(
        token_ids=batch.token_ids,
        query_start=np.array(batch.query_start, np.int32),
        kv_len=np.array(batch.kv_len, np.int32),
        tables=tables,
        sample_rows=np.array(batch.sample_rows, np.int32),
    )


def with_scratch(
    batch: Batch, shape: KVShape, dtype: torch.dtype, device: torch.device
) -> tuple[Batch, KVTensors]:
    """For a step that keeps no KV: memory that lives as long as the step, and block tables into it."""
    tables: list[list[int]] = []
    used = 0
    for length in batch.kv_len:
        blocks = -(-length // _SCRATCH_BLOCK)
        tables.append(list(range(used, used + blocks)))
        used += blocks
    return replace(batch, block_tables=tables), KVTensors(
        shape, used, _SCRATCH_BLOCK, dtype, device, native=True
    )


class NativeForward:
    """A step through `NativeRunner`."""

    def __init__(self, runner: NativeRunner) -> None:
        self._runner = runner

    def __call__(self, batch: Batch, kv: KVTensors | None) -> RunnerOutput:
        if kv is None:
            runner = self._runner
            batch, kv = with_scratch(batch, runner.kv_shape, runner.dtype, runner.device)
        return self._runner.forward(step_rows(batch, kv.block_size), pool_of(kv), features=batch.features)


class NativeAttention:
    """The `Attend` of one step by the native kernel: every row straight over its block table."""

    def __init__(self, batch: Batch, kv: KVTensors | None, team: Team) -> None:
        self._batch, self._kv, self._team = batch, kv, team
        self._rows: StepRows | None = None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        kv = self._kv
        if kv is None:  # a pool of one layer, filled and read by it, serves them all in turn
            shape = KVShape(1, key.shape[1], key.shape[3], value.shape[3])
            self._batch, kv = with_scratch(self._batch, shape, key.dtype, key.device)
            layer = 0
        if self._rows is None:
            self._rows = step_rows(self._batch, kv.block_size)
        q, k, v = (_floats(tensor) for tensor in (query, key, value))
        tokens, heads, _ = q.shape
        out = torch.empty(tokens, heads, v.shape[2], dtype=query.dtype)
        sink = sinks.detach().float().contiguous() if sinks is not None else None
        attention = kernels.Attention(
            query=q.data_ptr(),
            query_stride=q.stride(0),
            heads=heads,
            window=sliding_window or 0,
            scaling=scaling,
            softcap=softcap or 0.0,
            sinks=sink.data_ptr() if sink is not None else None,
            out=out.data_ptr(),
            out_stride=out.stride(0),
            out_format=KV_FORMATS[_DTYPE_FORMATS[query.dtype]],
        )
        step, pool = self._rows.struct(), pool_of(kv)
        self._team.call(
            "pl_attend", byref(pool), layer, byref(step), k.data_ptr(), v.data_ptr(), byref(attention)
        )
        return out[None]


def _floats(heads_first: Tensor) -> Tensor:
    """[1, heads, T, dim] as contiguous fp32 [T, heads, dim]."""
    return heads_first[0].transpose(0, 1).float().contiguous()
