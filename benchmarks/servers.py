"""Servers of the embedded model, started on a loopback port and stopped whatever happens.

Owns their commands, needs and the wait until they answer. What is asked of them is others' concern;
`setup.sh` beside the peers' scripts installs the foreign ones.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.contenders import HOME, ROOT, end

MODEL = HOME / "models" / "smollm2-135m"


class Server(NamedTuple):
    """How one is started; `{port}`, `{threads}` and `{cores}` are filled in."""

    name: str
    command: Sequence[str | Path]
    needs: Sequence[Path] = ()
    install: str = ""
    ready: str = "/health"
    environment: Mapping[str, str] = {}
    start_s: float = 60.0


def servers(home: Path = HOME) -> dict[str, Server]:
    """Everyone who could serve, installed or not."""
    llama, gguf = home / "llamacpp/build/bin/llama-server", home / "models/smollm2-135m-q8_0.gguf"
    vllm, model = home / "v-vllm/bin/vllm", home / "models/smollm2-135m"
    local = ("--host", "127.0.0.1", "--port", "{port}")
    everyone = [
        Server(
            "perflab",
            [Path(sys.executable).parent / "perflab", "serve", *local, "--threads", "{threads}"],
            ready="/ready",
        ),
        Server(
            "llama.cpp",
            [
                *(llama, "-m", gguf, "-t", "{threads}", "-tb", "{threads}", "-np", "8", "-c", "8192"),
                *("--metrics", "--cache-ram", "0", "--alias", "smollm2-135m", *local),
            ],
            [llama, gguf],
            "setup.sh llamacpp",
        ),
        Server(
            "vLLM",
            [
                *(vllm, "serve", model, "--served-model-name", "smollm2-135m", "--dtype", "bfloat16", *local),
                *("--max-model-len", "1024", "--max-num-seqs", "16", "--enforce-eager"),
            ],
            [vllm, model / "config.json"],
            "setup.sh vllm",
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
            },
            start_s=300.0,
        ),
    ]
    return {server.name: server for server in everyone}


def missing(needs: Sequence[Path], install: str) -> str | None:
    """What is not there, with the remedy; None where everything is."""
    absent = [path for path in needs if not path.exists()]
    return f"{absent[0]} is not there; install it with: {install}" if absent else None


@contextlib.contextmanager
def running(server: Server, threads: int = 2, core: int | None = None) -> Iterator[str]:
    """Its address, once it is ready; on one `core` only if asked. Raises ValueError with the end of its
    messages if it does not get there within `start_s`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores = f"0-{threads - 1}" if core is None else str(core)
    facts = {"port": str(port), "threads": str(threads), "cores": cores}
    environment = os.environ | {name: value.format(**facts) for name, value in server.environment.items()}
    command = [str(word).format(**facts) for word in server.command]
    if core is not None:
        command = ["taskset", "--cpu-list", str(core), *command]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + server.start_s
            while not _answers(url + server.ready):
                if process.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    tail = said.read().decode(errors="replace").strip().splitlines()[-5:]
                    raise ValueError(f"{server.name} did not start: {'; '.join(tail)}")
                time.sleep(0.2)
            yield url
        finally:
            end(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
