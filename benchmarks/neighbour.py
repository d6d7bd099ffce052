"""How much throughput is left when another process keeps one of two cores busy.

Both this engine and the neighbour are held to the same two cores, the neighbour to the second of them.
Rounds are interleaved: undisturbed, beside the neighbour, and the other way round. A fair share beside
one busy process is a half to two thirds; threads that wait by spinning fall off a cliff.

    python -m benchmarks.neighbour
    python -m benchmarks.neighbour --runner torch --weights model
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

from benchmarks.common import finish, interleave, paired_ratio, prompts, show
from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.models.load import load
from perflab.types import Request, SamplingParams

WANTED = 0.40
BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"


@contextmanager
def busy(core: int) -> Iterator[None]:
    """A process that computes on `core` and does nothing else, from when it does so."""
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(core)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", default="model,int8-dynamic", help="schemes, commas between")
    parser.add_argument("--runner", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--tokens", type=int, default=48, help="output tokens of a request")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("this system cannot hold a process to a core")
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one that both use, one for this engine alone")
    os.sched_setaffinity(0, cores)  # threads that start from here on inherit it
    model, (prompt, _), numbers = load("smollm2-135m", dtype=args.dtype, device="cpu"), prompts(), count()

    def rate(engine: Engine, batch: int) -> float:
        """Output tokens/s of `batch` requests that come at once."""
        params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
        start = time.perf_counter()
        for _ in range(batch):
            engine.submit(Request(str(next(numbers)), prompt, params))
        while engine.has_work:
            engine.step()
        return batch * args.tokens / (time.perf_counter() - start)

    def beside(engine: Engine, batch: int) -> float:
        with busy(cores[1]):
            return rate(engine, batch)

    lines: list[dict[str, Any]] = []
    for weights in args.weights.split(","):
        config = EngineConfig(
            max_num_seqs=16, prefix_cache=False, runner=args.runner, weights=weights, num_threads=2
        )
        engine = Engine(model, config)
        for batch in map(int, args.batches.split(",")):
            who = f"{weights}, {batch} requests"
            found = interleave(
                {
                    f"{who}, undisturbed": partial(rate, engine, batch),
                    f"{who}, beside a busy process": partial(beside, engine, batch),
                },
                args.repeats,
            )
            alone, disturbed = found.values()
            line = {"weights": weights, "batch": batch, "alone_tok_s": statistics.median(alone)}
            line |= {"beside_tok_s": statistics.median(disturbed), "share": paired_ratio(disturbed, alone)}
            lines.append(line)
    show(
        f"tokens/s beside a process on one of two cores, {args.runner} runner, {args.dtype}",
        ("weights", "requests", "undisturbed", "beside", f"kept (wanted ≥ {WANTED:.0%})"),
        [(x["weights"], x["batch"], x["alone_tok_s"], x["beside_tok_s"], f"{x['share']:.0%}") for x in lines],
    )
    met = all(line["share"] >= WANTED for line in lines)
    finish({"benchmark": "neighbour", "runner": args.runner, "wanted": WANTED, "lines": lines, "met": met})


if __name__ == "__main__":
    main()
