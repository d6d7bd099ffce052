"""Memory of a process: what is resident, what allocators hold, which Python objects, and whether it leaks.

Owns the readings and the leak verdict. Knows no engine or request: request counts come as numbers.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil

from perflab.measure.stats import Estimate, t_quantile
from perflab.types import StepRecord

LEAK_LIMIT = 2048.0
"""Bytes a request: what grows faster for certain leaks, what grows more slowly for certain does not."""

BLOCKS, FEWEST_BLOCKS = 20, 8

_STATUS = MappingProxyType(
    {"rss": "VmRSS", "anonymous": "RssAnon", "file": "RssFile", "shared": "RssShmem", "peak": "VmHWM"}
)


@dataclass(frozen=True, slots=True)
class LeakVerdict:
    """Whether memory grows with every request. `cannot tell`: the interval of the slope holds the limit,
    or the samples are too few."""

    answer: Literal["leaking", "steady", "cannot tell"]
    slope_bytes_per_request: Estimate
    limit_bytes_per_request: float
    warm_up_requests: int  # requests up to here were left out
    reason: str

    @property
    def leaking(self) -> bool:
        return self.answer == "leaking"


def leak_verdict(
    requests: Sequence[int],
    rss_bytes: Sequence[int],
    *,
    limit: float = LEAK_LIMIT,
    warm_up: float = 0.25,
    confidence: float = 0.95,
) -> LeakVerdict:
    """Judge resident memory sampled while requests end.

    requests: how many requests had ended at each sample, never falling; rss_bytes: as many. The first
    `warm_up` share of the requests is left out, since caches and allocators fill then. What is left is
    cut into blocks of equally many samples (20 where there are enough), a block stands for its median,
    so that a spike counts for nothing. Through the medians goes a line by generalised least squares
    whose errors follow a first-order autoregression (Prais & Winsten 1954; its coefficient corrected
    for the bias of short series, Kendall 1954, and taken for 1 where it is close, Perron & Yabu 2009):
    between ordinary least squares for independent errors and the mean of differences for a random walk,
    which is what an allocator that grows by jumps looks like. `leaking`: the whole interval lies above
    `limit` bytes a request; `steady`: below it.

    Raises ValueError for samples that do not match, fall or stand still.
    """
    x, y = np.asarray(requests, float), np.asarray(rss_bytes, float)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"{x.size} request counts for {y.size} memory samples: one of each is needed")
    if not 0 <= warm_up < 1:
        raise ValueError(f"warm_up={warm_up}: a share of the requests, from 0 to below 1")
    if x.size and np.any(np.diff(x) < 0):
        raise ValueError("requests: counts of ended requests never fall")
    start = x[0] + warm_up * (x[-1] - x[0]) if x.size else 0.0
    x, y = x[x >= start], y[x >= start]
    blocks = min(BLOCKS, x.size)
    if blocks < FEWEST_BLOCKS or x[0] == x[-1]:
        reason = f"{x.size} samples after warm-up; at least {FEWEST_BLOCKS} over growing requests are needed"
        return LeakVerdict("cannot tell", Estimate(None, n=x.size), limit, int(start), reason)
    medians = [np.array([np.median(part) for part in np.array_split(a, blocks)]) for a in (x, y)]
    slope = _line(medians[0], medians[1], x.size, confidence)
    assert slope.low is not None
    assert slope.high is not None
    if slope.low > limit:
        return LeakVerdict("leaking", slope, limit, int(start), "the whole interval is above the limit")
    if slope.high < limit:
        return LeakVerdict("steady", slope, limit, int(start), "the whole interval is below the limit")
    reason = "the interval holds the limit; more requests make it narrower"
    return LeakVerdict("cannot tell", slope, limit, int(start), reason)


def _line(x: np.ndarray, y: np.ndarray, samples: int, confidence: float) -> Estimate:
    """Slope of y over x with errors of a first-order autoregression, iterated to a fixed coefficient."""
    n, rho = x.size, 0.0
    design = np.column_stack((np.ones(n), x))
    for _ in range(20):
        first = np.sqrt(1 - rho * rho)
        bent = [np.concatenate((first * a[:1], a[1:] - rho * a[:-1])) for a in (design, y)]
        keep = slice(1, None) if rho == 1.0 else slice(None)  # a random walk's level says nothing
        a, b = bent[0][keep], bent[1][keep]
        a = a[:, 1:] if rho == 1.0 else a
        coefficients = np.linalg.lstsq(a, b, rcond=None)[0]
        slope = float(coefficients[-1])
        errors = y - slope * x
        errors = errors - errors.mean()
        before, rho = rho, _autocorrelation(errors)
        if abs(rho - before) < 1e-3:
            break
    left = b - a @ coefficients
    freedom = len(b) - a.shape[1]
    variance = float(left @ left) / freedom
    spread = float(np.sqrt(variance * np.linalg.inv(a.T @ a)[-1, -1]))
    half = t_quantile((1 + confidence) / 2, freedom) * spread
    return Estimate(slope, slope - half, slope + half, samples, confidence)


def _autocorrelation(errors: np.ndarray) -> float:
    """Of a detrended series, made up for its bias of −(2 + 4ρ)/n; between 0 and 1, and 1 from
    1 − 1/√n on."""
    n, energy = errors.size, float(errors @ errors)
    if energy == 0:
        return 0.0
    found = (float(errors[1:] @ errors[:-1]) / energy + 2 / n) / (1 - 4 / n)
    return 1.0 if found > 1 - n**-0.5 else max(0.0, found)


def resident_bytes(pid: int | None = None) -> int:
    """Resident set of a process, this one by default. Raises ValueError where there is no such process."""
    return resident(pid)["rss"]


def resident(pid: int | None = None) -> dict[str, int]:
    """Bytes: `rss`, and on Linux `anonymous` (heaps, stacks), `file` (mapped files, weights among them),
    `shared` and `peak` (the most it ever was). Raises ValueError where there is no such process."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return {name: int(fields[key].split()[0]) * 1024 for name, key in _STATUS.items()}
    except (OSError, KeyError):
        pass
    try:
        return {"rss": psutil.Process(pid).memory_info().rss}
    except psutil.Error:
        raise ValueError(f"pid={pid}: no such process, or one that may not be looked at") from None


