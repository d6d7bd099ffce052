"""From nothing to the first token: new processes, each timed from the moment it was asked for.

    python -m benchmarks.startup [--dtype bf16] [--config '{"num_threads": 2}'] [--repeats 5]

Every process imports, loads the model, makes an engine and answers a prompt of 32 tokens with one.
The first of each kind fills the caches and doesn't count. `no packed cache` is the same with
PERFLAB_PACKED_CACHE_BYTES=0: what packing costs a process that finds nothing packed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.common import finish, interleave, show
from perflab.studies.cold_start import PACKED_OFF, start_process

WANTED_S = 3.0
KINDS: Mapping[str, Mapping[str, str]] = {"cached": {}, "no packed cache": PACKED_OFF}


def run(kind: str, arguments: list[str]) -> dict[str, Any]:
    """A new process with the model, dtype and EngineConfig's JSON of `arguments`."""
    model, dtype, options = arguments
    return start_process(model, dtype, json.loads(options), KINDS[kind], requests=0)


def main() -> None:
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
    main()
