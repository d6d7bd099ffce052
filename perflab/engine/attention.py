"""Attention of one step over paged keys and values.

Owns the masks and groupings of a step, made once and used by every layer. `eager` and `sdpa` work
one request at a time and are the reference; `batched` takes all rows with few queries together and
leaves the long chunks of prompts to `sdpa`. Causal, grouped-query, with sliding windows, logit
soft-capping (Gemma 2) and attention sinks (GPT-OSS).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from perflab.config import Attention
from perflab.engine.batch import Batch
from perflab.engine.kv_tensors import KVTensors

SHORT_QUERY = 8  # rows with at most this many queries go together
LENGTH_RATIO = 4  # … while the longest context of a group is at most this many times the shortest


@dataclass(slots=True)
class Group:
    """Rows with the same number of queries, attended together over padded block tables."""

    rows: list[int]
    queries: int
    tokens: Tensor | None  # [B · queries] indices into T; None: all of T, in order
    table_index: Tensor
    query_positions: Tensor  # [B, queries]
    positions: Tensor  # [padded context]
    masks: dict[int | None, Tensor] = field(default_factory=dict)


class StepAttention:
    """The `Attend` of one step. Without `kv` there is no past: every row brings all its tokens."""

    def __init__(self, batch: Batch, kv: KVTensors | None, kind: Attention) -> None:
        self._batch, self._kv = batch, kv
        self._one = eager_attention if kind == "eager" else sdpa_attention
        self._slots = kv.slots(*batch.slots(kv.block_size)) if kv is not None else None
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._tables: dict[int, Tensor] = {}
        grouped = kind == "batched" and kv is not None
        self._groups = _groups(batch, kv) if grouped and kv is not None else []
        together = {row for group in self._groups for row in group.rows}
        self._alone = [row for row in range(len(batch.query_len)) if row not in together]

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
        query, key, value = query[0], key[0], value[0]
        if self._kv is not None and self._slots is not None:
            self._kv.write(layer, self._slots, key, value)
        heads, length, _ = query.shape
        if self._groups and self._groups[0].tokens is None:
            return self._attend_group(self._groups[0], layer, query, scaling, sliding_window, softcap, sinks)[
                None
            ]
        out = query.new_empty(length, heads, value.shape[-1])
        for group in self._groups:
            part = self._attend_group(group, layer, query, scaling, sliding_window, softcap, sinks)
            assert group.tokens is not None
            out.index_copy_(0, group.tokens, part)
        for row in self._alone:
            start, end = self._batch.query_start[row], self._batch.query_start[row + 1]
            keys, values = self._row_kv(row, layer, key, value)
            mask = self._row_mask(row, sliding_window, query.device)
            part = self._one(query[:, start:end], keys, values, mask, scaling, softcap, sinks)
            out[start:end] = part.transpose(0, 1)
        return out[None]

    # -- one row at a time -------------------------------------------------------------------

    def _row_kv(self, row: int, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        batch = self._batch
        if self._kv is None or batch.query_len[row] == batch.kv_len[row]:
            start, end = batch.query_start[row], batch.query_start[row + 1]
            return key[:, start:end], value[:, start:end]
        if row not in self._tables:
            blocks = -(-batch.kv_len[row] // self._kv.block_size)
            table = torch.tensor([batch.block_tables[row][:blocks]], device=key.device)
            self._tables[row] = self._kv.table_index(table)
        keys, values = self._kv.gather(layer, self._tables[row], 1)
        return keys[0, :, : batch.kv_len[row]], values[0, :, : batch.kv_len[row]]

    def _row_mask(self, row: int, window: int | None, device: torch.device) -> Tensor | None:
        """[queries, context] of what may be seen; None where causality alone says it without a mask."""
        queries, context = self._batch.query_len[row], self._batch.kv_len[row]
        if window is not None and context <= window:
            window = None
        if (row, window) not in self._masks:
            mask = None
            if window is not None or 1 < queries < context:
                at = torch.arange(context - queries, context, device=device)[:, None]
                mask = visible(at, torch.arange(context, device=device)[None], window)
            self._masks[row, window] = mask
        return self._masks[row, window]

    # -- rows with few queries, together -------------------------------------------------------

    def _attend_group(
        self,
        group: Group,
        layer: int,
        query: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """[B · queries, heads, dim], in the order of the group's tokens."""
        assert self._kv is not None
        rows, queries = len(group.rows), group.queries
        keys, values = self._kv.gather(layer, group.table_index, rows)
        kv_heads, shared = keys.shape[1], query.shape[0] // keys.shape[1]
        if group.tokens is not None:
            query = query.index_select(1, group.tokens)
        # [heads, B·q, dim] → [B·kv_heads, shared·q, dim], so that keys are read once for all their queries
        q = query.reshape(kv_heads, shared, rows, queries, -1).permute(2, 0, 1, 3, 4)
        q = q.reshape(rows * kv_heads, shared * queries, -1)
        mask = self._group_mask(group, window, shared, kv_heads, query.dtype)
        scores = torch.baddbmm(mask, q, keys.flatten(0, 1).transpose(1, 2), alpha=scaling, beta=1)
        if softcap is not None:
            scores = torch.tanh((scores - mask.nan_to_num(neginf=0.0)) / softcap) * softcap + mask
        if sinks is None:
            weights = torch.softmax(scores, -1)
        else:
            sink = sinks.view(1, kv_heads, shared, 1, 1).expand(rows, -1, -1, queries, -1)
            weights = _softmax_with_sink(scores, sink.reshape(rows * kv_heads, -1, 1))
        part = torch.bmm(weights, values.flatten(0, 1))
        part = part.view(rows, kv_heads, shared, queries, -1).permute(0, 3, 1, 2, 4)
        return part.reshape(rows * queries, kv_heads * shared, -1)

    @staticmethod
    def _group_mask(
        group: Group, window: int | None, shared: int, kv_heads: int, dtype: torch.dtype
    ) -> Tensor:
        """Additive mask [B · kv_heads, shared · queries, padded context]."""
        if window not in group.masks:
            seen = visible(group.query_positions[..., None], group.positions, window)
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            mask.masked_fill_(~seen, float("-inf"))
            mask = mask[:, None, None].expand(-1, kv_heads, shared, -1, -1)
            group.masks[window] = mask.reshape(len(group.rows) * kv_heads, shared * group.queries, -1)
        return group.masks[window]


