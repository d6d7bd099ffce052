"""Packed weights on disk: what was packed once is mapped into memory by later processes.

Owns the files in the cache's `packed` directory: their format, their proof and their sum of sizes.
Does not know what the arrays mean: the key and the meta data are the caller's.

File: magic, length of the header, digest, JSON header, zeros to a multiple of 4096, arrays at
multiples of 64 bytes. The digest is SHA-256 over the header and the wrapping sums of 64-bit words of
each 64 KiB of the arrays, which reads at memory speed. It catches any change to the header, every
single changed word and blocks that moved; not words that change places within one block, nor
several changes in one block whose sum is zero: proof against bad disks, not against forgery.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import secrets
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perflab.errors import ConfigError
from perflab.models import assets

_MAGIC = b"PLPACK1\n"
_PRELUDE = struct.Struct("<8sQ32s")
_PAGE, _LINE, _BLOCK = 4096, 64, 1 << 16
_DEFAULT_BYTES = 4 << 30
_KEY = re.compile(r"[\w.-]+")
_STALE_DRAFT_S = 3600.0


def load(key: str) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """What was saved under `key`: its meta data and read-only views into one mapping of the file.

    None where there is nothing, the cache is off or the file is damaged, which then is removed.
    A loaded file may be removed at any time: the views stay valid.
    """
    if not limit_bytes():
        return None
    path = _path(key)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else None
    except OSError:
        return None
    try:
        found = _read(mapped, key) if mapped is not None else None
    except (ValueError, TypeError, KeyError, AttributeError, struct.error):
        found = None
    with contextlib.suppress(OSError):
        if found is None:
            path.unlink()
        else:
            os.utime(path)  # used now: the last to be evicted
    return found


def save(key: str, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Keep `arrays` and `meta` (anything JSON holds) under `key`, then evict what was not used longest.

    Best effort: where the disk is full or must not be written to, nothing is kept. Whoever loads
    sees the whole file or none, also while several processes save.
    """
    limit = limit_bytes()
    header, start, size = _layout(key, meta, arrays)
    if start + size > limit:
        return
    path = _path(key)
    draft = path.with_name(f"{key}.{secrets.token_hex(8)}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("x+b") as file:
            file.truncate(start + size)
            entries = json.loads(header)["arrays"]
            for name, array in arrays.items():
                file.seek(start + entries[name][2])
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                digest = _digest(header, mapped, start)
            file.seek(0)
            file.write(_PRELUDE.pack(_MAGIC, len(header), digest) + header)
        os.replace(draft, path)
        _evict(path, limit)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()


def limit_bytes() -> int:
    """Most bytes that the cache may hold: $PERFLAB_PACKED_CACHE_BYTES, else 4 GiB; 0 turns it off.

    Raises ConfigError for what is no such number.
    """
    text = os.environ.get("PERFLAB_PACKED_CACHE_BYTES")
    if text is None:
        return _DEFAULT_BYTES
    if not text.isdecimal():
        raise ConfigError(
            f"PERFLAB_PACKED_CACHE_BYTES={text!r}: give a whole number of bytes, or 0 to turn it off"
        )
    return int(text)


def directory() -> Path:
    """Where the files lie; it may be deleted at any time."""
    return assets.cache_dir() / "packed"


def _path(key: str) -> Path:
    assert _KEY.fullmatch(key), f"{key!r} is no file name"
    return directory() / f"{key}.pack"


def _layout(key: str, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> tuple[bytes, int, int]:
    """The header, where the arrays begin in the file, and how many bytes they take with their padding."""
    entries, size = {}, 0
    for name, array in arrays.items():
        assert not array.dtype.hasobject, f"{name} holds Python objects"
        entries[name] = [array.dtype.str, list(array.shape), size]
        size += _up(array.nbytes, _LINE)
    header = json.dumps({"key": key, "meta": dict(meta), "arrays": entries, "size": size}).encode()
    return header, _up(_PRELUDE.size + len(header), _PAGE), size


def _read(mapped: mmap.mmap, key: str) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    magic, length, digest = _PRELUDE.unpack_from(mapped)
    start = _up(_PRELUDE.size + length, _PAGE)
    if magic != _MAGIC or start > len(mapped):
        return None
    header = mapped[_PRELUDE.size : _PRELUDE.size + length]
    facts = json.loads(header)
    if facts["key"] != key or start + facts["size"] != len(mapped):
        return None
    if _digest(header, mapped, start) != digest:
        return None
    return facts["meta"], {
        name: np.ndarray(shape, dtype, buffer=mapped, offset=start + offset if 0 not in shape else 0)
        for name, (dtype, shape, offset) in facts["arrays"].items()
    }


def _digest(header: bytes, mapped: mmap.mmap, start: int) -> bytes:
    words = np.frombuffer(mapped, np.uint64, offset=start) if len(mapped) > start else np.empty(0, np.uint64)
    whole = len(words) // (_BLOCK // 8) * (_BLOCK // 8)
    digest = hashlib.sha256(header)
    digest.update(words[:whole].reshape(-1, _BLOCK // 8).sum(axis=1))
    digest.update(words[whole:].sum())
    return digest.digest()


def _evict(keep: Path, limit: int) -> None:
    """Remove the files that were not used longest until all fit, and drafts that nobody will finish."""
    files = []
    for path in keep.parent.iterdir():
        try:
            stat = path.stat()
            if path.suffix == ".draft" and time.time() - stat.st_mtime > _STALE_DRAFT_S:
                path.unlink()
            elif path.suffix == ".pack":
                files.append((path != keep, stat.st_mtime_ns, stat.st_size, path))
        except OSError:  # another process removed it
            continue
    total = sum(size for _, _, size, _ in files)
    for other, _, size, path in sorted(files):
        if other and total > limit:
            path.unlink(missing_ok=True)
            total -= size


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
