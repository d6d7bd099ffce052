"""From nothing to the first token, and on until it is steady: new processes, each part stamped.

Owns the parts and the states of the caches in which they are measured. Imports nothing slow before a
new process's first stamp: `python -m perflab.studies.cold_start` is what each of them runs.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

PACKED_OFF: Mapping[str, str] = MappingProxyType({"PERFLAB_PACKED_CACHE_BYTES": "0"})
REQUESTS, OUTPUT_TOKENS, PROMPT_TOKENS = 16, 8, 32
"""What follows the first token: requests one after the other until their times are steady."""

PHASES: Mapping[str, str] = MappingProxyType(
    {
        "interpreter": "import",
        "import": "import",
        "identity": "identify the model",
        "fetch": "identify the model",
        "fingerprint": "identify the model",
        "tokenizer": "tokenizer",
        "weights": "weights",
        "pack": "quantise and pack",
        "map": "map packed weights",
        "engine": "KV pool and engine",
        "encode": "tokenizer",
        "first token": "first token",
    }
)
"""What the parts of a start are called in a report, by their last word or words."""


@dataclass(frozen=True, slots=True)
class State:
    """The caches before a start: the kernel's page cache of the files, and the packed weights on disk."""

    name: str
    cold_pages: bool = False
    packed: bool = True


STATES = (
    State("warm"),
    State("cold page cache", cold_pages=True),
    State("nothing packed", packed=False),
    State("nothing packed, cold page cache", cold_pages=True, packed=False),
)


def one(asked_ns: int, model: str, dtype: str, options: Mapping[str, Any], requests: int) -> dict[str, Any]:
    """Everything a new process does until its first token, in exclusive parts; then requests, timed."""
    marks = [("", asked_ns), ("interpreter", time.perf_counter_ns())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter_ns()))

    import torch

    mark("import torch")
    from perflab.config import EngineConfig
    from perflab.models.load import load
    from perflab.models.runners import make_runner
    from perflab.speculate.make import make_engine
    from perflab.types import Request, SamplingParams

    mark("import perflab")
    config = EngineConfig(**options)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    loaded = load(model, dtype=dtype, device="cpu")
    before = len(loaded.load_spans)
    mark("load")
    runner = make_runner(loaded, config)
    mark("runner")
    engine = make_engine(loaded, config, runner=runner)
    mark("engine")
    text = "The quick brown fox jumps over the lazy dog and runs far away. " * 8
    prompt = (loaded.encode(text) * PROMPT_TOKENS)[:PROMPT_TOKENS]
    mark("encode")

    def serve(number: int, tokens: int) -> float:
        turned = prompt[number % PROMPT_TOKENS :] + prompt[: number % PROMPT_TOKENS]
        start = time.perf_counter()
        engine.submit(Request(str(number), turned, SamplingParams(max_tokens=tokens, ignore_eos=True)))
        while engine.has_work:
            engine.step()
        return time.perf_counter() - start

    serve(0, 1)
    mark("first token")
    native = type(runner).__name__ == "NativeRunner"
    mapped = native and len(loaded.load_spans) == before and "weights" not in _names(loaded.load_spans)
    parts: dict[str, float] = {}
    for (_, start), (name, end) in itertools.pairwise(marks):
        inner = [s for s in loaded.load_spans if start <= s.start_ns and s.end_ns <= end]
        for span in inner:
            parts[f"{name}: {span.name}"] = (span.end_ns - span.start_ns) / 1e9
        rest = (end - start) / 1e9 - sum((s.end_ns - s.start_ns) / 1e9 for s in inner)
        if name == "runner":
            parts["runner: map" if mapped else "runner: pack"] = rest
        else:
            parts[f"{name}: rest" if inner else name] = rest
    return {
        "parts": parts,
        "total": (marks[-1][1] - asked_ns) / 1e9,
        "requests_s": [serve(number, OUTPUT_TOKENS) for number in range(1, requests + 1)],
        "transformers": "transformers" in sys.modules,
        "precision": str(loaded.dtype).removeprefix("torch."),
        "runner": "native" if native else "torch",
        "packed_linears": getattr(runner, "packed", False),
    }


def _names(spans: Iterable[Any]) -> set[str]:
    return {span.name for span in spans}


