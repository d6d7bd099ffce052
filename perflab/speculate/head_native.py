"""Steps of a draft head in native kernels: the layer as a model of one layer, its head cut to frequent
tokens in int8, embeddings from the target's packed weights.

Owns the packed head and its small KV pool. Knows no scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perflab.engine.kv_tensors import KVTensors
from perflab.engine.native import pool_of
from perflab.errors import ModelError
from perflab.models import kernels
from perflab.models.kernels import FORMATS, PANEL, address
from perflab.models.native import NativeRunner, structure
from perflab.models.packing import Scheme, pack, pack_matrix
from perflab.models.runner import KVShape
from perflab.speculate.head_module import DraftHead, HeadModule, angles
from perflab.speculate.head_torch import Guess

_BLOCK = 16
_FIRST_BLOCKS = 256
_MAX_POSITIONS = 1 << 14


@dataclass(slots=True)
class _Slot:
    table: list[int] = field(default_factory=list)


class NativeHead:
    """The head on a target's `runner`: its threads, its embedding, its head's rows."""

    def __init__(self, head: DraftHead, runner: NativeRunner) -> None:
        shape = head.module.shape
        if shape.hidden != runner.shape.hidden:
            raise ModelError(
                f"the draft head is for hidden size {shape.hidden}, the model has {runner.shape.hidden}: "
                "train one with `perflab train-drafter`"
            )
        self._runner, self._shape = runner, shape
        self._target = runner.structure
        self._unpack = kernels.library().pl_unpack_row
        rows = np.empty((shape.vocabulary, shape.hidden), np.float32)
        for row, token in zip(rows, head.token_ids.tolist(), strict=True):
            self._unpack(byref(self._target.head), token, address(row))
        self._token_ids: list[int] = head.token_ids.tolist()
        own, self._arrays = pack(
            _as_llama(head.module, torch.from_numpy(rows), min(runner.max_positions, _MAX_POSITIONS)),
            Scheme("int8-dynamic", "int8-dynamic"),
        )
        self._model, self._layers = structure(own, self._arrays)
        self._fc_data, _ = pack_matrix("bf16", head.module.fc.weight.detach().float().numpy())
        self._fc = kernels.Matrix(
            FORMATS["bf16"], shape.hidden, 2 * shape.hidden, address(self._fc_data), None, None
        )
        self._kv_shape = KVShape(1, shape.kv_heads, shape.head_dim, shape.head_dim)
        self._kv = self._pool(_FIRST_BLOCKS)
        self._free = list(range(_FIRST_BLOCKS))
        self._room(64, 8)

    def _pool(self, blocks: int) -> KVTensors:
        return KVTensors(self._kv_shape, blocks, _BLOCK, torch.bfloat16, torch.device("cpu"), native=True)

    def _room(self, tokens: int, rows: int) -> None:
        """Buffers for steps of up to so many tokens and rows."""
        hidden, vocabulary = self._shape.hidden, self._shape.vocabulary
        self._most = (tokens, rows)
        self._pairs = np.zeros((tokens, 2 * hidden), np.float32)
        self._inputs = np.zeros((tokens, hidden), np.float32)
        self._logits = np.empty((rows, vocabulary), np.float32)
        self._guess = np.empty((rows, hidden), np.float32)
        self._best, self._best_value = np.empty(rows, np.int32), np.empty(rows, np.float32)
        self._finite = np.empty(rows, np.uint8)

    def open(self) -> _Slot:
        return _Slot()

    def close(self, slot: _Slot) -> None:
        self._free += slot.table
        slot.table = []

    def _grow(self, slot: _Slot, positions: int) -> None:
        need = -(-positions // _BLOCK) - len(slot.table)
        if need > len(self._free):
            old, count = self._kv, self._kv.null_block
            more = max(count, need)
            self._kv = self._pool(count + more)
            self._kv.key[:, :count], self._kv.value[:, :count] = old.key[:, :count], old.value[:, :count]
            self._free += range(count, count + more)
        for _ in range(need):
            slot.table.append(self._free.pop())

    def step(
        self,
        slots: Sequence[_Slot],
        starts: Sequence[int],
        counts: Sequence[int],
        features: Tensor,
        token_ids: list[int],
    ) -> Guess:
        """See `HeadSteps.step`."""
        tokens, rows, hidden = len(token_ids), len(slots), self._shape.hidden
        if tokens > self._most[0] or rows > self._most[1]:
            self._room(max(tokens, self._most[0]), max(rows, self._most[1]))
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        for slot, length in zip(slots, lengths, strict=True):
            self._grow(slot, length)
        pairs = self._pairs[:tokens]
        pairs[:, :hidden] = features.numpy()
        to = pairs.ctypes.data + 4 * hidden
        for index, token in enumerate(token_ids):
            self._unpack(byref(self._target.embedding), token, to + 8 * hidden * index)
        kernels.multiply(self._runner.team, self._fc, pairs, self._inputs[:tokens])
        width = max(len(slot.table) for slot in slots)
        tables = np.zeros((rows, width), np.int32)
        for row, slot in enumerate(slots):
            tables[row, : len(slot.table)] = slot.table
        query_start = np.zeros(rows + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        kv_len, last = np.array(lengths, np.int32), query_start[1:] - 1
        self._run(tokens, query_start, kv_len, tables, last)
        best = self._best[:rows]
        logits = self._logits[:rows] - self._best_value[:rows, None]
        np.exp(logits, out=logits)
        guess = torch.from_numpy(self._guess[:rows].copy())
        return Guess(guess, [self._token_ids[i] for i in best.tolist()], (1 / logits.sum(1)).tolist())

    def _run(
        self, tokens: int, query_start: np.ndarray, kv_len: np.ndarray, tables: np.ndarray, last: np.ndarray
    ) -> None:
        """One layer over `self._inputs`; the rows' last tokens come out in the buffers."""
        panels = -(-tokens // PANEL)
        inputs = np.zeros((panels, self._shape.hidden, PANEL), np.float32)
        for panel in range(panels):
            part = self._inputs[panel * PANEL : min(tokens, (panel + 1) * PANEL)]
            inputs[panel, :, : len(part)] = part.T
        model = self._model
        model.embedding = kernels.Matrix(
            FORMATS["fp32"], panels * PANEL, self._shape.hidden, address(inputs), None, None
        )
        token_ids = np.arange(tokens, dtype=np.int64)
        step = kernels.Step(
            rows=len(kv_len),
            tokens=tokens,
            query_start=address(query_start),
            kv_len=address(kv_len),
            tables=address(tables),
            table_width=tables.shape[1],
            token_ids=address(token_ids),
            sample_rows=address(last),
            samples=len(last),
            logits=address(self._logits),
            hidden=address(self._guess),
            best=address(self._best),
            best_value=address(self._best_value),
            finite=address(self._finite),
        )
        self._runner.team.call("pl_step", byref(model), byref(pool_of(self._kv)), byref(step))


def _as_llama(module: HeadModule, rows: Tensor, positions: int) -> Any:
    """The head as `packing.pack` wants a model: one layer, with the target's cut head for both ends."""
    shape = module.shape
    kv = shape.kv_heads * shape.head_dim
    query, key, value = (_linear(w) for w in module.qkv.weight.split((shape.heads * shape.head_dim, kv, kv)))
    gate, up = (_linear(w) for w in module.gate_up.weight.chunk(2))
    ends = _linear(rows)

    def rotary(_: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (
            torch.cat((part, part), -1)[None] for part in angles(at[0], shape.head_dim, shape.rope_theta)
        )
        return cos, sin

    layer = SimpleNamespace(
        self_attn=SimpleNamespace(
            q_proj=query,
            k_proj=key,
            v_proj=value,
            o_proj=module.out,
            head_dim=shape.head_dim,
            scaling=shape.head_dim**-0.5,
        ),
        mlp=SimpleNamespace(gate_proj=gate, up_proj=up, down_proj=module.down),
        input_layernorm=SimpleNamespace(weight=module.input_norm),
        post_attention_layernorm=SimpleNamespace(weight=module.post_norm),
    )
    return SimpleNamespace(
        config=SimpleNamespace(
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.intermediate,
            max_position_embeddings=positions,
            rms_norm_eps=shape.eps,
        ),
        model=SimpleNamespace(
            layers=[layer],
            norm=SimpleNamespace(weight=module.final_norm),
            embed_tokens=ends,
            rotary_emb=rotary,
        ),
        lm_head=ends,
    )


def _linear(weight: Tensor) -> nn.Linear:
    rows, columns = weight.shape
    linear = nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    return linear
