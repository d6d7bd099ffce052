"""A drafter's training set: what a model answers, with its hidden features at every position.

Owns how conversations come about (questions from `prompts`, users' turns that the model writes itself,
answers greedy and sampled, follow-ups over its own texts), and their files: `shard-00000.safetensors`, …
in one folder, each made from its own seed, so that an interrupted collection goes on where it stopped.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from perflab.engine.llm import LLM
from perflab.errors import ConfigError, StoreError
from perflab.models.loaded import LoadedModel
from perflab.speculate.prompts import Opening, Question, again, draw, follow_up
from perflab.types import SamplingParams

CONVERSATIONS = 96  # that begin in one shard
LONGEST = 640  # tokens of a conversation that is kept
_MARK = "QXZQXZ"
_TURN = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=120)
_ANSWER_TOKENS = 256


@dataclass(slots=True)
class Example:
    """A conversation: its tokens, and where the last answer starts."""

    tokens: list[int]
    answer: int


def collect(
    llm: LLM,
    folder: Path,
    tokens: int,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> list[Path]:
    """Shards in `folder` that together hold at least `tokens` tokens; those already there count.

    Raises StoreError where the folder's shards are of another model, ConfigError where the engine's
    longest request is too short for a conversation.
    """
    if (longest := llm.engine.config.max_model_len or 0) < LONGEST + _ANSWER_TOKENS:
        raise ConfigError(
            f"max_model_len={longest}: conversations need {LONGEST + _ANSWER_TOKENS}; "
            "draft heads are for models of a longer context"
        )
    folder.mkdir(parents=True, exist_ok=True)
    done = 0
    paths: list[Path] = []
    while done < tokens:
        path = folder / f"shard-{len(paths):05}.safetensors"
        if not path.exists():
            progress(f"{done:,} of {tokens:,} tokens collected")
            examples = _converse(llm, random.Random(f"{seed}/{len(paths)}"))
            _save(path, llm, examples)
        done += _tokens_of(path, llm.model.fingerprint)
        paths.append(path)
    return paths


def load(paths: Sequence[Path]) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Per conversation: tokens int64 [n], features bf16 [n, hidden], where the last answer starts."""
    for path in paths:
        with safe_open(path, "pt") as file:
            tokens, features = file.get_tensor("tokens").long(), file.get_tensor("features")
            starts, answers = file.get_tensor("starts").tolist(), file.get_tensor("answers").tolist()
        for start, end, answer in zip(starts, starts[1:], answers, strict=False):
            yield tokens[start:end], features[start:end], answer


def _tokens_of(path: Path, fingerprint: str) -> int:
    with safe_open(path, "pt") as file:
        model = json.loads(file.metadata()["perflab"])["model"]
        count: int = file.get_slice("tokens").get_shape()[0]
    if model != fingerprint:
        raise StoreError(f"{path} was collected from another model: choose another folder or delete it")
    return count


def _save(path: Path, llm: LLM, examples: list[Example]) -> None:
    """The whole file or none."""
    features = [llm.engine.executor.states(example.tokens).to("cpu", torch.bfloat16) for example in examples]
    lengths = [len(example.tokens) for example in examples]
    arrays = {
        "tokens": torch.tensor(
            [token for example in examples for token in example.tokens], dtype=torch.int32
        ),
        "starts": torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int64)),
        "answers": torch.tensor([example.answer for example in examples], dtype=torch.int32),
        "features": torch.cat(features),
    }
    draft = path.with_suffix(".draft")
    save_file(arrays, draft, {"perflab": json.dumps({"model": llm.model.fingerprint})})
    draft.rename(path)


def _converse(llm: LLM, rng: random.Random) -> list[Example]:
    """One shard's conversations: a first question each, and for half of them another turn."""
    model = llm.model
    drawn = [draw(rng) for _ in range(CONVERSATIONS)]
    written = iter(_write_turns(llm, [d.text for d in drawn if isinstance(d, Opening)], rng))
    asked = [d.text if isinstance(d, Question) else next(written) for d in drawn]
    chats = [[{"role": "user", "content": text}] for text in asked if text.strip()]
    first = _answer(llm, [model.chat(chat) for chat in chats], rng)
    more, kept = [], []
    for chat, example in zip(chats, first, strict=True):
        text = model.decode(example.tokens[example.answer :]).strip()
        kind = rng.random()
        if kind < 0.25 and text:
            said = [*chat, {"role": "assistant", "content": text}]
            more.append(model.chat([*said, {"role": "user", "content": again(rng).text}]))
            continue  # the longer conversation holds the first
        kept.append(example)
        if kind < 0.55 and len(text) > 200:
            more.append(model.chat(follow_up(rng, text).text))
    return kept + _answer(llm, more, rng)


def _answer(llm: LLM, prompts: list[list[int]], rng: random.Random) -> list[Example]:
    params = [
        SamplingParams(
            temperature=0.0 if rng.random() < 0.6 else rng.uniform(0.5, 1.0),
            max_tokens=_ANSWER_TOKENS,
            seed=rng.getrandbits(62),
        )
        for _ in prompts
    ]
    short = [(p, s) for p, s in zip(prompts, params, strict=True) if len(p) < LONGEST - 64]
    found = llm.generate([p for p, _ in short], [s for _, s in short])
    return [
        Example([*prompt, *completion.token_ids][:LONGEST], len(prompt))
        for (prompt, _), completion in zip(short, found, strict=True)
        if completion.error is None and len(completion.token_ids) > 1
    ]


def _write_turns(llm: LLM, openings: list[str], rng: random.Random) -> list[str]:
    """Users' turns that begin with these words; the model writes the rest, as after its own template."""
    from dataclasses import replace

    before = _before_user(llm.model)
    params = [replace(_TURN, seed=rng.getrandbits(62)) for _ in openings]
    found = llm.generate([llm.model.encode(before + opening) for opening in openings], params)
    return [opening + completion.text for opening, completion in zip(openings, found, strict=True)]


def _before_user(model: LoadedModel) -> str:
    """The chat template's text up to what a user says; nothing without a template."""
    if getattr(model.tokenizer, "chat_template", None) is None:
        return ""
    text = model.tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    return text.split(_MARK)[0]
