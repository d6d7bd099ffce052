"""Choosing the next token of each row of a batch.

Owns the draw: one counter-based uniform per (seed, position, stream) and the inverse of the row's
own cumulative distribution. It keeps no generator state, so preemption, batch position and batch
mates cannot change a token stream; only a row's logits can. Knows nothing of scheduling, of when
a request ends, or of how logits come about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from torch import Tensor

from perflab.engine.logits import (
    FloatRow,
    IdRow,
    SamplingRow,
    adjust,
    below_min_tokens,
    changes_logits,
    top_ids,
    truncated,
)
from perflab.models.runner import Best
from perflab.types import TokenLogprob

_BLOCK = 256  # weights summed at once before a draw looks inside one block
_PROMPT_CHUNK = 256  # prompt positions brought to the host at a time


class SampleResult(NamedTuple):
    """One entry per row of the logits; the token of a bad row has no meaning."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    bad_rows: list[int]  # rows with a NaN or +inf logit, or with no token left to choose


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A uniform in [0, 1) with 53 random bits, a pure function of three integers of any size.

    `position` counts a request's output tokens from 0. Draws for the same token that must be
    independent of each other (a draft's proposal, its acceptance) take different streams.
    """
    digest = blake2b(f"{int(seed):x},{int(position):x},{int(stream):x}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(ids: IdRow | None, weights: FloatRow, u: float) -> int:
    """The token at quantile u of unnormalised weights, candidates in ascending order of id.

    That order, unlike one by probability, does not jump when two near-equal logits swap places,
    as they may between batch shapes. A token of weight 0 is never drawn.
    """
    offset = 0
    target = 0.0
    if len(weights) > 4 * _BLOCK:
        starts = np.arange(0, len(weights), _BLOCK)
        ends = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
        target = u * float(ends[-1])
        block = _first_above(ends, target)
        offset = block * _BLOCK
        target -= float(ends[block - 1]) if block else 0.0
        ends = np.cumsum(weights[offset : offset + _BLOCK], dtype=np.float64)
    else:
        ends = np.cumsum(weights, dtype=np.float64)
        target = u * float(ends[-1])
    index = offset + _first_above(ends, target)
    return index if ids is None else int(ids[index])


def _first_above(ends: np.ndarray, target: float) -> int:
    """First index whose cumulative weight exceeds target; by rounding none may: then the last with weight."""
    index = int(np.searchsorted(ends, target, side="right"))
    return index if index < len(ends) else int(np.searchsorted(ends, ends[-1]))


def sample(
    logits: Tensor, rows: Sequence[SamplingRow], best: Best | None = None, at: Sequence[int] | None = None
) -> SampleResult:
    """Choose one token for each of `rows` from logits [count, vocab], of any float dtype, on any device.

    at: the row of the logits that belongs to each of `rows`; None where they lie in the same order.
    best: the largest logit of each row of the logits, where the runner found it on its way.

    Rows that take the most likely token of the raw logits cost one pass over them; each other row
    is worked on by itself. The logits are not changed.
    """
    if at is None:
        assert logits.shape[:-1] == (len(rows),), (tuple(logits.shape), len(rows))
        at = range(len(rows))
    if not rows:
        return SampleResult([], [], [])
    if best is None:
        best = best_of(logits)
    token_ids, finite = [best.token_ids[i] for i in at], [best.finite[i] for i in at]
    slow = [i for i, row in enumerate(rows) if finite[i] and not _is_argmax(row, token_ids[i])]
    raw: dict[int, FloatRow] = {}
    if slow:
        wanted = logits.detach()[[at[i] for i in slow]]
        raw = dict(zip(slow, wanted.float().cpu().numpy(), strict=True))

    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    for i, x in raw.items():
        row = rows[i]
        chosen = _choose(x, row, token_ids[i])
        if chosen is None:
            finite[i] = False
            continue
        token_ids[i] = chosen
        if row.params.logprobs is not None:
            logprobs[i] = token_logprob(x, chosen, row.params.logprobs)
    return SampleResult(token_ids, logprobs, [i for i, ok in enumerate(finite) if not ok])


def best_of(logits: Tensor) -> Best:
    """The largest logit of each row."""
    logits = logits.detach()
    if logits.device.type != "cpu":
        values, indices = logits.max(dim=-1)
        return Best(indices.tolist(), values.isfinite().tolist())
    # numpy's argmax is several times as fast as torch's on a CPU; both name a NaN if there is one.
    host = logits.float().numpy()
    best = host.argmax(axis=1)
    return Best(best.tolist(), np.isfinite(host[np.arange(len(host)), best]).tolist())


def _is_argmax(row: SamplingRow, best: int) -> bool:
    """Whether the row takes `best`, its most likely raw token, and asks for nothing else."""
    params = row.params
    return (
        params.temperature == 0.0
        and params.logprobs is None
        and not changes_logits(params)
        and not (best in row.stop_token_ids and below_min_tokens(row))
    )


def _choose(raw: FloatRow, row: SamplingRow, best: int) -> int | None:
    """The row's next token, or None where no token can be chosen. `best` is the argmax of raw."""
    params = row.params
    x = adjust(raw, row) if changes_logits(params) or below_min_tokens(row) else raw
    if x is not raw:
        best = int(x.argmax())
        if not math.isfinite(x[best]):
            return None
    if params.temperature == 0.0:
        return best
    ids, weights = truncated(x, params)
    return draw(ids, weights, uniform(row.seed, len(row.tokens) - row.num_prompt_tokens))


def token_logprob(raw: FloatRow, token_id: int, top: int) -> TokenLogprob:
    """Log-softmax of raw logits [vocab] at one token, its rank, and the `top` most likely tokens."""
    highest = raw.max()
    weights = raw - highest
    np.exp(weights, out=weights)
    log_sum = float(highest) + math.log(weights.sum(dtype=np.float64))
    rank = 1 + int(np.count_nonzero(raw > raw[token_id]))
    best = tuple((int(i), float(raw[i]) - log_sum) for i in top_ids(raw, top)) if top else ()
    return TokenLogprob(token_id, float(raw[token_id]) - log_sum, rank, best)


def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probability of token_ids[i] under logits[i], for logits [len(token_ids), vocab].

    logits[i] are those of the position before the token. Rows that are not finite give NaN.
    """
    assert logits.shape[:-1] == (len(token_ids),), (tuple(logits.shape), len(token_ids))
    result = []
    for start in range(0, len(token_ids), _PROMPT_CHUNK):
        chunk = logits[start : start + _PROMPT_CHUNK].detach().float().cpu().numpy()
        result += [
            token_logprob(x, token_id, top)
            for x, token_id in zip(chunk, token_ids[start : start + _PROMPT_CHUNK], strict=True)
        ]
    return result
