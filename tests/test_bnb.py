"""bitsandbytes weights through the engine: transformers' own quantized model says what is right."""

from __future__ import annotations

import random
import sys
import warnings
from functools import cache

import pytest
import torch
from fake_model import drain
from test_engine import greedy

from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.errors import ConfigError, ModelError, NotNative
from perflab.models.bnb import SCHEMES, BnbRunner, tensor_bytes
from perflab.models.loaded import LoadedModel
from perflab.models.runners import make_runner
from perflab.models.tiny import tiny
from perflab.types import Request

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:.*bitsandbytes is slow on a CPU")

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
ODD = {"hidden_size": 48, "intermediate_size": 96, "head_dim": 12}  # no whole blocks of 64, no panels of 32


@cache
def model() -> LoadedModel:
    return tiny("llama", **WIDE)


def reference(loaded: LoadedModel, weights: str, directory):
    """The same weights as transformers itself quantizes them."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options = (
        {"load_in_8bit": True, "llm_int8_threshold": 6.0}
        if weights == "llm.int8"
        else {"load_in_4bit": True, "bnb_4bit_quant_type": weights, "bnb_4bit_compute_dtype": loaded.dtype}
    )
    loaded.module.save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=BitsAndBytesConfig(**options), device_map="cpu", dtype=loaded.dtype
    ).eval()


@torch.inference_mode()
def answer(module, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = module.generate(
        ids, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count
    )
    return out[0, len(prompt) :].tolist()


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(256) for _ in range(length)] for length in (3, 9, 17, 30, 5)]


def generated(loaded: LoadedModel, asked: list[list[int]], count: int, **options) -> list[list[int]]:
    engine = Engine(loaded, EngineConfig(**options))
    assert isinstance(engine.executor.runner, BnbRunner)
    for index, prompt in enumerate(asked):
        engine.submit(Request(str(index), prompt, greedy(count)))
    tokens = drain(engine)  # checks every step, and at the end that nothing is left
    return [tokens[str(index)] for index in range(len(asked))]


@pytest.mark.parametrize("weights", ["nf4", "fp4"])
def test_4_bit_tokens_are_those_of_transformers_under_continuous_batching(weights, tmp_path) -> None:
    module = reference(model(), weights, tmp_path)
    right = [answer(module, prompt, 12) for prompt in prompts()]
    tight = {"max_num_batched_tokens": 16, "num_blocks": 8, "max_num_seqs": 4}
    for options in ({}, tight):
        assert generated(model(), prompts(), 12, weights=weights, **options) == right


def test_llm_int8_tokens_are_those_of_transformers_where_the_step_has_the_same_rows(tmp_path) -> None:
    """Outlier columns are found over all rows of a product: alone, a request has transformers' own rows."""
    module = reference(model(), "llm.int8", tmp_path)
    for prompt in prompts():
        got = generated(model(), [prompt], 12, weights="llm.int8", prefix_cache=False)
        assert got == [answer(module, prompt, 12)]


def test_llm_int8_in_a_batch_differs_by_what_other_rows_make_an_outlier(monkeypatch) -> None:
    """Without outliers no row knows of another, so that batched tokens are those of each alone."""
    together = generated(model(), prompts(), 12, weights="llm.int8")
    assert [len(tokens) for tokens in together] == [12] * len(prompts())
    monkeypatch.setattr("perflab.models.bnb.OUTLIER_THRESHOLD", 0.0)
    alone = [generated(model(), [prompt], 12, weights="llm.int8")[0] for prompt in prompts()]
    assert generated(model(), prompts(), 12, weights="llm.int8") == alone


@pytest.mark.parametrize("weights", SCHEMES)
@pytest.mark.parametrize(("arch", "sizes"), [("qwen2", ODD), ("gemma2", WIDE), ("qwen2_moe", ODD)])
def test_other_architectures_and_shapes_run(weights, arch, sizes) -> None:
    assert [len(t) for t in generated(tiny(arch, **sizes), prompts()[:2], 4, weights=weights)] == [4, 4]


