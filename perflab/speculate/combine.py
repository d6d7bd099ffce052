"""Drafters put together: those that guess one token after the other, and lookup before them.

Owns who guesses for which request. Knows nothing of how they guess or what it costs.
"""

from __future__ import annotations

from perflab.engine.draft import Drafter
from perflab.engine.plan import Plan, StepResult
from perflab.engine.sequence import Sequence
from perflab.speculate.ngram import NgramDrafter

LONG_KIND = 2  # of a lookup: from here on a match is worth more than a model's guess


class Costly:
    """A drafter whose every guess takes time, as one source of a single kind."""

    num_kinds = 1
    costly_kind = 0

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.wants_features = drafter.wants_features
        self.kinds: list[int] = []

    def propose(
        self, seqs: list[Sequence], limits: list[int], few: list[int] | None = None
    ) -> list[list[int]]:
        """See `Source.propose`; rows that may have no guess are not asked for."""
        allowed = limits if few is None else [min(pair) for pair in zip(limits, few, strict=True)]
        asked = [index for index, limit in enumerate(allowed) if limit]
        drafts: list[list[int]] = [[] for _ in seqs]
        self.kinds = [0] * len(seqs)
        if asked:
            found = self._drafter.propose([seqs[i] for i in asked], [allowed[i] for i in asked])
            for index, draft in zip(asked, found, strict=True):
                drafts[index] = draft
        return drafts

    def observe(self, plan: Plan, result: StepResult) -> None:
        self._drafter.observe(plan, result)

    def forget(self, request_id: str) -> None:
        self._drafter.forget(request_id)


class LookupFirst:
    """The request's own text where it matches at length, else the other drafter, else a short match."""

    num_kinds = NgramDrafter.num_kinds + 1
    costly_kind = NgramDrafter.num_kinds

    def __init__(self, lookup: NgramDrafter, other: Drafter) -> None:
        self._lookup, self._other = lookup, Costly(other)
        self.wants_features = other.wants_features
        self.kinds: list[int] = []

    def propose(
        self, seqs: list[Sequence], limits: list[int], few: list[int] | None = None
    ) -> list[list[int]]:
        drafts = self._lookup.propose(seqs, limits)
        kinds = self._lookup.kinds
        allowed = limits if few is None else [min(pair) for pair in zip(limits, few, strict=True)]
        allowed = [0 if kind >= LONG_KIND else most for kind, most in zip(kinds, allowed, strict=True)]
        for index, draft in enumerate(self._other.propose(seqs, allowed)):
            if draft:
                drafts[index], kinds[index] = draft, self.costly_kind
        self.kinds = kinds
        return drafts

    def observe(self, plan: Plan, result: StepResult) -> None:
        self._other.observe(plan, result)

    def forget(self, request_id: str) -> None:
        self._lookup.forget(request_id)
        self._other.forget(request_id)
