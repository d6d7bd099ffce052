"""The default study: a ladder from the plainest engine up, one switch a rung.

Owns the rungs and the workload that every rung serves. Measures nothing but whether bf16 is worth
trying where there are no native kernels.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from perflab.errors import ModelError
from perflab.load.workloads import Workload, synthetic
from perflab.measure.metrics import SLO
from perflab.models import kernels
from perflab.models.linears import PackedLinear, can_pack
from perflab.models.load import choose_device
from perflab.speculate.head import head_file
from perflab.studies.define import Study, Variant

BASE: dict[str, Any] = {
    "runner": "torch",
    "kv_cache": False,
    "max_num_seqs": 1,
    "batching": "continuous",
    "chunked_prefill": False,
    "prefix_cache": False,
    "attention": "sdpa",
    "packed_linears": False,
    "max_num_batched_tokens": 2048,
    "num_blocks": 96,
}
"""The lowest rung: every optimisation taken away."""

Rung = tuple[str, dict[str, Any], str, float]
"""Name, switches on top of the rung below, what it does, guessed cost relative to the first."""

RUNGS: tuple[Rung, ...] = (
    ("no cache, batch 1", {}, "every token recomputes its whole sequence, one request at a time", 1.0),
    ("KV cache", {"kv_cache": True}, "keys and values of earlier tokens are kept", 0.4),
    (
        "dynamic batching",
        {"max_num_seqs": 6, "batching": "dynamic", "batch_timeout_s": 0.02},
        "up to six requests together; nobody joins until all have left",
        0.18,
    ),
    (
        "continuous batching",
        {"batching": "continuous"},
        "a request joins as soon as another one leaves",
        0.18,
    ),
    (
        "batched attention",
        {"attention": "batched"},
        "attention of all rows of a step in one call instead of one per request",
        0.17,
    ),
    ("packed weights", {"packed_linears": True}, "weight matrices laid out for this processor", 0.1),
    (
        "chunked prefill",
        {"chunked_prefill": True, "max_num_batched_tokens": 64},
        "at most 64 tokens a step: a long prompt no longer holds up running requests",
        0.12,
    ),
    ("prefix cache", {"prefix_cache": True}, "prompts that start alike share what was computed", 0.1),
)

NATIVE_RUNGS: tuple[Rung, ...] = (
    ("native attention", {"attention": "native"}, "one kernel reads keys and values where they lie", 0.08),
    ("native step", {"runner": "native"}, "all layers in one call, with weights side by side", 0.05),
)
BF16_RUNG: Rung = ("bf16", {"dtype": "bfloat16"}, "weights and activations in 16 bits", 0.04)
SMALL_RUNGS: tuple[Rung, ...] = (
    (
        "int8 weights",
        {"weights": "int8-dynamic"},
        "a scale a column; each token's activations in 8 bits",
        0.03,
    ),
    (
        "int4 weights",
        {"weights": "int4"},
        "a scale for 32 weights of a column; the head stays in 8 bits",
        0.03,
    ),
    ("int8 KV cache", {"kv_dtype": "int8"}, "keys and values in 8 bits, a scale a token and head", 0.03),
)
NGRAM_RUNG: Rung = (
    "n-gram speculation",
    {"drafter": "ngram"},
    "what followed the last tokens earlier in the same text is guessed, where that pays",
    0.03,
)
HEAD_RUNG: Rung = (
    "draft head and n-gram",
    {"drafter": "head+ngram"},
    "a small trained head guesses where the text does not repeat itself",
    0.03,
)
"""Rungs on top of `RUNGS`: the native ones on a CPU that has the kernels, bf16 where it is worth trying, the
head for a model that has one."""

WORTH_TRYING = 0.5
"""bf16 is a rung unless its linear layers run at less than this share of fp32's speed."""


def default_workload(requests: int = 12, output_tokens: tuple[int, ...] = (24, 8, 40, 16, 32)) -> Workload:
    """The ladder's own workload: the same tokens for every rung, machine and day."""
    return synthetic(
        requests=requests,
        input_tokens=64,
        output_tokens=output_tokens,
        shared_tokens=48,
        documents=2,
        unshared_every=4,
        name="ladder",
        description="prompts of 64 tokens cut from plain prose, three of four on one of two shared documents "
        f"of 48 tokens; outputs of {min(output_tokens)} to {max(output_tokens)} tokens; all start at once",
    )


