"""A thread that steps an engine, and asyncio in front of it.

Owns the thread and the queues between it and event loops. The engine is touched by that thread
alone: callers hand it commands, it hands back each step's events at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from perflab.clock import NS_PER_S
from perflab.engine.engine import Engine
from perflab.errors import EngineStopped
from perflab.types import Request, TokenEvent

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
            try:
                events = engine.step()
            except Exception as error:
                engine.fail(error)
                events = engine.step()
            if events:
                self._on_events(events)
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
    """An engine for asyncio: `stream` per request, cancelled when its consumer goes away.

    >>> async with AsyncEngine(Engine(model)) as engine:
    ...     async for event in engine.stream(Request("a", ids)): ...
    """

    def __init__(self, engine: Engine) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[TokenEvent]] = {}
        self._thread = EngineThread(engine, self._post)
        self.engine = engine

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._thread.close)

    @property
    def num_streams(self) -> int:
        return len(self._queues)

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Events of one request, of all its samples for n > 1, until each has ended.

        Raises what `Engine.submit` raises. Leaving early, or being cancelled, cancels the request.
        """
        self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[TokenEvent] = asyncio.Queue()
        count = request.params.n
        ids = [request.request_id] if count == 1 else [f"{request.request_id}/{i}" for i in range(count)]
        if taken := [request_id for request_id in ids if request_id in self._queues]:
            raise ValueError(f"request id {taken[0]!r} is in use: give each request its own")
        self._queues.update(dict.fromkeys(ids, queue))
        ended = False
        try:
            await self._call(lambda: self.engine.submit(request))
            left = count
            while left:
                event = await queue.get()
                left -= event.finish_reason is not None
                yield event
            ended = True
        finally:
            for request_id in ids:
                del self._queues[request_id]
            if not ended and not self._thread._closing:
                self._thread.call(lambda: self.engine.cancel(request.request_id))

    async def call(self, command: Callable[[], Any]) -> Any:
        """Run `command` on the engine's thread between two steps."""
        return await self._call(command)

    def _call(self, command: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self._thread.call(command))

    def _post(self, events: list[TokenEvent]) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop was closed: nobody is left to hear
                loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[TokenEvent]) -> None:
        for event in events:
            queue = self._queues.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)
