"""Whether `perflab compare` can be trusted: no alarm without a cause, and every cause found.

Under background noise, a process that burns a core in stretches of random length:
live: an engine against itself; at most 3 of 20 may alarm at the 5 % level.
slowdown: against itself with a sleep of 15 % of each step; at least 18 of 20 must find it.
resampled: 1,000 comparisons of as many pairs, drawn from the recorded pairs of `live`; 2 % to 8 % alarm.
Each comparison takes at most a minute and is kept in a file, so that a benchmark that was stopped goes on.

    python -m benchmarks.ab                                # all of it, about 45 minutes
    python -m benchmarks.ab --part slowdown --count 3
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import console, finish, show
from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.load.engine_service import EngineService
from perflab.load.workloads import PromptEncoder
from perflab.measure.paired import compare_pairs
from perflab.models.load import load
from perflab.models.runners import make_runner
from perflab.studies.compare import Compare, Side, run_compare
from perflab.studies.compare_result import METRICS, slices_of
from perflab.studies.service_run import LoadChoice
from perflab.studies.store import read_run
from perflab.types import TokenEvent

SLOWER = 0.15
MINUTES = 0.75
"""For the pairs; with making engines, warm-up and writing a comparison stays below one minute."""

WORK = LoadChoice(input_tokens=32, output_tokens=8, requests=4)
"""About a tenth of a second on two cores: two runs in a row mostly meet the same noise."""

BURN = """
import random, sys, time
rng = random.Random(int(sys.argv[1]))
while True:
    end = time.perf_counter() + rng.uniform(0.1, 3.0)
    while time.perf_counter() < end:
        pass
    time.sleep(rng.uniform(0.1, 3.0))
