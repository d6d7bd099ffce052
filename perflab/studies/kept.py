"""Services that answer run after run: one engine, warmed once, instead of a fresh one for every run.

Owns how long they live. Knows no load.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

from perflab.engine.drivers import AsyncEngine
from perflab.load.drive import Service
from perflab.load.engine_service import EngineService
from perflab.studies.service_run import LoadChoice, ServiceChoice, measure

WARM_UP_USERS, WARM_UP_REQUESTS = 16, 2
"""As many at once as an engine takes by default, each of them twice: what is made at the first step of a
kind, and memory that is touched for the first time, are out of the way."""


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


def warm_up(choice: ServiceChoice, load: LoadChoice, make: Callable[[], Service]) -> None:
    """A short closed loop of the same kind of requests; nothing of it is kept."""
    few = WARM_UP_USERS * WARM_UP_REQUESTS
    users = replace(
        load, rate_per_s=None, users=WARM_UP_USERS, duration_s=None, requests=few, seed=load.seed + 9001
    )
    measure(choice, users, make=make)
