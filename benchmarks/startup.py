"""From nothing to the first token: new processes, each timed from the moment it was asked for.

    python -m benchmarks.startup [--dtype bf16] [--config '{"num_threads": 2}'] [--repeats 5]

Every process imports, loads the model, makes an engine and answers a prompt of 32 tokens with one.
The first of each kind fills the caches and doesn't count. `no packed cache` is the same with
PERFLAB_PACKED_CACHE_BYTES=0: what packing costs a process that finds nothing packed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

WANTED_S = 3.0
KINDS: Mapping[str, Mapping[str, str]] = {
    "cached": {},
    "no packed cache": {"PERFLAB_PACKED_CACHE_BYTES": "0"},
}


def one(asked_ns: int, model: str, dtype: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything a new process does, in exclusive parts; this module imports nothing slow before."""
    marks = [("", asked_ns), ("interpreter", time.perf_counter_ns())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter_ns()))

    import torch  # noqa: F401

    mark("import torch")
    from perflab.config import EngineConfig
    from perflab.engine.engine import Engine
    from perflab.models.load import load
    from perflab.types import Request, SamplingParams

    mark("import perflab")
    loaded = load(model, dtype=dtype, device="cpu")
    mark("load")
    engine = Engine(loaded, EngineConfig(**options))
    mark("engine")
    prompt = loaded.encode("The quick brown fox jumps over the lazy dog and runs far away. " * 8)[:32]
    assert len(prompt) == 32, "the prompt is too short for this tokenizer"
    mark("encode")
    engine.submit(Request("0", prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
    while not any(event.token_ids for event in engine.step()):
        pass
    mark("first token")
    parts: dict[str, float] = {}
    for (_, start), (name, end) in itertools.pairwise(marks):
        inner = [s for s in loaded.load_spans if start <= s.start_ns and s.end_ns <= end]
        for span in inner:
            parts[f"{name}: {span.name}"] = (span.end_ns - span.start_ns) / 1e9
        rest = (end - start) / 1e9 - sum((s.end_ns - s.start_ns) / 1e9 for s in inner)
        parts[f"{name}: rest" if inner else name] = rest
    return {
        "parts": parts,
        "total": (marks[-1][1] - asked_ns) / 1e9,
        "transformers": "transformers" in sys.modules,
        "precision": str(loaded.dtype).removeprefix("torch."),
    }


def run(kind: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.startup", "--one", *arguments]
    command[4:4] = [str(time.perf_counter_ns())]
    done = subprocess.run(command, env={**os.environ, **KINDS[kind]}, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    from benchmarks.common import finish, interleave, show

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--config", default='{"num_threads": 2}', help="fields of EngineConfig, as JSON")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}

    def total(kind: str) -> float:
        found[kind].append(run(kind, [args.model, args.dtype, args.config]))
        return float(found[kind][-1]["total"])

    interleave({kind: lambda kind=kind: total(kind) for kind in KINDS}, args.repeats)  # type: ignore[misc]
    runs = {kind: results[1:] for kind, results in found.items()}
    names = list(dict.fromkeys(name for results in runs.values() for r in results for name in r["parts"]))
    medians = {
        kind: {name: statistics.median(r["parts"].get(name, 0.0) for r in results) for name in names}
        for kind, results in runs.items()
    }
    totals = {kind: statistics.median(r["total"] for r in results) for kind, results in runs.items()}
    rows: list[tuple[Any, ...]] = [(name, *(medians[kind][name] for kind in KINDS)) for name in names]
    rows.append(("total", *totals.values()))
    title = f"seconds to the first token of 32, {args.dtype}, {args.config} (wanted: at most {WANTED_S})"
    show(title, ("part (medians)", *KINDS), rows)
    finish(
        {
            "benchmark": "startup",
            "dtype": args.dtype,
            "config": json.loads(args.config),
            "total_s": totals,
            "parts_s": medians,
            "imports_transformers": any(r["transformers"] for r in runs["cached"]),
            "wanted_s": WANTED_S,
        }
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        asked, model_name, chosen_dtype, engine_options = sys.argv[2:6]
        print(json.dumps(one(int(asked), model_name, chosen_dtype, json.loads(engine_options))))
    else:
        main()
