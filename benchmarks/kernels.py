"""The native kernels one by one: GB/s and 10^9 operations/s beside what the machine can do.

Linears in the shapes of the embedded model, from one row to prefill, and attention straight over a
paged pool. Weights and keys come cold: calls cycle through copies that exceed the last-level cache
several times. Each figure is the median of interleaved repeats; `of floor` is the roofline's least time
(bytes over the fastest read loop, operations over the matrix rate of the format) over the measured one.
Beside linears in bf16 and fp32: oneDNN's packed linear through torch, on the same shape.

    python -m benchmarks.kernels
    python -m benchmarks.kernels --formats int8-dynamic --shapes 960x576,576x1536 --rows 1,16 --no-attention
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import console, finish, show
from benchmarks.peers import Rates, ceilings, higher
from perflab.measure.roofline import Ceilings, Work, floor
from perflab.models import kernels
from perflab.models.kernels import FORMATS, KV_FORMATS, Team, address
from perflab.models.linears import PackedLinear
from perflab.models.native import StepRows
from perflab.models.packing import pack_matrix

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49_152, 576))
ROWS = (1, 2, 4, 8, 14, 16, 32, 64, 128, 512)
WARM_ROWS = 64  # from here on arithmetic binds, and one copy will do
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16
DECODES = tuple((rows, context) for rows in (1, 16, 64) for context in (128, 1024, 4096))
PREFILLS = (64, 512, 2048)
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KV_DTYPES = {"fp32": np.float32, "bf16": np.uint16, "int8": np.int8}
SAMPLE_S = 0.01  # a sample is as many calls as take so long
SETTLE_S = 0.02

Calls = Sequence[Callable[[], object]]


class Case(NamedTuple):
    """One kernel on one shape: how to call it on each of its copies, and what it cannot do without."""

    label: str
    rows: int
    calls: dict[str, Calls]  # by who runs it: native, oneDNN
    work: Work
    rate: str  # the kind of matrix product that bounds it
    alive: object  # what the calls' pointers lead to


def roof(reads: Rates, rates: Rates, kind: str) -> Ceilings:
    """The fastest read loop and a matrix rate; int8's where it is, as for int4."""
    rate = rates.get(kind) or rates["fp32"]
    assert rate is not None
    return Ceilings(max(filter(None, reads.values())) * 1e9, rate * 1e9)


def cold_bytes() -> int:
    """Bytes of copies to cycle through: six times the last-level cache, 64 MiB at least."""
    sizes = [64 << 20]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K"):
            sizes.append(6 * int(text[:-1]) << 10)
    return min(max(sizes), 1 << 30)


