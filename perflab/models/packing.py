"""From a Hugging Face module of Llama's shape to packed arrays, and what shapes are meant by that.

Owns which architectures the native path runs, the schemes of packing and the names of the arrays.
Knows nothing of disks, threads or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from perflab.models import kernels
from perflab.models.kernels import FORMATS, PANEL, address

LAYOUT = 1  # grows when the same weights pack into other bytes or names

_SHAPED_LIKE_LLAMA = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_BY_TABLE = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the sequence
_MAX_POSITIONS = 1 << 17
_DTYPE_FORMATS = MappingProxyType({torch.float32: "fp32", torch.bfloat16: "bf16"})


class Scheme(NamedTuple):
    """Formats of the layers' matrices and of the embedding and head."""

    layers: str
    head: str


def scheme_of(weights: str, dtype: torch.dtype) -> Scheme:
    """`weights`: `model` for the loaded dtype, `int8`, `int8-dynamic`, or `int4` with an 8-bit head."""
    if weights == "model":
        return Scheme(_DTYPE_FORMATS[dtype], _DTYPE_FORMATS[dtype])
    return Scheme(weights, "int8-dynamic" if weights == "int4" else weights)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama-shaped model; `windows` holds 0 where a layer sees everything."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rotary_half: int
    eps: float
    scaling: float
    windows: tuple[int, ...]
    positions: int
    tied: bool
    layer_format: str
    head_format: str

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Shape:
        return cls(**{**meta, "windows": tuple(meta["windows"])})

    def to_meta(self) -> dict[str, Any]:
        return asdict(self)


def why_not(module: nn.Module) -> str:
    """Why the native path does not run this module, in words; empty where it does."""
    config: Any = module.config
    name = type(module).__name__
    if name not in _SHAPED_LIKE_LLAMA:
        return f"{name} is not of Llama's shape"
    first = next(module.parameters())
    if first.device.type != "cpu" or first.dtype not in _DTYPE_FORMATS:
        return f"its weights are {first.dtype} on {first.device}, native kernels take fp32 and bf16 on a CPU"
    if any(type(m).__name__ != "Linear" for n, m in module.named_modules() if n.endswith("_proj")):
        return "its linear layers were replaced"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE_BY_TABLE:
        return f"its rotary embedding {rope!r} changes with the sequence"
    attention = module.model.layers[0].self_attn  # type: ignore[union-attr, index]
    head_dim, heads = attention.head_dim, config.num_attention_heads  # type: ignore[union-attr]
    if (
        head_dim > kernels.MAX_HEAD_DIM
        or head_dim % 2
        or heads // config.num_key_value_heads > kernels.MAX_SHARED
    ):
        return f"heads of {head_dim} dimensions, {heads} for {config.num_key_value_heads} key heads"
    if config.hidden_size % 2 or config.intermediate_size % 2:
        return "its sizes are odd"
    return ""


def pack(
    module: nn.Module, scheme: Scheme, progress: Callable[[str], None] | None = None
) -> tuple[Shape, dict[str, np.ndarray]]:
    """Shape and arrays of a module that `why_not` has nothing against.

    Matrices become `NAME.data` [bytes] with `NAME.scale` and `NAME.bias` [columns padded to 32] where
    they have them; norms and the rotary table (`cos`, `sin` [positions, rotary_half]) are fp32.
    """
    (progress or (lambda message: None))(f"Packing weights: {scheme.layers} layers, {scheme.head} head")
    model: Any = module
    config, base = model.config, model.model
    arrays: dict[str, np.ndarray] = {}
    jobs = list(_matrices(model, scheme))
    with ThreadPoolExecutor(max(1, min(8, torch.get_num_threads()))) as pool:
        for packed in pool.map(lambda job: _pack_matrix(*job), jobs):
            arrays |= packed
    for number, layer in enumerate(base.layers):
        attention = layer.self_attn
        norms = {
            "input_norm": layer.input_layernorm,
            "post_norm": layer.post_attention_layernorm,
            "query_norm": getattr(attention, "q_norm", None),
            "key_norm": getattr(attention, "k_norm", None),
        }
        arrays |= {
            f"layers.{number}.{name}": _floats(norm.weight)
            for name, norm in norms.items()
            if norm is not None
        }
    arrays["final_norm"] = _floats(base.norm.weight)
    positions = min(config.max_position_embeddings, _MAX_POSITIONS)
    arrays["cos"], arrays["sin"] = _rotary_table(base, positions)
    first = base.layers[0].self_attn
    shape = Shape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=first.head_dim,
        intermediate=config.intermediate_size,
        vocabulary=model.lm_head.weight.shape[0],
        rotary_half=arrays["cos"].shape[1],
        eps=float(config.rms_norm_eps),
        scaling=float(first.scaling),
        windows=tuple(_window(config, layer.self_attn) for layer in base.layers),
        positions=positions,
        tied=_is_tied(model),
        layer_format=scheme.layers,
        head_format=scheme.head,
    )
    return shape, arrays