def start_process(
    model: str,
    dtype: str,
    options: Mapping[str, Any],
    environment: Mapping[str, str] = MappingProxyType({}),
    requests: int = REQUESTS,
) -> dict[str, Any]:
    """`one` in a new process, timed from before it was asked for, then `requests` more. Raises
    PerflabError with its last words where it fails."""
    from perflab.errors import PerflabError

    command = [sys.executable, "-m", __name__, str(time.perf_counter_ns()), model, dtype]
    command += [json.dumps(options), str(requests)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PerflabError(f"a new process could not start {model}: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def steady_after(seconds: Sequence[float], tolerance: float = 0.1) -> int:
    """How many requests pass before their times are steady: from the one after on, the median of three
    in a row stays within `tolerance` of the median of the second half. The number of all where it
    never does."""
    if len(seconds) < 6:
        return len(seconds)
    level = statistics.median(seconds[len(seconds) // 2 :])
    rolling = [statistics.median(seconds[i : i + 3]) for i in range(len(seconds) - 2)]
    above = [i for i, value in enumerate(rolling) if value > (1 + tolerance) * level]
    return above[-1] + 1 if above else 0


def phase_of(part: str) -> str:
    """The phase that a part belongs to; `rest` and what is unknown are `other`."""
    last = part.rpartition(": ")[2]
    return PHASES.get(last) or PHASES.get(last.split()[0], "other")


def phases(parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase of one start."""
    sums: dict[str, float] = {}
    for part, seconds in parts.items():
        sums[phase_of(part)] = sums.get(phase_of(part), 0.0) + seconds
    return sums


def until_steady(seconds: Sequence[float]) -> dict[str, float]:
    """Of requests one after the other: `requests` before their times are steady, the seconds these take,
    and of those what a warm process would not have needed (`warm_up_s`)."""
    count = steady_after(seconds)
    level = statistics.median(seconds[len(seconds) // 2 :])
    whole = sum(seconds[:count])
    return {"requests": count, "seconds": whole, "warm_up_s": max(0.0, whole - level * count)}


def files_of(model: str) -> list[Path]:
    """The files on this machine that hold a model's weights, packed ones among them."""
    from perflab.models import assets, packed_cache

    path = Path(model).expanduser()
    found: list[Path] = []
    if model == assets.NAME:
        found = [file for file in (assets.cached(),) if file is not None]
    elif path.is_file():
        found = [path]
    else:
        folder = path if path.is_dir() else _snapshot(model)
        found = [file for file in folder.iterdir() if file.is_file()] if folder else []
    return sorted(file for file in (*found, *packed_cache.directory().glob("*.pack")))


def _snapshot(model: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception:  # not in the cache: there is nothing to drop
        return None


def drop_pages(files: Iterable[Path]) -> float | None:
    """Ask the kernel to forget the files' pages; the share of their bytes that stayed in memory all the
    same (another process maps them), None where this system cannot drop or cannot tell."""
    if not hasattr(os, "posix_fadvise"):
        return None
    held = size = 0
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        resident = resident_bytes(file)
        if resident is None:
            return None
        held, size = held + resident, size + file.stat().st_size
    return held / size if size else None


def resident_bytes(file: Path) -> int | None:
    """How much of a file is in the page cache, by mincore(2); None where there is no such call."""
    size = file.stat().st_size
    if not size:
        return 0
    pages = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        try:
            mincore = ctypes.CDLL(None, use_errno=True).mincore
            failed = mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), flags)
        except (OSError, AttributeError, TypeError):
            return None
        finally:
            del start  # or the mapping cannot be closed
    return None if failed else min(size, sum(flag & 1 for flag in flags) * mmap.PAGESIZE)


def measure(
    model: str,
    dtype: str,
    options: Mapping[str, Any],
    repeats: int = 3,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Starts in every state of the caches, interleaved, after one that fills them. JSON values:
    `states` by name with the medians of `parts_s`, `phases_s`, `total_s` and `until_steady`, every start's
    total, and what share of the files' bytes stayed in the page cache (`pages_left`)."""
    say(f"cold start: filling the caches with {model}")
    first = start_process(model, dtype, options)
    states = [s for s in STATES if s.packed or first["runner"] == "native"]
    files = files_of(model)
    found: dict[str, list[dict[str, Any]]] = {state.name: [] for state in states}
    left: dict[str, list[float | None]] = {state.name: [] for state in states}
    for repeat in range(repeats):
        for state in states if repeat % 2 == 0 else reversed(states):
            say(f"cold start: {state.name}, {repeat + 1} of {repeats}")
            if state.cold_pages:
                left[state.name].append(drop_pages(files))
            environment = {} if state.packed else PACKED_OFF
            found[state.name].append(start_process(model, dtype, options, environment))
    return {
        "runner": first["runner"],
        "precision": first["precision"],
        "repeats": repeats,
        "files_mib": sum(file.stat().st_size for file in files) / (1 << 20),
        "states": {
            state.name: _summary(found[state.name])
            | ({"pages_left": left[state.name]} if state.cold_pages else {})
            for state in states
        },
    }


def _summary(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "parts_s": medians([start["parts"] for start in starts]),
        "phases_s": medians([phases(start["parts"]) for start in starts]),
        "total_s": statistics.median(start["total"] for start in starts),
        "totals_s": [start["total"] for start in starts],
        "until_steady": medians([until_steady(start["requests_s"]) for start in starts]),
        "requests_s": starts[-1]["requests_s"],
    }


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each name over runs, in order of appearance; a run without it counts as 0."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: statistics.median(run.get(name, 0.0) for run in runs) for name in names}


if __name__ == "__main__":
    asked, model_name, chosen_dtype, engine_options, more = sys.argv[1:6]
    print(json.dumps(one(int(asked), model_name, chosen_dtype, json.loads(engine_options), int(more))))
