"""What this machine offers: cores, instructions, memory, measured rates, and what they lead to.

Owns the facts and the micro-measurements. Does not know of any model or engine; ceilings printed
beside a measurement come from here. Nothing here names the host, its user or its paths.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from perflab.clock import NS_PER_S, WallClock
from perflab.models import kernels
from perflab.models.load import choose_device, choose_dtype
from perflab.models.packing import pack_matrix

Progress = Callable[[str], None]

_GIB = 1 << 30
_PACKAGES = ("perflab", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")
_INSTRUCTIONS = (
    *("avx2", "f16c", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def describe(quick: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Everything `perflab doctor` prints, as plain values; `quick` leaves out what must be measured.

    Sizes are in GiB, rates in GB/s (10^9 bytes) and GFLOP/s (for int8: 10^9 operations/s).
    """
    say = progress or (lambda message: None)
    device = choose_device("auto")
    facts: dict[str, Any] = {
        "cpu": cpu(),
        "memory": memory(),
        "gpus": gpus(),
        "bandwidth": None,
        "matrix_rates": None,
        "versions": versions(),
        "engine": {
            "device": str(device),
            "dtype": _DTYPE_NAMES[choose_dtype(torch.bfloat16, device)],
            "threads": usable_cores(),
            "kernels": kernel_path(device),
        },
        "native": {"isa": kernels.isa(), "missing": kernels.why_missing(), "spin_us": kernels.SPIN_US},
        "native_rates": None,
    }
    if not quick:
        say("Measuring read bandwidth")
        facts["bandwidth"] = measure_bandwidth(device)
        say("Measuring matrix rates")
        facts["matrix_rates"] = measure_matrix_rates(device)
        if kernels.library() is not None:
            facts["native_rates"] = measure_native_rates()
    return facts


