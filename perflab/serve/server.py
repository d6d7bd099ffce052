"""A service on a socket: uvicorn with the settings that streams need.

Owns the socket's settings and a bounded stop. The API itself is `api`'s.
"""

from __future__ import annotations

import uvicorn

from perflab.serve.api import create_app
from perflab.serve.service import Service

KEEP_ALIVE_S = 75  # idle connections outlive a load generator's think time


def make_server(
    service: Service,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    api_key: str | None = None,
    shutdown_s: float = 10.0,
    access_log: bool = False,
) -> uvicorn.Server:
    """A server to `run()`. Told to stop (SIGTERM, Ctrl-C) it takes no more requests, lets running ones
    finish for `shutdown_s` seconds and cancels the rest."""
    config = uvicorn.Config(
        create_app(service, api_key),
        host,
        port,
        loop="uvloop",
        http="httptools",
        ws="none",
        log_level="info" if access_log else "warning",
        access_log=access_log,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(shutdown_s),
    )
    return uvicorn.Server(config)
