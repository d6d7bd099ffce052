"""Writes the two arrival traces of this folder: `python data/traces/make_traces.py [FOLDER]`.

Owns the shape of synthetic traffic: when requests arrive and how long they are. Knows nothing of
engines; a trace is three columns, arrival_s, input_tokens and output_tokens. The figures aimed at
are published statistics of production services (see README.md), not rows of them.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Lengths:
    """Log-normal token counts, drawn anew above `most`: services cap their context."""

    mu: float
    sigma: float
    most: int

    def draw(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        values = np.empty(0)
        while len(values) < rows:
            drawn = np.rint(rng.lognormal(self.mu, self.sigma, 2 * rows))
            values = np.append(values, drawn[(drawn >= 1) & (drawn <= self.most)])
        return values[:rows].astype(int)


def gamma_gaps(rng: np.random.Generator, rows: int, cv: float) -> np.ndarray:
    """Gaps of mean 1 and coefficient of variation `cv`: gamma with shape 1/cv² and scale cv²."""
    return rng.gamma(1 / cv**2, cv**2, rows)


def modulated(ticks: np.ndarray, rate: float, swing: float, period_s: float) -> np.ndarray:
    """Arrival times in seconds of unit-rate `ticks` under the rate r(t) = rate·(1 + swing·sin(2πt/period)).

    Solves ∫₀ᵗ r = tick for each tick on a fine grid (time rescaling). The slow wave gives counts
    over a minute more spread than the gaps alone would.
    """
    omega = 2 * np.pi / period_s
    grid = np.linspace(0, 2 * ticks[-1] / rate + period_s, 200_000)
    expected = rate * (grid + swing / omega * (1 - np.cos(omega * grid)))
    return np.interp(ticks, expected, grid)


def chat_arrivals(rng: np.random.Generator, rows: int) -> np.ndarray:
    """A steady service: nearly Poisson from second to second, drifting over minutes."""
    return modulated(np.cumsum(gamma_gaps(rng, rows, cv=1.04)), rate=5.53, swing=0.35, period_s=90)


def code_arrivals(rng: np.random.Generator, rows: int) -> np.ndarray:
    """On/off bursts: many editors at once, then almost nobody for a minute.

    Of n gaps with k long silences among them CV² ≈ n/k, so a burst of about 200 requests between
    silences brings the CV to 12 or 13. Within a burst the pace itself changes from stretch to stretch.
    """
    gaps: list[float] = []
    while len(gaps) < rows:
        size = int(rng.integers(170, 240))
        stretches = np.repeat(rng.gamma(2.0, 0.5, size // 15 + 1), 15)[:size] + 0.15
        burst = gamma_gaps(rng, size, cv=1.3) / (24.0 * stretches)
        burst[0] = rng.gamma(12.0, 68 / 12)  # the silence before this burst, in seconds
        gaps.extend(burst)
    gaps[0] = 0.0
    return np.cumsum(gaps[:rows])


TRACES = {
    "chat": (chat_arrivals, 1000, Lengths(6.63, 0.985, 6000), Lengths(5.02, 0.859, 650), 3),
    "code": (code_arrivals, 1000, Lengths(7.00, 1.36, 7500), Lengths(2.79, 0.847, 500), 20261),
}


def make(name: str) -> list[tuple[str, int, int]]:
    """Rows of the trace `name`, sorted by arrival; the same on every call."""
    arrive, rows, inputs, outputs, seed = TRACES[name]
    rng = np.random.default_rng(seed)
    times = arrive(rng, rows)
    times = times - times[0]
    columns = zip(times, inputs.draw(rng, rows), outputs.draw(rng, rows), strict=True)
    return [(f"{time:.4f}", int(tokens_in), int(tokens_out)) for time, tokens_in, tokens_out in columns]


def write(folder: Path) -> list[Path]:
    """Write NAME.csv for every trace into `folder`; returns the paths."""
    paths = []
    for name in TRACES:
        path = folder / f"{name}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["arrival_s", "input_tokens", "output_tokens"])
            writer.writerows(make(name))
        paths.append(path)
    return paths


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    for path in write(target):
        print(path)
