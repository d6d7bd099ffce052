"""What a run did over time, and what a server's histogram can tell."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import request

from perflab.clock import NS_PER_S
from perflab.measure import histogram
from perflab.measure.timeline import of_samples, of_steps, timeline
from perflab.types import Sample, StepRecord


def test_parts_count_tokens_and_not_chunks():
    """First token at 0.1 s, then sixteen chunks of four, 40 ms apart: 65 tokens in 0.74 s."""
    found = timeline([request(first=0.1, gap=0.04, chunks=17, per_chunk=4, first_chunk=1)], part_s=0.1)
    assert len(found.tokens_per_s) == 8
    assert found.edges_s[-1] == pytest.approx(0.74)
    assert found.tokens_per_s.mean() == pytest.approx(65 / 0.74)
    assert found.peak_tokens_per_s == pytest.approx(12 / (0.74 / 8))  # three chunks in 92.5 ms


def test_requests_in_flight_are_means_over_each_part():
    records = [request("a", first=1.0, gap=1.0, chunks=4), request("b", intended=2.0, first=0.5, chunks=1)]
    found = timeline(records)  # a: 0 to 4 s, its first token at 1 s; b: 2 to 2.5 s
    assert found.in_flight == pytest.approx([1, 1, 1.5, 1])
    assert found.without_token == pytest.approx([1, 0, 0.5, 0])


def test_what_never_ended_stays_in_flight_to_the_end():
    cut = request("cut", first=None, outcome=None)
    cut.end_ns = None
    found = timeline([request(first=2.0, chunks=1), cut])
    assert found.in_flight == pytest.approx([2, 2])
    assert found.without_token == pytest.approx([2, 2])


def test_long_runs_have_a_bounded_number_of_parts():
    assert len(timeline([request(first=9e6, chunks=1)]).tokens_per_s) == 2000
    assert timeline([]) is None


def test_steps_and_samples_come_on_the_same_parts():
    edges = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    step = StepRecord(
        0, 0, delivered_ns=6 * NS_PER_S, running=3, waiting=2, kv_blocks_used=5, kv_blocks_total=20
    )
    later = StepRecord(1, 0, delivered_ns=7 * NS_PER_S, running=4)
    found = of_steps([step, later], edges, origin_ns=5 * NS_PER_S)
    assert found["running"] == pytest.approx([3, 4, 4, 4])
    assert found["waiting"] == pytest.approx([2, 0, 0, 0])
    assert found["kv_use"][0] == 0.25
    assert np.isnan(found["kv_use"][1:]).all()  # that engine keeps no blocks
    samples = [Sample(7 * NS_PER_S, "x", {}, 9.0), Sample(round(6.5 * NS_PER_S), "x", {}, 8.0)]
    assert of_samples(samples, edges, 5 * NS_PER_S) == pytest.approx([math.nan, 9, 9, 9], nan_ok=True)


BUCKETS = [(0.01, 10.0), (0.1, 10.0), (math.inf, 10.0)]


def test_samples_in_the_first_bucket_are_bounded_and_not_interpolated():
    for q in (0.01, 0.5, 0.99):
        found = histogram.percentile(BUCKETS, q)
        assert str(found) == "<= 0.01"
        assert (found.low, found.high, found.n) == (None, 0.01, 10)


def test_later_buckets_are_bounded_on_both_sides_and_the_last_on_one():
    buckets = [(0.01, 5.0), (0.1, 9.0), (1.0, 9.0), (math.inf, 10.0)]
    assert str(histogram.percentile(buckets, 0.5)) == "<= 0.01"
    assert str(histogram.percentile(buckets, 0.51)) == "0.01 to 0.1"
    assert str(histogram.percentile(buckets, 0.9)) == "0.01 to 0.1"
    assert str(histogram.percentile(buckets, 0.99)) == "> 1"
    assert histogram.percentile([(0.01, 0.0), (math.inf, 0.0)], 0.5) is None
    assert histogram.percentile([], 0.5) is None


def test_counts_that_fall_and_impossible_quantiles_are_refused():
    with pytest.raises(ValueError, match="cumulative"):
        histogram.percentile([(0.01, 5.0), (math.inf, 4.0)], 0.5)
    with pytest.raises(ValueError, match="quantile"):
        histogram.percentile(BUCKETS, 1.0)


@given(
    st.lists(st.floats(0, 20), min_size=1, max_size=60),
    st.lists(st.floats(0.01, 10), unique=True, max_size=6),
    st.floats(0.01, 0.99),
)
def test_the_bounds_hold_the_sample_that_they_are_about(samples, bounds, q):
    bounds = [*sorted(bounds), math.inf]
    found = histogram.percentile([(b, float(sum(s <= b for s in samples))) for b in bounds], q)
    value = sorted(samples)[max(1, math.ceil(len(samples) * q - 1e-9)) - 1]
    assert found.low is None or found.low < value
    assert value <= found.high


def scraped(time_s, le, value, **labels):
    return Sample(round(time_s * NS_PER_S), "ttft_seconds_bucket", {"le": le, **labels}, value)


def test_a_run_is_what_was_counted_between_its_first_and_last_scrape():
    samples = [
        *(scraped(t, "0.01", v, model="a") for t, v in ((0, 100), (1, 103), (2, 110))),
        *(scraped(t, "+Inf", v, model="a") for t, v in ((0, 100), (1, 103), (2, 110))),
        *(scraped(t, "0.01", v, model="b") for t, v in ((0, 7), (1, 1), (2, 2))),  # restarted after 0
        *(scraped(t, "+Inf", v, model="b") for t, v in ((0, 9), (1, 3), (2, 4))),
        Sample(0, "other_bucket", {"le": "1"}, 5.0),
    ]
    assert histogram.of_run(samples, "ttft_seconds") == [(0.01, 12.0), (math.inf, 14.0)]
    found = histogram.percentiles(samples, "ttft_seconds", (0.5, 0.99))
    assert [str(found[q]) for q in (0.5, 0.99)] == ["<= 0.01", "> 0.01"]
