"""The small experiments that notebooks run, as plain functions over engine, load and measure.

Owns predictions and their verdicts, paired runs of two configurations, and the split of one
batch's latency. Draws nothing: `panels` shows what these return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.load.run import RunRecords, run_load
from perflab.load.workloads import PromptEncoder, Workload, synthetic
from perflab.measure import latency, metrics, stats
from perflab.models.loaded import LoadedModel
from perflab.types import Request, RequestRecord, SamplingParams, TokenEvent

Progress = Callable[[str], None]


@dataclass(slots=True)
class Prediction:
    """What a reader says before measuring. The verdict needs it to be there first."""

    question: str
    value: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a prediction agreed with the measurement, and the sentence that says so."""

    agrees: bool
    text: str


def judge(prediction: Prediction, measured: stats.Estimate, tolerance: float = 0.1) -> Verdict:
    """A prediction agrees within the measured interval, or within `tolerance` of the value.

    Without an interval (one run) only the tolerance counts, and the sentence says so.
    """
    if measured.value is None:
        return Verdict(False, "Nothing was measured, so nothing can be said about the prediction.")
    unit, guess, value = prediction.unit, prediction.value, measured.value
    low, high = (1 - tolerance) * value, (1 + tolerance) * value
    shown = f"measured {value:.3g}{unit}"
    if measured.low is not None and measured.high is not None:
        low, high = min(low, measured.low), max(high, measured.high)
        shown += f" ({measured.confidence:.0%} interval {measured.low:.3g} to {measured.high:.3g})"
    else:
        shown += " (one run, so without an interval)"
    if low <= guess <= high:
        return Verdict(True, f"Your prediction of {guess:.3g}{unit} holds: {shown}.")
    side = "low" if guess < value else "high"
    factor = max(value, 1e-12) / max(guess, 1e-12)
    return Verdict(
        False, f"Your prediction of {guess:.3g}{unit} was {max(factor, 1 / factor):.2g}× too {side}: {shown}."
    )


def stream(
    model: LoadedModel, prompt: str, params: SamplingParams, config: EngineConfig | None = None
) -> Iterator[tuple[TokenEvent, RequestRecord]]:
    """One answer as it comes: each event with the request's record so far."""
    with closing(Engine(model, config or EngineConfig())) as engine:
        engine.submit(Request("stream", model.chat(prompt), params))
        while engine.has_work:
            for event in engine.step():
                yield event, engine.records[-1]


@dataclass(frozen=True, slots=True)
class Paired:
    """Two configurations under the same load, run in turn. Rates are output tokens per second."""

    comparison: stats.Comparison
    rates: tuple[list[float], list[float]]
    runs: tuple[RunRecords, RunRecords] = field(repr=False)  # of the last round


def paired(
    model: LoadedModel,
    a: EngineConfig,
    b: EngineConfig,
    workload: Workload,
    rounds: int = 3,
    progress: Progress | None = None,
) -> Paired:
    """Run `workload` under `a` and `b` in turn, `rounds` times, after a warm-up of each.

    Every run has an engine of its own, so that no prefix cache carries over. The order turns
    around from round to round (AB, BA, …), so that a machine that slows down favours neither.
    """
    say = progress or (lambda message: None)
    encoder = PromptEncoder(model.encode, model.chat)

    def run(config: EngineConfig, load: Workload) -> RunRecords:
        with closing(Engine(model, config)) as engine:
            return run_load(engine, load, encoder)

    for config in (a, b):
        say("warming up")
        run(config, workload.first(2, max_tokens=2))
    rates: tuple[list[float], list[float]] = ([], [])
    last: dict[int, RunRecords] = {}
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            say(f"round {number + 1} of {rounds}")
            last[side] = run((a, b)[side], workload)
            rate = metrics.throughput(last[side].requests)
            assert rate is not None
            assert rate.output_tokens_per_s is not None
            rates[side].append(rate.output_tokens_per_s)
    return Paired(stats.compare(*rates), rates, (last[0], last[1]))


def split(
    model: LoadedModel,
    prompt_tokens: int,
    requests: int,
    output_tokens: int,
    config: EngineConfig | None = None,
) -> latency.Decomposition:
    """Where an average request's time goes when `requests` of `prompt_tokens` arrive at once.

    A short run before it keeps first-use costs out of the figures.
    """
    load = synthetic(requests, prompt_tokens, (output_tokens,), name="split")
    encoder = PromptEncoder(model.encode, model.chat)
    with closing(Engine(model, config or EngineConfig(prefix_cache=False))) as engine:
        run_load(engine, load.first(1, max_tokens=1), encoder)
        done = run_load(engine, load, encoder)
    found = latency.average(done.requests, done.steps)
    assert found is not None, "every request of a synthetic load completes"
    return found


def largest(parts: latency.Decomposition, names: Sequence[str] | None = None) -> str:
    """The segment that takes most of the time, of `names` or of all."""
    return max(names or parts.segments, key=lambda name: parts.segments.get(name, 0.0))
