"""The small experiments that notebooks run, as plain functions of a model.

Owns predictions and their verdicts, and a bench that keeps one model ready: one answer as it
streams, two configurations in turn, the split of a batch's latency. Draws nothing: `panels` shows
what these return.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from perflab.config import EngineConfig
from perflab.load.run import RunRecords, run_load
from perflab.load.workloads import PromptEncoder, Workload, synthetic
from perflab.measure import capacity, latency, metrics, stats
from perflab.measure.latency import Decomposition
from perflab.measure.metrics import SLO
from perflab.models.load import load
from perflab.models.loaded import LoadedModel
from perflab.studies import store
from perflab.studies.service_run import LoadChoice, ServiceChoice
from perflab.studies.session import EngineMaker
from perflab.studies.sweep import Sweep, run_sweep
from perflab.studies.sweep_result import SweepResult
from perflab.types import Request, RequestRecord, SamplingParams, TokenEvent

Progress = Callable[[str], None]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a reader says before measuring."""

    question: str
    value: float
    unit: str = ""


Answer = Literal["holds", "too low", "too high", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a prediction agreed with the measurement, and the sentence that says so."""

    answer: Answer
    text: str


def judge(prediction: Prediction, measured: stats.Estimate, tolerance: float = 0.1) -> Verdict:
    """A prediction holds within `tolerance` of the measured value, and is off outside its interval.

    In between the answer is `cannot tell`: an interval so wide proves nothing. Without an interval
    (one run) only the tolerance counts, and the sentence says so.
    """
    if measured.value is None:
        return Verdict("cannot tell", "Nothing was measured, so nothing can be said about the prediction.")
    unit, guess, value = prediction.unit, prediction.value, measured.value
    mine, shown = f"Your prediction of {_short(guess)}{unit}", f"measured {_short(value)}{unit}"
    if measured.confidence == 1:
        shown = f"counted {_short(value)}{unit}"
    elif measured.low is not None and measured.high is not None:
        shown += f" ({measured.confidence:.0%} interval {_short(measured.low)} to {_short(measured.high)})"
    else:
        shown += " (one run, so without an interval)"
    if abs(guess - value) <= tolerance * abs(value):
        return Verdict("holds", f"{mine} holds: {shown}.")
    if measured.low is not None and measured.high is not None and measured.low <= guess <= measured.high:
        return Verdict("cannot tell", f"{mine} lies in the interval, but so does much else: {shown}.")
    answer: Answer = "too low" if guess < value else "too high"
    return Verdict(answer, f"{mine} was {answer}: {shown}.")


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class Paired:
    """Two configurations under the same load, run in turn. Rates are output tokens per second."""

    names: tuple[str, str]
    comparison: stats.Comparison
    rates: tuple[list[float], list[float]]
    runs: tuple[RunRecords, RunRecords] = field(repr=False)  # of the last round


class Bench:
    """One model on a bench: every experiment gets a fresh engine on the same prepared weights."""

    def __init__(
        self, model: LoadedModel, make_engine: Callable[[Any, EngineConfig], Any] | None = None
    ) -> None:
        self.model = model
        self._make = make_engine or EngineMaker()
        self._encoder = PromptEncoder(model.encode, model.chat)

    @classmethod
    def of(cls, name: str = "smollm2-135m", dtype: str = "auto") -> Bench:
        """A bench for a model by name, as `perflab.models.load.load` takes it."""
        return cls(load(name, dtype=dtype))

    def run(self, config: EngineConfig, workload: Workload) -> RunRecords:
        """One run on a fresh engine: nothing is left of earlier runs, the prefix cache included."""
        with closing(self._make(self.model, config)) as engine:
            return run_load(engine, workload, self._encoder)

    def stream(
        self, prompt: str, params: SamplingParams, config: EngineConfig | None = None
    ) -> Iterator[tuple[TokenEvent, RequestRecord]]:
        """One answer as it comes: each event with the request's record so far."""
        with closing(self._make(self.model, config or EngineConfig())) as engine:
            engine.submit(Request("stream", self.model.chat(prompt), params))
            while engine.has_work:
                for event in engine.step():
                    yield event, engine.records[-1]

    def rounds(
        self,
        cases: Mapping[K, tuple[EngineConfig, Workload]],
        rounds: int = 3,
        progress: Progress | None = None,
    ) -> dict[K, list[RunRecords]]:
        """Run every case in turn, `rounds` times, after a warm-up of each; runs by case, in order.

        The order turns around from round to round (ABC, CBA, …), so that a machine that slows down
        favours none.
        """
        say = progress or (lambda message: None)
        done: dict[K, list[RunRecords]] = {name: [] for name in cases}
        for name, (config, workload) in cases.items():
            say(f"warming up: {name}")
            self.run(config, workload.first(2, max_tokens=2))
        for number in range(rounds):
            for name in cases if number % 2 == 0 else reversed(list(cases)):
                say(f"round {number + 1} of {rounds}: {name}")
                done[name].append(self.run(*cases[name]))
        return done

    def paired(
        self,
        variants: Mapping[str, EngineConfig],
        workload: Workload,
        rounds: int = 3,
        progress: Progress | None = None,
    ) -> Paired:
        """Two configurations under one load, in turn. Raises ValueError unless there are two."""
        if len(variants) != 2:
            raise ValueError(f"{len(variants)} variants: a pair needs two")
        runs = self.rounds({name: (config, workload) for name, config in variants.items()}, rounds, progress)
        (first, a), (second, b) = runs.items()
        rates = [tokens_per_s(run) for run in a], [tokens_per_s(run) for run in b]
        return Paired((first, second), stats.compare(*rates), rates, (a[-1], b[-1]))

    def split(
        self, prompt_tokens: int, requests: int, output_tokens: int, config: EngineConfig | None = None
    ) -> Decomposition:
        """Where an average request's time goes when `requests` of `prompt_tokens` arrive at once.

        A short request before them keeps the costs of first use out of the figures.
        """
        load = synthetic(requests, prompt_tokens, (output_tokens,), name="split")
        with closing(self._make(self.model, config or EngineConfig(prefix_cache=False))) as engine:
            run_load(engine, load.first(1, max_tokens=2), self._encoder)
            done = run_load(engine, load, self._encoder)
        found = latency.average(done.requests, done.steps)
        assert found is not None, "every request of a synthetic load completes"
        return found


def tokens_per_s(run: RunRecords) -> float:
    """Output tokens per second over the whole run."""
    rate = metrics.throughput(run.requests)
    assert rate is not None
    assert rate.output_tokens_per_s is not None
    return rate.output_tokens_per_s


def tokens_computed(run: RunRecords) -> int:
    """Tokens that went through the model, those computed again among them."""
    return sum(step.prefill_tokens + step.decode_tokens for step in run.steps)


def empty_seats(run: RunRecords, seats: int) -> float:
    """Share (0 to 1) of seats × steps in which no request had the seat."""
    return 1 - sum(step.rows for step in run.steps) / (seats * len(run.steps))


def batches(requests: Sequence[RequestRecord]) -> list[list[RequestRecord]]:
    """Requests by batch, where one forms only when the one before it has left altogether."""
    found: list[list[RequestRecord]] = []
    for record in sorted(requests, key=lambda record: record.first_step):
        if found and record.first_step <= max(mate.last_step for mate in found[-1]):
            found[-1].append(record)
        else:
            found.append([record])
    return found


def tokens_held(run: RunRecords) -> list[int]:
    """Positions whose keys and values running requests need, after each step.

    Not for runs with preemption; what requests share counts for each of them.
    """
    return [
        sum(
            r.prompt_tokens + step.index - r.first_token_step
            for r in run.requests
            if r.first_token_step <= step.index < r.last_step
        )
        for step in run.steps
    ]


def cached_share(run: RunRecords) -> float:
    """Share (0 to 1) of all prompt tokens that the prefix cache had already."""
    return sum(r.cached_tokens for r in run.requests) / sum(r.prompt_tokens for r in run.requests)


def in_ms(estimate: stats.Estimate) -> stats.Estimate:
    """An estimate in seconds as one in milliseconds."""
    value, low, high = (None if x is None else 1e3 * x for x in (estimate.value, estimate.low, estimate.high))
    return stats.Estimate(value, low, high, estimate.n, estimate.confidence)


def counted(value: float) -> stats.Estimate:
    """A figure that is the same in every run, because it counts work and not time."""
    return stats.Estimate(value, value, value, confidence=1.0)


@dataclass(frozen=True, slots=True)
class Swept:
    """A sweep with the requests of every point that counts, by level, the lowest first."""

    result: SweepResult
    requests: dict[float, list[RequestRecord]] = field(repr=False)

    @property
    def knee_share(self) -> stats.Estimate:
        """The knee as % of the most that was completed; no interval where the points give only one level."""
        knee, most = self.result.knee, self.result.saturation
        if knee.level is None or most is None or knee.low is None or knee.high is None:
            return stats.Estimate(None)
        value, low, high = (100 * level / most for level in (knee.level, knee.low, knee.high))
        return stats.Estimate(value, low, high) if low < high else stats.Estimate(value)

    def capacity(self, slo: SLO, share: float) -> capacity.Found:
        """The highest level at which `share` (0 to 1) of the requests meet `slo`."""
        points = [capacity.point(requests, level, slo) for level, requests in self.requests.items()]
        return capacity.capacity(points, share)


def swept(service: ServiceChoice, load: LoadChoice, sweep: Sweep, progress: Progress | None = None) -> Swept:
    """A sweep whose directory is not kept."""
    say = progress or (lambda message: None)
    with tempfile.TemporaryDirectory() as folder:
        found = run_sweep(service, load, sweep, Path(folder, "sweep"), lambda stage: say(stage.message))
        runs = found.out_dir / "runs"
        return Swept(found, {p.level: store.read_run(runs / p.run).requests for p in found.usable})


def e2e_ms(requests: Sequence[RequestRecord], which: str) -> float:
    """Mean, p50, p90 or p99 of E2E, failures counting as +inf."""
    values = metrics.samples(requests, metrics.e2e_s)
    if which == "mean":
        return 1e3 * sum(values) / len(values)
    return 1e3 * stats.percentile_value(values, capacity.QUANTILES[which])


MODEL_SEGMENTS = ("prefill forward", "decode forward")


def outside_model(parts: Decomposition) -> float:
    """Share of a request's time, waiting aside, that is not the model's forward pass (0 to 1)."""
    waiting = sum(parts.segments.get(name, 0.0) for name in ("client queue", "queue", "requeue"))
    model = sum(parts.segments.get(name, 0.0) for name in MODEL_SEGMENTS)
    return 1 - model / (parts.e2e_s - waiting)


def largest(parts: Decomposition) -> tuple[str, float]:
    """The segment that takes most of the time, and its share (0 to 1)."""
    name = max(parts.segments, key=lambda segment: parts.segments[segment])
    return name, parts.segments[name] / parts.e2e_s
