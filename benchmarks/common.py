"""What the benchmark scripts share: real inputs, interleaved repeats, tables, the closing line of JSON."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

SHARED = Path(__file__).parents[2] / "shared"
WORKLOAD = SHARED / "peers" / "workload32.json"

console = Console(width=120)


class Job(NamedTuple):
    """One request of a throughput workload: its prompt, and how many tokens it must give."""

    prompt: list[int]
    output_len: int


def workload32(path: Path = WORKLOAD) -> list[Job]:
    """The 32 requests (4,966 tokens in, 2,575 out) where the file is present, else a seeded
    equivalent with the same sums: every comparison is within one run, on the same requests."""
    if path.exists():
        return [Job(r["prompt_ids"], r["output_len"]) for r in json.loads(path.read_text())["requests"]]
    rng = random.Random(0)
    inputs = _with_sum([rng.lognormvariate(4.8, 0.7) for _ in range(32)], 4966)
    outputs = _with_sum([rng.lognormvariate(4.3, 0.4) for _ in range(32)], 2575)
    return [
        Job([rng.randrange(100, 40_000) for _ in range(i)], o) for i, o in zip(inputs, outputs, strict=True)
    ]


def prompts(path: Path = WORKLOAD) -> tuple[list[int], list[int]]:
    """A prompt of 32 tokens for one request alone and one of 512 for prefill, like `workload32`."""
    if path.exists():
        found = json.loads(path.read_text())
        return found["single_ids"], found["prefill_ids"]
    rng = random.Random(1)
    single, prefill = ([rng.randrange(100, 40_000) for _ in range(length)] for length in (32, 512))
    return single, prefill


def _with_sum(values: Sequence[float], total: int) -> list[int]:
    scaled = [max(1, round(value * total / sum(values))) for value in values]
    scaled[0] += total - sum(scaled)
    return scaled


def interleave(
    runs: Mapping[str, Callable[[], float]],
    repeats: int,
    warm_up: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Each of `runs` in turn, `repeats` times; the order alternates so that drift cancels.

    `warm_up` may hold a shorter first run for some of them; the others warm up with a whole one.
    """
    names = list(runs)
    for name in names:
        (warm_up or {}).get(name, runs[name])()
    values: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            values[name].append(runs[name]())
            console.print(f"  {repeat + 1}/{repeats} {name}: {values[name][-1]:.4g}", highlight=False)
    return values


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median over repeats of a/b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    console.print(f"\n{title}", style="bold", highlight=False)
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row])
    console.print(table)


def finish(figures: Mapping[str, Any]) -> None:
    """The last line: every figure, for a machine."""
    print(json.dumps(figures))
