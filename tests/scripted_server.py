"""An OpenAI-compatible server that plays scripts, and a loop whose time jumps: a run over real sockets
with exact times.

Server and client share one loop and one `VirtualClock`. The loop never waits: where nothing is ready
it jumps to the next timer, so what a script says happens at 40 ms is stamped at 40 ms by the client.
"""

from __future__ import annotations

import asyncio
import json
import select
import selectors
from collections.abc import Callable, Sequence
from unittest import mock

from perflab.clock import VirtualClock
from perflab.load.drive import drive
from perflab.load.http_service import HTTPService
from perflab.load.run import RunRecords
from perflab.load.workloads import TimedRequest, Workload
from perflab.types import SamplingParams

MS = 1_000_000
RESET, CLOSE = object(), object()
Script = Sequence[tuple[float, object]]
"""(milliseconds after the request came, what to do then): bytes of the body, RESET or CLOSE."""


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(Jumping(clock))
        self.time = lambda: clock.now() / 1e9


class Jumping(selectors.DefaultSelector):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock

    def select(self, timeout=None):
        if timeout and not select.select([self.fileno()], [], [], 0.0001)[0]:  # nothing comes from the kernel
            self.clock.advance(round(timeout * 1e9))
        return super().select(0 if timeout else timeout)


def sse(**facts: object) -> bytes:
    return b"data: " + json.dumps(facts).encode() + b"\n\n"


def token(text: str = "w ", channel: str = "content", **more: object) -> bytes:
    return sse(choices=[{"index": 0, "delta": {channel: text}, "finish_reason": None, **more}])


def end(tokens: int | None = None, prompt: int = 3, reason: str = "stop", **usage: object) -> bytes:
    """Finish reason, usage (in a chunk without choices) where `tokens` are given, and [DONE]."""
    found = sse(choices=[{"index": 0, "delta": {}, "finish_reason": reason}])
    if tokens is not None:
        found += sse(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": tokens, **usage})
    return found + b"data: [DONE]\n\n"


class ScriptedServer:
    """Answers request number i with `script(i)`; `status(i)` other than 200 sends the body plain.

    `gone` are the times, in ms, at which clients went away before their answer's end.
    """

    def __init__(self, script: Callable[[int], Script], head: Callable[[int], str] | None = None) -> None:
        self.script, self.head = script, head or (lambda i: "200 OK\r\nContent-Type: text/event-stream")
        self.bodies: list[dict] = []
        self.gone: list[float] = []
        self.connections = 0

    async def __aenter__(self) -> ScriptedServer:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            if head.startswith(b"GET"):  # it has no page of metrics and no list of models
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            self.bodies.append(json.loads(await reader.readexactly(length)))
            number, start = len(self.bodies) - 1, asyncio.get_running_loop().time()
            answer = asyncio.create_task(self._answer(number, start, writer))
            left = asyncio.create_task(reader.read(1))  # only a client that leaves says something now
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and answer.result():
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)
                continue
            if not answer.done():
                answer.cancel()
                self.gone.append(round((asyncio.get_running_loop().time() - start) * 1000, 6))
            break
        writer.close()

    async def _answer(self, number: int, start: float, writer: asyncio.StreamWriter) -> bool:
        head = self.head(number)
        for i, (ms, what) in enumerate(self.script(number)):
            await asyncio.sleep(start + ms / 1000 - asyncio.get_running_loop().time())
            if i == 0 and what is not RESET:
                writer.write(f"HTTP/1.1 {head}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            if what is RESET:
                writer.transport.abort()
                return False
            if what is CLOSE:
                return False
            writer.write(b"%x\r\n%s\r\n" % (len(what), what) if what else b"")
        writer.write(b"0\r\n\r\n")
        return True


def workload(n: int = 1, gap_s: float = 0.0, max_tokens: int = 64, **fields: object) -> Workload:
    params = SamplingParams(max_tokens=max_tokens)
    return Workload("w", tuple(TimedRequest(f"r{i}", "a b c", params, i * gap_s, **fields) for i in range(n)))


def play(
    script: Script | Callable[[int], Script], load: Workload | None = None, head=None, make=None, **options
) -> tuple[RunRecords, ScriptedServer]:
    """A whole run against a scripted server: `make` holds options of `HTTPService`, the rest `drive`'s."""
    clock = VirtualClock()

    async def run() -> tuple[RunRecords, ScriptedServer]:
        async with ScriptedServer(script if callable(script) else lambda i: script, head) as server:
            async with HTTPService(server.url, "m", clock=clock, **(make or {})) as service:
                records = await drive(service, load or workload(), **options)
            await asyncio.sleep(0.001)  # so that the server sees who went away
            return records, server

    with mock.patch("gc.collect"), asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        return runner.run(run())
