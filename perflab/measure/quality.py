"""How far a variant's outputs are from the reference's, on arrays of logits and tokens.

Owns the formulas of quality. Never runs a model: `studies.quality` gets the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perflab.measure import stats

FORMULAS: dict[str, str] = {
    "KL divergence": "Σ p·(ln p − ln q) over the vocabulary, p the fp32 reference's next-token distribution, "
    "q the variant's, at each position of given texts; nats, mean over positions.",
    "top-1 agreement": "share of positions where both have the same most likely token.",
    "top-5 agreement": "share of the reference's five most likely tokens that are among the variant's five; "
    "mean over positions.",
    "greedy match": "generated tokens before the first that differs from the fp32 reference's greedy "
    "output of the prompt alone; as a share of the shorter output.",
    "perplexity": "exp(mean of −ln q(next token)) over given texts.",
}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log-probabilities along the last axis, float64."""
    wide = np.asarray(logits, dtype=np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(reference: np.ndarray, variant: np.ndarray) -> np.ndarray:
    """KL(reference ‖ variant) per position in nats, from logits [positions, vocab] → [positions].

    Σ p (ln p − ln q), Kullback & Leibler 1951. Raises ValueError for differing shapes.
    """
    if reference.shape != variant.shape:
        raise ValueError(f"logits differ in shape: {reference.shape} and {variant.shape}")
    log_p, log_q = log_softmax(reference), log_softmax(variant)
    return np.maximum(0.0, (np.exp(log_p) * (log_p - log_q)).sum(axis=-1))


def top1_agreement(reference: np.ndarray, variant: np.ndarray) -> np.ndarray:
    """Whether both have the same most likely token, per position: bool [positions]."""
    return np.asarray(reference).argmax(axis=-1) == np.asarray(variant).argmax(axis=-1)


def top_agreement(reference: np.ndarray, variant: np.ndarray, k: int = 5) -> np.ndarray:
    """|top-k of the reference ∩ top-k of the variant| / k, per position: [positions] from [positions, vocab].

    Raises ValueError for differing shapes or a k that the vocabulary does not hold.
    """
    if reference.shape != variant.shape:
        raise ValueError(f"logits differ in shape: {reference.shape} and {variant.shape}")
    if not 1 <= k <= reference.shape[-1]:
        raise ValueError(f"k={k}: must be from 1 to the vocabulary's size, {reference.shape[-1]}")
    a, b = (np.argpartition(-x, k - 1, axis=-1)[:, :k] for x in (reference, variant))
    return (a[:, :, None] == b[:, None, :]).any(axis=2).mean(axis=1)


def token_nll(logits: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    """−ln q(token i + 1) at position i, nats: [positions − 1] from logits [positions, vocab]."""
    log_q = log_softmax(logits)[:-1]
    return -log_q[np.arange(len(log_q)), np.asarray(token_ids[1 : len(log_q) + 1])]


def greedy_match(reference: Sequence[int], variant: Sequence[int]) -> int:
    """Number of leading tokens that agree."""
    same = 0
    for a, b in zip(reference, variant, strict=False):
        if a != b:
            break
        same += 1
    return same


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Distance of one variant from the reference over several texts, each with an interval over texts.

    kl_nats, top1, top5: means over positions. perplexity and reference_perplexity: of the same texts.
    """

    kl_nats: stats.Estimate
    top1: stats.Estimate
    top5: stats.Estimate
    perplexity: stats.Estimate
    reference_perplexity: float
    positions: int


def fidelity(
    references: Sequence[np.ndarray], variants: Sequence[np.ndarray], texts: Sequence[Sequence[int]]
) -> Fidelity:
    """Compare logits [len(text), vocab] of each text. Raises ValueError for no text or differing shapes."""
    if not texts:
        raise ValueError("quality needs at least one text")
    kl = [kl_divergence(a, b) for a, b in zip(references, variants, strict=True)]
    top1 = [top1_agreement(a, b).astype(float) for a, b in zip(references, variants, strict=True)]
    top5 = [top_agreement(a, b) for a, b in zip(references, variants, strict=True)]
    nll = [token_nll(b, text) for b, text in zip(variants, texts, strict=True)]
    own = np.concatenate([token_nll(a, text) for a, text in zip(references, texts, strict=True)])
    as_lists = [[group.tolist() for group in groups] for groups in (kl, top1, top5, nll)]
    return Fidelity(
        kl_nats=stats.bootstrap(as_lists[0], np.mean),
        top1=stats.bootstrap(as_lists[1], np.mean),
        top5=stats.bootstrap(as_lists[2], np.mean),
        perplexity=stats.bootstrap(as_lists[3], lambda x: float(np.exp(x.mean()))),
        reference_perplexity=float(np.exp(own.mean())),
        positions=sum(len(group) for group in kl),
    )
