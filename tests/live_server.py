"""A server on a free port in a thread of the test's process, so that a test can also look inside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import uvicorn

from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.models.loaded import LoadedModel
from perflab.models.tiny import tiny
from perflab.serve.parse import Limits
from perflab.serve.server import listen, make_server, url_of
from perflab.serve.service import Service

QUICK = {"max_num_seqs": 8, "num_blocks": 512, "num_threads": 1, "keep_records": 500}


def eventually(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.005)


class Live:
    """A running server: `service` and its engine to look at, `http` to talk to it."""

    def __init__(self, service: Service, url: str, server: uvicorn.Server) -> None:
        self.service, self.url, self._server = service, url, server
        self.engine = service.engine.engine
        self.http = httpx.Client(base_url=url, timeout=30)

    def stop(self) -> None:
        """Ask it to stop, as a signal would."""
        self._server.should_exit = True

    def ready(self) -> bool:
        return self.http.get("/ready").status_code == 200

    def post(self, path: str = "/v1/completions", **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def samples(self, name: str) -> dict[str, float]:
        """Values of one metric by its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        rows = [
            line.rpartition(" ")
            for line in lines
            if line.startswith((f"perflab:{name}{{", f"perflab:{name} "))
        ]
        return {key.removeprefix(f"perflab:{name}"): float(value) for key, _, value in rows}

    def metric(self, name: str) -> float:
        return sum(self.samples(name).values())

    def idle(self) -> bool:
        scheduler = self.engine.scheduler
        return (
            not scheduler.running
            and not len(scheduler.waiting)
            and not self.engine._live
            and self.service.engine.num_streams == 0
            and self.service.samples == 0
            and scheduler.kv.pool.num_used == 0
        )

    def assert_empty(self) -> None:
        """Nothing runs, waits or is remembered; every block is free."""
        eventually(self.idle)
        self.engine.check()


@contextmanager
def serving(
    model: LoadedModel | None = None,
    limits: Limits | None = None,
    api_key: str | None = None,
    prepare: Callable[[Engine], None] = lambda engine: None,
    wait: bool = True,
    **options,
) -> Iterator[Live]:
    """`prepare` may spoil the engine before it serves; `wait` for it to be ready."""
    engine = Engine(model or tiny("llama"), EngineConfig(**(QUICK | options)))
    prepare(engine)
    service = Service(engine, limits=limits)
    server = make_server(service, api_key=api_key, shutdown_s=1)
    with listen(port=0) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        live = Live(service, url_of(bound), server)
        try:
            eventually(lambda: server.started)
            if wait:
                eventually(live.ready)
            yield live
        finally:
            live.http.close()
            live.stop()
            thread.join()
