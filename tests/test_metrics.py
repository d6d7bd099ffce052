"""Metric definitions against scripted requests whose right values are known by hand."""

from __future__ import annotations

import math
import os

import pytest

from perflab.clock import NS_PER_S
from perflab.measure import metrics
from perflab.measure.metrics import SLO
from perflab.measure.noise import Noise, busy_cpu_s, usable_cpus
from perflab.measure.validity import Expected, judge
from perflab.types import RequestRecord

MS = 1_000_000


def request(
    name: str = "r",
    intended: float = 0.0,
    first: float | None = 0.1,
    gap: float = 0.02,
    chunks: int = 10,
    per_chunk: int = 1,
    outcome: str = "completed",
    sent: float | None = None,
    first_chunk: int | None = None,
    **more,
) -> RequestRecord:
    """A request from seconds: first chunk at intended + first, then one per gap."""
    start = round(intended * NS_PER_S)
    times = [] if first is None else [start + round((first + i * gap) * NS_PER_S) for i in range(chunks)]
    sizes = [per_chunk] * len(times)
    if first_chunk is not None:
        sizes[0] = first_chunk
    return RequestRecord(
        request_id=name,
        intended_ns=start,
        sent_ns=start if sent is None else round(sent * NS_PER_S),
        prompt_tokens=8,
        first_token_ns=times[0] if times else None,
        last_token_ns=times[-1] if times else None,
        end_ns=times[-1] if times else start,
        output_tokens=sum(sizes),
        token_ns=times,
        chunk_tokens=sizes,
        outcome=outcome,
        **more,
    )


def test_multi_token_chunks_keep_gap_and_time_per_token_apart():
    r = request(first=0.1, gap=0.04, chunks=17, per_chunk=4, first_chunk=1)
    assert r.output_tokens == 65
    assert metrics.itl_s(r) == pytest.approx([0.04] * 16)
    assert metrics.tpot_s(r) == pytest.approx(0.01)
    assert metrics.tpot_after_first_chunk_s(r) == pytest.approx(0.01)
    assert metrics.tokens_per_chunk(r)[1:] == [4] * 16


def test_a_first_chunk_of_many_tokens_is_not_divided_by():
    r = request(first=0.1, gap=0.04, chunks=3, per_chunk=4)  # 12 tokens, 8 after the first chunk
    assert metrics.tpot_s(r) == pytest.approx(0.08 / 11)
    assert metrics.tpot_after_first_chunk_s(r) == pytest.approx(0.01)


def test_time_to_first_token_is_no_gap():
    r = request(first=0.5, gap=0.02, chunks=50)
    gaps = metrics.itl_s(r)
    assert len(gaps) == 49
    assert sum(gaps) / 49 == pytest.approx(0.02)
    assert metrics.ttft_s(r) + sum(gaps) == pytest.approx(metrics.e2e_s(r))


@pytest.mark.parametrize("chunks", [1])
def test_one_token_has_no_gap_and_no_tpot_but_is_judged(chunks):
    r = request(chunks=chunks)
    assert metrics.itl_s(r) == []
    assert metrics.tpot_s(r) is None
    assert metrics.tpot_after_first_chunk_s(r) is None
    assert SLO(ttft_s=0.2, tpot_s=0.001).met_by(r)
    assert metrics.per_token_samples([r]) == []


def test_empty_chunks_never_count():
    r = request(chunks=3)
    r.token_ns.insert(1, r.token_ns[0] + MS)
    r.chunk_tokens.insert(1, 0)
    assert metrics.itl_s(r) == pytest.approx([0.02, 0.02])
    assert metrics.tokens_per_chunk(r) == [1, 1, 1]


def test_latency_counts_from_the_intended_start():
    late = request(intended=1.0, first=0.5, sent=1.4)
    assert metrics.ttft_s(late) == pytest.approx(0.5)
    assert metrics.ttft_from_sent_s(late) == pytest.approx(0.1)
    assert metrics.lateness_s(late) == pytest.approx(0.4)


def test_missing_is_none_and_never_zero():
    r = request(first=None, outcome="failed")
    assert metrics.ttft_s(r) is None
    assert metrics.e2e_s(r) is None
    assert metrics.tpot_s(r) is None
    assert metrics.samples([r], metrics.ttft_s, success_only=True) == []
    assert metrics.LATENCIES["TTFT"]([], 0.5).value is None
    assert metrics.throughput([]) is None


