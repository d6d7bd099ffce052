"""Statistics against published tables, exhaustive sums and simulations with known truth."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from perflab.measure import quality, stats


@pytest.mark.parametrize(
    ("p", "df", "value"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 3, 3.1824),
        (0.975, 10, 2.2281),
        (0.8, 4, 0.9410),
        (0.95, 30, 1.6973),
    ],
)
def test_student_quantiles_match_tables(p, df, value):
    assert stats.t_quantile(p, df) == pytest.approx(value, abs=1e-4)
    assert stats.t_quantile(1 - p, df) == pytest.approx(-value, abs=1e-4)


def test_percentile_is_a_sample_and_survives_infinity():
    values = [*range(1, 100), math.inf]
    assert stats.percentile(values, 0.5).value == 50
    assert stats.percentile(values, 0.99).value == 99
    assert stats.percentile(values, 0.999).value == math.inf
    assert stats.percentile([], 0.5) == stats.Estimate(None)


def test_median_interval_is_the_tabulated_one():
    """n = 10: ranks 2 and 9; n = 100: ranks 40 and 61 (order-statistic tables)."""
    assert (stats.percentile(range(1, 11), 0.5).low, stats.percentile(range(1, 11), 0.5).high) == (2, 9)
    assert (stats.percentile(range(1, 101), 0.5).low, stats.percentile(range(1, 101), 0.5).high) == (40, 61)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.99])
def test_too_few_samples_have_no_bound(q):
    need = stats.samples_needed(q)
    assert stats.percentile(range(need), q).bounded
    assert not stats.percentile(range(need - 1), q).bounded
    assert stats.samples_needed(0.5) == 6
    assert stats.samples_needed(0.99) == 368


def test_percentile_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(1)
    truth = -math.log(0.1)  # 0.9-quantile of the unit exponential
    hits = 0
    for _ in range(400):
        e = stats.percentile(rng.exponential(size=80).tolist(), 0.9)
        hits += e.low <= truth <= e.high
    assert hits / 400 >= 0.93


@pytest.mark.parametrize("q", [0.0, 1.0, 99])
def test_a_quantile_outside_its_range_is_refused(q):
    with pytest.raises(ValueError, match="quantile"):
        stats.percentile([1.0], q)


def test_ratio_of_pairs_cancels_drift():
    drift = [1.0, 2.0, 4.0, 8.0]
    b = [3 * x * f for x, f in zip(drift, (0.99, 1.01, 1.0, 1.0), strict=True)]
    result = stats.compare(drift, b)
    assert result.answer == "faster"
    assert result.ratio.value == pytest.approx(3.0, rel=0.01)
    assert result.ratio.low > 2.9
    assert stats.compare(b, drift).answer == "slower"
    assert stats.compare(drift, b, higher_is_better=False).answer == "slower"


def test_the_same_thing_twice_rarely_alarms():
    rng = random.Random(3)
    alarms = 0
    for _ in range(1000):
        a = [math.exp(rng.gauss(0, 0.05)) for _ in range(4)]
        b = [math.exp(rng.gauss(0, 0.05)) for _ in range(4)]
        alarms += stats.compare(a, b).answer != "cannot tell"
    assert alarms <= 80


def test_detectable_effect_is_found_four_times_out_of_five():
    rng = random.Random(4)
    spread, found, reach = 0.03, 0, []
    trials = [([math.exp(rng.gauss(0, spread)) for _ in range(6)], rng) for _ in range(400)]
    effect = math.exp((stats.t_quantile(0.975, 5) + stats.t_quantile(0.8, 5)) * spread * math.sqrt(2 / 6))
    for a, source in trials:
        result = stats.compare(a, [effect * math.exp(source.gauss(0, spread)) for _ in range(6)])
        found += result.answer == "faster"
        reach.append(result.detectable)
    assert 0.7 <= found / 400 <= 0.97
    assert np.mean(reach) == pytest.approx(effect - 1, rel=0.15)


def test_one_pair_cannot_tell():
    result = stats.compare([1.0], [9.0])
    assert result.answer == "cannot tell"
    assert result.ratio.value == pytest.approx(9.0)
    assert result.ratio.low is None
    assert "paired" in result.reason
    assert stats.compare([], []).answer == "cannot tell"


def test_unusable_pairs_are_refused():
    with pytest.raises(ValueError, match="differ in number"):
        stats.compare([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="above 0"):
        stats.compare([1.0, 0.0], [1.0, 2.0])


def test_bootstrap_draws_groups_not_values():
    """Groups of equal values: within-group repetition must not narrow the interval."""
    groups = [[float(i)] * 100 for i in range(10)]
    e = stats.bootstrap(groups, np.mean)
    assert e.value == pytest.approx(4.5)
    assert e.high - e.low > 2.0
    assert stats.bootstrap(groups[:3], np.mean).low is None
    assert stats.bootstrap([], np.mean).value is None


def test_share_stays_inside_zero_and_one():
    e = stats.share(0, 10)
    assert e.low == pytest.approx(0.0, abs=1e-12)
    assert 0.2 < e.high < 0.35
    assert stats.share(10, 10).high == pytest.approx(1.0)
    assert stats.share(0, 0).value is None


def test_kl_by_hand_and_of_itself():
    p, q = np.log([[0.5, 0.5]]), np.log([[0.75, 0.25]])
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert quality.kl_divergence(p + 7.0, q - 3.0) == pytest.approx([expected])
    assert quality.kl_divergence(p, p) == pytest.approx([0.0])
    with pytest.raises(ValueError, match="shape"):
        quality.kl_divergence(p, q[:, :1])


def test_fidelity_of_a_reference_to_itself():
    rng = np.random.default_rng(0)
    texts = [list(rng.integers(0, 20, 9)) for _ in range(6)]
    logits = [rng.normal(size=(9, 20)) for _ in texts]
    same = quality.fidelity(logits, logits, texts)
    assert same.kl_nats.value == 0.0
    assert same.top1.value == 1.0
    assert same.perplexity.value == pytest.approx(same.reference_perplexity)
    uniform = quality.fidelity(logits, [np.zeros((9, 20))] * 6, texts)
    assert uniform.perplexity.value == pytest.approx(20.0)
    assert uniform.kl_nats.low > 0


def test_greedy_match_counts_the_common_start():
    assert quality.greedy_match([1, 2, 3], [1, 2, 4]) == 2
    assert quality.greedy_match([], [1]) == 0
    assert quality.greedy_match([1, 2], [1, 2, 3]) == 2
