"""One verdict per run: every reason by name, and a valid run under ordinary conditions."""

from __future__ import annotations

import os

import pytest
from scripted import request

from perflab.load.prompts import PromptEncoder, Synthetic
from perflab.measure.noise import Noise, NoiseSampler, busy_cpu_s, listening_pids, tree_cpu_s, usable_cpus
from perflab.measure.validity import REASONS, Expected, judge
from perflab.models.load import load
from perflab.models.tiny import tiny
from perflab.types import ClientHealth

QUIET = Noise(0.01, 1.0, 1.0)


def names(verdict):
    return [name for name, _ in verdict.reasons]


def test_verdict_names_every_reason():
    quiet = QUIET
    good = [request(f"{i}") for i in range(8)]
    expected = {f"{i}": Expected(8, 10) for i in range(8)}
    assert judge(good, planned=8, expected=expected, noise=quiet).valid
    assert names(judge(good, planned=9, noise=quiet)) == ["incomplete"]
    assert names(judge(good[:3], noise=quiet)) == ["too few samples"]
    assert names(judge(good, noise=Noise(0.6, 1.0, 1.0))) == ["machine too noisy"]
    assert names(judge(good, expected={"3": Expected(9, 10)}, noise=quiet)) == ["length mismatch"]
    assert names(judge(good, expected={"3": Expected(8, 11)}, noise=quiet)) == ["length mismatch"]
    assert names(judge([*good, request("x", outcome="failed")], noise=quiet)) == ["failures"]
    assert names(judge(good, noise=quiet, open_loop=True)) == ["no steady state"]
    good[0].admitted_ns, good[0].cached_tokens = 5, 16
    good[1].admitted_ns = 9
    assert names(judge(good, noise=quiet)) == ["cache-assisted"]


def test_hits_on_what_the_run_itself_cached_are_valid():
    good = [request(f"{i}") for i in range(8)]
    good[0].admitted_ns = 5
    good[1].admitted_ns, good[1].cached_tokens = 9, 16
    assert judge(good, noise=Noise(0.0, 1.0, 1.0)).valid


def test_unknown_noise_is_a_note():
    verdict = judge([request(f"{i}") for i in range(8)], noise=None)
    assert verdict.valid
    assert any("unknown" in note for note in verdict.notes)


def test_busy_time_is_that_of_the_usable_cores(tmp_path):
    stat, (core, *_) = tmp_path / "stat", usable_cpus()
    stat.write_text(
        f"cpu  9 9 9 9 9 9 9 9 0 0\ncpu{core} 100 10 20 500 50 3 2 5 7 0\ncpu999 1 1 1 1 1 1 1 1\nintr 1\n"
    )
    # user, nice, system, irq, softirq and steal; neither idle nor waiting for disks nor other cores
    assert busy_cpu_s(stat) == pytest.approx(140 / os.sysconf("SC_CLK_TCK"))
    assert busy_cpu_s(tmp_path / "none") is None


def stream(n=60, rate=10.0, **more):
    """A steady open loop."""
    return [request(f"{i}", intended=i / rate, **more) for i in range(n)]


def test_an_ordinary_open_loop_against_a_server_is_valid():
    records = stream(server_prompt_tokens=8, server_output_tokens=10, retokenised_tokens=10)
    expected = {r.request_id: Expected(8, 10) for r in records}
    client = ClientHealth(loop_lag_p99_s=0.006, send_lateness_p99_s=0.009, cpu_share=0.4)
    verdict = judge(
        records, planned=60, expected=expected, noise=Noise(0.1, 1.0, 6.0), open_loop=True, client=client
    )
    assert verdict.valid
    assert verdict.notes == ()


