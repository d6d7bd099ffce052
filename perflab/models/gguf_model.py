"""A GGUF file as a plain Hugging Face model and tokenizer.

Owns the names of tensors and what llama.cpp changes in a checkpoint. Llama-shaped and Qwen files
are built here; others go through transformers, whose result is rebuilt as a plain model, because
it marks dequantised weights as quantized. Does not know which device a model will run on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from perflab.errors import ModelError
from perflab.models.gguf import GGUFFile
from perflab.models.tokenizer import FastTokenizer

_MODEL_TYPES = MappingProxyType({"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"})
_GLOBAL_NAMES = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_LAYER_NAMES = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)

_ROPE_FACTORS = "rope_freqs.weight"

_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_PLAIN = frozenset({"gpt-2"})
_CONTROL, _USER_DEFINED = 3, 4  # kinds of token in tokenizer.ggml.token_type


def build_model(file: GGUFFile, dtype: torch.dtype) -> torch.nn.Module:
    """The causal LM in the file with its weights dequantised to `dtype`, on the CPU.

    Raises ModelError where the architecture or a feature of it is not understood.
    """
    architecture = str(file.metadata.get("general.architecture"))
    names = {name: _hf_name(name) for name in file.tensors if name != _ROPE_FACTORS}
    if architecture not in _MODEL_TYPES or None in names.values():
        return _through_transformers(file, dtype)
    config = _config(file, architecture)
    weights = {}
    for name, hf_name in names.items():
        assert hf_name is not None
        tensor = file.tensor(name, dtype)
        if architecture == "llama" and ("attn_q." in name or "attn_k." in name):
            heads = config.num_attention_heads if "attn_q." in name else config.num_key_value_heads
            tensor = _unpermute(tensor, heads)
        weights[hf_name] = tensor
    return _plain(file, config, weights, dtype)


def _hf_name(name: str) -> str | None:
    """The parameter that a tensor becomes, None for one that Llama-shaped models do not have."""
    head, _, suffix = name.rpartition(".")
    if head in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[head]}.{suffix}"
    parts = head.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{suffix}"
    return None


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows back in Hugging Face's order: llama.cpp interleaves the two halves of each head for RoPE."""
    half = weight.shape[0] // num_heads // 2
    return weight.view(num_heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _config(file: GGUFFile, architecture: str) -> Any:
    from transformers import AutoConfig

    meta, shape = file.metadata, file.tensors["token_embd.weight"].shape

    def value(key: str, default: Any = None) -> Any:
        found = meta.get(f"{architecture}.{key}", default)
        # Stored as fp32: the shortest decimal that reads back the same is what was meant.
        return float(f"{found:.7g}") if isinstance(found, float) else found

    heads = value("attention.head_count")
    head_dim = value("attention.key_length", value("embedding_length") // heads)
    if (rotary := value("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(
            f"{file.path.name} rotates {rotary} of {head_dim} dimensions, which is not read from GGUF: use "
            "the checkpoint's Hugging Face directory"
        )
    kwargs: dict[str, Any] = {
        "vocab_size": shape[0],
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, value),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    model_type = _MODEL_TYPES[architecture]
    if model_type == "llama":
        kwargs["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        if window := value("attention.sliding_window"):
            model_type, kwargs["sliding_window"] = "mistral", window
    return AutoConfig.for_model(model_type, **kwargs)


def _rope(file: GGUFFile, value: Any) -> dict[str, Any]:
    """RoPE parameters; Llama 3's frequency factors are recognised from their tensor."""
    theta = value("rope.freq_base", 10000.0)
    scaling = value("rope.scaling.type", "none")
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": value("rope.scaling.factor")}
    if scaling != "none":
        raise ModelError(
            f"{file.path.name} scales RoPE by {scaling!r}, which is not read from GGUF: use the "
            "checkpoint's Hugging Face directory"
        )
    if _ROPE_FACTORS not in file.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    factors = file.tensor(_ROPE_FACTORS)
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not torch.allclose(factors, _llama3_factors(rope, len(factors)), rtol=1e-3):
        raise ModelError(
            f"{file.path.name} has RoPE frequency factors that are not Llama 3's: use the "
            "checkpoint's Hugging Face directory"
        )
    return rope


def _llama3_factors(rope: Mapping[str, Any], half: int) -> torch.Tensor:
    """What Llama 3.1's RoPE divides each frequency by (Grattafiori et al. 2024), [half]."""
    wavelength = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(half) / half)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
    return 1 / (smooth.clamp(0, 1) * (1 - 1 / rope["factor"]) + 1 / rope["factor"])


def _plain(
    file: GGUFFile, config: Any, weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> torch.nn.Module:
    """A model that holds exactly these tensors, without initialising or copying any."""
    from transformers import GenerationConfig
    from transformers.initialization import no_init_weights
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config.dtype = dtype
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with no_init_weights():
        model = model_class(config)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    if lost := sorted({*missing} - tied) + sorted(unexpected):
        raise ModelError(f"the GGUF file does not fit {type(model).__name__}: {', '.join(lost[:3])}")
    ends = [file.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=sorted({end for end in ends if end is not None}) or None,
        pad_token_id=config.pad_token_id,
    )
    return model


def _through_transformers(file: GGUFFile, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(file.path.parent), gguf_file=file.path.name, dtype=dtype
        )
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        architecture = file.metadata.get("general.architecture")
        raise ModelError(
            f"GGUF files of architecture {architecture!r} cannot be read ({error}): use the checkpoint's "
            "Hugging Face directory"
        ) from error
    config = type(model.config).from_dict(
        {k: v for k, v in model.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    )
    return _plain(file, config, dict(model.state_dict()), dtype)


def build_tokenizer(file: GGUFFile) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer in the file and what a user should know about it."""
    meta = file.metadata
    pre = meta.get("tokenizer.ggml.pre")
    if meta.get("tokenizer.ggml.model") == "gpt2" and pre in _DIGITS_APART | _PLAIN:
        return _byte_level(meta, digits_apart=pre in _DIGITS_APART), ()
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    if meta.get("tokenizer.ggml.model") == "gpt2" and pre not in GGUF_PRE_TOKENIZER_SPLITS:
        return tokenizer, (
            f"the pre-tokenizer {pre!r} is unknown here: token ids may differ from the original's",
        )
    return tokenizer, ()


def _byte_level(meta: Mapping[str, Any], digits_apart: bool) -> FastTokenizer:
    """Byte-level BPE as GPT-2's, with each digit a token of its own where the original had it so."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits_apart else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta.get("tokenizer.ggml.token_type", [1] * len(tokens))
    of_kind = {
        wanted: [
            AddedToken(t, normalized=False, special=wanted == _CONTROL)
            for t, k in zip(tokens, kinds, strict=True)
            if k == wanted
        ]
        for wanted in (_CONTROL, _USER_DEFINED)
    }
    tokenizer.add_special_tokens(of_kind[_CONTROL])
    tokenizer.add_tokens(of_kind[_USER_DEFINED])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {
        name: tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in names.items()
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    if meta.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        from tokenizers.processors import TemplateProcessing

        bos = special["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokens.index(bos))]
        )
    return FastTokenizer(
        tokenizer,
        special,
        chat_template=meta.get("tokenizer.chat_template"),
        model_max_length=meta.get(f"{meta['general.architecture']}.context_length", 10**30),
    )
