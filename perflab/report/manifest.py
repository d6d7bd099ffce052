"""What was run, with what, on what: a report's header line and its manifest.

Owns which facts stand where. They are the runs' own; nothing is looked up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from perflab.report import units
from perflab.report.analysis import Analysis
from perflab.studies.store import Run

ROUTINE = ("kind", "study", "variant", "description", "round", "validity", "noise", "client", "greedy_match")
"""Facts that stand elsewhere in the report, or nowhere."""


def about(analyses: Sequence[Analysis]) -> list[tuple[str, str]]:
    """What was measured on what, in a line or two."""
    runs = [run for analysis in analyses for run in analysis.runs]
    first = runs[0].manifest
    machine = first.get("machine") or {}
    cores = machine.get("usable_cores")
    hardware = ", ".join(map(str, machine.get("gpus") or [])) or str(machine.get("cpu", ""))
    threads = f", {cores} cores" if cores else ""
    when = max(str(run.manifest.get("ended_at", "")) for run in runs)
    models = dict.fromkeys(str((run.manifest.get("model") or {}).get("name", "")) for run in runs)
    services = dict.fromkeys(str((run.manifest.get("service") or {}).get("url") or "") for run in runs)
    return [
        ("model", ", ".join(name for name in models if name)),
        ("service", ", ".join(url for url in services if url)),
        ("client machine" if any(services) else "machine", f"{hardware}{threads}"),
        ("workload", asked(analyses[0]) if len(analyses) == 1 else ""),
        (
            "measured",
            f"{len(runs)} run{'s' * (len(runs) > 1)}, {when[:16].replace('T', ' ')} UTC" if when else "",
        ),
    ]


def asked(analysis: Analysis) -> str:
    """The load of a part in words."""
    run = analysis.runs[0]
    workload = run.manifest.get("workload") or {}
    told = [
        f"{workload.get('requests', len(run.requests))} requests a run",
        str(workload.get("description", "")) or _declared(run.manifest.get("load") or {}),
    ]
    return "; ".join(part for part in told if part)


def _declared(load: Mapping[str, Any]) -> str:
    """The declared load in words: when, and of what lengths."""
    when = ""
    if load.get("rate_per_s"):
        rate = units.number(load["rate_per_s"])
        when = f"{str(load.get('arrivals')).capitalize()} arrivals, {rate} requests/s"
    elif load.get("users"):
        when = f"{load['users']} users, each with one request at a time"
    lengths = ""
    if load.get("kind") == "synthetic":
        lengths = f"{load.get('input_tokens')} tokens in, {load.get('output_tokens')} out"
    return ", ".join(part for part in (when, lengths or str(load.get("path") or "")) if part)


def manifest(analyses: Sequence[Analysis]) -> list[tuple[str, list[tuple[str, str]]]]:
    """What all runs share, then of each group what is its own."""
    groups = [s for analysis in analyses for s in analysis.summaries]
    first = groups[0].runs[0].manifest
    several = len(analyses) > 1
    flats = [dict(flat(_facts(s.runs[0].manifest))) for s in groups]
    shared = {k: v for k, v in flats[0].items() if all(f.get(k) == v for f in flats)}
    listed = [("shared by all runs" if len(groups) > 1 else "the run", list(shared.items()))]
    if not first:
        return listed
    names = [f"{a.title}: {s.name}" if several else s.name for a in analyses for s in a.summaries]
    for name, facts in zip(names, flats, strict=True):
        own = [(k, v) for k, v in facts.items() if k not in shared]
        if own:
            listed.append((name, own))
    return listed


def _facts(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest without moments and what other chapters show."""
    return {
        k: v for k, v in manifest.items() if k not in ROUTINE and not k.endswith(("_ns", "_s", "ended_at"))
    }


def notes(analyses: Sequence[Analysis]) -> list[str]:
    """What the studies and the models' loaders remark."""
    told = [note for analysis in analyses for note in analysis.study.get("notes", [])]
    for analysis in analyses:
        told += model_notes(analysis.runs[0])
    return list(dict.fromkeys(map(str, told)))


def model_notes(run: Run) -> list[str]:
    """What the loader remarked of a run's model, where that ran in this process."""
    facts = (run.manifest.get(part) or {} for part in ("model", "service"))
    return [str(note) for part in facts for note in part.get("notes") or []]


def flat(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as (name, value) lines; empty values are left out."""
    lines: list[tuple[str, str]] = []
    for name, value in facts.items():
        label = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            lines += flat(value, f"{label} · ")
        elif isinstance(value, list):
            if value:
                lines.append((label, ", ".join(str(item) for item in value)))
        elif isinstance(value, float):
            lines.append((label, units.number(value) if math.isfinite(value) else str(value)))
        elif value is not None and value != "":
            lines.append((label, str(value)))
    return lines
