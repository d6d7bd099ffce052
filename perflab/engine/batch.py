"""A plan as tensors: all tokens of a step in one flat row, and where their KV goes.

Owns the layout of one step's inputs. No padding between requests: the model sees [1, tokens].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perflab.engine.plan import Plan


@dataclass(slots=True)
class Batch:
    """One step's inputs. B rows (requests), T tokens; row i holds tokens [query_start[i], query_start[i+1]).

    input_ids, position_ids: [1, T]. slot_block, slot_offset: [T], where each token's KV is written.
    block_tables: per row, the blocks that hold its first `kv_len[i]` positions.
    sample_rows: indices into T of the positions whose logits are wanted, row after row;
    row i's are [sample_start[i], sample_start[i+1]) of them, its last token always among them.
    """

    input_ids: Tensor
    position_ids: Tensor
    query_start: list[int]
    query_len: list[int]
    kv_len: list[int]
    block_tables: list[list[int]]
    slot_block: Tensor
    slot_offset: Tensor
    sample_rows: Tensor
    sample_start: list[int]


def build_batch(plan: Plan, block_size: int, device: torch.device) -> Batch:
    """Tensors of `plan`; `block_size` 0 means that no KV is kept."""
    input_ids: list[int] = []
    sample_rows: list[int] = []
    query_start, sample_start, kv_len = [0], [0], []
    positions, blocks = [], []
    for seq, count in zip(plan.seqs, plan.counts, strict=True):
        start = seq.num_computed_tokens
        end = start + count
        if count == 1 and end == len(seq.tokens):
            input_ids.append(seq.tokens[-1])
        elif seq.draft and end > len(seq.tokens):
            input_ids.extend((*seq.tokens[start:], *seq.draft)[:count])
        else:
            input_ids.extend(seq.tokens[start:end])
        last = len(input_ids)
        wanted = count if seq.params.prompt_logprobs is not None else 1 + max(0, end - len(seq.tokens))
        sample_rows.extend(range(last - wanted, last))
        query_start.append(last)
        sample_start.append(len(sample_rows))
        kv_len.append(end)
        if count == 1:
            positions.append(start)
            if block_size:
                blocks.append(seq.block_table[start // block_size])
        else:
            positions.extend(range(start, end))
            if block_size:
                table = seq.block_table
                blocks.extend(table[position // block_size] for position in range(start, end))
    position_ids = np.array(positions, dtype=np.int64)
    return Batch(
        input_ids=torch.tensor([input_ids], device=device),
        position_ids=torch.from_numpy(position_ids[None]).to(device),
        query_start=query_start,
        query_len=list(plan.counts),
        kv_len=kv_len,
        block_tables=[seq.block_table for seq in plan.seqs],
        slot_block=torch.tensor(blocks, dtype=torch.int64, device=device),
        slot_offset=torch.from_numpy(position_ids % block_size if block_size else position_ids).to(device),
        sample_rows=torch.tensor(sample_rows, device=device),
        sample_start=sample_start,
    )