"""


class Slowed(Engine):
    """Sleeps a share of every step that brought something."""

    def step(self) -> list[TokenEvent]:
        began = time.perf_counter()
        events = super().step()
        if events:
            time.sleep(SLOWER * (time.perf_counter() - began))
        return events


@contextmanager
def noise(seed: int) -> Iterator[None]:
    """A process that burns a core in stretches of 0.1 to 3 s, with pauses as long."""
    process = subprocess.Popen([sys.executable, "-c", BURN, str(seed)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


class Bench:
    """One model and its packed weights for all comparisons."""

    def __init__(self, weights: str) -> None:
        self.model = load("smollm2-135m", dtype="bf16", device="cpu")
        self.config = EngineConfig(weights=weights, max_model_len=512)  # type: ignore[arg-type]
        self.runner = make_runner(self.model, self.config)

    def side(self, name: str, kind: type[Engine]) -> Side:
        def make() -> EngineService:
            return EngineService(kind(self.model, self.config, runner=self.runner))

        return Side(name, make, PromptEncoder(self.model.encode, self.model.chat))

    def compare(self, other: type[Engine], number: int) -> dict[str, Any]:
        """One comparison under noise; its pairs of rates, its answer, how long it took."""
        began = time.perf_counter()
        compare = Compare(minutes=MINUTES, quality=False, seed=number, allow_invalid=True)
        with tempfile.TemporaryDirectory() as folder, noise(1000 + number):
            found = run_compare(
                self.side("A", Engine), self.side("B", other), WORK, compare, Path(folder) / "found"
            )
            took = time.perf_counter() - began
            runs = [read_run(Path(folder) / "found" / "runs" / side) for side in "ab"]
        if found.interrupted:
            raise KeyboardInterrupt
        rates = [[METRICS["tokens"].of(part) for part in slices_of(run)] for run in runs]
        return {
            "answer": found.answer,
            "ratio": found.found.ratio.value,
            "low": found.found.ratio.low,
            "high": found.found.ratio.high,
            "detectable": found.found.detectable,
            "spread": found.spread,
            "invalid": found.invalid,
            "pairs": found.pairs,
            "seconds": took,
            "others": runs[0].manifest["noise"]["others_share"],
            "rates": rates,
        }


def kept(bench: list[Bench], weights: str, part: str, count: int, out: Path) -> list[dict[str, Any]]:
    """The comparisons of a part: those in files, then new ones up to `count`."""
    found = []
    for number in range(count):
        file = out / f"{part}-{number:02d}.json"
        if not file.exists():
            if not bench:
                bench.append(Bench(weights))
            made = bench[0].compare(Slowed if part == "slowdown" else Engine, number)
            file.write_text(json.dumps(made), encoding="utf-8")
        found.append(json.loads(file.read_text(encoding="utf-8")))
        one = found[-1]
        console.print(
            f"  {part} {number + 1}/{count}: {one['answer']}, {one['ratio']:.3f}× "
            f"({one['low']:.3f} to {one['high']:.3f}), {one['pairs']} pairs, {one['seconds']:.0f} s",
            highlight=False,
        )
    return found


def resampled(live: Sequence[dict[str, Any]], count: int, seed: int = 0) -> float:
    """Share of alarms among `count` comparisons of pairs drawn from all recorded ones.

    As in a live one, which of the two counts as A is drawn by lot.
    """
    pool = [pair for one in live for pair in zip(*one["rates"], strict=True) if all(pair)]
    size = min(round(statistics.median(one["pairs"] for one in live)), len(pool))
    rng = random.Random(seed)
    alarms = 0
    for _ in range(count):
        drawn = [pair if rng.random() < 0.5 else pair[::-1] for pair in rng.sample(pool, size)]
        alarms += compare_pairs([a for a, _ in drawn], [b for _, b in drawn]).answer != "cannot tell"
    return alarms / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", choices=("live", "slowdown", "resampled"), help="default: all three")
    parser.add_argument("--count", type=int, default=20, help="comparisons of live and of slowdown")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--weights", default="int8-dynamic", choices=("model", "int8-dynamic", "int4"))
    parser.add_argument("--out", type=Path, default=Path("runs/ab"), help="where comparisons are kept")
    args = parser.parse_args()
    out = args.out / args.weights
    out.mkdir(parents=True, exist_ok=True)
    run = partial(kept, [], args.weights, count=args.count, out=out)
    rows: list[tuple[str, str, str]] = []
    figures: dict[str, Any] = {"benchmark": "ab", "weights": args.weights, "count": args.count}
    met = []
    taken: list[dict[str, Any]] = []
    if args.part in (None, "live", "resampled"):
        live = run("live")
        taken += live
    if args.part in (None, "live"):
        alarms = sum(one["answer"] != "cannot tell" for one in live)
        figures["live_alarms"] = alarms
        met.append(alarms <= 3 * args.count / 20)
        rows.append(
            ("live: alarms of an engine against itself", f"{alarms} of {len(live)}", "at most 3 of 20")
        )
    if args.part in (None, "resampled"):
        share = resampled(live, args.draws)
        figures["resampled_share"] = share
        met.append(0.02 <= share <= 0.08)
        rows.append((f"resampled: alarms of {args.draws}", f"{share:.1%}", "2 % to 8 %"))
    if args.part in (None, "slowdown"):
        slowed = run("slowdown")
        taken += slowed
        caught = sum(one["answer"] == "slower" for one in slowed)
        figures |= {"slowdown_found": caught, "slowdown_ratio": statistics.median(x["ratio"] for x in slowed)}
        met.append(caught >= 0.9 * args.count)
        rows.append((f"slowdown: {SLOWER:.0%} found", f"{caught} of {len(slowed)}", "at least 18 of 20"))
    longest = max(one["seconds"] for one in taken)
    figures["longest_s"] = longest
    met.append(longest <= 60)
    rows.append(("longest comparison", f"{longest:.0f} s", "at most 60 s"))
    for name in ("pairs", "spread", "detectable", "others"):
        figures[f"median_{name}"] = statistics.median(one[name] for one in taken)
    show("comparisons under a process that burns a core at random", ("", "found", "wanted"), rows)
    finish(figures | {"met": all(met)})


if __name__ == "__main__":
    main()
