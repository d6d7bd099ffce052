"""Services that answer run after run: one engine, warmed once, instead of a fresh one for every run.

Owns how long they live. Knows no load.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from perflab.engine.drivers import AsyncEngine
from perflab.load.drive import Service
from perflab.load.engine_service import EngineService
from perflab.studies.service_run import ServiceChoice


class KeptEngine(EngineService):
    """An engine that stays open between runs; steps, events and outputs are those of the newest run."""

    async def __aenter__(self) -> Self:
        if not hasattr(self, "_async"):
            self._async = AsyncEngine(self.engine)
        self._seen = len(self.engine.steps), len(self.engine.events)
        self.outputs = {}
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stays open; `close` ends it."""

    def close(self) -> None:
        if hasattr(self, "_async"):
            self._async._thread.close()
        else:
            self.engine.close()


@contextmanager
def kept(choice: ServiceChoice) -> Iterator[Callable[[], Service]]:
    """A maker of services for many runs: always the same engine, or a fresh client of the same server."""
    if choice.url is not None:
        yield choice.make
        return
    made = choice.make()
    assert isinstance(made, EngineService)
    service = KeptEngine(made.engine)
    try:
        yield lambda: service
    finally:
        service.close()
        gc.collect()
