"""GGUF files become plain models with the original's weights, tokens and configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import dequantize as reference_dequantize
from gguf.quants import quantize

from perflab.errors import ModelError
from perflab.models import gguf
from perflab.models.load import load
from perflab.models.loaded import LoadedModel
from perflab.models.tiny import tiny

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA2_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def byte_alphabet() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def write(
    path: Path,
    model: LoadedModel,
    arch: str,
    kind: Kind = Kind.F32,
    names: Mapping[str, str] = NAMES,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    meta: Mapping[str, Any] | None = None,
    pre: str = "smollm",
) -> Path:
    """What llama.cpp's converter would write for a tiny model with a byte-level tokenizer."""
    config, writer = model.config, GGUFWriter(str(path), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = ["<end>", "<start>", *byte_alphabet(), "12", "ab"]
    tokens += [f"unused{i}" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    for key, value in (meta or {}).items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            bool: writer.add_bool,
        }
        add[type(value)](key, value)
    for name, parameter in model.module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = parameter.numpy().copy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if arch == "gemma2" and name.endswith("norm.weight"):
            array += 1
        target = gguf_name(name, names)
        if array.ndim > 1 and kind != Kind.F32:
            writer.add_tensor(target, quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, array)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, names: Mapping[str, str]) -> str:
    stem, suffix = name.rsplit(".", 1)
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in whole:
        return f"{whole[stem]}.{suffix}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{names[inner]}.{suffix}"


def logits(model: LoadedModel) -> torch.Tensor:
    return model.module(torch.arange(1, 41).view(2, 20)).logits


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_unquantized_files_give_the_same_model(tmp_path: Path, arch: str, tied: bool) -> None:
    original = tiny(arch, **SIZES, tie_word_embeddings=tied)
    loaded = load(write(tmp_path / "m.gguf", original, arch), dtype="fp32", device="cpu")
    assert torch.equal(logits(loaded), logits(original))
    assert loaded.config.tie_word_embeddings is tied
    assert loaded.config.rms_norm_eps == original.config.rms_norm_eps
    assert loaded.max_model_len == original.max_model_len
    assert loaded.notes == ()


def test_biases_of_a_llama_are_unpermuted_too(tmp_path: Path) -> None:
    original = tiny("llama", **SIZES, attention_bias=True)
    for name in list(original.module.state_dict()):  # llama.cpp writes no output bias
        if name.endswith("o_proj.bias"):
            original.module.get_parameter(name).zero_()
    loaded = load(write(tmp_path / "m.gguf", original, "llama"), dtype="fp32", device="cpu")
    assert torch.equal(logits(loaded), logits(original))


def test_a_sliding_window_is_kept(tmp_path: Path) -> None:
    original = tiny("mistral", **SIZES)
    path = write(tmp_path / "m.gguf", original, "llama", meta={"llama.attention.sliding_window": 8})
    loaded = load(path, dtype="fp32", device="cpu")
    assert loaded.config.model_type == "mistral"
    assert torch.equal(logits(loaded), logits(original))


