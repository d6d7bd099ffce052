"""An asyncio loop whose time jumps to the next timer: hours of pacing in milliseconds, always the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

from perflab.clock import NS_PER_S


class _Jumping(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Also a `Clock`, of the same time."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def now(self) -> int:
        return round(self._jumping.now * NS_PER_S)

    def sleep_until(self, time_ns: int) -> None:
        raise AssertionError("nothing in a loop may block")


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` in virtual time; the loop is the clock (`asyncio.get_running_loop()`)."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
