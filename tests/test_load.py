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
from perflab.load.prompts import Blocks, Chat, PromptEncoder, Synthetic
from perflab.load.run import run_load
from perflab.load.sessions import sessions
from perflab.load.traces import from_prompts, from_trace
from perflab.load.workloads import TimedRequest, TrafficClass, Workload, mix, synthetic
from perflab.measure import latency, metrics
from perflab.measure.metrics import SLO
from perflab.models.load import load
from perflab.models.tiny import tiny
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


def test_bursts_keep_the_mean_and_leave_the_pauses_empty():
    times = np.array(Arrivals("bursts", 5.0, on_s=2.0, off_s=8.0).times(duration_s=1000.0, seed=2))
    assert len(times) / 1000 == pytest.approx(5.0, rel=0.1)
    assert (times % 10 <= 2.0 + 1e-9).all()


def test_a_ramp_goes_from_one_rate_to_the_other_and_on():
    even = np.array(Arrivals("ramp", 1.0, to_rate_per_s=9.0, over_s=100.0, cv=0).times(duration_s=200.0))
    assert len(even) == pytest.approx(500 + 900, abs=1)
    per_tenth, _ = np.histogram(even, 10, (0, 100))
    assert per_tenth == pytest.approx([10 * (1.4 + 0.8 * i) for i in range(10)], abs=1)
    falling = np.array(Arrivals("ramp", 9.0, to_rate_per_s=1.0, over_s=100.0, cv=0).times(duration_s=100.0))
    assert len(falling) == pytest.approx(500, abs=1)
    level = Arrivals("ramp", 4.0, to_rate_per_s=4.0, over_s=10.0, cv=0).times(9)
    assert level == pytest.approx(Arrivals("constant", 4.0).times(9))


def test_steps_hold_each_rate_and_then_the_last():
    even = Arrivals("steps", rates_per_s=(1.0, 5.0, 2.0), over_s=10.0, cv=0).times(duration_s=50.0)
    assert np.histogram(even, 5, (0, 50))[0].tolist() == [10, 50, 20, 20, 20]


@pytest.mark.parametrize("kind", ["constant", "poisson", "gamma", "bursts", "ramp", "steps"])
def test_a_number_and_a_duration_cut_one_and_the_same_stream(kind):
    arrivals = Arrivals(kind, 50.0, cv=2.0, to_rate_per_s=80.0, over_s=20.0, rates_per_s=(40.0, 70.0))
    whole = arrivals.times(duration_s=200.0, seed=5)
    assert len(whole) > 8192  # more than one batch
    assert whole == sorted(whole)
    assert whole[-1] < 200.0
    assert arrivals.times(len(whole), seed=5) == whole
    assert arrivals.times(50, seed=5, duration_s=200.0) == whole[:50]


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "often"},
        {"kind": "poisson"},
        {"kind": "constant", "rate_per_s": 0},
        {"cv": -1.0},
        {"kind": "gamma", "rate_per_s": 1.0, "cv": 0.0},
        {"kind": "ramp", "rate_per_s": 1.0, "over_s": 5.0},
        {"kind": "ramp", "rate_per_s": 1.0, "to_rate_per_s": 2.0},
        {"kind": "steps", "over_s": 5.0},
        {"kind": "steps", "over_s": 5.0, "rates_per_s": (1.0, 0.0)},
        {"kind": "bursts", "rate_per_s": 1.0, "on_s": 0.0},
    ],
)
def test_impossible_arrivals_are_refused(bad):
    with pytest.raises(WorkloadError):
        Arrivals(**bad)


@pytest.mark.parametrize("times", [{}, {"duration_s": 0.0}, {"duration_s": -1.0}])
def test_a_stream_without_an_end_is_refused(times):
    with pytest.raises(WorkloadError):
        Arrivals("poisson", 1.0).times(**times)
    with pytest.raises(WorkloadError, match="number of requests"):
        Arrivals().times(duration_s=5.0)


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


@pytest.fixture(scope="module")
def smollm():
    """The embedded model's tokenizer; its weights are never read."""
    return load("smollm2-135m")


def test_prompts_are_exact_as_text_and_after_decoding(smollm):
    encoder = PromptEncoder(smollm.encode, smollm.chat)
    texts = [encoder.text(Synthetic(128, seed), "x7k2") for seed in range(200)]
    for text in texts:
        ids = smollm.encode(text)
        assert len(ids) == 128
        assert len(smollm.encode(smollm.decode(ids))) == 128
    assert len({text[:16] for text in texts}) == 200  # one block in, they all differ
    assert all(text.startswith("x7k2 ") for text in texts)


def test_conversations_are_exact_with_their_template(smollm):
    encoder = PromptEncoder(smollm.encode, smollm.chat)
    for tokens in (48, 128, 1000):
        chat = encoder.chat(Synthetic(tokens, seed=3), "x7k2")
        assert len(smollm.chat(chat.messages)) == tokens
        assert chat.user.startswith("x7k2 ")
    with pytest.raises(WorkloadError, match="no text of exactly 8 tokens"):
        encoder.chat(Synthetic(8))
    with pytest.raises(WorkloadError, match="completions"):
        encoder.chat((1, 2, 3))


