"""What a weight scheme or a drafter should give on a device: bytes, operations, conversions, launches.

Owns the formulas, the table of accelerators (peaks of their makers' data sheets, dense) and of what each
scheme does beside its product. Runs nothing: rates, sizes and acceptance come as numbers. A prediction is a
floor unless an efficiency below 1 is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType
from typing import Literal

from perflab.errors import ConfigError
from perflab.measure.paired import compare_pairs
from perflab.measure.roofline import Sizes

Binds = Literal["memory", "arithmetic", "conversion", "launches"]

TILE = 128  # tokens that one pass over a converted weight serves in the usual GPU kernels (assumed)
CONVERT_OPS = 2  # arithmetic operations that make a 16-bit number of a stored one (assumed)
USABLE = 0.9  # share of the device's memory for weights and keys and values
TIE = 1.01  # predictions closer than this are no order
MOST_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Device:
    """bytes_per_s and rates (operations/s by number format) at best; `kernels` are rates measured by scheme,
    conversion within them. vector_per_s: what conversions run at. launch_s: of one more small kernel."""

    name: str
    source: str
    memory_bytes: float
    bytes_per_s: float
    rates: Mapping[str, float]
    vector_per_s: float
    launch_s: float = 5e-6
    kernels: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = (self.memory_bytes, self.bytes_per_s, self.vector_per_s, *self.rates.values())
        if not (self.rates and all(0 < x < math.inf for x in numbers)):
            raise ConfigError(f"{self.name}: rates and sizes are above 0; measure them again")

    @property
    def plain(self) -> str:
        """The 16-bit format it multiplies in, else fp32."""
        return next(name for name in ("bf16", "fp16", "fp32") if name in self.rates)


def _gpu(name: str, gb: float, gbs: float, half: float, int8: float, fp8: float, fp32: float) -> Device:
    """Memory in GB, bandwidth in GB/s, rates in 10¹² operations/s, 0 for none."""
    given = {"fp16": half, "bf16": half, "int8": int8, "fp8": fp8, "fp32": fp32}
    if name in ("t4", "v100"):
        del given["bf16"]
    rates = {format: 1e12 * rate for format, rate in given.items() if rate}
    return Device(name, "peak of its data sheet, dense", gb * 1e9, gbs * 1e9, rates, fp32 * 1e12)


ACCELERATORS: Mapping[str, Device] = MappingProxyType(
    {
        d.name: d
        for d in (
            _gpu("h200", 141, 4800, 989, 1979, 1979, 67),
            _gpu("h100", 80, 3350, 989, 1979, 1979, 67),
            _gpu("a100", 80, 2039, 312, 624, 0, 19.5),
            _gpu("a100-40gb", 40, 1555, 312, 624, 0, 19.5),
            _gpu("l40s", 48, 864, 362, 733, 733, 91.6),
            _gpu("l4", 24, 300, 121, 242, 242, 30.3),
            _gpu("a10", 24, 600, 125, 250, 0, 31.2),
            _gpu("t4", 16, 320, 65, 130, 0, 8.1),
            _gpu("v100", 32, 900, 125, 0, 0, 15.7),
        )
    }
)
"""NVIDIA's data sheets, SXM where there is one. V100 has no 8-bit matrix unit, T4 and V100 no bf16."""

NAMED_SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "1b": Sizes(16, 2048, 32, 8, 64, 8192, 128_256),
        "7b": Sizes(32, 4096, 32, 32, 128, 11_008, 32_000),
        "8b": Sizes(32, 4096, 32, 8, 128, 14_336, 128_256),
        "13b": Sizes(40, 5120, 40, 40, 128, 13_824, 32_000),
        "33b": Sizes(60, 6656, 52, 52, 128, 17_920, 32_000),
        "70b": Sizes(80, 8192, 64, 8, 128, 28_672, 32_000),
        "405b": Sizes(126, 16_384, 128, 8, 128, 53_248, 128_256),
    }
)
"""Llama 1, 2 and 3 by the configurations they were published with."""


@dataclass(frozen=True, slots=True)
class Method:
    """A scheme as its kernels work. size: bytes of a layer's weight; head: of the head's, None for 16 bits.
    products: formats to multiply in, the first that the device has. converts: weights become 16-bit numbers
    in the product. restores: from two tokens on they are written out in 16 bits and read again. launches:
    small kernels beside each product. outliers: share of columns multiplied a second time in 16 bits."""

    size: float
    head: float | None
    products: tuple[str, ...] = ()
    converts: bool = False
    restores: bool = False
    launches: int = 0
    outliers: float = 0.0
    quality: str = ""


