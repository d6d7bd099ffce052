"""Comparisons: levels and power under noise that comes in bursts, services with known speeds, gates."""

from __future__ import annotations

import asyncio
import itertools
import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from perflab.clock import VirtualClock
from perflab.config import EngineConfig
from perflab.errors import ConfigError, StoreError, WorkloadError
from perflab.measure import paired
from perflab.measure.stats import Comparison, Estimate
from perflab.studies import store
from perflab.studies.compare import Compare, Side, run_compare
from perflab.studies.compare_result import slices_of
from perflab.studies.compare_stored import compare_stored
from perflab.studies.service_run import LoadChoice, ServiceChoice
from perflab.studies.sides import service_of
from perflab.types import StepRecord

MS = 1_000_000


class Machine:
    """One clock for two services, and a neighbour that makes it slower in stretches of random length."""

    def __init__(self, seed: int = 0, slow: float = 1.0, stretch_s: float = 1.0):
        self.clock, self.slow, self.stretch_s = VirtualClock(), slow, stretch_s
        self.rng = np.random.default_rng(seed)
        self.until_ns, self.busy = 0, False

    def work(self, ms: float) -> None:
        """Pass the time that takes `ms` on an idle machine."""
        while self.clock.now() >= self.until_ns:
            self.busy = not self.busy
            self.until_ns += round(self.rng.uniform(0.1, 2.0) * self.stretch_s * 1e9)
        factor = self.slow if self.busy else 1.0
        self.clock.advance(round(ms * MS * factor * math.exp(self.rng.normal(0, 0.02))))


class FakeService:
    """Answers requests one after the other, `ms` for each token."""

    def __init__(
        self, machine: Machine, ms: float = 1.0, outcome: str = "completed", cut_at: int | None = None
    ):
        self.machine, self.clock, self.ms, self.outcome, self.cut_at = (
            machine,
            machine.clock,
            ms,
            outcome,
            cut_at,
        )
        self.asked, self.texts, self.steps, self.entered = [], {}, [], 0

    async def __aenter__(self):
        self.entered, self.main = self.entered + 1, asyncio.current_task()
        return self

    async def __aexit__(self, *_):
        self.entered -= 1

    def prepare(self, request, encoder):
        return request

    async def send(self, request, record):
        self.asked.append(request)
        if self.cut_at == len(self.asked):
            self.main.cancel()  # as Ctrl-C does
            await asyncio.sleep(0)
        for _ in range(request.params.max_tokens):
            self.machine.work(self.ms)
            record.token_ns.append(self.clock.now())
            record.chunk_tokens.append(1)
        record.prompt_tokens, record.output_tokens = request.prompt_length, len(record.token_ns)
        record.first_token_ns, record.last_token_ns = record.token_ns[0], record.token_ns[-1]
        record.end_ns, record.outcome = record.last_token_ns, self.outcome
        self.steps.append(StepRecord(len(self.steps), record.sent_ns, *([record.end_ns] * 6)))
        self.texts[request.request_id] = "the same words" if self.ms < 3 else "the other words"

    def settle(self):
        pass

    def describe(self):
        return {"kind": "fake", "model": "fake"}


def compared(tmp_path, a: FakeService, b: FakeService, load: LoadChoice | None = None, **options):
    options = {"pairs": 12, **options}
    load = load or LoadChoice(input_tokens=8, output_tokens=4, requests=2)
    sides = Side("first", lambda: a), Side("second", lambda: b)
    return run_compare(*sides, load, Compare(**options), tmp_path / "comparison")


# the statistics


@pytest.mark.parametrize(("n", "k"), [(5, None), (6, 0), (8, 3), (12, 13), (16, 29), (20, 52), (24, 81)])
def test_critical_values_are_the_tables(n, k):
    assert paired.critical(n, 0.95) == k


def test_signed_rank_by_enumeration():
    sums = [
        sum(r for r, sign in zip(range(1, 11), signs, strict=True) if sign)
        for signs in itertools.product((0, 1), repeat=10)
    ]
    k = paired.critical(10, 0.9)
    assert 2 * sum(s <= k for s in sums) / len(sums) <= 0.1 < 2 * sum(s <= k + 1 for s in sums) / len(sums)


def test_ratio_is_the_hodges_lehmann_estimate():
    a, b = [1.0] * 8, [math.exp(x) for x in (0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.22, 9.0)]
    found = paired.compare_pairs(a, b)
    assert found.answer == "faster"
    assert 1.1 < found.ratio.low < found.ratio.value < 1.25, "one pair in eight that went wild moves little"
    assert paired.compare_pairs(a, b, higher_is_better=False).answer == "slower"
    assert paired.compare_pairs(a[:5], b[:5]).answer == "cannot tell"


