"""What a model is to the rest of the house: weights, tokenizer, limits and defaults in one value.

Owns the text side (encode, chat, decode), the fingerprint, and that weights may wait until someone
asks for them. Does not know where a model came from, nor how an engine runs it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from perflab.errors import ModelError
from perflab.types import SamplingParams, Span

Messages = Sequence[Mapping[str, str]]

_SAMPLE = 256
_NOT_THE_MODEL = frozenset({"transformers_version", "architectures", "dtype", "use_cache"})


class Deferred:
    """Weights that nobody asked for yet: how to read them, and the spans that reading them took."""

    def __init__(self, read: Callable[[], tuple[torch.nn.Module, tuple[Span, ...]]]) -> None:
        self.read: Callable[[], tuple[torch.nn.Module, tuple[Span, ...]]] | None = read
        self.lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An unmodified Hugging Face causal LM in eval mode without gradients, and what comes with it.

    `tokenizer` is anything with `decode(ids, skip_special_tokens=...)`; None for a checkpoint that
    has none, which still takes token ids. `defaults` are the checkpoint's own sampling defaults.
    With `module=None` and `deferred`, module and config appear when one of them is first asked for
    (once, also among threads); what reading can raise, it raises then, and is tried again next time.
    """

    name: str
    fingerprint: str
    module: torch.nn.Module = field(repr=False)
    config: Any = field(repr=False)
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    defaults: SamplingParams
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    notes: tuple[str, ...] = ()
    load_spans: tuple[Span, ...] = ()
    deferred: Deferred | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.module is None:
            assert self.deferred is not None, "neither a module nor a way to read it"
            object.__delattr__(self, "module")  # a missing attribute is what calls __getattr__
            object.__delattr__(self, "config")

    if not TYPE_CHECKING:  # else any misspelt attribute would pass

        def __getattr__(self, name: str) -> Any:
            if name not in ("module", "config"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            assert self.deferred is not None
            with self.deferred.lock:
                if self.deferred.read is not None:
                    module, spans = self.deferred.read()
                    object.__setattr__(self, "load_spans", (*self.load_spans, *spans))
                    object.__setattr__(self, "config", module.config)
                    object.__setattr__(self, "module", module)
                    self.deferred.read = None
            return object.__getattribute__(self, name)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with whatever the tokenizer itself adds (a BOS, for some)."""
        return list(self._require_tokenizer().encode(text))

    def chat(self, messages: str | Messages) -> list[int]:
        """Token ids of a conversation through the chat template, ready for the answer.

        A string is one user message. Without a template the contents are encoded as plain text.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        tokenizer = self._require_tokenizer()
        if getattr(tokenizer, "chat_template", None) is None:
            return self.encode("\n".join(message["content"] for message in messages))
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        return list(ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._require_tokenizer().decode(list(ids), skip_special_tokens=skip_special_tokens)

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ModelError(
                f"{self.name} has no tokenizer: put tokenizer.json beside its weights, or send token ids"
            )
        return self.tokenizer


def freeze(module: torch.nn.Module) -> torch.nn.Module:
    """The module in eval mode and without gradients."""
    return module.eval().requires_grad_(False)


def fingerprint(module: torch.nn.Module, config: Any) -> str:
    """A hash of configuration and weights, the same wherever the same weights were loaded from.

    Every tensor enters with the sum of its bytes as 64-bit words (integers that wrap around, so no
    order of summation changes it and any single changed element does) and some words at fixed places.
    """
    facts = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k not in _NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, tensor in sorted(module.state_dict().items()):
        raw = tensor.detach().contiguous().flatten().view(torch.uint8)
        if raw.storage_offset() % 8:  # a view into a larger tensor: words must start at a multiple of 8
            raw = raw.clone()
        end = raw.numel() // 8 * 8
        words = raw[:end].view(torch.int64)
        # On the CPU numpy's one thread reads as fast as torch's pool, also on a busy machine.
        total = int(words.numpy().sum() if words.device.type == "cpu" else words.sum())
        sample = words[:: max(1, words.numel() // _SAMPLE)].cpu().numpy().tobytes()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {total}".encode() + sample)
        digest.update(raw[end:].cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
