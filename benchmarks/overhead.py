"""What the engine costs beside the model.

First the share of a step that is not the model's forward, by the engine's own spans, at batch 16
with the embedded model. Then plan and commit alone on a model that does nothing, at batch 64, with
block hashing and records on, in request-rows per second.

    python -m benchmarks.overhead
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import finish, show
from perflab.clock import WallClock
from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.engine.plan import Plan, StepResult
from perflab.models.load import load
from perflab.types import Request, SamplingParams, StepRecord

PARTS = {
    "plan": ("start_ns", "planned_ns"),
    "batch tensors": ("planned_ns", "batched_ns"),
    "forward": ("batched_ns", "forwarded_ns"),
    "sample": ("forwarded_ns", "sampled_ns"),
    "commit": ("sampled_ns", "committed_ns"),
    "detokenize, deliver": ("committed_ns", "delivered_ns"),
}
WANTED_SHARE = 0.10
WANTED_ROWS = 300_000


class NoModel:
    """Answers every row with token 7 at once."""

    vocab_size = 32_000

    def run(self, plan: Plan) -> StepResult:
        return StepResult([[7] if samples else [] for samples in plan.samples])

    def wipe(self, blocks: list[int]) -> None:
        pass

    def self_test(self) -> None:
        pass


def step_parts(dtype: str, batch: int, steps: int) -> dict[str, float]:
    """Median microseconds of each part over decode steps of a full batch."""
    model = load("smollm2-135m", dtype=dtype, device="cpu")
    engine = Engine(model, EngineConfig(max_num_seqs=batch, prefix_cache=True))
    text = "The quick brown fox jumps over the lazy dog while the engine counts what a step costs. "
    for number in range(batch):
        ids = model.encode(f"{number}: {text}" * 4)
        engine.submit(Request(str(number), ids, SamplingParams(max_tokens=steps, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    full = [s for s in engine.steps if s.rows == batch and s.prefill_tokens == 0]
    return {name: statistics.median(_span(s, *ends) for s in full) / 1e3 for name, ends in PARTS.items()}


def _span(step: StepRecord, start: str, end: str) -> int:
    return getattr(step, end) - getattr(step, start)


def bare_rows_per_second(batch: int, tokens: int) -> float:
    """What a loop that only appends tokens reaches: the ceiling of Python here."""
    lists: list[list[int]] = [[] for _ in range(batch)]
    start = time.perf_counter()
    for _ in range(tokens):
        plan = [(row, 1) for row in lists]
        for row, _count in plan:
            row.append(7)
    return batch * tokens / (time.perf_counter() - start)


def scheduler_rows_per_second(batch: int, tokens: int) -> dict[str, float]:
    """Rows per second of plan and commit, and of the whole step with delivery and step records."""
    model: Any = SimpleNamespace(
        fingerprint="none", tokenizer=None, stop_token_ids=(0,), max_model_len=8192, name="none"
    )
    config = EngineConfig(max_num_seqs=batch, max_num_batched_tokens=16_384, num_blocks=batch * 64)
    engine = Engine(model, config.resolve(model_max_len=8192, kv_bytes_per_token=1), WallClock(), NoModel())
    for number in range(batch):
        prompt = [number + 1] * 64
        engine.submit(Request(str(number), prompt, SamplingParams(max_tokens=tokens)))
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    whole = time.perf_counter() - start
    steps = engine.steps[1:]
    rows = sum(step.rows for step in steps)
    spent = sum(
        step.planned_ns - step.start_ns + step.committed_ns - max(step.sampled_ns, step.planned_ns)
        for step in steps
    )
    assert rows == batch * (tokens - 1)
    assert engine.scheduler.kv.pool.num_cached > 0, "blocks were hashed"
    return {"plan and commit": rows / (spent / 1e9), "whole step": rows / whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-model", action="store_true", help="only plan and commit")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures: dict[str, Any] = {"benchmark": "overhead"}
    if not args.no_model:
        parts = step_parts(args.dtype, args.batch, args.steps)
        total = sum(parts.values())
        rows = [(name, us, us / total) for name, us in parts.items()]
        share = 1 - parts["forward"] / total
        rows.append(("outside the model", total - parts["forward"], share))
        title = f"one decode step of {args.batch} rows, {args.dtype}, {args.threads} threads"
        show(title, ("part", "µs (median)", "share"), rows)
        figures |= {"step_us": parts, "outside_model_share": share, "wanted_share": WANTED_SHARE}
    runs = [scheduler_rows_per_second(64, 960) for _ in range(5)]
    rates = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    rates["a bare loop"] = statistics.median(bare_rows_per_second(64, 960) for _ in range(5))
    show(
        f"64 rows, no model (wanted: {WANTED_ROWS:,} rows/s of plan and commit)",
        ("", "rows/s"),
        [(name, f"{rate:,.0f}") for name, rate in rates.items()],
    )
    finish(figures | {"rows_per_s": rates, "wanted_rows_per_s": WANTED_ROWS})


if __name__ == "__main__":
    main()
