"""Which of two is faster: short runs in pairs whose order is drawn by lot, and a verdict with its interval.

Owns the order of things. The statistics are `measure.paired`'s, what a pair's runs leave on disk
`compare_result`'s. Pairs are many and short because noise of a machine comes in stretches: two short
runs, one right after the other, mostly meet the same one.
"""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perflab.config import check_types
from perflab.errors import WorkloadError
from perflab.load.drive import Service, drive, new_loop
from perflab.load.workloads import PromptEncoder, Workload
from perflab.measure.paired import FEWEST_PAIRS
from perflab.measure.validity import NoiseSampler
from perflab.studies.compare_result import METRICS, Compared, Slice, conclude, joined
from perflab.studies.manifest import describe_service_run
from perflab.studies.service_run import LoadChoice, ServiceChoice
from perflab.studies.session import Progress, duration
from perflab.studies.store import Run

MOST_PAIRS = 400
FEW_REQUESTS = 4
"""Requests of one run where the load doesn't say."""

EXCUSED = ("machine too noisy", "no steady state", "too few samples")
"""Reasons of one side's verdict that pairs answer for: their spread holds the noise, and they are many."""

EXCUSED_HERE = (*EXCUSED, "client-bound")
"""Those of an engine in this process: what else burdens the machine delays its client as well."""