_OUTLIERS = "outlier columns from about 6.7B on (Dettmers et al. 2022): expect loss, or keep layers back"
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "model": Method(2, 2, quality="the reference"),
        "int8": Method(1, 1, converts=True, quality="near lossless"),
        "int8-dynamic": Method(1, 1, ("int8",), launches=1, quality="near lossless below 6.7B"),
        "int4": Method(0.5625, 1, converts=True, quality="some loss: measure it"),
        "q4_1-native": Method(0.625, 0.625, converts=True, quality="what a Q4_1 file holds, nothing lost"),
        "llm.int8": Method(1, None, ("int8",), launches=5, outliers=0.001, quality="near lossless"),
        "nf4": Method(0.5625, None, converts=True, restores=True, quality="some loss: measure it"),
        "fp4": Method(0.5625, None, converts=True, restores=True, quality="more loss than nf4"),
        "fp8": Method(1, 1, ("fp8",), launches=1, quality="near lossless"),
    }
)
"""By `EngineConfig.weights`. llm.int8: row maxima, quantization, gathering of outliers, their product and the
sum come beside its int8 product; 0.1 % of columns are outliers (Dettmers et al. 2022, arXiv:2208.07339).
nf4 and fp4 are bitsandbytes' blocks of 64 with an fp32 scale, which has a product of its own for one token
alone."""


def quality_hint(scheme: str, sizes: Sizes) -> str:
    weights = sizes.layer_weights + sizes.head_weights
    return _OUTLIERS if scheme == "int8-dynamic" and weights > 6.5e9 else METHODS[scheme].quality


@dataclass(frozen=True, slots=True)
class Workload:
    """`batch` requests together: `context` tokens each are cached before, `input_tokens` are computed,
    `output_tokens` come out. Raises ConfigError naming the value."""

    batch: int = 1
    context: int = 0
    input_tokens: int = 128
    output_tokens: int = 64

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 0), ("input_tokens", 1), ("output_tokens", 2)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name}={value}: give {least} or more")

    @property
    def longest(self) -> int:
        return self.context + self.input_tokens + self.output_tokens

    @property
    def middle(self) -> int:
        """Tokens that a request holds half-way through its answer."""
        return self.context + self.input_tokens + self.output_tokens // 2


@dataclass(frozen=True, slots=True)
class Step:
    """A predicted step: seconds = max(reading, multiplying + converting) + launching."""

    bytes: float
    read_s: float
    multiply_s: float
    convert_s: float
    launch_s: float
    format: str  # of the product

    @property
    def seconds(self) -> float:
        return max(self.read_s, self.multiply_s + self.convert_s) + self.launch_s

    @property
    def binds(self) -> Binds:
        """The largest of what is not hidden behind something longer."""
        parts: dict[Binds, float] = {"launches": self.launch_s}
        if self.read_s >= self.multiply_s + self.convert_s:
            parts["memory"] = self.read_s
        else:
            parts |= {"arithmetic": self.multiply_s, "conversion": self.convert_s}
        return max(parts, key=parts.__getitem__)


def weight_bytes(sizes: Sizes, scheme: str, plain: float = 2) -> float:
    """Bytes of layers and head; `plain` bytes where a weight keeps the model's own dtype."""
    method = METHODS[scheme]
    if scheme == "model":
        return plain * (sizes.layer_weights + sizes.head_weights)
    return sizes.layer_weights * method.size + sizes.head_weights * (method.head or plain)


def why_not(scheme: str, device: Device) -> str:
    """Why the device cannot run a scheme as such, in words; empty where it can."""
    if scheme == "fp8" and "fp8" not in device.rates:
        return f"{device.name} has no fp8 products"
    return ""


def predict(
    sizes: Sizes,
    scheme: str,
    device: Device,
    rows: int,
    new: int,
    before: int,
    kv: str = "bf16",
    sampled: int = 1,
    efficiency: float = 1.0,
) -> Step:
    """A step of `rows` requests with `new` tokens each after `before` cached ones, `sampled` logits each.

    bytes = weights + rows · (before + new) · KV bytes; operations = 2 · rows · (new · layer weights + sampled
    · head weights) for the product, 4 · layers · heads · head_dim · rows · pairs for attention in the plain
    format, pairs = new · before + new · (new + 1) / 2. Conversion: every weight once per `TILE` tokens.
    efficiency: share of the ceilings that kernels reach.
    """
    method, tokens, plain = METHODS[scheme], rows * new, device.plain
    half = 4.0 if plain == "fp32" else 2.0
    format = next((name for name in method.products if name in device.rates), plain)
    own = "plain" if scheme == "model" else scheme
    measured = device.kernels.get(plain if own == "plain" else own)
    rate = measured or device.rates[format]
    linear = 2.0 * rows * (new * sizes.layer_weights + sampled * sizes.head_weights)
    pairs = rows * (new * before + new * (new + 1) / 2)
    attention = 4.0 * sizes.layers * sizes.heads * sizes.head_dim * pairs
    multiply = linear / rate + (method.outliers * linear + attention) / device.rates[plain]
    weights = sizes.layer_weights + sizes.head_weights
    converts = method.converts or (bool(method.products) and format == plain)
    passes = 0 if measured or not converts else 1 if method.restores else math.ceil(tokens / TILE)
    read = weight_bytes(sizes, scheme, half)
    if method.restores and tokens > 1:
        read += 2 * half * sizes.layer_weights
    read += rows * (before + new) * sizes.kv_bytes(kv)
    return Step(
        read,
        read / device.bytes_per_s / efficiency,
        multiply / efficiency,
        passes * CONVERT_OPS * weights / device.vector_per_s / efficiency,
        0.0 if measured else 7 * sizes.layers * method.launches * device.launch_s,
        format,
    )