def visible(query_position: Tensor, key_position: Tensor, window: int | None) -> Tensor:
    """Causal: a query sees its own position and those before it, at most `window` in all."""
    seen = key_position <= query_position
    return seen if window is None else seen & (key_position > query_position - window)


def _groups(batch: Batch, kv: KVTensors) -> list[Group]:
    """Rows with the same few queries and contexts of similar length."""
    device = kv.key.device
    groups = []
    for rows in _similar_rows(batch):
        queries = batch.query_len[rows[0]]
        blocks = [-(-batch.kv_len[row] // kv.block_size) for row in rows]
        longest = max(blocks)
        table = torch.tensor(
            [
                [*batch.block_tables[row][:count], *[kv.null_block] * (longest - count)]
                for row, count in zip(rows, blocks, strict=True)
            ],
            device=device,
        )
        starts = torch.tensor([batch.kv_len[row] - queries for row in rows], device=device)
        first = torch.tensor([batch.query_start[row] for row in rows], device=device)
        offsets = torch.arange(queries, device=device)
        everything = rows == list(range(len(batch.query_len)))
        groups.append(
            Group(
                rows,
                queries,
                None if everything else (first[:, None] + offsets).flatten(),
                kv.table_index(table),
                starts[:, None] + offsets,
                torch.arange(longest * kv.block_size, device=device),
            )
        )
    return groups


def _similar_rows(batch: Batch) -> list[list[int]]:
    """Row numbers by number of queries, and within those by context, longest first, cut where padding
    would waste too much; each list in ascending order."""
    lists: list[list[int]] = []
    longest: dict[int, int] = {}
    current: dict[int, list[int]] = {}
    for row in sorted(range(len(batch.kv_len)), key=batch.kv_len.__getitem__, reverse=True):
        queries, context = batch.query_len[row], batch.kv_len[row]
        if queries > SHORT_QUERY or queries == context:
            continue
        if queries not in current or context * LENGTH_RATIO < longest[queries]:
            current[queries], longest[queries] = [], context
            lists.append(current[queries])
        current[queries].append(row)
    return [sorted(rows) for rows in lists]


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q kᵀ · scaling) v written out. query [heads, q, dim], key and value [kv_heads, c, dim],
    mask [q, c] of what may be seen (None: causal, the queries at the end) → [heads, q, dim]."""
    if mask is None:
        size = (query.shape[1], key.shape[1])
        mask = torch.ones(size, dtype=torch.bool, device=query.device).tril(size[1] - size[0])
    shared = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
    scores = query @ key.transpose(1, 2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    else:
        weights = _softmax_with_sink(scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1))
    return weights @ value


def sdpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `eager_attention`, by torch's fused kernel where it can: not with soft caps or sinks.

    Without a mask there is one query, or as many as keys.
    """
    if softcap is not None or sinks is not None:
        return eager_attention(query, key, value, mask, scaling, softcap, sinks)
    shared = query.shape[0] // key.shape[0]
    if query.shape[1] == 1 and mask is None:
        # A lone query: its heads become the queries of their key head, and nothing is repeated.
        query = query.view(key.shape[0], shared, -1)
        return F.scaled_dot_product_attention(query[None], key[None], value[None], scale=scaling)[0].view(
            key.shape[0] * shared, 1, -1
        )
    key, value = key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0)
    return F.scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scaling
    )[0]


def _softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """Softmax over the scores and one more logit per head that takes weight and gives no value."""
    both = torch.cat((scores.float(), sink.to(torch.float32)), -1)
    return torch.softmax(both, -1)[..., :-1].to(scores.dtype)
