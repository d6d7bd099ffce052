"""The native kernels: where the library lies, and its structures and calls in Python.

Owns the C interface of `perflab/csrc`. Knows nothing of models or engines. The library is optional:
without it `library()` is None, `why_missing()` says what to do, and callers take torch's path.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from perflab.errors import ConfigError, NotNative

VERSION = 3
FORMATS = {"fp32": 0, "bf16": 1, "int8-dynamic": 2, "int4": 3, "int8": 4}
KV_FORMATS = {"fp32": 0, "bf16": 1, "int8": 2}
PANEL = 32
STORE, ADD, SILU_MUL = 0, 1, 2
MAX_HEAD_DIM = 256
MAX_SHARED = 48  # query heads of one key head; MAX_QUERY_ROWS in `kernels.h`
SPIN_US = 50


class Matrix(Structure):
    """A packed weight [n, k]; see `kernels.h`."""

    _fields_ = (
        ("format", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
    )


class Output(Structure):
    _fields_ = (("data", c_void_p), ("stride", c_int64), ("finish", c_int32), ("format", c_int32))


class Layer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("window", c_int32),
    )


class Model(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("intermediate", "vocabulary", "rotary_half")),
        ("eps", c_float),
        ("scaling", c_float),
        ("layer", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("embedding", Matrix),
        ("head", Matrix),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class Pool(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("key", "value", "key_scale", "value_scale")),
        *((name, c_int32) for name in ("format", "blocks", "block_size", "kv_heads", "key_dim", "value_dim")),
        ("tiled", c_int32),
    )


class Step(Structure):
    _fields_ = (
        ("rows", c_int32),
        ("tokens", c_int32),
        ("query_start", c_void_p),
        ("kv_len", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int32),
        ("token_ids", c_void_p),
        ("sample_rows", c_void_p),
        ("samples", c_int32),
        *((name, c_void_p) for name in ("logits", "hidden", "features", "best", "best_value", "finite")),
    )


class Attention(Structure):
    _fields_ = (
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("heads", c_int32),
        ("window", c_int32),
        ("scaling", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("out_format", c_int32),
    )


@cache
def library() -> Any:
    """The loaded library, None where it was not built or is of another version."""
    return _load()[0]


def why_missing() -> str:
    """What keeps the native kernels from being used, in words with the remedy; empty if nothing does."""
    return _load()[1]


@cache
def _load() -> tuple[Any, str]:
    remedy = "install a C++20 compiler (g++ 12 or newer, or clang) and reinstall: pip install -e ."
    if os.environ.get("PERFLAB_NATIVE", "1") == "0":
        return None, "switched off by PERFLAB_NATIVE=0"
    place = os.environ.get("PERFLAB_NATIVE_LIBRARY")
    paths = [Path(place)] if place else _candidates()
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None, f"the native kernels were not built; {remedy}"
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the native kernels cannot be loaded ({error}); {remedy}"
    lib.pl_version.restype = c_int32
    if (found := lib.pl_version()) != VERSION:
        return None, f"the native kernels are version {found}, this package needs {VERSION}; {remedy}"
    _declare(lib)
    return lib, ""


def _candidates() -> list[Path]:
    package = Path(__file__).parents[1]
    return [package / f"_native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]


def _declare(lib: Any) -> None:
    pointer, i32, i64 = c_void_p, c_int32, c_int64
    for name, result, arguments in (
        ("pl_isa", c_char_p, (c_char_p,)),
        ("pl_new", pointer, (c_char_p, i32, i32)),
        ("pl_free", None, (pointer,)),
        ("pl_step", i32, (pointer, POINTER(Model), POINTER(Pool), POINTER(Step))),
        (
            "pl_attend",
            i32,
            (pointer, POINTER(Pool), i32, POINTER(Step), pointer, pointer, POINTER(Attention)),
        ),
        ("pl_multiply", i32, (pointer, POINTER(Matrix), pointer, i32, POINTER(Output))),
        ("pl_panel_bytes", i64, (i32, i32)),
        ("pl_pack", None, (i32, pointer, i32, i32, pointer, pointer)),
        ("pl_unpack_row", None, (POINTER(Matrix), i32, pointer)),
        ("pl_argmax", i32, (pointer, pointer, i32, pointer)),
        ("pl_read", c_uint64, (pointer, pointer, i64)),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments


def isa() -> str | None:
    """The instruction set used here: avx512_bf16, avx512, avx2 or plain; None without kernels."""
    lib = library()
    return None if lib is None else lib.pl_isa(None).decode()


class Team:
    """Threads that run native programs, with the buffers of one step. One caller at a time.

    threads: members, the caller among them. spin_us: how long a member waits awake for the others
    before it gives up its core. isa: an instruction set to use instead of the best.
    Raises NotNative without the library, ConfigError where the instruction set or the threads are not
    to be had.
    """

    def __init__(self, threads: int, spin_us: int = SPIN_US, isa: str | None = None) -> None:
        self.handle: int | None = None
        self.lib = library()
        if self.lib is None:
            raise NotNative(why_missing())
        if isa is not None and self.lib.pl_isa(isa.encode()) is None:
            raise ConfigError(
                f"isa={isa!r}: this processor does not have it; the best here is {_best(self.lib)}"
            )
        self.threads = threads
        self.handle = self.lib.pl_new((isa or "").encode(), threads, spin_us)
        if not self.handle:
            raise ConfigError(f"num_threads={threads}: the system cannot start so many threads")

    def call(self, name: str, *arguments: Any) -> None:
        """A `pl_` function with this team. Raises MemoryError."""
        if getattr(self.lib, name)(self.handle, *arguments):
            raise MemoryError(f"{name}: no memory for the step's buffers")

    def read(self, values: np.ndarray) -> None:
        """Read all of an array once, for its bandwidth."""
        self.lib.pl_read(self.handle, address(values), values.nbytes // 64 * 64)

    def __del__(self) -> None:
        if self.handle:
            self.lib.pl_free(self.handle)


def multiply(team: Team, matrix: Matrix, x: np.ndarray, out: np.ndarray, finish: int = STORE) -> None:
    """x fp32 [rows, k] times `matrix` into `out` [rows, columns]: fp32, or uint16 that holds bf16.

    finish: STORE; ADD to what `out` (fp32) holds; SILU_MUL of alternating gate and up columns.
    """
    format = FORMATS["fp32" if out.dtype == np.float32 else "bf16"]
    output = Output(address(out), out.strides[0] // out.itemsize, finish, format)
    team.call("pl_multiply", ctypes.byref(matrix), address(x), len(x), ctypes.byref(output))


def _best(lib: Any) -> str:
    return lib.pl_isa(None).decode()


def address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


def aligned(size: int) -> np.ndarray:
    """`size` zero bytes at a multiple of 64, with readable bytes behind them for what is fetched ahead."""
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size]
