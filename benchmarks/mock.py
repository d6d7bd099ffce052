"""An OpenAI-compatible server without a model, as fast as one core can be: what a client is measured with.

    python -m benchmarks.mock --port 8001 --core 0 [--ttft 0.1 --gap 0.02 --jitter 0.3]

Answers at once, or with the first token after `--ttft` seconds and one every `--gap`. With `--jitter`
both vary from request to request and from token to token; a request that names a number (`#17`) gets
the times of that number, so that the same requests are answered alike whoever sends them. An answer
has as many tokens as `max_tokens` asks, each a chunk and a send of its own; the prompt counts as one
token per word. Prints `ready` when it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache

MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
NUMBER = re.compile(rb"#(\d+)")
NO_STREAM = re.compile(rb'"stream": ?false')
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
END = b"data: [DONE]\n\n"


def framed(event: bytes) -> bytes:
    """A chunk of HTTP's chunked encoding."""
    return b"%x\r\n%s\r\n" % (len(event), event)


def event(chat: bool, **facts: object) -> bytes:
    """A server-sent event in OpenAI's form."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    return (
        b"data: "
        + json.dumps({"id": "mock", "object": kind, "created": 0, "model": "mock", **facts}).encode()
        + b"\n\n"
    )


def choice(chat: bool, key: str, text: str, reason: str | None) -> dict[str, object]:
    """An answer's only choice; `key` names what holds a chat's words."""
    words = {key: {"role": "assistant", "content": text} if text else {}} if chat else {"text": text}
    return {"index": 0, **words, "finish_reason": reason}


TOKEN = {chat: framed(event(chat, choices=[choice(chat, "delta", " mock", None)])) for chat in (True, False)}


@lru_cache(maxsize=4096)
def last(chat: bool, tokens: int, prompt: int) -> bytes:
    """The end of a stream: reason, usage, `[DONE]`."""
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    reason = event(chat, choices=[choice(chat, "delta", "", "length")])
    return framed(reason) + framed(event(chat, choices=[], usage=usage)) + framed(END) + b"0\r\n\r\n"


@lru_cache(maxsize=4096)
def whole(chat: bool, tokens: int, prompt: int) -> bytes:
    """A body that was not streamed."""
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    kind = "chat.completion" if chat else "text_completion"
    body = {"id": "mock", "object": kind, "created": 0, "model": "mock", "usage": usage}
    return plain(
        json.dumps(body | {"choices": [choice(chat, "message", " mock" * tokens, "length")]}).encode()
    )


@lru_cache(maxsize=4096)
def times(number: int, tokens: int, ttft: float, gap: float, jitter: float) -> tuple[float, ...]:
    """Seconds from a request to each of its tokens; `jitter` is the sigma of log-normals of mean 1."""
    rng = random.Random(number)

    def varied(seconds: float) -> float:
        return seconds * rng.lognormvariate(-jitter * jitter / 2, jitter)

    found, gap = [varied(ttft)], varied(gap)
    for _ in range(tokens - 1):
        found.append(found[-1] + varied(gap))
    return tuple(found)


def plain(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


MODELS = plain(json.dumps({"object": "list", "data": [{"id": "mock", "object": "model"}]}).encode())
HEALTH = plain(b"{}")


class Connection(asyncio.Protocol):
    """One keep-alive connection; requests come one after the other."""

    ttft = gap = jitter = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.rest = transport, b""
        self.loop = asyncio.get_running_loop()
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.rest = data = self.rest + data if self.rest else data
        head, found, body = data.partition(b"\r\n\r\n")
        if not found:
            return
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(body) < length:
            return
        self.rest = body[length:]
        self.answer(head, body[:length])

    def answer(self, head: bytes, body: bytes) -> None:
        write = self.transport.write
        if head.startswith(b"GET"):
            write(MODELS if b"/models" in head[:60] else HEALTH)
            return
        asked, chat = MAX_TOKENS.search(body), b"/chat/" in head[:60]
        tokens, prompt = int(asked[1]) if asked else 16, body.count(b" ")
        if not self.ttft and not self.gap:
            if NO_STREAM.search(body) or b'"stream"' not in body:
                write(whole(chat, tokens, prompt))
                return
            write(HEAD)
            for _ in range(tokens):
                write(TOKEN[chat])
            write(last(chat, tokens, prompt))
            return
        number = NUMBER.search(body)
        due = times(int(number[1]) if number else 0, tokens, self.ttft, self.gap, self.jitter)
        start = self.loop.time()
        write(HEAD)
        self.loop.call_at(start + due[0], self.token, start, due, 0, chat, prompt)

    def token(self, start: float, due: tuple[float, ...], i: int, chat: bool, prompt: int) -> None:
        """Token `i`, due at start + due[i]; times do not drift."""
        if self.transport.is_closing():
            return
        self.transport.write(TOKEN[chat])
        if i + 1 == len(due):
            self.transport.write(last(chat, len(due), prompt))
            return
        self.loop.call_at(start + due[i + 1], self.token, start, due, i + 1, chat, prompt)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=2048)
    print("ready", flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def running(
    port: int, core: int | None = None, ttft: float = 0.0, gap: float = 0.0, jitter: float = 0.0
) -> Iterator[str]:
    """A mock in a process of its own; gives its address."""
    options = {"port": port, "core": core, "ttft": ttft, "gap": gap, "jitter": jitter}
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    command = [sys.executable, "-m", "benchmarks.mock", *given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready", "the mock did not start: is the port in use?"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--core", type=int, help="the only core to run on")
    parser.add_argument("--ttft", type=float, default=0.0, help="seconds until the first token")
    parser.add_argument("--gap", type=float, default=0.0, help="seconds between tokens")
    parser.add_argument("--jitter", type=float, default=0.0, help="how much both vary: sigma of log-normals")
    chosen = parser.parse_args()
    if chosen.core is not None:
        os.sched_setaffinity(0, {chosen.core})
    Connection.ttft, Connection.gap, Connection.jitter = chosen.ttft, chosen.gap, chosen.jitter
    from perflab.load.drive import new_loop

    gc.disable()  # it lives for minutes; a collection would look like a slow server
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve(chosen.port))


if __name__ == "__main__":
    main()
