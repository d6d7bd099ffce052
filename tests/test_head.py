"""The draft head: its two runners agree, training does what drafting does, engines with it stay lossless."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_model import assert_empty
from test_speculate import SCHEDULES, config, run
from typer.testing import CliRunner

import perflab
from perflab.config import EngineConfig
from perflab.engine import llm as engine_llm
from perflab.engine.engine import Engine
from perflab.errors import ConfigError, ModelError, StoreError
from perflab.models.native import NativeRunner
from perflab.models.tiny import tiny
from perflab.speculate import collect, train
from perflab.speculate.head import FOLDER, HeadDrafter, head_file, head_path
from perflab.speculate.head_module import DraftHead, HeadShape, read_head
from perflab.speculate.head_native import NativeHead
from perflab.speculate.head_torch import TorchHead
from perflab.types import SamplingParams

SHIPPED = FOLDER / head_path("smollm2-135m")
FIRST_HELD = 0.3  # of first guesses of the shipped head on real prompts, at least
QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "Tom has 12 apples and gives away 5. How many are left? Think step by step.",
    "Name three rivers of Europe and say where they flow.",
)
VOCABULARY = 64
TEACH = train.TrainConfig(
    vocabulary=VOCABULARY, batch_tokens=256, epochs=6.0, warm_up=5, evaluate_every=20, held_out=0.1
)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def head_of(model, seed: int = 0) -> DraftHead:
    torch.manual_seed(seed)
    shape = HeadShape.like(model, VOCABULARY)
    module = train.initial(shape, torch.full((shape.hidden,), 1.0), model.module)
    token_ids = torch.arange(VOCABULARY) * 3
    return DraftHead(module.eval().requires_grad_(False), token_ids, {})


def features_of(model, count: int, seed: int = 0) -> tuple[torch.Tensor, list[int]]:
    """Features [count, hidden] of about the size that a final norm gives, and tokens."""
    rng = torch.Generator().manual_seed(seed)
    hidden = model.module.config.hidden_size
    return torch.randn(count, hidden, generator=rng), torch.randint(0, 200, (count,), generator=rng).tolist()


@pytest.fixture(scope="module")
def shards(model, tmp_path_factory):
    """Greedy answers of the model to short texts that recur, in ten shards."""
    llm = engine_llm.LLM(model, EngineConfig(max_num_seqs=16))

    def converse(llm, rng: random.Random) -> list[collect.Example]:
        prompts = [[rng.randrange(8), 5, 6] for _ in range(16)]
        found = llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
        return [
            collect.Example([*prompt, *completion.token_ids], 3)
            for prompt, completion in zip(prompts, found, strict=True)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "_converse", converse)
        return collect.collect(llm, tmp_path_factory.mktemp("texts"), 10 * 16 * 27)


# The two runners of a head.


def test_native_steps_are_the_reference_s(model) -> None:
    """Several requests: prompts in chunks, chains, true pairs over rejected ones, one that is forgotten.

    Native weights are int8 and its keys bf16: each row's feature agrees to 6% of its size, and a draft that
    differs was as likely to the reference within 5% of the spread of its logits.
    """
    head = head_of(model)
    native = NativeHead(head, NativeRunner(model, "model", 2))
    torch_head = TorchHead(head, model)
    slots = [[steps.open() for _ in range(3)] for steps in (native, torch_head)]

    def both(rows: list[int], starts: list[int], counts: list[int], seed: int) -> None:
        features, tokens = features_of(model, sum(counts), seed)
        one, other = (
            steps.step([own[row] for row in rows], starts, counts, features, tokens)
            for steps, own in zip((native, torch_head), slots, strict=True)
        )
        assert ((one.feature - other.feature).norm(dim=1) < 0.06 * other.feature.norm(dim=1)).all()
        logits = other.feature @ torch_head.rows.T
        place = {token: index for index, token in enumerate(head.token_ids.tolist())}
        for row, (mine, wanted) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            gap = logits[row, place[wanted]] - logits[row, place[mine]]
            assert gap <= 0.05 * logits[row].std()
        assert one.share == pytest.approx(other.share, abs=0.1)

    both([0, 1], [0, 0], [37, 5], 1)  # a long prompt's first chunk beside a short one
    both([0, 1], [37, 5], [20, 1], 2)  # its second chunk beside a chain's draft
    both([1, 0], [6, 57], [1, 1], 3)  # drafts
    both([0, 1, 2], [57, 5, 0], [2, 3, 70], 4)  # rejected places taken by true pairs; a late one
    for steps, own in zip((native, torch_head), slots, strict=True):
        steps.close(own[0])
        own[0] = steps.open()
    both([0, 2], [0, 70], [3, 1], 5)  # another request in the memory that was given back


def test_a_head_of_another_size_is_refused(model) -> None:
    other = tiny("llama", hidden_size=64, head_dim=16)
    with pytest.raises(ModelError, match="hidden size 64"):
        NativeHead(head_of(other), NativeRunner(model, "model", 1))


# Training.


def test_an_unrolled_pass_is_drafting_step_by_step(model) -> None:
    """Pass s at position t is the s-th draft of the chain that left the text at t - s."""
    head, length, depth = head_of(model, 3), 9, 4
    steps = TorchHead(head, model)
    features, tokens = features_of(model, length, 7)
    batch = SimpleNamespace(feature=features[None], embedding=steps.embed(torch.tensor(tokens))[None])
    passes = [g[0] for g in train.guesses(head.module, batch, 1.0, depth, autocast=False)]
    for root in range(length):
        slot = steps.open()
        guess = steps.step([slot], [0], [root + 1], features[: root + 1], tokens[: root + 1])
        for place in range(min(depth, length - root)):
            at = root + place
            if place:
                guess = steps.step([slot], [at], [1], guess.feature, [tokens[at]])
            torch.testing.assert_close(guess.feature[0], passes[place][at], atol=1e-4, rtol=1e-4)


def test_training_begins_with_the_target_s_last_layer(model) -> None:
    module, layer = head_of(model).module, model.module.model.layers[-1]
    q, k, v = module.qkv.weight.split((48, 24, 24))
    assert torch.equal(q, layer.self_attn.q_proj.weight)
    assert torch.equal(k, layer.self_attn.k_proj.weight)
    assert torch.equal(v, layer.self_attn.v_proj.weight)
    assert torch.equal(module.out.weight, layer.self_attn.o_proj.weight)
    gate, up = module.gate_up.weight.chunk(2)
    assert torch.equal(gate, layer.mlp.gate_proj.weight)
    assert torch.equal(up, layer.mlp.up_proj.weight)
    assert torch.equal(module.down.weight, layer.mlp.down_proj.weight)
    other = head_of(tiny("phi3")).module  # of other names: random, and not refused
    assert 0.015 < float(other.qkv.weight.std()) < 0.025


def test_training_learns_and_goes_on_to_the_same_weights(model, shards, tmp_path) -> None:
    said: list[str] = []
    whole = train.Trainer(model, shards, tmp_path / "whole", TEACH, said.append)
    untrained = train.evaluate(whole.module, whole.test, whole.target, whole.scale)
    path = whole.run()
    assert whole.log[-1]["loss"] < 0.8 * whole.log[0]["loss"]
    assert whole.best > untrained.length
    assert whole.log[-1]["rates"][0] > 10 / VOCABULARY, "chance is 1 in 64"
    assert len(said) == len(whole.log) > 2
    meta = read_head(path).meta
    assert meta["fingerprint"] == model.fingerprint
    assert meta["training"]["seed"] == TEACH.seed

    def interrupt(message: str) -> None:
        if message.startswith("step 40"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.Trainer(model, shards, tmp_path / "halves", TEACH, interrupt).run()
    second = train.Trainer(model, shards, tmp_path / "halves", TEACH)
    assert second.step == 20
    second.run()
    assert second.step == whole.step
    for name, value in whole.module.state_dict().items():
        torch.testing.assert_close(second.module.state_dict()[name], value, atol=1e-5, rtol=1e-4)


def test_a_collection_goes_on_and_refuses_another_model_s(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(collect, "CONVERSATIONS", 3)
    monkeypatch.setattr(collect, "_ANSWER_TOKENS", 8)
    llm = engine_llm.LLM(model)
    folder = tmp_path / "texts"
    first = collect.collect(llm, folder, 1)
    before = first[0].read_bytes()
    (tokens, features, answer), *_ = collect.load(first)
    assert features.shape == (len(tokens), 48)
    assert 0 < answer < len(tokens)
    both = collect.collect(llm, folder, 1 + sum(len(t) for t, _, _ in collect.load(first)))
    assert both[0] == first[0]
    assert len(both) == 2
    assert first[0].read_bytes() == before
    with pytest.raises(StoreError, match="another model"):
        collect.collect(engine_llm.LLM(tiny("llama", seed=1)), folder, 1)
    with pytest.raises(ConfigError, match="max_model_len=64"):
        collect.collect(engine_llm.LLM(model, EngineConfig(max_model_len=64)), folder, 1)


# In the engine.


@pytest.fixture(scope="module")
def plain(model):
    return run(Engine(model, config()))[0]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_head_changes_no_token(model, plain, schedule) -> None:
    drafter = HeadDrafter(TorchHead(head_of(model), model))
    engine = Engine(model, config(**schedule), drafter=drafter)
    assert run(engine)[0] == plain
    assert engine._drafting.drafter is drafter, "it did not fail and was not let go"
    assert sum(step.draft_tokens for step in engine.steps) > 0
    assert not drafter._texts, "who ended is forgotten"
    if schedule.get("num_blocks") == 14:
        assert any(record.preemptions for record in engine.records)
    assert_empty(engine)


def test_llm_drafts_as_its_configuration_says(model, monkeypatch, tmp_path) -> None:
    """The command's head is found where it was installed; an engine that has no drafter refuses."""
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path))
    own = config(drafter="head", adaptive_draft=False)
    with pytest.raises(ModelError, match="train-drafter"):
        perflab.LLM(model, own)
    head_of(model).save(tmp_path / "heads" / head_path(model.name))
    assert head_file(model.name).parent == tmp_path / "heads"
    asked, params = [[1, 2, 3]], SamplingParams(max_tokens=16, temperature=0.0)
    llm = perflab.LLM(model, own)
    found = llm.generate(asked, params)[0]
    assert any(step.draft_tokens for step in llm.engine.steps)
    assert found.token_ids == perflab.LLM(model, config()).generate(asked, params)[0].token_ids
    with pytest.raises(ConfigError, match="make_engine"):
        engine_llm.LLM(model, own)


