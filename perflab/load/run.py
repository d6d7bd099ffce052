"""Drives an engine in this process with a workload, by intended time, and returns what was recorded.

Owns the loop between load and engine. Decides nothing about what is asked (workloads) and
computes no metric.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from perflab.clock import Clock, seconds_to_ns
from perflab.errors import Rejected
from perflab.load.workloads import PromptEncoder, TimedRequest, Workload
from perflab.types import (
    ClientHealth,
    EventRecord,
    Request,
    RequestRecord,
    Sample,
    Span,
    StepRecord,
    TokenEvent,
)


class Target(Protocol):
    """What a load needs of an engine. All times are of its clock."""

    @property
    def clock(self) -> Clock: ...
    @property
    def records(self) -> list[RequestRecord]: ...
    @property
    def steps(self) -> list[StepRecord]: ...
    @property
    def events(self) -> list[EventRecord]: ...
    @property
    def has_work(self) -> bool: ...
    def submit(self, request: Request) -> object: ...
    def step(self) -> list[TokenEvent]: ...
    def next_wake_ns(self) -> int | None: ...


@dataclass(slots=True, repr=False)  # asyncio would write it out, and it is long
class RunRecords:
    """What one run left behind. `outputs` are token ids by request and `texts` answers by request,
    kept in memory only; `telemetry` is on the requests' time axis."""

    requests: list[RequestRecord]
    steps: list[StepRecord]
    events: list[EventRecord]
    started_ns: int
    ended_ns: int
    planned: int
    interrupted: bool = False
    outputs: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    telemetry: list[Sample] = field(default_factory=list)
    client: ClientHealth = field(default_factory=ClientHealth)


OnProgress = Callable[[int, int], None]
"""Called with (requests ended, requests planned) whenever one ends."""


def run_load(
    engine: Target,
    workload: Workload,
    encoder: PromptEncoder,
    on_progress: OnProgress | None = None,
) -> RunRecords:
    """Send every request at its intended time and step the engine until all have ended.

    A request that could not be sent on time (the engine was in a step) is sent late, its latencies
    still count from the intended start, and the wait is its `client_queue` span. Text prompts are
    tokenised on the way, in a `tokenise` span. Ctrl-C ends the run after the step that is running,
    with what was measured so far; what was running then has no outcome. A second Ctrl-C ends it at
    once, and the engine with it: do not use that one again.
    """
    clock = engine.clock
    seen = len(engine.records), len(engine.steps), len(engine.events)
    waiting = deque(workload.requests)
    outputs: dict[str, list[int]] = {}
    ended = 0
    start = clock.now()
    with _StopAfterStep() as stop:
        while (waiting or engine.has_work) and not stop.asked:
            now = clock.now()
            while waiting and start + seconds_to_ns(waiting[0].arrival_s) <= now:
                if not _submit(engine, waiting.popleft(), encoder, start, clock):
                    ended += 1
            if not engine.has_work:
                if waiting:
                    clock.sleep_until(start + seconds_to_ns(waiting[0].arrival_s))
                continue
            events = engine.step()
            for event in events:
                outputs.setdefault(event.request_id, []).extend(event.token_ids)
                ended += event.finish_reason is not None
            if on_progress and any(event.finish_reason for event in events):
                on_progress(ended, len(workload.requests))
            if not events:
                _rest(engine, waiting, start, clock)
    return RunRecords(
        [copy(r) for r in engine.records[seen[0] :]],
        engine.steps[seen[1] :],
        engine.events[seen[2] :],
        start,
        clock.now(),
        len(workload.requests),
        stop.asked,
        outputs,
    )


class _StopAfterStep:
    """Turns the first Ctrl-C into a flag, so that no step is torn apart; the second one interrupts.

    In a thread other than the main one Ctrl-C never arrives, and in it nothing is changed.
    """

    asked = False

    def __enter__(self) -> _StopAfterStep:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if self._main:
            signal.signal(signal.SIGINT, self._before)
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.asked |= interrupted
        return interrupted


def _rest(engine: Target, waiting: deque[TimedRequest], start: int, clock: Clock) -> None:
    """Sleep until the engine or the load has something to do, where the engine says it has not."""
    wake = engine.next_wake_ns()
    if wake is None:
        return
    if waiting:
        wake = min(wake, start + seconds_to_ns(waiting[0].arrival_s))
    clock.sleep_until(wake)


def _submit(engine: Target, timed: TimedRequest, encoder: PromptEncoder, start: int, clock: Clock) -> bool:
    """Send one request; False where the engine refused it (it is recorded as rejected)."""
    intended = start + seconds_to_ns(timed.arrival_s)
    turn = clock.now()
    ids = encoder.ids(timed.prompt, timed.salt)
    ready = turn if isinstance(timed.prompt, tuple) else clock.now()
    spans = (Span("client_queue", intended, turn), Span("tokenise", turn, ready))
    request = Request(
        timed.request_id,
        ids,
        timed.params,
        priority=timed.priority,
        intended_ns=intended,
        deadline_ns=None if timed.deadline_s is None else intended + seconds_to_ns(timed.deadline_s),
        request_class=timed.request_class,
        spans=tuple(span for span in spans if span.end_ns > span.start_ns),
    )
    try:
        engine.submit(request)
    except Rejected:
        return False
    return True
