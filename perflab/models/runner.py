"""The seam between engine and model: tokens of a step in, logits and hidden states out.

Owns a private view of a Hugging Face causal model whose attention is handed to the engine. Knows
nothing of KV memory or batches: whoever calls passes an `Attend`, which sees each layer's query,
key and value and returns its output.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from perflab.errors import ModelError
from perflab.models.linears import can_pack, pack_linears
from perflab.models.loaded import LoadedModel

ATTENTION = "perflab"
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "use_cache", "cache", "output_attentions", "output_router_logits", "dropout"}
)


class Attend(Protocol):
    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] → [1, T, heads, dim]."""
        ...


class KVShape(NamedTuple):
    """What one token keeps: `layers` times `kv_heads` keys and values."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """int8 counts the two fp32 scales of each position and head."""
        scales = 8 if dtype == torch.int8 else 0
        return self.layers * self.kv_heads * ((self.key_dim + self.value_dim) * dtype.itemsize + scales)


class Best(NamedTuple):
    """Per row of logits, the index of the largest (a NaN counts as such) and whether it is finite."""

    token_ids: list[int]
    finite: list[bool]


class RunnerOutput(NamedTuple):
    logits: Tensor  # [sampled rows, vocabulary], model dtype
    hidden: Tensor | None  # [sampled rows, hidden]: what went into the head
    best: Best | None = None  # per sampled row, where it came for free
    finite: list[bool] | None = None  # per request, whether its last token came out finite, likewise
    features: Tensor | None = None  # [T, hidden]: what goes into the head at every token, where asked for


class HFRunner:
    """Runs an unmodified architecture of transformers. The loaded module itself is never changed:
    two runners of one model share its weights and nothing else.

    Raises ModelError where the model's attention asks for something that is not implemented here.
    """

    def __init__(self, model: LoadedModel, *, packed: bool = True) -> None:
        self.device, self.dtype = model.device, model.dtype
        self.module = _private_view(model.module)
        _register_attention()
        self.module.config._attn_implementation = ATTENTION
        self.packed = packed and can_pack(self.module) and pack_linears(self.module) > 0
        self._hidden: Tensor | None = None
        self._states: Tensor | None = None
        self._keeps_states = False
        head = self.module.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(self._keep_hidden)
        self.kv_shape, self.query_heads = self._probe(model.name)
        self.max_positions = model.max_model_len
        self.vocab_size: int = self.module.config.get_text_config().vocab_size

    def _keep_hidden(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._hidden = args[0][0]

    def _keep_states(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self._states = output[0][0]

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention: Attend,
        sample_rows: Tensor,
        *,
        features: bool = False,
    ) -> RunnerOutput:
        """input_ids, position_ids: [1, T]; sample_rows: [R] indices into T."""
        if features and not self._keeps_states:
            self.module.get_decoder().register_forward_hook(self._keep_states)
            self._keeps_states = True
        out = self.module(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=sample_rows,
            perflab_step=attention,
        )
        hidden, self._hidden = self._hidden, None
        states, self._states = self._states, None
        return RunnerOutput(out.logits[0], hidden, features=states if features else None)

    def _probe(self, name: str) -> tuple[KVShape, int]:
        """Run two tokens: learn the KV shape, and meet what is not implemented now, not later."""
        probe = _Probe({})
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        positions = torch.arange(2, device=self.device)[None]
        self.forward(ids, positions, probe, torch.tensor([1], device=self.device))
        if not probe.shapes:
            raise ModelError(f"{name}: its layers never call transformers' attention interface")
        if len(set(probe.shapes.values())) > 1 or set(probe.shapes) != set(range(len(probe.shapes))):
            raise ModelError(f"{name}: layers with different key/value shapes are not supported")
        return KVShape(len(probe.shapes), *probe.shapes[0]), probe.query_heads


@dataclass(slots=True)
class _Probe:
    shapes: dict[int, tuple[int, int, int]]
    query_heads: int = 0  # the most of any layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        self.query_heads = max(self.query_heads, query.shape[1])
        self.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _private_view(module: nn.Module) -> Any:
    """A copy of the module tree over the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    perflab_step: Attend | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature; every keyword is either honoured or refused."""
    unknown = {name: v for name, v in rest.items() if v is not None and name not in _WITHOUT_EFFECT}
    if unknown or attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelError(
            f"{type(module).__name__} asks for {', '.join(unknown) or 'a mask of its own'}, "
            "which the engine's attention does not implement"
        )
    assert perflab_step is not None, "the module was called without its runner"
    output = perflab_step.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output, None


def _register_attention() -> None:
    """Only who runs transformers' models waits seconds for its import."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