def test_llama3_frequency_factors_are_recognised(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    original = tiny("llama", **SIZES, rope_parameters=rope, max_position_embeddings=131072)
    plain = tiny("llama", **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    rotary = [model.module.model.rotary_emb.inv_freq for model in (original, plain)]
    factors = (rotary[1] / rotary[0]).numpy()
    assert factors.max() == pytest.approx(32)
    path = write(tmp_path / "m.gguf", original, "llama", extra_tensors={"rope_freqs.weight": factors})
    loaded = load(path, dtype="fp32", device="cpu")
    torch.testing.assert_close(logits(loaded), logits(original))
    odd = write(tmp_path / "odd.gguf", original, "llama", extra_tensors={"rope_freqs.weight": factors + 1})
    with pytest.raises(ModelError, match=r"not Llama 3's"):
        load(odd)


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    original = tiny("llama", **SIZES, rope_parameters=rope)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    loaded = load(write(tmp_path / "m.gguf", original, "llama", meta=scaling), dtype="fp32", device="cpu")
    assert torch.equal(logits(loaded), logits(original))


def test_every_end_token_of_the_file_stops(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 5}
    assert load(write(tmp_path / "m.gguf", tiny(**SIZES), "llama", meta=ends)).stop_token_ids == (0, 1, 5)


def test_unread_rope_scaling_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny(**SIZES), "llama", meta={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(ModelError, match=r"'yarn'"):
        load(path)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_dequantised_values_are_those_of_the_format(kind: Kind) -> None:
    values = np.random.default_rng(0).normal(size=(700, 384)).astype(np.float32)
    raw = quantize(values, kind)
    ours = gguf.dequantize(raw.reshape(-1).view(np.uint8), int(kind))
    assert np.array_equal(ours.numpy(), reference_dequantize(raw, kind).ravel())
    rounded = gguf.dequantize(raw.reshape(-1).view(np.uint8), int(kind), torch.bfloat16)
    assert torch.equal(rounded, ours.bfloat16())


def test_weights_equal_transformers_own_reading(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = write(tmp_path / "m.gguf", tiny("llama", **SIZES), "llama", Kind.Q4_1)
    loaded = load(path, dtype="fp32", device="cpu")
    assert loaded.notes == ("weights are dequantised from Q4_1",)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    state = theirs.state_dict()
    for name, tensor in loaded.module.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_other_architectures_become_plain_models_too(tmp_path: Path) -> None:
    original = tiny("gemma2", **SIZES, attn_logit_softcapping=50.0, sliding_window=4096)
    loaded = load(
        write(tmp_path / "m.gguf", original, "gemma2", names=GEMMA2_NAMES), dtype="fp32", device="cpu"
    )
    assert not hasattr(loaded.config, "quantization_config")
    assert not getattr(loaded.module, "is_quantized", False)
    loaded.module.save_pretrained(tmp_path / "plain")
    again = load(tmp_path / "plain", dtype="fp32", device="cpu")
    assert torch.equal(logits(again), logits(loaded))


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", 3), ("gpt-2", 2)])
def test_the_pre_tokenizer_decides_about_digits(tmp_path: Path, pre: str, pieces: int) -> None:
    model = load(write(tmp_path / "m.gguf", tiny(**SIZES), "llama", pre=pre))
    assert len(model.encode("123")) == pieces
    assert len(model.encode("ab")) == 1
    assert model.decode(model.encode("ab 123<start>x é")) == "ab 123x é"
    assert model.encode("<start>") == [1]
    assert model.stop_token_ids == (0,)


@pytest.mark.parametrize("adds", [True, False])
def test_a_bos_is_added_where_the_file_says_so(tmp_path: Path, adds: bool) -> None:
    path = write(tmp_path / "m.gguf", tiny(**SIZES), "llama", meta={"tokenizer.ggml.add_bos_token": adds})
    assert (load(path).encode("ab")[0] == 1) is adds


def test_an_unknown_pre_tokenizer_is_noted(tmp_path: Path) -> None:
    model = load(write(tmp_path / "m.gguf", tiny(**SIZES), "llama", pre="mystery"))
    assert any("'mystery'" in note for note in model.notes)


def test_a_directory_with_one_file_names_it(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", tiny(**SIZES), "llama")
    assert load(tmp_path).name == "a.gguf"
    write(tmp_path / "b.gguf", tiny(**SIZES), "llama")
    with pytest.raises(ModelError, match=r"2 GGUF files"):
        load(tmp_path)


def test_broken_files_are_told_apart(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", tiny(**SIZES), "llama").read_bytes()
    cases = {
        b"not a model": r"not a GGUF file",
        whole[:3]: r"not a GGUF file",
        whole[:20]: r"cut short in its header",
        whole[:3000]: r"cut short in its header",
        whole[:-5]: r"cut short: .* needs \d+ bytes, the file has \d+",
        whole[:4] + (99).to_bytes(4, "little") + whole[8:]: r"version 99",
    }
    for content, message in cases.items():
        path = tmp_path / "broken.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            load(path)


def test_every_cut_is_a_clear_error(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny(**SIZES), "llama")
    whole = path.read_bytes()
    for size in range(4, len(whole) - 1, len(whole) // 60):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut short"):
            gguf.read(cut)


def test_parts_of_a_split_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny(**SIZES), "llama", meta={"split.count": 2})
    with pytest.raises(ModelError, match=r"one of 2 parts"):
        load(path)


def test_an_architecture_nobody_reads_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny(**SIZES), "fancynet")
    with pytest.raises(ModelError, match=r"'fancynet'"):
        load(path)
