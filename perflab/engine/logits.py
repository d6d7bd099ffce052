"""From a model's raw logits to the distribution that a token is drawn from.

Owns what `SamplingParams` does to one row of logits: bias, penalties, masks, temperature and
truncation. Every function works on one row, so a row's result cannot depend on its batch mates.
Knows nothing of batches, devices, random numbers or which token gets drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perflab.types import SamplingParams

FloatRow = NDArray[np.float32]
IdRow = NDArray[np.int64]

# Beyond these a temperature changes nothing that float32 can show, and -inf / inf would be NaN.
_COLDEST, _HOTTEST = 1e-30, 1e30
# Columns whose maxima bound the k-th largest logit from below; more make the bound tighter.
_COLUMNS = 1024
# Weights that agree in sign, exponent and the leading four bits of the fraction share a band.
_BAND_BITS = 19


class SamplingRow(Protocol):
    """What sampling reads of a sequence; nothing is written."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...  # prompt, then output so far
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...  # the model's and the request's own


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError for a logit bias that a model of `vocab_size` logits cannot honour."""
    for token_id, bias in params.logit_bias.items():
        if not isinstance(token_id, (int, np.integer)) or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"logit_bias names token id {token_id!r}: the vocabulary has {vocab_size} tokens, "
                f"so ids are integers from 0 to {vocab_size - 1}"
            )
        if math.isnan(bias) or bias == math.inf:
            raise ValueError(
                f"logit_bias[{token_id}]={bias!r}: must be a finite number, or -inf to ban the token"
            )


def below_min_tokens(row: SamplingRow) -> bool:
    """Whether the next token may not yet be an end token."""
    return len(row.tokens) - row.num_prompt_tokens < row.params.min_tokens


def changes_logits(params: SamplingParams) -> bool:
    """Whether bias or penalties (not the `min_tokens` mask) can change this row's logits."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(params.logit_bias)
    )


def adjust(raw: FloatRow, row: SamplingRow) -> FloatRow:
    """Logit bias, penalties and the `min_tokens` mask, in the documented order; `raw` is left alone.

    A repetition penalty r divides a positive logit of a seen token by r and multiplies a negative
    one (Keskar et al. 2019); presence and frequency subtract `presence + frequency * count`.
    """
    params = row.params
    x = raw.copy()
    if params.logit_bias:
        x[list(params.logit_bias.keys())] += np.array(list(params.logit_bias.values()), dtype=np.float32)
    if params.repetition_penalty != 1.0:
        seen = list(set(row.tokens))
        old = x[seen]
        r = params.repetition_penalty
        x[seen] = np.where(old > 0, old / r, old * r)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        output = np.asarray(row.tokens[row.num_prompt_tokens :], dtype=np.int64)
        used, counts = np.unique(output, return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        x[used] -= penalty.astype(np.float32)
    if below_min_tokens(row):
        x[[token_id for token_id in row.stop_token_ids if 0 <= token_id < len(x)]] = -np.inf
    return x


def truncated(x: FloatRow, params: SamplingParams) -> tuple[IdRow | None, FloatRow]:
    """The candidates that temperature, top-k, top-p and min-p leave, with unnormalised probabilities.

    x [vocab] holds adjusted logits, its maximum finite; `params.temperature` is above 0. Returns
    (ids, weights), ids ascending or None for the whole vocabulary, and the largest weight 1.

    top-k keeps exactly k tokens. top-p then keeps the smallest set whose cumulative probability
    (among those) reaches p, and min-p those of at least `min_p` times the largest probability.
    Among equal logits the lower id is kept first.
    """
    highest = x.max()
    ids: IdRow | None = None
    if 0 < params.top_k < len(x):
        ids = np.sort(top_ids(x, params.top_k))
        x = x[ids]
    temperature = np.float32(min(max(params.temperature, _COLDEST), _HOTTEST))
    weights = x - highest
    with np.errstate(over="ignore"):
        weights /= temperature
    np.exp(weights, out=weights)
    keep: IdRow | None = None
    if params.top_p < 1.0:
        keep = _nucleus(weights, params.top_p)
    if params.min_p > 0.0:
        likely = weights if keep is None else weights[keep]
        enough = np.flatnonzero(likely >= np.float32(params.min_p))
        keep = enough if keep is None else keep[enough]
    if keep is None:
        return ids, weights
    return (keep if ids is None else ids[keep]), weights[keep]


def _nucleus(weights: FloatRow, p: float) -> IdRow:
    """Ascending indices of the smallest set that holds at least the share p of all weight.

    Tokens lighter than (1 - p) * total / count weigh less than (1 - p) * total even all together,
    so the set lies among the others. Their weights are summed in narrow bands, and only the band
    in which p is reached is sorted.
    """
    total = weights.sum(dtype=np.float64)
    heavy = np.flatnonzero(weights >= (1.0 - p) * total / len(weights))
    weights = weights[heavy]
    bands = weights.view(np.int32) >> _BAND_BITS  # the bits of positive floats are in the floats' order
    bands = bands.max() - bands
    mass = np.cumsum(np.bincount(bands, weights=weights))
    last = min(int(np.searchsorted(mass, p * total)), len(mass) - 1)
    in_last = np.flatnonzero(bands == last)
    order = in_last[np.argsort(-weights[in_last], kind="stable")]
    reached = np.cumsum(weights[order], dtype=np.float64) + (mass[last - 1] if last else 0.0)
    keep = bands < last
    keep[order[: np.searchsorted(reached, p * total) + 1]] = True
    return heavy[keep]


def top_ids(x: FloatRow, k: int) -> IdRow:
    """Ids of the k largest of x, best first; among equals the lower id comes first."""
    k = min(k, len(x))
    whole = len(x) - len(x) % _COLUMNS
    if k <= _COLUMNS // 2 and whole > _COLUMNS:
        # k columns have a maximum of at least the k-th largest maximum, so k values reach it.
        maxima = x[:whole].reshape(-1, _COLUMNS).max(axis=0)
        bound = np.partition(maxima, _COLUMNS - k)[_COLUMNS - k]
    else:
        bound = np.partition(x, len(x) - k)[len(x) - k]
    ids = np.flatnonzero(x >= bound)
    return ids[np.argsort(-x[ids], kind="stable")[:k]]
