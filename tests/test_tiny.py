"""Tiny random models: the same for the same seed, lively when decoded, silent towards global state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from perflab.errors import ModelError
from perflab.models.tiny import ARCHITECTURES, ByteTokenizer, tiny

PROMPTS = ("Hello there!", "A quick fox.", "Once upon a ")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second thread, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_decoding_wanders_and_follows_its_prompt(arch: str) -> None:
    model = tiny(arch)
    ids = torch.tensor([model.encode(prompt) for prompt in PROMPTS])
    start = ids.shape[1]
    for _ in range(20):
        ids = torch.cat((ids, model.module(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    outputs = ids[:, start:].tolist()
    assert all(len(set(output)) >= 5 for output in outputs)
    assert len({tuple(output) for output in outputs}) == len(PROMPTS)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_leading_logits_are_apart(arch: str) -> None:
    ids = torch.arange(0, 256, 2).view(2, -1)
    top = tiny(arch).module(ids).logits.topk(2).values
    gaps = top[..., 0] - top[..., 1]
    assert gaps.median() > 0.05
    assert (gaps < 5e-4).float().mean() < 0.02


def test_seeds_decide_weights_and_leave_global_randomness_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = tiny(seed=3), tiny(seed=3), tiny(seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert one.fingerprint == same.fingerprint
    assert one.fingerprint != other.fingerprint
    for left, right in zip(one.module.parameters(), same.module.parameters(), strict=True):
        assert torch.equal(left, right)


def test_models_are_frozen_and_share_nothing() -> None:
    one, same = tiny(), tiny()
    assert not one.module.training
    assert not any(parameter.requires_grad for parameter in one.module.parameters())
    next(one.module.parameters()).zero_()
    assert next(same.module.parameters()).abs().sum() > 0


def test_any_changed_weight_changes_the_fingerprint() -> None:
    from perflab.models.loaded import fingerprint

    model = tiny()
    with torch.no_grad():
        model.module.model.layers[1].mlp.up_proj.weight[77, 31] += 1e-6
    assert fingerprint(model.module, model.config) != model.fingerprint


def test_a_fingerprint_knows_bytes_not_memory_layout() -> None:
    from torch import nn

    from perflab.models.loaded import fingerprint

    config = tiny().config
    backing = torch.arange(41, dtype=torch.bfloat16)
    view, copy = nn.Module(), nn.Module()
    view.register_buffer("x", backing[1:])
    copy.register_buffer("x", backing[1:].clone())
    assert fingerprint(view, config) == fingerprint(copy, config)
    copy.x[39] += 1
    assert fingerprint(view, config) != fingerprint(copy, config)


def test_special_architectures_have_what_they_are_there_for() -> None:
    assert tiny("mistral").config.sliding_window == 8
    assert tiny("gemma2").config.attn_logit_softcapping == 4.0
    assert set(tiny("gemma3").config.layer_types) == {"sliding_attention", "full_attention"}
    assert any("sinks" in name for name, _ in tiny("gpt_oss").module.named_parameters())
    assert tiny("gemma").config.tie_word_embeddings
    assert tiny("mixtral").config.num_local_experts == 4


def test_sizes_can_be_overridden() -> None:
    model = tiny("qwen3", vocab_size=512, num_hidden_layers=3, max_position_embeddings=64)
    assert model.module(torch.tensor([[1, 2]])).logits.shape == (1, 2, 512)
    assert len(model.module.model.layers) == 3
    assert model.max_model_len == 64


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ModelError, match=r"'rnn'.*llama"):
        tiny("rnn")


@pytest.mark.parametrize("text", ["", "plain", "Größe 漢字 🙂", "a\x00b\n"])
def test_byte_tokenizer_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_tokenizer_specials_and_broken_characters() -> None:
    tokenizer = ByteTokenizer()
    ids = [tokenizer.bos_token_id, *tokenizer.encode("é")[:1], tokenizer.eos_token_id, 300]
    assert tokenizer.decode(ids) == "\ufffd"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>\ufffd<eos>"


def test_chat_ends_with_the_assistants_turn() -> None:
    model = tiny()
    assert model.decode(model.chat("hi")) == "user: hi\nassistant: "
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert model.decode(model.chat(messages)) == "system: s\nuser: u\nassistant: "
