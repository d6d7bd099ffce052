"""A service on a socket: uvicorn with the settings that streams need.

Owns the socket and a bounded stop. The API itself is `api`'s.
"""

from __future__ import annotations

import socket

import uvicorn

from perflab.errors import PerflabError
from perflab.serve.api import create_app
from perflab.serve.service import Service

KEEP_ALIVE_S = 75  # idle connections outlive a load generator's think time
BACKLOG = 2048


def listen(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises PerflabError where the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise PerflabError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --port"
        ) from error


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(
    service: Service, *, api_key: str | None = None, shutdown_s: float = 10.0, access_log: bool = False
) -> uvicorn.Server:
    """A server to `run(sockets=[listen(…)])`. Told to stop (SIGTERM, Ctrl-C) it takes no more requests,
    lets running ones finish for `shutdown_s` seconds and cancels the rest."""
    config = uvicorn.Config(
        create_app(service, api_key),
        loop="uvloop",
        http="httptools",
        ws="none",
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(shutdown_s),
    )
    return uvicorn.Server(config)
