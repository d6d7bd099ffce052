"""The native kernels against fp64 over random shapes, for every instruction set of this machine.

Products and attention are compared with what their formats define (rounded or quantized inputs), where
only the rounding of fp32 sums is left, and apart from that with the exact result, where the format's
own error shows.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perflab.engine.batch import Batch
from perflab.engine.kv_tensors import KVTensors
from perflab.engine.native import NativeAttention, pool_of
from perflab.errors import ConfigError, NotNative
from perflab.models import kernels
from perflab.models.kernels import ADD, FORMATS, PANEL, SILU_MUL, STORE, Matrix, Team, address, multiply
from perflab.models.native import NativeRunner, StepRows
from perflab.models.packing import pack_matrix
from perflab.models.runner import KVShape
from perflab.models.tiny import tiny

LIBRARY = kernels.library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=kernels.why_missing())
ISAS = [
    name
    for name in ("plain", "avx2", "avx512", "avx512_bf16")
    if LIBRARY is not None and LIBRARY.pl_isa(name.encode()) is not None
]

FP32 = 2.0**-24  # one rounding to nearest
BF16 = 2.0**-8
# Relative error of a product of normal inputs and weights, root mean square, from the formats alone.
# bf16 rounds both factors by up to 2^-8. In 8 bits a row of some hundred normal values reaches 3.5
# deviations, so a step is 3.5/127 and its error a step over sqrt(12), for both factors. In 4 bits 32
# values reach 2.1 deviations, a step is 2.1/8, and weights opposite to the largest are cut off at 7/8.
FORMAT_ERROR = {"fp32": 2e-6, "bf16": 4e-3, "int8-dynamic": 1.6e-2, "int8": 1.2e-2, "int4": 0.13}
# Of attention, relative to the weighted sum of magnitudes. fp32: the rounding of scores, which e^x turns
# into relative errors. With 16-bit and 8-bit values each weight is rounded to bf16 once.
ATTENTION_ERROR = {"fp32": 2e-5, "bf16": 1.02 * BF16, "int8": 1.02 * BF16}
# Logits of a two-layer model, relative to their root mean square, against fp64 modules.
MODEL_ERROR = {"fp32": 2e-5, "bf16": 5e-2, "int8-dynamic": 0.15, "int8": 0.1, "int4": 0.8}


@cache
def team(isa: str, threads: int = 2) -> Team:
    return Team(threads, isa=isa)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 rounded to the nearest bf16, ties to even, as fp32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def widen(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << 16).view(np.float32)


# -- packing ----------------------------------------------------------------------------------


@dataclass
class Packed:
    """A packed matrix with what its format makes of the weights: integers times fp32 scales."""

    format: str
    weight: np.ndarray
    bias: np.ndarray | None

    def __post_init__(self) -> None:
        self.n, self.k = self.weight.shape
        self.data, self.scale = pack_matrix(self.format, self.weight)
        padded = None if self.bias is None else np.pad(self.bias, (0, -self.n % PANEL))
        self._bias = padded
        self.matrix = Matrix(
            FORMATS[self.format], self.n, self.k, address(self.data), address(self.scale), address(padded)
        )

    def unpacked(self) -> np.ndarray:
        out = np.empty((self.n, self.k), np.float32)
        for row in range(self.n):
            LIBRARY.pl_unpack_row(ctypes.byref(self.matrix), row, address(out[row]))
        return out

    def quantized(self) -> tuple[np.ndarray, np.ndarray]:
        """Integers [n, groups, size] and scales [n, groups] by the definition of int8 and int4."""
        w = self.weight
        if self.format in ("int8", "int8-dynamic"):
            scale = (np.abs(w).max(1, initial=0) / np.float32(127)).astype(np.float32)
            q = np.rint(np.divide(w, scale[:, None], out=np.zeros_like(w), where=scale[:, None] > 0))
            return np.clip(q, -127, 127)[:, None], scale[:, None]
        w = np.pad(w, ((0, 0), (0, -self.k % 32))).reshape(self.n, -1, 32)
        largest = np.take_along_axis(w, np.abs(w).argmax(-1)[..., None], -1)
        scale = to_bf16(largest / np.float32(-8))
        q = np.rint(np.divide(w, scale, out=np.zeros_like(w), where=scale != 0))
        return np.clip(q, -8, 7), scale[..., 0]

    def defined(self) -> np.ndarray:
        """The weights that the format stands for, fp32 [n, k]."""
        if self.format == "fp32":
            return self.weight
        if self.format == "bf16":
            return to_bf16(self.weight)
        q, scale = self.quantized()
        return (q * scale[..., None]).astype(np.float32).reshape(self.n, -1)[:, : self.k]


def weights(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Normal, with columns of very different size, some zeros and a row of nothing else."""
    w = rng.normal(size=(n, k)) * np.exp(rng.normal(size=(n, 1)))
    w[rng.random((n, k)) < 0.1] = 0
    if n > 2:
        w[rng.integers(n)] = 0
    return w.astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 70), st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_packing_keeps_what_the_format_stands_for(format: str, n: int, k: int, seed: int) -> None:
    packed = Packed(format, weights(np.random.default_rng(seed), n, k), None)
    unpacked = packed.unpacked()
    np.testing.assert_array_equal(unpacked, packed.defined())
    error = np.abs(unpacked - packed.weight)
    if format in ("fp32", "bf16"):
        assert (error <= {"fp32": 0, "bf16": BF16}[format] * np.abs(packed.weight)).all()
    else:
        step = np.abs(packed.quantized()[1])
        step = np.repeat(step, 32, 1)[:, :k] if format == "int4" else step
        assert (error <= step * {"int8": 0.501, "int8-dynamic": 0.501, "int4": 1.04}[format]).all()


