"""Loading: what is accepted, what comes with a model, and how each refusal is worded."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gguf import SIZES as GGUF_SIZES
from test_gguf import write as gguf_file

from perflab.errors import ConfigError, ModelError
from perflab.models import hub, identity
from perflab.models.load import choose_dtype, load, runs_bf16_fast, sampling_defaults, stop_tokens
from perflab.models.loaded import Deferred, LoadedModel, fingerprint
from perflab.models.tiny import tiny
from perflab.types import SamplingParams, Span

DATA = Path(__file__).parents[1].parent / "shared" / "data"


def saved(path: Path, arch: str = "llama", **overrides: Any) -> Path:
    tiny(arch, **overrides).module.save_pretrained(path)
    return path


def described(path: Path, **config: Any) -> Path:
    """A directory with a config.json and nothing else."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


# The embedded model


def test_embedded_model_is_the_original(embedded: LoadedModel) -> None:
    config = embedded.config
    assert type(embedded.module).__name__ == "LlamaForCausalLM"
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 100000.0)
    assert config.tie_word_embeddings
    assert embedded.module.lm_head.weight is embedded.module.model.embed_tokens.weight
    assert not hasattr(config, "quantization_config")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert embedded.stop_token_ids == (2,)
    assert embedded.defaults == SamplingParams()
    assert embedded.max_model_len == 8192
    assert embedded.notes == ("weights are dequantised from Q4_1",)
    assert not embedded.module.training
    assert not any(parameter.requires_grad for parameter in embedded.module.parameters())
    spans = [span.name for span in embedded.load_spans]
    assert spans[:2] == ["fetch", "tokenizer"]
    assert spans[2:] in (["import", "weights", "fingerprint"], ["identity", "import", "weights"])


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("12345", [33, 34, 35, 36, 37]),
        ("in 2024", [254, 216, 34, 32, 34, 36]),
        ("x1 = 10**3", [104, 33, 446, 216, 33, 32, 828, 35]),
        ("Hello, world!", [19556, 28, 905, 17]),
        ("<|im_start|>user\n", [1, 4093, 198]),
    ],
)
def test_embedded_token_ids_are_the_originals(embedded: LoadedModel, text: str, ids: list[int]) -> None:
    assert embedded.encode(text) == ids
    assert embedded.decode(ids, skip_special_tokens=False) == text


