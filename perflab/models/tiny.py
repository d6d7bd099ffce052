"""Random models of several architectures, small enough to test an engine in milliseconds.

Owns the shapes and the random weights. The architectures are transformers' own, so whatever an
engine must do for the real ones (sliding windows, soft caps, experts, sinks) it must do for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from perflab.errors import ModelError
from perflab.models.loaded import LoadedModel, fingerprint, freeze
from perflab.types import SamplingParams


class ByteTokenizer:
    """One token per UTF-8 byte: ids 0 to 255 are bytes, then bos, eos, pad. Adds nothing by itself."""

    bos_token_id = 256
    eos_token_id = 257
    pad_token_id = 258
    chat_template = "{role}: {content}\\n"
    _SPECIAL = MappingProxyType({256: "<bos>", 257: "<eos>", 258: "<pad>"})

    def __len__(self) -> int:
        return 256 + len(self._SPECIAL)

    @property
    def all_special_ids(self) -> list[int]:
        return list(self._SPECIAL)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; incomplete characters become U+FFFD, ids without a meaning vanish."""
        parts = bytearray()
        for token in ids:
            if token < 256:
                parts.append(token)
            elif not skip_special_tokens:
                parts += self._SPECIAL.get(token, "").encode()
        return parts.decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
    ) -> list[int] | str:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        text += "assistant: " if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": ByteTokenizer.bos_token_id,
        "eos_token_id": ByteTokenizer.eos_token_id,
        "pad_token_id": ByteTokenizer.pad_token_id,
    }
)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}

_ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": ("llama", {}),
        "qwen2": ("qwen2", {}),
        "qwen3": ("qwen3", {}),
        "mistral": ("mistral", {"sliding_window": 8}),
        "gemma": ("gemma", {**_GEMMA, "num_key_value_heads": 1}),
        "gemma2": (
            "gemma2",
            {**_GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 4.0},
        ),
        "gemma3": (
            "gemma3_text",
            {
                **_GEMMA,
                "sliding_window": 8,
                "query_pre_attn_scalar": 12,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        "phi3": ("phi3", {}),
        "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
        "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 48}),
        "qwen3_moe": ("qwen3_moe", _EXPERTS),
        "gpt_oss": (
            "gpt_oss",
            {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "sliding_window": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
    }
)

ARCHITECTURES: tuple[str, ...] = tuple(_ARCHITECTURES)
VOCAB_SIZE = 320  # the byte tokenizer's 259 ids, rounded up


def tiny(arch: str = "llama", seed: int = 0, vocab_size: int | None = None, **overrides: Any) -> LoadedModel:
    """A random fp32 model on the CPU; the same `arch`, `seed` and sizes give the same weights.

    `overrides` go into the architecture's own configuration, such as `num_hidden_layers=4`.
    Leaves torch's global random state as it was.
    Raises ModelError for an unknown architecture.
    """
    if arch not in _ARCHITECTURES:
        raise ModelError(f"no tiny model of architecture {arch!r}: choose one of {', '.join(ARCHITECTURES)}")
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    model_type, kwargs = _ARCHITECTURES[arch]
    config = AutoConfig.for_model(
        model_type, **{**_COMMON, "vocab_size": vocab_size or VOCAB_SIZE, **kwargs, **overrides}
    )
    with torch.random.fork_rng(devices=[]):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(module, config.tie_word_embeddings, torch.Generator().manual_seed(seed))
    module.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    freeze(module)
    return LoadedModel(
        name=f"tiny-{arch}",
        fingerprint=fingerprint(module, config),
        module=module,
        config=config,
        tokenizer=ByteTokenizer(),
        stop_token_ids=(ByteTokenizer.eos_token_id,),
        defaults=SamplingParams(),
        max_model_len=config.max_position_embeddings,
        dtype=torch.float32,
        device=torch.device("cpu"),
        notes=("random weights",),
    )


def _randomise(module: torch.nn.Module, tied: bool, generator: torch.Generator) -> None:
    """Fill every parameter so that greedy decoding wanders and its leading logits rarely tie.

    Matrices are scaled by their fan-in, with the output of each layer large beside the embedding:
    otherwise a model whose head is tied to its embedding repeats its last token for ever. There
    the norms after the layers are raised too, and the final one makes up for the small head.
    """
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name == "model.norm.weight":
            parameter.data += 4 * tied + 0.3 * noise
        elif "post_" in name:
            parameter.data += 5 * tied + 0.3 * noise
        elif parameter.ndim == 1:  # norms keep their centre, biases and sinks start at zero
            parameter.data += 0.3 * noise
        elif "embed" in name:
            parameter.data = noise * (0.1 if tied else 0.5)
        else:
            gain = 3 if "lm_head" in name else 2
            parameter.data = noise * gain * parameter.shape[-1] ** -0.5
