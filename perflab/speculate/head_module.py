"""The draft head as a torch module: what is trained, what its file holds, and the reference of its steps.

One decoder layer over pairs of the target's feature at a position (what went into its head there) and the
embedding of the token that came next; out comes a guess at the feature of that next position, which the
target's own head, cut down to frequent tokens, turns into the token after it (Li et al., EAGLE, 2024,
arXiv:2401.15077; the cut vocabulary and unrolled training: EAGLE-3, 2025, arXiv:2503.01840).
Owns the mathematics and the file. Knows no engine and no training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from perflab.errors import ModelError
from perflab.models.loaded import LoadedModel

FORMAT = 1
Past = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a draft head; `vocabulary` counts the tokens that it can draft."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rope_theta: float
    eps: float

    @classmethod
    def like(cls, model: LoadedModel, vocabulary: int) -> HeadShape:
        """One layer of the model's own sizes."""
        config: Any = model.module.config
        config = config.get_text_config()
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        dense = getattr(config, "intermediate_size", 0) or 0
        return cls(
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=dense if dense > config.hidden_size else 3 * config.hidden_size,
            vocabulary=vocabulary,
            rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
            eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        )


class HeadModule(nn.Module):
    """fc over [feature, embedding], one Llama layer, the final norm. Embedding and head are the target's."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, kv = shape.hidden, shape.kv_heads * shape.head_dim
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Linear(hidden, shape.heads * shape.head_dim + 2 * kv, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, hidden, bias=False)
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Linear(hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, hidden, bias=False)
        self.final_norm = nn.Parameter(torch.ones(hidden))

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query [..., T, heads, dim], key, value [..., T, kv_heads, dim] of the fc's output x."""
        shape = self.shape
        q, k, v = (
            self.qkv(_norm(x, self.input_norm, shape.eps))
            .unflatten(-1, (-1, shape.head_dim))
            .split((shape.heads, shape.kv_heads, shape.kv_heads), -2)
        )
        cos, sin = angles(positions, shape.head_dim, shape.rope_theta)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def finish(self, x: Tensor, context: Tensor) -> Tensor:
        """The guessed feature [..., T, hidden] from the fc's output and what attention brought."""
        x = x + self.out(context.flatten(-2))
        gate, up = self.gate_up(_norm(x, self.post_norm, self.shape.eps)).chunk(2, -1)
        x = x + self.down(functional.silu(gate) * up)
        return _norm(x, self.final_norm, self.shape.eps)

    def unrolled(self, feature: Tensor, embedding: Tensor, past: Past) -> Tensor:
        """One training pass over sequences [B, T, hidden], the `len(past)`-th of a chain; adds to `past`.

        In pass s every position is the s-th draft of a chain: its feature is the pass before's guess,
        and it sees true positions up to s before it and the chain's own in between.
        """
        shape, steps = self.shape, len(past)
        length = feature.shape[1]
        x = self.fc(torch.cat((feature, embedding), -1))
        q, k, v = self.project(x, torch.arange(length, device=x.device))
        past.append((k, v))
        group = shape.heads // shape.kv_heads
        q = q.unflatten(2, (shape.kv_heads, group)) * shape.head_dim**-0.5
        first_k, first_v = past[0]
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q, first_k)
        ahead = torch.arange(length, device=x.device)
        hidden = ahead[None, :] > ahead[:, None] - steps
        scores = scores.masked_fill(hidden, -1e4)
        own = [
            (_delay(key, steps - index), _delay(value, steps - index))
            for index, (key, value) in enumerate(past)
            if index > 0
        ]
        if own:
            more = [torch.einsum("bqhgd,bqhd->bhgq", q, key)[..., None] for key, _ in own]
            scores = torch.cat((scores, *more), -1)
        weight = scores.float().softmax(-1).to(v.dtype)
        context = torch.einsum("bhgqk,bkhd->bqhgd", weight[..., :length], first_v)
        for index, (_, value) in enumerate(own):
            context = (
                context + weight[..., length + index].permute(0, 3, 1, 2)[..., None] * value[:, :, :, None]
            )
        return self.finish(x, context.flatten(2, 3))


def _delay(tensor: Tensor, by: int) -> Tensor:
    """Position i holds what i - by held; the first ones are zero."""
    return tensor if by == 0 else functional.pad(tensor, (0, 0, 0, 0, by, 0))[:, : tensor.shape[1]]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def angles(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, dim / 2] of the rotary embedding at positions [T]."""
    rate = theta ** -(torch.arange(0, dim, 2, device=positions.device).float() / dim)
    angle = positions[:, None].float() * rate
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., T, heads, dim] by angles [T, dim / 2], halves as in Llama."""
    one, two = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)


@dataclass(slots=True)
class DraftHead:
    """A trained head: its module, and the target's token for each of its own."""

    module: HeadModule
    token_ids: Tensor  # int64 [vocabulary]
    meta: dict[str, Any]

    def save(self, path: Path) -> None:
        """Weights in bf16; the whole file or none."""
        arrays = {name: value.detach().to("cpu", torch.bfloat16) for name, value in self._weights().items()}
        arrays["token_ids"] = self.token_ids.to("cpu", torch.int32)
        meta = {"format": FORMAT, "shape": asdict(self.module.shape), **self.meta}
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        save_file({k: v.contiguous() for k, v in arrays.items()}, draft, {"perflab": json.dumps(meta)})
        draft.rename(path)

    def _weights(self) -> Mapping[str, Tensor]:
        return self.module.state_dict()


def read_head(path: Path) -> DraftHead:
    """A head in fp32 from its file. Raises ModelError where it cannot be read or is of another format."""
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {}).get("perflab", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: no draft head can be read from it ({error})") from None
    if meta.pop("format", None) != FORMAT:
        raise ModelError(f"{path}: not a draft head of format {FORMAT}; `perflab train-drafter` makes one")
    module = HeadModule(HeadShape(**meta.pop("shape")))
    token_ids = arrays.pop("token_ids").long()
    module.load_state_dict({name: value.float() for name, value in arrays.items()})
    return DraftHead(module.eval().requires_grad_(False), token_ids, meta)
