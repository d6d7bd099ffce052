"""Tools that measure a server: how each is asked for the same load, and its figures under one name each.

Owns their commands, what their files look like and which of their names mean the same metric. Starts
no server and compares nothing. `setup.sh` beside the peers' scripts installs the foreign ones.

    python -m benchmarks.tools URL MODEL PROMPTS --users 8 --out DIR    perflab's own run; or --rate 2.5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contenders import HOME, ROOT, end

FIGURES = {"ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms", "tokens_per_s": "output tokens/s"}

PROMPT = ("prompt", "text")
LENGTH = ("output_tokens", "output_tokens_count", "output_length")
"""What the tools call a prompt and the length of its answer: rows have all of these names."""


class Load(NamedTuple):
    """`users` who each ask the next prompt when they have their answer, or a constant `rate` (requests/s).

    `prompts` come with how many tokens each answer is to have. `tokenizer` is the model's directory.
    """

    url: str
    model: str
    tokenizer: Path
    prompts: Sequence[tuple[str, int]]
    users: int = 1
    rate: float | None = None


class Figures(NamedTuple):
    """What a tool reported of a run, under the field's usual names; notes are its own doubts.

    `windowed` is its tokens/s from the first send to the last answer, where it reports another.
    """

    completed: int
    output_tokens: float
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    notes: Sequence[str] = ()
    windowed: float | None = None


class Tool(NamedTuple):
    """One tool. `command` and `read` get the folder of the run, which holds `prompts.jsonl`."""

    name: str
    command: Callable[[Load, Path], list[str | Path]]
    read: Callable[[Path], Figures]
    means: str  # what it calls TPOT, and other definitions of its own
    needs: Sequence[Path] = ()
    install: str = ""
    environment: Mapping[str, str] = {}


def tools(home: Path = HOME) -> dict[str, Tool]:
    """Everyone who could measure, installed or not; perflab comes first."""
    guidellm, vllm, aiperf = (home / f"v-{name}/bin/{name}" for name in ("guidellm", "vllm", "aiperf"))
    everyone = [
        Tool("perflab", _perflab, read_perflab, "TPOT; TTFT from the intended start"),
        Tool(
            "guidellm",
            lambda load, folder: [guidellm, *_guidellm(load, folder)],
            read_guidellm,
            "ITL is TPOT (its own TPOT is E2E/N); TTFT from the first byte written",
            [guidellm],
            "setup.sh guidellm",
            {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"},
        ),
        Tool(
            "vllm bench",
            lambda load, folder: [vllm, *_vllm(load, folder)],
            read_vllm,
            "TTFT from the call that sends; its rate's timer starts one gap before the first request",
            [vllm],
            "setup.sh vllm",
            {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
        ),
        Tool(
            "aiperf",
            lambda load, folder: [aiperf, *_aiperf(load, folder)],
            read_aiperf,
            "inter_token_latency is TPOT; TTFT from the call that sends",
            [aiperf],
            "setup.sh aiperf",
        ),
    ]
    return {tool.name: tool for tool in everyone}


def _perflab(load: Load, folder: Path) -> list[str | Path]:
    return [
        *(sys.executable, "-m", "benchmarks.tools", load.url, load.model, folder / "prompts.jsonl"),
        *(("--rate", str(load.rate)) if load.rate else ("--users", str(load.users))),
        *("--out", folder / "run"),
    ]


def _guidellm(load: Load, folder: Path) -> list[str | Path]:
    return [
        *(
            "run",
            "--backend",
            f"kind=openai_http,target={load.url},model={load.model},request_format=/v1/completions",
        ),
        "--profile",
        f"kind=constant,rate={load.rate}" if load.rate else f"kind=concurrent,streams={load.users}",
        *("--constraint", f"kind=max_requests,count={len(load.prompts)}"),
        *("--data", f"kind=json_file,path={folder / 'prompts.jsonl'}"),
        *("--tokenizer", f"kind=hf_auto,model={load.tokenizer}"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}", "--disable-console"),
    ]


def _vllm(load: Load, folder: Path) -> list[str | Path]:
    users = ("--max-concurrency", str(load.users))  # gaps are gamma, of a shape that is constant in effect
    return [
        *("bench", "serve", "--backend", "openai", "--base-url", load.url, "--endpoint", "/v1/completions"),
        *(
            "--model",
            load.model,
            "--tokenizer",
            load.tokenizer,
            "--dataset-name",
            "custom",
            "--skip-chat-template",
        ),
        *(
            "--dataset-path",
            folder / "prompts.jsonl",
            "--disable-shuffle",
            "--num-prompts",
            str(len(load.prompts)),
        ),
        *("--custom-output-len", "-1"),
        *(("--request-rate", str(load.rate), "--burstiness", "1e6") if load.rate else users),
        *("--ignore-eos", "--temperature", "0", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "vllm.json"),
    ]


def _aiperf(load: Load, folder: Path) -> list[str | Path]:
    users = ("--concurrency", str(load.users))
    return [
        *("profile", "-m", load.model, "--url", load.url, "--endpoint-type", "completions", "--streaming"),
        *("--tokenizer", load.tokenizer, "--use-server-token-count", "--use-legacy-max-tokens"),
        *("--input-file", folder / "prompts.jsonl", "--custom-dataset-type", "single-turn"),
        *("--request-count", str(len(load.prompts)), "--ui", "none"),
        *(("--request-rate", str(load.rate), "--arrival-pattern", "constant") if load.rate else users),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
        *("--output-artifact-dir", folder / "aiperf"),
    ]


def read_perflab(folder: Path) -> Figures:
    """The run directory, through the package's own metrics."""
    from perflab.measure import metrics
    from perflab.studies.store import read_run

    run = read_run(folder / "run")
    done = [r for r in run.requests if r.outcome == "completed"]
    rate = metrics.throughput(run.requests)
    assert rate is not None, "a run without extent"
    return Figures(
        len(done),
        sum(r.output_tokens for r in done),
        1e3 * (metrics.LATENCIES["TTFT"](run.requests, 0.5).value or 0.0),
        1e3 * (metrics.LATENCIES["TPOT"](run.requests, 0.5).value or 0.0),
        rate.output_tokens_per_s or 0.0,
        [f"{name}: {detail}" for name, detail in run.reasons],
    )


