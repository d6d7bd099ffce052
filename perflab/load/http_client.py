"""HTTP/1.1 as a measuring client needs it: one POST at a time per kept-alive connection, each read stamped
in the callback that brings it.

Owns connections and the times of their bytes; llhttp (httptools) parses. Knows no API. No proxies, no
redirects, no compression: what is measured is one server.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools

READ = 1 << 16
"""Bytes of a read at most."""


class Reader(Protocol):
    """Takes a body as it comes; `close` is its end."""

    def feed(self, data: bytes, now_ns: int) -> None: ...
    def close(self, now_ns: int) -> None: ...


class Body:
    """A reader that keeps a body's first bytes."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.data, self._most = b"", most

    def feed(self, data: bytes, now_ns: int) -> None:
        self.data += data[: self._most - len(self.data)]

    def close(self, now_ns: int) -> None:
        """Nothing is left to do."""


class Exchange:
    """One answer as it comes. `stamps` hold the ends of connect, send, server_wait, first_byte and stream,
    nanoseconds; `reader` makes the body's reader once status and headers are known."""

    def __init__(self, reader: Callable[[Exchange], Reader], stamps: dict[str, int] | None = None) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.stamps = {} if stamps is None else stamps
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_first_byte: Callable[[], None] | None = None
        self._make = reader
        self._reader: Reader | None = None

    def started(self, status: int, now_ns: int) -> None:
        self.status, self.stamps["server_wait"] = status, now_ns
        self._reader = self._make(self)

    def body(self, data: bytes, now_ns: int) -> None:
        assert self._reader is not None
        if "first_byte" not in self.stamps:
            self.stamps["first_byte"] = now_ns
            if self.on_first_byte is not None:
                self.on_first_byte()
        self._reader.feed(data, now_ns)

    def end(self, now_ns: int, error: Exception | None = None) -> None:
        if self._reader is not None:
            self._reader.close(now_ns)
            self.stamps["stream"] = now_ns
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class Connection(asyncio.BufferedProtocol):
    """One connection; `exchange` is what it waits for, None while it is idle."""

    def __init__(self, client: Client) -> None:
        self._client, self._now = client, client.now
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._complete = self._keep_alive = False
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport

    def post(self, request: bytes, exchange: Exchange) -> None:
        """Send a request as it goes over the wire."""
        self.exchange = exchange
        self.transport.write(request)
        exchange.stamps["send"] = self._now()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._client.buffer

    def buffer_updated(self, nbytes: int) -> None:
        now_ns = self._now()
        self._read_ns = now_ns
        exchange = self.exchange
        if exchange is None:  # nobody asked
            return self.transport.abort()
        try:
            self._parser.feed_data(self._client.buffer[:nbytes])
        except httptools.HttpParserError as error:
            self._parts.clear()
            self.transport.abort()
            return self._end(ConnectionError(f"no HTTP: {error}"))
        if self._parts:
            exchange.body(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts), now_ns)
            self._parts.clear()
        if self._complete:
            self._complete = False
            self._end(None)
            if self._keep_alive:
                self._client.idle.append(self)
            else:
                self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._client.open.discard(self)
        if self.exchange is None:
            return
        open_ended = self.exchange.status and not {"content-length", "transfer-encoding"} & set(
            self.exchange.headers
        )
        self._read_ns = self._now()
        self._end(None if open_ended and error is None else error or ConnectionResetError("closed"))

    def _end(self, error: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.end(self._read_ns, error)

    # what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self.exchange is not None
        self.exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self.exchange is not None
        self.exchange.started(self._parser.get_status_code(), self._read_ns)

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._complete, self._keep_alive = True, self._parser.should_keep_alive()


class Client:
    """Keep-alive connections to one origin; as many as there are requests at once.

    `headers` go with every request. Credentials in the address become an Authorization header.
    """

    def __init__(self, origin: str, headers: dict[str, str], now: Callable[[], int]) -> None:
        parts = urlsplit(origin)
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        host = parts.netloc.rpartition("@")[2]
        if parts.username:
            basic = b64encode(f"{parts.username}:{parts.password or ''}".encode()).decode()
            headers = {"Authorization": f"Basic {basic}", **headers}
        lines = {"Host": host, "Accept": "*/*", "Content-Type": "application/json", **headers}
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.now = now
        self.buffer = memoryview(bytearray(READ))  # of all connections: each read is parsed at once
        self.idle: list[Connection] = []
        self.open: set[Connection] = set()

    async def send(
        self, path: str, body: bytes | None, exchange: Exchange, connect_timeout_s: float | None = None
    ) -> None:
        """POST `body` (GET without one) and wait for the end of the answer.

        Raises OSError (ConnectionError where it was lost), TimeoutError where no connection came.
        Cancelled, it closes the connection. A connection that had idled has no stamp "connect".
        """
        connection = await self._connection(exchange, connect_timeout_s)
        method, length = ("GET", "") if body is None else ("POST", f"Content-Length: {len(body)}\r\n")
        head = f"{method} {path} HTTP/1.1\r\n{self._lines}{length}\r\n"
        connection.post(head.encode("latin-1") + (body or b""), exchange)
        try:
            await exchange.ended
        except BaseException:
            connection.exchange = None
            connection.transport.abort()
            raise

    async def _connection(self, exchange: Exchange, timeout_s: float | None) -> Connection:
        while self.idle:
            connection = self.idle.pop()
            if not connection.transport.is_closing():
                return connection
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            _, made = await loop.create_connection(
                lambda: Connection(self),
                self._host,
                self._port,
                ssl=ssl.create_default_context() if self._tls else None,
            )
        exchange.stamps["connect"] = self.now()
        self.open.add(made)
        return made

    def close(self) -> None:
        """Close every connection."""
        for connection in self.open:
            connection.transport.abort()
        self.idle.clear()
