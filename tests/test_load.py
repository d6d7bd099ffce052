"""Arrivals, workloads of exact lengths, and the loop that sends them by intended time."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from fake_target import FakeEngine, FakeModel

from perflab.config import EngineConfig
from perflab.errors import WorkloadError
from perflab.load.arrivals import Arrivals
from perflab.load.build import build
from perflab.load.prompts import Chat, PromptEncoder, Synthetic
from perflab.load.run import run_load
from perflab.load.traces import from_prompts, from_trace
from perflab.load.workloads import TimedRequest, Workload, synthetic
from perflab.measure import latency, metrics
from perflab.types import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
ENCODER = PromptEncoder(FakeModel().encode, FakeModel().chat)


def engine(**config) -> FakeEngine:
    return FakeEngine(FakeModel(), EngineConfig(**{"max_num_seqs": 4, **config}))


@pytest.mark.parametrize("kind", ["constant", "poisson", "gamma"])
def test_arrivals_have_their_rate_and_repeat_with_their_seed(kind):
    arrivals = Arrivals(kind, rate_per_s=5.0, cv=2.0)
    times = arrivals.times(4000, seed=3)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert (len(times) - 1) / times[-1] == pytest.approx(5.0, rel=0.12)
    assert times == arrivals.times(4000, seed=3)
    assert kind == "constant" or times != arrivals.times(4000, seed=4)


@pytest.mark.parametrize(
    ("kind", "cv"), [("constant", 0.0), ("poisson", 1.0), ("gamma", 3.0), ("gamma", 0.5)]
)
def test_arrivals_have_their_burstiness(kind, cv):
    gaps = np.diff(Arrivals(kind, rate_per_s=2.0, cv=cv or 1.0).times(20000, seed=1))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.15)


@pytest.mark.parametrize(
    "bad", [{"kind": "often"}, {"kind": "poisson"}, {"kind": "constant", "rate_per_s": 0}, {"cv": -1.0}]
)
def test_impossible_arrivals_are_refused(bad):
    with pytest.raises(WorkloadError):
        Arrivals(**bad)


@pytest.mark.parametrize("start", [[], [7]])
def test_synthetic_prompts_are_exactly_as_long_as_asked(start):
    encoder = PromptEncoder(lambda text: start + list(text.encode()))
    for tokens in (1, 63, 64, 128, 9000):
        ids = encoder.ids(Synthetic(tokens, seed=5))
        assert len(ids) == tokens
        assert ids[: len(start)] == start


def test_shared_documents_share_exactly_their_tokens():
    a, b, other = (
        ENCODER.ids(Synthetic(64, seed, document, 48)) for seed, document in ((1, 0), (2, 0), (1, 1))
    )
    assert a[:48] == b[:48]
    assert a[48:] != b[48:]
    assert a[:16] != other[:16]
    assert ENCODER.ids(Synthetic(64, 1))[:16] != ENCODER.ids(Synthetic(64, 2))[:16]


def test_the_same_declaration_asks_the_same():
    spec = {"kind": "synthetic", "requests": 9, "output_tokens": [4, 8], "shared_tokens": 16}
    assert build(spec).fingerprint == build(dict(spec)).fingerprint
    assert build(spec).fingerprint != build({**spec, "seed": 1}).fingerprint
    assert build(spec).output_tokens == 52


def test_a_smaller_workload_asks_for_less_of_the_same():
    whole = synthetic(requests=8, output_tokens=(24, 8))
    part = whole.first(3, max_tokens=10)
    assert [r.params.max_tokens for r in part.requests] == [10, 8, 10]
    assert [r.prompt for r in part.requests] == [r.prompt for r in whole.requests[:3]]


def test_prompt_files_keep_id_category_system_and_put_documents_first(tmp_path):
    file = tmp_path / "p.jsonl"
    rows = [
        {"id": "a", "category": "qa", "prompt": "Who?", "document": "A tale."},
        {"prompt": "你好", "system": "Be brief."},
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    workload = from_prompts(file, Arrivals("constant", 2.0), max_tokens=7)
    assert [r.request_id for r in workload.requests] == ["a", "p-0001"]
    assert workload.requests[0].prompt == Chat("A tale.\n\nWho?")
    assert workload.requests[1].prompt == Chat("你好", "Be brief.")
    assert [r.arrival_s for r in workload.requests] == [0.0, 0.5]
    assert workload.open_loop
    assert workload.requests[0].request_class == "qa"
    assert workload.requests[0].output_length is None


@pytest.mark.parametrize(
    ("text", "named"),
    [("{", ":1"), ('{"prompt": 3}', ":1"), ('{"prompt": "x"}\n[]', ":2"), ("", "no prompt")],
)
def test_bad_prompt_files_name_the_line(tmp_path, text, named):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(WorkloadError, match=named):
        from_prompts(tmp_path / "p.jsonl")


def test_traces_keep_lengths_and_times(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n5.0,30,4\n6.0,5000,2\n7.5,10,9\n")
    workload = from_trace(file, speed=2.0, max_input=100, limit=3)
    assert [r.arrival_s for r in workload.requests] == [0.0, 0.5, 1.25]
    assert [r.prompt_length for r in workload.requests] == [30, 100, 10]
    assert [r.output_length for r in workload.requests] == [4, 2, 9]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,b\n1,2\n", "missing"),
        ("arrival_s,input_tokens,output_tokens\n0,x,1\n", ":2"),
        ("arrival_s,input_tokens,output_tokens\n0,0,1\n", ":2"),
    ],
)
def test_bad_traces_name_the_row(tmp_path, text, named):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(WorkloadError, match=named):
        from_trace(tmp_path / "t.csv")


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "wish"},
        {"kind": "synthetic", "colour": 1},
        {"kind": "prompts"},
        {"kind": "trace", "path": "no.csv"},
    ],
)
def test_bad_declarations_are_refused(spec):
    with pytest.raises(WorkloadError):
        build(spec)


def test_the_data_that_ships_can_be_loaded():
    prompts = sorted((ROOT / "data" / "prompts").glob("*.jsonl"))
    traces = sorted((ROOT / "data" / "traces").glob("*.csv"))
    assert prompts
    assert traces
    for file in prompts:
        assert from_prompts(file).requests
    for file in traces:
        assert from_trace(file, limit=50).requests


def test_duplicate_ids_and_disorder_are_refused():
    one = TimedRequest("a", (1, 2))
    with pytest.raises(WorkloadError, match="differ"):
        Workload("w", (one, one))
    with pytest.raises(WorkloadError, match="order"):
        Workload("w", (TimedRequest("a", (1,), arrival_s=1.0), TimedRequest("b", (1,))))


def test_requests_are_sent_by_intended_time_and_lateness_is_recorded():
    target = engine()
    workload = synthetic(requests=3, output_tokens=(2,), arrivals=Arrivals("constant", rate_per_s=1000 / 15))
    run = run_load(target, workload, ENCODER)
    assert [r.intended_ns - run.started_ns for r in run.requests] == [0, 15_000_000, 30_000_000]
    # Steps take 10 ms: the second request is due in the middle of a step and waits for its end.
    assert [metrics.lateness_s(r) for r in run.requests] == pytest.approx([0.0, 0.005, 0.0])
    waited = [span for span in run.requests[1].spans if span.name == "client_queue"]
    assert waited[0].end_ns - waited[0].start_ns == 5_000_000
    assert run.outputs[run.requests[0].request_id] == [0, 1]


def test_every_moment_of_a_driven_request_is_stamped():
    run = run_load(engine(), synthetic(requests=9, output_tokens=(3, 5)), ENCODER)
    for record in run.requests:
        assert latency.decompose(record, run.steps).residual_s == pytest.approx(0.0, abs=1e-9)
    assert metrics.counts(run.requests).completed == 9


def test_a_second_run_on_the_same_engine_sees_only_itself():
    target = engine()
    run_load(target, synthetic(requests=2, name="first"), ENCODER)
    run = run_load(target, synthetic(requests=3, name="second"), ENCODER)
    assert len(run.requests) == 3
    assert all(r.request_id.startswith("second") for r in run.requests)
    assert run.steps[0].index == 24


def test_refused_requests_are_counted_and_the_run_goes_on():
    requests = (
        TimedRequest("long", tuple(range(600))),
        TimedRequest("short", (1, 2), SamplingParams(max_tokens=2)),
    )
    seen = []
    run = run_load(
        engine(), Workload("w", requests), ENCODER, on_progress=lambda done, of: seen.append((done, of))
    )
    assert [r.outcome for r in run.requests] == ["rejected", "completed"]
    assert seen == [(2, 2)]


def test_an_interrupted_run_keeps_what_was_measured():
    def stop(target):
        if len(target.steps) == 3:
            raise KeyboardInterrupt

    target = FakeEngine(FakeModel(), EngineConfig(max_num_seqs=2), on_step=stop)
    run = run_load(target, synthetic(requests=5, output_tokens=(2,)), ENCODER)
    assert run.interrupted
    assert metrics.counts(run.requests).completed == 2
    assert metrics.counts(run.requests).unfinished == 3


def test_ctrl_c_lets_the_step_finish_and_a_second_one_does_not():
    def press(times):
        def on_step(target):
            if len(target.steps) == 3:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

        return on_step

    before = signal.getsignal(signal.SIGINT)
    target = FakeEngine(FakeModel(), EngineConfig(max_num_seqs=2), on_step=press(1))
    run = run_load(target, synthetic(requests=5, output_tokens=(8,)), ENCODER)
    assert run.interrupted
    assert [s.index for s in run.steps] == [0, 1, 2, 3]
    assert sum(r.output_tokens for r in run.requests) == 8
    target = FakeEngine(FakeModel(), EngineConfig(max_num_seqs=2), on_step=press(2))
    run = run_load(target, synthetic(requests=5, output_tokens=(8,)), ENCODER)
    assert run.interrupted
    assert len(run.steps) == 3
    assert signal.getsignal(signal.SIGINT) is before