def test_the_command_installs_a_head_and_goes_on_after_an_interruption(model, monkeypatch, tmp_path) -> None:
    from perflab.cli import app
    from perflab.models import load

    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(load, "load", lambda name, **options: replace(model, name="org/Tiny"))
    monkeypatch.setattr(collect, "CONVERSATIONS", 4)
    monkeypatch.setattr(collect, "_ANSWER_TOKENS", 8)
    command = ["train-drafter", "org/Tiny", "--tokens", "2500", "--minutes", "0.05", "--vocabulary", "64"]
    training = train.Trainer.run

    def interrupted(self: train.Trainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train.Trainer, "run", interrupted)
    stopped = CliRunner().invoke(app, command)
    assert stopped.exit_code == 130
    assert "the same command goes on" in stopped.output
    monkeypatch.setattr(train.Trainer, "run", training)
    monkeypatch.setattr(collect, "_converse", interrupted)  # nothing is collected twice
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "held-out acceptance" in done.output
    assert read_head(head_file("org/Tiny")).meta["model"] == "Tiny"
    elsewhere = tmp_path / "own.safetensors"
    assert CliRunner().invoke(app, [*command, "--out", str(elsewhere)]).exit_code == 0
    assert elsewhere.read_bytes() == head_file("org/Tiny").read_bytes()


@pytest.mark.verify
@pytest.mark.skipif(not SHIPPED.is_file(), reason=f"{SHIPPED.name} is not there yet")
def test_the_shipped_head_changes_nothing_and_is_often_right(embedded_bf16) -> None:
    asked = [embedded_bf16.chat(text) for text in QUESTIONS]
    params = SamplingParams(max_tokens=96, temperature=0.0)
    found, engines = [], []
    for drafter in ("off", "head"):
        llm = perflab.LLM(embedded_bf16, EngineConfig(drafter=drafter, adaptive_draft=False))
        found.append([completion.token_ids for completion in llm.generate(asked, params)])
        engines.append(llm.engine)
    assert found[0] == found[1]
    reached = sum(record.draft_reached[0] for record in engines[1].records)
    assert sum(record.draft_accepted[0] for record in engines[1].records) > FIRST_HELD * reached > 0