@dataclass(frozen=True, slots=True)
class Compare:
    """How a comparison goes. minutes: of all pairs; loading and quality come on top. pairs: so many, however
    long they take; None takes what fits into the time. Nobody stops when the answer suits: how long two
    runs take together doesn't tell which of them is which. metric: what the answer is about, one of
    `METRICS`; None takes tokens for a closed loop, e2e for an open one. allow_invalid: answer although a
    side's verdict is invalid.
    """

    minutes: float = 1.0
    pairs: int | None = None
    metric: str | None = None
    confidence: float = 0.95
    quality: bool = True
    allow_invalid: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self, WorkloadError)
        if self.minutes <= 0 or not 0.5 <= self.confidence < 1:
            raise WorkloadError(
                f"minutes={self.minutes} above 0 and confidence={self.confidence} from 0.5 below 1"
            )
        if self.pairs is not None and not FEWEST_PAIRS <= self.pairs <= 2000:
            raise WorkloadError(f"pairs={self.pairs}: at least {FEWEST_PAIRS} can answer, at most 2000")
        if self.metric not in (None, *METRICS):
            raise WorkloadError(f"metric={self.metric!r}: choose one of {', '.join(METRICS)}")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: how to make it and how to write prompts for it. `choice` is None for a fake."""

    name: str
    make: Callable[[], Service]
    encoder: PromptEncoder | None = None
    choice: ServiceChoice | None = None

    @classmethod
    def of(cls, choice: ServiceChoice, name: str) -> Side:
        return cls(name, choice.make, choice.encoder, choice)


def run_compare(
    a: Side,
    b: Side,
    load: LoadChoice,
    compare: Compare,
    out_dir: Path,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Compared:
    """Measure `a` and `b` in pairs and write both, and `compare.json`, into `out_dir`.

    Each run of a pair asks the same amount of work under another salt, so that neither finds the other's
    prompts cached where both are one server. Ctrl-C ends it and keeps the whole pairs. Raises StoreError
    where `out_dir` holds something.
    """
    session = _Session((a, b), load, compare, progress)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(session.run())
    finally:
        gc.unfreeze()
    return conclude(session.sides(), compare, load, out_dir, session.quality, session.interrupted)


class _Session:
    """One execution: its two services, the slices so far."""

    def __init__(
        self,
        sides: tuple[Side, Side],
        load: LoadChoice,
        compare: Compare,
        progress: Callable[[Progress], None],
    ) -> None:
        if load.requests is None and load.duration_s is None:
            load = replace(load, requests=load.users or FEW_REQUESTS)
        self.both, self.load, self.compare, self.progress = sides, load, compare, progress
        self.slices: tuple[list[Slice], list[Slice]] = ([], [])
        self.rng = random.Random(compare.seed)
        self.run_salt = secrets.token_hex(2)
        self.facts: list[dict[str, Any]] = []
        self.quality: dict[str, Any] = {}
        self.interrupted = False

    async def run(self) -> None:
        self.say(
            "load",
            f"This comparison takes at most {duration(60 * self.compare.minutes)} beside loading.",
            0.0,
        )
        async with self.both[0].make() as first, self.both[1].make() as second:
            services = first, second
            for i in (0, 1):
                await self.slice(services, i, -2)  # the first run of all touches memory and makes threads
            began = time.perf_counter()
            for i in (0, 1):
                await self.slice(services, i, -1)
            pair_s = time.perf_counter() - began
            self.facts = [service.describe() for service in services]
            few = self.compare.pairs or max(
                FEWEST_PAIRS, min(MOST_PAIRS, int(60 * self.compare.minutes / pair_s))
            )
            self.say(
                "plan", f"About {few} pairs of runs of {pair_s / 2:.2g} s, the order of each by lot.", 0.0
            )
            gc.collect()
            gc.freeze()  # what is there by now need not be looked at again between the runs
            pids = [pid for side in self.both if side.choice for pid in side.choice.local_pids()]
            self.noise = NoiseSampler(tuple(pids)).start()
            try:
                await self.pairs(services)
            finally:
                self.seen_noise = self.noise.stop()
            if self.compare.quality and not self.interrupted:
                from perflab.studies.compare_quality import beside

                self.say("quality", "Quality of both", 1.0)
                self.quality = await beside(self.both, services, self.load, self.run_salt)

    async def pairs(self, services: tuple[Service, Service]) -> None:
        """Pair after pair, at least as many as can answer, none that is likely to end after the time."""
        began = time.perf_counter()
        for number in range(self.compare.pairs or MOST_PAIRS):
            spent = time.perf_counter() - began
            share = spent * (number + 1) / max(1, number) / (60 * self.compare.minutes)
            if self.compare.pairs is None and number >= FEWEST_PAIRS and share > 1:
                return
            order = (0, 1) if self.rng.random() < 0.5 else (1, 0)
            made: dict[int, Slice] = {}
            for i in order:
                made[i] = await self.slice(services, i, number)
                if made[i].records.interrupted:
                    self.interrupted = True
                    return
            for i in (0, 1):
                self.slices[i].append(replace(made[i], first=order[0] == i))
            share = (number + 1) / self.compare.pairs if self.compare.pairs else min(1.0, share)
            self.say("run", f"pair {number + 1}", share)

    async def slice(self, services: tuple[Service, Service], i: int, number: int) -> Slice:
        """One short run of one side."""
        workload = self.workload(i, number)
        seen = len(getattr(services[i], "steps", ()))
        records = await drive(
            services[i],
            workload,
            pacing=self.load.pacing(),
            encoder=self.both[i].encoder,
            limits=self.load.limits,
            timeout_s=self.load.timeout_s,
            collect=False,
        )
        records.steps = records.steps[seen:]
        if self.both[i].encoder is None:  # only the server knows how long prompts were
            for record in records.requests:
                record.prompt_tokens = record.server_prompt_tokens or record.prompt_tokens
        return Slice(number, workload, records)

    def workload(self, i: int, number: int) -> Workload:
        """The same requests for both sides, other ones in every round; ids that differ over the rounds."""
        made = replace(self.load, seed=self.load.seed + number + 3).workload()
        named = tuple(replace(r, request_id=f"{number:03d}-{r.request_id}") for r in made.requests)
        salt = f"{self.run_salt}{number + 2:x}{'ab'[i]}"
        return replace(made, requests=named).salted(salt if self.load.salt else "")

    def sides(self) -> list[Run]:
        """Each side's slices as one run, with its verdict."""
        runs = []
        open_loop = self.load.pacing().open_loop and self.load.rate_per_s is not None
        for i, side in enumerate(self.both):
            workload, records = joined(self.slices[i])
            manifest = describe_service_run(
                kind="compare",
                variant=side.name,
                service=self.facts[i],
                workload=workload,
                records=records,
                load=self.load.describe(),
                open_loop=open_loop,
                noise=self.seen_noise,
                slo=self.load.slo,
                exact_prompts=side.encoder is not None,
            )
            validity = manifest["validity"]
            names = EXCUSED_HERE if self.facts[i].get("kind") == "engine" else EXCUSED
            excused = [reason for reason in validity["reasons"] if reason[0] in names]
            validity["reasons"] = [reason for reason in validity["reasons"] if reason[0] not in names]
            validity["notes"] += [f"{name}: {detail}" for name, detail in excused]
            manifest["slices"] = [s.facts() for s in self.slices[i]]
            runs.append(Run(manifest, records.requests, records.steps, records.events))
        return runs

    def say(self, stage: str, message: str, fraction: float) -> None:
        self.progress(Progress(stage, message, fraction, None))
