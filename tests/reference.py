"""What transformers' own `generate()` answers to one prompt alone, and where fp32 lets a batch differ."""

from __future__ import annotations

import torch

TIE = 5e-4  # two leading logits closer than this may swap with the shape of a batch


def generate_alone(model, prompt: list[int], count: int) -> list[int]:
    """Greedy, unpadded, `count` tokens whatever they are."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
        )
    return out[0, len(prompt) :].tolist()


def leading_gap(model, tokens: list[int]) -> float:
    """Distance between the two best next-token logits after `tokens`."""
    with torch.inference_mode():
        logits = model.module(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return best - second
