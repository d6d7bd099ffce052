"""Workloads from their declaration, as a study file or a command's options hold it.

Owns the names of the kinds. What they mean is in `workloads`, `sessions` and `traces`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perflab.errors import WorkloadError
from perflab.load.arrivals import Arrivals
from perflab.load.sessions import sessions
from perflab.load.traces import from_prompts, from_trace
from perflab.load.workloads import TrafficClass, Workload, mix, synthetic
from perflab.measure.metrics import SLO

KINDS = ("synthetic", "prompts", "trace", "sessions", "mix")


def build(spec: Mapping[str, Any], base: Path = Path()) -> Workload:
    """A workload from its declaration.

    `{kind: synthetic | prompts | trace | sessions | mix, …}`; the other keys are the arguments of
    `synthetic`, `from_prompts`, `from_trace`, `sessions` and `mix`, `arrivals` being the fields of
    `Arrivals`. The `classes` of a mix are a list of `{name, weight, priority, deadline_s, slo, workload}`.
    Paths are relative to `base`. Raises WorkloadError for an unknown kind or argument.
    """
    options = dict(spec)
    kind = options.pop("kind", "synthetic")
    try:
        if isinstance(options.get("arrivals"), Mapping):
            options["arrivals"] = Arrivals(**options["arrivals"])
        if kind == "synthetic":
            return synthetic(**options)
        if kind == "sessions":
            return sessions(**options)
        if kind == "mix":
            return mix([_class(row, base) for row in options.pop("classes")], **options)
        if kind in ("prompts", "trace"):
            path = base / options.pop("path")
            return from_prompts(path, **options) if kind == "prompts" else from_trace(path, **options)
    except KeyError as error:
        raise WorkloadError(f"workload of kind {kind!r} needs {error}") from None
    except TypeError as error:
        raise WorkloadError(f"workload of kind {kind!r}: {error}") from None
    raise WorkloadError(f"workload kind={kind!r}: choose one of {', '.join(KINDS)}")


def _class(row: Mapping[str, Any], base: Path) -> TrafficClass:
    options = dict(row)
    if options.get("slo") is not None:
        options["slo"] = SLO(**options["slo"])
    return TrafficClass(workload=build(options.pop("workload"), base), **options)
