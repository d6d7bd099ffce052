"""Greedy fp32 tokens of the engine against transformers' `generate()` of each prompt alone.

The grid is batching x chunk x prefix cache x pool, by transformers' modules and by native kernels, for
the embedded model on 48 real prompts and, smaller, for each random tiny architecture. The shape of a
batch alone moves fp32 logits by about 1e-4, so a divergence is excused where the two leading logits lie
closer than 5e-4, at most three times a configuration, each listed; the run then goes on with the
reference's token.

    python -m benchmarks.parity            # the whole grid, about an hour on two cores
    python -m benchmarks.parity --quick    # a few prompts and corners of the grid
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.common import SHARED, console, finish, show
from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.models import kernels
from perflab.models.load import load
from perflab.models.loaded import LoadedModel
from perflab.models.packing import why_not
from perflab.models.tiny import ARCHITECTURES, tiny
from perflab.types import Request, SamplingParams

TIE = 5e-4
MAX_EXCUSED = 3
PROMPTS = Path(__file__).parents[1] / "data" / "prompts"

BATCHING = ("static", "dynamic", "continuous")
CHUNK: tuple[int | None, ...] = (16, 256, None)
PREFIX = (True, False)
POOL = ("ample", "tight")
PATHS: Mapping[str, Any] = MappingProxyType(
    {
        "torch": {"runner": "torch"},
        "native": {"runner": "native"},
        "native attention": {"runner": "torch", "attention": "native"},
    }
)


class Cell(NamedTuple):
    """One configuration of the grid."""

    batching: str
    chunk: int | None  # tokens a step; None: prompts are never split
    prefix_cache: bool
    pool: str
    path: str = "torch"

    def config(self, tight_blocks: int, seats: int) -> EngineConfig:
        options: dict[str, Any] = {"chunked_prefill": False} if self.chunk is None else {}
        return EngineConfig(
            **PATHS[self.path],
            max_num_seqs=seats,
            max_num_batched_tokens=self.chunk or 512,
            batching=self.batching,  # type: ignore[arg-type]
            batch_timeout_s=0.01,
            prefix_cache=self.prefix_cache,
            num_blocks=tight_blocks if self.pool == "tight" else None,
            **options,
        )


GRID = [Cell(*cell) for cell in itertools.product(BATCHING, CHUNK, PREFIX, POOL)]
CORNERS = [
    Cell("continuous", 16, True, "tight"),
    Cell("continuous", 256, True, "ample"),
    Cell("dynamic", None, False, "tight"),
    Cell("static", 256, False, "ample"),
]


def by_each_path(cells: Sequence[Cell], model: LoadedModel) -> list[Cell]:
    """The same cells by transformers' modules and by as much of the native kernels as the model allows."""
    paths = ["torch"]
    if kernels.library() is not None:
        paths.append("native attention" if why_not(model.module) else "native")
    return [cell._replace(path=path) for path in paths for cell in cells]


@dataclass(slots=True)
class Verdict:
    """How one cell compared."""

    cell: Cell
    compared: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    excused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.wrong and len(self.excused) <= MAX_EXCUSED