@pytest.mark.parametrize(
    ("client", "told"),
    [
        (ClientHealth(0.041, 0.001, 0.5), "event loop woke 41 ms late"),
        (ClientHealth(0.001, 0.3, 0.5), "sent 300 ms late"),
        (ClientHealth(0.001, 0.001, 0.97), "97% of a core"),
    ],
)
def test_a_client_that_lags_is_the_bottleneck(client, told):
    """Forty milliseconds of work in the client for answers of fifty."""
    verdict = judge(stream(first=0.05, chunks=1), noise=QUIET, open_loop=True, client=client)
    assert names(verdict) == ["client-bound"]
    assert told in str(verdict)


def test_what_a_client_may_lag_grows_with_what_is_measured():
    client = ClientHealth(0.041, 0.041, 0.5)
    assert judge(stream(first=1.0, chunks=1), noise=QUIET, open_loop=True, client=client).valid


def test_a_rate_that_the_client_did_not_send_is_not_met():
    """Asked for 50 requests/s, sent 20: the server is not to blame."""
    records = [
        request(f"{i}", intended=i / 50, sent=i / 20, first=i / 20 + 0.05, chunks=1) for i in range(100)
    ]
    found = judge(records, noise=QUIET, open_loop=True, client=ClientHealth())
    assert names(found) == ["rate not met"]
    assert "sent 20 requests/s, asked 50" in str(found)
    assert names(judge(records, noise=QUIET)) == []  # a closed loop asks for no rate


def test_a_rate_that_climbs_all_along_is_no_steady_state():
    import random

    rng, now, records = random.Random(1), 0.0, []
    while now < 60:
        now += rng.expovariate(2 + now / 3)
        records.append(request(f"{len(records)}", intended=now, first=0.2, chunks=1))
    verdict = judge(records, noise=QUIET, open_loop=True)
    assert names(verdict) == ["no steady state"]
    assert "rate of completions changed by +" in str(verdict)


def test_another_tokenizer_on_the_client_is_named_with_its_size():
    """Prompts of 128 of the client's tokens are about 33 of the server's."""
    client, server = tiny("llama"), load("smollm2-135m")
    encoder = PromptEncoder(client.encode, client.chat)
    records, expected = [], {}
    for i in range(20):
        text = encoder.text(Synthetic(128, seed=i), "x7k2")
        told = len(server.encode(text))
        assert told < 60
        records.append(request(f"{i}", server_prompt_tokens=told))
        records[-1].prompt_tokens = 128
        expected[f"{i}"] = Expected(128, 10)
    verdict = judge(records, expected=expected, noise=QUIET)
    assert names(verdict) == ["tokenizer mismatch"]
    total = sum(r.server_prompt_tokens for r in records)
    assert f"{total:,} prompt tokens where the client made 2,560 ({total / 2560:.2f} times" in str(verdict)


@pytest.mark.parametrize(("added", "valid"), [(31, True), (65, False), (-1, False)])
def test_a_template_adds_the_same_to_each_prompt(added, valid):
    records = [request(f"{i}", server_prompt_tokens=8 + added) for i in range(8)]
    verdict = judge(records, expected={f"{i}": Expected(8) for i in range(8)}, noise=QUIET)
    assert verdict.valid == valid
    assert any("chat template" in note for note in verdict.notes) == valid


def test_differing_additions_are_no_template():
    records = [request(f"{i}", server_prompt_tokens=39 + i % 2) for i in range(8)]
    verdict = judge(records, expected={f"{i}": Expected(8) for i in range(8)}, noise=QUIET)
    assert names(verdict) == ["tokenizer mismatch"]


def test_outputs_that_were_cut_short_are_told_in_sum():
    """Five thousand tokens were asked for with `ignore_eos`, 382 came."""
    records = [request(f"{i}", chunks=n) for i, n in enumerate([38, 38, 38, 38, 38, 38, 38, 38, 38, 40])]
    verdict = judge(records, expected={f"{i}": Expected(None, 500) for i in range(10)}, noise=QUIET)
    assert names(verdict) == ["length mismatch"]
    assert "10 requests, outputs of 382 of 5,000 tokens" in str(verdict)


