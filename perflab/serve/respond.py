"""Runs one HTTP request on the engine and writes its answer, whole or as a stream of events.

Owns the way from a checked request to bytes on the socket, one write per step, and the stamps along it.
The status is decided by what comes first: until then a refusal, a time-out or a failure is a proper
HTTP error; afterwards it is an error event, and the stream ends. A client that goes away takes its
request with it.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from json import dumps
from typing import Any

from fastapi import Request, Response
from starlette.types import Message, Receive, Scope, Send

from perflab.clock import NS_PER_S, seconds_to_ns
from perflab.engine.drivers import Deliveries
from perflab.errors import EngineStopped, Rejected
from perflab.serve.answer import DONE, ChatFormat, Choice, Format, TextFormat
from perflab.serve.errors import ApiError
from perflab.serve.parse import Asked, from_value_error, parse
from perflab.serve.service import RETRY_AFTER_S, Service
from perflab.serve.spans import as_extra, server_spans, server_timing
from perflab.types import OUTCOME_OF, Span, TokenEvent, TokenLogprob
from perflab.types import Request as EngineRequest


class Completion(Response):
    """The answer to one request; it runs when the server calls it."""

    def __init__(
        self, service: Service, asked: Asked, requests: list[EngineRequest], form: Format, spans: bool
    ) -> None:
        super().__init__()
        self._service, self._asked, self._requests, self._form = service, asked, requests, form
        self._spans = spans  # the client wants the engine's
        self._now = service.clock.now
        self._around: list[Span] = []  # what the engine does not stamp itself
        self._choices = [
            Choice(index * asked.params.n + sample, len(request.prompt_token_ids))
            for index, request in enumerate(requests)
            for sample in range(asked.params.n)
        ]
        self._growing = len(self._choices)
        self._started = False

    @classmethod
    async def of(cls, service: Service, request: Request, body: bytes, chat: bool) -> Completion:
        """Check and tokenise. Raises ApiError for what can't be served."""
        now, received = service.clock.now, request.scope["received_ns"]
        read = now()
        asked = parse(body, chat, service.model.defaults, service.limits)
        service.check_model(asked.model)
        service.check_ready()
        service.check_room(asked.samples)
        parsed = now()
        prompts = [await service.token_ids(prompt) for prompt in asked.prompts]
        spans = (
            Span("receive", received, read),
            Span("parse", read, parsed),
            Span("tokenise", parsed, now()),
        )
        kind = ChatFormat if chat else TextFormat
        request_id = kind.prefix + service.new_id()
        form = kind(request_id, int(time.time()), service.name, service.token_bytes, asked.token_ids)
        deadline = None if asked.deadline_s is None else received + seconds_to_ns(asked.deadline_s)
        requests = [
            EngineRequest(
                f"{request_id}-{index}",
                ids,
                replace(asked.params, max_tokens=service.fit(asked.params, len(ids))),
                priority=asked.priority,
                intended_ns=received,
                deadline_ns=deadline,
                cache_keys=() if asked.salt is None else (("salt", asked.salt),),
                spans=spans,
            )
            for index, ids in enumerate(prompts)
        ]
        return cls(service, asked, requests, form, request.headers.get("x-perflab-spans") == "1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, samples = self._service, self._asked.samples
        deliveries = service.engine.open(*self._requests)
        gone = asyncio.create_task(_disconnected(receive))
        gone.add_done_callback(lambda _: deliveries.leave())
        try:
            service.enter(samples)
            try:
                async with deliveries:
                    tokenised = self._requests[0].spans[-1].end_ns
                    self._around.append(Span("hand_over", tokenised, deliveries.records[0].sent_ns))
                    await self._answer(deliveries, send)
            finally:
                service.samples -= samples
                for choice, record in zip(self._choices, deliveries.records, strict=False):
                    service.metrics.ended(record, choice.finish_reason or "cancelled")
        except ApiError as error:
            await self._refuse(error, send)
        except (Rejected, EngineStopped, ValueError) as error:
            if self._started:
                raise
            await self._refuse(self._refusal(error), send)
        finally:
            gone.cancel()

    async def _answer(self, deliveries: Deliveries, send: Send) -> None:
        events = await self._first(deliveries)
        if events is None:
            return
        if self._asked.stream:
            await self._stream(events, deliveries, send)
        else:
            await self._whole(events, deliveries, send)

    async def _first(self, deliveries: Deliveries) -> list[TokenEvent] | None:
        """What comes first; None where the client has gone. Raises ApiError after too long in the queue."""
        timeout = self._service.limits.queue_timeout_s
        if timeout is not None:
            try:
                async with asyncio.timeout(timeout):
                    return await anext(deliveries, None)
            except TimeoutError:
                if all(record.admitted_ns is None for record in deliveries.records):
                    message = f"waited for {timeout:g} s without being started"
                    raise ApiError(503, message, None, "queue_timeout", RETRY_AFTER_S) from None
        return await anext(deliveries, None)

    # -- as a stream -------------------------------------------------------------------------

    async def _stream(self, events: list[TokenEvent] | None, deliveries: Deliveries, send: Send) -> None:
        now, form, wants_usage = self._now, self._form, self._asked.usage or self._spans
        choices = dict(zip(deliveries.ids, self._choices, strict=True))
        while events:
            woke = now()
            parts, failure = self._chunks(events, choices, deliveries)
            ended = not self._growing and failure is None
            last = ended and not self._spans  # the spans tell of this write, so they come in another
            if last:
                parts.append(form.usage_chunk(self._usage(deliveries), None) if wants_usage else "")
            data = "".join(parts).encode() + (DONE if last else b"")
            built = now()
            if data:
                if not self._started:
                    await self._start(send, 200, b"text/event-stream", [(b"cache-control", b"no-cache")])
                await send({"type": "http.response.body", "body": data, "more_body": not last})
            if failure is not None:
                raise failure
            if ended:
                break
            events = await anext(deliveries, None)
        if events and self._spans:
            self._around += self._way_out(events, woke, built)
            self._around.append(Span("write", built, now()))
            extra = as_extra(*self._path(deliveries))
            await send(_body(form.usage_chunk(self._usage(deliveries), extra).encode() + DONE))

    def _chunks(
        self, events: list[TokenEvent], choices: dict[str, Choice], deliveries: Deliveries
    ) -> tuple[list[str], ApiError | None]:
        """Chunks of one step, up to an event that says that the request has failed."""
        parts: list[str] = []
        for event in events:
            try:
                parts.append(self._chunk(event, choices[event.request_id], deliveries))
            except ApiError as failure:
                return parts, failure
        return parts, None

    def _chunk(self, event: TokenEvent, choice: Choice, deliveries: Deliveries) -> str:
        """One event as a chunk; nothing where it brought nothing to show."""
        text = self._take(event, choice, deliveries)
        if not (
            text or choice.finish_reason or event.logprobs or (self._asked.token_ids and event.token_ids)
        ):
            return ""
        counts = _counts(choice.prompt_tokens, choice.tokens) if self._asked.usage_in_chunks else None
        return self._form.chunk(choice, text, event, counts)

    # -- as a whole --------------------------------------------------------------------------

    async def _whole(self, events: list[TokenEvent] | None, deliveries: Deliveries, send: Send) -> None:
        choices = dict(zip(deliveries.ids, self._choices, strict=True))
        while events:
            woke = self._now()
            for event in events:
                choice = choices[event.request_id]
                choice.texts.append(self._take(event, choice, deliveries))
                choice.token_ids += event.token_ids
                choice.logprobs += event.logprobs or ()
            if not self._growing:
                break
            events = await anext(deliveries, None)
        if not events:
            return
        body = self._form.body(self._choices, self._usage(deliveries))
        self._around += self._way_out(events, woke, self._now())
        spans, indices = self._path(deliveries)
        extra = f',"perflab":{dumps(as_extra(spans, indices))}' if self._spans else ""
        data = f"{body}{extra}}}".encode()
        headers = [(b"server-timing", server_timing(spans)), (b"content-length", b"%d" % len(data))]
        await self._start(send, 200, b"application/json", headers)
        await send(_body(data))

    # -- both --------------------------------------------------------------------------------

    def _take(self, event: TokenEvent, choice: Choice, deliveries: Deliveries) -> str:
        """Book one event; the text to send. Raises ApiError where it says that the request has failed."""
        metrics, text = self._service.metrics, event.text
        if event.token_ids:
            metrics.generation_tokens.inc(len(event.token_ids))
            if choice.tokens == 0:
                metrics.first_token(deliveries.records[choice.index], event.time_ns)
                if self._asked.echo:
                    text = self._echo(event, choice) + text
            else:
                metrics.inter_token.observe((event.time_ns - choice.last_ns) / NS_PER_S)
            choice.tokens += len(event.token_ids)
            choice.last_ns = event.time_ns
        if event.finish_reason is not None:
            choice.finish_reason = event.finish_reason
            self._growing -= 1
            if OUTCOME_OF[event.finish_reason] != "completed":
                raise self._failure(event)
        return text

    def _echo(self, event: TokenEvent, choice: Choice) -> str:
        """The prompt's text; its log-probabilities join those of the first token."""
        prompt = self._asked.prompts[choice.index // self._asked.params.n]
        if event.prompt_logprobs is not None:
            ids = self._requests[choice.index // self._asked.params.n].prompt_token_ids
            unknown = TokenLogprob(ids[0], math.nan, 0)  # nothing precedes the first token
            scored = (lp for lp in event.prompt_logprobs if lp is not None)
            event.logprobs = [unknown, *scored, *(event.logprobs or ())]
        return prompt if isinstance(prompt, str) else self._service.model.decode(prompt)

    def _failure(self, event: TokenEvent) -> ApiError:
        if event.finish_reason == "deadline":
            return ApiError(408, str(event.error or "past its deadline"), "deadline_s", "deadline_exceeded")
        if event.finish_reason == "cancelled" or isinstance(event.error, EngineStopped):
            message = str(event.error or "the request was cancelled by the server")
            return ApiError(503, message, None, "engine_stopped", RETRY_AFTER_S)
        return ApiError(500, str(event.error or "the engine failed"), None, "engine_error")

    def _refusal(self, error: Exception) -> ApiError:
        """What the engine says to a request that it does not take."""
        try:
            self._service.check_health()
        except ApiError as broken:
            return broken
        if isinstance(error, EngineStopped):
            return ApiError(503, str(error), None, "engine_stopped", RETRY_AFTER_S)
        if isinstance(error, Rejected):
            return ApiError(400, str(error), None, "context_length_exceeded")
        assert isinstance(error, ValueError)
        return from_value_error(error)

    async def _refuse(self, error: ApiError, send: Send) -> None:
        """With its status, or as an event where the answer has begun."""
        self._service.metrics.refused(error.code)
        if self._started:
            await send(_body(b"data: " + error.body() + b"\n\n" + DONE))
            return
        await self._start(send, error.status, b"application/json", error.headers)
        await send(_body(error.body()))

    async def _start(self, send: Send, status: int, kind: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        headers = [(b"content-type", kind), *headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})

    def _usage(self, deliveries: Deliveries) -> dict[str, Any]:
        firsts = range(0, len(self._choices), self._asked.params.n)  # samples share their prompt
        prompt = sum(self._choices[i].prompt_tokens for i in firsts)
        cached = sum(deliveries.records[i].cached_tokens for i in firsts)
        counts = _counts(prompt, sum(choice.tokens for choice in self._choices))
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def _way_out(self, events: list[TokenEvent], woke: int, built: int) -> tuple[Span, Span]:
        return Span("hand_back", events[-1].time_ns, woke), Span("serialise", woke, built)

    def _path(self, deliveries: Deliveries) -> tuple[list[Span], list[int]]:
        """Spans of the sample that was the last to end."""
        last = max(deliveries.records, key=lambda record: record.last_token_ns or 0)
        return server_spans(last, self._service.engine.engine.steps, self._around)


def _counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _body(data: bytes) -> Message:
    """The end of an answer."""
    return {"type": "http.response.body", "body": data, "more_body": False}


async def _disconnected(receive: Receive) -> None:
    """Until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
