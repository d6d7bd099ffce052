"""Metric definitions against scripted requests whose right values are known by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import request

from perflab.clock import NS_PER_S
from perflab.measure import metrics, rates
from perflab.measure.metrics import SLO
from perflab.measure.timeline import timeline
from perflab.types import RequestRecord

MS = 1_000_000


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


def test_reasoning_is_a_token_and_not_content():
    r = request(first=0.15, gap=0.05, chunks=40)
    r.first_content_ns = 2 * NS_PER_S
    assert metrics.ttft_s(r) == pytest.approx(0.15)
    assert metrics.first_content_s(r) == pytest.approx(2.0)
    assert metrics.first_content_s(request()) is None  # cut before any content: missing, not 0


def test_requests_of_the_warm_up_are_left_out_by_their_start_and_counted():
    """Twenty requests of the warm-up end after it, with the warm-up's latency."""
    slow = [request(f"w{i}", first=14.0, gap=61.0, chunks=2) for i in range(20)]
    normal = [request(f"{i}", intended=70.0 + i, first=1.2) for i in range(30)]
    kept, left_out = metrics.after_warm_up([*slow, *normal], 70 * NS_PER_S)
    assert left_out == 20
    assert metrics.LATENCIES["TTFT"](kept, 0.99).value == pytest.approx(1.2)
    assert max(metrics.samples(slow, metrics.e2e_s)) == 75.0  # these ended inside the measured time


def test_two_lengths_cancel_what_the_prompt_cost():
    """2 s of prefill and 10 ms a token: E2E / N would say 210 ms of ten tokens."""
    short, long = (request(first=2.0, gap=0.01, chunks=n) for n in (10, 110))
    assert metrics.s_per_token_by_two_lengths(short, long) == pytest.approx(0.01)
    assert metrics.s_per_token_by_two_lengths(short, short) is None
    assert metrics.s_per_token_by_two_lengths(short, replace(long, outcome="failed")) is None


def test_each_class_is_judged_by_its_own_limits():
    records = [request(f"c{i}", first=0.1, request_class="chat") for i in range(4)]
    records += [request(f"b{i}", first=5.0, request_class="batch") for i in range(4)]
    records += [request("c9", first=0.9, request_class="chat"), request("x", request_class="other")]
    found = metrics.goodput_by_class(records, {"chat": SLO(ttft_s=0.5), "batch": SLO(ttft_s=9.0)})
    assert {name: (g.met, g.sent) for name, g in found.items()} == {
        "batch": (4, 4),
        "chat": (4, 5),
        "other": (1, 1),
    }


def test_success_is_of_all_that_their_users_did_not_cancel():
    records = [request(outcome=o) for o in ("completed", "completed", "rejected", "timed_out", "cancelled")]
    share = metrics.success(records)
    assert (share.value, share.n) == (0.5, 4)
    assert metrics.success([]).value is None


@pytest.mark.parametrize(("last_rate", "trending"), [(5, False), (25, True)])
def test_a_rate_that_climbs_is_a_trend(last_rate, trending):
    import random

    rng, now, records = random.Random(1), 0.0, []
    while now < 100:
        now += rng.expovariate(5 + (last_rate - 5) * now / 100)
        records.append(request(f"{len(records)}", intended=now, first=rng.uniform(0.2, 0.4), chunks=1))
    change = rates.trend(records, metrics.steady_throughput(records))
    assert change == (pytest.approx(4 / 3, abs=0.3) if trending else None)  # 20 more than 5, over their mean


def test_few_completions_at_one_rate_seldom_look_like_a_trend():
    import random

    changes, found = [], []
    for seed in range(40):
        rng, now, records = random.Random(seed), 0.0, []
        for i in range(24):
            now += rng.expovariate(1.0)
            records.append(request(f"{i}", intended=now, first=0.1, chunks=1))
        window = metrics.steady_throughput(records)
        found.append(rates.trend(records, window))
        half = (window.start_ns + window.end_ns) / 2
        changes.append(abs(2 * sum(r.end_ns > half for r in records) / len(records) - 1))
    assert sum(change > 0.15 for change in changes) > 10  # by the look of their halves, many do
    assert sum(change is not None for change in found) <= 1


def test_bursts_are_no_trend():
    """A burst of twelve every five seconds keeps one rate, however uneven the parts of the window are."""
    records = [
        request(f"{i}-{k}", intended=5.0 * i, first=0.1 + 0.01 * k, chunks=1)
        for i in range(20)
        for k in range(12)
    ]
    window = metrics.steady_throughput(records)
    assert window.requests_per_s == pytest.approx(12 / 5, rel=0.05)
    assert rates.trend(records, window) is None


REQUESTS = st.builds(
    request,
    name=st.uuids().map(str),
    intended=st.floats(0, 50),
    first=st.one_of(st.none(), st.floats(0.001, 20)),
    gap=st.floats(0, 2),
    chunks=st.integers(1, 30),
    per_chunk=st.integers(1, 8),
    first_chunk=st.one_of(st.none(), st.integers(1, 8)),
    outcome=st.sampled_from(["completed", "failed", "timed_out", "rejected", "cancelled", None]),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(REQUESTS, min_size=1, max_size=8), st.floats(0.05, 5))
def test_whatever_the_requests_the_peak_is_no_less_than_the_mean(records, part_s):
    whole, found = metrics.throughput(records), timeline(records, part_s)
    if whole is None:
        assert found is None
        return
    assert found.peak_tokens_per_s >= whole.output_tokens_per_s * (1 - 1e-9)
    width = found.edges_s[1] - found.edges_s[0]
    assert (found.tokens_per_s * width).sum() == pytest.approx(sum(r.output_tokens for r in records))
    assert (found.in_flight >= found.without_token - 1e-6).all()
    assert found.in_flight.max() <= len(records) + 1e-6


@settings(deadline=None, max_examples=60)
@given(REQUESTS)
def test_gaps_and_the_first_token_end_at_the_last_one(r: RequestRecord):
    if r.first_token_ns is None:
        assert metrics.itl_s(r) == []
        return
    last = (r.last_token_ns - r.intended_ns) / NS_PER_S
    assert sum(metrics.itl_s(r)) + metrics.ttft_s(r) == pytest.approx(last, abs=1e-6)
    assert sum(metrics.tokens_per_chunk(r)) == r.output_tokens


@settings(deadline=None, max_examples=60)
@given(st.lists(REQUESTS, max_size=8))
def test_counts_add_up_and_percentiles_climb(records):
    count = metrics.counts(records)
    kinds = count.completed, count.failed, count.timed_out, count.rejected, count.cancelled, count.unfinished
    assert sum(kinds) == count.sent == len(records)
    for name in ("TTFT", "TPOT", "E2E"):
        values = [metrics.LATENCIES[name](records, q).value for q in (0.1, 0.5, 0.9, 0.99)]
        assert values == sorted(values) if values[0] is not None else values == [None] * 4
    everyone = metrics.samples(records, metrics.e2e_s)
    empty = sum(r.outcome == "completed" and r.last_token_ns is None for r in records)
    assert len(everyone) == count.sent - count.cancelled - empty
    assert sum(map(math.isinf, everyone)) == count.sent - count.cancelled - count.completed
