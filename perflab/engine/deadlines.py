"""When which request is due to have ended.

Owns the times and nothing else; what becomes of a late request is the scheduler's business.
"""

from __future__ import annotations

import heapq

from perflab.engine.sequence import Sequence
from perflab.errors import DeadlineExceeded

SLACK = 64


class Deadlines:
    """Requests by deadline, those that ended before it included until they are the majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []

    def add(self, seq: Sequence, num_live: int) -> None:
        """Remember a request's deadline, if it has one. `num_live`: requests waiting and running."""
        deadline = seq.request.deadline_ns
        if deadline is None:
            return
        if len(self._heap) > 2 * num_live + SLACK:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline, id(seq), seq))

    def take_late(self, now: int) -> list[Sequence]:
        """The unfinished requests whose deadline has come."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            seq = heapq.heappop(self._heap)[2]
            if not seq.is_finished:
                late.append(seq)
        return late

    def next_ns(self) -> int | None:
        """The earliest deadline of an unfinished request."""
        while self._heap and self._heap[0][2].is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        return len(self._heap)


def late(seq: Sequence, where: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{seq.request_id}: deadline passed {where}, with {seq.num_output_tokens} of at most "
        f"{seq.max_len - seq.num_prompt_tokens} output tokens"
    )