@pytest.mark.parametrize("salt", ["", "x7k2"])
def test_every_length_can_be_made(smollm, salt):
    encoders = [PromptEncoder(m.encode, m.chat) for m in (smollm, tiny("llama"), FakeModel())]
    for encoder in encoders:
        for tokens in [*range(1, 40), 777]:
            assert encoder.count(encoder.text(Synthetic(tokens, seed=tokens), salt)) == tokens


def test_blocks_share_what_their_numbers_share(smollm):
    encoder = PromptEncoder(smollm.encode, smollm.chat)
    prompts = [Blocks(((0, 64), (1, 32))), Blocks(((0, 64), (2, 32))), Blocks(((3, 64), (1, 32)))]
    for salt in ("", "x7k2"):
        for ids in (
            [encoder.ids(p, salt) for p in prompts],
            [smollm.encode(encoder.text(p, salt)) for p in prompts],
        ):
            assert [len(i) for i in ids] == [96, 96, 96]
            assert ids[0][:63] == ids[1][:63]
            assert ids[0][64:80] != ids[1][64:80]
            assert ids[0][:16] != ids[2][:16]


def test_a_salt_changes_every_prompt_from_its_first_word_and_nothing_else():
    whole = synthetic(requests=3, input_tokens=64, shared_tokens=32, seed=4)
    salted = whole.salted("x7k2")
    assert salted.fingerprint == whole.fingerprint
    for asked in salted.requests:
        plain, other = ENCODER.ids(asked.prompt), ENCODER.ids(asked.prompt, asked.salt)
        assert len(plain) == len(other) == 64
        assert plain[:5] != other[:5]
    first, second = (ENCODER.ids(r.prompt, r.salt) for r in salted.requests[:2])
    assert first[:32] == second[:32]  # the shared document, salted once for the run
    assert ENCODER.text("Why?", "s") == "s Why?"
    assert ENCODER.chat(Chat("Why?", "Be brief."), "s") == Chat("Why?", "s Be brief.")
    assert ENCODER.chat(Chat("c", None, (("a", "b"),)), "s") == Chat("c", None, (("s a", "b"),))
    assert ENCODER.text((1, 2), "s") == (1, 2)


def test_sessions_grow_by_what_was_said():
    talk = sessions(sessions=2, turns=3, system_tokens=40, input_tokens=8, output_tokens=4)
    assert [r.prompt_length for r in talk.requests] == [48, 60, 72] * 2
    prompts = [ENCODER.ids(r.prompt, "s") for r in talk.requests]
    assert prompts[1][:48] == prompts[0]
    assert prompts[2][:60] == prompts[1]
    assert prompts[3][:40] == prompts[0][:40]
    assert prompts[3][40:] != prompts[0][40:]
    assert [(r.session_id, r.turn) for r in talk.requests[2:4]] == [("sessions-000", 2), ("sessions-001", 0)]


def test_a_mix_draws_by_weight_and_keeps_class_priority_and_limits():
    chat = TrafficClass("chat", synthetic(requests=5, name="c"), 3.0, SLO(ttft_s=0.5), priority=-1)
    batch = TrafficClass("batch", sessions(sessions=2, turns=2), 1.0, deadline_s=60.0)
    load = mix([chat, batch], Arrivals("poisson", 10.0), duration_s=60.0, seed=3)
    kinds = [r.request_class for r in load.requests]
    drawn = kinds.count("chat"), kinds.count("batch") / 2
    assert drawn[0] / sum(drawn) == pytest.approx(0.75, abs=0.05)
    assert load.slos == {"chat": SLO(ttft_s=0.5)}
    assert {(r.request_class, r.priority, r.deadline_s) for r in load.requests} == {
        ("chat", -1, None),
        ("batch", 0, 60.0),
    }
    turns = {r.request_id: r for r in load.requests if r.session_id == "batch-sessions-001~3"}
    assert sorted(turns) == ["batch-sessions-001.0~3", "batch-sessions-001.1~3"]
    assert (
        load.fingerprint == mix([chat, batch], Arrivals("poisson", 10.0), duration_s=60.0, seed=3).fingerprint
    )
    with pytest.raises(WorkloadError, match="own name"):
        mix([chat, chat], Arrivals("poisson", 10.0), requests=4)


def test_a_mix_and_sessions_can_be_declared(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens\n0,30,4\n")
    spec = {
        "kind": "mix",
        "requests": 6,
        "arrivals": {"kind": "poisson", "rate_per_s": 2.0},
        "classes": [
            {"name": "talk", "slo": {"ttft_s": 1.0}, "workload": {"kind": "sessions", "turns": 2}},
            {"name": "trace", "weight": 2, "workload": {"kind": "trace", "path": "t.csv"}},
        ],
    }
    load = build(spec, tmp_path)
    assert load.slos == {"talk": SLO(ttft_s=1.0)}
    assert {r.request_class for r in load.requests} == {"talk", "trace"}
    with pytest.raises(WorkloadError, match="needs 'classes'"):
        build({"kind": "mix"})


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
