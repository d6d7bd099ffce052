"""Engine configuration: frozen, checked when made, resolved once against model and memory.

Owns which values are legal together. Knows no torch: sizes come in as numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from perflab.errors import ConfigError

Batching = Literal["static", "dynamic", "continuous"]
Policy = Literal["fcfs", "priority", "sjf", "edf"]
Attention = Literal["eager", "sdpa", "batched", "native"]
RunnerKind = Literal["auto", "native", "torch"]
Weights = Literal["model", "int8", "int8-dynamic", "int4", "llm.int8", "nf4", "fp4", "fp8"]
KVDtype = Literal["model", "int8"]

CHOICES: Mapping[str, Any] = MappingProxyType(
    {
        "batching": Batching,
        "policy": Policy,
        "attention": Attention,
        "runner": RunnerKind,
        "weights": Weights,
        "kv_dtype": KVDtype,
    }
)
DEFAULT_KV_BYTES = 1 << 30
POSITIVE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "num_blocks",
    "kv_bytes",
    "max_draft_tokens",
    "num_threads",
    "keep_records",
)
TORCH_WEIGHTS = ("llm.int8", "nf4", "fp4", "fp8")
DRAFTERS = ("off", "ngram", "head", "head+ngram")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every switch of the engine. Each optimisation can be taken away to see what it gave.

    batching: `static` fills a batch from what waits and lets nobody in until all have left;
        `dynamic` also waits for `max_num_seqs` requests or `batch_timeout_s` since the oldest
        waiting one arrived, whichever comes first; `continuous` lets requests in at every step.
    policy: the order of the queue. `fcfs`; `priority` (lower number first, a request gains one
        level per `ageing_s` of waiting); `sjf` (fewest prompt + max_tokens, ageing likewise);
        `edf` (earliest deadline).
    runner: `native` runs a whole step of a Llama-shaped model in native kernels on a CPU; `torch` runs
        any architecture as transformers wrote it, and is the reference; `auto` takes native where it can.
    weights: `model` keeps the loaded dtype; `int8` (a scale per output column), `int8-dynamic` (each
        token's activations in 8 bits too) and `int4` (groups of 32, the head in 8 bits) need the native
        runner; `llm.int8`, `nf4` and `fp4` (bitsandbytes) run on torch.
    keep: rules of the matrices that bitsandbytes leaves in the loaded dtype, with commas between: `head`,
        `first`, `last`, `down`, `layers.3`, `layers.3.down`.
    kv_dtype: keys and values in the model's dtype, or in 8 bits with a scale per token and head, which
        needs the native runner or native attention.
    attention: of the torch runner. `eager` and `sdpa` work one request at a time and are the
        reference; `batched` takes all rows of a step together; `native` reads the KV pool in place.
    packed_linears: of the torch runner: weights reordered for oneDNN.
    drafter: who guesses the next tokens, which one step then verifies together: `ngram` looks them up in
        the request's own text, `head` is a small trained head on the model, `head+ngram` both,
        `model:NAME` a smaller model with the same tokenizer. What comes out is the same without one.
    max_draft_tokens: the longest guess. `adaptive_draft` shortens it where that is faster, down to none.
    forced_acceptance: the share of guesses to take whatever the model says. It shows what the engine
        would do with such a drafter; the output is then not the model's.
    num_threads: of native kernels and torch; None takes torch's number.
    max_num_batched_tokens: token budget of a step; a longer prompt is computed in chunks unless
        `chunked_prefill` is off.
    num_blocks: KV pool size in blocks; None sizes it from `kv_bytes`, at most twice what
        `max_num_seqs` requests of full length can hold.
    kv_cache: off recomputes every sequence at every step; there is then no prefix cache and no chunk.
    keep_records: how many request, step and event records an engine holds before the oldest go.

    Raises ConfigError (a ValueError) naming the value and what is allowed.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_bytes: int = DEFAULT_KV_BYTES
    batching: Batching = "continuous"
    batch_timeout_s: float = 0.05
    policy: Policy = "fcfs"
    ageing_s: float = 10.0
    kv_cache: bool = True
    prefix_cache: bool = True
    chunked_prefill: bool = True
    runner: RunnerKind = "auto"
    weights: Weights = "model"
    keep: str = ""
    kv_dtype: KVDtype = "model"
    attention: Attention = "batched"
    packed_linears: bool = True
    drafter: str = "off"
    max_draft_tokens: int = 4
    adaptive_draft: bool = True
    forced_acceptance: float | None = None
    num_threads: int | None = None
    seed: int = 0
    keep_records: int = 100_000

    def __post_init__(self) -> None:
        check_types(self, ConfigError)
        for name, kinds in CHOICES.items():
            value = getattr(self, name)
            if value not in get_args(kinds):
                raise ConfigError(f"{name}={value!r}: choose one of {', '.join(get_args(kinds))}")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be 1 or more")
        on_torch = self.weights in TORCH_WEIGHTS
        if self.runner == "torch" and self.weights != "model" and not on_torch:
            raise ConfigError(f"weights={self.weights!r} needs the native runner: leave runner at 'auto'")
        if self.runner == "native" and on_torch:
            raise ConfigError(f"weights={self.weights!r} runs on torch: leave runner at 'auto'")
        if self.keep and not on_torch:
            raise ConfigError(f"keep={self.keep!r} holds for {', '.join(TORCH_WEIGHTS[:-1])} weights alone")
        if self.kv_dtype != "model" and self.runner == "torch" and self.attention != "native":
            raise ConfigError(
                f"kv_dtype={self.kv_dtype!r} needs native kernels: set attention='native' or runner='auto'"
            )
        if self.drafter not in DRAFTERS and not re.fullmatch("model:.+", self.drafter):
            raise ConfigError(f"drafter={self.drafter!r}: choose one of {', '.join(DRAFTERS)}, model:NAME")
        if self.forced_acceptance is not None and not 0 <= self.forced_acceptance <= 1:
            raise ConfigError(f"forced_acceptance={self.forced_acceptance}: must be a share, from 0 to 1")
        if self.batch_timeout_s < 0 or self.ageing_s <= 0:
            raise ConfigError(
                f"batch_timeout_s={self.batch_timeout_s} must be 0 or more, ageing_s={self.ageing_s} above 0"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: every running request needs one token a step; "
                "raise the first or lower the second"
            )

    def resolve(self, *, model_max_len: int, kv_bytes_per_token: int) -> EngineConfig:
        """The same configuration with `max_model_len` and `num_blocks` filled in.

        Raises ConfigError where the model is shorter than asked or the pool holds no block.
        """
        cached = self.kv_cache
        max_len = self.max_model_len or model_max_len
        if max_len > model_max_len:
            raise ConfigError(f"max_model_len={max_len} is above the model's own limit of {model_max_len}")
        blocks = self.num_blocks
        if blocks is None:
            useful = 2 * self.max_num_seqs * -(-max_len // self.block_size)
            blocks = min(self.kv_bytes // (kv_bytes_per_token * self.block_size), useful)
        if blocks < 1:
            raise ConfigError(
                f"kv_bytes={self.kv_bytes} holds no block of {self.block_size} tokens "
                f"({kv_bytes_per_token} bytes each); raise it"
            )
        return replace(
            self,
            max_model_len=max_len,
            num_blocks=blocks,
            prefix_cache=self.prefix_cache and cached,
            chunked_prefill=self.chunked_prefill and cached,
        )


_WORDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def check_types(instance: Any, error: type[Exception]) -> None:
    """Each plain field of a dataclass (bool, int, float, str, or one of these or None) by its annotation.

    A quoted "false" from a file would otherwise count as true. Raises `error` naming field and value.
    """
    for name, hint in get_type_hints(type(instance)).items():
        kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        if not all(kind in _WORDS or kind is type(None) for kind in kinds):
            continue
        value = getattr(instance, name)
        if not any(_is_a(value, kind) for kind in kinds):
            wanted = " or ".join(_WORDS.get(kind, "nothing") for kind in kinds)
            raise error(f"{name}={value!r}: must be {wanted}")


def _is_a(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
