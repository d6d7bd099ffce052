"""Advice: predictions that obey what bounds them, do not contradict published runs, and are then measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perflab.errors import ConfigError
from perflab.measure.advice import (
    ACCELERATORS,
    METHODS,
    NAMED_SIZES,
    Device,
    Workload,
    agreement,
    best_length,
    expected_tokens,
    fits,
    memory_bytes,
    predict,
    quality_hint,
    speedup,
    turning_batch,
    why_not,
)
from perflab.measure.roofline import Sizes, decode, prefill

SCHEMES = st.sampled_from(sorted(METHODS))
DEVICES = st.sampled_from(sorted(ACCELERATORS))
ROWS, TOKENS = st.integers(1, 512), st.integers(0, 4096)
L7, L13, L70 = (NAMED_SIZES[name] for name in ("7b", "13b", "70b"))
A100, H100, V100, L4 = (ACCELERATORS[name] for name in ("a100", "h100", "v100", "l4"))


@given(SCHEMES, DEVICES, ROWS, TOKENS, st.floats(1.01, 10))
def test_more_of_anything_is_never_slower(
    scheme: str, name: str, rows: int, before: int, times: float
) -> None:
    device = ACCELERATORS[name]
    plain = predict(L13, scheme, device, rows, 1, before)
    wide = replace(device, bytes_per_s=times * device.bytes_per_s)
    quick = replace(device, rates={k: times * v for k, v in device.rates.items()})
    for better in (wide, quick):
        assert predict(L13, scheme, better, rows, 1, before).seconds <= plain.seconds
    assert predict(L13, scheme, device, rows + 1, 1, before).seconds >= plain.seconds
    assert predict(L13, scheme, device, rows, 1, before, efficiency=1 / times).seconds >= plain.seconds
    assert memory_bytes(L13, scheme, Workload(rows + 1)) > memory_bytes(L13, scheme, Workload(rows))


@pytest.mark.parametrize("name", sorted(ACCELERATORS))
def test_a_larger_batch_shifts_what_binds_from_memory_to_arithmetic(name: str) -> None:
    binds = [predict(L13, "model", ACCELERATORS[name], 2**i, 1, 0).binds for i in range(13)]
    assert binds[0] == "memory"
    assert binds[-1] == "arithmetic"
    assert binds == sorted(binds, reverse=True), "once it is arithmetic it stays so"


def test_a_plain_step_is_the_rooflines() -> None:
    for work, step in (
        (decode(L7, 8, 501, "bf16", "bf16"), predict(L7, "model", A100, 8, 1, 500)),
        (prefill(L7, 300, "bf16", "bf16"), predict(L7, "model", A100, 1, 300, 0)),
    ):
        assert step.bytes == pytest.approx(work.bytes)
        assert step.multiply_s * A100.rates["bf16"] == pytest.approx(work.operations)


# Published runs, each (sizes, device, chips, batch, input, output, tokens/s) or (.., seconds to first token):
# LMDeploy's benchmark page (A100 FP16, v0.1.0a1) and TensorRT-LLM's performance page (v0.5). The latter's
# engines for H100 were built with 8-bit weights and 8-bit keys and values (its --enable_fp8 --fp8_kv_cache).
THROUGHPUT = [
    (L7, A100, 1, 1, 1, 128, 100.02),
    (L7, A100, 1, 1, 2048, 128, 86.1),
    (L7, A100, 1, 16, 128, 128, 1272.47),
    (L7, A100, 1, 64, 128, 2048, 1852.06),
    (L13, A100, 1, 1, 1, 128, 57.49),
    (L13, A100, 1, 32, 128, 128, 1301.27),
    (L70, A100, 4, 1, 1, 128, 33.94),
    (L70, A100, 4, 32, 128, 2048, 853.56),
    (L7, H100, 1, 64, 128, 128, 9193),
    (L7, H100, 1, 64, 128, 2048, 5367),
]
FIRST_TOKEN = [
    (L7, A100, 1, 2048, 0.133),
    (L13, A100, 1, 2048, 0.242),
    (L70, A100, 4, 2048, 0.377),
    (L7, H100, 1, 128, 0.007),
    (L7, H100, 1, 2048, 0.036),
]


def chips(device: Device, count: int) -> Device:
    rates = {name: count * rate for name, rate in device.rates.items()}
    return replace(device, bytes_per_s=count * device.bytes_per_s, rates=rates)


def floor_s(sizes: Sizes, device: Device, count: int, rows: int, new: int, before: int) -> float:
    """Of the scheme that was published for the device; launches are an assumption and no part of a floor."""
    scheme, kv = ("fp8", "int8") if device is H100 else ("model", "bf16")
    step = predict(sizes, scheme, chips(device, count), rows, new, before, kv)
    return max(step.read_s, step.multiply_s + step.convert_s)


def test_no_published_run_beats_the_floor_nor_is_it_far_from_it() -> None:
    shares = [
        floor_s(sizes, device, count, batch, 1, before + out // 2) / (batch / rate)
        for sizes, device, count, batch, before, out, rate in THROUGHPUT
    ] + [
        floor_s(sizes, device, count, 1, tokens, 0) / seconds
        for sizes, device, count, tokens, seconds in FIRST_TOKEN
    ]
    assert max(shares) <= 1, shares
    assert min(shares) > 0.25, "a floor four times too low would advise nothing"


def test_published_orders_are_predicted() -> None:
    """Contexts, batches and model sizes on one device come in the order in which they were published."""
    rows = [row for row in THROUGHPUT if row[1] is A100 and row[2] == 1]
    found = [row[3] / predict(row[0], "model", A100, row[3], 1, row[4] + row[5] // 2).seconds for row in rows]
    by_published = sorted(range(len(rows)), key=lambda i: rows[i][-1])
    single = [i for i in by_published if rows[i][3] == 1]
    assert single == sorted(single, key=found.__getitem__)
    assert max(found[i] for i in single) < min(found[i] for i in by_published if rows[i][3] > 1)


def test_why_13b_may_prefer_16_bits() -> None:
    alone, many = (
        {s: predict(L13, s, A100, rows, 1, 500) for s in ("model", "int8", "llm.int8")} for rows in (1, 512)
    )
    assert alone["int8"].seconds < 0.6 * alone["model"].seconds, "half the bytes where memory binds"
    assert alone["llm.int8"].seconds > alone["model"].seconds, "its small kernels cost more than it saves"
    small = predict(NAMED_SIZES["1b"], "llm.int8", A100, 1, 1, 500).seconds
    assert small / predict(NAMED_SIZES["1b"], "model", A100, 1, 1, 500).seconds > (
        alone["llm.int8"].seconds / alone["model"].seconds
    ), "they weigh less, the larger the matrices"
    long = {s: predict(L13, s, A100, 1, 2048, 0).seconds for s in ("model", "int8", "int8-dynamic")}
    assert long["int8"] > long["model"] > long["int8-dynamic"], "conversion without a faster product loses"
    slow = {s: predict(L13, s, V100, 1, 2048, 0) for s in ("model", "int8-dynamic")}
    assert slow["int8-dynamic"].format == "fp16", "no 8-bit matrix unit"
    assert slow["int8-dynamic"].seconds > slow["model"].seconds
    assert many["int8"].seconds < many["model"].seconds, "a long context still binds on memory"
    assert turning_batch(L13, "int8", A100, 0) is not None
    assert turning_batch(L13, "llm.int8", A100, 0) == 1
    load = Workload(1, 0, 512, 128)
    assert not fits(L13, "model", L4, load)
    assert fits(L13, "int8", L4, load)
    assert not fits(L13, "int8", L4, Workload(64, 0, 512, 128)), "keys and values of many do not fit"
    assert "no fp8" in why_not("fp8", A100)
    assert not why_not("fp8", H100)
    assert "outlier" in quality_hint("int8-dynamic", L13) != quality_hint("int8-dynamic", NAMED_SIZES["1b"])


@given(st.floats(0, 0.99), st.integers(0, 12))
def test_expected_tokens_are_the_closed_form(a: float, k: int) -> None:
    assert expected_tokens([a] * k) == pytest.approx((1 - a ** (k + 1)) / (1 - a))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 2), st.floats(0, 3))
def test_the_best_length_is_no_worse_than_any(odds: list[float], draft: float, slope: float) -> None:
    wider = [1 + slope * k for k in range(len(odds) + 1)]
    k, gain = best_length(odds, wider, draft)
    assert gain >= max(1.0, *(speedup(odds[:n], wider[n], draft) for n in range(1, len(odds) + 1)))
    assert (k == 0) == (gain == 1.0)


def test_agreement_says_cannot_tell() -> None:
    rounds = [1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98, 1.0]
    noisy = [x * y for x, y in zip(rounds, [1.1, 0.9] * 4, strict=True)]
    twice = [2 * x for x in rounds]
    found = agreement(
        {"a": 1.0, "b": 1.5, "c": 2.0, "d": 2.001}, {"a": rounds, "b": noisy, "c": twice, "d": twice}
    )
    assert (found.same, found.other, found.cannot_tell, found.no_order) == (4, 0, 1, 1)
    assert "cannot tell it from b" in found.best
    wrong = agreement({"a": 2.0, "c": 1.0}, {"a": rounds, "c": twice})
    assert (wrong.same, wrong.other) == (0, 1)
    assert "but a measured faster" in wrong.best


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match="batch=0: give 1 or more"):
        Workload(batch=0)
    with pytest.raises(ConfigError, match="measure them again"):
        replace(A100, bytes_per_s=0.0)
