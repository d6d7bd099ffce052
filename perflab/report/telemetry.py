"""What was sampled beside a run, and what its requests amount to over time, as traces of a timeline.

Owns which sampled quantity belongs to which panel. Pure: a run in, plotly traces out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from perflab.clock import NS_PER_S
from perflab.measure import rates
from perflab.measure.telemetry import series
from perflab.measure.timeline import Timeline, timeline
from perflab.report.look import ACCENT, BAD, GOOD
from perflab.studies.store import Run
from perflab.types import Sample

COLOURS = (ACCENT, GOOD, "#f59e0b", "#8b5cf6", BAD, "#38a89d", "#f472b6", "#a3a847")
MOST_LINES = 8


PARTS = 150
"""Equal parts of a run for rates over time; none is longer than a second."""


def tokens(run: Run, origin: int) -> list[Any]:
    """Output tokens/s as they reached the client, and the steady window at its mean."""
    found = _parts(run)
    if found is None or run.steps:
        return []
    traces = [_stairs(found, found.tokens_per_s, run, origin, "tokens/s", ACCENT, fill=True)]
    steady = rates.steady_throughput(run.requests)
    if steady is not None and steady.output_tokens_per_s is not None:
        ends = [(t - origin) / NS_PER_S for t in (steady.start_ns, steady.end_ns)]
        mean = steady.output_tokens_per_s
        line = {"color": GOOD, "width": 2}
        traces.append(go.Scatter(x=ends, y=[mean, mean], mode="lines", name="steady window, mean", line=line))
    return traces


def in_flight(run: Run, origin: int) -> list[Any]:
    """Requests in flight and those still without a token, as the client sees them; the server's counts."""
    found = _parts(run)
    if found is None or (run.steps and not run.telemetry):
        return []
    return [
        _stairs(found, found.in_flight, run, origin, "in flight", ACCENT),
        _stairs(found, found.without_token, run, origin, "no token yet", "#e2b96b"),
        *served(run, origin),
    ]


def _parts(run: Run) -> Timeline | None:
    whole = rates.throughput(run.requests)
    return timeline(run.requests, min(1.0, whole.seconds / PARTS)) if whole else None


def _stairs(
    found: Timeline, values: np.ndarray, run: Run, origin: int, name: str, colour: str, fill: bool = False
) -> Any:
    """A value for each part, as steps from its start to its end."""
    shift = (min(r.intended_ns for r in run.requests) - origin) / NS_PER_S
    return go.Scatter(
        x=[float(x) + shift for x in found.edges_s],
        y=[*map(float, values), float(values[-1])],
        mode="lines",
        name=name,
        line={"color": colour, "width": 1.4, "shape": "hv"},
        fill="tozeroy" if fill else None,
        hovertemplate=f"{name}: %{{y:.3~g}} at %{{x:.2f}} s<extra></extra>",
    )


def served(run: Run, origin: int) -> list[Any]:
    """Running and waiting requests as the server counts them."""
    kinds = (("running", ACCENT), ("waiting", "#e2b96b"))
    return [
        _line(_summed(lines), origin, f"server: {name}", colour, dash="dot")
        for name, colour in kinds
        if (lines := named(run, name))
    ]


def kv_use(run: Run, origin: int) -> list[Any]:
    """The share of the KV cache that a server says it uses."""
    return [
        _line(samples, origin, _label(name, labels), colour, scale=100.0)
        for (name, labels, samples), colour in zip(named(run, "kv_use")[:MOST_LINES], COLOURS, strict=False)
    ]


def machine(run: Run, origin: int) -> list[Any]:
    """How busy each core and GPU was; the mean over the cores where they are many."""
    cores = named(run, "core_busy")
    gpus = named(run, "gpu_busy")
    lines = [(_label(name, labels), samples) for name, labels, samples in [*cores, *gpus]]
    if len(cores) > 4:
        lines = [("cores, mean", _mean(cores)), *lines[len(cores) :]]
    return [
        _line(samples, origin, label, colour, scale=100.0)
        for (label, samples), colour in zip(lines[:MOST_LINES], COLOURS, strict=False)
    ]


def memory(run: Run, origin: int) -> list[Any]:
    """Memory of the watched process and of each GPU, GiB."""
    return [
        _line(samples, origin, _label(name, labels), colour, scale=2.0**-30)
        for (name, labels, samples), colour in zip(
            named(run, "process_rss", "gpu_memory")[:MOST_LINES], COLOURS, strict=False
        )
    ]


Line = tuple[str, tuple[tuple[str, str], ...], list[Sample]]


def named(run: Run, *names: str) -> list[Line]:
    """The sampled quantities of these names, one line for each set of labels."""
    return [(n, labels, found) for (n, labels), found in series(run.telemetry).items() if n in names]


def _label(name: str, labels: Sequence[tuple[str, str]]) -> str:
    told = " ".join(f"{key} {value}" for key, value in labels if key in ("core", "gpu"))
    return f"{told} busy" if told and name.endswith("_busy") else f"{name} {told}".strip().replace("_", " ")


def _summed(lines: Sequence[Line]) -> list[Sample]:
    """One line of several that were read together (replicas, models): their sum at each time."""
    totals: dict[int, float] = {}
    for _, _, samples in lines:
        for s in samples:
            totals[s.time_ns] = totals.get(s.time_ns, 0.0) + s.value
    return [Sample(t, "sum", {}, totals[t]) for t in sorted(totals)]


def _mean(lines: Sequence[Line]) -> list[Sample]:
    return [s._replace(value=s.value / len(lines)) for s in _summed(lines)]


def _line(
    samples: Sequence[Sample], origin: int, name: str, colour: str, scale: float = 1.0, dash: str = "solid"
) -> Any:
    return go.Scatter(
        x=[(s.time_ns - origin) / NS_PER_S for s in samples],
        y=[s.value * scale for s in samples],
        mode="lines",
        name=name,
        line={"color": colour, "width": 1.6, "dash": dash},
        hovertemplate=f"{name}: %{{y:.3~g}} at %{{x:.2f}} s<extra></extra>",
    )
