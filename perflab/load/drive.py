"""Drives a service with a workload: sends by intended time, keeps what came back and its own health.

Owns one asyncio loop's worth of load. Decides nothing about what is asked (workloads) or when
(pacing), knows no protocol (services) and computes no metric. All times come from the service's clock.
"""

from __future__ import annotations

import asyncio
import gc
import select
import selectors
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

from perflab.clock import NS_PER_S, Clock, seconds_to_ns
from perflab.load.pacing import OpenLoop, Pacing
from perflab.load.prompts import PromptEncoder
from perflab.load.run import OnProgress, RunRecords
from perflab.load.workloads import TimedRequest, Workload
from perflab.types import ClientHealth, RequestRecord, Sample, Span

LAG_INTERVAL_S = 0.02
COARSE_S = 0.001
FD_SETSIZE = 1024  # select(2) knows no higher descriptors


class Service(Protocol):
    """Anything that answers. `send` fills the record in place and raises for no failure of the request
    itself; cancelled, it leaves what came so far. Attributes `steps`, `events`, `texts` and `outputs`
    are taken into the run where a service has them."""

    @property
    def clock(self) -> Clock: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *_: object) -> None: ...
    def prepare(self, request: TimedRequest, encoder: PromptEncoder | None) -> TimedRequest:
        """The request as this service takes it; called before the run, so that none of it is measured."""
        ...

    async def send(self, request: TimedRequest, record: RequestRecord) -> None: ...
    def settle(self) -> None:
        """After the run: complete the records with what would have cost time during it."""
        ...

    def describe(self) -> dict[str, Any]: ...


Beside = Callable[[Clock, list[Sample]], Awaitable[None]]
"""Samples something for as long as a run lasts; it is cancelled at the end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may use at most; None is no limit. No request is sent after one is reached.

    `max_in_flight` makes requests wait in the client (`client_queue`) instead.
    """

    max_in_flight: int | None = None
    requests: int | None = None
    output_tokens: int | None = None
    seconds: float | None = None


async def drive(
    service: Service,
    workload: Workload,
    *,
    pacing: Pacing | None = None,
    encoder: PromptEncoder | None = None,
    limits: Limits = Limits(),
    timeout_s: float | None = None,
    on_progress: OnProgress | None = None,
    beside: Sequence[Beside] = (),
    collect: bool = True,
) -> RunRecords:
    """Send a workload and wait for every answer.

    A request is late rather than left out: its latencies count from its intended start. `timeout_s`
    counts from its actual send; a timed-out request keeps the tokens that came. Cancelled once (Ctrl-C
    under `run_service`) it returns what was measured, with `interrupted`; what was running then has
    no outcome. `collect` collects garbage first, so that none falls into the run; many short runs go
    without.
    """
    run = _Drive(service, encoder, limits, timeout_s, on_progress)
    if not collect:
        return await run.run(workload, pacing or OpenLoop(), beside)
    with _short_collections():
        return await run.run(workload, pacing or OpenLoop(), beside)


