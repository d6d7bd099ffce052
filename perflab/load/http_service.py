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

from perflab.clock import Clock, WallClock, clock_id
from perflab.errors import ServiceError, WorkloadError
from perflab.load.http_client import Body, Client, Exchange, Reader
from perflab.load.prompts import Chat, PromptEncoder
from perflab.load.sse import Answer, BodyReader, EventReader, dumps, loads, message
from perflab.load.workloads import TimedRequest
from perflab.types import OUTCOME_OF, FinishReason, RequestRecord, Span

PATHS = {"chat": "/chat/completions", "completions": "/completions"}
# What a status says of a request's end; any other one but 200 is an error.
END_OF: dict[int, FinishReason] = {429: "rejected", 503: "rejected", 408: "deadline", 504: "deadline"}
"""Statuses by which a server that is full refuses a request."""

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
        self._path = path or "/v1"
        self._target = self._path + PATHS[endpoint]
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
        self._client = Client(self.root, self._headers, self.clock.now)
        if self.model is None:
            self.model = await self._first_model()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.close()

    async def _first_model(self) -> str:
        body = Body()
        try:
            exchange = Exchange(lambda exchange: body)
            await self._client.send(f"{self._path}/models", None, exchange, self._connect_timeout_s)
            if exchange.status in (401, 403):
                raise ServiceError(f"{self.base} wants another key (HTTP {exchange.status})")
            return str(loads(body.data)["data"][0]["id"])
        except OSError as error:
            self._client.close()
            raise ServiceError(
                f"no server answers at {self.base}: start it or check the address ({error or 'time-out'})"
            ) from None
        except (ValueError, LookupError, TypeError):
            self._client.close()
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
            ("deadline_s", request.deadline_s, None),
        ):
            if value != default:
                body[name] = value
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | self._extra

    async def send(self, request: TimedRequest, record: RequestRecord) -> None:
        """One request with its retries. Cancelled, it closes the connection, so that the server sees it."""
        body, began = dumps(self.body(request)), record.sent_ns
        answer, stamps = Answer(), dict[str, int]()
        try:
            while (wait_s := await self._attempt(body, answer, stamps, record)) is not None:
                await asyncio.sleep(wait_s)
                failed, began = began, self.clock.now()
                record.spans.append(Span("retry", failed, began))
                record.attempts += 1
                record.finish_reason = record.error = None
                answer, stamps = Answer(), {}
        finally:
            record.end_ns = stamps.get("stream") or self.clock.now()
            self._fill(record, answer, stamps, began)

    async def _attempt(
        self, body: bytes, answer: Answer, stamps: dict[str, int], record: RequestRecord
    ) -> float | None:
        """One send; seconds until the next, or None where it was the last and the end is known."""
        refusal = Body(SHORT)

        def reader(exchange: Exchange) -> Reader:
            if exchange.status != 200:
                return refusal
            json = exchange.headers.get("content-type", "").startswith("application/json")
            return BodyReader(answer) if json else EventReader(answer)

        exchange = Exchange(reader, stamps)
        again = record.attempts <= self._retries
        wait_s = self._retry_s * 2 ** (record.attempts - 1)
        try:
            async with asyncio.timeout(self._first_byte_timeout_s) as patience:
                exchange.on_first_byte = lambda: patience.reschedule(None)
                await self._client.send(self._target, body, exchange, self._connect_timeout_s)
        except TimeoutError:
            late, limit = ("first byte", self._first_byte_timeout_s)
            if not patience.expired():
                late, limit = "connection", self._connect_timeout_s
            record.finish_reason, record.error = "deadline", f"no {late} within {limit:g} s"
            return None
        except OSError as error:
            stale = (
                "send" in stamps and "connect" not in stamps and record.attempts == 1
            )  # idled for too long
            if not exchange.status and (again or stale):
                return 0.0 if stale else wait_s
            answer.fail(_named(error, exchange, answer))
        if exchange.status in (0, 200):
            record.finish_reason = answer.end()
            record.error = answer.error
            return None
        record.finish_reason = END_OF.get(exchange.status, "error")
        record.error = f"HTTP {exchange.status}: {_words(refusal.data)}"
        if again and record.finish_reason == "rejected":
            return _seconds(exchange.headers.get("retry-after"), wait_s)
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
        for name, until in stamps.items():  # in the order in which they were stamped
            record.spans.append(Span(name, at, until))
            at = until
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


def _named(error: OSError, exchange: Exchange, answer: Answer) -> str:
    """One name for each way in which a connection fails."""
    if "send" not in exchange.stamps:
        return f"no connection: {error.strerror or error}"
    when = f"after {len(answer.times)} chunks" if exchange.status else "before the answer"
    return f"connection lost {when} ({error or type(error).__name__})"
