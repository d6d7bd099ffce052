"""Studies: declaration, plan, interleaving, disk, interruption and resume, on a fake engine."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from fake_target import FakeEngine, FakeModel

from perflab.config import EngineConfig
from perflab.errors import ConfigError, ModelError, StoreError, WorkloadError
from perflab.load.workloads import synthetic
from perflab.measure.metrics import SLO
from perflab.measure.validity import Noise
from perflab.models.tiny import tiny
from perflab.report.analysis import analyse
from perflab.report.headlines import headline
from perflab.speculate.head import head_file
from perflab.studies import ladder, plan, quality, session, store
from perflab.studies.define import Study, Variant, load_study_file
from perflab.studies.store import Run
from perflab.studies.study import load_result, run_study
from perflab.types import EventRecord, RequestRecord, Span, StepRecord


class QuietSampler:
    def start(self):
        return self

    def stop(self):
        return Noise(0.02, 1.0, 1.0)


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch):
    monkeypatch.setattr(session, "NoiseSampler", QuietSampler)


def step_ms(config, index):
    """Without a KV cache a step takes three times as long; a little spread by run and step."""
    return (30.0 if not config.kv_cache else 10.0) * (1 + 0.02 * random.Random(index).random())


def make_engine(model, config, **more):
    return FakeEngine(model, config, step_ms=step_ms, **more)


def load_model(name, dtype, device):
    return FakeModel(name)


def study(**changes) -> Study:
    base = Study(
        name="cache",
        model="fake",
        workload=synthetic(requests=6, input_tokens=32, output_tokens=(4, 8)),
        variants=(
            Variant("without", {"kv_cache": False}),
            Variant("with", {"kv_cache": True}, relative_cost=0.3),
            Variant("other attention", {"kv_cache": True, "attention": "batched"}, relative_cost=0.3),
        ),
        config={"max_num_seqs": 2, "attention": "sdpa"},
        slo=SLO(ttft_s=1.0),
        repeats=3,
        min_repeats=3,
    )
    return replace(base, **changes)


def run(chosen: Study, out: Path, make=make_engine, **more):
    return run_study(chosen, out, load_model=load_model, make_engine=make, **more)


def names(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "runs").iterdir())


def test_a_study_runs_interleaved_and_leaves_complete_runs(tmp_path):
    told = []
    result = run(study(), tmp_path / "s", progress=told.append)
    assert names(tmp_path / "s") == sorted(
        f"{i:02d}-{name}-r{r}"
        for i, name in enumerate(("without", "with", "other-attention"))
        for r in range(3)
    )
    turns = [p.message for p in told if p.stage == "run" and "round" in p.message]
    assert turns[:4] == ["without, round 1", "with, round 1", "other attention, round 1", "without, round 2"]
    assert "at most" in told[0].message
    assert told[0].left_s is not None
    assert all(0 <= p.fraction <= 1 for p in told)
    assert told[-1].stage == "done"
    assert not result.interrupted
    assert all(one.valid for one in result.runs)
    assert {one.manifest["workload"]["requests"] for one in result.runs} == {6}


def test_the_finding_is_right_and_the_headline_says_no_more(tmp_path):
    run(study(), tmp_path / "s")
    analysis = analyse([tmp_path / "s"])
    without, cached, other = analysis.summaries
    assert without.previous is None
    assert cached.previous.answer == "faster"
    assert cached.previous.ratio.value == pytest.approx(3.0, rel=0.02)
    assert other.previous.answer == "cannot tell"
    assert headline(analysis).title.startswith("3.00×")
    assert "same quality" in headline(analysis).title
    assert (cached.kl_nats, cached.top1) == (pytest.approx(0.0, abs=1e-12), 1.0)
    assert other.kl_nats > 1e-4
    assert cached.greedy.value == 1.0
    assert cached.time.residual_s == pytest.approx(0.0, abs=1e-9)
    assert cached.goodput.share.value == 1.0


def test_an_interrupted_study_resumes_where_it_stopped(tmp_path):
    engines = []

    def fails_in_the_fifth_run(model, config):
        def stop(engine):
            if len(engines) == 7 and len(engine.steps) == 9:  # pilot and reference came before
                raise KeyboardInterrupt

        engines.append(make_engine(model, config, on_step=stop))
        return engines[-1]

    first = run(study(), tmp_path / "s", fails_in_the_fifth_run)
    assert first.interrupted
    assert str(tmp_path / "s") in first.message
    assert len(first.runs) == 4
    assert not [p for p in (tmp_path / "s" / "runs").iterdir() if p.name.startswith(".")]
    assert all(engine.closed for engine in engines[:-1])
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "s" / "runs").glob("*/manifest.json")}
    second = run(study(), tmp_path / "s")
    assert not second.interrupted
    assert len(second.runs) == 9
    assert (
        before.items()
        <= {p: p.stat().st_mtime_ns for p in (tmp_path / "s" / "runs").glob("*/manifest.json")}.items()
    )
    again = []
    third = run(study(), tmp_path / "s", lambda *a: again.append(a) or make_engine(*a))
    assert again == []
    assert len(third.runs) == 9


def test_a_directory_of_another_study_is_not_touched(tmp_path):
    run(study(repeats=1, min_repeats=1), tmp_path / "s")
    with pytest.raises(StoreError, match="another study"):
        run(study(seed=5), tmp_path / "s")
    with pytest.raises(StoreError, match="already"):
        run(study(), tmp_path / "s", resume=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(StoreError, match="not empty"):
        run(study(), tmp_path / "mine")


def test_a_variant_that_cannot_run_here_is_named_and_left_out(tmp_path):
    def picky(model, config):
        if config.attention == "batched":
            raise ModelError("no such kernel on this machine")
        return make_engine(model, config)

    result = run(study(), tmp_path / "s", picky)
    assert result.failures == {"other attention": "no such kernel on this machine"}
    assert {one.variant for one in result.runs} == {"without", "with"}
    with pytest.raises(ModelError):
        run(study(variants=(Variant("only", {"attention": "batched"}),)), tmp_path / "t", picky)


def test_the_reference_is_the_model_whatever_the_first_variant_is(tmp_path):
    made = []

    def make(model, config):
        made.append(config)
        return make_engine(model, config)

    small = {"weights": "int8-dynamic", "kv_dtype": "int8", "drafter": "ngram", "forced_acceptance": 0.5}
    run(study(variants=(Variant("small", small),), config={}), tmp_path / "s", make=make)
    [reference] = [config for config in made if config.runner == "torch"]
    assert all(getattr(reference, name) == getattr(EngineConfig(), name) for name in small)


def test_a_run_that_noise_spoilt_is_not_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(QuietSampler, "stop", lambda self: Noise(0.7, 1.0, 1.0))
    run(study(), tmp_path / "s")
    analysis = analyse([tmp_path / "s"])
    assert analysis.summaries[1].previous.answer == "cannot tell"
    assert "machine too noisy" in analysis.summaries[1].previous.reason
    assert analysis.best is analysis.baseline
    assert headline(analysis).title.startswith("Cannot tell")
    asked = analyse([tmp_path / "s"], compare_invalid=True)
    assert asked.summaries[1].previous.answer == "faster"


def test_one_round_cannot_tell(tmp_path):
    run(study(repeats=1, min_repeats=1), tmp_path / "s")
    assert [s.previous.answer for s in analyse([tmp_path / "s"]).summaries[1:]] == ["cannot tell"] * 2


def test_texts_are_stored_only_when_asked(tmp_path):
    short = study(repeats=1, min_repeats=1)
    run(short, tmp_path / "s")
    everything = b"".join(p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file())
    assert b"harbour" not in everything
    assert all(one.texts is None for one in load_result(tmp_path / "s").runs)
    run(replace(short, keep_texts=True, name="kept"), tmp_path / "t")
    kept = load_result(tmp_path / "t").runs[0].texts
    assert set(kept) == {r.request_id for r in short.workload.requests}


def test_manifests_hold_what_repeats_a_run_and_no_path(tmp_path):
    result = run(study(), tmp_path / "s")
    manifest = result.runs[0].manifest
    for key in ("engine", "model", "workload", "seed", "slo", "machine", "validity", "noise"):
        assert key in manifest
    assert manifest["engine"]["kv_cache"] is False
    assert str(tmp_path) not in json.dumps(manifest)


def test_time_decides_rounds_and_size():
    costs = {"slow": 10.0, "a": 1.0, "b": 1.0}
    assert plan.rounds_for(costs, 1000, 3, 6) == {"slow": 6, "a": 6, "b": 6}
    assert plan.rounds_for(costs, 41, 3, 6) == {"slow": 3, "a": 5, "b": 5}
    assert plan.rounds_for(costs, 25, 3, 6) == {"slow": 2, "a": 2, "b": 2}
    assert plan.fewest_in_overtime(costs, {"slow": 2, "a": 1, "b": 1}, 5.0) == 2
    assert plan.fewest_in_overtime(costs, {"slow": 1, "a": 1, "b": 1}, 5.0) == 1
    whole = synthetic(requests=12, output_tokens=(24,))
    pace = plan.Pace(0.1, 0.1)
    assert plan.fit_workload(whole, pace, 3.0, 3, 1e6) == (whole, 3)
    fitted, rounds = plan.fit_workload(whole, pace, 3.0, 3, 200.0)
    assert rounds == 3
    assert len(fitted.requests) == 8
    assert fitted.requests[0].params.max_tokens == 24
    smallest, rounds = plan.fit_workload(whole, pace, 3.0, 3, 1.0)
    assert (len(smallest.requests), smallest.requests[0].params.max_tokens, rounds) == (5, 8, 2)


@pytest.fixture(params=["native", "torch"])
def has_native(request, monkeypatch) -> bool:
    """Whether the native kernels are there; without them their rungs must be left out."""
    if request.param == "torch":
        monkeypatch.setattr(ladder.kernels, "library", lambda: None)
        monkeypatch.setattr(ladder.kernels, "why_missing", lambda: "none were built")
    elif ladder.kernels.library() is None:
        pytest.skip(ladder.kernels.why_missing())
    return request.param == "native"


def test_the_ladder_adds_one_switch_a_rung(has_native):
    rungs = ladder.default_study(bf16=True).variants
    for below, rung in itertools.pairwise(rungs):
        changed = {k for k in rung.config if rung.config[k] != below.config.get(k, "unset")} | (
            {"dtype"} if rung.dtype != below.dtype else set()
        )
        together = (
            {"max_num_seqs", "batching", "batch_timeout_s"},
            {"chunked_prefill", "max_num_batched_tokens"},
        )
        assert len(changed) == 1 or any(changed <= group for group in together), (rung.name, changed)
    assert rungs[0].config["runner"] == "torch"
    assert not any(
        rungs[0].config[k] for k in ("kv_cache", "prefix_cache", "chunked_prefill", "packed_linears")
    )
    heads = "draft head and n-gram" in [r.name for r in rungs]
    assert len({r.name for r in rungs}) == (15 if has_native else 10) + heads
    assert len(ladder.default_study(bf16=False).variants) == len(rungs) - 1


@pytest.mark.parametrize("has_head", [True, False])
def test_the_ladder_ends_with_the_head_that_the_model_has(monkeypatch, tmp_path, has_head):
    if has_head:
        (tmp_path / "draft_head_my-model.safetensors").touch()
    monkeypatch.setattr(ladder, "head_file", lambda name: head_file(name, (tmp_path,)))
    for name in ("me/My-Model", str(tmp_path / "My-Model") + "/"):
        chosen = ladder.default_study(name, bf16=False)
        assert [v.name for v in chosen.variants][-2 + (not has_head) :] == [
            "n-gram speculation",
            *(["draft head and n-gram"] if has_head else []),
        ]
        assert (
            any("My-Model has no draft head: `perflab train-drafter`" in n for n in chosen.notes) != has_head
        )


def test_the_ladder_says_why_it_has_no_native_rungs(has_native):
    chosen = ladder.default_study(bf16=True)
    assert ("native step" in [v.name for v in chosen.variants]) == has_native
    assert any("none were built" in note for note in chosen.notes) != has_native


def test_the_ladder_runs_on_a_real_engine(tmp_path, has_native):
    chosen = ladder.default_study("tiny", quick=True, bf16=False)
    few = replace(chosen, workload=chosen.workload.first(5, 4), repeats=1, min_repeats=1, quality_texts=1)
    result = run_study(few, tmp_path / "s", load_model=lambda name, dtype, device: tiny("llama"))
    assert result.failures == {}
    assert len(result.runs) == len(chosen.variants)
    for one in result.runs:
        assert [r.outcome for r in one.requests] == ["completed"] * 5
        assert one.valid, one.reasons
        if one.manifest["engine"]["weights"] == "model":
            assert one.manifest["greedy_match"]["matched"] == one.manifest["greedy_match"]["compared"]
    kl = {s.name: s.kl_nats for s in analyse([tmp_path / "s"]).summaries}
    small = [kl.pop(name) for name in ("int8 weights", "int4 weights", "int8 KV cache") if name in kl]
    guessed = {run.variant: run.manifest["greedy_match"] for run in result.runs[-2:]}
    if has_native:
        assert guessed["n-gram speculation"] == guessed["int8 KV cache"], "speculation changes no token"
        assert kl.pop("n-gram speculation") == small.pop()
    assert max(kl.values()) < 1e-6
    assert small == sorted(small), "4 bits are farther from the reference than 8"
    assert all(value > 1e-6 for value in small)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"runner": "native"}, {"runner": "native", "attention": "sdpa", "max_num_seqs": 3}, True),
        ({"runner": "native"}, {"runner": "native", "weights": "int8-dynamic"}, False),
        ({"runner": "native"}, {"runner": "native", "kv_dtype": "int8"}, False),
        ({}, {"attention": "sdpa"}, False),
        ({"runner": "torch"}, {"runner": "torch", "packed_linears": False}, False),
        ({"runner": "torch", "attention": "native"}, {"runner": "native", "attention": "native"}, False),
    ],
)
def test_variants_share_a_score_only_if_they_share_their_numbers(a, b, same):
    keys = {quality.numeric_key(EngineConfig(**switches), "bfloat16") for switches in (a, b)}
    assert (len(keys) == 1) == same


def some_run() -> Run:
    record = RequestRecord(
        "r1",
        5,
        7,
        3,
        first_token_ns=2**62,
        token_ns=[1, 2],
        chunk_tokens=[1, 0],
        outcome="failed",
        error="“bad” \n row",
        spans=[Span("queue", 1, 2**53 + 1)],
        seed=2**62 + 1,
    )
    return Run(
        {"variant": "v", "round": 1, "x": [1.5, None, "ü"]},
        [record, RequestRecord("r2", 0, 0, 1)],
        [StepRecord(0, 1, 2, 3, 4, 5, 6, 7, rows=2)],
        [EventRecord(9, "preempted", "r1", {"blocks": 3, "why": {"deep": [1]}})],
    )


def test_a_run_reads_back_exactly(tmp_path):
    run_ = some_run()
    store.write_run(tmp_path / "a", run_)
    back = store.read_run(tmp_path / "a")
    assert (back.manifest, back.requests, back.steps, back.events) == (
        run_.manifest,
        run_.requests,
        run_.steps,
        run_.events,
    )
    with pytest.raises(StoreError, match="already"):
        store.write_run(tmp_path / "a", run_)


def test_a_failed_write_leaves_nothing(tmp_path):
    bad = some_run()
    bad.manifest["nan"] = math.nan
    with pytest.raises(ValueError, match="JSON"):
        store.write_run(tmp_path / "a", bad)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["requests.parquet", "steps.parquet", "events.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_damage_is_found(tmp_path, name, damage):
    store.write_run(tmp_path / "a", some_run())
    file = tmp_path / "a" / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else b"X" + content[1:])
    with pytest.raises(StoreError, match=name if name != "manifest.json" else "manifest"):
        store.read_run(tmp_path / "a")


def test_another_format_is_refused(tmp_path):
    store.write_run(tmp_path / "a", some_run())
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    (tmp_path / "a" / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(StoreError, match="99"):
        store.read_run(tmp_path / "a")


def test_runs_are_found_and_their_absence_is_said(tmp_path):
    store.write_run(tmp_path / "runs" / "b", some_run())
    store.write_run(tmp_path / "runs" / "a", some_run())
    assert [p.name for p in store.find_runs([tmp_path])] == ["a", "b"]
    assert store.find_runs([tmp_path / "runs" / "b"]) == [tmp_path / "runs" / "b"]
    with pytest.raises(StoreError, match="no finished run"):
        store.find_runs([tmp_path / "runs"])


YAML = """
name: kv-cache
model: smollm2-135m
workload: {kind: synthetic, requests: 4, output_tokens: [8]}
config: {max_num_seqs: 2}
variants:
  - {name: without, config: {kv_cache: false}}
  - {name: with, dtype: bfloat16}