@contextmanager
def _short_collections() -> Iterator[None]:
    """No full collection of garbage meanwhile: over a run's records it takes tens of milliseconds, in which
    nothing is sent. Young objects, where a connection's cycles end, are collected as ever."""
    gc.collect()
    gc.freeze()  # what is there by now need not be looked at again during the run
    before = gc.get_threshold()
    gc.set_threshold(1_000, 4, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def run_service(make_service: Callable[[], Service], workload: Workload, **options: Any) -> RunRecords:
    """`drive` for callers that don't await: makes the service inside a loop of its own; Ctrl-C keeps what
    was measured. Options are those of `drive`."""

    async def run() -> RunRecords:
        async with make_service() as service:
            return await drive(service, workload, **options)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(run())
    return _in_a_thread(run())


def _in_a_thread(run: Coroutine[Any, Any, RunRecords]) -> RunRecords:
    """For callers inside a loop that they don't give up, as the cells of a notebook are."""
    loop = new_loop()
    task = loop.create_task(run)
    try:
        with ThreadPoolExecutor(1, "drive") as pool:
            done = pool.submit(loop.run_until_complete, task)
            try:
                return done.result()
            except KeyboardInterrupt:
                loop.call_soon_threadsafe(task.cancel)
                return done.result()
    finally:
        loop.close()


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are good to tens of microseconds where the system has epoll."""
    return asyncio.SelectorEventLoop(_fine_selector())


def _fine_selector() -> selectors.BaseSelector:
    if not hasattr(selectors, "EpollSelector"):
        return selectors.DefaultSelector()

    class Fine(selectors.EpollSelector):
        """Epoll waits whole milliseconds, so it ends early; select(2) on its descriptor waits the rest."""

        def select(self, timeout: float | None = None) -> Any:
            if timeout is not None and timeout > 0 and self.fileno() < FD_SETSIZE:
                if timeout > 2 * COARSE_S:
                    return super().select(timeout - COARSE_S)
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)

    return Fine()


class _Drive:
    """One run: what was sent and what ended so far."""

    def __init__(
        self,
        service: Service,
        encoder: PromptEncoder | None,
        limits: Limits,
        timeout_s: float | None,
        on_progress: OnProgress | None,
    ) -> None:
        self.service, self.clock, self.encoder = service, service.clock, encoder
        self.limits, self.timeout_s, self.on_progress = limits, timeout_s, on_progress
        self.slots = asyncio.Semaphore(limits.max_in_flight) if limits.max_in_flight else None
        self.stop = asyncio.Event()
        self.records: list[RequestRecord] = []
        self.lateness: list[int] = []
        self.lags: list[int] = []
        self.ended = self.tokens = self.start = 0
        self.planned: int | None = None

    async def run(self, workload: Workload, pacing: Pacing, beside: Sequence[Beside]) -> RunRecords:
        self.prepared = {r.request_id: self.service.prepare(r, self.encoder) for r in workload.requests}
        self.planned = pacing.planned(workload)
        telemetry: list[Sample] = []
        interrupted = False
        samplers = [asyncio.create_task(self._watch_loop())]
        samplers += [asyncio.ensure_future(sample(self.clock, telemetry)) for sample in beside]
        cpu, self.start = time.thread_time_ns(), self.clock.now()
        try:
            await pacing.run(workload, self._send, self.clock, self.start, self.stop)
        except asyncio.CancelledError:
            interrupted = True
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        finally:
            ended, cpu = self.clock.now(), time.thread_time_ns() - cpu
            for sampler in samplers:
                sampler.cancel()
            await asyncio.gather(*samplers, return_exceptions=True)
        self.service.settle()
        return RunRecords(
            self.records,
            list(getattr(self.service, "steps", ())),
            list(getattr(self.service, "events", ())),
            self.start,
            ended,
            len(self.records) if self.planned is None else self.planned,
            interrupted,
            dict(getattr(self.service, "outputs", {})),
            dict(getattr(self.service, "texts", {})),
            telemetry,
            ClientHealth(_p99_s(self.lags), _p99_s(self.lateness), cpu / max(1, ended - self.start)),
        )

    async def _send(self, timed: TimedRequest, intended: int) -> None:
        turn = self.clock.now()
        self.lateness.append(turn - intended)
        if self.slots is not None:
            await self.slots.acquire()
        try:
            if self._at_limit():
                self.stop.set()
            if not self.stop.is_set():
                await self._one(timed, intended)
        finally:
            if self.slots is not None:
                self.slots.release()

    async def _one(self, timed: TimedRequest, intended: int) -> None:
        free = self.clock.now()
        now, prepared = free, self.prepared.pop(timed.request_id, None)
        if prepared is None:  # asked once more, or made while the run went on
            prepared = self.service.prepare(timed, self.encoder)
            now = self.clock.now()
        spans = (Span("client_queue", intended, free), Span("tokenise", free, now))
        record = RequestRecord(
            timed.request_id,
            intended,
            now,
            timed.prompt_length or 0,
            priority=timed.priority,
            request_class=timed.request_class,
            seed=timed.params.seed,
            requested_tokens=timed.params.max_tokens,
            session_id=timed.session_id,
            turn=timed.turn,
            deadline_ns=None if timed.deadline_s is None else intended + seconds_to_ns(timed.deadline_s),
            spans=[span for span in spans if span.end_ns > span.start_ns],
        )
        self.records.append(record)
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.service.send(prepared, record)
        except TimeoutError:
            record.outcome, record.finish_reason = "timed_out", "deadline"
            record.error = f"timed out after {self.timeout_s:g} s"
            record.end_ns = self.clock.now()
        self.ended += 1
        self.tokens += record.output_tokens
        if self._at_limit():
            self.stop.set()
        if self.on_progress:
            self.on_progress(self.ended, self.planned or self.ended)

    def _at_limit(self) -> bool:
        limits = self.limits
        return (
            (limits.requests is not None and len(self.records) >= limits.requests)
            or (limits.output_tokens is not None and self.tokens >= limits.output_tokens)
            or (limits.seconds is not None and self.clock.now() - self.start >= limits.seconds * NS_PER_S)
        )

    async def _watch_loop(self) -> None:
        """How late the loop wakes a task that asked for a time; also what ends a run by its limits."""
        while True:
            due = self.clock.now() + seconds_to_ns(LAG_INTERVAL_S)
            await asyncio.sleep(LAG_INTERVAL_S)
            self.lags.append(self.clock.now() - due)
            if self._at_limit():
                self.stop.set()


def _p99_s(values: Sequence[int]) -> float | None:
    return sorted(values)[int(0.99 * (len(values) - 1))] / NS_PER_S if values else None
