"""The GGUF file format: metadata, the table of tensors and what their stored blocks mean.

Does not know what a model is; `gguf_model` makes one of the parts.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from perflab.errors import ModelError

_MAGIC = b"GGUF"
_SCALARS = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_STRING, _ARRAY = 8, 9
# The common kinds, known without the 0.1 s that importing the `gguf` package takes.
_KINDS = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        8: ("Q8_0", 32, 34),
        30: ("BF16", 1, 2),
    }
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: shape as in torch (rows first), [offset, offset + size) in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: np.ndarray

    @property
    def quantization(self) -> str:
        """The kind of most weights, such as `Q4_1`."""
        weights: Counter[int] = Counter()
        for tensor in self.tensors.values():
            if len(tensor.shape) > 1:
                weights[tensor.kind] += math.prod(tensor.shape)
        return _kind(weights.most_common(1)[0][0])[0] if weights else "none"

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor, [rows, columns], in memory of its own."""
        info = self.tensors[name]
        raw = self.data[info.offset : info.offset + info.size]
        return dequantize(raw, info.kind, dtype).reshape(info.shape)


def read(path: Path) -> GGUFFile:
    """Metadata and tensor table of a GGUF file; weights stay on disk until asked for.

    Raises ModelError for what is no GGUF file, is cut short, or uses a version we do not know.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ModelError(f"{path} is not a GGUF file (it does not begin with 'GGUF')")
    data = np.memmap(path, dtype=np.uint8, mode="c")  # never written; torch warns of read-only memory
    try:
        return _parse(path, data)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is damaged or cut short in its header: download it again") from error


def _parse(path: Path, data: np.ndarray) -> GGUFFile:
    cursor = _Cursor(data.data, 4)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}; versions 2 and 3 are read (little-endian)")
    num_tensors, num_pairs = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    if (parts := metadata.get("split.count", 1)) > 1:
        raise ModelError(f"{path} is one of {parts} parts of a split file: merge them with llama-gguf-split")
    table = []
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        table.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in table:
        size = _num_bytes(path, name, shape, kind)
        tensors[name] = TensorInfo(shape, kind, start + offset, size)
        if start + offset + size > len(data):
            raise ModelError(
                f"{path} is cut short: {name} needs {start + offset + size} bytes, the file has {len(data)}; "
                "download it again"
            )
    return GGUFFile(path, metadata, tensors, data)


class _Cursor:
    """A position in a buffer that reads GGUF's little-endian values one after another."""

    def __init__(self, buffer: memoryview, at: int) -> None:
        self.buffer = buffer
        self.at = at

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        if self.at + size > len(self.buffer):
            raise IndexError(size)
        text = bytes(self.buffer[self.at : self.at + size]).decode()
        self.at += size
        return text

    def strings(self, count: int) -> list[str]:
        """Vocabularies are most of a header: one loop without calls."""
        buffer, at, end, length = self.buffer, self.at, len(self.buffer), struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = at + 8
            at = start + length(buffer, at)[0]
            if at > end:
                raise IndexError(at)
            found.append(str(buffer[start:at], "utf-8"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise IndexError(kind)
            return self.scalar(_SCALARS[kind])
        element, count = self.scalar("I"), self.scalar("Q")
        if element == _STRING:
            return self.strings(count)
        if element in _SCALARS:
            values = struct.unpack_from(f"<{count}{_SCALARS[element]}", self.buffer, self.at)
            self.at += struct.calcsize(f"<{count}{_SCALARS[element]}")
            return list(values)
        return [self.value(element) for _ in range(count)]


def _num_bytes(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    try:
        _, block, size = _kind(kind)
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"{path}: {name} has the unknown quantization {kind}; upgrade the gguf package"
        ) from error
    return math.prod(shape) // block * size


def _kind(kind: int) -> tuple[str, int, int]:
    """Name, values in a block and bytes of a block."""
    if kind in _KINDS:
        return _KINDS[kind]
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGMLQuantizationType(kind).name, *GGML_QUANT_SIZES[GGMLQuantizationType(kind)]


def dequantize(raw: np.ndarray, kind: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of raw bytes, flat, rounded once from fp32 to `dtype`.

    The common kinds here (ggml's block layouts), others by the `gguf` package. Blocks of 32 values:
    Q8_0 is {fp16 d, int8 q[32]}, value d·q; Q4_0 {fp16 d, nibbles}, d·(q − 8); Q4_1 {fp16 d,
    fp16 m, nibbles}, d·q + m; the low nibbles of the 16 bytes come first.
    """
    name = _kind(kind)[0]
    if name in _FLOATS:
        return torch.from_numpy(raw).view(_FLOATS[name]).to(dtype, copy=True)
    if name not in _BLOCKS:
        return _dequantize_others(raw, kind).to(dtype)
    size, decode = _BLOCKS[name]
    blocks = raw.reshape(-1, size)
    values = np.empty((len(blocks), 32), dtype=np.float32)
    # numpy, in pieces that stay in the processor's cache: as quick as torch on one thread, and
    # without its many short parallel regions, which crawl on a busy machine.
    for start in range(0, len(blocks), _CHUNK):
        decode(blocks[start : start + _CHUNK], values[start : start + _CHUNK])
    return torch.from_numpy(values).flatten().to(dtype)


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 0), out=out)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, packed = _halves(blocks, 0), blocks[:, 2:]
    np.multiply((packed & 15).view(np.int8) - np.int8(8), scales, out=out[:, :16])
    np.multiply((packed >> 4).view(np.int8) - np.int8(8), scales, out=out[:, 16:])


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, packed = _halves(blocks, 0), blocks[:, 4:]
    np.multiply(packed & 15, scales, out=out[:, :16])
    np.multiply(packed >> 4, scales, out=out[:, 16:])
    out += _halves(blocks, 2)


_FLOATS = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})
_BLOCKS = MappingProxyType({"Q8_0": (34, _q8_0), "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1)})
_CHUNK = 8192  # blocks: 1 MB of fp32


def _dequantize_others(raw: np.ndarray, kind: int) -> torch.Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_any

    try:
        return torch.from_numpy(dequantize_any(raw, GGMLQuantizationType(kind))).flatten()
    except NotImplementedError as error:
        raise ModelError(
            f"weights of kind {_kind(kind)[0]} cannot be dequantised: use a file of another kind"
        ) from error
