"""When each request of a workload is sent, while a run goes on: by the timetable, or by waiting users.

Owns the order of sends and the intended start of each one. Knows no server: `send` is handed in.
Turns of one session never overlap: a turn waits for the one before it and its `think_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from perflab.clock import NS_PER_S, Clock, seconds_to_ns
from perflab.errors import WorkloadError
from perflab.load.workloads import TimedRequest, Workload, in_sessions

Send = Callable[[TimedRequest, int], Awaitable[object]]
"""Sends one request, given its intended start in ns, and returns when it has ended, in whatever way."""


class Pacing(Protocol):
    """Calls `send` for the requests of a workload and returns when all of them have ended.

    Once `stop` is set nothing more is sent, and what is in flight may end. Cancelling `run`
    cancels what is in flight.
    """

    @property
    def open_loop(self) -> bool: ...
    def planned(self, workload: Workload) -> int | None:
        """How many requests will be sent; None where time decides."""
        ...

    async def run(
        self, workload: Workload, send: Send, clock: Clock, start_ns: int, stop: asyncio.Event
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Sends by the workload's intended starts, however busy the server is.

    A later turn of a session starts at its own time or `think_s` after the end of the turn before,
    whichever comes last: nobody replies to an answer that has not come.
    """

    @property
    def open_loop(self) -> bool:
        return True

    def planned(self, workload: Workload) -> int | None:
        return len(workload.requests)

    async def run(
        self, workload: Workload, send: Send, clock: Clock, start_ns: int, stop: asyncio.Event
    ) -> None:
        before: dict[str, asyncio.Task[int]] = {}  # each session's newest turn; its result is its end

        async def after(turn: asyncio.Task[int], request: TimedRequest, due: int) -> int:
            intended = max(due, await turn + seconds_to_ns(request.think_s))
            if await _wait(clock, intended, stop):
                await send(request, intended)
            return clock.now()

        async def at_once(request: TimedRequest, due: int) -> int:
            await send(request, due)
            return clock.now()

        async with asyncio.TaskGroup() as group:
            for request in workload.requests:
                due = start_ns + seconds_to_ns(request.arrival_s)
                if not await _wait(clock, due, stop):
                    return
                earlier = before.get(request.session_id) if request.session_id is not None else None
                made = at_once(request, due) if earlier is None else after(earlier, request, due)
                task = group.create_task(made)
                if request.session_id is not None:
                    before[request.session_id] = task


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`users` who each wait for an answer, think for `think_s` and ask again.

    A user whose request failed or timed out stays and asks the next one. A session is asked by one
    user, turn by turn. Ends after `requests` or, sending no more, after `duration_s`; without either,
    when every request was asked once. Where the workload is shorter it begins again, under new ids and
    with other prompts where these are synthetic or salted. Raises WorkloadError for impossible values.
    """

    users: int
    think_s: float = 0.0
    duration_s: float | None = None
    requests: int | None = None

    def __post_init__(self) -> None:
        if self.users < 1 or self.think_s < 0:
            raise WorkloadError(
                f"users={self.users}, think_s={self.think_s}: 1 user or more, who think for 0 s or more"
            )
        for name, value in (("duration_s", self.duration_s), ("requests", self.requests)):
            if value is not None and value <= 0:
                raise WorkloadError(f"{name}={value}: must be above 0; leave it out for no limit")

    @property
    def open_loop(self) -> bool:
        return False

    def planned(self, workload: Workload) -> int | None:
        if self.requests is None and self.duration_s is None:
            return len(workload.requests)
        return self.requests if self.duration_s is None else None

    async def run(
        self, workload: Workload, send: Send, clock: Clock, start_ns: int, stop: asyncio.Event
    ) -> None:
        chains = self._chains(workload)
        end_ns = None if self.duration_s is None else start_ns + seconds_to_ns(self.duration_s)
        left = self.planned(workload)

        async def user() -> None:
            nonlocal left
            ended, think_s = start_ns, 0.0
            for chain in chains:
                for request in chain:
                    intended = ended + seconds_to_ns(max(think_s, request.think_s))
                    if left == 0 or (end_ns is not None and intended >= end_ns):
                        return
                    left = None if left is None else left - 1
                    if not await _wait(clock, intended, stop):
                        return
                    await send(request, intended)
                    ended, think_s = clock.now(), self.think_s

        async with asyncio.TaskGroup() as group:
            for _ in range(self.users):
                group.create_task(user())

    def _chains(self, workload: Workload) -> Iterator[tuple[TimedRequest, ...]]:
        """Sessions, or single requests, in order and again from the start as often as needed."""
        sessions = in_sessions(workload.requests)
        for again in count() if sessions else ():
            for chain in sessions:
                yield tuple(request.repeated(again) for request in chain)


async def _wait(clock: Clock, time_ns: int, stop: asyncio.Event) -> bool:
    """Wait until a time; False, at once, where the run is stopped. Lets others run in any case."""
    await asyncio.sleep(0)
    while not stop.is_set() and (left := time_ns - clock.now()) > 0:
        try:
            await asyncio.wait_for(stop.wait(), left / NS_PER_S)
        except TimeoutError:
            continue
    return not stop.is_set()