def allocators() -> dict[str, int]:
    """Bytes that this process's allocators hold, where they say so: `malloc in use` and `malloc free`
    (glibc keeps it for later: resident, used by nobody), `CUDA in use` and `CUDA reserved` (torch's)."""
    found = {}
    info = _mallinfo()
    if info is not None:
        found["malloc in use"] = info.uordblks + info.hblkhd
        found["malloc free"] = info.fordblks
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["CUDA in use"] = torch.cuda.memory_allocated()
        found["CUDA reserved"] = torch.cuda.memory_reserved()
    return found


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _mallinfo() -> Any:
    """glibc's own account of all its arenas; None with another C library or an older one."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    function.restype = _Mallinfo2
    return function()


class Objects(NamedTuple):
    """Live Python objects of one type: how many, and their own bytes (without what they refer to)."""

    number: int
    bytes: int


def python_objects() -> dict[str, Objects]:
    """Live objects by type, those that the garbage collector tracks and what these refer to directly.

    Sees no memory of C extensions: a tensor counts as its Python shell. Takes about a microsecond an
    object, so take it before and after a run, not during one.
    """
    gc.collect()
    tracked = gc.get_objects()
    found: dict[type, list[int]] = {}
    # The lists of this function are objects too.
    seen = {id(tracked), id(found)}
    pending: list[Any] = [item for item in tracked if id(item) not in seen]
    seen.update(map(id, tracked))
    for item in pending:
        _count(found, item)
        for leaf in gc.get_referents(item):
            if id(leaf) not in seen and not gc.is_tracked(leaf):
                seen.add(id(leaf))
                _count(found, leaf)
    return {f"{kind.__module__}.{kind.__qualname__}": Objects(*sums) for kind, sums in found.items()}


def _count(found: dict[type, list[int]], item: Any) -> None:
    if type(item) is Objects:
        return  # an earlier answer of `python_objects`
    sums = found.setdefault(type(item), [0, 0])
    sums[0] += 1
    try:
        sums[1] += sys.getsizeof(item)
    except Exception:  # a broken __sizeof__ of someone else's class
        return


def growth(before: Mapping[str, Objects], after: Mapping[str, Objects]) -> list[tuple[str, Objects]]:
    """What there is more (or less) of, by type; the most bytes first, then the most objects."""
    none = Objects(0, 0)
    changes = [
        (name, Objects(*(b - a for a, b in zip(before.get(name, none), after.get(name, none), strict=True))))
        for name in before.keys() | after.keys()
    ]
    return sorted((c for c in changes if any(c[1])), key=lambda c: (-c[1].bytes, -c[1].number, c[0]))


def kv_pool_bytes(steps: Iterable[StepRecord], block_bytes: int) -> dict[str, int]:
    """Bytes of the KV pool at its fullest: `used` by running requests, `cached` beside, and `total`."""
    most = {"used": 0, "cached": 0, "total": 0}
    for step in steps:
        for name in most:
            most[name] = max(most[name], getattr(step, f"kv_blocks_{name}") * block_bytes)
    return most
