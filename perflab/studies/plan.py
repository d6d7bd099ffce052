"""How much of a study fits into its time: how many requests, how many rounds of each variant.

Owns the arithmetic. Measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perflab.load.workloads import Workload

FEWEST_REQUESTS = 5
FEWEST_TOKENS = 8
RUNS_SHARE = 0.9
"""Share of the time left after loading and pilot that the least number of runs may take; the rest is for
quality and what the first estimate did not see."""

OVERTIME = 1.4
"""Past this multiple of its time budget a study begins no further round, unless a last one that makes
pairs of runs fits into `LAST_ROUND` of the budget."""

LAST_ROUND = 0.4


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of the first variant, from a pilot: per request up to its first token, per token after."""

    first_token_s: float
    next_token_s: float

    def estimate_s(self, workload: Workload) -> float:
        """Seconds that the first variant takes for `workload`, one request after the other."""
        after = max(0, workload.output_tokens - len(workload.requests))
        return len(workload.requests) * self.first_token_s + after * self.next_token_s


def fit_workload(
    workload: Workload, pace: Pace, total_cost: float, repeats: int, budget_s: float
) -> tuple[Workload, int]:
    """The largest part of `workload`, and the number of rounds, that fit into `budget_s`.

    `total_cost` is the sum of the variants' costs relative to the first. Gives up requests first,
    then output tokens, then rounds (to two at least): what remains is the least that says anything.
    """
    allowed = budget_s * RUNS_SHARE

    def seconds(candidate: Workload, rounds: int) -> float:
        return pace.estimate_s(candidate) * total_cost * rounds

    chosen = workload
    while seconds(chosen, repeats) > allowed and len(chosen.requests) > FEWEST_REQUESTS:
        chosen = workload.first(len(chosen.requests) - 1)
    longest = max((r.params.max_tokens or 0) for r in chosen.requests)
    while seconds(chosen, repeats) > allowed and longest > FEWEST_TOKENS:
        longest = max(FEWEST_TOKENS, longest * 3 // 4)
        chosen = chosen.first(len(chosen.requests), longest)
    while seconds(chosen, repeats) > allowed and repeats > 2:
        repeats -= 1
    return chosen, repeats


def fewest_in_overtime(costs_s: Mapping[str, float], done: Mapping[str, int], budget_s: float) -> int:
    """Rounds that each variant must still reach when time is over: two if that is cheap, else one."""
    missing = sum(cost * max(0, 2 - done.get(name, 0)) for name, cost in costs_s.items())
    return 2 if missing <= LAST_ROUND * budget_s else 1


def rounds_for(costs_s: Mapping[str, float], left_s: float, fewest: int, most: int) -> dict[str, int]:
    """Rounds of each variant such that the sum of rounds × cost stays within `left_s`.

    Everyone gets `fewest`, or as many as fit but two at least; further rounds go to all, or, where
    that does not fit, to all but the costliest, as long as two variants are left to compare.
    """
    while fewest > 2 and sum(costs_s.values()) * fewest > left_s:
        fewest -= 1
    rounds = dict.fromkeys(costs_s, fewest)
    spent = sum(costs_s.values()) * fewest
    members = sorted(costs_s, key=lambda name: costs_s[name])
    for _ in range(fewest, most):
        while members and spent + sum(costs_s[name] for name in members) > left_s:
            members = members[:-1]
        if len(members) < min(2, len(costs_s)):
            break
        for name in members:
            rounds[name] += 1
        spent += sum(costs_s[name] for name in members)
    return rounds