def default_study(
    model: str = "smollm2-135m",
    quick: bool = False,
    *,
    seed: int = 0,
    time_budget_s: float | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
    bf16: bool | None = None,
) -> Study:
    """The optimisation ladder of one model, from no cache to the lot.

    Its rungs end with native kernels, smaller weights and keys, and speculation; where kernels or a draft
    head are missing, a note says why. quick: a first report in under two minutes, with shorter outputs and
    fewer rounds. bf16: whether a rung switches from fp32 to bf16; None leaves it out only where there are
    no native kernels and a short measurement of this machine says that it would be far slower.
    """
    native = choose_device(device).type == "cpu" and kernels.library() is not None
    gain = bf16_gain(device) if bf16 is None and not native else None
    wanted = bf16 if bf16 is not None else native or (gain or 0.0) > WORTH_TRYING
    headless = without_head(model)
    rungs = [*RUNGS, *(NATIVE_RUNGS if native else ()), *([BF16_RUNG] if wanted else ())]
    rungs += [*(SMALL_RUNGS if native else ()), NGRAM_RUNG, *([] if headless else [HEAD_RUNG])]
    variants, switches = [], {**BASE, "dtype": "float32"}
    for name, change, description, cost in rungs:
        switches = {**switches, **change}
        config = {key: value for key, value in switches.items() if key != "dtype"}
        variants.append(Variant(name, config, switches["dtype"], description, cost))
    notes = []
    if not native and choose_device(device).type == "cpu":
        notes.append(f"The ladder ends without native kernels: {kernels.why_missing()}.")
    if headless:
        notes.append(f"The ladder ends without a draft head: {headless}.")
    if gain is not None:
        notes.append(
            f"Linear layers ran {gain:.1f}× as fast in bf16 as in fp32 here"
            + ("." if wanted else ", so the ladder stays in fp32.")
        )
    quick_workload = default_workload(8, (8, 4, 12, 6))
    return Study(
        name="optimisation ladder" + (" (quick)" if quick else ""),
        model=model,
        workload=quick_workload if quick else default_workload(),
        variants=tuple(variants),
        slo=SLO(ttft_s=2.0, tpot_s=0.2),
        repeats=4 if quick else 6,
        min_repeats=3,
        seed=seed,
        time_budget_s=time_budget_s or (80.0 if quick else 360.0),
        quality_texts=5 if quick else 8,
        device=device,
        trust_remote_code=trust_remote_code,
        description="Each rung adds one optimisation to the rung below it.",
        notes=tuple(notes),
    )


def without_head(model: str) -> str:
    """Why a model, by name or folder, has no draft head; empty where it has one."""
    try:
        head_file(Path(model).name)
    except ModelError as error:
        return str(error)
    return ""


def bf16_gain(device: str = "auto", rows: tuple[int, ...] = (1, 6, 64), size: int = 1024) -> float:
    """How many times faster a linear layer is in bf16 than in fp32 here: geometric mean over row counts.

    Layers [size, size], packed where this machine packs; the best of six turns each.
    """
    place = choose_device(device)
    layers = {}
    for dtype in (torch.float32, torch.bfloat16):
        # Several, so that their weights come from memory as a model's do.
        made = [
            torch.nn.Linear(size, size, device=place, dtype=dtype).requires_grad_(False) for _ in range(4)
        ]
        layers[dtype] = [PackedLinear(one) for one in made] if can_pack(made[0]) else made
    gain = 1.0
    for count in rows:
        best = dict.fromkeys(layers, float("inf"))
        for _ in range(6):
            for dtype, stack in layers.items():
                x = torch.ones(count, size, device=place, dtype=dtype)
                start = time.perf_counter()
                for layer in stack:
                    x = layer(x)
                float(x[0, 0])  # waits for a device that works behind our back
                best[dtype] = min(best[dtype], time.perf_counter() - start)
        gain *= best[torch.float32] / best[torch.bfloat16]
    return float(gain ** (1 / len(rows)))