def read_guidellm(folder: Path) -> Figures:
    """`guidellm run --output kind=json`, version 0.8: its ITL is (last - first token) / (N - 1)."""
    metrics = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]

    def good(name: str) -> Any:
        return metrics[name]["successful"]

    return Figures(
        good("time_to_first_token_ms")["count"],
        good("output_token_count")["total_sum"],
        good("time_to_first_token_ms")["median"],
        good("inter_token_latency_ms")["median"],
        good("output_tokens_per_second")["mean"],
    )


def read_vllm(folder: Path) -> Figures:
    """`vllm bench serve --save-result`."""
    found = json.loads((folder / "vllm.json").read_text())
    starts = found["start_times"]
    ends = [start + latency for start, latency in zip(starts, found["latencies"], strict=True)]
    return Figures(
        found["completed"],
        found["total_output_tokens"],
        found["median_ttft_ms"],
        found["median_tpot_ms"],
        found["output_throughput"],
        windowed=found["total_output_tokens"] / (max(ends) - min(starts)),
    )


def read_aiperf(folder: Path) -> Figures:
    """`profile_export_aiperf.json`, schema 1.4: inter_token_latency is a request's mean."""
    found = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    return Figures(
        int(found["request_count"]["avg"]),
        found["output_sequence_length"]["sum"],
        found["time_to_first_token"]["p50"],
        found["inter_token_latency"]["p50"],
        found["output_token_throughput"]["avg"],
    )


def run(tool: Tool, load: Load, core: int | None = None, timeout_s: float = 120.0) -> Figures:
    """One run of a tool in a process of its own, on one `core` only if asked.

    Raises ValueError with the end of its messages if it fails, or if not every prompt was answered in full.
    """
    with tempfile.TemporaryDirectory(prefix="perflab-tool-") as name:
        folder = Path(name)
        rows = [dict.fromkeys(PROMPT, text) | dict.fromkeys(LENGTH, length) for text, length in load.prompts]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [str(word) for word in tool.command(load, folder)]
        if core is not None:
            command = ["taskset", "--cpu-list", str(core), *command]
        _to_its_end(command, os.environ | {**tool.environment, "PYTHONPATH": str(ROOT)}, folder, timeout_s)
        try:
            figures = tool.read(folder)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"its figures cannot be read: {type(error).__name__} {error}") from error
    wanted = sum(length for _, length in load.prompts)
    if figures.completed != len(load.prompts) or figures.output_tokens != wanted:
        answers = f"{figures.completed} of {len(load.prompts)} answers"
        raise ValueError(f"{answers}, {figures.output_tokens:g} of {wanted} tokens")
    return figures


def _to_its_end(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, timeout_s: float
) -> None:
    with (folder / "said.log").open("w+b") as said:  # a pipe would be held open by what it leaves behind
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        if code:
            said.seek(0)
            tail = said.read().decode(errors="replace").strip().splitlines()[-3:]
            raise ValueError(f"exit code {code}: {'; '.join(tail)}")
        if code is None:
            raise ValueError(f"no end after {timeout_s:g} s")


def first_model(url: str) -> str:
    """The name of the first model that a server lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return str(json.loads(answer.read())["data"][0]["id"])


def measure(url: str, model: str, prompts: Sequence[tuple[str, int]], users: int, rate: float | None) -> Any:
    """perflab's run of the load."""
    from perflab.load.workloads import TimedRequest, Workload, asked
    from perflab.studies.service_run import LoadChoice, ServiceChoice
    from perflab.studies.service_run import measure as measured

    made = tuple(
        TimedRequest(f"prompt-{i:04d}", text, asked(length, exact=True), i / rate if rate else 0.0)
        for i, (text, length) in enumerate(prompts)
    )
    load = LoadChoice(requests=len(prompts), rate_per_s=rate, users=None if rate else users)
    workload = Workload("prompts", made, open_loop=rate is not None)
    return measured(ServiceChoice(url, model, "completions"), load, workload=workload)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from perflab.studies.store import write_run

    rows = map(json.loads, args.prompts.read_text().splitlines())
    prompts = [(row[PROMPT[0]], row[LENGTH[0]]) for row in rows]
    write_run(args.out, measure(args.url, args.model, prompts, args.users, args.rate))


if __name__ == "__main__":
    main()
