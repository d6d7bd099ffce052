"""This engine beside other engines: the same work, one session, interleaved, with the machine's ceilings.

Owns the order of the runs, the shares of the ceilings and the tables. Each contender runs in a process
of its own, once a round after a warm-up of its own; the order alternates so that drift cancels. Who
they are is `benchmarks.contenders`'s, what is wanted `benchmarks.bars`'s, our own run `benchmarks.own`'s.

Work: (a) one request, 32 tokens in, 128 out; (b) a prompt of 512 tokens, one out; (c) 32 requests,
at most 16 at once. All greedy, all with 2 threads. Ctrl-C ends early with the tables of what exists.

    python -m benchmarks.peers --repeats 5
    python -m benchmarks.peers --only perflab,llama-bench --parts a --precisions int8
    python -m benchmarks.peers --own bf16 --runs 3          this engine alone, one line of JSON
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import own
from benchmarks.bars import Results, judge, values
from benchmarks.common import SHARED, console, finish, show
from benchmarks.contenders import PRECISIONS, THREADS, Contender, Record, contenders, missing, run
from perflab.models import machine

NOISE = 0.05  # the share of the machine used by others above which a figure is doubtful

# The embedded model: 30 layers, hidden 576, 3 key-value heads of 64, intermediate 1536, tied head.
LAYER_WEIGHTS = 30 * (576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536)
HEAD_WEIGHTS = 49_152 * 576
LAYER_CHANNELS = 30 * (576 + 192 + 192 + 576 + 1536 + 1536 + 576)
# Bytes of weights read for one token. int8: an fp32 scale per output channel; int4: groups of 32 with
# fp16 scales and an int8 head; Q8_0 and Q4_0 (head Q8_0): groups of 32 with fp16 scales.
WEIGHT_BYTES = {
    "bf16": 2.0 * (LAYER_WEIGHTS + HEAD_WEIGHTS),
    "int8": LAYER_WEIGHTS + HEAD_WEIGHTS + 4.0 * (LAYER_CHANNELS + 49_152),
    "int4": 0.5625 * LAYER_WEIGHTS + HEAD_WEIGHTS + 4.0 * 49_152,
    "Q8_0": 1.0625 * (LAYER_WEIGHTS + HEAD_WEIGHTS),
    "Q4_0": 0.5625 * LAYER_WEIGHTS + 1.0625 * HEAD_WEIGHTS,
}
PREFILL_FLOP = 2.0 * LAYER_WEIGHTS  # per token, in the linears of the layers

PARTS = {
    "a": "(a) One request, 32 tokens in, 128 out",
    "b": "(b) A prompt of 512 tokens",
    "c": "(c) 32 requests, at most 16 at once",
}
LABELS = {
    "a_decode_tok_s": "decode tok/s",
    "a_share": "of reading",
    "a_ttft_ms": "TTFT ms",
    "b_prefill_tok_s": "prefill tok/s",
    "b_share": "of matrix rate",
    "c_out_tok_s": "output tok/s",
}


Rates = dict[str, float | None]


def ceilings() -> tuple[Rates, Rates]:
    """(GB/s by read loop over 512 MB, 10^9 operations/s by kind of matrix product), right now.

    Reading is each loop's median pass: the figures beside it are averages over many steps, too.
    """
    return dict(machine.measure_bandwidth()["sustained"]), machine.measure_matrix_rates()["rates"]


def higher(before: Rates, after: Rates) -> Rates:
    """The higher of two measurements of each rate: what else runs can only lower them."""
    return {name: max(filter(None, (rate, after[name])), default=None) for name, rate in before.items()}


def with_shares(
    record: Record, contender: Contender, reads: Mapping[str, float | None], rates: Rates
) -> Record:
    """The record and its shares of the fastest read loop and of its precision's matrix rate."""
    best = max(filter(None, reads.values()))
    record = {**record, "reads_gb_s": dict(reads), "matrix_gop_s": dict(rates)}
    if (speed := record.get("a_decode_tok_s")) is not None:
        record["a_share"] = WEIGHT_BYTES[contender.format] * speed / (best * 1e9)
    ceiling = rates["bf16" if contender.precision == "bf16" else "int8"]
    if (speed := record.get("b_prefill_tok_s")) is not None and ceiling:
        record["b_share"] = PREFILL_FLOP * speed / (ceiling * 1e9)
    return record


def rounds(
    present: Sequence[Contender],
    repeats: int,
    parts: str,
    results: Results,
    failed: dict[str, str],
    keep: Callable[[Record], None] = lambda record: None,
) -> None:
    """Fill `results` and `failed` (with the reason) run by run, so that an interrupt loses nothing.

    Who fails once is left out from then on. `keep` gets each record as it comes.
    """
    before = ceilings()
    for number in range(repeats):
        for contender in present if number % 2 == 0 else reversed(present):
            if contender.name in failed:
                continue
            start = time.perf_counter()
            try:
                record = run(contender, parts)
            except ValueError as error:
                failed[contender.name] = str(error)
                said = f"failed: {error}"
            else:
                after = ceilings()
                reads, rates = map(higher, before, after)
                before, record = after, with_shares(record, contender, reads, rates)
                results.setdefault(contender.name, {})[number] = record
                keep({"contender": contender.name, "round": number, **record})
                said = ", ".join(f"{cell(key, record[key])} {LABELS[key]}" for key in LABELS if key in record)
                if runner := record.get("runner"):  # ours: without native kernels bf16 runs in torch
                    said += f", {runner}"
            took = f"{time.perf_counter() - start:.0f} s"
            line = f"  {number + 1}/{repeats} {contender.name} ({took}): {said}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def cell(figure: str, value: float) -> str:
    return f"{value:.0%}" if figure.endswith("_share") else f"{value:.4g}"


