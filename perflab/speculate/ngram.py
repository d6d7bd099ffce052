"""Drafts looked up in the request's own text: what followed the last time that the text read like this.

Owns one index per request, which grows with its tokens: for each place the place before it where the same
two tokens stood, as in LZ77's hash chains. The longest match wins, of equals the most recent one.
"""

from __future__ import annotations

from perflab.engine.plan import Plan, StepResult
from perflab.engine.sequence import Sequence

SHORTEST = 2
LONGEST = 24  # tokens of a match that are counted
TRIES = 32  # most recent places that are compared
_KIND_STARTS = (2, 3, 4, 6, 10, 16)
_SHIFT = 32


class NgramDrafter:
    """`shortest`: tokens that must agree, 2 or more. The kind of a draft is the length of its match."""

    wants_features = False
    num_kinds = len(_KIND_STARTS)
    costly_kind = None

    def __init__(self, shortest: int = SHORTEST) -> None:
        if shortest < SHORTEST:
            raise ValueError(f"shortest={shortest}: must be {SHORTEST} or more")
        self.shortest = shortest
        self.kinds: list[int] = []
        self._texts: dict[str, _Text] = {}

    def propose(
        self, seqs: list[Sequence], limits: list[int], few: list[int] | None = None
    ) -> list[list[int]]:
        """See `Drafter.propose`; `kinds` then holds each draft's kind."""
        drafts, self.kinds = [], []
        for seq, limit in zip(seqs, limits, strict=True):
            text = self._texts.get(seq.request_id)
            if text is None:
                text = self._texts[seq.request_id] = _Text()
            text.read(seq.tokens)
            length, draft = text.look_up(seq.tokens, limit, self.shortest)
            drafts.append(draft)
            self.kinds.append(sum(length >= start for start in _KIND_STARTS) - 1)
        return drafts

    def observe(self, plan: Plan, result: StepResult) -> None:
        pass

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)


class _Text:
    """The index of one request. before[i]: the last place that ends with the same two tokens, or -1."""

    __slots__ = ("before", "last")

    def __init__(self) -> None:
        self.last: dict[int, int] = {}
        self.before: list[int] = []

    def read(self, tokens: list[int]) -> None:
        """Take in what was added since the last call."""
        before, last = self.before, self.last
        if not before:
            before.append(-1)
        for place in range(len(before), len(tokens)):
            pair = tokens[place - 1] << _SHIFT | tokens[place]
            before.append(last.get(pair, -1))
            last[pair] = place

    def look_up(self, tokens: list[int], limit: int, shortest: int) -> tuple[int, list[int]]:
        """Length of the longest match of the end with an earlier place, and what followed there.

        A match that overlaps the end goes on with what it has just drafted: a repetition repeats.
        """
        end = len(tokens) - 1
        place, best, found = self.before[end], shortest - 1, -1
        for _ in range(TRIES):
            if place < 0 or best >= LONGEST:
                break
            # A longer match than the best so far agrees in the token that ended that one.
            if place >= best and tokens[place - best] == tokens[end - best]:
                length = 2
                while length < LONGEST and place >= length and tokens[place - length] == tokens[end - length]:
                    length += 1
                if length > best:
                    best, found = length, place
            place = self.before[place]
        if found < 0:
            return 0, []
        draft = tokens[found + 1 : found + 1 + limit]
        period = end - found
        while len(draft) < limit:
            draft.append(draft[len(draft) - period])
        return best, draft
