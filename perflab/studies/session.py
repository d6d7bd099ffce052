"""One execution of a study: models, pilot, reference, interleaved rounds, the directory it fills.

Owns the order of things. Metrics, plans and formats belong to others.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perflab.config import EngineConfig
from perflab.errors import PerflabError, StoreError, WorkloadError
from perflab.load.run import RunRecords, run_load
from perflab.load.workloads import PromptEncoder, Synthetic, TimedRequest, Workload
from perflab.measure import metrics
from perflab.measure.validity import NoiseSampler
from perflab.studies import plan, quality, store
from perflab.studies.define import Study, Variant
from perflab.studies.manifest import describe_run, texts_of
from perflab.studies.store import Run
from perflab.types import SamplingParams

WARM_UP = tuple(
    TimedRequest(f"warm-up-{i}", Synthetic(24, seed=9001 + i), SamplingParams(max_tokens=3, ignore_eos=True))
    for i in range(2)
)
"""What every fresh engine does before its run is measured; its prompts share nothing with a study's."""


class Progress(NamedTuple):
    """Where a study is. `fraction` is 0 to 1 of its time, `left_s` the time still needed (an estimate)."""

    stage: str  # load, pilot, reference, run, done
    message: str
    fraction: float
    left_s: float | None


class Session:
    """One execution of a study; owns its models, its costs so far and its directory."""

    def __init__(
        self, study: Study, out_dir: Path, say: Callable[[Progress], None], load: Any, make: Any
    ) -> None:
        self.study, self.out_dir, self._progress = study, out_dir, say
        self._load, self._make = load or _load_model, make or EngineMaker()
        self.began = time.perf_counter()
        self.models: dict[str, Any] = {}
        self.costs: dict[str, float] = {}
        self.done: dict[tuple[str, int], float] = {}
        self.quality: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self.outputs: dict[str, list[int]] = {}
        self.references: list[np.ndarray] = []
        self.texts: list[list[int]] = []

    # directory

    def open(self, resume: bool) -> None:
        """Claim the directory: a new one, or one that holds this very study."""
        facts = self.out_dir / "study.json"
        if self.out_dir.exists() and not self.out_dir.is_dir():
            raise StoreError(f"{self.out_dir} is a file; name a directory for the study")
        if facts.exists():
            held = store.read_json(facts)
            if held.get("fingerprint") != self.study.fingerprint:
                raise StoreError(
                    f"{self.out_dir} holds another study; choose another directory, or replace it "
                    "(perflab study --fresh)"
                )
            if not resume:
                raise StoreError(
                    f"{self.out_dir} holds this study already; resume it or choose another directory"
                )
        elif self.out_dir.exists() and any(self.out_dir.iterdir()):
            raise StoreError(f"{self.out_dir} is not empty and holds no study; choose another directory")
        (self.out_dir / "runs").mkdir(parents=True, exist_ok=True)
        if not facts.exists():
            declaration = self.study.declaration()
            store.write_json(facts, {"fingerprint": self.study.fingerprint, "declaration": declaration})
        for path in store.run_dirs(self.out_dir):
            manifest = store.read_json(path / "manifest.json")
            self.done[manifest["variant"], manifest["round"]] = manifest["cost_s"]
        if (self.out_dir / "quality.json").exists():
            self.quality = store.read_json(self.out_dir / "quality.json")

    # the whole

    def run(self) -> None:
        """Everything that is left to do. Raises KeyboardInterrupt where Ctrl-C cut it short."""
        budget, plan_file = self.study.time_budget_s, self.out_dir / "plan.json"
        if plan_file.exists() and store.read_json(plan_file).get("finished"):
            self._progress(Progress("done", f"{self.out_dir} holds this study, finished.", 1.0, 0.0))
            return
        gc.freeze()  # what is imported by now need not be looked at again before each run
        self.say("load", f"This study takes about {duration(budget)} at most; loading {self.study.model}.")
        first = self.study.variants[0]
        encoder = _encoder(self.model(first.dtype))
        workload, fewest = self.sized(first, encoder)
        if any(v.name not in self.quality for v in self.study.variants) or self._left(workload, fewest):
            self.make_reference(workload)
        self.say("run", f"About {duration(self.left_s(workload, fewest))} to go.", workload, fewest)
        while (turn := self.next_turn(workload, fewest)) is not None:
            variant, number = turn
            self.say("run", f"{variant.name}, round {number + 1}", workload, fewest)
            try:
                self.measure(variant, number, workload)
            except PerflabError as error:
                if variant is first:
                    raise
                self.failures[variant.name] = str(error)
                store.write_json(self.out_dir / "failures.json", self.failures)
        store.write_json(plan_file, {**store.read_json(plan_file), "finished": True})
        self._progress(Progress("done", f"Done in {duration(time.perf_counter() - self.began)}.", 1.0, 0.0))

    def say(self, stage: str, message: str, workload: Workload | None = None, fewest: int = 0) -> None:
        spent = time.perf_counter() - self.began
        left = self.left_s(workload, fewest) if workload else max(1.0, self.study.time_budget_s - spent)
        self._progress(Progress(stage, message, spent / (spent + left) if spent + left else 1.0, left))

    # models and sizes

    def model(self, dtype: str) -> Any:
        """The study's model in a dtype, loaded once."""
        if dtype not in self.models:
            trust = {"trust_remote_code": True} if self.study.trust_remote_code else {}
            self.models[dtype] = self._load(self.study.model, dtype=dtype, device=self.study.device, **trust)
        return self.models[dtype]

    def sized(self, first: Variant, encoder: PromptEncoder) -> tuple[Workload, int]:
        """The part of the workload that fits the time budget, from a pilot of the first variant.

        Kept in `plan.json`, so that a resumed study asks the same of every variant.
        """
        kept = self.out_dir / "plan.json"
        full = self.study.workload
        if not kept.exists():
            self.say("pilot", f"Pilot of {first.name}")
            with self.engine(first) as engine:
                pace = self._pilot(engine, encoder)
            left = self.study.time_budget_s - (time.perf_counter() - self.began)
            total = sum(v.relative_cost for v in self.study.variants)
            fitted, fewest = plan.fit_workload(full, pace, total, self.study.min_repeats, left)
            longest = max(r.params.max_tokens or 0 for r in fitted.requests)
            store.write_json(
                kept,
                {
                    "requests": len(fitted.requests),
                    "max_tokens": longest,
                    "min_repeats": fewest,
                    "first_token_s": pace.first_token_s,
                    "next_token_s": pace.next_token_s,
                },
            )
        held = store.read_json(kept)
        chosen = full.first(held["requests"], held["max_tokens"] or None)
        if chosen.requests != full.requests:
            cut = f"cut to {held['requests']} requests and {held['max_tokens']} output tokens to fit the time"
            chosen = replace(chosen, description=f"{full.description}; {cut}".removeprefix("; "))
        estimate = plan.Pace(held["first_token_s"], held["next_token_s"]).estimate_s(chosen)
        self.costs = {v.name: estimate * v.relative_cost for v in self.study.variants}
        return chosen, held["min_repeats"]

    def _pilot(self, engine: Any, encoder: PromptEncoder) -> plan.Pace:
        """The pace of the first prompts, alone: the fastest of what is seen, so that a busy moment of
        the machine does not make the whole study smaller."""
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        seen = []
        for i, request in enumerate(self.study.workload.requests[:3]):
            one = TimedRequest(f"pilot-{i}", request.prompt, params)
            seen += drive(engine, Workload("pilot", (one,)), encoder).requests
        firsts = [value for r in seen if (value := metrics.ttft_s(r)) is not None]
        gaps = [gap for r in seen for gap in metrics.itl_s(r)]
        if not firsts:
            raise WorkloadError(
                f"the first requests of {self.study.workload.name!r} brought no token: {seen[0].error}"
            )
        return plan.Pace(min(firsts), min(gaps, default=0.0))

    def make_reference(self, workload: Workload) -> None:
        """Greedy outputs and logits of the fp32 reference, each prompt alone."""
        dtype = self.study.reference_dtype
        if dtype is None:
            return
        self.say("reference", "Reference outputs in full precision")
        variant = Variant("reference", {**self.study.variants[0].config, **quality.REFERENCE}, dtype)
        encoder = _encoder(self.model(dtype))
        with self.engine(variant) as engine:
            records = drive(engine, workload, encoder)
            completed = {r.request_id for r in records.requests if r.outcome == "completed"}
            self.outputs = {name: out for name, out in records.outputs.items() if name in completed}
            self.texts = quality.texts(encoder, self.study.quality_texts)
            self.references = quality.logits(engine.executor, self.texts) if self.texts else []

    # rounds

    def variants(self) -> list[Variant]:
        return [v for v in self.study.variants if v.name not in self.failures]

    def _left(self, workload: Workload, fewest: int) -> dict[str, int]:
        """Rounds that each variant still has to run."""
        now = time.perf_counter() - self.began
        spent = sum(self.done.values())
        costs = {v.name: self.cost(v.name) for v in self.variants()}
        if now > plan.OVERTIME * self.study.time_budget_s:
            done = Counter(name for name, _ in self.done)
            fewest = min(fewest, plan.fewest_in_overtime(costs, done, self.study.time_budget_s))
        rounds = plan.rounds_for(costs, self.study.time_budget_s - now + spent, fewest, self.study.repeats)
        left = {name: sum((name, i) not in self.done for i in range(rounds[name])) for name in costs}
        return {name: number for name, number in left.items() if number}

    def cost(self, name: str) -> float:
        """Seconds of one run of a variant: the least of those done (the first also packs weights and
        scores quality), else the estimate."""
        return min((s for (variant, _), s in self.done.items() if variant == name), default=self.costs[name])

    def left_s(self, workload: Workload, fewest: int) -> float:
        return sum(self.cost(name) * number for name, number in self._left(workload, fewest).items())

    def next_turn(self, workload: Workload, fewest: int) -> tuple[Variant, int] | None:
        """The earliest round that is not complete, variants in order: ABC, ABC, …"""
        left = self._left(workload, fewest)
        turns = []
        for position, variant in enumerate(self.variants()):
            if variant.name in left:
                number = next(i for i in range(self.study.repeats) if (variant.name, i) not in self.done)
                turns.append((number, position, variant))
        if not turns:
            return None
        number, _, variant = min(turns, key=lambda turn: turn[:2])
        return variant, number

    @contextmanager
    def engine(self, variant: Variant) -> Iterator[Any]:
        """A fresh engine on the shared model, closed at the end.

        Not after Ctrl-C: a step may have been torn apart, and nobody uses that engine again.
        """
        engine = self._make(self.model(variant.dtype), self.study.engine_config(variant))
        try:
            yield engine
        except Exception:
            engine.close()
            raise
        engine.close()

    def measure(self, variant: Variant, number: int, workload: Workload) -> None:
        """One run: fresh engine, warm-up, load, verdict, disk."""
        began = time.perf_counter()
        encoder = _encoder(self.model(variant.dtype))
        with self.engine(variant) as engine:
            built = time.perf_counter()
            drive(engine, Workload("warm-up", WARM_UP), encoder)
            warmed = time.perf_counter()
            gc.collect()  # so that no collection of older garbage falls into the run
            sampler = NoiseSampler().start()
            records = drive(engine, workload, encoder)
            noise = sampler.stop()
            manifest = describe_run(self.study, variant, number, workload, records, noise, engine)
            manifest |= {"build_s": built - began, "warm_up_s": warmed - built}
            manifest["greedy_match"] = quality.greedy_match(self.outputs, records)
            manifest["cost_s"] = time.perf_counter() - began
            model = self.model(variant.dtype)
            texts = texts_of(workload, encoder, records, model) if self.study.keep_texts else None
            self.score(variant, engine)
        run = Run(manifest, records.requests, records.steps, records.events, texts=texts)
        position = [v.name for v in self.study.variants].index(variant.name)
        store.write_run(self.out_dir / "runs" / f"{position:02d}-{slug(variant.name)}-r{number}", run)
        self.done[variant.name, number] = manifest["cost_s"]

    def score(self, variant: Variant, engine: Any) -> None:
        """Quality of the variant's numeric configuration, once; kept in `quality.json`."""
        key = quality.numeric_key(self.study.engine_config(variant), variant.dtype)
        if not self.references or variant.name in self.quality:
            return
        same = [held for held in self.quality.values() if held["key"] == key]
        found = same[0] if same else quality.measure_fidelity(engine.executor, self.references, self.texts)
        self.quality[variant.name] = {**found, "key": key}
        store.write_json(self.out_dir / "quality.json", self.quality)


def drive(engine: Any, workload: Workload, encoder: PromptEncoder) -> RunRecords:
    """A whole run; KeyboardInterrupt for one that Ctrl-C cut short."""
    records = run_load(engine, workload, encoder)
    if records.interrupted:
        raise KeyboardInterrupt
    return records


def _encoder(model: Any) -> PromptEncoder:
    return PromptEncoder(model.encode, model.chat)


def _load_model(name: str, **options: Any) -> Any:
    from perflab.models.load import load

    return load(name, **options)


class EngineMaker:
    """Makes engines that share one runner per model and kind of weights: packing takes seconds."""

    def __init__(self) -> None:
        self._runners: dict[tuple[object, ...], Any] = {}

    def __call__(self, model: Any, config: EngineConfig) -> Any:
        from perflab.models.runners import make_runner, runner_key
        from perflab.speculate.make import make_engine

        key = id(model), *runner_key(config)
        if key not in self._runners:
            self._runners[key] = make_runner(model, config)
        return make_engine(model, config, runner=self._runners[key])


def slug(name: str) -> str:
    """A variant's name as part of a directory name."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split()) or "variant"


def duration(seconds: float) -> str:
    """Seconds for people: 8 s, 4.5 min."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.1f} min"
