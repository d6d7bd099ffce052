"""The experiment on hardware limits: what the machine gives at best, and steps of the engine beside it.

Owns which runners and regimes are tried and how a step is timed. The formulas are `roofline`'s, the
pictures `panels`'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perflab.clock import NS_PER_S
from perflab.config import EngineConfig
from perflab.load.workloads import Workload, synthetic
from perflab.measure import roofline, stats
from perflab.measure.roofline import Ceilings, Floor, Sizes, Work
from perflab.models import kernels, machine
from perflab.models.load import load
from perflab.models.packing import why_not
from perflab.types import StepRecord
from perflab.widgets.lessons import Bench, Progress

FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Ceilings of this machine: bytes read per second, and operations per second by format of the weights
    (that in which their products are done)."""

    bytes_per_s: float
    operations_per_s: Mapping[str, float]

    def of(self, weights: str) -> Ceilings:
        return Ceilings(self.bytes_per_s, self.operations_per_s[weights])

    def higher(self, other: Limits) -> Limits:
        """The higher of two measurements of each: what else runs can only lower them."""
        rates = {
            name: max(rate, other.operations_per_s[name]) for name, rate in self.operations_per_s.items()
        }
        return Limits(max(self.bytes_per_s, other.bytes_per_s), rates)


def measure_limits() -> Limits:
    """The fastest of several read loops and matrix products on this CPU."""
    rates = machine.measure_matrix_rates()["rates"]
    found = {name: 1e9 * (rates[name] or rates["fp32"]) for name in ("fp32", "bf16", "int8")}
    by_int8 = dict.fromkeys(("int8-dynamic", "int4"), found.pop("int8"))
    return Limits(1e9 * machine.measure_bandwidth()["best"], {**found, "int8": found["fp32"], **by_int8})


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run the model: switches of the engine, and the formats of its weights and its KV."""

    name: str
    config: Mapping[str, Any]
    weights: str
    kv: str


def bench(name: str) -> Bench:
    """A bench with the model on this CPU."""
    return Bench(load(name, device="cpu"))


def variants(bench: Bench, weights: Sequence[str] = ("model", "int8-dynamic")) -> tuple[list[Variant], str]:
    """The torch runner, and the native one with each kind of weights; why the latter is missing, if it is."""
    model = FORMATS[bench.model.dtype]
    found = [Variant(f"torch, {model}", {"runner": "torch"}, model, model)]
    why = kernels.why_missing() or why_not(bench.model.module)
    for kind in () if why else weights:
        format = model if kind == "model" else kind
        found.append(Variant(f"native, {format}", {"runner": "native", "weights": kind}, format, model))
    return found, why


@dataclass(frozen=True, slots=True)
class Regime:
    """A kind of step: `requests` that each get a token after `context` tokens, or a whole prompt of `context`
    (one request, nothing decoded)."""

    name: str
    requests: int
    context: int
    prompt: bool = False

    def work(self, sizes: Sizes, weights: str, kv: str) -> Work:
        if self.prompt:
            return roofline.prefill(sizes, self.context, weights, kv)
        return roofline.decode(sizes, self.requests, self.context, weights, kv)

    def workload(self, steps: int) -> Workload:
        """Requests whose decode steps have `context` tokens behind them on average."""
        if self.prompt:
            return synthetic(1, self.context, (1,), name=self.name)
        return synthetic(self.requests, self.context - steps // 2, (steps + 1,), name=self.name)

    def is_mine(self, step: StepRecord) -> bool:
        """Whether all the requests, and nothing else, were in the step."""
        return step.rows == self.requests and (step.prefill_tokens > 0) == self.prompt


def regimes(requests: int = 16, context: int = 64, prompt: int = 512) -> list[Regime]:
    return [
        Regime("1 request", 1, context),
        Regime(f"{requests} requests", requests, context),
        Regime(f"prompt of {prompt}", 1, prompt, prompt=True),
    ]


@dataclass(frozen=True, slots=True)
class Point:
    """Steps of one variant in one regime: seconds of each round's median step, beside their floor."""

    variant: Variant
    regime: Regime
    work: Work
    floor: Floor
    seconds: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def operations_per_s(self) -> float:
        return self.work.operations / self.step_s

    @property
    def share(self) -> float:
        """Of the ceiling: floor over measured."""
        return self.floor.share(self.step_s)

    @property
    def times_floor(self) -> stats.Estimate:
        """Measured over floor, with an interval over rounds."""
        return stats.geometric_mean([seconds / self.floor.seconds for seconds in self.seconds])


def measure(
    bench: Bench,
    variants: Sequence[Variant],
    regimes: Sequence[Regime],
    limits: Limits,
    steps: int = 12,
    rounds: int = 3,
    progress: Progress | None = None,
    again: Callable[[], Limits] = measure_limits,
) -> tuple[list[Point], Limits]:
    """Steps of every variant in every regime, and the limits, which are measured `again` at the end.

    All in turn, `rounds` times after a warm-up; a step counts from its plan to the delivery of its tokens.
    """
    say = progress or (lambda message: None)
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for variant in variants if number % 2 else reversed(variants):
            for regime in regimes:
                say(f"round {number} of {rounds}: {variant.name}, {regime.name}" if number else "warming up")
                found = _step_s(bench, variant, regime, steps if number else 2)
                seconds.setdefault((variant.name, regime.name), []).extend([found] if number else [])
    sizes, limits = Sizes.of(bench.model.config), limits.higher(again())
    points = []
    for variant in variants:
        for regime in regimes:
            work = regime.work(sizes, variant.weights, variant.kv)
            floor = roofline.floor(work, limits.of(variant.weights))
            points.append(Point(variant, regime, work, floor, tuple(seconds[variant.name, regime.name])))
    return points, limits


def _step_s(bench: Bench, variant: Variant, regime: Regime, steps: int) -> float:
    """Median seconds of the regime's steps in one run."""
    workload = regime.workload(steps)
    tokens = sum(request.prompt_length or 0 for request in workload.requests)
    config = EngineConfig(
        max_num_seqs=regime.requests,
        max_num_batched_tokens=max(tokens, 512),
        prefix_cache=False,
        **variant.config,
    )
    run = bench.run(config, workload)
    mine = [step for step in run.steps if regime.is_mine(step)]
    return statistics.median(step.delivered_ns - step.start_ns for step in mine) / NS_PER_S
