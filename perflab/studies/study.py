"""Runs a study and reads what it left; the front door of this package.

Owns the result. The order of things inside a study is the session's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perflab.config import EngineConfig
from perflab.studies import store
from perflab.studies.define import Study, Variant, load_study_file
from perflab.studies.session import Progress, Session
from perflab.studies.store import Run

__all__ = ["Progress", "Study", "StudyResult", "Variant", "load_result", "load_study_file", "run_study"]


@dataclass(slots=True)
class StudyResult:
    """What a study left: its runs in the order of its variants, quality by numeric configuration.

    `failures` names variants that could not run here and why; `message` says how to go on after an
    interruption.
    """

    study: dict[str, Any]
    out_dir: Path
    runs: list[Run]
    quality: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    message: str = ""


def load_result(out_dir: Path) -> StudyResult:
    """The result of a finished or interrupted study. Raises StoreError where there is none."""
    out_dir = Path(out_dir)
    declaration = store.read_json(out_dir / "study.json")["declaration"]
    order = [v["name"] for v in declaration["variants"]]
    runs = [store.read_run(path) for path in store.run_dirs(out_dir)]
    runs.sort(key=lambda run: (order.index(run.variant), run.round))
    extra = store.read_json(out_dir / "quality.json") if (out_dir / "quality.json").exists() else {}
    failed = store.read_json(out_dir / "failures.json") if (out_dir / "failures.json").exists() else {}
    return StudyResult(declaration, out_dir, runs, extra, failed)


def run_study(
    study: Study,
    out_dir: Path,
    progress: Callable[[Progress], None] | None = None,
    resume: bool = True,
    *,
    load_model: Callable[..., Any] | None = None,
    make_engine: Callable[[Any, EngineConfig], Any] | None = None,
) -> StudyResult:
    """Run `study` into `out_dir`, or finish what was begun there.

    Says at once how long it will take. Ctrl-C keeps every finished run; the same call goes on from
    there. `load_model(name, dtype=, device=)` and `make_engine(model, config)` stand in for the
    real ones in tests. Raises StoreError where `out_dir` holds another study, and the first
    variant's own error where that cannot run.
    """
    session = Session(study, Path(out_dir), progress or (lambda _: None), load_model, make_engine)
    session.open(resume)
    interrupted = False
    try:
        session.run()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        gc.unfreeze()
    result = load_result(session.out_dir)
    result.interrupted = interrupted
    if interrupted:
        result.message = (
            f"Stopped; {len(result.runs)} finished runs are kept in {session.out_dir}. "
            "Run the same study into the same directory to go on from there."
        )
    return result