@pytest.mark.parametrize("weights", SCHEMES)
def test_memory_falls_and_the_loaded_model_stays_as_it_was(weights) -> None:
    loaded = model()
    kinds = {name: type(child) for name, child in loaded.module.named_modules()}
    before = {name: value.clone() for name, value in loaded.module.state_dict().items()}
    lines: list[str] = []
    runner = BnbRunner(loaded, weights, progress=lines.append)
    assert runner.loaded_bytes == tensor_bytes(loaded.module)
    shared = 2 * 320 * 64 * 4  # embedding and head stay
    share = (runner.weight_bytes - shared) / (runner.loaded_bytes - shared)
    assert 0.1 < share < (0.3 if weights == "llm.int8" else 0.2)
    assert runner.module.lm_head.weight is loaded.module.lm_head.weight
    assert len(lines) == 14
    assert "14 of 14" in lines[-1]
    assert {name: type(child) for name, child in loaded.module.named_modules()} == kinds
    assert all(torch.equal(value, before[name]) for name, value in loaded.module.state_dict().items())


def test_rules_keep_matrices() -> None:
    def kept(keep: str) -> set[str]:
        module = BnbRunner(model(), "nf4", keep).module
        return {
            name.removeprefix("model.layers.")
            for name, child in module.named_modules()
            if type(child) is torch.nn.Linear and name != "lm_head"
        }

    assert kept("head") == set()
    assert kept("down") == {"0.mlp.down_proj", "1.mlp.down_proj"}
    assert kept("layers.1.down, layers.0.qkv") == {
        "1.mlp.down_proj",
        *(f"0.self_attn.{part}_proj" for part in "qkv"),
    }
    assert len(kept("first")) == len(kept("last")) == 7
    with pytest.raises(ConfigError, match="sideways"):
        kept("sideways")


def test_what_cannot_run_is_said(monkeypatch) -> None:
    with pytest.raises(NotNative, match="fp8"):
        make_runner(model(), EngineConfig(weights="fp8"))
    with pytest.raises(ConfigError, match="torch"):
        EngineConfig(weights="nf4", runner="native")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match="pip install"):
        make_runner(model(), EngineConfig(weights="nf4"))


def test_slowness_is_said_once_and_nothing_at_each_call(caplog) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        generated(model(), prompts()[:1], 3, weights="llm.int8", runner="torch")
    assert ["slow on a CPU" in str(one.message) for one in caught].count(True) == 1
    assert not [record for record in caplog.records if record.name.startswith("bitsandbytes")]


@pytest.mark.verify
@pytest.mark.parametrize("weights", ["nf4", "fp4"])
def test_the_embedded_model_answers_as_transformers_does(embedded, weights, tmp_path) -> None:
    """Up to a tie: the 4-bit kernel for CPUs rounds activations to bf16, so that transformers' own logits
    (deviation about 7) move by up to 0.5 between a cached and a whole forward pass of the same tokens."""
    asked = [embedded.encode(text) for text in ("The capital of France is", "def add(a, b):", "Once upon")]
    module = reference(embedded, weights, tmp_path)
    for prompt, got in zip(asked, generated(embedded, asked, 16, weights=weights), strict=True):
        right = answer(module, prompt, 16)
        if got != right:
            at = next(i for i in range(16) if got[i] != right[i])
            assert gap(module, prompt, right, got[at], at) < 0.05


@torch.inference_mode()
def gap(module, prompt: list[int], right: list[int], other: int, at: int) -> float:
    """By how much the reference, decoding with its cache, prefers its own token number `at`."""
    out = module(torch.tensor([prompt]))
    for token in right[:at]:
        out = module(torch.tensor([[token]]), past_key_values=out.past_key_values)
    return float(out.logits[0, -1, right[at]] - out.logits[0, -1, other])
