"""Quality of each numeric configuration beside its speed: runs models, hands arrays to `measure`.

Owns the texts that are scored and the fp32 reference: plain attention, unpacked weights, one
request at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from perflab.config import EngineConfig
from perflab.load.run import RunRecords
from perflab.load.workloads import PromptEncoder, Synthetic
from perflab.measure import quality, stats

TEXT_TOKENS = 48
REFERENCE = {
    "runner": "torch",
    "weights": "model",
    "kv_dtype": "model",
    "drafter": "off",
    "forced_acceptance": None,
    "attention": "sdpa",
    "packed_linears": False,
    "max_num_seqs": 1,
    "batching": "continuous",
    "kv_cache": True,
    "prefix_cache": False,
    "chunked_prefill": False,
}
"""Switches of the reference engine, whose dtype is fp32."""


class Scorer(Protocol):
    """Gives next-token logits of a token sequence: `score(ids) → [len, vocab]` fp32."""

    def score(self, token_ids: Sequence[int]) -> Any: ...


def texts(encoder: PromptEncoder, count: int, tokens: int = TEXT_TOKENS) -> list[list[int]]:
    """Token ids of `count` pieces of plain prose, each `tokens` long."""
    return [encoder.ids(Synthetic(tokens, seed=7001 + i)) for i in range(count)]


def logits(scorer: Scorer, ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Logits of each text, float32 [len, vocab]."""
    return [np.asarray(scorer.score(list(text)).float().cpu().numpy(), dtype=np.float32) for text in ids]


def numeric_key(config: EngineConfig, dtype: str) -> str:
    """What decides a configuration's numbers; variants that share it are scored once."""
    parts = [dtype]
    if config.runner != "torch":
        parts += [f"{config.runner} runner", f"{config.weights} weights"]
    if config.runner != "native":  # `auto` may come to torch's
        packed = "packed" if config.packed_linears else "plain"
        parts += [f"{config.attention} attention", f"{packed} weights"]
    return ", ".join(parts if config.kv_dtype == "model" else [*parts, f"{config.kv_dtype} KV"])


def measure_fidelity(
    scorer: Scorer, references: Sequence[np.ndarray], ids: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """KL, top-1 agreement and perplexity of an engine against the reference's logits, as JSON."""
    found = asdict(quality.fidelity(references, logits(scorer, ids), ids))
    return {**found, "texts": len(ids), "text_tokens": len(ids[0])}


def greedy_match(reference: Mapping[str, Sequence[int]], run: RunRecords) -> dict[str, Any] | None:
    """Leading tokens of each completed output that equal the reference's; None where none can be compared."""
    pairs = [
        (reference[r.request_id], run.outputs.get(r.request_id, []))
        for r in run.requests
        if r.outcome == "completed" and r.request_id in reference
    ]
    if not pairs:
        return None
    matched = [quality.greedy_match(a, b) for a, b in pairs]
    compared = [min(len(a), len(b)) for a, b in pairs]
    return {"matched": matched, "compared": compared}


def match_share(matches: Sequence[Mapping[str, Sequence[int]]]) -> stats.Estimate:
    """Matched / compared tokens over the outputs of several runs, interval over outputs."""
    shares = [[m / c for m, c in zip(one["matched"], one["compared"], strict=True) if c] for one in matches]
    by_output = list(map(list, zip(*shares, strict=False)))
    return stats.bootstrap(by_output, np.mean)
