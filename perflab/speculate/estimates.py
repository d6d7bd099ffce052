"""What adaptive drafting learns while it runs: how long steps take, and which guesses hold.

Owns running estimates that forget. Knows no engine and no drafter; times are nanoseconds, and only their
ratios are used.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from statistics import median

_RECENT = 7
_ENOUGH = 3
_PRIOR_ROWS = 8


class Recent:
    """The median of the last few values: one outlier moves nothing. Known from three values on."""

    __slots__ = ("_values", "median")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_RECENT)
        self.median = 0.0

    def add(self, value: float) -> None:
        self._values.append(value)
        self.median = median(self._values)

    @property
    def known(self) -> bool:
        return len(self._values) >= _ENOUGH


class StepCost:
    """The time of a step by its rows and the guesses that it verifies beside them.

    A pair that was seen often enough has its own median. Another one is the same rows without guesses,
    plus the difference that its tokens made in steps of as many tokens, whatever their rows; beyond what
    was seen each token adds 1 / (rows + 8) of the step.
    """

    def __init__(self) -> None:
        self._exact: dict[tuple[int, int], Recent] = {}
        self._by_tokens: dict[int, Recent] = {}
        self._known: list[int] = []

    def add(self, rows: int, drafts: int, ns: float) -> None:
        tokens = rows + drafts
        self._exact.setdefault((rows, drafts), Recent()).add(ns)
        seen = self._by_tokens.setdefault(tokens, Recent())
        seen.add(ns)
        if seen.known and tokens not in self._known:
            insort(self._known, tokens)

    def knows(self, rows: int) -> bool:
        """Whether steps of so many rows without guesses were seen."""
        return (rows, 0) in self._exact and self._exact[rows, 0].known

    def of(self, rows: int, drafts: int) -> float:
        """Nanoseconds; only after `knows(rows)`."""
        exact = self._exact.get((rows, drafts))
        if exact is not None and exact.known:
            return exact.median
        alone = self._exact[rows, 0].median
        return alone * max(1.0, self._of_tokens(rows + drafts) / self._of_tokens(rows))

    def _of_tokens(self, tokens: int) -> float:
        place = bisect(self._known, tokens)
        if place == len(self._known):
            last = self._known[-1]
            return self._by_tokens[last].median * (1 + (tokens - last) / (last + _PRIOR_ROWS))
        high = self._known[place]
        if place == 0:
            return self._by_tokens[high].median * (tokens + _PRIOR_ROWS) / (high + _PRIOR_ROWS)
        low = self._known[place - 1]
        share = (tokens - low) / (high - low)
        return self._by_tokens[low].median * (1 - share) + self._by_tokens[high].median * share


class Acceptance:
    """The chance that a guess holds where all before it held, by the kind of the draft and its place in it.

    Of all requests together with a slow forgetting, and per request a factor on it that follows fast.
    """

    _PRIOR, _PRIOR_WEIGHT = 0.6, 2.0
    _KEEP, _KEEP_ONE = 0.99, 0.9
    _ONE_WEIGHT = 1.5

    def __init__(self, kinds: int, places: int) -> None:
        self._tried = [[self._PRIOR_WEIGHT] * places for _ in range(kinds)]
        self._held = [[self._PRIOR * self._PRIOR_WEIGHT] * places for _ in range(kinds)]
        self._one: dict[str, list[float]] = {}

    def add(self, request_id: str, kind: int, proposed: int, accepted: int) -> None:
        tried, held = self._tried[kind], self._held[kind]
        one = self._one.setdefault(request_id, [self._ONE_WEIGHT, self._ONE_WEIGHT])
        one[0] = (one[0] - self._ONE_WEIGHT) * self._KEEP_ONE + self._ONE_WEIGHT
        one[1] = (one[1] - self._ONE_WEIGHT) * self._KEEP_ONE + self._ONE_WEIGHT
        for place in range(min(accepted + 1, proposed)):
            one[1] += held[place] / tried[place]
            one[0] += place < accepted
            tried[place] = tried[place] * self._KEEP + 1
            held[place] = held[place] * self._KEEP + (place < accepted)

    def chances(self, request_id: str, kind: int, places: int) -> list[float]:
        """For each place the chance that it and all before it hold."""
        tried, held = self._tried[kind], self._held[kind]
        one = self._one.get(request_id)
        factor = one[0] / one[1] if one is not None else 1.0
        chance, chances = 1.0, []
        for place in range(places):
            chance *= min(0.98, factor * held[place] / tried[place])
            chances.append(chance)
        return chances

    def relax(self) -> None:
        """Let each request's own factor go half the way back: what held once may hold again."""
        for one in self._one.values():
            one[0] = (one[0] + self._ONE_WEIGHT) / 2
            one[1] = (one[1] + self._ONE_WEIGHT) / 2

    def forget(self, request_id: str) -> None:
        self._one.pop(request_id, None)
