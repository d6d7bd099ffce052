"""A thread that steps an engine, and asyncio in front of it.

Owns the thread and the queues between it and event loops. The engine is touched by that thread
alone: callers hand it commands, it hands back each step's events at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from perflab.clock import NS_PER_S
from perflab.engine.engine import Engine
from perflab.errors import EngineStopped
from perflab.types import Request, RequestRecord, TokenEvent

Listener = Callable[[list[TokenEvent]], None]


class EngineThread:
    """Steps an engine while there is work and sleeps while there is none.

    `on_events` is called on the thread, once a step. An exception that escapes a step ends every
    request with it; the engine then tests itself before it serves again.
    """

    def __init__(self, engine: Engine, on_events: Listener) -> None:
        self.engine = engine
        self._on_events = on_events
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self.step_began_ns: int | None = None  # None between two steps
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="perflab-engine", daemon=True)
        self._thread.start()

    def call(self, command: Callable[[], Any]) -> Future[Any]:
        """Run `command` on the thread, between two steps. Raises EngineStopped after `close`."""
        future: Future[Any] = Future()
        with self._lock:  # or a command could come after the thread's last look
            if self._closing:
                raise EngineStopped("the engine is closed")
            self._commands.append((command, future))
        self._wake.set()
        return future

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End what is left and join the thread."""
        with self._lock:
            self._closing = True
        self._wake.set()
        self._thread.join()

    def _loop(self) -> None:
        engine = self.engine
        while not self._closing:
            self._run_commands()
            self.step_began_ns, before = engine.clock.now(), engine.last_step
            try:
                events = engine.step()
            except Exception as error:
                engine.fail(error)
                events = engine.step()
            self.step_began_ns = None
            if events:
                self._on_events(events)
                if engine.last_step is not None and engine.last_step is not before:
                    engine.last_step.handed_ns = engine.clock.now()
            elif not self._commands:
                self._sleep()
        self._run_commands()
        self._on_events(engine.close())

    def _run_commands(self) -> None:
        self._wake.clear()
        while self._commands:
            command, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # whoever asked has gone away
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

    def _sleep(self) -> None:
        """Until a command comes or the engine has something to do by itself."""
        if self._closing:
            return
        engine = self.engine
        wake = engine.next_wake_ns()
        if wake is not None:
            self._wake.wait(max(0, wake - engine.clock.now()) / NS_PER_S)
        elif not engine.has_work:
            self._wake.wait()


class AsyncEngine:
    """An engine for asyncio: `stream` one request, or `open` several; cancelled when their consumer leaves.

    >>> async with AsyncEngine(Engine(model)) as engine:
    ...     async for event in engine.stream(Request("a", ids)): ...
    """

    def __init__(self, engine: Engine) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, Deliveries] = {}  # by event id, until the last event of each has come
        self._thread = EngineThread(engine, self._post)
        self.engine = engine

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._thread.close)

    def stuck_ns(self) -> int | None:
        """How long the running step has taken so far, 0 between steps; None once the thread has ended."""
        if not self._thread.is_alive:
            return None
        began = self._thread.step_began_ns
        return 0 if began is None else self.engine.clock.now() - began

    @property
    def num_streams(self) -> int:
        """Requests and samples whose last event has not come yet, those that were left included."""
        return len(self._streams)

    def open(self, *requests: Request) -> Deliveries:
        """Requests of one caller, whose events come together; submitted when the context is entered."""
        return Deliveries(self, requests)

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Events of one request, of all its samples for n > 1, until each has ended.

        Raises what `Engine.submit` raises. Leaving early, or being cancelled, cancels the request.
        """
        async with self.open(request) as deliveries:
            async for events in deliveries:
                for event in events:
                    yield event

    async def call(self, command: Callable[[], Any]) -> Any:
        """Run `command` on the engine's thread between two steps."""
        return await asyncio.wrap_future(self._thread.call(command))

    async def _reserve(self, deliveries: Deliveries) -> None:
        """Take the ids; one whose stream was left is free when the engine has said its last word on it."""
        self._loop = asyncio.get_running_loop()
        while taken := [request_id for request_id in deliveries.ids if request_id in self._streams]:
            if not self._streams[taken[0]].left:
                raise ValueError(f"request id {taken[0]!r} is in use: give each request its own")
            await self._streams[taken[0]].over.wait()
        self._streams.update(dict.fromkeys(deliveries.ids, deliveries))

    def _submit(self, requests: Sequence[Request]) -> list[RequestRecord]:
        ids = [request_id for request in requests for request_id in self.engine.submit(request)]
        return [self.engine.record(request_id) for request_id in ids]

    def _cancel(self, deliveries: Deliveries) -> None:
        """Cancel what has not ended; forget at once what the engine does not know (any more)."""

        def cancel() -> list[str]:
            return [
                request_id
                for request in deliveries.requests
                if not self.engine.cancel(request.request_id)
                for request_id in event_ids(request)
            ]

        def cancelled(unknown: Future[list[str]]) -> None:
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop was closed
                    self._loop.call_soon_threadsafe(self._forget, deliveries, unknown.result())

        try:
            self._thread.call(cancel).add_done_callback(cancelled)
        except EngineStopped:
            self._forget(deliveries, deliveries.ids)

    def _forget(self, deliveries: Deliveries, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._streams.get(request_id) is deliveries:  # else it ended before, and the id went on
                del self._streams[request_id]
                deliveries.ended(request_id)

    def _post(self, events: list[TokenEvent]) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop was closed: nobody is left to hear
                loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[TokenEvent]) -> None:
        for event in events:
            deliveries = self._streams.get(event.request_id)
            if deliveries is not None:
                deliveries.put(event)
                if event.finish_reason is not None:
                    self._forget(deliveries, (event.request_id,))


class Deliveries:
    """What the engine brings for some requests: iterating gives all events that came since the last look.

    As a context manager it submits them (raising what `Engine.submit` raises) and at the end cancels
    those that still run. `records` are the engine's own, one per sample, from submission on.
    """

    def __init__(self, engine: AsyncEngine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self.requests = requests
        self.ids = [request_id for request in requests for request_id in event_ids(request)]
        self.records: list[RequestRecord] = []
        self.left = False  # nobody listens any more
        self.over = asyncio.Event()  # the last event of each has come
        self._open = set(self.ids)
        self._events: list[TokenEvent] = []
        self._ready = asyncio.Event()

    async def __aenter__(self) -> Deliveries:
        await self._engine._reserve(self)
        try:
            self.records = await self._engine.call(lambda: self._engine._submit(self.requests))
        except BaseException:
            self.leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """End what still runs and the iteration with it."""
        if not self.left:
            self.left = True
            self._ready.set()
            if self._open:
                self._engine._cancel(self)

    def put(self, event: TokenEvent) -> None:
        if not self.left:
            self._events.append(event)
            self._ready.set()

    def ended(self, request_id: str) -> None:
        self._open.discard(request_id)
        if not self._open:
            self.over.set()
            self._ready.set()

    def __aiter__(self) -> Deliveries:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        while not self._events and self._open and not self.left:
            self._ready.clear()
            await self._ready.wait()
        if self.left or not self._events:
            raise StopAsyncIteration
        events, self._events = self._events, []
        return events


def event_ids(request: Request) -> list[str]:
    """The ids that a request's events carry: its own, or one per sample for n > 1."""
    count = request.params.n
    return [request.request_id] if count == 1 else [f"{request.request_id}/{i}" for i in range(count)]
