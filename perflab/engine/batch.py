"""A plan as arrays: all tokens of a step in one flat row, and where their KV goes.

Owns the layout of one step's inputs. No padding between requests: the model sees [1, tokens].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perflab.engine.plan import Plan


@dataclass(slots=True)
class Batch:
    """One step's inputs. B rows (requests), T tokens; row i holds tokens [query_start[i], query_start[i+1]).

    token_ids, positions: int64 [T]. block_tables: per row, the blocks that hold its first `kv_len[i]`
    positions. sample_rows: indices into T of the positions whose logits are wanted, row after row;
    row i's are [sample_start[i], sample_start[i+1]) of them. features: what goes into the head is wanted
    of every token.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    query_start: list[int]
    query_len: list[int]
    kv_len: list[int]
    block_tables: list[list[int]]
    sample_rows: list[int]
    sample_start: list[int]
    features: bool = False

    def slots(self, block_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Block and offset in it of each token's KV, int64 [T] each."""
        blocks: list[int] = []
        for row, table in enumerate(self.block_tables):
            end = self.kv_len[row]
            if self.query_len[row] == 1:
                blocks.append(table[(end - 1) // block_size])
            else:
                start = end - self.query_len[row]
                blocks.extend(table[position // block_size] for position in range(start, end))
        return np.array(blocks, dtype=np.int64), self.positions % block_size


def build_batch(plan: Plan, *, every_row: bool = True) -> Batch:
    """Arrays of `plan`. every_row: want the logits of each row's last token even where none is sampled."""
    token_ids: list[int] = []
    sample_rows: list[int] = []
    query_start, sample_start, kv_len = [0], [0], []
    positions: list[int] = []
    for seq, count, samples in zip(plan.seqs, plan.counts, plan.samples, strict=True):
        start = seq.num_computed_tokens
        end = start + count
        if count == 1 and end == len(seq.tokens):
            token_ids.append(seq.tokens[-1])
        elif seq.draft and end > len(seq.tokens):
            token_ids.extend((*seq.tokens[start:], *seq.draft)[:count])
        else:
            token_ids.extend(seq.tokens[start:end])
        last = len(token_ids)
        if seq.scores_prompt:
            wanted = count
        else:
            wanted = 1 + max(0, end - len(seq.tokens)) if samples or every_row else 0
        sample_rows.extend(range(last - wanted, last))
        query_start.append(last)
        sample_start.append(len(sample_rows))
        kv_len.append(end)
        positions.extend(range(start, end))
    return Batch(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        query_start=query_start,
        query_len=list(plan.counts),
        kv_len=kv_len,
        block_tables=[seq.block_table for seq in plan.seqs],
        sample_rows=sample_rows,
        sample_start=sample_start,
    )