def manifest() -> dict[str, Any]:
    """The machine's part of a run's manifest: quick, and without anything that names the host."""
    processor = cpu()
    return {
        "cpu": processor["model"],
        "instructions": processor["instructions"],
        "usable_cores": processor["usable_cores"],
        "logical_cores": processor["logical_cores"],
        "memory_gib": round(memory()["total_gib"], 1),
        "gpus": [gpu["name"] for gpu in gpus()],
        "threads": torch.get_num_threads(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Python and the packages a result depends on."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu() -> dict[str, Any]:
    """Model, cores (with what limits them) and instruction sets of interest."""
    info = _cpuinfo()
    flags = set(info.get("flags", info.get("Features", "")).split())
    usable, why = _usable_cores()
    return {
        "model": info.get("model name") or platform.processor() or platform.machine(),
        "logical_cores": os.cpu_count() or 1,
        "physical_cores": _physical_cores(),
        "usable_cores": usable,
        "why_usable": why,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
    }


def usable_cores() -> int:
    """Cores worth a thread each: physical ones, within affinity and the container's quota."""
    return _usable_cores()[0]


def _usable_cores() -> tuple[int, str]:
    limits = {"physical cores": float(_physical_cores())}
    if hasattr(os, "sched_getaffinity"):
        limits["this process's affinity"] = float(len(os.sched_getaffinity(0)))
    if (quota := cgroup_cpus()) is not None:
        limits["the container's quota"] = quota
    why, least = min(limits.items(), key=lambda item: item[1])
    return max(1, math.floor(least)), f"{least:g} by {why}, {os.cpu_count()} logical"


def _physical_cores() -> int:
    import psutil

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty where there is no such file."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def memory() -> dict[str, float]:
    """Total and free memory in GiB, of the machine or of the container, whichever is less."""
    import psutil

    whole = psutil.virtual_memory()
    total, free = whole.total, whole.available
    for limit, used in cgroup_memory(_CGROUP_ROOT, _cgroup_path()):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return {"total_gib": total / _GIB, "free_gib": free / _GIB}


def cgroup_cpus(root: Path = _CGROUP_ROOT) -> float | None:
    """The container's CPU quota in cores, None without one (cgroup v2 `cpu.max`, or v1)."""
    quotas = []
    for level in _levels(root, _cgroup_path()):
        quota, _, period = _text(level / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    old = [_text(root / "cpu" / f"cpu.cfs_{part}_us") for part in ("quota", "period")]
    if all(part.isdigit() for part in old):
        quotas.append(int(old[0]) / int(old[1]))
    return min(quotas, default=None)


def cgroup_memory(root: Path, own: str) -> Iterator[tuple[int, int]]:
    """(limit, bytes that cannot be reclaimed) of each level that has a limit."""
    for level in _levels(root, own):
        limit, used = _text(level / "memory.max"), _text(level / "memory.current")
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split() for line in _text(level / "memory.stat").splitlines())
            yield int(limit), int(used) - int(stat.get("inactive_file", 0))
    old = [_text(root / "memory" / f"memory.{part}_in_bytes") for part in ("limit", "usage")]
    if all(part.isdigit() for part in old):
        yield int(old[0]), int(old[1])


def _cgroup_path() -> str:
    """This process's place in the cgroup v2 tree, such as `/user.slice`."""
    unified = (line[3:] for line in _text(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::"))
    return next(unified, "/")


def _levels(root: Path, own: str) -> Iterator[Path]:
    place = root / own.lstrip("/")
    yield from (level for level in (place, *place.parents) if level == root or root in level.parents)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def gpus() -> list[dict[str, Any]]:
    """The CUDA devices torch sees."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        capability = f"{about.major}.{about.minor}"
        found.append({"name": about.name, "memory_gib": about.total_memory / _GIB, "capability": capability})
    return found


def kernel_path(device: torch.device) -> str:
    """Which matrix kernels a model of Llama's shape meets on this device, in words."""
    if device.type == "cuda":
        return "cuBLAS"
    if (isa := kernels.isa()) is not None:
        return f"native ({isa})"
    if choose_dtype(torch.bfloat16, device) == torch.bfloat16:
        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        return f"oneDNN bf16 ({'AMX' if amx else 'AVX512-BF16'})"
    return f"fp32 ({torch.backends.cpu.get_cpu_capability()})"


def measure_bandwidth(device: torch.device | None = None, mib: int = 512) -> dict[str, Any]:
    """How fast memory can be read, in GB/s of 10^9 bytes: the best of several loops over `mib` MiB.

    The loops read everything once and write next to nothing. No single one is the fastest on every
    machine, so each is reported and the best is the ceiling; on a busy machine all are too low.
    `loops` are the rates of each one's best pass, `sustained` those of its median pass, which is what a
    median of many steps compares with.
    """
    device = device or torch.device("cpu")
    room = int(memory()["free_gib"] * 1024) if device.type == "cpu" else mib * 4
    mib = max(16, min(mib, room // 4))
    values = torch.ones(mib << 18, device=device)
    integers, matrix = values.view(torch.int64), values.view(-1, 4096)
    halves = values.view(torch.bfloat16).view(-1, 4096)
    half = values.numel() // 2
    vector = torch.ones(4096, device=device)
    loops: dict[str, Callable[[], object]] = {
        "sum of fp32": values.sum,
        "sum of int64": integers.sum,
        "maximum of fp32": values.max,
        "dot product of two fp32 halves": lambda: torch.dot(values[:half], values[half:]),
        "fp32 matrix times vector": lambda: matrix @ vector,
        "bf16 matrix times vector": lambda: halves @ vector.bfloat16(),
    }
    if device.type == "cpu" and kernels.library() is not None:
        team, array = kernels.Team(torch.get_num_threads()), values.numpy()
        loops["native sum of int64"] = lambda: team.read(array)
    seconds = {name: _seconds(loop, device) for name, loop in loops.items()}
    rates = {name: (mib << 20) / min(times) / 1e9 for name, times in seconds.items()}
    return {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "mib": mib,
        "loops": rates,
        "sustained": {name: (mib << 20) / median(times) / 1e9 for name, times in seconds.items()},
        "best": max(rates.values()),
    }


def measure_matrix_rates(device: torch.device | None = None, size: int | None = None) -> dict[str, Any]:
    """Rates of square matrix products in 10^9 operations per second, 2·size³ each; None: not available.

    int8 is the faster of torch's plain product and oneDNN's quantized linear.
    """
    device = device or torch.device("cpu")
    size = size or (8192 if device.type == "cuda" else 1024)
    plain = torch.rand(size, size, device=device)
    rounded = plain.bfloat16()
    ints = torch.randint(-127, 128, (size, size), device=device, dtype=torch.int8)
    products: list[tuple[str, Callable[[], Callable[[], object]]]] = [
        ("fp32", lambda: lambda: plain @ plain),
        ("bf16", lambda: lambda: rounded @ rounded),
        ("int8", lambda: lambda: torch._int_mm(ints, ints)),
        ("int8", lambda: _quantized_linear(ints)),
    ]
    rates: dict[str, float | None] = {}
    for name, prepare in products:
        rates.setdefault(name, None)
        try:
            rate = 2 * size**3 / _best_seconds(prepare(), device) / 1e9
        except (RuntimeError, NotImplementedError, AttributeError):
            continue
        rates[name] = max(rates[name] or 0.0, rate)
    return {"device": str(device), "threads": torch.get_num_threads(), "size": size, "rates": rates}


def measure_native_rates(size: int = 1024) -> dict[str, float]:
    """Rates of the native kernels' products of `size` rows, as in `measure_matrix_rates`, by format."""
    team, x = kernels.Team(torch.get_num_threads()), np.ones((size, size), np.float32)
    out, rates = np.empty((size, size), np.float32), {}
    for name, code in kernels.FORMATS.items():
        data, scale = pack_matrix(name, x)
        packed = kernels.Matrix(code, size, size, kernels.address(data), kernels.address(scale))
        seconds = _best_seconds(partial(kernels.multiply, team, packed, x, out), torch.device("cpu"))
        rates[name] = 2 * size**3 / seconds / 1e9
    return rates


def _quantized_linear(weight: torch.Tensor) -> Callable[[], object]:
    """oneDNN's linear of 8-bit inputs and weights, as it runs on a CPU; raises where there is none."""
    size = len(weight)
    x = torch.full((size, size), 7, dtype=torch.uint8, device=weight.device)
    scales, zeros = torch.ones(size), torch.zeros(size, dtype=torch.int32)
    packed = torch.ops.onednn.qlinear_prepack(weight, [size, size])
    settings: tuple[Any, ...] = (packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return lambda: torch.ops.onednn.qlinear_pointwise(x, 1.0, 128, *settings)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    return min(_seconds(work, device))


def _seconds(work: Callable[[], object], device: torch.device, budget_s: float = 0.3) -> list[float]:
    """At least three runs after a warm-up, within about `budget_s`."""
    clock = WallClock()

    def once() -> int:
        start = clock.now()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock.now() - start

    once()
    times: list[int] = []
    while len(times) < 3 or (sum(times) < budget_s * NS_PER_S and len(times) < 100):
        times.append(once())
    return [time / NS_PER_S for time in times]