def memory_bytes(sizes: Sizes, scheme: str, load: Workload, kv: str = "bf16", plain: float = 2) -> float:
    """Weights, with an embedding apart from the head, and the keys and values of the whole batch."""
    embedding = sizes.head_weights * (METHODS[scheme].head or plain)
    stored = weight_bytes(sizes, scheme, plain) + embedding
    return stored + load.batch * load.longest * sizes.kv_bytes(kv)


def fits(sizes: Sizes, scheme: str, device: Device, load: Workload, kv: str = "bf16") -> bool:
    """Whether weights, keys and values take at most `USABLE` of the device's memory."""
    plain = 4.0 if device.plain == "fp32" else 2.0
    return memory_bytes(sizes, scheme, load, kv, plain) <= USABLE * device.memory_bytes


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens of a pass that verifies len(acceptance) guesses, each with the chance that it holds where all
    before it held: 1 + a₁ + a₁a₂ + …; (1 − a^(k+1)) / (1 − a) for k guesses of one chance a (Leviathan et
    al. 2023, eq. 1)."""
    total = chance = 1.0
    for a in acceptance:
        chance *= a
        total += chance
    return total


def speedup(acceptance: Sequence[float], wider: float, draft: float) -> float:
    """expected tokens / (wider + k · draft), both costs in plain steps: Leviathan et al. 2023, theorem 3.8,
    with the measured or predicted cost of the wider step in the place of 1."""
    return expected_tokens(acceptance) / (wider + len(acceptance) * draft)


def best_length(acceptance: Sequence[float], wider: Sequence[float], draft: float) -> tuple[int, float]:
    """(guesses, speed-up) of the length that pays most, (0, 1) where none does. wider[k]: of k guesses."""
    odds = {k: speedup(acceptance[:k], wider[k], draft) for k in range(1, len(acceptance) + 1)}
    best = max(odds, key=odds.__getitem__, default=0)
    return (best, odds[best]) if best and odds[best] > 1 else (0, 1.0)


def turning_batch(sizes: Sizes, scheme: str, device: Device, before: int, kv: str = "bf16") -> int | None:
    """The smallest power of two of requests from which decoding in `scheme` is no faster than in the model's
    own dtype; None where there is none up to `MOST_ROWS`."""
    rows = 1
    while rows <= MOST_ROWS:
        own, plain = (predict(sizes, name, device, rows, 1, before, kv).seconds for name in (scheme, "model"))
        if own >= plain:
            return rows
        rows *= 2
    return None


@dataclass(frozen=True, slots=True)
class Agreement:
    """Pairs of candidates: predicted in the order that was measured, in the other one, not told apart by the
    measurement, or not ordered by the prediction. `best`: what the measurement says of the predicted best."""

    same: int
    other: int
    cannot_tell: int
    no_order: int
    best: str


def agreement(predicted: Mapping[str, float], measured: Mapping[str, Sequence[float]]) -> Agreement:
    """Seconds by candidate, predicted, and measured in rounds; each pair of candidates is judged by
    `compare_pairs` at 95 % on its own, so that of 20 equal pairs one is told apart by chance."""
    counts = dict.fromkeys(("same", "other", "cannot tell", "no order"), 0)
    order = sorted(measured, key=predicted.__getitem__)
    beaten: list[str] = []
    open_: list[str] = []
    for first, second in combinations(order, 2):
        answer = compare_pairs(measured[second], measured[first], higher_is_better=False).answer
        if first == order[0] and answer != "faster":
            (beaten if answer == "slower" else open_).append(second)
        if predicted[second] < TIE * predicted[first]:
            counts["no order"] += 1
        else:
            counts[{"faster": "same", "slower": "other"}.get(answer, answer)] += 1
    best = f"{order[0]} was measured fastest, as predicted"
    if beaten:
        best = f"{order[0]} was predicted fastest, but {', '.join(beaten)} measured faster"
    elif open_:
        best = f"{order[0]} was predicted fastest; cannot tell it from {', '.join(open_)}"
    return Agreement(counts["same"], counts["other"], counts["cannot tell"], counts["no order"], best)
