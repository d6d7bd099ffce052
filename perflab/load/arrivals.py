"""When requests are meant to start: seconds after the start of a run, decided before it.

Owns the processes. Knows neither prompts nor clocks; the same seed gives the same times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from perflab.errors import WorkloadError

ArrivalKind = Literal["at_once", "constant", "poisson", "gamma", "bursts", "ramp", "steps"]

MAX_STARTS = 10_000_000
BATCH = 4096


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A process of intended starts. `at_once` is an offline batch; the others are open loop.

    rate_per_s: mean requests per second; of a `ramp`, its first rate. cv: coefficient of variation of
    the gaps of all but `constant` and `poisson` (gamma of shape 1/cv²): 1 is Poisson, above it gaps
    cluster, 0 spaces them evenly.

    Where the rate changes over time, gaps are drawn at rate 1 and the running sum is put through the
    inverse of the rate's integral (Çinlar 1975, inversion). `bursts`: requests come during `on_s` of
    each `on_s + off_s`, at the rate that keeps the mean. `ramp`: from `rate_per_s` to `to_rate_per_s`
    in `over_s`. `steps`: each of `rates_per_s` for `over_s`; the last rate goes on.

    Raises WorkloadError for impossible values.
    """

    kind: ArrivalKind = "at_once"
    rate_per_s: float | None = None
    cv: float = 1.0
    on_s: float = 1.0
    off_s: float = 1.0
    to_rate_per_s: float | None = None
    over_s: float | None = None
    rates_per_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates_per_s", tuple(self.rates_per_s))
        if self.kind not in get_args(ArrivalKind):
            raise WorkloadError(
                f"arrivals kind={self.kind!r}: choose one of {', '.join(get_args(ArrivalKind))}"
            )
        if self.kind not in ("at_once", "steps"):
            self._need("rate_per_s", self.rate_per_s)
        if self.kind == "ramp":
            self._need("to_rate_per_s", self.to_rate_per_s)
        if self.kind in ("ramp", "steps"):
            self._need("over_s", self.over_s)
        if self.kind == "steps" and not (self.rates_per_s and all(r > 0 for r in self.rates_per_s)):
            raise WorkloadError(f"arrivals rates_per_s={self.rates_per_s}: steps need rates above 0")
        if self.kind == "bursts" and not (self.on_s > 0 and self.off_s >= 0):
            raise WorkloadError(f"arrivals on_s={self.on_s}, off_s={self.off_s}: on_s must be above 0")
        if self.cv < 0 or (self.kind == "gamma" and self.cv == 0):
            raise WorkloadError(f"arrivals cv={self.cv}: must be above 0")

    def _need(self, name: str, value: float | None) -> None:
        if not (value and value > 0):
            raise WorkloadError(f"arrivals {name}={value}: {self.kind} needs a value above 0")

    @property
    def open_loop(self) -> bool:
        """Whether starts are spread over time, whatever the server does."""
        return self.kind != "at_once"

    def times(self, n: int | None = None, seed: int = 0, duration_s: float | None = None) -> list[float]:
        """`n` intended starts in seconds, or those before `duration_s`, the first at 0, never decreasing.

        With both, whichever ends first. Raises WorkloadError where neither ends them.
        """
        if n is None and (duration_s is None or not self.open_loop):
            raise WorkloadError("arrivals: give a number of requests, or for an open loop a duration_s")
        if duration_s is not None and duration_s <= 0:
            raise WorkloadError(f"duration_s={duration_s}: must be above 0")
        if not self.open_loop:
            return [0.0] * (n or 0)
        found: list[float] = []
        for batch in self._batches(seed):
            found += batch.tolist() if duration_s is None else batch[batch < duration_s].tolist()
            if n is not None and len(found) >= n:
                return found[:n]
            if duration_s is not None and batch[-1] >= duration_s:
                return found
            if len(found) > MAX_STARTS:
                raise WorkloadError(f"arrivals: more than {MAX_STARTS:,} requests in {duration_s} s")
        return found

    def _batches(self, seed: int) -> Iterator[np.ndarray]:
        """Starts without end, in seconds."""
        rng = np.random.default_rng([seed, 0x61727269])
        cv = {"constant": 0.0, "poisson": 1.0}.get(self.kind, self.cv)
        total = np.zeros(1)  # of gaps at rate 1; the first start is at 0
        while True:
            yield self._at(total)
            if cv == 0:
                gaps = np.ones(BATCH)
            elif cv == 1:
                gaps = rng.standard_exponential(BATCH)
            else:
                gaps = rng.standard_gamma(1 / cv**2, BATCH) * cv**2
            total = total[-1] + np.cumsum(gaps)

    def _at(self, total: np.ndarray) -> np.ndarray:
        """When the integral of the rate reaches each value."""
        if self.kind == "steps":
            assert self.over_s is not None
            rates = np.array(self.rates_per_s)
            reached = np.concatenate(([0.0], np.cumsum(rates[:-1] * self.over_s)))
            step = np.searchsorted(reached, total, side="right") - 1
            return step * self.over_s + (total - reached[step]) / rates[step]
        assert self.rate_per_s is not None
        if self.kind == "bursts":
            per_cycle = self.rate_per_s * (self.on_s + self.off_s)
            cycle = np.floor(total / per_cycle)
            return cycle * (self.on_s + self.off_s) + (total / per_cycle - cycle) * self.on_s
        if self.kind == "ramp":
            assert self.over_s is not None
            assert self.to_rate_per_s is not None
            first, last = self.rate_per_s, self.to_rate_per_s
            whole = (first + last) / 2 * self.over_s  # the integral over the ramp
            slope = (last - first) / self.over_s
            inside = np.minimum(total, whole)
            # the root of first·t + slope·t²/2 = u that stays finite for a slope of 0
            t = 2 * inside / (first + np.sqrt(np.maximum(first * first + 2 * slope * inside, 0.0)))
            return t + (total - inside) / last
        return total / self.rate_per_s
