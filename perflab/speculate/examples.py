"""A drafter's training set in memory: conversations, batches of them, and what they need of the target.

Owns padding, weights of positions and which tokens are frequent. Knows no loss.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perflab.models.loaded import LoadedModel
from perflab.speculate import collect

_IGNORE = -1


@dataclass(slots=True)
class Set:
    """Conversations in memory: per one, tokens [n], features bf16 [n, hidden], where the answer starts."""

    examples: list[tuple[Tensor, Tensor, int]]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Set:
        return cls([example for example in collect.load(paths) if len(example[0]) > 8])

    def batches(self, tokens: int, seed: str) -> list[list[int]]:
        """Indices of conversations of like length, about `tokens` padded tokens together, shuffled."""
        rng = random.Random(seed)
        order = sorted(range(len(self.examples)), key=lambda i: (len(self.examples[i][0]), rng.random()))
        out: list[list[int]] = [[]]
        for index in order:
            if (len(out[-1]) + 1) * len(self.examples[index][0]) > tokens and out[-1]:
                out.append([])
            out[-1].append(index)
        rng.shuffle(out)
        return out


class Target:
    """What training needs of the target: embeddings, and the head's rows of frequent tokens."""

    def __init__(self, model: LoadedModel, token_ids: Tensor) -> None:
        module: Any = model.module
        self.device = model.device
        self.embed = module.get_input_embeddings()
        head = module.get_output_embeddings()
        self.rows = head.weight.detach()[token_ids.to(head.weight.device)].float()
        self.place = torch.full((head.weight.shape[0],), _IGNORE, dtype=torch.int64)
        self.place[token_ids] = torch.arange(len(token_ids))
        self.embed_scale = rms(self.embed(token_ids[:1024].to(self.device)).detach().float())


@dataclass(slots=True)
class Batch:
    """B conversations padded to T + 2 tokens; position t has the pair (feature t, embedding of t + 1), the
    wanted feature t + 1 and the wanted token t + 2. weight [B, T]: 0 where there is none."""

    feature: Tensor
    embedding: Tensor
    wanted: Tensor
    token: Tensor  # place in the draft vocabulary, or -1
    weight: Tensor
    answer: Tensor  # bool [B, T]: the wanted token is the answer's


def make_batch(data: Set, indices: list[int], target: Target, scale: float, prompt_weight: float) -> Batch:
    """`scale`: what features are multiplied by, so that they are about 1."""
    chosen = [data.examples[i] for i in indices]
    length = max(len(tokens) for tokens, _, _ in chosen)
    hidden = chosen[0][1].shape[1]
    tokens = torch.zeros(len(chosen), length, dtype=torch.int64)
    features = torch.zeros(len(chosen), length, hidden)
    weight = torch.zeros(len(chosen), length - 2)
    answer = torch.zeros(len(chosen), length - 2, dtype=torch.bool)
    for row, (own, feature, start) in enumerate(chosen):
        tokens[row, : len(own)] = own
        features[row, : len(own)] = feature
        weight[row, : len(own) - 2] = prompt_weight
        weight[row, max(0, start - 2) : len(own) - 2] = 1.0
        answer[row, max(0, start - 2) : len(own) - 2] = True
    device = target.device
    embedding = target.embed(tokens[:, 1:-1].to(device)).detach().float() / target.embed_scale
    return Batch(
        feature=(features[:, :-2] * scale).to(device),
        embedding=embedding,
        wanted=features[:, 1:-1].to(device),
        token=target.place[tokens[:, 2:]].to(device),
        weight=weight.to(device),
        answer=answer.to(device),
    )


def frequent_tokens(data: Set, count: int, always: Sequence[int]) -> tuple[Tensor, float]:
    """The `count` most frequent token ids, answers before prompts, and their share of answer tokens."""
    answers = torch.cat([tokens[start:] for tokens, _, start in data.examples])
    prompts = torch.cat([tokens[:start] for tokens, _, start in data.examples])
    size = max(int(answers.max()), int(prompts.max()), *always) + 1
    seen = torch.bincount(answers, minlength=size)
    score = seen.double() + 0.1 * torch.bincount(prompts, minlength=size)
    score[list(always)] = float("inf")
    chosen = score.argsort(descending=True, stable=True)[:count].sort().values
    return chosen, float(seen[chosen].sum() / seen.sum())


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