def test_embedded_chat_template(embedded: LoadedModel) -> None:
    text = embedded.decode(embedded.chat("Hi 42"), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert "SmolLM" not in embedded.decode(embedded.chat(own))


def test_embedded_model_answers(embedded: LoadedModel) -> None:
    ids = torch.tensor([embedded.chat("What is the capital of France?")])
    out = embedded.module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
    assert embedded.decode(out[0, ids.shape[1] :].tolist()).startswith("The capital of France is Paris")


def test_bf16_is_the_fp32_model_rounded(embedded: LoadedModel, embedded_bf16: LoadedModel) -> None:
    state = embedded_bf16.module.state_dict()
    assert embedded_bf16.dtype == torch.bfloat16
    for name, tensor in list(embedded.module.state_dict().items())[::7]:
        assert torch.equal(tensor.bfloat16(), state[name]), name
    assert embedded.fingerprint != embedded_bf16.fingerprint


@pytest.mark.verify
def test_embedded_weights_and_tokens_equal_another_reading(embedded: LoadedModel) -> None:
    """transformers' GGUF route with its two losses mended: the digits' pre-tokenizer put back."""
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from perflab.models import assets

    path = assets.fetch()
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    state = theirs.state_dict()
    for name, tensor in embedded.module.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    own = Path(__file__).parents[1] / "data" / "prompts"
    texts = [line for path in sorted(own.glob("*.jsonl")) for line in path.read_text("utf-8").splitlines()]
    assert texts, "no prompts: the rest of this test would be empty"
    if DATA.is_dir():
        texts += _prompts_of_others()
    for text in texts:
        ids = embedded.encode(text)
        assert ids == tokenizer.encode(text)
        assert embedded.decode(ids) == text


def _prompts_of_others() -> list[str]:
    texts = [json.loads(line)["question"] for line in (DATA / "gsm8k_test.jsonl").open()][:200]
    texts += [str(json.loads(line)) for line in (DATA / "mt_bench.jsonl").open()]
    texts.append((DATA / "wikitext2_test.txt").read_text()[:200_000])
    return texts


# Weights that wait


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny GGUF file that was read once, with a cache of its own."""
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "_SMALL", 0)
    path = gguf_file(tmp_path / "m.gguf", tiny(**GGUF_SIZES, seed=3), "llama")
    load(path, dtype="fp32", device="cpu")
    return path


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "identity").iterdir())


def test_a_known_file_is_served_without_its_weights(remembered: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    later = load(remembered, dtype="fp32", device="cpu", progress=lines.append)
    assert [span.name for span in later.load_spans] == ["tokenizer", "identity"]
    assert "Reading the weights" not in lines
    shutil.rmtree(tmp_path / "cache")
    first = load(remembered, dtype="fp32", device="cpu")
    for fact in dataclasses.fields(first):
        if fact.name not in ("module", "config", "tokenizer", "load_spans", "deferred"):
            assert getattr(later, fact.name) == getattr(first, fact.name), fact.name
    assert "fingerprint=" in repr(later)
    assert [span.name for span in later.load_spans] == ["tokenizer", "identity"]  # nothing asked for them
    ids = torch.arange(20)[None]
    assert torch.equal(later.module(ids).logits, first.module(ids).logits)
    assert later.config is later.module.config
    assert later.module is later.module
    assert not later.module.training
    assert fingerprint(later.module, later.config) == first.fingerprint
    assert [span.name for span in later.load_spans] == ["tokenizer", "identity", "import", "weights"]
    assert "Reading the weights" in lines
    with pytest.raises(AttributeError, match=r"modul"):
        later.modul  # type: ignore[attr-defined]  # noqa: B018


def test_facts_are_kept_per_dtype_and_per_state_of_the_file(remembered: Path, tmp_path: Path) -> None:
    def known(path: Path, dtype: str = "fp32") -> bool:
        return "identity" in [span.name for span in load(path, dtype=dtype, device="cpu").load_spans]

    assert known(remembered)
    assert not known(remembered, "bf16")
    assert known(remembered, "bf16")
    link = tmp_path / "link.gguf"
    link.symlink_to(remembered)
    assert known(link)
    stat = remembered.stat()
    other = gguf_file(tmp_path / "n.gguf", tiny(**GGUF_SIZES, seed=4), "llama")
    other.replace(remembered)
    os.utime(remembered, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert remembered.stat().st_size == stat.st_size
    assert not known(remembered)  # same place, size and modification time, and yet another file
    assert len(entries(tmp_path)) == 3


@pytest.mark.parametrize("damage", ["", "{}", "flip", "cut"])
def test_a_damaged_entry_is_read_anew_and_mended(remembered: Path, tmp_path: Path, damage: str) -> None:
    (entry,) = entries(tmp_path)
    whole = entry.read_text()
    entry.write_text({"flip": whole.replace("1024", "1025"), "cut": whole[:-1]}.get(damage, damage))
    loaded = load(remembered, dtype="fp32", device="cpu")
    assert [span.name for span in loaded.load_spans][-1] == "fingerprint"
    assert entry.read_text() == whole


def test_facts_that_cannot_be_kept_are_no_error(
    remembered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path / "file"))
    assert load(remembered, dtype="fp32", device="cpu").max_model_len == 1024


def test_a_known_directory_is_served_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: LoadedModel
) -> None:
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "_SMALL", 0)
    path = saved(tmp_path / "m", vocab_size=len(embedded.tokenizer))
    embedded.tokenizer.save_pretrained(path)
    first, later = load(path, device="cpu"), load(path, device="cpu")
    assert [span.name for span in first.load_spans] == ["import", "tokenizer", "weights", "fingerprint"]
    assert [span.name for span in later.load_spans] == ["tokenizer", "identity"]
    assert (later.name, later.fingerprint, later.dtype) == ("m", first.fingerprint, first.dtype)
    assert later.chat("hi") == first.chat("hi")
    ids = torch.arange(20)[None]
    assert torch.equal(later.module(ids).logits, first.module(ids).logits)
    assert [span.name for span in later.load_spans] == ["tokenizer", "identity", "import", "weights"]
    assert load(path, device="cpu", trust_remote_code=True).deferred is None
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    assert load(path, device="cpu").stop_token_ids == (7, 2)


def test_a_known_directory_whose_weights_are_gone_says_so_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "_SMALL", 0)
    path = saved(tmp_path / "m")
    load(path, device="cpu")
    model = load(path, device="cpu")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no weights"):
        _ = model.module


def test_small_files_are_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path / "cache"))
    load(gguf_file(tmp_path / "m.gguf", tiny(**GGUF_SIZES), "llama"))
    assert not (tmp_path / "cache").exists()


def deferred(read: Callable[[], Any], **facts: Any) -> LoadedModel:
    return dataclasses.replace(
        tiny(),
        module=None,  # type: ignore[arg-type]
        config=None,
        deferred=Deferred(read),
        **facts,
    )


def test_threads_that_ask_at_once_read_once() -> None:
    module, reads = tiny().module, []

    def read() -> Any:
        reads.append(1)
        time.sleep(0.05)
        return module, (Span("weights", 1, 2),)

    model = deferred(read)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: model.module if i % 2 else model.config, range(8)))
    assert found == [module.config, module] * 4
    assert (len(reads), model.load_spans) == (1, (Span("weights", 1, 2),))


def test_weights_that_cannot_be_read_raise_when_asked_for_and_are_tried_again() -> None:
    module, outcomes = tiny().module, iter([ModelError("damaged"), None])

    def read() -> Any:
        if (error := next(outcomes)) is not None:
            raise error
        return module, ()

    model = deferred(read, name="late")
    assert model.encode("a") == [97]
    with pytest.raises(ModelError, match=r"damaged"):
        _ = model.module
    assert dataclasses.replace(model, name="copy").module is module
    assert model.module is module


def test_neither_the_engine_nor_loading_imports_what_it_may_not_need() -> None:
    heavy = [
        "transformers",
        "gguf",
        "sympy",
        "pandas",
        "scipy",
        "rich",
        "matplotlib",
        "yaml",
        "torch._dynamo",
    ]
    script = f"""
import sys, perflab.engine.llm, perflab.engine.drivers, perflab.models.load
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Directories


def test_a_directory_is_the_same_model(tmp_path: Path) -> None:
    original = tiny("qwen3")
    original.module.save_pretrained(tmp_path / "m")
    loaded = load(tmp_path / "m", device="cpu")
    assert loaded.fingerprint == original.fingerprint
    assert loaded.name == "m"
    assert loaded.dtype == torch.float32
    assert loaded.stop_token_ids == original.stop_token_ids
    ids = torch.arange(20)[None]
    assert torch.equal(loaded.module(ids).logits, original.module(ids).logits)


def test_without_a_tokenizer_token_ids_still_work(tmp_path: Path) -> None:
    loaded = load(saved(tmp_path / "m"))
    assert loaded.tokenizer is None
    assert any("no tokenizer" in note for note in loaded.notes)
    with pytest.raises(ModelError, match=r"m has no tokenizer: put tokenizer.json"):
        loaded.encode("x")


def test_a_saved_embedded_model_keeps_tokens_and_fingerprint(embedded: LoadedModel, tmp_path: Path) -> None:
    embedded.tokenizer.save_pretrained(tmp_path / "m")
    embedded.module.save_pretrained(tmp_path / "m")
    loaded = load(tmp_path / "m", device="cpu", dtype="fp32")
    assert loaded.fingerprint == embedded.fingerprint
    text = "In 1998, 3.14159 was 12,345 times"
    assert loaded.encode(text) == embedded.encode(text)
    assert loaded.chat("hi") == embedded.chat("hi")


def test_a_base_model_encodes_chat_as_plain_text(embedded: LoadedModel) -> None:
    from copy import copy
    from dataclasses import replace

    tokenizer = copy(embedded.tokenizer)
    tokenizer.chat_template = None
    base = replace(embedded, tokenizer=tokenizer)
    assert base.chat("Hello there") == base.encode("Hello there")


def test_a_directory_brings_its_sampling_defaults_and_stop_tokens(tmp_path: Path) -> None:
    saved(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [7, 9]})
    )
    loaded = load(tmp_path / "m")
    assert loaded.defaults == SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
    assert loaded.stop_token_ids == (7, 9)