@pytest.mark.parametrize("outcome", ["failed", "timed_out", "rejected", None])
def test_whatever_did_not_complete_is_infinite_and_what_came_stands(outcome):
    good, bad = request(), request(outcome=outcome)
    assert metrics.samples([good, bad], metrics.e2e_s)[1] == math.inf
    assert metrics.samples([good, bad], metrics.ttft_s)[1] == pytest.approx(0.1)
    assert metrics.samples([request(first=None, outcome=outcome)], metrics.ttft_s) == [math.inf]
    assert metrics.samples([good, bad], metrics.e2e_s, success_only=True) == pytest.approx([0.28])
    assert metrics.per_token_samples([bad]) == []
    assert metrics.itl_groups([bad]) == []


def test_user_cancels_are_left_out_and_counted():
    records = [request(), request(outcome="cancelled"), request(outcome="failed")]
    assert len(metrics.samples(records, metrics.e2e_s)) == 2
    count = metrics.counts(records)
    assert (count.sent, count.completed, count.cancelled, count.failed) == (3, 1, 1, 1)
    assert metrics.goodput(records, SLO()).share.value == pytest.approx(0.5)


def test_refusing_half_never_looks_faster():
    serves_all = [request(f"a{i}", first=1.0, chunks=1) for i in range(20)]
    refuses = [
        request(f"b{i}", first=0.5 if i % 2 else None, chunks=1, outcome="completed" if i % 2 else "rejected")
        for i in range(20)
    ]
    p99 = [metrics.LATENCIES["E2E"](records, 0.99).value for records in (serves_all, refuses)]
    assert p99[0] == pytest.approx(1.0)
    assert p99[1] == math.inf
    shares = [metrics.goodput(records, SLO(e2e_s=2.0)).share.value for records in (serves_all, refuses)]
    assert shares == [1.0, 0.5]


def test_goodput_divides_by_the_sending_window_and_needs_every_limit():
    records = [request(f"{i}", intended=float(i), first=0.1 if i < 8 else 0.9) for i in range(11)]
    result = metrics.goodput(records, SLO(ttft_s=0.5, tpot_s=1.0))
    assert (result.met, result.sent) == (8, 11)
    assert result.requests_per_s == pytest.approx(0.8)
    assert metrics.goodput(records, SLO(ttft_s=0.5, tpot_s=0.001)).met == 0
    assert metrics.goodput([request("a"), request("b")], SLO()).requests_per_s is None


def test_whole_run_throughput_counts_tokens_not_chunks():
    rate = metrics.throughput([request(first=0.1, gap=0.1, chunks=10, per_chunk=4)])
    assert rate.output_tokens == 40
    assert rate.output_tokens_per_s == pytest.approx(40.0)
    assert rate.requests_per_s == pytest.approx(1.0)


def test_slow_fill_is_not_in_the_steady_rate():
    """First completion at 20 s, then one per second; the run is capped at 30 s."""
    records = [request(f"{i}", first=20.0 + i, chunks=1) for i in range(11)]
    for r in range(10):
        cut = request(f"cut{r}", first=None, outcome=None)
        cut.end_ns = 30 * NS_PER_S
        records.append(cut)
    rate = metrics.steady_throughput(records)
    assert rate.requests_per_s == pytest.approx(1.0)
    assert (rate.start_ns, rate.end_ns) == (20 * NS_PER_S, 30 * NS_PER_S)


@pytest.mark.parametrize("jitter", [0.0, 0.05])
def test_lock_step_batches_are_divided_by_whole_periods(jitter):
    """8 slots, 10 s each, 24 requests at once: 0.8 per second, not 23/20."""
    records = [
        request(f"{i}", first=10.0 * (1 + i // 8) + jitter * (i % 8), chunks=1, per_chunk=5)
        for i in range(24)
    ]
    rate = metrics.steady_throughput(records)
    assert rate.requests_per_s == pytest.approx(0.8)
    assert rate.output_tokens_per_s == pytest.approx(4.0)


def test_no_steady_state_is_said():
    assert metrics.steady_throughput([request(f"{i}") for i in range(12)]) is None
    assert metrics.steady_throughput([]) is None


def test_a_random_stream_keeps_its_rate():
    import random

    rng, now, records = random.Random(0), 0.0, []
    for i in range(400):
        now += rng.expovariate(5.0)
        records.append(request(f"{i}", intended=now, first=rng.uniform(0.5, 1.5), chunks=1))
    assert metrics.steady_throughput(records).requests_per_s == pytest.approx(5.0, rel=0.1)


def names(verdict):
    return [name for name, _ in verdict.reasons]


def test_verdict_names_every_reason():
    quiet = Noise(0.01, 1.0, 1.0)
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
