"""The pictures of a profile: one request as a waterfall, shares over many, starts, layers, memory.

Pure: records or a profile's values in, a plotly figure out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from perflab.clock import NS_PER_S
from perflab.measure import latency
from perflab.measure.latency import Decomposition
from perflab.measure.roofline import Ceilings, Work, floor
from perflab.report import units
from perflab.report.look import ACCENT, BAD, MUTED, SEGMENT_COLOURS, names_axis, rows_height, style
from perflab.types import RequestRecord, StepRecord

MAX_PIECES = 1500
PHASE_COLOURS = {
    "import": "#c3cad6",
    "identify the model": "#a3a847",
    "tokenizer": "#8b5cf6",
    "weights": "#1d4ed8",
    "quantise and pack": "#60a5fa",
    "map packed weights": "#7dd3c0",
    "KV pool and engine": "#fb923c",
    "other": "#94a3b8",
    "first token": "#0f9d6b",
    "warm-up after it": "#e2b96b",
}
PART_COLOURS = {
    "qkv": "#60a5fa",
    "attention": "#f59e0b",
    "attention out": "#1d4ed8",
    "gate and up": "#0f9d6b",
    "activation": "#a3a847",
    "down": "#7dd3c0",
    "experts": "#0f9d6b",
    "router": "#c98a2b",
    "norm": "#f472b6",
    "embedding": "#c3cad6",
    "rotary table": "#94a3b8",
    "head": "#8b5cf6",
}


def waterfall(record: RequestRecord, steps: Sequence[StepRecord]) -> go.Figure:
    """One request from its intended start to its last token, a row for each kind of segment."""
    pieces = latency.segments(record, steps)[:MAX_PIECES]
    figure = go.Figure()
    for name in latency.ordered(p.name for p in pieces):
        own = [p for p in pieces if p.name == name]
        figure.add_trace(
            go.Bar(
                y=[name] * len(own),
                base=[1e3 * (p.start_ns - record.intended_ns) / NS_PER_S for p in own],
                x=[1e3 * (p.end_ns - p.start_ns) / NS_PER_S for p in own],
                orientation="h",
                marker={"color": SEGMENT_COLOURS.get(name, "#94a3b8"), "line": {"width": 0}},
                hovertemplate=f"{name}<br>%{{x:.3f}} ms from %{{base:.3f}} ms<extra></extra>",
                showlegend=False,
            )
        )
    for at, words in ((record.first_token_ns, "first token"), (record.last_token_ns, "last token")):
        if at is not None:
            x = 1e3 * (at - record.intended_ns) / NS_PER_S
            figure.add_vline(x=x, line={"color": MUTED, "width": 1, "dash": "dot"}, annotation_text=words)
    style(
        figure, rows_height(len(figure.data)), barmode="overlay", margin={"l": 10, "r": 60, "t": 46, "b": 46}
    )
    figure.update_xaxes(title_text="milliseconds since the intended start", rangemode="tozero")
    names_axis(figure)
    return figure


def shares(parts: Sequence[Decomposition]) -> go.Figure:
    """Each segment's share of E2E: the mean request, and the spread from the 10th to the 90th per cent."""
    names = [*latency.ordered(n for part in parts for n in part.segments), "residual"]

    def of(part: Decomposition, name: str) -> float:
        seconds = part.residual_s if name == "residual" else part.segments.get(name, 0.0)
        return 100 * seconds / part.e2e_s if part.e2e_s else 0.0

    found = {name: sorted(of(part, name) for part in parts) for name in names}
    mean = [sum(found[n]) / len(parts) for n in names]
    low, high = ([found[n][round(q * (len(parts) - 1))] for n in names] for q in (0.1, 0.9))
    figure = go.Figure(
        go.Bar(
            y=names,
            x=mean,
            orientation="h",
            marker={"color": [SEGMENT_COLOURS.get(n, "#94a3b8") for n in names]},
            error_x={
                "array": [max(0.0, h - m) for h, m in zip(high, mean, strict=True)],
                "arrayminus": [max(0.0, m - x) for x, m in zip(low, mean, strict=True)],
                "color": "#51607a",
                "thickness": 1.2,
            },
            hovertemplate="%{y}: %{x:.2f} % of E2E<extra></extra>",
        )
    )
    style(figure, rows_height(len(names)))
    figure.update_xaxes(
        title_text="share of E2E, % (mean; bar from the 10th to the 90th per cent of requests)"
    )
    names_axis(figure)
    return figure