@torch.inference_mode()
def generate_alone(model: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy answer to one prompt, unpadded: `count` tokens, end tokens masked."""
    ids = torch.tensor([prompt])
    out = model.module.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
    )
    return out[0, len(prompt) :].tolist()


class Reference:
    """What `generate()` says to each prompt alone, unpadded, and how sure it was."""

    def __init__(self, model: LoadedModel, prompts: Sequence[list[int]], count: int) -> None:
        self.model, self.prompts, self.count = model, prompts, count
        self.answers = [generate_alone(model, prompt, count) for prompt in prompts]

    @torch.inference_mode()
    def gap(self, number: int, position: int) -> float:
        """Distance between the two leading logits before the answer's token at `position`."""
        tokens = [*self.prompts[number], *self.answers[number][:position]]
        logits = self.model.module(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1].float()
        logits[list(self.model.stop_token_ids)] = float("-inf")
        best, second = logits.topk(2).values.tolist()
        return best - second


def check(cell: Cell, reference: Reference, tight_blocks: int, seats: int) -> Verdict:
    """Run every prompt through one configuration, and on from each excused divergence."""
    start = time.perf_counter()
    verdict = Verdict(cell)
    engine = Engine(reference.model, cell.config(tight_blocks, seats))
    done = [0] * len(reference.prompts)  # tokens of each answer already compared
    while any(compared < reference.count for compared in done):
        for number, tokens in _round(engine, reference, done):
            answer = reference.answers[number][done[number] :]
            same = next((i for i, (a, b) in enumerate(zip(tokens, answer, strict=True)) if a != b), None)
            if same is None:
                done[number] = reference.count
                continue
            position = done[number] + same
            gap = reference.gap(number, position)
            note = f"prompt {number}, token {position}: leading logits {gap:.1e} apart"
            (verdict.excused if gap < TIE else verdict.wrong).append(note)
            done[number] = position + 1 if gap < TIE else reference.count
    engine.check()
    assert engine.scheduler.kv.pool.num_used == 0
    verdict.compared = len(reference.prompts) * reference.count
    verdict.preemptions = sum(record.preemptions for record in engine.records)
    verdict.cached_tokens = sum(record.cached_tokens for record in engine.records)
    verdict.seconds = time.perf_counter() - start
    return verdict


def _round(engine: Engine, reference: Reference, done: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """The unfinished prompts, from where each stands; a first turn of one token fills the prefix cache."""
    open_prompts = [number for number, compared in enumerate(done) if compared < reference.count]
    tokens: dict[str, list[int]] = {}
    for warm_up in (True, False) if engine.config.prefix_cache else (False,):
        tokens = {}
        for number in open_prompts:
            left = 1 if warm_up else reference.count - done[number]
            prompt = [*reference.prompts[number], *reference.answers[number][: done[number]]]
            engine.submit(Request(str(number), prompt, SamplingParams(max_tokens=left, min_tokens=left)))
        while engine.has_work:
            for event in engine.step():
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
    yield from ((number, tokens[str(number)]) for number in open_prompts)


def real_prompts(model: LoadedModel, count: int, max_tokens: int = 300) -> list[list[int]]:
    """As many from MT-bench, GSM8K and HumanEval each where these are present, else the project's own."""
    sources: list[list[str]] = []
    data = SHARED / "data"
    if data.exists():
        lines = [json.loads(line) for line in (data / "mt_bench.jsonl").read_text().splitlines()]
        sources.append([(line.get("turns") or line.get("prompt"))[0] for line in lines])
        lines = [json.loads(line) for line in (data / "gsm8k_test.jsonl").read_text().splitlines()]
        sources.append([line["question"] for line in lines])
        with gzip.open(data / "HumanEval.jsonl.gz", "rt") as file:
            sources.append([json.loads(line)["prompt"] for line in file])
    else:
        for name in ("chat", "code", "chinese_english"):
            lines = [json.loads(line) for line in (PROMPTS / f"{name}.jsonl").read_text().splitlines()]
            sources.append([line["prompt"] for line in lines])
    prompts: list[list[int]] = []
    for source in sources:
        encoded = (model.chat(text) for text in source)
        short = (ids for ids in encoded if len(ids) <= max_tokens)
        prompts.extend(itertools.islice(short, -(-count // len(sources))))
    return prompts[:count]


def check_embedded(
    cells: Sequence[Cell], count: int, tokens: int, report: Callable[[Verdict], None]
) -> list[Verdict]:
    """The embedded model in fp32; the tight pool holds fewer of the longest requests than run at once:
    three beside many prompts, one and a half beside few."""
    model = load("smollm2-135m", dtype="fp32", device="cpu")
    prompts = real_prompts(model, count)
    reference = Reference(model, prompts, tokens)
    longest = max(map(len, prompts)) + tokens
    tight = -(-longest // 16) * 3 // (1 if count >= 16 else 2)
    return _check_all(by_each_path(cells, model), reference, tight_blocks=tight, seats=16, report=report)


def check_tiny(arch: str, cells: Sequence[Cell], report: Callable[[Verdict], None]) -> list[Verdict]:
    """A random model of one architecture on prompts of 1 to 70 tokens, two of them with one prefix."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, 256, (length,), generator=generator).tolist() for length in (1, 7, 16, 33, 70)
    ]
    prompts.append([*prompts[-1][:40], *prompts[1]])
    model = tiny(arch)
    reference = Reference(model, prompts, 24)
    return _check_all(by_each_path(cells, model), reference, tight_blocks=8, seats=6, report=report)


def _check_all(
    cells: Sequence[Cell],
    reference: Reference,
    tight_blocks: int,
    seats: int,
    report: Callable[[Verdict], None],
) -> list[Verdict]:
    verdicts = []
    for cell in cells:
        if cell.chunk is not None and cell.chunk < seats:
            raise ValueError(f"a budget of {cell.chunk} tokens cannot serve {seats} rows")
        verdicts.append(check(cell, reference, tight_blocks, seats))
        report(verdicts[-1])
    return verdicts


def _row(verdict: Verdict) -> tuple[Any, ...]:
    cell = verdict.cell
    word = "identical" if verdict.ok and not verdict.excused else "excused" if verdict.ok else "WRONG"
    return (
        cell.path,
        f"{cell.batching}, {cell.chunk or 'whole prompts'}",
        "on" if cell.prefix_cache else "off",
        cell.pool,
        word,
        len(verdict.excused),
        verdict.preemptions,
        verdict.cached_tokens,
        f"{verdict.seconds:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--skip-tiny", action="store_true")
    parser.add_argument("--skip-embedded", action="store_true")
    parser.add_argument("--part", default="1/1", help="2/3: every third configuration, from the second on")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    def say(verdict: Verdict) -> None:
        console.print("  " + "  ".join(map(str, _row(verdict))), highlight=False)

    cells, count, tokens = (CORNERS, 6, 24) if args.quick else (GRID, 48, 64)
    part, parts = map(int, args.part.split("/"))
    results: dict[str, list[Verdict]] = {}
    if not args.skip_embedded:
        chosen = cells[part - 1 :: parts]
        console.print(f"embedded model, {count} prompts, {tokens} tokens, {len(chosen)} configurations each")
        results["smollm2-135m"] = check_embedded(chosen, count, tokens, say)
    if not args.skip_tiny:
        torch.set_num_threads(1)
        for arch in ARCHITECTURES:
            results[f"tiny-{arch}"] = check_tiny(arch, CORNERS if args.quick else GRID, lambda verdict: None)
    columns = ("path", "batching, chunk", "prefix", "pool", "tokens", "excused", "preempted", "cached", "s")
    for name, verdicts in results.items():
        if name == "smollm2-135m":
            show(name, columns, [_row(verdict) for verdict in verdicts])
        for verdict in verdicts:
            for note in (*verdict.excused, *verdict.wrong):
                console.print(f"  {name}: {tuple(verdict.cell)}: {note}", highlight=False)
    summary = [
        (
            name,
            len(verdicts),
            sum(v.ok for v in verdicts),
            sum(len(v.excused) for v in verdicts),
            sum(len(v.wrong) for v in verdicts),
        )
        for name, verdicts in results.items()
    ]
    show("parity", ("model", "configurations", "identical or excused", "excused", "wrong"), summary)
    ok = all(verdict.ok for verdicts in results.values() for verdict in verdicts)
    finish(
        {
            "benchmark": "parity",
            "ok": ok,
            "models": {
                name: {"configurations": total, "ok": good, "excused": excused, "wrong": wrong}
                for name, total, good, excused, wrong in summary
            },
        }
    )
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
