"""How a decode step grows with context and with requests, beside what memory and arithmetic allow.

First one request at contexts from 128 to 4,096: the step should grow by little more than the time to
read the further keys and values. Then 1 to 64 requests: tokens/s beside the roofline's ceiling, with the
smallest change that the repeats can tell; they should never fall. Last the share of the step of 64
requests that is not the model's forward. Rounds are interleaved, figures are medians.

    python -m benchmarks.growth
    python -m benchmarks.growth --weights int8-dynamic --repeats 7
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from benchmarks.common import console, finish, show
from benchmarks.kernels import roof
from benchmarks.peers import ceilings, higher
from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.measure import stats
from perflab.measure.roofline import Sizes, decode, floor
from perflab.models import machine
from perflab.models.load import load
from perflab.types import Request, SamplingParams, StepRecord

CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
BATCH_CONTEXT = 128
WANTED_GROWTH = 1.25
WANTED_OUTSIDE = 0.10
WIDTH = 40


class Bench:
    """One engine that decodes `rows` requests in the middle of `context` tokens for `steps` steps.

    The same prompts come in every round, so that from the second on the prefix cache holds them.
    """

    def __init__(self, config: EngineConfig, dtype: str, steps: int) -> None:
        self.model = load("smollm2-135m", dtype=dtype, device="cpu")
        self.engine = Engine(self.model, config)
        self.steps = steps
        self._numbers = count()

    def decode(self, rows: int, context: int) -> list[StepRecord]:
        """The steps in which all rows, and nothing else, got a token."""
        for row in range(rows):
            rng = random.Random(1000 * context + row)
            prompt = [rng.randrange(100, 40_000) for _ in range(context - self.steps // 2)]
            params = SamplingParams(max_tokens=self.steps, ignore_eos=True)
            self.engine.submit(Request(str(next(self._numbers)), prompt, params))
        first = self.engine.steps[-1].index + 1 if self.engine.steps else 0
        while self.engine.has_work:
            self.engine.step()
        new = [step for step in self.engine.steps if step.index >= first]
        return [step for step in new if step.rows == rows and not step.prefill_tokens]


def step_s(steps: Sequence[StepRecord]) -> float:
    """Median seconds of a step, from its plan to the delivery of its tokens."""
    return statistics.median(step.delivered_ns - step.start_ns for step in steps) / 1e9


def outside_share(steps: Sequence[StepRecord]) -> float:
    """Median share of a step that is not the model's forward."""
    return statistics.median(
        1 - (step.forwarded_ns - step.batched_ns) / (step.delivered_ns - step.start_ns) for step in steps
    )


def growth(
    by_context: dict[int, list[float]], kv_bytes: float, bytes_per_s: Sequence[float]
) -> list[dict[str, Any]]:
    """For each context: how much longer than at the first its step is, over what reading takes.

    Both are of the same round, seconds apart, since memory may be faster in one minute than in the next.
    """
    first = min(by_context)
    lines: list[dict[str, Any]] = []
    for context, seconds in by_context.items():
        read = [(context - first) * kv_bytes / rate for rate in bytes_per_s]
        more = [s - base for s, base in zip(seconds, by_context[first], strict=True)]
        ratios = [m / r for m, r in zip(more, read, strict=True) if r]
        line: dict[str, Any] = {"context": context, "step_ms": 1e3 * statistics.median(seconds)}
        line |= {"read_ms": 1e3 * statistics.median(read), "rounds": ratios}
        lines.append({**line, "ratio": statistics.median(ratios) if ratios else None})
    return lines


def read_bytes_per_s() -> float:
    """The fastest read loop's, right now."""
    return 1e9 * max(filter(None, machine.measure_bandwidth()["sustained"].values()))


def batches(rates: dict[int, list[float]], ceiling: dict[int, float]) -> list[dict[str, Any]]:
    """For each batch: tokens/s, its ceiling, and whether it fell below the batch before."""
    lines: list[dict[str, Any]] = []
    for before, batch in zip([None, *rates], rates, strict=False):
        line: dict[str, Any] = {
            "batch": batch,
            "tok_s": statistics.median(rates[batch]),
            "ceiling_tok_s": ceiling[batch],
        }
        if before is not None:
            found = stats.compare(rates[before], rates[batch])
            assert found.ratio.value is not None
            fell = found.detectable is not None and found.ratio.value < 1 - found.detectable
            line |= {"ratio": found.ratio.value, "detectable": found.detectable, "fell": fell}
        lines.append(line)
    return lines