def phases(found: Mapping[str, Any]) -> list[str]:
    """The phases of a cold start that any state has, in the order of a start."""
    names = dict.fromkeys(phase for state in found["states"].values() for phase in state["phases_s"])
    order = list(PHASE_COLOURS)
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def cold_starts(found: Mapping[str, Any]) -> go.Figure:
    """Seconds to the first token by phase, one bar for each state of the caches."""
    states = found["states"]
    figure = go.Figure()
    for phase in [*phases(found), "warm-up after it"]:
        seconds = [
            s["until_steady"]["warm_up_s"] if phase == "warm-up after it" else s["phases_s"].get(phase, 0.0)
            for s in states.values()
        ]
        if max(seconds, default=0.0) < 1e-3:
            continue
        figure.add_trace(
            go.Bar(
                y=list(states),
                x=seconds,
                name=phase,
                orientation="h",
                marker={"color": PHASE_COLOURS.get(phase, "#94a3b8")},
                customdata=[units.seconds(s) for s in seconds],
                hovertemplate=f"%{{y}}<br>{phase}: %{{customdata}}<extra></extra>",
            )
        )
    style(figure, rows_height(len(states)) + 60, barmode="stack")
    figure.update_xaxes(title_text="seconds since the process was asked for (medians)")
    names_axis(figure)
    return figure


def layers(rows: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Milliseconds of each layer by part; what is in no layer stands at the right."""
    inside = sorted({r["layer"] for r in rows if r["layer"] is not None})
    columns = [str(layer) for layer in inside]
    figure = go.Figure()
    for part in dict.fromkeys(r["part"] for r in rows):
        by_layer = {r["layer"]: r["seconds"] for r in rows if r["part"] == part}
        x, y = list(columns), [1e3 * by_layer.get(layer, 0.0) for layer in inside]
        if None in by_layer:
            x, y = [*x, "outside"], [*y, 1e3 * by_layer[None]]
        figure.add_trace(
            go.Bar(
                x=x,
                y=y,
                name=part,
                marker={"color": PART_COLOURS.get(part, "#94a3b8")},
                hovertemplate=f"layer %{{x}}<br>{part}: %{{y:.3f}} ms<extra></extra>",
            )
        )
    style(figure, 340, barmode="stack", bargap=0.15)
    figure.update_xaxes(title_text="layer", type="category")
    figure.update_yaxes(title_text="ms in one step")
    return figure


def floor_of(row: Mapping[str, Any], weights: str, ceilings: Mapping[str, Any] | None) -> float | None:
    """The roofline's least seconds of a part or operator; None where its work is not counted."""
    if not ceilings or not row.get("bytes"):
        return None
    rates = ceilings["operations_per_s"]
    rate = rates.get(weights) or rates.get("int8" if weights in ("int8-dynamic", "int4") else "fp32")
    if rate is None:
        return None
    return floor(
        Work(row["bytes"], row.get("operations") or 0.0), Ceilings(ceilings["bytes_per_s"], rate)
    ).seconds


def resident(found: Mapping[str, Any]) -> go.Figure:
    """Resident memory over ended requests, with the fitted growth after warm-up."""
    counts, rss = found["samples"]
    leak = found["leak"]
    mib = [value / (1 << 20) for value in rss]
    figure = go.Figure(
        go.Scatter(
            x=counts,
            y=mib,
            mode="lines",
            line={"color": ACCENT, "width": 2},
            name="resident memory",
            hovertemplate="%{x} requests: %{y:.2f} MiB<extra></extra>",
        )
    )
    slope = leak["slope_bytes_per_request"]["value"]
    after = [(n, m) for n, m in zip(counts, mib, strict=True) if n >= leak["warm_up_requests"]]
    if slope is not None and after:
        (first, _), (last, _) = after[0], after[-1]
        centre_x, centre_y = (sum(values) / len(after) for values in zip(*after, strict=True))
        ends = [centre_y + slope / (1 << 20) * (x - centre_x) for x in (first, last)]
        figure.add_trace(
            go.Scatter(
                x=[first, last],
                y=ends,
                mode="lines",
                line={"color": BAD if leak["answer"] == "leaking" else MUTED, "width": 2, "dash": "dash"},
                name="growth after warm-up",
                hoverinfo="skip",
            )
        )
    style(figure, 300)
    figure.update_xaxes(title_text="requests that have ended")
    figure.update_yaxes(title_text="MiB")
    return figure
