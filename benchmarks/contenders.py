"""Who can stand beside this engine, how one is run once, and what its printed figures mean.

Owns the contenders' names, commands and needs, the process around a run and the noise gauge. Knows
nothing about how a peer works: the scripts beside `workload32.json` do, and `setup.sh` there
installs them. What is wanted of the ratios, and in which order all run, is `benchmarks.peers`'s.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).parents[1]
HOME = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "perflab-peers"))
PRECISIONS = ("bf16", "int8", "int4")
QUANTS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
EXPORTS = {"bf16": "ov-fp16", "int8": "ov-int8", "int4": "ov-int4"}
THREADS = 2
TIMEOUT_S = 600

Record = dict[str, Any]


class Contender(NamedTuple):
    """One engine in one precision; `format` is how its weights lie in memory."""

    name: str
    engine: str
    precision: str
    format: str
    command: Sequence[str | Path]
    needs: Sequence[Path] = ()
    install: str = ""


def contenders(scripts: Path, home: Path = HOME) -> list[Contender]:
    """Everyone who could take part, installed or not; `scripts` holds the peers' scripts."""
    everyone = [_own(precision) for precision in PRECISIONS]
    for precision in PRECISIONS:
        everyone += _llama(precision, scripts, home)
    model = home / "models" / "smollm2-135m"
    for precision, folder in EXPORTS.items():
        exported = home / "models" / folder
        peer = _scripted("OpenVINO", precision, scripts, home, "v-ov", "bench_ov.py", exported)
        if precision == "int4":  # setup.sh leaves this one out
            asked = "--task text-generation-with-past --weight-format int4 --group-size 64"
            export = f"{home / 'v-ovx/bin/optimum-cli'} export openvino -m {model} {asked} {exported}"
            peer = peer._replace(install=export)
        everyone.append(peer)
    everyone.append(_scripted("vLLM", "bf16", scripts, home, "v-vllm", "bench_vllm.py", model))
    everyone.append(_scripted("transformers", "bf16", scripts, home, "v-hf", "bench_hf.py", model))
    return everyone


def _own(precision: str) -> Contender:
    command = [sys.executable, "-m", "benchmarks.peers", "--own", precision, "--runs", "1"]
    return Contender(f"perflab {precision}", "perflab", precision, precision, command)


def _llama(precision: str, scripts: Path, home: Path) -> list[Contender]:
    quant, binaries, script = QUANTS[precision], home / "llamacpp/build/bin", scripts / "bench_llamacpp.py"
    model = home / "models" / f"smollm2-135m-{quant.lower()}.gguf"
    kind, install = "bf16" if precision == "bf16" else quant, f"{scripts / 'setup.sh'} llamacpp"
    server, bench = binaries / "llama-server", binaries / "llama-bench"
    commands: dict[str, tuple[list[str | Path], list[Path]]] = {
        "llama.cpp server": (
            [sys.executable, script, model, "--bin", binaries, "--runs", "1"],
            [script, server, model],
        ),
        "llama-bench": ([bench, "-m", model, "-t", str(THREADS), "-r", "1", "-o", "json"], [bench, model]),
    }
    return [
        Contender(f"{engine} {quant}", engine, precision, kind, command, needs, install)
        for engine, (command, needs) in commands.items()
    ]


def _scripted(
    engine: str, precision: str, scripts: Path, home: Path, venv: str, file: str, model: Path
) -> Contender:
    python, script = home / venv / "bin" / "python", scripts / file
    weights = model / ("openvino_model.xml" if engine == "OpenVINO" else "config.json")
    return Contender(
        f"{engine} {precision}",
        engine,
        precision,
        precision,
        [python, script, model, "--runs", "1"],
        [script, python, weights],
        f"{scripts / 'setup.sh'} {venv.removeprefix('v-')}",
    )


def missing(contender: Contender) -> str | None:
    """Why a contender cannot take part here, with the remedy; None where it can."""
    absent = [path for path in contender.needs if not Path(path).exists()]
    return f"{absent[0]} is not there; install it with: {contender.install}" if absent else None


def parse(engine: str, text: str) -> Record:
    """The figures in what a contender printed. Raises ValueError where there are none."""
    if engine != "llama-bench":
        lines = [line for line in text.splitlines() if line.startswith("{")]
        if not lines:
            raise ValueError("it printed no line of JSON")
        return dict(json.loads(lines[-1]))
    start = text.find("[")
    record: Record = {}
    for test in json.loads(text[start:]) if start >= 0 else ():
        key = "b_prefill_tok_s" if test["n_prompt"] else "a_decode_tok_s"
        record[key] = float(test["avg_ts"])
    if not record:
        raise ValueError("it printed no result")
    return record


def run(contender: Contender, parts: str) -> Record:
    """One fresh process to its end. Raises ValueError with the end of its messages if it fails.

    The thread settings of this process are not inherited: each engine chooses its own.
    """
    if contender.engine == "llama-bench":
        asked = ["-n", "128" if "a" in parts else "0", "-p", "512" if "b" in parts else "0"]
    else:
        asked = ["--parts", parts]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "KMP_", "MKL_"))
    }
    command = [str(word) for word in (*contender.command, *asked)]

    def work() -> tuple[str, str, int]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        try:
            return *process.communicate(timeout=TIMEOUT_S), process.returncode
        except BaseException:  # its helpers must not live on beside the next contender
            end(process)
            raise

    try:
        (out, errors, code), other = beside(work, _children_cpu)
    except subprocess.TimeoutExpired:
        raise ValueError(f"no end after {TIMEOUT_S} s") from None
    if code:
        raise ValueError("; ".join((errors.strip() or out.strip()).splitlines()[-3:]) or f"exit code {code}")
    record = parse(contender.engine, out)
    if contender.engine == "llama-bench":  # which has no gauge of its own
        record |= {f"{part}_other_cpu": [other] for part in parts if part in "ab"}
    return record


def end(process: subprocess.Popen[Any]) -> None:
    """Interrupt, so that a script can stop its server; then end the whole group."""
    for sign, wait_s in ((signal.SIGINT, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, sign)
            process.wait(wait_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def beside(work: Callable[[], Any], own_cpu_s: Callable[[], float]) -> tuple[Any, float]:
    """(result of `work`, share of the machine that others used meanwhile, stolen time included)."""

    def others() -> float:
        times = psutil.cpu_times()
        busy = sum(
            getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal")
        )
        return float(busy) - own_cpu_s()

    before, start = others(), time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    return result, round(max(0.0, others() - before) / seconds / (os.cpu_count() or 1), 3)


def _children_cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