def copies(size: int, rows: int = 1) -> int:
    return 1 if rows >= WARM_ROWS else -(-cold_bytes() // size)


def linear_cases(team: Team, format: str, n: int, k: int, rows: Sequence[int]) -> list[Case]:
    rng = np.random.default_rng(0)
    data, scale = pack_matrix(format, rng.standard_normal((n, k), np.float32))
    number = max(copies(data.nbytes, r) for r in rows)
    datas = [kernels.aligned(data.nbytes) for _ in range(number)]
    for copy in datas:
        copy[:] = data
    matrices = [kernels.Matrix(FORMATS[format], n, k, address(d), address(scale), None) for d in datas]
    packed: list[PackedLinear] = []
    if format in TORCH_DTYPES:
        linear = torch.nn.Linear(k, n, bias=False, dtype=TORCH_DTYPES[format]).requires_grad_(False)
        packed = [PackedLinear(linear) for _ in range(number)]
    cases = []
    for r in rows:
        x, out = rng.standard_normal((r, k), np.float32), np.empty((r, n), np.float32)
        output, used = kernels.Output(address(out), n, kernels.STORE, FORMATS["fp32"]), copies(data.nbytes, r)
        calls: dict[str, Calls] = {
            "native": [
                partial(team.call, "pl_multiply", byref(matrix), address(x), r, byref(output))
                for matrix in matrices[:used]
            ]
        }
        if packed:
            y = torch.from_numpy(x).to(TORCH_DTYPES[format])
            calls["oneDNN"] = [partial(one, y) for one in packed[:used]]
        rate = format if format in TORCH_DTYPES else "fp32" if format == "int8" else "int8"
        work = Work(data.nbytes, 2.0 * r * n * k)
        cases.append(Case(f"{n}×{k}", r, calls, work, rate, (x, out, datas, scale)))
    return cases


def attention_case(team: Team, kv: str, rows: int, queries: int, context: int) -> Case:
    """`rows` requests that bring `queries` tokens each, the last ones of `context`."""
    blocks, tokens, width = -(-context // BLOCK), rows * queries, HEADS * HEAD_DIM
    slots = rows * blocks * KV_HEADS * BLOCK
    scaled = kv == "int8"
    size = 2 * slots * (HEAD_DIM * np.dtype(KV_DTYPES[kv]).itemsize + 4 * scaled)
    layers = copies(size, queries)
    pools = [np.zeros((layers, slots, HEAD_DIM), KV_DTYPES[kv]) for _ in range(2)]
    scales = [np.ones((layers, slots), np.float32) if scaled else None for _ in range(2)]
    rng = np.random.default_rng(0)
    step_rows = StepRows(
        token_ids=np.zeros(tokens, np.int64),
        query_start=np.arange(0, tokens + 1, queries, dtype=np.int32),
        kv_len=np.full(rows, context, np.int32),
        tables=rng.permutation(rows * blocks).astype(np.int32).reshape(rows, blocks),
        sample_rows=np.empty(0, np.int32),
    )
    query, key, value = (
        rng.standard_normal((tokens, heads, HEAD_DIM), np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    out, step = np.empty_like(query), step_rows.struct()
    pool = kernels.Pool(
        *map(address, (*pools, *scales)), KV_FORMATS[kv], rows * blocks, BLOCK, KV_HEADS, HEAD_DIM, HEAD_DIM
    )
    attention = kernels.Attention(
        address(query), width, HEADS, 0, HEAD_DIM**-0.5, 0.0, None, address(out), width, FORMATS["fp32"]
    )
    calls = [
        partial(
            team.call,
            *("pl_attend", byref(pool), layer, byref(step), address(key), address(value), byref(attention)),
        )
        for layer in range(layers)
    ]
    pairs = rows * sum(range(context - queries + 1, context + 1))
    work = Work(size, 4.0 * width * pairs)
    label = f"{kv} KV, {f'context {context}' if queries == 1 else f'prompt of {queries}'}"
    alive = (pools, scales, step_rows, query, key, value, out)
    return Case(label, rows, {"native": calls}, work, "fp32" if kv == "fp32" else "bf16", alive)


def measure(cases: Sequence[Case], repeats: int) -> list[dict[str, float]]:
    """Median seconds of one call for each case, by who runs it; all of them in turn, `repeats` times."""
    timers = [
        (place, who, _timer(calls)) for place, case in enumerate(cases) for who, calls in case.calls.items()
    ]
    found: dict[tuple[int, str], list[float]] = {(place, who): [] for place, who, _ in timers}
    for repeat in range(repeats):
        for place, who, timer in timers if repeat % 2 == 0 else reversed(timers):
            found[place, who].append(timer())
    return [
        {who: statistics.median(found[place, who]) for who in case.calls} for place, case in enumerate(cases)
    ]


def _timer(calls: Calls) -> Callable[[], float]:
    """Seconds of one call, over as many as fill `SAMPLE_S`; goes on from copy to copy across samples."""
    turn, number = cycle(calls), 1
    while (each := _per_call(turn, number)) * number < SAMPLE_S:
        number = max(2 * number, int(SAMPLE_S / each))
    return partial(_per_call, turn, number)


def _per_call(turn: Iterator[Callable[[], object]], number: int) -> float:
    """Torch's threads stay awake for some milliseconds after their last work: they are waited for."""
    time.sleep(SETTLE_S)
    next(turn)()
    start = time.perf_counter()
    for call in islice(turn, number):
        call()
    return (time.perf_counter() - start) / number


def rows_of(
    kernel: str, cases: Sequence[Case], seconds: Sequence[dict[str, float]], reads: Rates, rates: Rates
) -> list[dict[str, Any]]:
    """One line of figures for each case."""
    lines = []
    for case, found in zip(cases, seconds, strict=True):
        own, other = found["native"], found.get("oneDNN")
        lines.append(
            {
                "kernel": kernel,
                "shape": case.label,
                "rows": case.rows,
                "us": 1e6 * own,
                "gb_s": case.work.bytes / own / 1e9,
                "gop_s": case.work.operations / own / 1e9,
                "share": floor(case.work, roof(reads, rates, case.rate)).share(own),
                "onednn_us": other and 1e6 * other,
            }
        )
    return lines


def table(title: str, lines: Sequence[dict[str, Any]]) -> None:
    beside = any(line["onednn_us"] for line in lines)
    columns = ["shape", "rows", "µs", "GB/s", "GOP/s", "of floor"] + beside * ["oneDNN µs", "oneDNN ÷ ours"]
    rows = []
    for line in lines:
        row = [line["shape"], line["rows"], line["us"], line["gb_s"], line["gop_s"], f"{line['share']:.0%}"]
        rows.append(row + beside * [line["onednn_us"], f"{(line['onednn_us'] or 0.0) / line['us']:.2f}"])
    show(title, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS), help="of weights")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES), help="outputs x inputs")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", help="avx512_bf16, avx512, avx2 or plain instead of the best")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if kernels.library() is None:
        raise SystemExit(kernels.why_missing())
    team = Team(args.threads, isa=args.isa)
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    counts = [int(rows) for rows in args.rows.split(",")]
    before = ceilings()
    timed: dict[str, tuple[list[Case], list[dict[str, float]]]] = {}

    def add(kernel: str, cases: list[Case]) -> None:
        """Measures, and lets go of the memory."""
        kept, seconds = timed.setdefault(kernel, ([], []))
        seconds += measure(cases, args.repeats)
        kept += [case._replace(calls={}, alive=None) for case in cases]
        console.print(f"  {kernel}, {cases[0].label}, from {cases[0].rows} rows: done", highlight=False)

    with torch.inference_mode():
        for format in args.formats.split(","):
            for n, k in shapes:
                add(f"linear {format}", linear_cases(team, format, n, k, counts))
        for kv in () if args.no_attention else KV_DTYPES:
            for rows, context in DECODES:
                add("attention, decode", [attention_case(team, kv, rows, 1, context)])
            for tokens in PREFILLS:
                add("attention, prefill", [attention_case(team, kv, 1, tokens, tokens)])
    reads, rates = map(higher, before, ceilings())
    lines = []
    for kernel, (cases, seconds) in timed.items():
        found = rows_of(kernel, cases, seconds, reads, rates)
        table(f"{kernel}, {args.threads} threads, {args.isa or kernels.isa()}", found)
        lines += found
    show("the ceilings: reading 512 MB", ("loop", "GB/s"), [(name, rate) for name, rate in reads.items()])
    show("matrix products, 1024³", ("format", "GOP/s"), [(name, rate or "–") for name, rate in rates.items()])
    finish(
        {
            "benchmark": "kernels",
            "isa": args.isa or kernels.isa(),
            "reads_gb_s": reads,
            "matrix_gop_s": rates,
            "kernels": lines,
        }
    )


if __name__ == "__main__":
    main()
