"""How much one step may hold: shrinks when memory runs out, recovers while steps go well.

Owns the two current limits and nothing else.
"""

from __future__ import annotations

STEPS_TO_RECOVER = 64


class StepLimits:
    """`rows` requests and `tokens` tokens a step, never above what the configuration allows."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self.rows, self.tokens = max_rows, max_tokens
        self._good_steps = 0

    @property
    def is_reduced(self) -> bool:
        return (self.rows, self.tokens) != (self._max_rows, self._max_tokens)

    def after_step(self, out_of_memory: bool) -> bool:
        """Halve after a step that ran out of memory, double after enough good ones.

        Returns whether the limits changed.
        """
        if out_of_memory:
            self.rows = max(1, self.rows // 2)
            self.tokens = max(self.rows, self.tokens // 2)
            self._good_steps = 0
            return True
        if not self.is_reduced:
            return False
        self._good_steps += 1
        if self._good_steps < STEPS_TO_RECOVER:
            return False
        self.rows = min(self._max_rows, self.rows * 2)
        self.tokens = min(self._max_tokens, self.tokens * 2)
        self._good_steps = 0
        return True

    def as_dict(self) -> dict[str, int]:
        return {"rows": self.rows, "tokens": self.tokens}
