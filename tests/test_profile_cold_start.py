"""Cold start: every part has a phase, steadiness is found where it is, dropped pages are gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perflab.errors import PerflabError
from perflab.models import kernels
from perflab.studies import cold_start

PARTS = {
    "interpreter": 0.1,
    "import torch": 1.0,
    "import perflab": 0.2,
    "load: import": 2.0,
    "load: fetch": 0.01,
    "load: tokenizer": 0.3,
    "load: weights": 3.0,
    "load: fingerprint": 0.02,
    "load: rest": 0.001,
    "runner: pack": 0.5,
    "engine": 0.05,
    "encode": 0.004,
    "first token": 0.4,
}


def test_parts_become_phases_and_nothing_is_lost() -> None:
    found = cold_start.phases(PARTS)
    assert found["import"] == pytest.approx(3.3)
    assert found["weights"] == 3.0
    assert found["quantise and pack"] == 0.5
    assert found["tokenizer"] == pytest.approx(0.304)
    assert found["other"] == 0.001
    assert sum(found.values()) == pytest.approx(sum(PARTS.values()))
    assert cold_start.phase_of("runner: map") == "map packed weights"
    assert cold_start.phase_of("something new") == "other"


@pytest.mark.parametrize(
    ("seconds", "after"),
    [
        ([1.0] * 10, 0),
        ([5, 4, 3, 2, *[1.0] * 8], 3),  # the median of (2, 1, 1) is steady
        ([1, 1, 1, 9, *[1.0] * 8], 0),  # one that was disturbed is no warm-up
        ([1.0, 1.0], 2),  # too few to tell
    ],
)
def test_steady_is_where_the_median_of_three_stays(seconds: list[float], after: int) -> None:
    assert cold_start.steady_after(seconds) == after


def test_warm_up_is_what_a_steady_process_would_not_have_needed() -> None:
    found = cold_start.until_steady([5, 4, 3, 2, *[1.0] * 8])
    assert found == {"requests": 3, "seconds": 12.0, "warm_up_s": 9.0}


def test_medians_count_what_a_run_lacks_as_zero() -> None:
    assert cold_start.medians([{"a": 1.0}, {"a": 3.0, "b": 2.0}, {"a": 2.0}]) == {"a": 2.0, "b": 0.0}


def test_pages_are_dropped_and_that_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(1 << 20))
    file.read_bytes()
    if cold_start.resident_bytes(file) != 1 << 20:
        pytest.skip("this file system keeps no pages to look at")
    assert cold_start.drop_pages([file]) == 0.0
    assert cold_start.resident_bytes(file) == 0
    file.read_bytes()
    assert cold_start.resident_bytes(file) == 1 << 20
    empty = tmp_path / "empty"
    empty.touch()
    assert cold_start.drop_pages([empty]) is None


def test_the_files_of_a_directory_and_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    names = {file.name for file in cold_start.files_of(str(tmp_path)) if file.parent == tmp_path}
    assert names == {"model.safetensors", "config.json"}
    assert tmp_path / "config.json" in cold_start.files_of(str(tmp_path / "config.json"))


@pytest.mark.skipif(kernels.library() is None, reason="starts on torch take too long here")
def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(PerflabError, match="no such file"):
        cold_start.start_process("./nowhere.gguf", "auto", {})
