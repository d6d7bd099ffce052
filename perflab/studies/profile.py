"""One profile: a measured run, and beside it whichever instruments were asked for, each on runs of its own.

Owns the order of things and what each instrument is pointed at. An instrument that costs time never
observes the measured run; its cost is measured against the same work without it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from perflab.clock import NS_PER_S
from perflab.config import EngineConfig
from perflab.errors import PerflabError, StoreError
from perflab.load.run import run_load
from perflab.measure import flame, memory
from perflab.models import machine
from perflab.models.assets import NAME as EMBEDDED
from perflab.speculate.make import make_engine
from perflab.studies import cold_start
from perflab.studies.kept import kept
from perflab.studies.operators import look
from perflab.studies.service_run import LoadChoice, ServiceChoice, measure, warm
from perflab.studies.steps import Stage
from perflab.studies.store import Run, write_json, write_run
from perflab.types import Request, SamplingParams, StepRecord

FLAME_FILE = "flame.speedscope.json"
INTERVAL_S = 0.001
PROMPT, OUTPUT = 24, 4
"""Tokens of the requests that memory is watched over."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Instruments:
    """What to use beside the measured run. Of a server that is not ours: `flame` and `memory` where it
    runs on this machine, the others never."""

    cold_start: bool = False
    flame: bool = False
    operators: bool = False
    memory: bool = False
    repeats: int = 3  # starts of each kind
    leak_requests: int = 400
    pid: int | None = None  # the server's process; None finds who listens at its port


def profile(
    service: ServiceChoice, load: LoadChoice, use: Instruments, out: Path, say: Say = lambda message: None
) -> Run:
    """Measure, observe, and write the run's directory; returns the run as written.

    Raises PerflabError for an instrument that cannot see the service and StoreError for a directory that
    is taken, before anything has run.
    """
    _refuse(service, use)
    if out.exists():
        raise StoreError(f"{out} already holds something; choose another directory or delete it")
    workload = load.workload()
    with kept(service) as make:
        say("warm-up")
        warmed = warm(service, load, workload, make)
        run = measure(
            service,
            load,
            kind="profile",
            workload=workload,
            make=make,
            on_progress=lambda ended, planned: say(f"the measured run: {ended} of {planned} requests"),
        )
    run.manifest["warm_up_requests"] = warmed
    found: dict[str, Any] = {}
    sampled: flame.Flame | None = None
    if use.flame:
        say("flame graph")
        sampled, found["flame"] = (_own_flame if service.url is None else _server_flame)(service, load, use)
    if use.memory:
        say("memory")
        found["memory"] = (_own_memory if service.url is None else _server_memory)(service, run, use)
    traces = out.with_name(f".{out.name}.traces")
    if use.operators:
        say("the machine's ceilings")
        before = ceilings()
        traces.mkdir(parents=True, exist_ok=True)
        found["operators"] = look(
            service.loaded, service.config, stages(load, service.config), trace_dir=traces, say=say
        )
        found["ceilings"] = higher(before, ceilings())
    if use.cold_start:
        model = service.model or EMBEDDED
        options = _changed(service.config)
        found["cold_start"] = cold_start.measure(model, service.dtype, options, use.repeats, say)
    run.profile = found
    run.path = write_run(out, run)
    if sampled is not None:
        write_json(out / FLAME_FILE, flame.speedscope(sampled, run.variant))
    for trace in sorted(traces.glob("*.json")):
        trace.rename(out / trace.name)
    if traces.exists():
        traces.rmdir()
    return run


def _refuse(service: ServiceChoice, use: Instruments) -> None:
    if service.url is None:
        return
    for name in ("operators", "cold_start"):
        if getattr(use, name):
            raise PerflabError(
                f"--{name.replace('_', '-')} needs the model in this process: give --model instead of a URL"
            )
    if use.flame or use.memory:
        _pid(service, use)


def _pid(service: ServiceChoice, use: Instruments) -> int:
    """The server's process. Raises PerflabError where it cannot be known."""
    found = (use.pid,) if use.pid else service.local_pids()
    if not found:
        raise PerflabError(
            f"{service.url}: no process of this machine listens there, so that nothing can be said of its "
            "stacks and its memory; name one with --pid, or leave out --flame and --memory"
        )
    return found[0]


def _changed(config: EngineConfig) -> dict[str, Any]:
    plain = EngineConfig()
    return {f.name: v for f in fields(config) if (v := getattr(config, f.name)) != getattr(plain, f.name)}


def stages(load: LoadChoice, config: EngineConfig) -> list[Stage]:
    """The steps to take apart: decode of up to 8 requests at the load's lengths, prefill of one prompt."""
    rows = min(8, config.max_num_seqs, load.users or 8)
    return [Stage("decode", rows, load.input_tokens), Stage("prefill", 1, load.input_tokens)]


def ceilings() -> dict[str, Any]:
    """Bytes and operations per second that this machine reaches at best, by format."""
    device = machine.choose_device("auto")
    rates = {k: v for k, v in machine.measure_matrix_rates(device)["rates"].items() if v is not None}
    if device.type == "cpu" and machine.kernels.library() is not None:
        for name, rate in machine.measure_native_rates().items():
            rates[name] = max(rate, rates.get(name, 0.0))
    rates.setdefault("fp16", rates.get("bf16", rates["fp32"]))
    return {
        "bytes_per_s": machine.measure_bandwidth(device)["best"] * 1e9,
        "operations_per_s": {name: rate * 1e9 for name, rate in rates.items()},
    }


