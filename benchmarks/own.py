"""This engine alone, on the peers' work, with the figures that the peers' scripts print.

Owns one engine and its measurement: a warm-up, then `runs` of each part, medians. The engine is
driven as any driver does, by `submit` and `step`. Knows no peer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.common import Job, prompts, workload32
from benchmarks.contenders import THREADS, beside
from perflab.config import EngineConfig, Weights
from perflab.engine.engine import Engine
from perflab.models import machine
from perflab.models.load import load
from perflab.types import Request, SamplingParams

Precision = Literal["bf16", "int8", "int4"]
WEIGHTS: dict[Precision, Weights] = {"bf16": "model", "int8": "int8-dynamic", "int4": "int4"}


class Run(NamedTuple):
    """Seconds to the first token and to the last, the tokens, and the share of others meanwhile."""

    first_s: float
    seconds: float
    tokens: list[list[int]]
    other_cpu: float


def config(precision: Precision) -> EngineConfig:
    """As the peers are set: 16 requests at once, up to 1,024 tokens each, no prefix cache."""
    return EngineConfig(
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=1024,
        prefix_cache=False,
        weights=WEIGHTS[precision],
        num_threads=THREADS,
    )


def measure(precision: Precision, parts: str, runs: int) -> dict[str, Any]:
    """The line that a peer's script prints: decode and output in tok/s, latency in ms, memory in MB."""
    start = time.perf_counter()
    model = load("smollm2-135m", dtype="bf16", device="cpu")
    engine = Engine(model, config(precision))
    loaded = time.perf_counter() - start
    single, prefill = prompts()
    numbers = count()

    def work(jobs: Sequence[Job]) -> tuple[float, float, list[list[int]]]:
        first, origin = 0.0, time.perf_counter()
        tokens: dict[str, list[int]] = {}
        for job in jobs:
            params = SamplingParams(max_tokens=job.output_len, ignore_eos=True)
            (name,) = engine.submit(Request(str(next(numbers)), job.prompt, params))
            tokens[name] = []
        while engine.has_work:
            for event in engine.step():
                first = first or time.perf_counter() - origin
                tokens[event.request_id] += event.token_ids
        return first, time.perf_counter() - origin, list(tokens.values())

    def repeat(jobs: Sequence[Job]) -> list[Run]:
        warm = work(jobs)[2]
        found = []
        for _ in range(runs):
            (first, seconds, tokens), other = beside(lambda: work(jobs), time.process_time)
            assert [len(answer) for answer in tokens] == [job.output_len for job in jobs]
            assert tokens == warm, "the same greedy requests gave other tokens"
            found.append(Run(first, seconds, tokens, other))
        return found

    version = machine.versions().get("perflab")
    record: dict[str, Any] = {"engine": "perflab", "version": version, "precision": precision}
    if "a" in parts:
        found = repeat([Job(single, 128)])
        record["a_decode_tok_s"] = statistics.median(127 / (run.seconds - run.first_s) for run in found)
        record["a_ttft_ms"] = 1e3 * statistics.median(run.first_s for run in found)
        record["a_other_cpu"] = [run.other_cpu for run in found]
    if "b" in parts:
        found = repeat([Job(prefill, 1)])
        record["b_prefill_tok_s"] = 512 / statistics.median(run.seconds for run in found)
        record["b_other_cpu"] = [run.other_cpu for run in found]
    if "c" in parts:
        jobs = workload32()
        found = repeat(jobs)
        total = sum(job.output_len for job in jobs)
        record["c_out_tok_s"] = total / statistics.median(run.seconds for run in found)
        record["c_other_cpu"] = [run.other_cpu for run in found]
    return record | {
        "runner": type(engine.executor.runner).__name__,
        "d_peak_rss_mb": _peak_rss_mb(),
        "load_s": loaded,
    }


def _peak_rss_mb() -> int | None:
    """Of this process since its exec (`ru_maxrss` would count the parent's); None without /proc."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) >> 10 for line in status.splitlines() if line.startswith("VmHWM")), None
    )
