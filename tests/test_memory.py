"""Memory: the leak verdict finds what was planted and nothing else; readings see what was allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from perflab.measure import memory
from perflab.measure.memory import Objects, leak_verdict
from perflab.types import StepRecord

LEAK = 10 * 1024
Noise = Callable[[np.random.Generator, np.ndarray], np.ndarray]

NOISES: dict[str, Noise] = {
    "none": lambda rng, x: np.zeros(x.size),
    "pages": lambda rng, x: 4096 * np.round(rng.normal(0, 5, x.size)),
    "white": lambda rng, x: rng.normal(0, 5e5, x.size),
    "spikes": lambda rng, x: rng.normal(0, 1e5, x.size) + 2e7 * (rng.random(x.size) < 0.03),
    "arenas that come and go": lambda rng, x: 3e4 * (x % 137),
    "caches that fill first": lambda rng, x: 3e7 * (1 - np.exp(-x / 40)) + rng.normal(0, 1e5, x.size),
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_planted_leak_is_found_and_none_is_seen_without(noise: Noise) -> None:
    requests = np.arange(0, 1001, 10)
    for seed in range(20):
        base = 2e8 + noise(np.random.default_rng(seed), requests)
        assert not leak_verdict(requests, base.astype(int)).leaking
        planted = leak_verdict(requests, (base + LEAK * requests).astype(int))
        assert planted.leaking, (seed, planted)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    requests = np.arange(0, 1001, 10)
    held = 0
    for _ in range(200):
        slope = leak_verdict(requests, 1e8 + 500 * requests + rng.normal(0, 4e5, 101)).slope_bytes_per_request
        held += slope.low <= 500 <= slope.high
    assert 180 <= held <= 198


def test_one_jump_of_an_arena_is_no_leak() -> None:
    requests = np.arange(0, 1001, 10)
    for at in (300, 500, 700, 900):
        verdict = leak_verdict(requests, 10**8 + 8_000_000 * (requests > at))
        assert verdict.answer == "cannot tell"
        assert "more requests" in verdict.reason


def test_an_exact_line_has_its_exact_slope() -> None:
    requests = list(range(0, 400, 4))
    verdict = leak_verdict(requests, [5_000_000 + 3000 * n for n in requests])
    assert verdict.slope_bytes_per_request.value == pytest.approx(3000)
    assert (verdict.answer, verdict.warm_up_requests) == ("leaking", 99)
    assert leak_verdict(requests, [5_000_000 + 3000 * n for n in requests], limit=4096).answer == "steady"


def test_too_little_is_said_and_nonsense_refused() -> None:
    few = leak_verdict([0, 10, 20, 30], [1, 2, 3, 4])
    assert few.answer == "cannot tell"
    assert few.slope_bytes_per_request.value is None
    assert "samples" in few.reason
    assert leak_verdict([], []).answer == "cannot tell"
    assert leak_verdict([7] * 50, range(50)).answer == "cannot tell"
    for requests, rss in (([1, 2], [1]), ([2, 1], [1, 1])):
        with pytest.raises(ValueError, match="request"):
            leak_verdict(requests, rss)
    with pytest.raises(ValueError, match="warm_up"):
        leak_verdict([1, 2], [1, 2], warm_up=1.0)


def test_resident_memory_sees_what_is_touched() -> None:
    before = memory.resident()
    block = np.ones(64 << 20, np.uint8)
    after = memory.resident()
    assert after["rss"] - before["rss"] > 48 << 20
    assert memory.resident_bytes() > 48 << 20
    assert block.size
    with pytest.raises(ValueError, match="no such process"):
        memory.resident(2**22 + 1)


def test_allocators_are_those_of_this_machine() -> None:
    found = memory.allocators()
    assert all(value >= 0 for value in found.values())
    if "malloc in use" in found:
        assert found["malloc in use"] > 0


class Planted:
    def __init__(self) -> None:
        self.text = "x" * 1000


def test_growth_names_the_type_that_grew() -> None:
    before = memory.python_objects()
    kept = [Planted() for _ in range(500)]
    after = memory.python_objects()
    changes = dict(memory.growth(before, after))
    name = f"{__name__}.Planted"
    assert changes[name].number == 500
    assert len(kept) == 500
    del kept
    gc.collect()
    assert name not in memory.python_objects()


def test_growth_is_a_difference_the_most_bytes_first() -> None:
    before = {"a": Objects(1, 10), "gone": Objects(2, 20), "same": Objects(3, 3)}
    after = {"a": Objects(4, 100), "same": Objects(3, 3), "new": Objects(1, 200)}
    assert memory.growth(before, after) == [
        ("new", Objects(1, 200)),
        ("a", Objects(3, 90)),
        ("gone", Objects(-2, -20)),
    ]


def test_the_kv_pool_at_its_fullest() -> None:
    steps = [
        StepRecord(i, 0, kv_blocks_used=used, kv_blocks_cached=cached, kv_blocks_total=9)
        for i, (used, cached) in enumerate([(1, 0), (5, 2), (3, 4)])
    ]
    assert memory.kv_pool_bytes(steps, 100) == {"used": 500, "cached": 400, "total": 900}
