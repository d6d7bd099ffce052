"""Guesses of the next tokens in a step: who makes them, how many there is room for, what they cost.

Owns the calls of one engine's drafter and its share of a step. Guesses take only what a plan has left:
tokens of the budget and free blocks, so they hold nobody up and push nobody out of memory. How drafters
guess is their own affair (`perflab.speculate`); what becomes of a guess is decided by `verify`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol

from perflab.clock import Clock
from perflab.engine.kv import NoKV, PagedKV
from perflab.engine.plan import Plan, StepResult
from perflab.engine.sequence import Sequence
from perflab.types import RequestRecord, StepRecord


class Drafter(Protocol):
    """Guesses how requests go on. It reads the sequences and changes nothing of them.

    `wants_features`: whether it needs what went into the target's head, in `StepResult.features`.
    """

    @property
    def wants_features(self) -> bool: ...

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[list[int]]:
        """At most `limits[i]` tokens that may follow `seqs[i].tokens`, none where it has no idea."""
        ...

    def observe(self, plan: Plan, result: StepResult) -> None:
        """What a step brought, before the scheduler takes it in: `seqs[i].num_computed_tokens` is where
        row i's tokens began, `seqs[i].draft` what was guessed, `result.accepted[i]` how much of it held,
        `result.token_ids[i]` what came. Every step is shown, those without guesses too."""
        ...

    def forget(self, request_id: str) -> None:
        """The request ended, or lost its place and will be computed again from the start."""
        ...


class Drafting:
    """A drafter at work in one engine. One that raises is let go; the requests go on without."""

    def __init__(
        self,
        drafter: Drafter,
        kv: PagedKV | NoKV,
        clock: Clock,
        most: int,
        on_event: Callable[[str, str, dict[str, Any]], None],
    ) -> None:
        self.drafter: Drafter | None = drafter
        self._kv, self._clock, self._most = kv, clock, most
        self._on_event = on_event

    def propose(self, plan: Plan, record: StepRecord) -> None:
        """Let the drafter guess for the rows that draw a token, and add what fits to the plan."""
        if self.drafter is None or plan.room <= 0:
            return
        began = self._clock.now()
        rows, seqs, limits = [], [], []
        for row, (seq, samples) in enumerate(zip(plan.seqs, plan.samples, strict=True)):
            # One place is left for the token that the model adds to accepted guesses.
            limit = min(self._most, seq.max_len - len(seq.tokens) - 1)
            if samples and limit > 0 and not seq.scores_prompt:
                rows.append(row)
                seqs.append(seq)
                limits.append(limit)
        if seqs:
            try:
                drafts = self.drafter.propose(seqs, limits)
            except Exception as error:
                self._let_go(error)
                return
            for row, limit, draft in zip(rows, limits, drafts, strict=True):
                if draft:
                    self._add(plan, row, draft[:limit])
        record.draft_tokens = plan.drafts
        record.draft_ns = self._clock.now() - began

    def _add(self, plan: Plan, row: int, draft: list[int]) -> None:
        seq = plan.seqs[row]
        end = seq.num_computed_tokens + plan.counts[row]
        draft = draft[: plan.room]
        if end + len(draft) > seq.capacity and not self._kv.grow(seq, end + len(draft)):
            draft = draft[: seq.capacity - end]
        seq.draft = draft
        plan.counts[row] += len(draft)
        plan.drafts += len(draft)
        plan.room -= len(draft)

    def observe(self, plan: Plan, result: StepResult, record: StepRecord) -> None:
        """Tell the drafter and the records what became of the guesses."""
        began = self._clock.now()
        for row, accepted in result.accepted.items():
            seq = plan.seqs[row]
            record.accepted_tokens += accepted
            count_draft(seq.record, len(seq.draft), accepted)
        if self.drafter is not None:
            try:
                self.drafter.observe(plan, result)
            except Exception as error:
                self._let_go(error)
        record.rollback_ns = self._clock.now() - began
        if plan.drafts:
            record.verify_ns = result.sampled_ns - result.forwarded_ns

    def forget(self, request_id: str) -> None:
        if self.drafter is not None:
            self.drafter.forget(request_id)

    def _let_go(self, error: Exception) -> None:
        self.drafter = None
        said = f"{type(error).__name__}: {error}"
        self._on_event("drafter_failed", "engine", {"error": said})
        warnings.warn(f"the drafter failed, speculation is off from here on: {said}", stacklevel=2)


def count_draft(record: RequestRecord, proposed: int, accepted: int) -> None:
    """Add one verified draft to a request's counts by place."""
    missing = proposed - len(record.draft_proposed)
    if missing > 0:
        for counts in (record.draft_proposed, record.draft_reached, record.draft_accepted):
            counts += [0] * missing
    for place in range(proposed):
        record.draft_proposed[place] += 1
        if place <= accepted:
            record.draft_reached[place] += 1
        if place < accepted:
            record.draft_accepted[place] += 1
