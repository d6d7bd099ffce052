"""The words of an answer: chunks of a stream and bodies, as a chat and as a completion.

Owns JSON made piece by piece: what stays the same through a stream is rendered once, a chunk adds a
text. Knows no socket and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from perflab.types import TokenEvent, TokenLogprob

DONE = b"data: [DONE]\n\n"
TokenBytes = Callable[[int], bytes]
_REASONS = {"stop": '"stop"', "length": '"length"', None: "null"}


@dataclass(slots=True)
class Choice:
    """One sample of an answer while it grows."""

    index: int
    prompt_tokens: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: int = 0
    last_ns: int = 0  # the latest delivery
    offset: int = 0  # characters of the tokens so far, for a completion's text_offset
    started: bool = False


class Format:
    """What chats and completions share. `head` is the part of every chunk and body that stays the same."""

    kind = chunk_kind = prefix = ""

    def __init__(self, request_id: str, created: int, model: str, token_bytes: TokenBytes, ids: bool) -> None:
        self.request_id = request_id
        self._same = f'"created":{created},"model":{quoted(model)}'
        self._token_bytes = token_bytes
        self._ids = ids  # each choice also carries its token ids
        self._head = f'data: {{"id":{quoted(request_id)},"object":"{self.chunk_kind}",{self._same}'

    def chunk(self, choice: Choice, text: str, event: TokenEvent, usage: dict[str, int] | None) -> str:
        """One event of the stream."""
        inside = self._delta(choice, quoted(text))
        logprobs = self._logprobs(choice, event.logprobs) if event.logprobs else None
        more = "null" if logprobs is None else json.dumps(logprobs)
        ids = f',"token_ids":{list(event.token_ids)}' if self._ids else ""
        tail = "" if usage is None else f',"usage":{json.dumps(usage)}'
        return (
            f'{self._head},"choices":[{{"index":{choice.index},{inside},"logprobs":{more}{ids},'
            f'"finish_reason":{_REASONS[choice.finish_reason]}}}]{tail}}}\n\n'
        )

    def usage_chunk(self, usage: dict[str, Any], extra: dict[str, Any] | None) -> str:
        """The last chunk: no choices, the counts, what the engine tells of itself."""
        more = "" if extra is None else f',"perflab":{json.dumps(extra, separators=(",", ":"))}'
        return f'{self._head},"choices":[],"usage":{json.dumps(usage)}{more}}}\n\n'

    def body(self, choices: Sequence[Choice], usage: dict[str, Any]) -> str:
        """A whole answer, without its closing brace, so that spans can be added to it."""
        parts = []
        for choice in choices:
            text = quoted("".join(choice.texts))
            logprobs = self._logprobs(choice, choice.logprobs) if choice.logprobs else None
            ids = f',"token_ids":{choice.token_ids}' if self._ids else ""
            parts.append(
                f'{{"index":{choice.index},{self._content(text)},"logprobs":{json.dumps(logprobs)}{ids},'
                f'"finish_reason":{_REASONS[choice.finish_reason]}}}'
            )
        return (
            f'{{"id":{quoted(self.request_id)},"object":"{self.kind}",{self._same},'
            f'"choices":[{",".join(parts)}],"usage":{json.dumps(usage)}'
        )

    def _delta(self, choice: Choice, text: str) -> str:
        raise NotImplementedError

    def _content(self, text: str) -> str:
        raise NotImplementedError

    def _logprobs(self, choice: Choice, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        raise NotImplementedError


class ChatFormat(Format):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def _delta(self, choice: Choice, text: str) -> str:
        if choice.started:
            return f'"delta":{{"content":{text}}}'
        choice.started = True
        return f'"delta":{{"role":"assistant","content":{text}}}'

    def _content(self, text: str) -> str:
        return f'"message":{{"role":"assistant","content":{text},"refusal":null}}'

    def _logprobs(self, choice: Choice, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        def one(token_id: int, logprob: float) -> dict[str, Any]:
            raw = self._token_bytes(token_id)
            return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}

        content = [
            {**one(lp.token_id, lp.logprob), "top_logprobs": [one(*top) for top in lp.top]} for lp in found
        ]
        return {"content": content, "refusal": None}


class TextFormat(Format):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def _delta(self, choice: Choice, text: str) -> str:
        return self._content(text)

    def _content(self, text: str) -> str:
        return f'"text":{text}'

    def _logprobs(self, choice: Choice, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens: list[str] = []
        offsets = []
        for lp in found:
            tokens.append(self._token(lp.token_id))
            offsets.append(choice.offset)
            choice.offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(lp.logprob) for lp in found],
            "top_logprobs": [
                {self._token(token): _finite(value) for token, value in lp.top} if lp.top else None
                for lp in found
            ],
            "text_offset": offsets,
        }

    def _token(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float | None:
    """JSON has no infinity: OpenAI's floor for what has no probability; None for what is unknown."""
    return None if logprob != logprob else max(logprob, -9999.0)
