"""Steps of a draft head in torch: for devices and models without native kernels, and as their reference.

Owns each request's keys and values of the head. Knows no scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from perflab.models.loaded import LoadedModel
from perflab.speculate.head_module import DraftHead


class Guess(NamedTuple):
    """Per row: the guessed feature [rows, hidden], the token drafted from it, its share of the draft
    vocabulary's probability."""

    feature: Tensor
    token_ids: list[int]
    share: list[float]


class HeadSteps(Protocol):
    """Runs the head for several requests; `slot` stands for the memory of one."""

    def open(self) -> Any: ...

    def close(self, slot: Any) -> None: ...

    def step(
        self,
        slots: Sequence[Any],
        starts: Sequence[int],
        counts: Sequence[int],
        features: Tensor,
        token_ids: list[int],
    ) -> Guess:
        """Row i's `counts[i]` pairs take its positions from `starts[i]` on, over what was there; pairs of
        all rows lie one after the other: features [T, hidden], and the tokens that came next."""
        ...


class TorchHead:
    """The head's module beside the target's embedding and cut head."""

    def __init__(self, head: DraftHead, model: LoadedModel) -> None:
        module: Any = model.module
        self.device = model.device
        self.module = head.module.to(model.device)
        self.embed = module.get_input_embeddings()
        rows = module.get_output_embeddings().weight.detach()
        self.rows = rows[head.token_ids.to(rows.device)].float()
        self.token_ids = head.token_ids.to(model.device)

    def open(self) -> list[Tensor]:
        """Keys and values so far, each [positions, kv_heads, dim]."""
        shape = self.module.shape
        return [torch.empty(0, shape.kv_heads, shape.head_dim, device=self.device) for _ in range(2)]

    def close(self, slot: list[Tensor]) -> None:
        slot.clear()

    @torch.inference_mode()
    def step(
        self,
        slots: Sequence[list[Tensor]],
        starts: Sequence[int],
        counts: Sequence[int],
        features: Tensor,
        token_ids: list[int],
    ) -> Guess:
        module = self.module
        tokens = torch.tensor(token_ids, device=self.device)
        x = module.fc(torch.cat((features.to(self.device).float(), self.embed(tokens).float()), -1))
        positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        q, k, v = module.project(x, positions.to(self.device))
        contexts, last, end = [], [], 0
        for slot, start, count in zip(slots, starts, counts, strict=True):
            own = slice(end, end + count)
            end += count
            last.append(end - 1)
            slot[0] = torch.cat((slot[0][:start], k[own]))
            slot[1] = torch.cat((slot[1][:start], v[own]))
            contexts.append(_attend(q[own], slot[0], slot[1]))
        guess = module.finish(x[last], torch.cat([context[-1:] for context in contexts]))
        best = functional.linear(guess, self.rows).softmax(-1).max(-1)
        return Guess(guess, self.token_ids[best.indices].tolist(), best.values.tolist())


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query [n, heads, dim] is of the last n positions of key and value [positions, kv_heads, dim]."""
    count, length = len(query), len(key)
    mask = torch.ones(count, length, dtype=torch.bool, device=query.device).tril(length - count)
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        mask,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
