"""One answer of an OpenAI-compatible server, from bytes and their arrival times to token-bearing chunks.

Owns the reading of server-sent events, and what in them is a token, a channel, an end or an error. Opens
no socket and reads no clock: times come with the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from perflab.load.http_client import Body
from perflab.types import FinishReason

try:
    from orjson import dumps, loads
except ImportError:  # the standard library's are slower and do as well
    import json

    loads = json.loads  # type: ignore[assignment]

    def dumps(value: Any) -> bytes:  # type: ignore[misc]
        return json.dumps(value).encode()


CUT_OFF = {"length", "max_tokens"}
BROKEN = {"error", "abort", "cancelled"}
"""Finish reasons, as servers name them, that are no end of the model's own."""
LATE = {408, 504, "deadline_exceeded", "timeout_error"}
"""Codes and types of an error that say that the server's time is up."""


@dataclass(slots=True)
class Answer:
    """What came. `pieces[i]` is the text of the i-th token-bearing chunk, whose last byte the read at
    `times[i]` brought, nanoseconds; `sizes[i]` its tokens where the server says so, else 0."""

    times: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    first_content_ns: int | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    extra: dict[str, Any] | None = None  # what perflab's own server adds: its spans
    error: str | None = None  # the first one
    late: bool = False  # that one is a time-out of the server's
    done: bool = False  # `[DONE]` came
    whole: bool = False  # a body that was not streamed: its tokens have no times of their own

    def fail(self, error: str) -> None:
        """Remember the first error; later ones follow from it."""
        self.error = self.error or error

    def add(self, chunk: Any, now_ns: int) -> None:
        """One chunk of a stream, or the body of an answer that was not streamed."""
        if type(chunk) is not dict:
            return self.fail("a chunk that is no JSON object")
        for choice in chunk.get("choices") or ():  # none in a chunk that brings usage alone
            if reason := choice.get("finish_reason"):
                self.finish_reason = reason
                if reason in BROKEN:
                    self.fail(f"the server ended it with {reason!r}")
            said = choice.get("delta") or choice.get("message")
            if said:
                text = said.get("content") or ""
                thought = said.get("reasoning_content") or said.get("reasoning") or ""
            else:
                text, thought = choice.get("text") or "", ""
            size = _size(choice)
            if text or thought or size:
                self.times.append(now_ns)
                self.pieces.append(thought + text if thought else text)
                self.sizes.append(size)
                if text:
                    self.content.append(text)
                    if self.first_content_ns is None:
                        self.first_content_ns = now_ns
        if usage := chunk.get("usage"):
            self.usage = usage
            self.extra = chunk.get("perflab")
        if error := chunk.get("error"):
            self.late = self.late or (self.error is None and is_late(error))
            self.fail(f"error in the stream: {message(error)}")

    def end(self) -> FinishReason:
        """How the request ended, once nothing more comes; sets `error` where it is a failure."""
        if not (self.done or self.whole or self.finish_reason):
            self.fail("the stream ended without a finish reason or [DONE]")
        elif not self.times:
            self.fail("an answer without a token")
        if self.error:
            return "deadline" if self.late else "error"
        return "length" if self.finish_reason in CUT_OFF else "stop"

    def counts(self, count: Callable[[str], int] | None = None) -> tuple[list[int], str]:
        """Tokens of each chunk, and where the number is from: token_ids > usage > retokenised > chunks.

        `count` counts the tokens of a text. Usage has a total only; it is split over the chunks in
        proportion to their tokens, or to their letters without `count`.
        """
        if self.sizes and all(self.sizes):
            return self.sizes, "token_ids"
        total = self.usage.get("completion_tokens")
        if total is None and count is None:
            return [1] * len(self.pieces), "chunks"
        weights = [count(piece) if count else len(piece) for piece in self.pieces]
        if total is not None:
            return apportion(total, weights), "usage"
        assert count is not None
        return apportion(count("".join(self.pieces)), weights), "retokenised"


def _size(choice: dict[str, Any]) -> int:
    """Tokens of a chunk where the server says how many: by their ids, or by their log-probabilities."""
    if ids := choice.get("token_ids"):
        return len(ids)
    if probabilities := choice.get("logprobs"):
        return len(probabilities.get("content") or probabilities.get("tokens") or ())
    return 0


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts in proportion to `weights` (largest remainders); one each at least, where
    it is enough for that."""
    least = 1 if total >= len(weights) else 0
    spare, over = total - least * len(weights), [max(0, weight - least) for weight in weights]
    if not any(over):
        over = [1] * len(over)
    share = spare / (sum(over) or 1)
    exact = [share * each for each in over]
    parts = [least + int(x) for x in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: int(exact[i]) - exact[i])
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


class EventReader:
    """Splits reads into events for an `Answer`: lines end in CR, LF or both, a read holds several events
    or part of one, comments keep the connection alive, `data:` goes over many lines."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""

    def feed(self, data: bytes, now_ns: int) -> None:
        """Bytes of the body as one read brought them; all events that end in it came at `now_ns`."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            whole, held = (data[:-1], b"\r") if data.endswith(b"\r") else (data, b"")
            data = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held  # its LF may come next
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {") and b"\n" not in event:
                parse(self._answer, event[6:], now_ns)
            elif event:
                self._event(event, now_ns)

    def close(self, now_ns: int) -> None:
        """The end of the body; an event whose empty line is missing counts."""
        if rest := self._rest.strip():
            self._event(rest, now_ns)
        self._rest = b""

    def _event(self, event: bytes, now_ns: int) -> None:
        lines = event.split(b"\n")
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        for line in lines:
            if line.startswith(b"error:"):  # no field of the standard's; llama.cpp has sent it
                self._answer.fail(f"error in the stream: {line[6:300].decode(errors='replace').strip()}")
        if data.strip() == b"[DONE]":
            self._answer.done = True
        elif data:
            parse(self._answer, data, now_ns)


class BodyReader(Body):
    """A body that is not streamed; the time of its tokens is that of its end."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(most=1 << 28)
        self._answer = answer

    def close(self, now_ns: int) -> None:
        self._answer.whole = True
        parse(self._answer, self.data, now_ns)


def parse(answer: Answer, data: bytes, now_ns: int) -> None:
    """Add a chunk that is still JSON; what is none, or not of OpenAI's shape, is the answer's error."""
    try:
        answer.add(loads(data), now_ns)
    except (ValueError, AttributeError, TypeError):
        answer.fail(f"malformed JSON in the answer: {data[:80].decode(errors='replace')}")


def is_late(error: Any) -> bool:
    """Whether an error object says that the server gave up for want of time."""
    return isinstance(error, dict) and not LATE.isdisjoint(
        value for value in (error.get("code"), error.get("type")) if isinstance(value, (int, str))
    )


def message(error: Any) -> str:
    """The words of an error object, at most 300 characters of them."""
    found = error.get("message") if isinstance(error, dict) else error
    return str(found or error)[:300]
