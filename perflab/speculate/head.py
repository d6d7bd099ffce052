"""Drafts from the head trained on the target's features: which pairs each request owes it, and the chains.

Owns, per request, the features that the head has not seen yet and the place of the next one. The head's
mathematics and memory are `HeadSteps`'s; how a head comes about is `train`'s.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perflab.engine.plan import Plan, StepResult
from perflab.engine.sequence import Sequence
from perflab.errors import ModelError
from perflab.models.assets import cache_dir
from perflab.models.loaded import LoadedModel
from perflab.models.native import NativeRunner
from perflab.models.runners import Runner
from perflab.speculate.head_module import read_head
from perflab.speculate.head_native import NativeHead
from perflab.speculate.head_torch import HeadSteps, TorchHead

FOLDER = Path(__file__).resolve().parents[2] / "data"
_MOST_WAITING = 512  # features kept for a request that is not drafted for; then the oldest go


@dataclass(slots=True)
class _Text:
    """One request: pairs from position `first` on are the head's; `done` of them it has taken in."""

    slot: Any
    first: int
    done: int = 0
    waiting: list[Tensor] = field(default_factory=list)  # features from position first + done on
    count: int = 0  # of those features


class HeadDrafter:
    """A head's guesses, the most likely token each. `least`: stop where a chain's own chance is below."""

    wants_features = True

    def __init__(self, steps: HeadSteps, least: float = 0.0) -> None:
        self._steps, self._least = steps, least
        self._texts: dict[str, _Text] = {}

    @classmethod
    def of(cls, model: LoadedModel, runner: Runner) -> HeadDrafter:
        """With the head made for `model`. Raises ModelError where there is none."""
        head = read_head(head_file(model.name))
        if isinstance(runner, NativeRunner):
            return cls(NativeHead(head, runner))
        return cls(TorchHead(head, model))

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[list[int]]:
        """See `Drafter.propose`."""
        drafts: list[list[int]] = [[] for _ in seqs]
        rows = [row for row, seq in enumerate(seqs) if limits[row] and self._ready(seq)]
        if not rows:
            return drafts
        texts = [self._texts[seqs[row].request_id] for row in rows]
        features, tokens = [], []
        for row, text in zip(rows, texts, strict=True):
            features += text.waiting
            start = text.first + text.done + 1
            tokens += seqs[row].tokens[start : start + text.count]
        starts, counts = [text.done for text in texts], [text.count for text in texts]
        guess = self._steps.step([t.slot for t in texts], starts, counts, torch.cat(features), tokens)
        for text in texts:
            text.done, text.count, text.waiting = text.done + text.count, 0, []
        chance = [1.0] * len(rows)
        going = list(range(len(rows)))
        place = 0
        while True:
            keep = []
            for at, index in enumerate(going):
                row = rows[index]
                chance[index] *= guess.share[at]
                if place and chance[index] < self._least:
                    continue
                drafts[row].append(guess.token_ids[at])
                if place + 1 < limits[row]:
                    keep.append(at)
            if not keep:
                return drafts
            chosen = [going[at] for at in keep]
            place += 1
            guess = self._steps.step(
                [texts[i].slot for i in chosen],
                [texts[i].done + place - 1 for i in chosen],  # where true pairs come over them next time
                [1] * len(chosen),
                guess.feature[keep],
                [guess.token_ids[at] for at in keep],
            )
            going = chosen

    def _ready(self, seq: Sequence) -> bool:
        """Whether there are new features, and they reach the token before the newest."""
        text = self._texts.get(seq.request_id)
        return text is not None and 0 < text.count == len(seq.tokens) - 1 - text.first - text.done

    def observe(self, plan: Plan, result: StepResult) -> None:
        for row, features in result.features.items():
            if row not in result.errors and row not in result.deferred:
                seq = plan.seqs[row]
                held = plan.counts[row] - len(seq.draft) + result.accepted.get(row, 0)
                self._take(seq.request_id, seq.num_computed_tokens, features[:held].float())

    def _take(self, request_id: str, start: int, features: Tensor) -> None:
        text = self._texts.get(request_id)
        if text is None:
            text = self._texts[request_id] = _Text(self._steps.open(), start)
        assert text.first + text.done + text.count == start, "features of every token come, in order"
        text.waiting.append(features)
        text.count += len(features)
        if text.count > _MOST_WAITING and len(text.waiting) > _MOST_WAITING // 2:
            kept = torch.cat(text.waiting)[-_MOST_WAITING // 4 :]
            self._steps.close(text.slot)
            first = start + len(features) - len(kept)
            self._texts[request_id] = _Text(self._steps.open(), first, 0, [kept], len(kept))

    def forget(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._steps.close(text.slot)


def head_path(name: str) -> Path:
    """The name of the file with the draft head of the model of this name."""
    return Path(f"draft_head_{name.rstrip('/').split('/')[-1].lower()}.safetensors")


def installed() -> Path:
    """The folder of the user's own heads."""
    return cache_dir() / "heads"


def head_file(name: str, folders: Rows[Path] | None = None) -> Path:
    """The draft head that belongs to the model of this name, the user's own before one that came along.

    Raises ModelError where none was made.
    """
    for folder in (installed(), FOLDER) if folders is None else folders:
        path = folder / head_path(name)
        if path.is_file():
            return path
    raise ModelError(f"{name} has no draft head: `perflab train-drafter` makes one")
