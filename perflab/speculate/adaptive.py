"""How many guesses a step should verify: as many as the measured odds pay for, none where none do.

A step of n guesses beside its B rows brings B tokens and one for each guess that holds. Guesses are taken
in the order of their chances while (tokens expected) / (time of such a step) grows. Chances and times are
those measured in the same run (`estimates`). Where no guess pays, a few are still tried now and then, and
where they pay a step without any, so that neither estimate goes stale; looking for guesses in vain is
kept to a small share of the time.
Owns the decision. Knows no model.
"""

from __future__ import annotations

from typing import Protocol

from perflab.clock import Clock
from perflab.engine.draft import Drafter
from perflab.engine.plan import Plan, StepResult
from perflab.engine.sequence import Sequence
from perflab.speculate.estimates import Acceptance, Recent, StepCost

MARGIN = 1.01  # what a step with guesses must promise over one without
LOOKING = 0.01  # the share of the time that looking in vain may take
LONG_REST_NS = 2_000_000  # between two steps: then the engine was idle
PROBE_EVERY = 64  # steps with guesses until one without; without, until a few are tried
MAX_PROBE_EVERY = 1024
RELAX_EVERY = 64


class Source(Drafter, Protocol):
    """A drafter that sorts its drafts: those of one kind hold about as often.

    `costly_kind`: of guesses that take a noticeable part of a step each, so that the drafter is told
    beforehand how many pay; None where it has no such.
    """

    @property
    def num_kinds(self) -> int: ...
    @property
    def costly_kind(self) -> int | None: ...
    @property
    def kinds(self) -> list[int]:
        """Of the drafts that were proposed last."""
        ...

    def propose(
        self, seqs: list[Sequence], limits: list[int], few: list[int] | None = None
    ) -> list[list[int]]:
        """As `Drafter.propose`; costly guesses stop at `few` where it is given."""
        ...


class Adaptive:
    """A drafter around another that shortens its drafts to what pays."""

    def __init__(self, source: Source, most: int, clock: Clock) -> None:
        self._source, self._clock = source, clock
        self.wants_features = source.wants_features
        self.cost = StepCost()
        self.acceptance = Acceptance(source.num_kinds, most)
        self._guessing = [Recent() for _ in range(most + 1)]  # ns a row, by the costly guesses asked of it
        self._kinds: dict[str, int] = {}
        self._rest = Recent()  # between a step's end and the next one's guesses
        self._began_ns = self._ended_ns = 0
        self._nap = 0  # steps to go without looking
        self._vain = self._busy = self._steps = 0
        self._probe_every = PROBE_EVERY

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[list[int]]:
        began = self._clock.now()
        if began - self._ended_ns < LONG_REST_NS:
            self._rest.add(began - self._ended_ns)
        drafts = self._propose(seqs, limits, began)
        self._began_ns = self._clock.now()
        return drafts

    def _propose(self, seqs: list[Sequence], limits: list[int], began: int) -> list[list[int]]:
        rows = len(seqs)
        none: list[list[int]] = [[] for _ in seqs]
        if self._busy >= PROBE_EVERY or not self.cost.knows(rows):
            return none
        probe = self._vain >= self._probe_every
        if self._nap > 0 and not probe:
            self._nap -= 1
            return none
        few, costly = None, self._source.costly_kind
        if costly is not None:
            few = self._worth(seqs, [costly] * rows, limits, priced=True)
            if probe and not any(few):
                few[0] = min(2, limits[0])
        drafts = self._source.propose(seqs, limits, few)
        kinds = self._source.kinds
        if few is not None and any(few):
            self._guessing[max(few)].add((self._clock.now() - began) / rows)
        worth = self._worth(seqs, kinds, [len(draft) for draft in drafts])
        if probe and not any(worth):
            longest = max(range(rows), key=lambda i: len(drafts[i]))
            worth[longest] = len(drafts[longest])
            if worth[longest]:
                self._probe_every = min(MAX_PROBE_EVERY, 2 * self._probe_every)
        elif any(worth):
            self._probe_every = PROBE_EVERY
        if not any(worth):
            self._nap = int((self._clock.now() - began) / (LOOKING * self.cost.of(rows, 0)))
            return none
        for seq, kind, count in zip(seqs, kinds, worth, strict=True):
            if count:
                self._kinds[seq.request_id] = kind
        return [draft[:count] for draft, count in zip(drafts, worth, strict=True)]

    def _worth(
        self, seqs: list[Sequence], kinds: list[int], limits: list[int], *, priced: bool = False
    ) -> list[int]:
        """For each row how many of its guesses to verify. priced: making them still takes its time."""
        rows, chances = len(seqs), self.acceptance.chances
        ordered = [
            (chance, index)
            for index, (seq, kind, limit) in enumerate(zip(seqs, kinds, limits, strict=True))
            if limit
            for chance in chances(seq.request_id, kind, limit)
        ]
        counts = [0] * rows
        ordered.sort(reverse=True)
        cost, rest = self.cost.of, self._rest.median
        best, best_count, tokens = MARGIN * rows / (cost(rows, 0) + rest), 0, float(rows)
        for count, (chance, _) in enumerate(ordered, 1):
            tokens += chance
            price = (
                rows * self._guessing[min(-(-count // rows), len(self._guessing) - 1)].median if priced else 0
            )
            rate = tokens / (cost(rows, count) + rest + price)
            if rate > best:
                best, best_count = rate, count
        for _, index in ordered[:best_count]:
            counts[index] += 1
        return counts

    def observe(self, plan: Plan, result: StepResult) -> None:
        self._source.observe(plan, result)
        for row, accepted in result.accepted.items():
            seq = plan.seqs[row]
            self.acceptance.add(seq.request_id, self._kinds.get(seq.request_id, 0), len(seq.draft), accepted)
        if self._began_ns and not plan.prefill_tokens and not result.errors and not result.deferred:
            self.cost.add(len(plan.seqs), plan.drafts, result.sampled_ns - self._began_ns)
        self._began_ns = 0
        if plan.drafts:
            self._vain, self._busy = 0, self._busy + 1
        else:
            self._vain, self._busy = self._vain + 1, 0
        self._steps += 1
        if self._steps % RELAX_EVERY == 0:
            self.acceptance.relax()
        self._ended_ns = self._clock.now()

    def forget(self, request_id: str) -> None:
        self._source.forget(request_id)
        self.acceptance.forget(request_id)
        self._kinds.pop(request_id, None)