def tables(results: Results, parts: str) -> None:
    """Per part: medians, ranges, shares and noise of each contender, then the bars."""
    verdicts = judge(results)
    for part in parts:
        figures = [figure for figure in LABELS if figure[0] == part]
        rows = []
        for name, by_round in results.items():
            row = [name]
            for figure in figures:
                found = values(results, name, figure).values()
                row.append(cell(figure, statistics.median(found)) if found else "")
                if not figure.endswith("_share"):
                    row.append(f"{min(found):.4g}–{max(found):.4g}" if len(found) > 1 else "")
            noise = max((x for r in by_round.values() for x in r.get(f"{part}_other_cpu", ())), default=0.0)
            rss = max((r.get("d_peak_rss_mb") or 0 for r in by_round.values()), default=0)
            row += [f"{rss}" if rss else "", f"{noise:.1%}{' !' if noise > NOISE else ''}"]
            if row[1]:
                rows.append(row)
        if not rows:
            continue
        columns = [""]
        for figure in figures:
            columns += [LABELS[figure]] if figure.endswith("_share") else [LABELS[figure], "range"]
        columns += ["peak MB", "others' CPU"]
        show(PARTS[part], columns, rows)
        rows = [
            [
                f"{v.bar.ours} {'÷ ' + v.against if v.against else ''}",
                LABELS[v.bar.figure],
                f"{v.value:.2f}",
                f"{'≤' if v.bar.falling else '≥'} {v.bar.factor:.2f}",
                "yes" if v.ok else "NO",
            ]
            for v in verdicts
            if v.bar.figure[0] == part
        ]
        if rows:
            show("", ("", "figure", "median of pairs", "wanted", "met"), rows)


def ceiling_lines(results: Results) -> None:
    """The medians over all runs: the three fastest read loops, and the matrix rates."""
    records = [record for by_round in results.values() for record in by_round.values()]
    if not records:
        return
    loops = {
        name: statistics.median(r["reads_gb_s"][name] for r in records) for name in records[0]["reads_gb_s"]
    }
    fastest = sorted(loops, key=loops.__getitem__, reverse=True)[:3]
    console.print(
        "\nRead, GB/s: " + ", ".join(f"{name} {loops[name]:.1f}" for name in fastest), highlight=False
    )
    rates = {
        kind: statistics.median(found)
        for kind in records[0]["matrix_gop_s"]
        if (found := [r["matrix_gop_s"][kind] for r in records if r["matrix_gop_s"][kind]])
    }
    console.print(
        "Matrix products, 10^9 operations/s: "
        + ", ".join(f"{kind} {rate:.0f}" for kind, rate in rates.items()),
        highlight=False,
    )


def summary(results: Results, failed: Mapping[str, str], absent: Mapping[str, str]) -> dict[str, Any]:
    """Everything for the last line: medians, ratios against the bars, and who is missing."""
    medians = {
        name: {
            figure: round(statistics.median(found.values()), 4)
            for figure in (*LABELS, "d_peak_rss_mb")
            if (found := values(results, name, figure))
        }
        for name in results
    }
    bars = [
        {
            **verdict.bar._asdict(),
            "against": verdict.against,
            "value": round(verdict.value, 4),
            "ok": verdict.ok,
        }
        for verdict in judge(results)
    ]
    counts = {name: len(by_round) for name, by_round in results.items()}
    return {
        "benchmark": "peers",
        "runs": counts,
        "medians": medians,
        "bars": bars,
        "failed": dict(failed),
        "absent": dict(absent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default="abc", help="any of a, b and c")
    parser.add_argument(
        "--only", help="engines or contenders, by the start of their names, with commas between"
    )
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument(
        "--transformers", action="store_true", help="with transformers' generate, which is slow"
    )
    parser.add_argument("--peers-dir", type=Path, default=SHARED / "peers", help="the peers' scripts")
    parser.add_argument("--save", type=Path, help="append each record to this file, one JSON object a line")
    parser.add_argument("--own", choices=PRECISIONS, help="run this engine alone in this process")
    parser.add_argument("--runs", type=int, default=1, help="with --own: runs after the warm-up")
    args = parser.parse_args()
    if args.own:
        print(json.dumps(own.measure(args.own, args.parts, args.runs)))
        return
    torch.set_num_threads(THREADS)
    everyone = [
        c
        for c in contenders(args.peers_dir.resolve())
        if c.precision in args.precisions.split(",")
        and (args.transformers or args.only or c.engine != "transformers")
        and (not args.only or c.name.lower().startswith(tuple(args.only.lower().split(","))))
        and not (c.engine == "llama-bench" and not set(args.parts) & set("ab"))
    ]
    absent = {c.name: why for c in everyone if (why := missing(c))}
    for name, why in absent.items():
        console.print(f"  without {name}: {why}", highlight=False, markup=False, soft_wrap=True)
    present = [c for c in everyone if c.name not in absent]
    results: Results = {}
    failed: dict[str, str] = {}

    def keep(record: Record) -> None:
        if args.save:
            with args.save.open("a") as file:
                file.write(json.dumps(record) + "\n")

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # progress shows in a file too
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: children first, then tables
    try:
        rounds(present, args.repeats, args.parts, results, failed, keep)
    except KeyboardInterrupt:
        console.print("  stopped: what follows is what was measured until now")
    order = [c.name for c in present if c.name in results]
    results = {name: results[name] for name in order}
    tables(results, args.parts)
    ceiling_lines(results)
    finish(summary(results, failed, absent))


if __name__ == "__main__":
    main()