def bar(value: float, ceiling: float, most: float) -> str:
    """tokens/s as a bar up to a mark at the ceiling."""
    filled, end = (round(WIDTH * x / most) for x in (value, ceiling))
    return ("█" * filled).ljust(max(0, end - 1)) + ("|" if end > filled else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--weights", default="model", choices=("model", "int8-dynamic", "int4"))
    parser.add_argument("--kv-dtype", default="model", choices=("model", "int8"))
    parser.add_argument("--runner", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a sample")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = EngineConfig(
        max_num_seqs=max(BATCHES),
        num_blocks=2048,
        runner=args.runner,
        weights=args.weights,
        kv_dtype=args.kv_dtype,
        num_threads=args.threads,
    )
    bench = Bench(config, args.dtype, args.steps)
    before = ceilings()
    by_context: dict[int, list[float]] = {context: [] for context in CONTEXTS}
    rates: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    outside: list[float] = []
    reading: list[float] = []
    for context in CONTEXTS:
        bench.decode(1, context)
    for batch in BATCHES:
        bench.decode(batch, BATCH_CONTEXT)
    for number in range(args.repeats):
        turn = -1 if number % 2 else 1
        start = read_bytes_per_s()
        for context in CONTEXTS[::turn]:
            by_context[context].append(step_s(bench.decode(1, context)))
        reading.append(max(start, read_bytes_per_s()))
        for batch in BATCHES[::turn]:
            steps = bench.decode(batch, BATCH_CONTEXT)
            rates[batch].append(batch / step_s(steps))
        outside.append(outside_share(bench.decode(max(BATCHES), BATCH_CONTEXT)))
        console.print(f"  round {number + 1} of {args.repeats} done", highlight=False)
    reads, matrix = map(higher, before, ceilings())

    weights, kv = (args.dtype if chosen == "model" else chosen for chosen in (args.weights, args.kv_dtype))
    sizes = Sizes.of(bench.model.config)
    limits = roof(reads, matrix, weights if weights in ("bf16", "fp32") else "int8")
    grown = growth(by_context, sizes.kv_bytes(kv), reading)
    ceiling = {b: b / floor(decode(sizes, b, BATCH_CONTEXT, weights, kv), limits).seconds for b in BATCHES}
    curve = batches(rates, ceiling)
    title = f"{weights} weights, {kv} KV, {args.runner} runner, {args.threads} threads"
    at = f"{sizes.kv_bytes(kv) / 1e3:.1f} kB a token at {statistics.median(reading) / 1e9:.1f} GB/s"
    show(
        f"one request, {title}; {at}",
        (
            "context",
            "step ms",
            "to read the further KV, ms",
            f"growth over reading (wanted ≤ {WANTED_GROWTH})",
        ),
        [(x["context"], x["step_ms"], x["read_ms"], x["ratio"] or "–") for x in grown],
    )
    most = max(line["ceiling_tok_s"] for line in curve)
    show(
        f"requests at context {BATCH_CONTEXT}, {title}",
        (
            "tok/s up to the ceiling",
            "requests",
            "tok/s",
            "ceiling",
            "share",
            "÷ before",
            "detectable",
            "fell",
        ),
        [
            (
                bar(line["tok_s"], line["ceiling_tok_s"], most),
                *(line["batch"], line["tok_s"], line["ceiling_tok_s"]),
                f"{line['tok_s'] / line['ceiling_tok_s']:.0%}",
                *(line.get(key, "–") for key in ("ratio", "detectable", "fell")),
            )
            for line in curve
        ],
    )
    share = statistics.median(outside)
    show(
        f"a step of {max(BATCHES)} requests",
        ("", "share", "wanted"),
        [("outside the model", f"{share:.1%}", f"≤ {WANTED_OUTSIDE:.0%}")],
    )
    finish(
        {
            "benchmark": "growth",
            "weights": weights,
            "kv": kv,
            "runner": args.runner,
            "read_gb_s": [rate / 1e9 for rate in reading],
            "matrix_gop_s": limits.operations_per_s / 1e9,
            "contexts": grown,
            "batches": curve,
            "outside_model_share": share,
            "wanted": {"growth": WANTED_GROWTH, "outside": WANTED_OUTSIDE},
            "met": {
                "growth": grown[-1]["ratio"] <= WANTED_GROWTH,
                "never falls": not any(line.get("fell") for line in curve),
                "outside": share <= WANTED_OUTSIDE,
            },
        }
    )


if __name__ == "__main__":
    main()
