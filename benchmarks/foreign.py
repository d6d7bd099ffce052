"""The same commands, unchanged, against servers that others wrote, serving the embedded model.

Owns the commands and what a sound run of them leaves behind. How servers are started is
`benchmarks.servers`'s; what figures mean is the package's.

Per server: `perflab bench`, a short `perflab sweep`, `perflab report` of both. Then the folders are
read: every request answered in full, lengths as asked by the server's own count, its metrics scraped
and in agreement with what the client counted, a report with all of it.

    python -m benchmarks.foreign                                 llama.cpp, vLLM and perflab's own
    python -m benchmarks.foreign --servers llama.cpp --out /tmp/runs
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.common import console, finish, show
from perflab.report.tables_service import GAUGES, TOTALS
from perflab.studies.store import Run, find_runs, read_run

PERFLAB = Path(sys.executable).parent / "perflab"
SERVICE = ("--tokenizer", "smollm2-135m", "--input-tokens", "64", "--output-tokens", "32")
COMMANDS: Mapping[str, Sequence[str]] = {
    "bench": ("bench", "{url}", *SERVICE, "--users", "4", "--requests", "40", "--out", "{out}/bench"),
    "sweep": (
        *("sweep", "{url}", *SERVICE, "--by", "users", "--levels", "1,2,4", "--seconds", "10"),
        *("--slo-ttft", "5", "--minutes", "2", "--out", "{out}/sweep"),
    ),
    "report": ("report", "{out}/bench", "{out}/sweep", "--out", "{out}/report.html"),
}
TIMEOUT_S = 240.0
SCRAPED = ("running", "waiting", "prompt_tokens", "output_tokens")
"""What every server's page must have given."""


def execute(name: str, url: str, out: Path) -> float:
    """Run one of the commands; its seconds. Raises ValueError with the end of what it said if it fails."""
    command = [str(PERFLAB), *(word.format(url=url, out=out) for word in COMMANDS[name])]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"`perflab {name}` did not end within {TIMEOUT_S:g} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-6:]
        raise ValueError(f"`perflab {name}` ended with {done.returncode}: {'; '.join(said)}")
    return time.perf_counter() - start


def faults(run: Run) -> Iterator[str]:
    """What is wrong with a run against a server; a machine that was busy is not the server's fault."""
    lost = [r for r in run.requests if r.outcome != "completed"]
    if lost or not run.requests:
        yield f"{len(lost)} of {len(run.requests)} requests failed: {lost[0].error if lost else ''}"
    if odd := {r.count_source for r in run.requests} - {"usage", "token_ids"}:
        yield f"tokens were counted by {', '.join(odd)}"
    for what, wrong in (
        ("output", [r for r in run.requests if r.output_tokens != r.requested_tokens]),
        ("prompt", [r for r in run.requests if r.server_prompt_tokens != r.prompt_tokens]),
    ):
        if wrong:
            yield f"{len(wrong)} requests have another {what} length than asked"
    if missing := [name for name in SCRAPED if name not in {s.name for s in run.telemetry}]:
        yield f"the server's page gave no {', '.join(missing)}"
    for name, detail in run.reasons:
        if name != "machine too noisy":
            yield f"{name}: {detail}"


def scraped(run: Run) -> dict[str, float]:
    """How much the server's own totals grew during the run, and the most of its gauges."""
    found: dict[str, list[float]] = {}
    for sample in run.telemetry:
        if "source" in sample.labels:
            found.setdefault(sample.name, []).append(sample.value)
    return {name: max(v) if name in GAUGES else v[-1] - v[0] for name, v in found.items()}


def check(server: servers.Server, out: Path, threads: int) -> dict[str, Any]:
    """All commands against one server, and what they left. Raises ValueError where one fails."""
    with servers.running(server, threads) as url:
        seconds = {name: round(execute(name, url, out), 1) for name in COMMANDS}
    runs = {path.relative_to(out): read_run(path) for path in find_runs([out / "bench", out / "sweep"])}
    wrong = [f"{path}: {fault}" for path, run in runs.items() for fault in faults(run)]
    bench = runs[Path("bench")]
    own, mine = scraped(bench), sum(r.output_tokens for r in bench.requests)
    if own.get("output_tokens", 0) < mine:  # others may ask too, and a warm-up has tokens of its own
        wrong.append(f"the server counted {own.get('output_tokens')} output tokens, the client {mine}")
    report = (out / "report.html").read_text()
    labels = {**GAUGES, **TOTALS}
    wrong += [f"the report does not show the server's {name}" for name in own if labels[name] not in report]
    noisy = sum(any(name == "machine too noisy" for name, _ in run.reasons) for run in runs.values())
    return {"seconds": seconds, "runs": len(runs), "noisy": noisy, "scraped": own, "faults": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--servers", default="llama.cpp,vLLM,perflab")
    parser.add_argument("--threads", type=int, default=1, help="of the server; the client needs a core, too")
    parser.add_argument("--out", type=Path, help="keep the run directories here, one folder a server")
    args = parser.parse_args()
    known = servers.servers()
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="perflab-foreign-") as temporary:
        for name in args.servers.split(","):
            if name not in known:
                parser.error(f"no server {name!r}: choose from {', '.join(known)}")
            if why := servers.missing(known[name].needs, known[name].install):
                failed[name] = why
            else:
                out = (args.out or Path(temporary)) / name
                out.mkdir(parents=True, exist_ok=True)
                try:
                    found[name] = check(known[name], out.resolve(), args.threads)
                except (ValueError, OSError) as error:
                    failed[name] = str(error)
            said = failed.get(name) or "; ".join(found[name]["faults"]) or "sound"
            console.print(f"  {name}: {said}", highlight=False, markup=False, soft_wrap=True)
    rows = [
        [
            *(name, f["runs"], f["noisy"], " + ".join(f"{s:g}" for s in f["seconds"].values())),
            *("–" if n not in f["scraped"] else f"{f['scraped'][n]:.4g}" for n in SCRAPED),
            "yes" if not f["faults"] else "NO",
        ]
        for name, f in found.items()
    ]
    show("perflab's commands against servers", ("", "runs", "noisy", "seconds", *SCRAPED, "sound"), rows)
    finish({"benchmark": "foreign", "servers": found, "failed": failed})


if __name__ == "__main__":
    main()
