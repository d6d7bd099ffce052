"""The small experiments that notebooks run, as plain functions of a model.

Owns predictions and their verdicts, and a bench that keeps one model ready: one answer as it
streams, two configurations in turn, the split of a batch's latency. Draws nothing: `panels` shows
what these return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from perflab.config import EngineConfig
from perflab.load.run import RunRecords, run_load
from perflab.load.workloads import PromptEncoder, Workload, synthetic
from perflab.measure import latency, metrics, stats
from perflab.measure.latency import Decomposition
from perflab.models.load import load
from perflab.models.loaded import LoadedModel
from perflab.studies.session import EngineMaker
from perflab.types import Request, RequestRecord, SamplingParams, TokenEvent

Progress = Callable[[str], None]


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
    mine, shown = f"Your prediction of {guess:.3g}{unit}", f"measured {value:.3g}{unit}"
    if measured.bounded:
        shown += f" ({measured.confidence:.0%} interval {measured.low:.3g} to {measured.high:.3g})"
    else:
        shown += " (one run, so without an interval)"
    if abs(guess - value) <= tolerance * abs(value):
        return Verdict("holds", f"{mine} holds: {shown}.")
    if measured.low is not None and measured.high is not None and measured.low <= guess <= measured.high:
        return Verdict("cannot tell", f"{mine} lies in the interval, but so does much else: {shown}.")
    answer: Answer = "too low" if guess < value else "too high"
    return Verdict(answer, f"{mine} was {answer}: {shown}.")


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

    def paired(
        self,
        variants: dict[str, EngineConfig],
        workload: Workload,
        rounds: int = 3,
        progress: Progress | None = None,
    ) -> Paired:
        """Run `workload` under two configurations in turn, `rounds` times, after a warm-up of each.

        The order turns around from round to round (AB, BA, …), so that a machine that slows down
        favours neither. Raises ValueError unless there are two.
        """
        if len(variants) != 2:
            raise ValueError(f"{len(variants)} variants: a pair needs two")
        say = progress or (lambda message: None)
        first, second = variants
        rates: dict[str, list[float]] = {name: [] for name in variants}
        last: dict[str, RunRecords] = {}
        for name, config in variants.items():
            say(f"warming up: {name}")
            self.run(config, workload.first(2, max_tokens=2))
        for number in range(rounds):
            for name in (first, second) if number % 2 == 0 else (second, first):
                say(f"round {number + 1} of {rounds}: {name}")
                last[name] = self.run(variants[name], workload)
                rate = metrics.throughput(last[name].requests)
                assert rate is not None
                assert rate.output_tokens_per_s is not None
                rates[name].append(rate.output_tokens_per_s)
        comparison = stats.compare(rates[first], rates[second])
        return Paired((first, second), comparison, (rates[first], rates[second]), (last[first], last[second]))

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
