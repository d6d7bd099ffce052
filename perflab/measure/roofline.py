"""The least time a step can take: bytes that must be read, operations that must be done, two ceilings.

Owns the formulas of the roofline model (Williams, Waterman & Patterson 2009) for decoder-only
transformers of Llama's shape. Runs no model, engine or clock: sizes, rates and seconds come as numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

BYTES: Mapping[str, float] = MappingProxyType(
    {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int8-dynamic": 1.0, "int4": 0.5625}
)
"""Bytes of one weight; int4 counts the 16-bit scale of each 32."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model of Llama's shape: attention with `kv_heads` of `heads`, a gated MLP, one head."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, config: Any) -> Sizes:
        """From a model's configuration, by the names that transformers gives."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
        )

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices: query, key, value, output; gate, up, down."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (attention + 3 * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    def weight_bytes(self, format: str) -> float:
        """Bytes that a step reads of matrices, once: layers and head. The head of int4 has 8 bits."""
        head = "int8" if format == "int4" else format
        return self.layer_weights * BYTES[format] + self.head_weights * BYTES[head]

    def kv_bytes(self, format: str) -> float:
        """Bytes of keys and values that one token keeps; int8 has an fp32 scale per position and head."""
        scale = 4 if format == "int8" else 0
        return 2 * self.layers * self.kv_heads * (self.head_dim * BYTES[format] + scale)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step cannot do without: bytes read from memory, arithmetic operations (a product and its
    sum are two)."""

    bytes: float
    operations: float

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes


def decode(sizes: Sizes, rows: int, context: float, weights: str, kv: str) -> Work:
    """One token for each of `rows` requests that hold `context` tokens each. `weights`, `kv`: formats.

    bytes = weights + rows · context · KV bytes per token;
    operations = rows · (2 · weights + 4 · layers · heads · head_dim · context).
    """
    pairs = 4 * sizes.layers * sizes.heads * sizes.head_dim * context
    linear = 2 * (sizes.layer_weights + sizes.head_weights)
    return Work(sizes.weight_bytes(weights) + rows * context * sizes.kv_bytes(kv), rows * (linear + pairs))


def prefill(sizes: Sizes, tokens: int, weights: str, kv: str) -> Work:
    """A prompt of `tokens` in one step; the head only for its last token.

    bytes = weights + tokens · KV bytes per token;
    operations = 2 · (tokens · layer weights + head weights)
        + 4 · layers · heads · head_dim · tokens · (tokens + 1) / 2.
    """
    pairs = 2 * sizes.layers * sizes.heads * sizes.head_dim * tokens * (tokens + 1)
    linear = 2 * (tokens * sizes.layer_weights + sizes.head_weights)
    return Work(sizes.weight_bytes(weights) + tokens * sizes.kv_bytes(kv), linear + pairs)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine gives at best, measured: bytes read and operations done per second.

    Raises ValueError for a rate that is not above 0.
    """

    bytes_per_s: float
    operations_per_s: float

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.operations_per_s > 0):
            raise ValueError(f"{self}: a ceiling is above 0; measure it again")

    @property
    def ridge(self) -> float:
        """Intensity (operations per byte) from which on arithmetic binds and no longer memory."""
        return self.operations_per_s / self.bytes_per_s

    def attainable(self, intensity: float) -> float:
        """The roof: operations per second = min(arithmetic ceiling, intensity · read bandwidth)."""
        return min(self.operations_per_s, intensity * self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Floor:
    """The least seconds of a step, and which ceiling they come from."""

    seconds: float
    binds: Literal["memory", "arithmetic"]

    def share(self, seconds: float) -> float:
        """Floor / measured: 1 at the ceiling, above 1 only where a ceiling was measured too low."""
        return self.seconds / seconds


def floor(work: Work, ceilings: Ceilings) -> Floor:
    """max(bytes / bandwidth, operations / rate): reading and computing overlap perfectly."""
    read, compute = work.bytes / ceilings.bytes_per_s, work.operations / ceilings.operations_per_s
    return Floor(max(read, compute), "memory" if read >= compute else "arithmetic")
