"""`perflab serve` as a process: its key, its address, its stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from live_server import eventually

from perflab.errors import PerflabError
from perflab.serve.server import listen, url_of

PERFLAB = Path(sys.executable).parent / "perflab"


def test_a_taken_port_is_said_at_once() -> None:
    with listen(port=0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(PerflabError, match=rf"127\.0\.0\.1:{port} .*--port"):
            listen(port=port)
        assert url_of(bound) == f"http://127.0.0.1:{port}"


def test_it_serves_the_embedded_model_behind_a_key_until_it_is_told_to_stop() -> None:
    command = [PERFLAB, "serve", "--port", "0", "--threads", "1", "--max-num-seqs", "2", "--name", "mine"]
    command += ["--max-num-batched-tokens", "16", "--num-blocks", "64"]
    environment = os.environ | {"PERFLAB_API_KEY": "secret"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = ""
            while not (found := re.search(r"mine at (http://127\.0\.0\.1:\d+)/v1", said)):
                line = process.stderr.readline()
                assert line, said
                said += line
            url = found.group(1)
            eventually(lambda: httpx.get(f"{url}/ready").status_code == 200, 60)
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 401
            good = {"Authorization": "Bearer secret"}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=good, timeout=60).json()
            assert answer["model"] == "mine"
            assert answer["choices"][0]["message"]["content"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, -signal.SIGTERM)
        finally:
            process.kill()
