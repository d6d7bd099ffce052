"""When requests are meant to start: seconds after the start of a run, decided before it.

Owns the processes. Knows neither prompts nor clocks; the same seed gives the same times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from perflab.errors import WorkloadError

ArrivalKind = Literal["at_once", "constant", "poisson", "gamma"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process of intended starts. `at_once` is a closed offline batch; the others are open loop.

    rate_per_s: mean requests per second. cv: coefficient of variation of the gaps of `gamma`
    (shape 1/cv²); 1 is Poisson, above it bursts. Raises WorkloadError for impossible values.
    """

    kind: ArrivalKind = "at_once"
    rate_per_s: float | None = None
    cv: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(ArrivalKind):
            raise WorkloadError(
                f"arrivals kind={self.kind!r}: choose one of {', '.join(get_args(ArrivalKind))}"
            )
        if self.kind != "at_once" and not (self.rate_per_s and self.rate_per_s > 0):
            raise WorkloadError(f"arrivals rate_per_s={self.rate_per_s}: {self.kind} needs a rate above 0")
        if self.cv <= 0:
            raise WorkloadError(f"arrivals cv={self.cv}: must be above 0")

    @property
    def open_loop(self) -> bool:
        """Whether starts are spread over time, whatever the server does."""
        return self.kind != "at_once"

    def times(self, n: int, seed: int = 0) -> list[float]:
        """`n` intended starts in seconds, the first at 0, never decreasing."""
        if self.kind == "at_once" or n == 0:
            return [0.0] * n
        assert self.rate_per_s is not None
        gap = 1 / self.rate_per_s
        rng = np.random.default_rng([seed, 0x61727269])
        if self.kind == "constant":
            gaps = np.full(n - 1, gap)
        elif self.kind == "poisson":
            gaps = rng.exponential(gap, n - 1)
        else:
            gaps = rng.gamma(1 / self.cv**2, gap * self.cv**2, n - 1)
        return [0.0, *np.cumsum(gaps).tolist()]
