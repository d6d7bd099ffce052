"""Who is served next, and when a batch may form.

Owns the waiting requests and their order. An order is a fixed key per request, given once when it
arrives: priority with ageing needs no re-sorting, because everybody ages at the same rate. Knows
nothing of memory or budgets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from typing import Protocol

from perflab.clock import seconds_to_ns
from perflab.config import EngineConfig
from perflab.engine.sequence import Sequence

_KEY = attrgetter("key")
_NO_DEADLINE = float("inf")


class OrderPolicy(Protocol):
    preemptive: bool  # may a waiting request push out a running one that comes after it

    def rank(self, seq: Sequence) -> float:
        """Lower is served first; ties go to the earlier arrival."""
        ...


class FirstComeFirstServed:
    preemptive = False

    def rank(self, seq: Sequence) -> float:
        return seq.queued_ns


class PriorityWithAgeing:
    """A level of priority is worth `ageing_s` of waiting, so a request waits for at most
    (levels above it) x `ageing_s` of later arrivals: the bound on starvation."""

    preemptive = True

    def __init__(self, ageing_s: float) -> None:
        self._level_ns = seconds_to_ns(ageing_s)

    def rank(self, seq: Sequence) -> float:
        return seq.queued_ns + seq.request.priority * self._level_ns


class ShortestJobFirst:
    """Prompt plus token limit as the size; a thousand tokens are worth `ageing_s` of waiting."""

    preemptive = False

    def __init__(self, ageing_s: float) -> None:
        self._token_ns = seconds_to_ns(ageing_s) / 1000

    def rank(self, seq: Sequence) -> float:
        return seq.queued_ns + seq.max_len * self._token_ns


class EarliestDeadlineFirst:
    preemptive = True

    def rank(self, seq: Sequence) -> float:
        deadline = seq.request.deadline_ns
        return _NO_DEADLINE if deadline is None else deadline


def order_policy(config: EngineConfig) -> OrderPolicy:
    match config.policy:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return PriorityWithAgeing(config.ageing_s)
        case "sjf":
            return ShortestJobFirst(config.ageing_s)
        case "edf":
            return EarliestDeadlineFirst()


class WaitingQueue:
    """Waiting requests in the order of their keys."""

    def __init__(self, policy: OrderPolicy) -> None:
        self.policy = policy
        self._waiting: list[Sequence] = []
        self._arrivals = 0

    def add(self, seq: Sequence) -> None:
        """A new request; its key is fixed here for good."""
        self._arrivals += 1
        seq.key = (self.policy.rank(seq), seq.queued_ns, self._arrivals)
        insort(self._waiting, seq, key=_KEY)

    def put_back(self, seq: Sequence) -> None:
        """A preempted request keeps its place."""
        insort(self._waiting, seq, key=_KEY)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._waiting, seq.key, key=_KEY)
        assert self._waiting[index] is seq, f"{seq} does not wait"
        del self._waiting[index]

    def oldest_arrival_ns(self) -> int | None:
        return min((seq.queued_ns for seq in self._waiting), default=None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __getitem__(self, index: int) -> Sequence:
        return self._waiting[index]


class BatchGate(Protocol):
    """Says who may enter the batch at this moment."""

    def seats(self, waiting: WaitingQueue, num_running: int, now: int) -> int: ...

    def admits(self, seq: Sequence) -> bool: ...

    def entered(self, seq: Sequence) -> None: ...

    def next_wake_ns(self, waiting: WaitingQueue, num_running: int) -> int | None:
        """When an idle engine should look again; None: nothing to wait for."""
        ...


class ContinuousGate:
    def __init__(self, size: int) -> None:
        self._size = size

    def seats(self, waiting: WaitingQueue, num_running: int, now: int) -> int:
        return self._size - num_running

    def admits(self, seq: Sequence) -> bool:
        return True

    def entered(self, seq: Sequence) -> None:
        pass

    def next_wake_ns(self, waiting: WaitingQueue, num_running: int) -> int | None:
        return None


class BatchwiseGate:
    """A batch forms while nothing runs; its members may enter until it is complete, and nobody else:
    the seat of a member that was cancelled, or waits for its first sample, is not given away.

    With a timeout (`dynamic`) it forms when `size` requests wait or the oldest has waited that
    long, whichever comes first; without one (`static`) it takes who is there.
    """

    def __init__(self, size: int, timeout_ns: int = 0) -> None:
        self._size = size
        self._timeout_ns = timeout_ns
        self._expected: set[tuple[float, ...]] = set()  # keys of members that have not entered yet

    def seats(self, waiting: WaitingQueue, num_running: int, now: int) -> int:
        if num_running == 0:
            self._expected.clear()
            oldest = waiting.oldest_arrival_ns()
            if oldest is not None and (len(waiting) >= self._size or now - oldest >= self._timeout_ns):
                self._expected.update(seq.key for seq in islice(waiting, self._size))
        return min(len(self._expected), self._size - num_running)

    def admits(self, seq: Sequence) -> bool:
        return seq.key in self._expected

    def entered(self, seq: Sequence) -> None:
        self._expected.discard(seq.key)

    def next_wake_ns(self, waiting: WaitingQueue, num_running: int) -> int | None:
        oldest = waiting.oldest_arrival_ns()
        return None if num_running or oldest is None else oldest + self._timeout_ns


def batch_gate(config: EngineConfig) -> BatchGate:
    match config.batching:
        case "continuous":
            return ContinuousGate(config.max_num_seqs)
        case "static":
            return BatchwiseGate(config.max_num_seqs)
        case "dynamic":
            return BatchwiseGate(config.max_num_seqs, seconds_to_ns(config.batch_timeout_s))
