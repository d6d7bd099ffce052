"""Output tokens per second on 32 requests, at most 16 at once, beside two ways of transformers.

All in one process, interleaved, on the same model, dtype and requests: transformers' continuous
batching, its `generate()` in static batches of 16, this engine, and this engine one at a time.

    python -m benchmarks.throughput --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.common import Job, finish, interleave, paired_ratio, show, workload32
from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.models.load import load
from perflab.models.loaded import LoadedModel
from perflab.types import Request, SamplingParams

SLOTS = 16
SAMPLE = 4  # requests that stand for the workload where one at a time would take minutes
PEERS = {"transformers continuous batching": 2.0, "transformers generate, batches of 16": 1.3}


def engine_run(model: LoadedModel, all_jobs: list[Job], **options: Any) -> Callable[..., float]:
    """One engine, reused; the prefix cache is off so that repeats measure the same work."""
    engine = Engine(model, EngineConfig(prefix_cache=False, **options))
    runs = iter(range(1_000_000))

    def run(jobs: list[Job] = all_jobs) -> float:
        index = next(runs)
        start = time.perf_counter()
        for number, job in enumerate(jobs):
            params = SamplingParams(max_tokens=job.output_len, ignore_eos=True)
            engine.submit(Request(f"{index}-{number}", job.prompt, params))
        tokens = 0
        while engine.has_work:
            tokens += sum(len(event.token_ids) for event in engine.step())
        seconds = time.perf_counter() - start
        assert tokens == sum(job.output_len for job in jobs)
        return tokens / seconds

    return run


def generate_run(module: Any, all_jobs: list[Job], pad: int) -> Callable[..., float]:
    """Static batches: left-padded, each runs until its longest answer is done."""

    def run(jobs: list[Job] = all_jobs) -> float:
        start = time.perf_counter()
        for first in range(0, len(jobs), SLOTS):
            batch = jobs[first : first + SLOTS]
            width = max(len(job.prompt) for job in batch)
            ids = torch.full((len(batch), width), pad)
            mask = torch.zeros(len(batch), width, dtype=torch.long)
            for row, job in enumerate(batch):
                ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
                mask[row, width - len(job.prompt) :] = 1
            length = max(job.output_len for job in batch)
            with torch.inference_mode():
                module.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=False,
                    min_new_tokens=length,
                    max_new_tokens=length,
                )
        return sum(job.output_len for job in jobs) / (time.perf_counter() - start)

    return run


def continuous_batching_run(module: Any, all_jobs: list[Job], pad: int) -> Callable[..., float]:
    """transformers' own continuous batching, with as many slots and a budget like the engine's.

    Its manager lives for one run only: the thread it keeps would take time from the others.
    """
    greedy = GenerationConfig(do_sample=False, max_new_tokens=128, eos_token_id=-1, pad_token_id=pad)
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=SLOTS,
        max_batch_tokens=512,
        num_blocks=64,
        page_size=256,
        use_cuda_graph=False,
        allow_block_sharing=False,
    )

    def run(jobs: list[Job] = all_jobs) -> float:
        manager = module.init_continuous_batching(
            generation_config=greedy, continuous_batching_config=batching
        )
        manager.start()
        try:
            start = time.perf_counter()
            for number, job in enumerate(jobs):
                manager.add_request(list(job.prompt), request_id=str(number), max_new_tokens=job.output_len)
            tokens, left = 0, len(jobs)
            while left:
                result = manager.get_result(timeout=300)
                if result is None:
                    raise RuntimeError("transformers' continuous batching gave no result for 300 s")
                if result.is_finished():
                    left -= 1
                    tokens += len(result.generated_tokens)
            seconds = time.perf_counter() - start
        finally:
            manager.stop(block=True)
        assert tokens == sum(job.output_len for job in jobs)
        return tokens / seconds

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--engine-only", action="store_true", help="leave transformers out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load("smollm2-135m", dtype=args.dtype, device="cpu")
    jobs = workload32()
    pad = model.stop_token_ids[0]
    runs = {
        "perflab": engine_run(model, jobs),
        "perflab, one at a time": engine_run(model, jobs[:SAMPLE], max_num_seqs=1),
    }
    if not args.engine_only:
        peers = (continuous_batching_run(model.module, jobs, pad), generate_run(model.module, jobs, pad))
        runs = dict(zip(PEERS, peers, strict=True)) | runs
    warm_up = {name: partial(run, jobs[:4]) for name, run in runs.items()}
    values = interleave(runs, args.repeats, warm_up)
    ours = values["perflab"]
    rows = [
        (
            name,
            statistics.median(v),
            f"{min(v):.1f} to {max(v):.1f}",
            paired_ratio(ours, v),
            PEERS.get(name, ""),
        )
        for name, v in values.items()
    ]
    title = f"32 requests, {args.dtype}, {args.threads} threads, {args.repeats} interleaved runs"
    show(title, ("", "output tok/s", "range", "perflab is × this", "wanted"), rows)
    finish(
        {
            "benchmark": "throughput",
            "dtype": args.dtype,
            "threads": args.threads,
            "output_tok_s": {name: statistics.median(v) for name, v in values.items()},
            "ratio": {name: paired_ratio(ours, v) for name, v in values.items() if name != "perflab"},
        }
    )


if __name__ == "__main__":
    main()