def _is_tied(model: Any) -> bool:
    return model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def _window(config: Any, attention: nn.Module) -> int:
    """What the layer's forward hands to attention: its own window, or Mistral's, which is the config's."""
    own = getattr(attention, "sliding_window", None)
    if not hasattr(attention, "sliding_window") and type(attention).__name__ == "MistralAttention":
        own = getattr(config, "sliding_window", None)
    return int(own or 0)


def _matrices(model: Any, scheme: Scheme) -> Iterator[tuple[str, str, list[nn.Linear], bool]]:
    """(name, format, linears side by side, whether their columns alternate by 16)."""
    for number, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        name = f"layers.{number}"
        yield f"{name}.qkv", scheme.layers, [attention.q_proj, attention.k_proj, attention.v_proj], False
        yield f"{name}.out", scheme.layers, [attention.o_proj], False
        yield f"{name}.gate_up", scheme.layers, [mlp.gate_proj, mlp.up_proj], True
        yield f"{name}.down", scheme.layers, [mlp.down_proj], False
    yield "head", scheme.head, [model.lm_head], False
    if not _is_tied(model):
        yield "embedding", scheme.head, [model.model.embed_tokens], False


def _pack_matrix(name: str, format: str, linears: list[nn.Linear], alternate: bool) -> dict[str, np.ndarray]:
    weights = [linear.weight.detach() for linear in linears]
    biases = [getattr(linear, "bias", None) for linear in linears]
    parts = [b if b is not None else w.new_zeros(w.shape[0]) for w, b in zip(weights, biases, strict=True)]
    weight, bias = (
        (_alternate(weights), _alternate(parts)) if alternate else (torch.cat(weights), torch.cat(parts))
    )
    data, scale = pack_matrix(format, _floats(weight))
    packed = {f"{name}.data": data}
    if scale is not None:
        packed[f"{name}.scale"] = scale
    if any(b is not None for b in biases):
        packed[f"{name}.bias"] = np.pad(_floats(bias), (0, -len(bias) % PANEL))
    return packed


def _alternate(pair: list[Tensor]) -> Tensor:
    """Rows of gate and up by turns of 16, padded with zeros, so that a panel holds both of 16 columns."""
    rows = pair[0].shape[0]
    padded = [torch.cat((t, t.new_zeros(-rows % 16, *t.shape[1:]))) for t in pair]
    return torch.stack([t.unflatten(0, (-1, 16)) for t in padded], 1).flatten(0, 2)


def pack_matrix(format: str, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """fp32 [n, k] as panels (bytes) and, for int8, scales [n padded to 32]. See `kernels.h`."""
    rows, columns = weight.shape
    lib, code = kernels.library(), FORMATS[format]
    panels = -(-rows // PANEL)
    data = kernels.aligned(panels * lib.pl_panel_bytes(code, columns))
    scale = np.zeros(panels * PANEL, np.float32) if format in ("int8", "int8-dynamic") else None
    lib.pl_pack(code, address(weight), rows, columns, address(data), address(scale))
    return data, scale


def _floats(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().contiguous().numpy()


@torch.inference_mode()
def _rotary_table(base: Any, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the module's own rotary embedding, [positions, half of the rotated dims]."""
    cos, sin = base.rotary_emb(torch.zeros(1), torch.arange(positions)[None])
    half = cos.shape[-1] // 2
    return _floats(cos[0, :, :half]), _floats(sin[0, :, :half])