def simulated(rng: np.random.Generator, pairs: int, slower: float = 1.0) -> tuple[list[float], list[float]]:
    """Rates of interleaved runs while a neighbour comes and goes; heavy-tailed on top."""
    a, b, busy = [], [], False
    for _ in range(pairs):
        rates = []
        for _ in range(2):
            busy ^= bool(rng.random() < 0.15)
            rates.append(math.exp(-0.6 * busy + 0.02 * rng.standard_t(3)))
        flip = rng.random() < 0.5
        a.append(rates[flip])
        b.append(rates[1 - flip] / slower)
    return a, b


def test_false_alarms_are_five_in_a_hundred():
    rng = np.random.default_rng(7)
    alarms = sum(paired.compare_pairs(*simulated(rng, 30)).answer != "cannot tell" for _ in range(1000))
    assert 20 <= alarms <= 80


def test_a_slowdown_of_fifteen_per_cent_is_found():
    rng = np.random.default_rng(8)
    answers = [paired.compare_pairs(*simulated(rng, 60, 1.15)).answer for _ in range(200)]
    assert answers.count("slower") >= 190
    assert answers.count("faster") == 0


def test_detectable_effect_is_found_four_times_in_five():
    rng = np.random.default_rng(9)
    shift = 0.03

    def draw():
        d = rng.normal(-shift, 0.05, 24)
        return paired.compare_pairs([1.0] * 24, np.exp(d).tolist())

    found = [draw() for _ in range(400)]
    assert np.median([math.log1p(f.detectable) for f in found]) == pytest.approx(shift, rel=0.1)
    assert 0.7 < np.mean([f.answer == "slower" for f in found]) < 0.9


def test_unpaired_runs_are_told_apart_by_welch():
    a, b = [10.0, 10.2, 9.9, 10.1], [12.0, 12.4, 11.8]
    found = paired.compare_unpaired(a, b)
    assert found.answer == "faster"
    assert found.ratio.value == pytest.approx(1.2, rel=0.02)
    assert paired.compare_unpaired(a, a).answer == "cannot tell"
    assert paired.compare_unpaired(a, b[:1]).answer == "cannot tell"


def answered(low, high):
    return Comparison("cannot tell", Estimate(math.sqrt(low * high), low, high, 20), 0.05)


@pytest.mark.parametrize(
    ("low", "high", "margin", "strict", "verdict"),
    [
        (0.9, 1.1, 0.0, False, "pass"),
        (0.9, 0.99, 0.0, False, "slower"),
        (0.9, 0.99, 0.05, False, "pass"),
        (0.8, 0.94, 0.05, False, "slower"),
        (0.9, 1.1, 0.05, True, "cannot tell"),
        (0.96, 1.1, 0.05, True, "pass"),
        (0.8, 0.94, 0.05, True, "slower"),
    ],
)
def test_gate(low, high, margin, strict, verdict):
    assert paired.gate(answered(low, high), margin, strict) == verdict


# the pairs


@pytest.mark.parametrize(("ms", "answer"), [(1.0, "cannot tell"), (1.15, "slower"), (0.87, "faster")])
def test_known_speeds_under_bursts(tmp_path, ms, answer):
    machine = Machine(slow=2.0, stretch_s=0.2)
    found = compared(tmp_path, FakeService(machine), FakeService(machine, ms), pairs=40)
    assert found.answer == answer
    assert found.found.ratio.low < 1 / ms < found.found.ratio.high
    assert set(found.by_metric) == {"tokens", "ttft", "tpot", "e2e"}


def test_order_is_by_lot_and_both_ask_the_same_amount(tmp_path):
    machine = Machine()
    a, b = FakeService(machine), FakeService(machine)
    compared(tmp_path, a, b, pairs=30, quality=False)
    firsts = [s["first"] for s in store.read_run(tmp_path / "comparison/runs/a").manifest["slices"]]
    assert 5 < sum(firsts) < 25
    assert [r.prompt for r in a.asked] == [r.prompt for r in b.asked]
    salts = [{r.salt for r in service.asked} for service in (a, b)]
    assert not salts[0] & salts[1], "neither finds the other's prompts cached"
    assert len(salts[0]) == 32, "nor its own from an earlier round"
    assert a.entered == b.entered == 0


def test_both_sides_are_stored_as_runs_of_their_own_time(tmp_path):
    machine = Machine()
    found = compared(tmp_path, FakeService(machine), FakeService(machine, 4.0))
    assert found.answer == "slower"
    a, _b = (store.read_run(tmp_path / "comparison/runs" / name) for name in "ab")
    assert a.manifest["kind"] == "compare"
    assert [len(part) for part in slices_of(a)] == [2] * 12
    ends = [r.end_ns for r in a.requests]
    assert ends == sorted(ends)
    gaps = [y.sent_ns - x.end_ns for x, y in itertools.pairwise(a.requests)]
    assert max(gaps) < 1 * MS, "the other side's time between two runs is cut out"
    assert len(a.steps) == len(a.requests)
    assert a.valid
    held = json.loads((tmp_path / "comparison/compare.json").read_text())
    assert held["answer"] == "slower"
    assert held["found"]["ratio"]["value"] == pytest.approx(0.25, rel=0.1)
    assert found.quality["greedy_match"].value == pytest.approx(4 / 14)
    again = compare_stored(str(tmp_path / "comparison/runs/a"), str(tmp_path / "comparison/runs/b"))
    assert again.found == found.found


