"""Any OpenAI-compatible server over HTTP as a service.

Owns connections, request bodies and the spans of a request's way. What a stream means is `sse`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from perflab.clock import Clock, WallClock
from perflab.errors import WorkloadError
from perflab.load.prompts import Chat, PromptEncoder
from perflab.load.sse import Answer, EventReader, add, loads, message
from perflab.load.workloads import TimedRequest
from perflab.types import OUTCOME_OF, RequestRecord, Span

PATHS = {"chat": "/chat/completions", "completions": "/completions"}
REFUSED = (429, 503)


class HTTPService:
    """Sends each request to `url` (the API's base, such as http://127.0.0.1:8000/v1) and reads its stream."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        endpoint: str = "chat",
        *,
        stream: bool = True,
        count: Callable[[str], int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if endpoint not in PATHS:
            raise WorkloadError(f"endpoint={endpoint!r}: choose one of {', '.join(PATHS)}")
        self.base = url.rstrip("/")
        self.base += "" if self.base.endswith("/v1") else "/v1"
        self.model, self.endpoint, self.stream = model, endpoint, stream
        self.clock: Clock = clock or WallClock()
        self.texts: dict[str, str] = {}
        self._headers = {"X-Perflab-Spans": "1"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._count = count

    async def __aenter__(self) -> Self:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(self._stamp("connect_start"))
        trace.on_connection_create_end.append(self._stamp("connect_end"))
        trace.on_request_chunk_sent.append(self._stamp("sent"))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            headers=self._headers,
            trace_configs=[trace],
            read_bufsize=2**18,
        )
        if self.model is None:
            self.model = await self._first_model()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def _stamp(self, name: str) -> Any:
        async def note(session: Any, context: Any, params: Any) -> None:
            context.trace_request_ctx[name] = self.clock.now()

        return note

    async def _first_model(self) -> str:
        async with self._session.get(f"{self.base}/models", trace_request_ctx={}) as answer:
            return str((await answer.json())["data"][0]["id"])

    def describe(self) -> dict[str, Any]:
        parts = urlsplit(self.base)
        where = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
        return {"kind": "http", "url": where, "model": self.model, "endpoint": self.endpoint}

    def prepare(self, request: TimedRequest, encoder: PromptEncoder | None) -> TimedRequest:
        """The request with its words: messages for a chat, else text (or the token ids it is)."""
        if encoder is None:
            return request
        made = encoder.chat if self.endpoint == "chat" else encoder.text
        return replace(request, prompt=made(request.prompt, request.salt))

    def body(self, request: TimedRequest) -> dict[str, Any]:
        """The JSON body that asks for this."""
        params = request.params
        body: dict[str, Any] = {"model": self.model, "temperature": params.temperature}
        if params.max_tokens is not None:
            body["max_tokens"] = params.max_tokens
        if params.ignore_eos:
            body["ignore_eos"] = True
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        prompt = request.prompt
        if self.endpoint == "completions":
            body["prompt"] = prompt
        else:
            body["messages"] = (prompt if isinstance(prompt, Chat) else Chat(str(prompt))).messages
        return body

    async def send(self, request: TimedRequest, record: RequestRecord) -> None:
        answer = Answer()
        stamps: dict[str, int] = {}
        now = self.clock.now
        try:
            async with self._session.post(
                self.base + PATHS[self.endpoint], json=self.body(request), trace_request_ctx=stamps
            ) as response:
                stamps["headers"] = now()
                if response.status != 200:
                    self._refuse(record, response.status, await response.read())
                elif response.content_type == "application/json":
                    body = await response.read()
                    stamps["first_byte"] = now()
                    add(answer, loads(body), stamps["first_byte"])
                    answer.done = True
                else:
                    reader = EventReader(answer)
                    async for data in response.content.iter_any():
                        time_ns = now()
                        stamps.setdefault("first_byte", time_ns)
                        reader.feed(data, time_ns)
                    reader.close(now())
        except (aiohttp.ClientError, OSError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            record.end_ns = now()
            self._fill(record, answer, stamps)

    def _refuse(self, record: RequestRecord, status: int, body: bytes) -> None:
        try:
            found = message(loads(body).get("error"))
        except (ValueError, AttributeError):
            found = body[:300].decode(errors="replace")
        record.finish_reason = "rejected" if status in REFUSED else "error"
        record.error = f"HTTP {status}: {found}"

    def _fill(self, record: RequestRecord, answer: Answer, stamps: dict[str, int]) -> None:
        record.token_ns = answer.times
        record.chunk_tokens, record.count_source = counted(answer, self._count)
        record.output_tokens = sum(record.chunk_tokens)
        if answer.times:
            record.first_token_ns, record.last_token_ns = answer.times[0], answer.times[-1]
        record.first_content_ns = answer.first_content_ns
        usage = answer.usage or {}
        record.server_prompt_tokens = usage.get("prompt_tokens")
        record.prompt_tokens = record.prompt_tokens or record.server_prompt_tokens or 0
        record.spans += spans(record, stamps)
        self.texts[record.request_id] = "".join(answer.content)
        if record.finish_reason is None:
            record.error = answer.error
            record.finish_reason = "error" if answer.error else "stop"
            if answer.finish_reason == "length":
                record.finish_reason = "length"
        record.outcome = OUTCOME_OF[record.finish_reason]


def spans(record: RequestRecord, stamps: dict[str, int]) -> list[Span]:
    """Exclusive segments from the send to the end of the stream."""
    found, at = [], record.sent_ns
    if "connect_end" in stamps:
        found.append(Span("connect", at, stamps["connect_end"]))
        at = stamps["connect_end"]
    for name, key in (("send", "sent"), ("server_wait", "headers"), ("first_byte", "first_byte")):
        if key in stamps:
            found.append(Span(name, at, stamps[key]))
            at = stamps[key]
    if "first_byte" in stamps and record.end_ns is not None:
        found.append(Span("stream", at, record.end_ns))
    return found


def counted(answer: Answer, count: Callable[[str], int] | None) -> tuple[list[int], str]:
    """Tokens of each chunk and where the number is from: token_ids > usage > retokenised > chunks."""
    if answer.pieces and all(answer.token_counts):
        return answer.token_counts, "token_ids"
    weights = [count(piece) if count else len(piece.encode()) for piece in answer.pieces]
    total = (answer.usage or {}).get("completion_tokens")
    if total is not None:
        return apportion(total, weights), "usage"
    return (weights, "retokenised") if count else ([1] * len(weights), "chunks")


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts in proportion to `weights` (largest remainders), one each at least where
    it is enough."""
    n = len(weights)
    if not n:
        return []
    least = 1 if total >= n else 0
    spare, whole = total - least * n, sum(weights) or 1
    exact = [spare * weight / whole for weight in weights]
    parts = [least + int(x) for x in exact]
    order = sorted(range(n), key=lambda i: int(exact[i]) - exact[i])
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return parts