def test_repeated_requests_are_held_to_what_their_first_one_asked():
    records = [request(f"a~{i}") for i in range(1, 9)]
    assert names(judge(records, expected={"a": Expected(8, 11)}, noise=QUIET)) == ["length mismatch"]


def test_counts_that_do_not_agree_are_flagged_and_their_source_named():
    """A hundred tokens by the server's count re-tokenise to seven."""
    records = [
        request(f"{i}", chunks=100, count_source="usage", server_output_tokens=100, retokenised_tokens=7)
        for i in range(8)
    ]
    verdict = judge(records, noise=QUIET)
    assert verdict.valid
    assert "outputs re-tokenise to 56 tokens where the server counts 800" in verdict.notes
    guessed = judge([request(f"{i}", count_source="chunks") for i in range(8)], noise=QUIET)
    assert any("counted from chunks" in note for note in guessed.notes)


@pytest.mark.parametrize(("cached", "valid"), [(0, True), (4, True), (5, False)])
def test_what_a_server_had_cached_before_the_run_assists_it(cached, valid):
    """Only requests sent before the first answer can tell, and of these the coldest: others may have
    shared with it while they waited."""
    records = stream(rate=25.0)  # three are sent before the first token
    for r in records:
        r.cached_tokens = 8
    records[1].cached_tokens = cached
    assert judge(records, noise=QUIET).valid == valid
    records[1].cached_tokens, records[3].cached_tokens = 8, 0
    assert names(judge(records, noise=QUIET)) == ["cache-assisted"]


def test_what_a_reader_should_know_is_noted():
    records = [request(f"{i}") for i in range(300)]
    records[0].outcome, records[1].attempts = "failed", 3
    records[2].token_ns, records[2].chunk_tokens, records[2].output_tokens = [], [], 0
    records[2].first_token_ns = records[2].last_token_ns = None
    verdict = judge(records, planned=320, noise=QUIET, warm_up_left_out=20)
    assert verdict.valid
    told = "; ".join(verdict.notes)
    for words in ("1 of 300 requests failed", "1 requests were sent more", "20 requests that started before"):
        assert words in told
    assert "1 requests were answered without a token" in told


def test_every_reason_is_explained_and_none_is_made_up():
    records = [request(f"{i}", outcome="failed", server_prompt_tokens=9) for i in range(3)]
    records[0].cached_tokens = 8
    found = judge(
        records,
        planned=9,
        expected={f"{i}": Expected(8, 9) for i in range(3)},
        noise=Noise(0.9, 1.0, 1.0),
        open_loop=True,
        client=ClientHealth(1.0, 1.0, 1.0),
    )
    assert set(names(found)) <= set(REASONS)
    assert len(set(names(found))) >= 6


def test_the_process_under_test_is_no_noise(monkeypatch):
    """A server on this machine takes nine of ten busy seconds; what is left belongs to others."""
    busy, tree = iter([0.0, 10.0]), iter([100.0, 109.0])
    monkeypatch.setattr("perflab.measure.noise.busy_cpu_s", lambda: next(busy))
    monkeypatch.setattr("perflab.measure.noise.tree_cpu_s", lambda pid: next(tree))
    monkeypatch.setattr("perflab.measure.noise.time.process_time", lambda: 0.0)
    monkeypatch.setattr("perflab.measure.noise.time.perf_counter", iter([0.0, 10.0]).__next__)
    monkeypatch.setattr("perflab.measure.noise.usable_cpus", lambda: [0, 1])
    assert NoiseSampler([7]).start().stop() == Noise(pytest.approx(1 / 20), 9.0, 10.0)


def test_a_process_is_found_by_its_port_and_counted_with_its_children():
    import socket
    import subprocess
    import sys

    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listening_pids(server.getsockname()[1]) == (os.getpid(),)
    before = tree_cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    assert tree_cpu_s(os.getpid()) > before
    assert tree_cpu_s(2**22 + 1) == 0.0
