"""The roofline's arithmetic, against numbers worked out by hand for the embedded model."""

from __future__ import annotations

import pytest

from perflab.measure.roofline import Ceilings, Floor, Sizes, Work, decode, floor, prefill
from perflab.models.loaded import LoadedModel

SMOL = Sizes(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocabulary=49_152)
MACHINE = Ceilings(25e9, 400e9)


def test_sizes_count_the_models_own_matrices(embedded: LoadedModel) -> None:
    sizes = Sizes.of(embedded.config)
    assert sizes == SMOL
    layers = sum(p.numel() for n, p in embedded.module.named_parameters() if "_proj" in n)
    assert sizes.layer_weights == layers == 106_168_320
    assert sizes.head_weights == embedded.module.get_parameter("model.embed_tokens.weight").numel()


@pytest.mark.parametrize(
    ("format", "megabytes"), [("fp32", 537.92), ("bf16", 268.96), ("int8", 134.48), ("int4", 88.03)]
)
def test_weight_bytes_by_format(format: str, megabytes: float) -> None:
    assert SMOL.weight_bytes(format) / 1e6 == pytest.approx(megabytes, abs=0.01)


def test_kv_bytes_by_format() -> None:
    assert [SMOL.kv_bytes(format) for format in ("fp32", "bf16", "int8")] == [46_080, 23_040, 12_240]


def test_a_decode_step_reads_its_weights_once_and_each_context() -> None:
    one, many = (decode(SMOL, rows, 1000, "bf16", "bf16") for rows in (1, 16))
    assert one.bytes == SMOL.weight_bytes("bf16") + 1000 * 23_040
    assert many.bytes - one.bytes == 15 * 1000 * 23_040
    assert many.operations == 16 * one.operations
    assert one.operations == 2 * 134_479_872 + 4 * 30 * 576 * 1000
    assert decode(SMOL, 1, 1000, "int8", "bf16").operations == one.operations


def test_a_prefill_attends_to_half_of_all_pairs_and_needs_the_head_once() -> None:
    alone, long = (prefill(SMOL, tokens, "bf16", "bf16") for tokens in (1, 512))
    assert alone == decode(SMOL, 1, 1, "bf16", "bf16")
    pairs = 512 * 513 // 2
    assert long.operations == 2 * (512 * SMOL.layer_weights + SMOL.head_weights) + 4 * 30 * 576 * pairs


def test_the_floor_is_the_slower_of_the_two_and_says_which() -> None:
    assert floor(Work(50e9, 400e9), MACHINE) == Floor(2.0, "memory")
    assert floor(Work(25e9, 1200e9), MACHINE) == Floor(3.0, "arithmetic")
    assert floor(Work(25e9, 400e9), MACHINE).seconds == 1.0  # on the ridge
    assert Floor(2.0, "memory").share(2.5) == 0.8


def test_the_roof_bends_at_the_ridge() -> None:
    assert MACHINE.ridge == 16.0
    assert MACHINE.attainable(4.0) == 100e9
    assert MACHINE.attainable(MACHINE.ridge) == MACHINE.attainable(1000.0) == 400e9


@pytest.mark.parametrize("work", [decode(SMOL, 1, 128, "bf16", "bf16"), prefill(SMOL, 512, "int8", "bf16")])
def test_roof_and_floor_are_the_same_thing(work: Work) -> None:
    assert work.operations / floor(work, MACHINE).seconds == pytest.approx(MACHINE.attainable(work.intensity))


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_a_ceiling_that_is_none_is_refused(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Ceilings(*rates)
