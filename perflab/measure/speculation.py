"""What guessing ahead brought and what it cost, from the counts of requests and the times of steps.

Owns the formulas of speculation. Knows no drafter and no engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from perflab.clock import NS_PER_S
from perflab.measure import stats
from perflab.types import RequestRecord, StepRecord

FORMULAS: dict[str, str] = {
    "draft": "the tokens guessed for one request in one step, which the same step verifies.",
    "acceptance at a place": "guesses at this place that held / drafts of which all guesses before it held: "
    "conditional, so a late place is judged on the drafts that reached it.",
    "mean accepted length, token-weighted": "1 + accepted guesses / drafts, all drafts of all requests "
    "pooled: the tokens that a verified draft brings, the model's own one among them. A long output counts "
    "by its drafts.",
    "mean accepted length, per request": "1 + accepted guesses / drafts of each request, then the mean over "
    "the requests that had a draft: each counts once.",
    "wasted compute": "rejected guesses / rows computed, a row being one token of one request in one step, "
    "those of prompts among them. Accepted guesses beyond a request's end count as accepted.",
    "draft, verify and rollback time": "the drafter's guessing; drawing and comparing in steps with guesses; "
    "telling the drafter what was rejected: each summed and divided by all steps, those without guesses too.",
    "forward, with and without guesses": "the model's own time of a step that only decodes, the mean of each "
    "kind. Their ratio is the cost of the wider step where both had about as many requests.",
}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Guesses by their place in a draft, 0 the first: how many were proposed, how many were reached
    (all before them held) and how many held; and the tokens that each verified draft brought.

    lengths: one list a request that had a draft, a value for each draft: its accepted guesses and one.
    """

    proposed: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]

    @property
    def drafts(self) -> int:
        return self.proposed[0] if self.proposed else 0

    @property
    def draft_tokens(self) -> int:
        return sum(self.proposed)

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted)

    @property
    def share(self) -> float | None:
        """Accepted of all guesses; None without any."""
        return self.accepted_tokens / self.draft_tokens if self.proposed else None

    @property
    def by_place(self) -> tuple[stats.Estimate, ...]:
        """Conditional acceptance: accepted / reached at each place, with Wilson's interval."""
        return tuple(stats.share(a, r) for a, r in zip(self.accepted, self.reached, strict=True))

    @property
    def length_by_tokens(self) -> stats.Estimate:
        """Mean accepted length, all drafts pooled, with a bootstrap interval over requests."""
        return stats.bootstrap(self.lengths, np.mean, draws=400)

    @property
    def length_by_request(self) -> stats.Estimate:
        """Mean over requests of each one's own mean accepted length, with Student's t interval."""
        return stats.mean([sum(own) / len(own) for own in self.lengths])


def acceptance(records: Iterable[RequestRecord]) -> Acceptance:
    """The drafts of all requests, whatever became of these."""
    known = [r for r in records if r.draft_proposed]

    def total(lists: Iterable[Sequence[int]]) -> tuple[int, ...]:
        return tuple(map(sum, itertools.zip_longest(*lists, fillvalue=0)))

    return Acceptance(
        total(r.draft_proposed for r in known),
        total(r.draft_reached for r in known),
        total(r.draft_accepted for r in known),
        tuple(tuple(accepted_lengths(r)) for r in known),
    )


def accepted_lengths(record: RequestRecord) -> list[int]:
    """Tokens that each of a request's drafts brought, the shortest first: of drafts with at least i
    accepted guesses, those without an (i + 1)th brought i + 1 tokens."""
    at_least = [*record.draft_proposed[:1], *record.draft_accepted, 0]
    return [i for i, (more, most) in enumerate(itertools.pairwise(at_least), 1) for _ in range(more - most)]


@dataclass(frozen=True, slots=True)
class Work:
    """What steps computed and what guessing took. Seconds are means over all steps, None without any;
    those of the model alone over steps that only decode, with guesses or without."""

    steps: int
    with_drafts: int  # of the steps
    rows: int  # tokens computed
    rejected: int  # of these: guesses that did not hold
    step_s: float | None  # [start, delivered)
    draft_s: float | None
    verify_s: float | None
    rollback_s: float | None
    forward_with_s: float | None
    forward_without_s: float | None

    @property
    def wasted(self) -> float | None:
        """Rejected guesses as a share of the rows computed; None where none was."""
        return self.rejected / self.rows if self.rows else None


def work(steps: Iterable[StepRecord]) -> Work:
    """Counts and times of steps, those of several runs too."""
    held = list(steps)
    decoding = [s for s in held if s.decode_tokens and not s.prefill_tokens]
    return Work(
        len(held),
        sum(s.draft_tokens > 0 for s in held),
        sum(s.prefill_tokens + s.decode_tokens for s in held),
        sum(s.draft_tokens - s.accepted_tokens for s in held),
        _mean_s(s.delivered_ns - s.start_ns for s in held),
        *(_mean_s(getattr(s, name) for s in held) for name in ("draft_ns", "verify_ns", "rollback_ns")),
        *(
            _mean_s(s.forwarded_ns - s.batched_ns for s in decoding if (s.draft_tokens > 0) == drafts)
            for drafts in (True, False)
        ),
    )


def _mean_s(times_ns: Iterable[int]) -> float | None:
    times = list(times_ns)
    return sum(times) / len(times) / NS_PER_S if times else None