def test_an_invalid_side_is_refused_unless_asked_for(tmp_path):
    def both():
        machine = Machine()
        return FakeService(machine), FakeService(machine, 1.5, outcome="failed")

    found = compared(tmp_path, *both())
    assert found.answer == "cannot tell"
    assert "failures" in found.refused
    assert [name for name, _ in found.invalid["B: second"]] == ["failures"]
    asked = compared(tmp_path / "asked", *both(), allow_invalid=True)
    assert asked.answer == "slower"
    assert not asked.refused


def test_ctrl_c_keeps_whole_pairs(tmp_path):
    machine = Machine()
    found = compared(tmp_path, FakeService(machine), FakeService(machine, cut_at=4 + 7 * 2 + 1))
    assert found.interrupted
    assert found.pairs == 7
    assert len(store.read_run(tmp_path / "comparison/runs/a").requests) == 14


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "comparison").mkdir()
    (tmp_path / "comparison" / "mine.txt").write_text("x")
    machine = Machine()
    with pytest.raises(StoreError, match="not empty"):
        compared(tmp_path, FakeService(machine), FakeService(machine))


@pytest.mark.parametrize("bad", [{"minutes": 0}, {"pairs": 3}, {"metric": "speed"}, {"confidence": 1.0}])
def test_impossible_comparisons_are_refused(bad):
    with pytest.raises(WorkloadError, match=next(iter(bad))):
        Compare(**bad)


# what a user writes


def test_sides_as_text():
    base = ServiceChoice(config=EngineConfig(max_num_seqs=4))
    assert service_of("default", base) == base
    made = service_of("weights=int8-dynamic, dtype=bf16,prefix_cache=false", base)
    assert (made.config.weights, made.config.prefix_cache, made.config.max_num_seqs) == (
        "int8-dynamic",
        False,
        4,
    )
    assert made.dtype == "bf16"
    assert service_of("http://127.0.0.1:8000", base).url == "http://127.0.0.1:8000"
    with pytest.raises(ConfigError, match="speed"):
        service_of("speed=high", base)
    with pytest.raises(ConfigError, match="int9"):
        service_of("weights=int9", base)


def gate_exit(tmp_path, b_ms, *options):
    machine = Machine()
    compared(tmp_path, FakeService(machine), FakeService(machine, b_ms), quality=False)
    from perflab.cli import app

    runs = [str(tmp_path / "comparison/runs" / name) for name in "ab"]
    return CliRunner().invoke(app, ["compare", *runs, "--gate", *options])


@pytest.mark.parametrize(
    ("ms", "options", "code"),
    [
        (1.0, (), 0),
        (0.5, (), 0),
        (1.3, (), 3),
        (1.3, ("--margin", "0.5"), 0),
        (1.0, ("--margin", "0.001", "--strict"), 4),
        (1.0, ("--strict",), 2),
    ],
)
def test_exit_codes_of_the_gate(tmp_path, ms, options, code):
    done = gate_exit(tmp_path, ms, *options)
    assert done.exit_code == code, done.output
    if code != 2:
        assert "output tokens/s" in done.output


def test_one_side_needs_the_self_test():
    from perflab.cli import app

    assert CliRunner().invoke(app, ["compare", "default"]).exit_code == 2
    assert CliRunner().invoke(app, ["compare", "default", "default", "--self-test"]).exit_code == 2


def test_stored_studies_are_paired_by_round_or_not_at_all(tmp_path):
    machine = Machine()
    compared(tmp_path, FakeService(machine), FakeService(machine, 1.5), quality=False)
    a, b = (store.read_run(tmp_path / "comparison/runs" / name) for name in "ab")
    for number in range(3):
        for run in (a, b):
            run.manifest |= {"round": number, "study": "x"}
            run.manifest.pop("slices", None)
            store.write_run(tmp_path / "study/runs" / f"{run.variant}-{number}", run)
    study = str(tmp_path / "study")
    found = compare_stored(f"{study}@first", f"{study}@second")
    assert found.pairs == 3
    assert found.found.ratio.value == pytest.approx(1 / 1.5, rel=0.05)
    assert not any("interleaved" in note for note in found.notes)
    with pytest.raises(StoreError, match="several variants"):
        compare_stored(study, study)
    with pytest.raises(StoreError, match="no variant"):
        compare_stored(f"{study}@third", f"{study}@second")
