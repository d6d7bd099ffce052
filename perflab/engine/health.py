"""Whether the engine can serve: broken after a step in which nothing worked, until a self-test passes.

Owns that state and its times; the engine asks and tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perflab.clock import seconds_to_ns

RETRY_NS = seconds_to_ns(1.0)


class Health:
    """Ready, or broken since a moment for a reason. `on_event(kind, subject, detail)` hears of changes."""

    def __init__(self, on_event: Callable[[str, str, dict[str, Any]], None]) -> None:
        self._on_event = on_event
        self.reason: str | None = None
        self._broken_ns = 0
        self._tested_ns = 0

    @property
    def ready(self) -> bool:
        return self.reason is None

    def next_test_ns(self) -> int | None:
        return None if self.ready else self._tested_ns + RETRY_NS

    def broke(self, reason: str, now: int) -> None:
        if self.ready:
            self._broken_ns = now
            self._tested_ns = now - RETRY_NS
            self.reason = reason
            self._on_event("broken", "engine", {"reason": reason})

    def test(self, self_test: Callable[[], None], now: int) -> bool:
        """Run the self-test if one is due; whether the engine is ready after it."""
        if self.ready or now < self._tested_ns + RETRY_NS:
            return self.ready
        self._tested_ns = now
        try:
            self_test()
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
            return False
        self.reason = None
        self._on_event("recovered", "engine", {"after_ns": now - self._broken_ns})
        return True