@pytest.mark.parametrize("format", ["int8", "int8-dynamic", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_not_hidden(format: str, value: float) -> None:
    weight = np.ones((3, 40), np.float32)
    weight[1, 35] = value
    unpacked = Packed(format, weight, None).unpacked()
    assert not np.isfinite(unpacked[1, 32:]).any()
    np.testing.assert_array_equal(unpacked[[0, 2]], Packed(format, weight[[0, 2]], None).unpacked())


# -- products ---------------------------------------------------------------------------------


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers and scales of rows in 8 bits by definition, and where a rounding could go either way
    (a fused multiply-add rounds once, a product and a sum twice)."""
    most = np.abs(x).max(1, initial=0, keepdims=True).astype(np.float32)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    exact = x.astype(np.float64) * inverse
    q = np.trunc(exact + np.where(exact < 0, -0.5, 0.5))
    return q, most / np.float32(127), np.abs(np.abs(exact) % 1 - 0.5) < 1e-4


def product(packed: Packed, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x times the matrix as its format defines it, in fp64, and how far fp32 sums may be from that."""
    k, format = packed.k, packed.format
    if format in ("fp32", "bf16", "int8"):
        rounded = (to_bf16(x) if format == "bf16" else x).astype(np.float64)
        w = packed.defined().astype(np.float64)
        exact, error = rounded @ w.T, (k + 2) * FP32 * (np.abs(rounded) @ np.abs(w).T)
    else:
        q, scale, doubtful = quantize(x)
        integers, steps = packed.quantized()
        groups, size = integers.shape[1:]
        q, doubtful = (np.pad(a, ((0, 0), (0, groups * size - k))) for a in (q, doubtful))
        dots = np.einsum("rgi,ngi->rng", q.reshape(-1, groups, size), integers)
        parts = dots * steps.astype(np.float64) * scale[..., None]
        flips = doubtful @ np.abs(integers * steps[..., None]).reshape(packed.n, -1).T * scale
        exact, error = parts.sum(-1), (groups + 3) * FP32 * np.abs(parts).sum(-1) + flips
    if packed.bias is not None:
        exact, error = exact + packed.bias, error + FP32 * (np.abs(exact) + np.abs(packed.bias))
    return exact, error + 1e-37  # below that, fp32 has fewer digits


def silu_mul(exact: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[rows, 2 · columns] of gate, then up. The slope of silu stays within 1.1."""
    (gate, up), (gate_error, up_error) = np.split(exact, 2, 1), np.split(error, 2, 1)
    with np.errstate(over="ignore"):
        silu = gate / (1 + np.exp(-gate))
    spread = 1.1 * gate_error * (np.abs(up) + up_error) + np.abs(silu) * up_error
    return silu * up, spread + 16 * FP32 * np.abs(silu * up)


def alternate(pair: np.ndarray) -> np.ndarray:
    """[2, columns, ...] as rows by turns of 16, padded with zeros."""
    padded = np.pad(pair, ((0, 0), (0, -pair.shape[1] % 16), *[(0, 0)] * (pair.ndim - 2)))
    turns = padded.reshape(2, -1, 16, *pair.shape[2:]).swapaxes(0, 1)
    return np.ascontiguousarray(turns.reshape(-1, *pair.shape[2:]))


@dataclass(frozen=True)
class Case:
    format: str
    rows: int
    n: int
    k: int
    bias: bool
    finish: int
    bf16_out: bool
    threads: int
    seed: int


CASES = st.builds(
    Case,
    format=st.sampled_from(sorted(FORMATS)),
    rows=st.one_of(st.integers(0, 40), st.sampled_from((113, 230))),
    n=st.integers(1, 100),
    k=st.one_of(st.integers(1, 300), st.sampled_from((32, 64, 128, 129, 192, 255))),
    bias=st.booleans(),
    finish=st.sampled_from((STORE, ADD, SILU_MUL)),
    bf16_out=st.booleans(),
    threads=st.sampled_from((1, 2, 3)),
    seed=st.integers(0, 2**32 - 1),
)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=150, deadline=None)
@given(case=CASES)
def test_products_are_those_of_their_format(isa: str, case: Case) -> None:
    rng = np.random.default_rng(case.seed)
    x = (rng.normal(size=(case.rows, case.k)) * np.exp(rng.normal(size=(case.rows, 1)))).astype(np.float32)
    fused = case.finish == SILU_MUL
    rows = 2 * case.n if fused else case.n
    weight = weights(rng, rows, case.k)
    bias = rng.normal(size=rows).astype(np.float32) if case.bias else None
    exact, error = product(Packed(case.format, weight, bias), x)
    if fused:
        exact, error = silu_mul(exact, error)
        weight = alternate(weight.reshape(2, case.n, case.k))
        bias = None if bias is None else alternate(bias.reshape(2, case.n))
    packed = Packed(case.format, weight, bias)
    packed.matrix.n = rows  # of a fused pair without the padding of its turns

    halves = case.bf16_out and case.finish != ADD
    guard = 4321 if halves else np.float32(4321)
    out = np.full((case.rows + 1, case.n + 3), guard, np.uint16 if halves else np.float32)
    if case.finish == ADD:
        out[:-1, :-3] = before = rng.normal(size=(case.rows, case.n)).astype(np.float32)
        exact, error = exact + before, error + FP32 * (np.abs(exact) + np.abs(before))
    multiply(team(isa, case.threads), packed.matrix, x, out[: case.rows], case.finish)
    assert (out[-1] == guard).all(), "rows beyond the last stay"
    assert (out[:, -3:] == guard).all(), "columns beyond the last stay"
    got = widen(out[:-1, :-3]) if halves else out[:-1, :-3]
    if halves:
        error = error * (1 + BF16) + BF16 * np.abs(exact)
    assert (np.abs(got - exact) <= error).all(), (np.abs(got - exact) / error).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMAT_ERROR)
def test_the_error_that_a_format_brings(isa: str, format: str) -> None:
    rng = np.random.default_rng(1)
    x, w = (rng.normal(size=(rows, 576)).astype(np.float32) for rows in (24, 200))
    packed = Packed(format, w, None)
    out = np.empty((24, 200), np.float32)
    multiply(team(isa), packed.matrix, x, out)
    exact = x.astype(np.float64) @ w.T
    error = np.sqrt(((out - exact) ** 2).mean() / (exact**2).mean())
    assert FORMAT_ERROR[format] / 10 < error < FORMAT_ERROR[format]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(isa: str, format: str, value: float) -> None:
    rng = np.random.default_rng(2)
    packed = Packed(format, rng.normal(size=(40, 50)).astype(np.float32), None)
    for rows in (3, 20):
        x = rng.normal(size=(rows, 50)).astype(np.float32)
        clean, dirty = np.empty((2, rows, 40), np.float32)
        multiply(team(isa), packed.matrix, x, clean)
        x[1, 17] = value
        multiply(team(isa), packed.matrix, x, dirty)
        assert not np.isfinite(dirty[1]).any()
        np.testing.assert_array_equal(np.delete(dirty, 1, 0), np.delete(clean, 1, 0))


# -- attention --------------------------------------------------------------------------------


class Row(NamedTuple):
    queries: int
    context: int  # with the queries


@dataclass(frozen=True)
class Attending:
    rows: tuple[Row, ...]
    format: str
    native_order: bool  # of the values in a block, where sizes allow it
    block_size: int
    kv_heads: int
    shared: int
    key_dim: int
    value_dim: int
    window: int | None
    softcap: float | None
    sinks: bool
    bf16_out: bool
    threads: int
    seed: int


def written(x: np.ndarray, format: str) -> np.ndarray:
    """Keys or values [..., dim] as a pool of that format gives them back to attention."""
    if format == "fp32":
        return x
    if format == "bf16":
        return to_bf16(x)
    q, scale, _ = quantize(x.reshape(-1, x.shape[-1]))
    return to_bf16((q.astype(np.float32) * scale).astype(np.float32)).reshape(x.shape)


def decided(x: np.ndarray) -> np.ndarray:
    """The same without values between two integers of int8, where a last bit decides."""
    q, scale, doubtful = quantize(x.reshape(-1, x.shape[-1]))
    return np.where(doubtful.reshape(x.shape), (q * scale).reshape(x.shape), x).astype(np.float32)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class AttentionRun:
    """Rows with their whole history, a pool in which everything that is not theirs is NaN."""

    def __init__(self, case: Attending) -> None:
        self.case = case
        rng = np.random.default_rng(case.seed)
        normal = lambda *size: rng.normal(size=size).astype(np.float32)  # noqa: E731
        heads = case.kv_heads * case.shared
        self.keys = [decided(normal(case.kv_heads, row.context, case.key_dim)) for row in case.rows]
        self.values = [decided(normal(case.kv_heads, row.context, case.value_dim)) for row in case.rows]
        self.query = [normal(heads, row.queries, case.key_dim) for row in case.rows]
        self.sinks = normal(heads) if case.sinks else None
        self.scaling = case.key_dim**-0.5
        blocks = [-(-row.context // case.block_size) for row in case.rows]
        free = rng.permutation(sum(blocks) + 3).tolist()
        self.tables = [[free.pop() for _ in range(count)] for count in blocks]
        shape = KVShape(2, case.kv_heads, case.key_dim, case.value_dim)
        self.kv = KVTensors(shape, sum(blocks) + 2, case.block_size, DTYPES[case.format], torch.device("cpu"))
        garbage = 77 if case.format == "int8" else float("nan")
        for tensor in (self.kv.key, self.kv.value):
            tensor.fill_(garbage)
        for scales in (self.kv.key_scale, self.kv.value_scale):
            if scales is not None:
                scales.fill_(float("nan"))

    def attend(self, members: Team, past: bool = False) -> np.ndarray:
        """[heads, T, value_dim] of the step of the rows' queries, or of one before it with all their past."""
        case, layer = self.case, 1
        spans = [
            slice(0, row.context - row.queries) if past else slice(row.context - row.queries, row.context)
            for row in case.rows
        ]
        counts = [span.stop - span.start for span in spans]
        starts = list(itertools.accumulate(counts, initial=0))
        batch = Batch(
            token_ids=np.zeros(starts[-1], np.int64),
            positions=np.concatenate([np.arange(span.start, span.stop) for span in spans]),
            query_start=starts,
            query_len=counts,
            kv_len=[span.stop for span in spans],
            block_tables=self.tables,
            sample_rows=[],
            sample_start=[0] * len(starts),
        )

        def tokens(per_row: list[np.ndarray]) -> torch.Tensor:
            parts = [all_of[:, span] for all_of, span in zip(per_row, spans, strict=True)]
            return torch.from_numpy(np.concatenate(parts, 1))[None]

        query = np.concatenate(self.query, 1)
        if past:
            query = np.zeros((query.shape[0], starts[-1], query.shape[2]), np.float32)
        out = NativeAttention(batch, self.kv, members).attend(
            layer,
            torch.from_numpy(query)[None].to(torch.bfloat16 if case.bf16_out else torch.float32),
            tokens(self.keys),
            tokens(self.values),
            scaling=self.scaling,
            sliding_window=case.window,
            softcap=case.softcap,
            sinks=None if self.sinks is None else torch.from_numpy(self.sinks),
        )
        return out[0].float().transpose(0, 1).numpy()

    def reference(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Per row [heads, queries, value_dim] in fp64, and the sum of weights times magnitudes."""
        case = self.case
        for number, row in enumerate(case.rows):
            query = self.query[number]
            query = to_bf16(query) if case.format != "fp32" or case.bf16_out else query
            key, value = (
                np.repeat(written(side[number], case.format).astype(np.float64), case.shared, 0)
                for side in (self.keys, self.values)
            )
            scores = query.astype(np.float64) @ key.swapaxes(1, 2) * self.scaling
            if case.softcap:
                scores = np.tanh(scores / case.softcap) * case.softcap
            at, past = np.arange(row.context - row.queries, row.context)[:, None], np.arange(row.context)
            hidden = (past > at) | (at - past >= (case.window or row.context + 1))
            scores[:, hidden] = -np.inf
            sink = np.full((len(scores), 1, 1), -np.inf)
            if self.sinks is not None:
                sink[:, 0, 0] = self.sinks
            most = np.maximum(scores.max(-1, keepdims=True), sink)
            weight = np.exp(scores - most)
            weight /= weight.sum(-1, keepdims=True) + np.exp(sink - most)
            yield weight @ value, weight @ np.abs(value)

    def check(self, members: Team) -> np.ndarray:
        self.attend(members, past=True)
        got = self.attend(members)
        start = 0
        for row, (exact, size) in zip(self.case.rows, self.reference(), strict=True):
            part = got[:, start : start + row.queries]
            bound = ATTENTION_ERROR[self.case.format] * size + self.case.bf16_out * BF16 * np.abs(exact)
            assert np.isfinite(part).all(), "what is not the row's has leaked"
            assert (np.abs(part - exact) <= bound).all(), (np.abs(part - exact) / bound).max()
            start += row.queries
        return got


@st.composite
def attending(draw: st.DrawFn) -> Attending:
    def row() -> Row:
        queries = draw(st.sampled_from((1, 1, 1, 4, 17, 90)))
        return Row(queries, queries + draw(st.sampled_from((0, 1, 15, 16, 63, 64, 130))))

    key_dim = draw(st.sampled_from((8, 17, 24, 64, 80, 128, 256)))
    return Attending(
        rows=tuple(row() for _ in range(draw(st.integers(1, 4)))),
        format=draw(st.sampled_from(sorted(DTYPES))),
        native_order=draw(st.booleans()),
        block_size=draw(st.sampled_from((1, 5, 16, 32))),
        kv_heads=draw(st.sampled_from((1, 2, 5))),
        shared=draw(st.sampled_from((1, 3, 8))),
        key_dim=key_dim,
        value_dim=draw(st.sampled_from((key_dim, 40, 48))),
        window=draw(st.sampled_from((None, None, 1, 7, 70))),
        softcap=draw(st.sampled_from((None, 2.0))),
        sinks=draw(st.booleans()),
        bf16_out=draw(st.booleans()),
        threads=draw(st.sampled_from((1, 2, 3))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=80, deadline=None)
@given(case=attending())
def test_attention_over_block_tables(isa: str, case: Attending) -> None:
    AttentionRun(case).check(team(isa, case.threads))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize(("window", "native_order"), [(None, True), (300, True), (None, False)])
def test_long_contexts_are_split_over_threads(
    isa: str, format: str, window: int | None, native_order: bool
) -> None:
    rows = (Row(1, 1500), Row(3, 700), Row(1, 40), Row(60, 500))
    case = Attending(rows, format, native_order, 16, 2, 3, 64, 64, window, None, True, False, 0, 5)
    answers = [AttentionRun(case).check(team(isa, threads)) for threads in (1, 2, 5)]
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], atol=1e-2 if format != "fp32" else 1e-5)


def test_a_step_without_queries_does_nothing() -> None:
    one = team(ISAS[-1])
    pool = pool_of(KVTensors(KVShape(1, 1, 8, 8), 1, 4, torch.float32, torch.device("cpu")))
    empty = np.zeros(0, np.int32)
    step = StepRows(np.zeros(0, np.int64), np.zeros(1, np.int32), empty, np.zeros((0, 1), np.int32), empty)
    attention = kernels.Attention(heads=1, scaling=1.0)
    one.call(
        "pl_attend", ctypes.byref(pool), 0, ctypes.byref(step.struct()), None, None, ctypes.byref(attention)
    )


# -- whole models -------------------------------------------------------------------------------


@cache
def model_and_logits(arch: str) -> tuple[Any, np.ndarray, np.ndarray]:
    model = tiny(arch)
    tokens = np.random.default_rng(3).integers(0, 256, 90)
    with torch.inference_mode():
        logits = model.module.double()(torch.from_numpy(tokens)[None]).logits[0].numpy()
    model.module.float()
    return model, tokens, logits


def one_step(runner: NativeRunner, tokens: np.ndarray, kv_dtype: torch.dtype) -> Any:
    blocks = -(-len(tokens) // 16)
    kv = KVTensors(runner.kv_shape, blocks, 16, kv_dtype, torch.device("cpu"), native=True)
    count = len(tokens)
    rows = StepRows(
        token_ids=tokens,
        query_start=np.array([0, count], np.int32),
        kv_len=np.array([count], np.int32),
        tables=np.arange(blocks, dtype=np.int32)[None],
        sample_rows=np.arange(count, dtype=np.int32),
    )
    return runner.forward(rows, pool_of(kv))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", MODEL_ERROR)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral"])
def test_logits_of_whole_models(arch: str, scheme: str, isa: str) -> None:
    """Norms, rotary embedding, biases, windows and fused weights, by every instruction set."""
    model, tokens, exact = model_and_logits(arch)
    weights_kind = scheme if scheme.startswith("int") else "model"
    if scheme == "bf16":
        model = replace(
            model, module=tiny(arch).module.to(torch.bfloat16), dtype=torch.bfloat16, fingerprint="b"
        )
    runner = NativeRunner(model, weights_kind, threads=2, isa=isa)
    for kv_dtype in {model.dtype, torch.int8 if weights_kind == "int8-dynamic" else model.dtype}:
        output = one_step(runner, tokens, kv_dtype)
        error = np.sqrt(((output.logits.numpy() - exact) ** 2).mean() / (exact**2).mean())
        assert error < MODEL_ERROR[scheme]
        assert output.best.token_ids == output.logits.argmax(-1).tolist()
        assert output.finite == [True]


# -- selection ----------------------------------------------------------------------------------

SPECIAL = np.array([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=300, deadline=None)
@given(st.integers(1, 100), st.sampled_from((0, 0.03, 0.5, 1)), st.integers(0, 2**32 - 1))
def test_argmax_is_the_first_of_the_largest_and_nan_wins(
    isa: str, size: int, special: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    allowed = SPECIAL[: rng.integers(1, 7)] if seed % 2 else SPECIAL[rng.integers(6) :]
    x = np.where(rng.random(size) < special, rng.choice(allowed, size), rng.normal(size=size)).astype(
        np.float32
    )
    value = np.empty(1, np.float32)
    got = LIBRARY.pl_argmax(team(isa).handle, address(x), len(x), address(value))
    assert got == x.argmax()
    np.testing.assert_array_equal(value[0], x[got])


# -- the team -----------------------------------------------------------------------------------


def small_product(seed: int = 0, rows: int = 5) -> tuple[Packed, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    packed = Packed("int8-dynamic", rng.normal(size=(200, 64)).astype(np.float32), None)
    x = rng.normal(size=(rows, 64)).astype(np.float32)
    alone = np.empty((rows, 200), np.float32)
    multiply(team(ISAS[-1], 1), packed.matrix, x, alone)
    return packed, x, alone


def repeat(members: Team, times: int, seed: int = 0) -> None:
    """Many short runs, each compared with what one thread says."""
    packed, x, expected = small_product(seed)
    out = np.empty_like(expected)
    for _ in range(times):
        out.fill(np.nan)
        multiply(members, packed.matrix, x, out)
        np.testing.assert_array_equal(out, expected)


@contextmanager
def must_end(seconds: float = 60) -> Iterator[list[threading.Thread]]:
    """The threads that are put into the list are started, and have to come back."""
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []
    before, threading.excepthook = threading.excepthook, lambda args: failures.append(args.exc_value)
    try:
        yield threads
        for thread in threads:
            thread.daemon = True
            thread.start()
        for thread in threads:
            thread.join(seconds)
            assert not thread.is_alive(), "a team hangs"
    finally:
        threading.excepthook = before
    assert not failures, failures


@pytest.mark.parametrize("format", FORMATS)
def test_any_number_of_threads_gives_the_same(format: str) -> None:
    rng = np.random.default_rng(4)
    packed = Packed(format, rng.normal(size=(333, 77)).astype(np.float32), None)
    for rows in (1, 9, 300):
        x = rng.normal(size=(rows, 77)).astype(np.float32)
        answers = []
        for threads in (1, 2, 3, 5):
            out = np.empty((rows, 333), np.float32)
            multiply(team(ISAS[-1], threads), packed.matrix, x, out)
            answers.append(out)
        for answer in answers[1:]:
            np.testing.assert_array_equal(answer, answers[0])


@pytest.mark.parametrize(("threads", "spin_us"), [(2, 50), (2, 0), (3, 50), (5, 0)])
def test_many_short_runs_in_a_row(threads: int, spin_us: int) -> None:
    with must_end() as tasks:
        tasks.append(threading.Thread(target=repeat, args=(Team(threads, spin_us), 500)))


def test_two_teams_at_once() -> None:
    with must_end() as tasks:
        for seed in range(2):
            tasks.append(threading.Thread(target=repeat, args=(Team(2), 200, seed)))


def test_more_threads_than_cores_and_busy_neighbours() -> None:
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        with must_end() as tasks:
            tasks.append(threading.Thread(target=repeat, args=(Team(16), 20)))
            tasks.append(threading.Thread(target=repeat, args=(Team(2), 50)))
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def test_teams_come_and_go() -> None:
    with must_end() as tasks:
        tasks.append(threading.Thread(target=lambda: [repeat(Team(3), 1) for _ in range(50)]))


def test_reading_reaches_every_word_once() -> None:
    values = np.arange(1 << 17, dtype=np.uint64)
    total = LIBRARY.pl_read(team(ISAS[-1], 3).handle, address(values), values.nbytes)
    assert total == values.sum()


def test_what_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="isa='mmx': this processor does not have it; the best here is"):
        Team(2, isa="mmx")


def test_without_the_library_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "library", lambda: None)
    monkeypatch.setattr(kernels, "why_missing", lambda: "not built; install a compiler")
    with pytest.raises(NotNative, match="install a compiler"):
        Team(2)
