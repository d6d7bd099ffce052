"""One answer of an OpenAI-compatible server, from bytes and their arrival times to a record.

Owns the reading of server-sent events and what counts as a token, a channel or an error. Opens no
socket, reads no clock: times come with the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

try:
    from orjson import loads
except ImportError:  # the standard library's is slower and does as well
    from json import loads  # type: ignore[assignment]

REASONING = ("reasoning_content", "reasoning")
"""Names under which servers send what a model thinks before it answers."""


@dataclass(slots=True)
class Answer:
    """What one stream brought. Times are the reads' that brought an event to its end, nanoseconds.

    `pieces[i]` is the text of the token-bearing chunk that came at `times[i]`; `token_counts[i]` how
    many tokens it holds where the server says so, else 0.
    """

    times: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    first_content_ns: int | None = None
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    server: dict[str, Any] | None = None  # our own server's `perflab` field
    error: str | None = None
    done: bool = False


class EventReader:
    """Splits reads into events: CRLF or LF, several or part of one in a read, comments, many data lines."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._rest = b""

    def feed(self, data: bytes, now_ns: int) -> None:
        """Bytes of the body as one read brought them."""
        data = self._rest + data if self._rest else data
        if b"\r" in data:
            held = data.endswith(b"\r")  # its line feed may be in the next read
            data = data.replace(b"\r\n", b"\n")
            if not held:
                data = data.replace(b"\r", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            self._event(event, now_ns)

    def close(self, now_ns: int) -> None:
        """The end of the body; an event without its empty line counts."""
        if self._rest.strip():
            self._event(self._rest.replace(b"\r", b"\n"), now_ns)
        self._rest = b""

    def _event(self, event: bytes, now_ns: int) -> None:
        if event.startswith(b"data: ") and b"\n" not in event:
            data = event[6:]
        else:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            data = b"\n".join(lines)
        if not data:
            return
        if data == b"[DONE]":
            self.answer.done = True
            return
        try:
            add(self.answer, loads(data), now_ns)
        except ValueError:
            self.answer.error = self.answer.error or "malformed JSON in the stream"


def add(answer: Answer, chunk: Any, now_ns: int) -> None:
    """One chunk of a stream, or the body of an answer that was not streamed."""
    if not isinstance(chunk, dict):
        answer.error = answer.error or "a chunk that is no JSON object"
        return
    if choices := chunk.get("choices"):
        choice = choices[0]
        if reason := choice.get("finish_reason"):
            answer.finish_reason = reason
        delta = choice.get("delta") or choice.get("message")
        if delta is None:
            text, thought = choice.get("text") or "", ""
        else:
            text = delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        ids = choice.get("token_ids")
        if text or thought or ids:
            answer.times.append(now_ns)
            answer.pieces.append(thought + text)
            answer.token_counts.append(len(ids) if ids else 0)
            if text:
                answer.content.append(text)
                if answer.first_content_ns is None:
                    answer.first_content_ns = now_ns
    if usage := chunk.get("usage"):
        answer.usage = usage
    if server := chunk.get("perflab"):
        answer.server = server
    if error := chunk.get("error"):
        answer.error = answer.error or f"error in the stream: {message(error)}"


def message(error: Any) -> str:
    """The words of an error object, at most 300 characters of them."""
    found = error.get("message") if isinstance(error, dict) else error
    return str(found or error)[:300]