def test_progress_and_spans_follow_one_another(tmp_path: Path) -> None:
    lines: list[str] = []
    loaded = load(saved(tmp_path / "m"), progress=lines.append)
    assert len(lines) >= 3
    for before, after in zip(loaded.load_spans, loaded.load_spans[1:], strict=False):
        assert before.start_ns <= before.end_ns == after.start_ns


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "m")
    weights = path / "model.safetensors"
    weights.unlink()
    torch.save(tiny().module.state_dict(), path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no safetensors.*can run code.*save_pretrained"):
        load(path)


def test_code_from_a_checkpoint_does_not_run_unasked(tmp_path: Path) -> None:
    path = described(
        tmp_path / "m",
        model_type="fancy",
        architectures=["FancyForCausalLM"],
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    )
    ran = tmp_path / "ran"
    (path / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with pytest.raises(ModelError, match=r"own Python code.*trust_remote_code=True"):
        load(path)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, r"not a causal .*BertForMaskedLM"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, r"not a causal .*BertLMHeadModel"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, r"encoder-decoder .*T5"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, r"more than text"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, r"recurrent state"),
        ({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, r"recurrent state"),
        ({"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"]}, r"linear_attention"),
        ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, r"cannot be replaced"),
        ({"model_type": "fancy", "architectures": ["FancyForCausalLM"]}, r"`fancy`"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, r"holds no weights"),
        ({}, r"model_type"),
    ],
)
def test_what_the_engine_cannot_run_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(described(tmp_path / "m", **config))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    def needs(*args: Any, **kwargs: Any) -> None:
        raise ImportError("\nLoading this needs optimum (`pip install optimum`)")

    path = saved(tmp_path / "m")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", needs)
    with pytest.raises(ModelError, match=r"not installed: .*pip install optimum"):
        load(path)