slo: {ttft_s: 2.0}
time_budget_s: 60
"""


def test_a_study_file_says_the_same_as_python(tmp_path):
    (tmp_path / "s.yaml").write_text(YAML)
    loaded = load_study_file(tmp_path / "s.yaml")
    assert [v.dtype for v in loaded.variants] == ["float32", "bfloat16"]
    assert loaded.engine_config(loaded.variants[0]).kv_cache is False
    assert loaded.engine_config(loaded.variants[1]).max_num_seqs == 2
    assert loaded.slo == SLO(ttft_s=2.0)
    same = Study(
        "kv-cache",
        "smollm2-135m",
        synthetic(requests=4, output_tokens=[8]),
        (Variant("without", {"kv_cache": False}), Variant("with", {}, "bfloat16")),
        config={"max_num_seqs": 2},
        slo=SLO(ttft_s=2.0),
    )
    assert loaded.fingerprint == same.fingerprint


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("name: kv-cache", "nam: kv-cache"), "nam"),
        (("model: smollm2-135m", ""), "model"),
        (("kv_cache: false", "kv_cach: false"), "kv_cach"),
        (("bfloat16", "int3"), "int3"),
        (("kind: synthetic", "kind: wish"), "wish"),
        (("ttft_s", "tfft_s"), "tfft_s"),
        (("name: with,", "name: without,"), "its own name"),
        (("time_budget_s: 60", "time_budget_s: -1"), "time_budget_s"),
        (("variants:", "variants: ["), "not YAML"),
    ],
)
def test_a_wrong_study_file_names_what_is_wrong(tmp_path, change, named):
    (tmp_path / "s.yaml").write_text(YAML.replace(*change))
    with pytest.raises((WorkloadError, ConfigError), match=named):
        load_study_file(tmp_path / "s.yaml")


def test_a_busy_moment_during_the_pilot_does_not_shrink_the_study(tmp_path):
    def stalls_once(model, config):
        return FakeEngine(model, config, step_ms=lambda config, index: 60_000.0 if index == 2 else 10.0)

    run(study(repeats=1, min_repeats=1), tmp_path / "s", stalls_once)
    kept = store.read_json(tmp_path / "s" / "plan.json")
    assert (kept["requests"], kept["max_tokens"]) == (6, 8)


def test_a_slow_model_gets_less_work_and_the_manifest_says_so(tmp_path):
    def slow(model, config):
        return FakeEngine(model, config, step_ms=lambda config, index: 2_000.0)

    result = run(study(repeats=1, min_repeats=1, time_budget_s=100.0), tmp_path / "s", slow)
    assert result.runs[0].manifest["workload"]["requests"] == 5
    assert "cut to 5 requests" in result.runs[0].manifest["workload"]["description"]
