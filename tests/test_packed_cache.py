"""The cache of packed weights gives back what was saved or nothing, and stays within its size."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from perflab.errors import ConfigError
from perflab.models import packed_cache

ARRAYS: dict[str, np.ndarray] = {
    "bytes": np.arange(100_003, dtype=np.uint8),
    "scales": np.linspace(-1, 1, 77, dtype=np.float32).reshape(7, 11),
    "half": np.arange(12, dtype=np.uint16).reshape(3, 4)[:, ::2],
    "nothing": np.empty((0, 5), dtype=np.int8),
    "one": np.array(3.5),
}
META = {"scheme": "int8", "rows": [1, 2], "nested": {"a": None}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path))
    monkeypatch.delenv("PERFLAB_PACKED_CACHE_BYTES", raising=False)
    return packed_cache.directory()


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_what_was_saved_comes_back(cache: Path) -> None:
    assert packed_cache.load("k") is None
    packed_cache.save("k", META, ARRAYS)
    found = packed_cache.load("k")
    assert found is not None
    meta, arrays = found
    assert meta == META
    assert list(arrays) == list(ARRAYS)
    for name, array in arrays.items():
        assert array.dtype == ARRAYS[name].dtype
        assert np.array_equal(array, ARRAYS[name])
        assert array.shape == ARRAYS[name].shape
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable
    assert packed_cache.load("other") is None
    assert names(cache) == ["k.pack"]


def test_views_outlive_their_file(cache: Path) -> None:
    packed_cache.save("k", META, ARRAYS)
    found = packed_cache.load("k")
    assert found is not None
    packed_cache.save("k", {}, {"bytes": np.zeros(100_003, np.uint8)})
    (cache / "k.pack").unlink()
    assert np.array_equal(found[1]["bytes"], ARRAYS["bytes"])


def test_the_last_to_save_a_key_wins() -> None:
    packed_cache.save("k", META, ARRAYS)
    packed_cache.save("k", {"v": 2}, {"x": np.ones(3)})
    found = packed_cache.load("k")
    assert found is not None
    assert (found[0], list(found[1])) == ({"v": 2}, ["x"])


@pytest.mark.parametrize(
    "at", [0, 9, 16, 50, 60, 100, 300, 4096, 4096 + 65_536, 4096 + 100_002, -5 * 64 + 3, -8]
)
def test_a_changed_byte_is_a_miss_and_the_file_goes(cache: Path, at: int) -> None:
    packed_cache.save("k", META, ARRAYS)
    path = cache / "k.pack"
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
    assert packed_cache.load("k") is None
    assert names(cache) == []
    packed_cache.save("k", META, ARRAYS)
    assert packed_cache.load("k") is not None


def test_other_damage_is_a_miss_too(cache: Path) -> None:
    packed_cache.save("k", META, ARRAYS)
    path = cache / "k.pack"
    whole = path.read_bytes()
    swapped = bytearray(whole)
    first, second = slice(4096, 4096 + 65_536), slice(4096 + 65_536, 4096 + 2 * 65_536)
    tail = len(whole[second])
    swapped[4096 : 4096 + tail], swapped[second] = whole[second], whole[first][:tail]
    for content in (
        b"",
        whole[:7],
        whole[:-64],
        whole + bytes(64),
        whole[:2000],
        bytes(swapped),
        b"{}" * 5000,
    ):
        path.write_bytes(content)
        assert packed_cache.load("k") is None
        assert not path.exists()
    path.write_bytes(whole)
    os.rename(path, cache / "renamed.pack")
    assert packed_cache.load("renamed") is None


def test_the_least_recently_used_goes_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"x": np.zeros(50_000, np.uint8)}
    monkeypatch.setenv("PERFLAB_PACKED_CACHE_BYTES", "170000")
    for age, key in enumerate(("c", "b", "a")):
        packed_cache.save(key, {}, one)
        stamp = time.time_ns() - (10 - age) * 10**9
        os.utime(cache / f"{key}.pack", ns=(stamp, stamp))
    assert packed_cache.load("c") is not None  # the oldest, and now the last used
    packed_cache.save("d", {}, one)
    assert names(cache) == ["a.pack", "c.pack", "d.pack"]


def test_the_file_just_written_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed_cache.save("old", {}, {"x": np.zeros(50_000, np.uint8)})
    ahead = time.time_ns() + 10**12
    os.utime(cache / "old.pack", ns=(ahead, ahead))
    monkeypatch.setenv("PERFLAB_PACKED_CACHE_BYTES", "60000")
    packed_cache.save("new", {}, {"x": np.zeros(50_000, np.uint8)})
    assert names(cache) == ["new.pack"]


def test_what_never_fits_is_not_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFLAB_PACKED_CACHE_BYTES", "1000")
    packed_cache.save("k", META, ARRAYS)
    assert not cache.exists()


def test_zero_turns_it_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed_cache.save("k", META, ARRAYS)
    monkeypatch.setenv("PERFLAB_PACKED_CACHE_BYTES", "0")
    assert packed_cache.load("k") is None
    packed_cache.save("l", META, ARRAYS)
    assert names(cache) == ["k.pack"]


@pytest.mark.parametrize("value", ["4G", "-1", ""])
def test_a_limit_that_is_no_number_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFLAB_PACKED_CACHE_BYTES", value)
    with pytest.raises(ConfigError, match=r"PERFLAB_PACKED_CACHE_BYTES=.*whole number of bytes"):
        packed_cache.load("k")


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path / "file"))
    packed_cache.save("k", META, ARRAYS)
    assert packed_cache.load("k") is None


def test_a_full_disk_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    packed_cache.save("k", META, ARRAYS)
    assert names(cache) == []


def test_a_read_only_cache_is_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    packed_cache.save("k", META, ARRAYS)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert packed_cache.load("k") is not None
    (cache / "k.pack").write_bytes(b"damaged")
    assert packed_cache.load("k") is None


def test_drafts_of_processes_that_died_are_cleared(cache: Path) -> None:
    packed_cache.save("k", META, ARRAYS)
    for name, age_s in (("dead.draft", 7200), ("live.draft", 5)):
        (cache / name).write_bytes(b"x")
        os.utime(cache / name, (time.time() - age_s,) * 2)
    packed_cache.save("l", META, ARRAYS)
    assert names(cache) == ["k.pack", "l.pack", "live.draft"]


def test_processes_that_save_at_once_never_show_half_a_file(cache: Path) -> None:
    script = """
import numpy as np, sys
from perflab.models import packed_cache
mine = int(sys.argv[1])
for _ in range(20):
    packed_cache.save("k", {"v": mine}, {"x": np.full(300_000, mine, np.uint8)})
    meta, arrays = packed_cache.load("k")
    assert (arrays["x"] == meta["v"]).all()
"""
    running = [subprocess.Popen([sys.executable, "-c", script, str(i)]) for i in (1, 2, 3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert names(cache) == ["k.pack"]
