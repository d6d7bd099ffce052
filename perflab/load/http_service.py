"""Any OpenAI-compatible server over HTTP as a service.

Owns connections, request bodies, retries and the spans of a request's way; keeps no key in what it
describes. What a stream means is `sse`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from perflab.clock import Clock, WallClock, clock_id
from perflab.errors import ServiceError, WorkloadError
from perflab.load.prompts import Chat, PromptEncoder
from perflab.load.sse import Answer, BodyReader, EventReader, loads, message
from perflab.load.workloads import TimedRequest
from perflab.types import OUTCOME_OF, RequestRecord, Span

PATHS = {"chat": "/chat/completions", "completions": "/completions"}
REFUSED = (429, 503)
"""Statuses by which a server that is full refuses a request."""

LOST = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)
JSON = "application/json"
SHORT = 2_000
"""Bytes of an error's body that are read."""


class HTTPService:
    """Sends each request to `url`, an API's base such as `http://127.0.0.1:8000`, and reads its stream.

    model: None takes the first that the server lists. extra: more fields of every body. stream=False
    asks for whole bodies, whose first token has no time. retries: sends after a refusal (429, 503) or a
    connection that failed, as long as nothing was received, `retry_s` after it, doubling; their time is
    the request's. count: tokens of a text, for answers whose tokens the server does not count; it is
    used after the run. `texts` are the answers by request.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        endpoint: str = "chat",
        *,
        stream: bool = True,
        extra: Mapping[str, Any] | None = None,
        connect_timeout_s: float = 30.0,
        first_byte_timeout_s: float | None = None,
        retries: int = 0,
        retry_s: float = 0.5,
        count: Callable[[str], int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if endpoint not in PATHS:
            raise WorkloadError(f"endpoint={endpoint!r}: choose one of {', '.join(PATHS)}")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WorkloadError(f"url={url!r}: give a server's address, such as http://127.0.0.1:8000")
        self.root = f"{parts.scheme}://{parts.netloc}"
        path = parts.path.removesuffix(PATHS["chat"]).removesuffix(PATHS["completions"]).rstrip("/")
        self.base = self.root + (path or "/v1")
        self._target = self.base + PATHS[endpoint]
        self.model, self.endpoint, self.stream = model, endpoint, stream
        self.clock: Clock = clock or WallClock()
        self.texts: dict[str, str] = {}
        self._extra = dict(extra or {})
        self._connect_timeout_s, self._first_byte_timeout_s = connect_timeout_s, first_byte_timeout_s
        self._retries, self._retry_s, self._count = retries, retry_s, count
        self._headers = {"X-Perflab-Spans": "1"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._uncounted: list[tuple[RequestRecord, Answer]] = []

    async def __aenter__(self) -> Self:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(self._stamp("connect"))
        trace.on_request_chunk_sent.append(self._stamp("send"))
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            headers=self._headers,
            trace_configs=[trace],
        )
        try:
            self.model = self.model or await self._first_model()
        except BaseException:
            await self.session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    def _stamp(self, name: str) -> Any:
        async def note(session: Any, context: Any, params: Any) -> None:
            if context.trace_request_ctx is not None:
                context.trace_request_ctx[name] = self.clock.now()

        return note

    async def _first_model(self) -> str:
        try:
            async with self.session.get(f"{self.base}/models") as answer:
                body = await answer.text()
                if answer.status in (401, 403):
                    raise ServiceError(f"{self.base} wants another key (HTTP {answer.status})")
                return str(loads(body)["data"][0]["id"])
        except (aiohttp.ClientError, OSError) as error:
            raise ServiceError(
                f"no server answers at {self.base}: start it or check the address ({error})"
            ) from None
        except (ValueError, LookupError, TypeError):
            raise ServiceError(f"{self.base}/models lists no model: name one, or check the address") from None

    def describe(self) -> dict[str, Any]:
        """The address without credentials, and what is asked of it."""
        parts = urlsplit(self.base)
        where = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        facts = {"kind": "http", "url": where, "model": self.model, "endpoint": self.endpoint}
        return facts | {"stream": self.stream, "extra": self._extra, "retries": self._retries}

    def prepare(self, request: TimedRequest, encoder: PromptEncoder | None) -> TimedRequest:
        """The request with its words: messages for a chat, else text (or the token ids it is)."""
        if encoder is None:
            return request
        made = encoder.chat if self.endpoint == "chat" else encoder.text
        return replace(request, prompt=made(request.prompt, request.salt))

    def body(self, request: TimedRequest) -> dict[str, Any]:
        """The JSON body; fields beyond OpenAI's only where they differ from their defaults."""
        params, prompt = request.params, request.prompt
        body: dict[str, Any] = {"model": self.model, "temperature": params.temperature}
        if self.endpoint == "chat":
            body["messages"] = (prompt if isinstance(prompt, Chat) else Chat(str(prompt))).messages
        else:
            body["prompt"] = prompt
        for name, value, default in (
            ("max_tokens", params.max_tokens, None),
            ("top_p", params.top_p, 1.0),
            ("seed", params.seed, None),
            ("n", params.n, 1),
            ("presence_penalty", params.presence_penalty, 0.0),
            ("frequency_penalty", params.frequency_penalty, 0.0),
            ("stop", list(params.stop), []),
            ("top_k", params.top_k, 0),
            ("min_p", params.min_p, 0.0),
            ("repetition_penalty", params.repetition_penalty, 1.0),
            ("min_tokens", params.min_tokens, 0),
            ("ignore_eos", params.ignore_eos, False),
            ("priority", request.priority, 0),
        ):
            if value != default:
                body[name] = value
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | self._extra

    async def send(self, request: TimedRequest, record: RequestRecord) -> None:
        """One request with its retries. Cancelled, it closes the connection, so that the server sees it."""
        body, began = self.body(request), record.sent_ns
        answer, stamps = Answer(), dict[str, int]()
        try:
            while (wait_s := await self._attempt(body, record, answer, stamps)) is not None:
                await asyncio.sleep(wait_s)
                failed, began = began, self.clock.now()
                record.spans.append(Span("retry", failed, began))
                record.attempts += 1
                record.finish_reason = record.error = None
                answer, stamps = Answer(), {}
        finally:
            record.end_ns = self.clock.now()
            self._fill(record, answer, stamps, began)

    async def _attempt(
        self, body: dict[str, Any], record: RequestRecord, answer: Answer, stamps: dict[str, int]
    ) -> float | None:
        """One send; seconds until the next, or None where it was the last and the end is known."""
        now = self.clock.now
        again = record.attempts <= self._retries
        wait_s = self._retry_s * 2 ** (record.attempts - 1)
        patience = asyncio.timeout(self._first_byte_timeout_s)
        try:
            async with (
                patience,
                self.session.post(self._target, json=body, trace_request_ctx=stamps) as response,
            ):
                stamps["server_wait"] = now()
                if response.status != 200:
                    words = await response.content.read(SHORT)
                    record.finish_reason = "rejected" if response.status in REFUSED else "error"
                    record.error = f"HTTP {response.status}: {_words(words)}"
                    if again and record.finish_reason == "rejected":
                        return _seconds(response.headers.get("Retry-After"), wait_s)
                    return None
                reader = (BodyReader if response.content_type == JSON else EventReader)(answer)
                async for data in response.content.iter_any():
                    time_ns = now()
                    if "first_byte" not in stamps:
                        stamps["first_byte"] = time_ns
                        patience.reschedule(None)
                    reader.feed(data, time_ns)
                reader.close(now())
            record.finish_reason = answer.end()
        except TimeoutError:
            record.finish_reason = "deadline"
            answer.fail(
                f"no first byte within {self._first_byte_timeout_s:g} s"
                if patience.expired()
                else f"no connection within {self._connect_timeout_s:g} s"
            )
        except (aiohttp.ClientError, OSError) as error:
            stale = "connect" not in stamps and isinstance(error, LOST)  # idle for too long
            if "server_wait" not in stamps and (again or (stale and record.attempts == 1)):
                return 0.0 if stale else wait_s
            record.finish_reason = "error"
            answer.fail(_named(error, stamps, answer))
        record.error = answer.error
        return None

    def _fill(self, record: RequestRecord, answer: Answer, stamps: dict[str, int], began: int) -> None:
        """What came, whether or not it is all."""
        usage = answer.usage
        record.outcome = OUTCOME_OF[record.finish_reason] if record.finish_reason else None
        record.token_ns = answer.times
        if answer.times:
            record.first_token_ns = None if answer.whole else answer.times[0]
            record.last_token_ns = answer.times[-1]
            record.first_content_ns = None if answer.whole else answer.first_content_ns
        _count(record, answer)
        if self._count:
            self._uncounted.append((record, answer))
        record.server_prompt_tokens = usage.get("prompt_tokens")
        record.server_output_tokens = usage.get("completion_tokens")
        record.reasoning_tokens = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        record.prompt_tokens = record.prompt_tokens or record.server_prompt_tokens or 0
        at = began
        for name in ("connect", "send", "server_wait", "first_byte"):
            if name in stamps:
                record.spans.append(Span(name, at, stamps[name]))
                at = stamps[name]
        if "first_byte" in stamps and record.end_ns is not None:
            record.spans.append(Span("stream", at, record.end_ns))
        if answer.extra and answer.extra.get("clock_id") == clock_id() is not None:
            record.spans += [Span(f"server.{name}", *ends) for name, *ends in answer.extra["spans"]]
        self.texts[record.request_id] = "".join(answer.content)

    def settle(self) -> None:
        """After a run: count with the tokenizer what the server did not count by token."""
        for record, answer in self._uncounted:
            assert self._count is not None
            _count(record, answer, self._count)
            record.retokenised_tokens = self._count("".join(answer.pieces))
        self._uncounted.clear()


def _count(record: RequestRecord, answer: Answer, count: Callable[[str], int] | None = None) -> None:
    record.chunk_tokens, record.count_source = answer.counts(count)
    record.output_tokens = sum(record.chunk_tokens)


def _words(body: bytes) -> str:
    """What an error's body says, in OpenAI's shape or any."""
    try:
        found = loads(body)
        return message(found.get("error") or found.get("detail") or found)
    except (ValueError, AttributeError):
        return body[:300].decode(errors="replace")


def _seconds(retry_after: str | None, default: float) -> float:
    """Of a Retry-After header in seconds, at most a minute; a date in it is ignored."""
    try:
        return min(60.0, max(0.0, float(retry_after or default)))
    except ValueError:
        return default


def _named(error: Exception, stamps: Mapping[str, int], answer: Answer) -> str:
    """One name for each way in which a connection fails, whatever the library calls it."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"no connection: {error.os_error.strerror or error}"
    when = f"after {len(answer.times)} chunks" if "server_wait" in stamps else "before the answer"
    return f"connection lost {when} ({type(error).__name__})"
