"""Runs on disk: one directory per finished run, complete or not there at all.

Owns the format: `manifest.json` (configuration, seed, versions, machine, verdict),
`requests.parquet`, `steps.parquet`, `events.json`, and `telemetry.parquet` where something was
sampled beside the run. Prompts and outputs are not in it unless
`texts.json` was asked for. Computes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from perflab.errors import StoreError
from perflab.types import EventRecord, RequestRecord, Sample, Span, StepRecord

FORMAT = 1
"""Version of the directory format; a reader refuses any other."""

_SPANS = pa.list_(pa.struct([("name", pa.string()), ("start_ns", pa.int64()), ("end_ns", pa.int64())]))
_REQUEST_TYPES: dict[str, pa.DataType] = {
    "request_id": pa.string(),
    "outcome": pa.string(),
    "finish_reason": pa.string(),
    "error": pa.string(),
    "session_id": pa.string(),
    "request_class": pa.string(),
    "count_source": pa.string(),
    "token_ns": pa.list_(pa.int64()),
    "chunk_tokens": pa.list_(pa.int64()),
    "draft_proposed": pa.list_(pa.int64()),
    "draft_reached": pa.list_(pa.int64()),
    "draft_accepted": pa.list_(pa.int64()),
    "forced_acceptance": pa.float64(),
    "spans": _SPANS,
}
REQUEST_SCHEMA = pa.schema([(f.name, _REQUEST_TYPES.get(f.name, pa.int64())) for f in fields(RequestRecord)])
"""One row per request, the fields of `RequestRecord`; null is missing."""

STEP_SCHEMA = pa.schema([(f.name, pa.int64()) for f in fields(StepRecord)])
"""One row per engine step, the fields of `StepRecord`."""

TELEMETRY_SCHEMA = pa.schema(
    [
        ("time_ns", pa.int64()),
        ("name", pa.string()),
        ("labels", pa.map_(pa.string(), pa.string())),
        ("value", pa.float64()),
    ]
)
"""One row per `Sample`."""


@dataclass(slots=True)
class Run:
    """One finished run as it is on disk. `manifest` holds what the run was; times are nanoseconds."""

    manifest: dict[str, Any]
    requests: list[RequestRecord]
    steps: list[StepRecord]
    events: list[EventRecord]
    path: Path | None = None
    texts: dict[str, Any] | None = field(default=None)
    telemetry: list[Sample] = field(default_factory=list)
    profile: dict[str, Any] | None = None

    @property
    def variant(self) -> str:
        return str(self.manifest.get("variant", "run"))

    @property
    def round(self) -> int:
        return int(self.manifest.get("round", 0))

    @property
    def valid(self) -> bool:
        return not self.reasons

    @property
    def reasons(self) -> list[list[str]]:
        """Why the run is invalid: [name, detail] each."""
        return list(self.manifest.get("validity", {}).get("reasons", []))


def requests_table(records: Iterable[RequestRecord]) -> pa.Table:
    """Records as an Arrow table of `REQUEST_SCHEMA`."""
    rows = [{f.name: getattr(r, f.name) for f in fields(RequestRecord)} for r in records]
    for row in rows:
        row["spans"] = [span._asdict() for span in row["spans"]]
    return pa.Table.from_pylist(rows, schema=REQUEST_SCHEMA)


def steps_table(steps: Iterable[StepRecord]) -> pa.Table:
    """Steps as an Arrow table of `STEP_SCHEMA`."""
    return pa.Table.from_pylist([asdict(step) for step in steps], schema=STEP_SCHEMA)


def _request(row: Mapping[str, Any]) -> RequestRecord:
    return RequestRecord(**{**row, "spans": [Span(**span) for span in row["spans"]]})


def write_run(path: Path, run: Run) -> Path:
    """Write a run to `path`, which must not exist; it appears whole or not at all.

    Files go to a temporary directory beside it, are flushed to disk and renamed. Raises StoreError
    where `path` is taken or cannot be written.
    """
    path = Path(path)
    if path.exists():
        raise StoreError(f"{path} already holds something; choose another directory or delete it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise StoreError(f"{path.parent}: cannot be written ({error})") from None
    try:
        pq.write_table(requests_table(run.requests), draft / "requests.parquet")
        pq.write_table(steps_table(run.steps), draft / "steps.parquet")
        write_json(draft / "events.json", [asdict(event) for event in run.events])
        if run.telemetry:
            rows = [sample._asdict() for sample in run.telemetry]
            pq.write_table(pa.Table.from_pylist(rows, schema=TELEMETRY_SCHEMA), draft / "telemetry.parquet")
        if run.texts is not None:
            write_json(draft / "texts.json", run.texts)
        if run.profile is not None:
            write_json(draft / "profile.json", run.profile)
        digests = {file.name: _digest(file) for file in sorted(draft.iterdir())}
        write_json(draft / "manifest.json", {"format": FORMAT, **run.manifest, "files": digests})
        os.rename(draft, path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error})") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def read_run(path: Path) -> Run:
    """Read what `write_run` wrote, exactly. Raises StoreError for what is missing, changed or of
    another format."""
    path = Path(path)
    manifest = read_json(path / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise StoreError(f"{path}: format {manifest.get('format')!r}, this version reads {FORMAT}")
    digests = manifest.pop("files", {})
    manifest.pop("format")
    for name in ("requests.parquet", "steps.parquet", "events.json"):
        if name not in digests:
            raise StoreError(f"{path}: the manifest does not list {name}; delete the directory and run again")
    for name, digest in digests.items():
        file = path / name
        if not file.is_file():
            raise StoreError(f"{path}: {name} is missing; delete the directory and run again")
        if _digest(file) != digest:
            raise StoreError(f"{path}: {name} is damaged or was edited; delete the directory and run again")
    return Run(
        manifest,
        [_request(row) for row in pq.read_table(path / "requests.parquet").to_pylist()],
        [StepRecord(**row) for row in pq.read_table(path / "steps.parquet").to_pylist()],
        [EventRecord(**event) for event in read_json(path / "events.json")],
        path,
        read_json(path / "texts.json") if "texts.json" in digests else None,
        _samples(path / "telemetry.parquet") if "telemetry.parquet" in digests else [],
        read_json(path / "profile.json") if "profile.json" in digests else None,
    )


def _samples(path: Path) -> list[Sample]:
    rows = pq.read_table(path).to_pylist()
    return [Sample(r["time_ns"], r["name"], dict(r["labels"]), r["value"]) for r in rows]


def run_dirs(study_dir: Path) -> list[Path]:
    """The finished runs of a study's directory, in the order of their names."""
    return sorted(p.parent for p in (study_dir / "runs").glob("[!.]*/manifest.json"))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Run directories in `paths`: a run itself, or all under a study's `runs/`, in order of round.

    Raises StoreError for a path that holds no run.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if (path / "manifest.json").is_file():
            found.append(path)
            continue
        inside = run_dirs(path)
        if not inside:
            raise StoreError(f"{path}: holds no finished run; give a study's directory or a run's")
        found.extend(inside)
    return found


def write_json(path: Path, value: Any) -> None:
    """JSON that is on the disk when this returns; NaN and infinity are refused."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False, default=str)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def plain(value: Any) -> Any:
    """The same with what JSON has no number for, infinity above all, as text: "inf"."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """Raises StoreError where there is no such file or it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: {path.parent} is no complete run or study") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read ({error})") from None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
