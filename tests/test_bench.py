"""`perflab bench` from its options to the run's folder, against a scripted server on the machine's clock."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perflab.cli import app, main
from perflab.errors import WorkloadError
from perflab.load.pacing import ClosedLoop, OpenLoop
from perflab.load.prompts import Blocks
from perflab.measure import metrics
from perflab.studies.service_run import API_KEY, LoadChoice, ServiceChoice, measure
from perflab.studies.store import read_run, write_run
from perflab.types import Sample
from tests.scripted_server import ScriptedServer, end, token

KEY = "sk-very-secret"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Three tokens at once, on a loop in a thread."""
    loop = asyncio.new_event_loop()
    made = ScriptedServer(lambda i: [(0, token("a ")), (1, token("b ")), (2, token("c ") + end(3, prompt=5))])
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(made.__aenter__(), loop).result(10)
    yield made
    asyncio.run_coroutine_threadsafe(made.__aexit__(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def bench(server: ScriptedServer, *options: object):
    return CliRunner().invoke(app, ["bench", server.url, "-m", "m", *map(str, options)])


def test_a_run_from_options_to_its_folder(server, tmp_path: Path, monkeypatch):
    monkeypatch.setenv(API_KEY, KEY)
    folder = tmp_path / "run"
    result = bench(server, "--users", 2, "--requests", 6, "--output-tokens", 3, "--slo-e2e", 60, "-o", folder)
    assert result.exit_code == 0, result.output
    for words in ("TTFT", "6/6", "output tokens/s", "within the limits: 6 of 6", f"Run: {folder}"):
        assert words in result.output
    run = read_run(folder)
    assert run.manifest["kind"] == "bench"
    assert run.manifest["service"]["url"] == f"{server.url}/v1"
    assert run.manifest["load"]["users"] == 2
    assert run.manifest["warm_up_requests"] == 2
    assert [r.outcome for r in run.requests] == ["completed"] * 6
    assert {(r.output_tokens, r.prompt_tokens, r.requested_tokens) for r in run.requests} == {(3, 5, 3)}
    assert len(server.bodies) == 8
    assert metrics.counts(run.requests).completed == 6
    assert KEY not in result.output
    assert not [file for file in folder.iterdir() if KEY.encode() in file.read_bytes()]


def test_prompts_are_new_to_a_cache_in_every_run(server, tmp_path: Path):
    for i in range(2):
        assert bench(server, "--requests", 3, "--no-warm-up", "-o", tmp_path / str(i)).exit_code == 0
    asked = [body["messages"][0]["content"] for body in server.bodies]
    assert len({text.split()[0] for text in asked}) == 2
    assert len(set(asked)) == 6


def test_a_taken_folder_is_refused_before_anything_is_sent(server, tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", server.url, "-m", "m", "-o", str(tmp_path)])
    assert stopped.value.code == 1
    assert "choose another directory" in capsys.readouterr().err.replace("\n", " ")
    assert server.bodies == []


def test_no_server_is_one_message(tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "http://127.0.0.1:9", "-o", str(tmp_path / "run")])
    assert stopped.value.code == 1
    assert "no server answers at" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("option", "value"), [("--extra", "{"), ("--extra", "[1]"), ("--users", "0")])
def test_wrong_options_are_wrong_usage(server, option: str, value: str):
    assert bench(server, option, value).exit_code == 2


def test_failures_are_told_beside_latencies(server, tmp_path: Path):
    server.head = lambda i: "503 Full" if i % 2 else "200 OK\r\nContent-Type: text/event-stream"
    result = bench(server, "--requests", 8, "--users", 1, "--no-warm-up", "-o", tmp_path / "run")
    assert "4/8" in result.output
    assert "4 × HTTP 503" in result.output
    assert "failures" in result.output


def test_a_declared_workload_and_fields_of_ones_own(server, tmp_path: Path):
    file = tmp_path / "w.yaml"
    file.write_text(
        "{kind: sessions, sessions: 2, turns: 2, system_tokens: 16, input_tokens: 8, output_tokens: 3}"
    )
    options = ("--workload", file, "--no-warm-up", "--extra", '{"return_token_ids": true}')
    result = bench(server, *options, "-o", tmp_path / "run")
    assert result.exit_code == 0, result.output
    run = read_run(tmp_path / "run")
    assert sorted((r.session_id, r.turn) for r in run.requests) == [
        (f"sessions-00{i}", turn) for i in range(2) for turn in range(2)
    ]
    assert all(body["return_token_ids"] for body in server.bodies)
    assert str(tmp_path) not in str(run.manifest)


def test_ctrl_c_keeps_what_was_measured(server, tmp_path: Path):
    slow = threading.Event()
    server.script = lambda i: (
        (slow.set(), [(0, token()), (600_000, end(1))])[1] if i == 3 else [(0, token() + end(1))]
    )
    command = [sys.executable, "-c", "from perflab.cli import main; main()", "bench", server.url, "-m", "m"]
    options = ["--users", "1", "--requests", "9", "--no-warm-up", "-o", str(tmp_path / "run")]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    assert slow.wait(60)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "incomplete" in said
    run = read_run(tmp_path / "run")
    assert [r.outcome for r in run.requests] == ["completed"] * 3 + [None]
    assert run.manifest["interrupted"]


# the declarations


def test_loads_are_open_or_closed():
    assert isinstance(LoadChoice(rate_per_s=2.0).pacing(), OpenLoop)
    assert LoadChoice(users=3, think_s=1.0, duration_s=9.0).pacing() == ClosedLoop(3, 1.0, 9.0)
    with pytest.raises(WorkloadError, match="users and rate_per_s"):
        LoadChoice(users=3, rate_per_s=2.0).workload()


def test_a_rate_and_a_duration_say_how_many():
    made = LoadChoice(rate_per_s=10.0, arrivals="constant", duration_s=2.0).workload()
    assert len(made.requests) == 20
    assert len(LoadChoice(rate_per_s=10.0, duration_s=2.0, requests=7).workload().requests) == 7
    assert len(LoadChoice(users=4).workload().requests) == 32


def test_what_is_declared_goes_before_the_fields():
    load = LoadChoice("sessions", requests=2, options={"turns": 3, "input_tokens": 5}, salt=False)
    made = load.workload()
    assert len(made.requests) == 6
    assert isinstance(made.requests[0].prompt, Blocks)
    assert made.requests[0].salt == ""
    assert "base" not in load.describe()


def test_an_unknown_tokenizer_is_guessed_and_the_server_is_believed(server):
    choice = ServiceChoice(server.url, "m")
    assert choice.loaded is None
    run = measure(choice, LoadChoice(requests=2, input_tokens=40, output_tokens=3))
    assert 20 < len(server.bodies[0]["messages"][0]["content"].split()) < 60
    assert {r.prompt_tokens for r in run.requests} == {5}
    assert not {name for name, _ in run.reasons} & {"tokenizer mismatch", "length mismatch"}


def test_samples_beside_a_run_come_back_from_disk(server, tmp_path: Path):
    async def beside(clock, samples) -> None:
        samples.append(Sample(clock.now(), "running", {"source": "x", "gpu": "0"}, 2.5))

    run = measure(ServiceChoice(server.url, "m"), LoadChoice(requests=2), beside=[beside])
    back = read_run(write_run(tmp_path / "run", run))
    assert back.telemetry == run.telemetry
    assert Sample(run.telemetry[0].time_ns, "running", {"source": "x", "gpu": "0"}, 2.5) in [
        s._replace(time_ns=run.telemetry[0].time_ns) for s in back.telemetry
    ]
    assert back.requests == run.requests