def higher(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The higher of two measured ceilings, each: what else runs can only lower them."""
    rates = {name: max(a["operations_per_s"][name], rate) for name, rate in b["operations_per_s"].items()}
    return {"bytes_per_s": max(a["bytes_per_s"], b["bytes_per_s"]), "operations_per_s": rates}


# -- flame graph -------------------------------------------------------------------------------


def _own_flame(
    service: ServiceChoice, load: LoadChoice, use: Instruments
) -> tuple[flame.Flame, dict[str, Any]]:
    """The load on the engine in this thread: once to warm up, then without, with and without the sampler."""

    def once() -> float:
        engine = make_engine(service.loaded, service.config, runner=service.runner)
        try:
            return busy_s(run_load(engine, load.workload(), service.encoder).steps)
        finally:
            engine.close()

    once()
    before = once()
    with flame.sampled(INTERVAL_S) as found:
        observed = once()
    after = once()
    plain = (before + after) / 2
    about = {"compared": "seconds in engine steps", "spread": abs(after - before) / plain}
    return found, _about(found) | about | {"overhead": observed / plain - 1}


def busy_s(steps: list[StepRecord]) -> float:
    """Seconds inside engine steps: what a load waits for is not in it."""
    return sum(step.delivered_ns - step.start_ns for step in steps) / NS_PER_S


def _server_flame(
    service: ServiceChoice, load: LoadChoice, use: Instruments
) -> tuple[flame.Flame, dict[str, Any]]:
    """The load once more while py-spy looks at the server."""
    done = threading.Event()

    def again() -> None:
        while not done.is_set():
            measure(service, load)

    worker = threading.Thread(target=again, daemon=True)
    worker.start()
    try:
        found = flame.watch(_pid(service, use), 5)
    finally:
        done.set()
        worker.join()
    return found, _about(found) | {"overhead": None}


def _about(found: flame.Flame) -> dict[str, Any]:
    facts = {f.name: getattr(found, f.name) for f in fields(found) if f.name != "stacks"}
    return facts | {"stacks": len(found.stacks)}


# -- memory ------------------------------------------------------------------------------------


def _own_memory(service: ServiceChoice, run: Run, use: Instruments) -> dict[str, Any]:
    """Short requests one wave after the other on an engine that keeps few records, with a pool so small that
    all of it is in memory soon; resident memory after each wave, Python objects before and after."""
    size = min(8, service.config.max_num_seqs)
    blocks = 2 * size * -(-(PROMPT + OUTPUT) // service.config.block_size)  # all of them touched at once
    config = replace(service.config, keep_records=use.leak_requests // 8, num_blocks=blocks)
    gc.collect()  # earlier engines
    engine = make_engine(service.loaded, config, runner=service.runner)
    counts: list[int] = []
    resident: list[int] = []
    before: dict[str, memory.Objects] = {}

    def wave(start: int, size: int) -> None:
        for number in range(start, start + size):
            ids = [(number * 31 + i * 7) % 256 for i in range(PROMPT)]
            params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
            engine.submit(Request(f"memory-{number}", ids, params))
        while engine.has_work:
            engine.step()

    try:
        for start in range(0, use.leak_requests, size):
            if not before and start >= use.leak_requests // 8:
                before = memory.python_objects()
            wave(start, size)
            counts.append(start + size)
            resident.append(memory.resident_bytes())
        grown = memory.growth(before, memory.python_objects())
        kv = getattr(engine.executor, "kv", None)
    finally:
        engine.close()
    block = (kv.key.nbytes + kv.value.nbytes) // kv.key.shape[1] if kv is not None else 0
    return {
        "of": "this process",
        "resident": memory.resident(),
        "allocators": memory.allocators(),
        "kv_pool": memory.kv_pool_bytes(run.steps, block) if block else None,
        "objects": [[name, *changed] for name, changed in grown[:15]],
        "samples": [counts, resident],
        "leak": asdict(memory.leak_verdict(counts, resident)),
        "whole_pool": True,
    }


def _server_memory(service: ServiceChoice, run: Run, use: Instruments) -> dict[str, Any]:
    """The server's resident memory while it answers short requests, eight at a time."""
    pid = _pid(service, use)
    short = LoadChoice(input_tokens=PROMPT, output_tokens=OUTPUT, users=8, requests=use.leak_requests)
    samples: list[tuple[int, int]] = []

    async def beside(clock: Any, _samples: Any) -> None:
        import asyncio

        while True:
            samples.append((clock.now(), memory.resident_bytes(pid)))
            await asyncio.sleep(0.1)

    again = measure(service, short, beside=[beside])
    ends = sorted(r.end_ns for r in again.requests if r.end_ns is not None)
    counts = [sum(end <= at for end in ends) for at, _ in samples]
    resident = [rss for _, rss in samples]
    return {
        "of": f"process {pid}",
        "resident": memory.resident(pid),
        "allocators": {},
        "kv_pool": None,
        "objects": [],
        "samples": [counts, resident],
        "leak": asdict(memory.leak_verdict(counts, resident)),
        "whole_pool": False,
    }
