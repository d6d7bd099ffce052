"""What is known of a checkpoint since its weights were last read: enough to serve it without reading them.

Owns the small files in the cache's `identity` directory, safe to delete at any time. An entry holds
for files of the same place, size and times, one choice of dtype and one version of transformers (which
decides what a configuration says). Does not know how the facts are found out.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from perflab.models import assets
from perflab.types import SamplingParams

_FORMAT = 1  # to be raised when fingerprints, notes or defaults are made in another way
_SMALL = 32 << 20  # bytes: weights of fewer are read as quickly as they are looked up


@dataclass(frozen=True, slots=True)
class Identity:
    """The facts of a `LoadedModel` that come from its weights and configuration."""

    fingerprint: str
    stop_token_ids: tuple[int, ...]
    defaults: SamplingParams
    max_model_len: int
    dtype: str  # torch's name for it, such as bfloat16
    notes: tuple[str, ...]


def key(files: Iterable[Path], asked: str) -> str | None:
    """What the facts of these files hold for; None where looking them up does not pay.

    `asked` says what else decides about them: the dtype, or how it is chosen.
    """
    stats = [(str(path.resolve()), path.stat()) for path in sorted(files)]
    if sum(stat.st_size for _, stat in stats) < _SMALL:
        return None
    rows = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    return json.dumps([_FORMAT, importlib.metadata.version("transformers"), asked, rows])


def recall(key: str | None) -> Identity | None:
    """The facts kept under `key`, None where there are none or the entry is damaged."""
    if key is None:
        return None
    try:
        proof, body = _path(key).read_text(encoding="utf-8").split("\n", 1)
        if proof != _hash(key + body):
            return None
        facts = json.loads(body)
    except (OSError, ValueError):
        return None
    return Identity(
        fingerprint=facts["fingerprint"],
        stop_token_ids=tuple(facts["stop_token_ids"]),
        defaults=SamplingParams(**facts["defaults"]),
        max_model_len=facts["max_model_len"],
        dtype=facts["dtype"],
        notes=tuple(facts["notes"]),
    )


def remember(key: str | None, identity: Identity) -> None:
    """Keep the facts for later processes. Best effort: a cache that cannot be written to keeps nothing."""
    if key is None:
        return
    body = json.dumps(asdict(identity))
    path = _path(key)
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(f"{_hash(key + body)}\n{body}", encoding="utf-8")
        os.replace(draft, path)


def _path(key: str) -> Path:
    return assets.cache_dir() / "identity" / f"{_hash(key)[:32]}.json"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
