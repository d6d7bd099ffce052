"""Where time comes from. Everything that waits or stamps takes a `Clock`; nothing else reads one.

Times are integer nanoseconds of a monotonic clock. `WallClock` serves real requests,
`VirtualClock` jumps, so that timeouts, deadlines and ageing are tested without sleeping.
"""

from __future__ import annotations

import functools
import hashlib
import time
from pathlib import Path
from typing import Protocol

NS_PER_S = 1_000_000_000


def seconds_to_ns(seconds: float) -> int:
    """Seconds to whole nanoseconds."""
    return round(seconds * NS_PER_S)


class Clock(Protocol):
    def now(self) -> int:
        """Nanoseconds since an arbitrary but fixed origin; never goes back."""
        ...

    def sleep_until(self, time_ns: int) -> None:
        """Return at or after `time_ns`; at once if it has passed."""
        ...


class WallClock:
    """The machine's monotonic clock, shared by all processes of one machine."""

    now = staticmethod(time.perf_counter_ns)

    def sleep_until(self, time_ns: int) -> None:
        while (left := time_ns - self.now()) > 0:
            time.sleep(left / NS_PER_S)


@functools.cache
def clock_id() -> str | None:
    """The same for all processes that share `WallClock`'s origin: a hash of this machine's boot id.

    None where the system has none; nobody then knows that two clocks are one.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return None
    return hashlib.blake2b(boot, digest_size=8).hexdigest()


class VirtualClock:
    """A clock that only moves when told to, or when someone sleeps on it."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now = start_ns

    def now(self) -> int:
        return self._now

    def sleep_until(self, time_ns: int) -> None:
        self._now = max(self._now, time_ns)

    def advance(self, ns: int) -> None:
        if ns < 0:
            raise ValueError(f"a clock cannot go back: advance({ns})")
        self._now += ns