def test_directories_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"neither config.json nor a GGUF file"):
        load(tmp_path / "empty")
    described(tmp_path / "bad")
    (tmp_path / "bad" / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"configuration .* cannot be read"):
        load(tmp_path / "bad")


@pytest.mark.parametrize("name", ["/nowhere/model", "missing.gguf", "./missing", "~/missing-model", "a/b/c"])
def test_a_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(ModelError, match=r"no such file or directory"):
        load(name)


# The hub


def test_an_unreachable_hub_is_named_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    def refuse(self: HfApi, repo_id: str, timeout: float) -> None:
        assert timeout <= 10
        raise ConnectionError("Connection refused")

    monkeypatch.setattr(HfApi, "model_info", refuse)
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"perflab-tests/none .*Connection refused.*works offline"):
        load("perflab-tests/none")
    assert time.monotonic() - start < 60  # transformers' own retries alone would take longer


def test_a_name_that_is_no_hub_id() -> None:
    with pytest.raises(ModelError, match=r"neither a file, a directory nor a hub id"):
        load("not a name!")


def test_a_model_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    def unknown(self: HfApi, repo_id: str, timeout: float) -> None:
        request = httpx.Request("GET", "https://example.invalid")
        raise RepositoryNotFoundError("404", response=httpx.Response(404, request=request))

    monkeypatch.setattr(HfApi, "model_info", unknown)
    with pytest.raises(ModelError, match=r"no such model on the hub"):
        load("perflab-tests/none")


def test_offline_mode_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub._reach("perflab-tests/none") == "HF_HUB_OFFLINE is set"


# dtype, device, defaults


@pytest.mark.parametrize("dtype", ["int4", "double", torch.float64])
def test_an_unknown_dtype_is_named(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"choose auto, fp32, bf16 or fp16"):
        load(dtype=dtype)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta"])
def test_a_device_that_is_not_here_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"device='{device}'"):
        load(device=device)


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), (torch.float32, torch.float32)])
def test_a_dtype_asked_for_is_given(tmp_path: Path, dtype: Any, expected: torch.dtype) -> None:
    loaded = load(saved(tmp_path / "m"), dtype=dtype, device="cpu")
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {expected}


def test_fp16_on_a_cpu_runs_with_a_note(tmp_path: Path) -> None:
    loaded = load(saved(tmp_path / "m"), dtype="fp16", device="cpu")
    assert any("fp16" in note for note in loaded.notes)


def test_auto_dtype_is_the_checkpoints_where_it_is_fast() -> None:
    cpu = torch.device("cpu")
    fast = torch.bfloat16 if runs_bf16_fast(cpu) else torch.float32
    assert choose_dtype(torch.bfloat16, cpu) == fast
    assert choose_dtype(torch.float16, cpu) == torch.float32
    assert choose_dtype(torch.float32, cpu) == torch.float32
    assert choose_dtype(None, cpu) == torch.float32


def test_generation_config_to_sampling_params() -> None:
    from transformers import GenerationConfig

    greedy = GenerationConfig(do_sample=False, repetition_penalty=1.1)
    assert sampling_defaults(greedy) == SamplingParams(repetition_penalty=1.1)
    assert sampling_defaults(GenerationConfig(do_sample=True)).temperature == 1.0
    limited = GenerationConfig(do_sample=True, min_p=0.1, max_new_tokens=5)
    assert sampling_defaults(limited) == SamplingParams(temperature=1.0, min_p=0.1, max_tokens=5)
    assert sampling_defaults(None) == SamplingParams()


def test_stop_tokens_come_from_both_places_once() -> None:
    from types import SimpleNamespace

    one, several = SimpleNamespace(eos_token_id=5), SimpleNamespace(eos_token_id=[7, 5])
    assert stop_tokens(one, None) == (5,)
    assert stop_tokens(several, one) == (7, 5)
    assert stop_tokens(SimpleNamespace(eos_token_id=None), SimpleNamespace(eos_token_id=3)) == (3,)
    assert stop_tokens(None, None) == ()
