"""Figures of a sweep: tail latency against load, and what is won for it.

Owns what is drawn. Pure functions from a sweep's result to plotly figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from perflab.measure.capacity import Point
from perflab.report import units
from perflab.report.look import ACCENT, BAD, GOOD, INK, MUTED, UNSURE, style
from perflab.studies.sweep_result import SweepResult

LINES = (("E2E", "p99", ACCENT, "solid"), ("E2E", "p50", ACCENT, "dot"), ("TTFT", "p99", "#f59e0b", "solid"))


def load_and_latency(found: SweepResult) -> go.Figure:
    """Left: latency by level, flat, then the knee, then collapse. Right: P99 by what was completed.

    Points that don't count are grey crosses; a P99 that failures make infinite stands at the top edge.
    """
    good = found.usable
    refused = [p for p in found.points if p not in good]
    x = "users" if found.by == "users" else "requests/s asked"
    figure = make_subplots(
        rows=1,
        cols=2,
        column_widths=[0.62, 0.38],
        horizontal_spacing=0.09,
        subplot_titles=("latency by load", "what is completed, at which P99"),
    )
    known = [v for p in found.points for v in (p.latencies["E2E"]["p99"].value,) if v and math.isfinite(v)]
    top = 2 * max(known, default=1.0)
    for name, quantile, colour, dash in LINES:
        figure.add_trace(_line(good, name, quantile, colour, dash, top), row=1, col=1)
    if refused:
        figure.add_trace(
            go.Scatter(
                x=[p.level for p in refused],
                y=[_shown(p.p99_s, top) for p in refused],
                mode="markers",
                name="not used",
                marker={"symbol": "x", "size": 9, "color": UNSURE},
                text=[", ".join(reason for reason, _ in p.reasons) for p in refused],
                hovertemplate="%{x:.3~g}: %{text}<extra></extra>",
            ),
            row=1,
            col=1,
        )
    edge = {"best": found.frontier, "other": [p for p in good if p not in found.frontier]}
    for kind, points in edge.items():
        figure.add_trace(
            go.Scatter(
                x=[p.rate for p in points],
                y=[_shown(p.p99_s, top) for p in points],
                mode="lines+markers" if kind == "best" else "markers",
                name="frontier",
                showlegend=kind == "best" and bool(points),
                marker={"size": 8, "color": GOOD if kind == "best" else UNSURE},
                line={"color": GOOD, "width": 1.5},
                text=[f"{p.level:g} {'users' if found.by == 'users' else 'asked/s'}" for p in points],
                hovertemplate="%{text}: %{x:.3~g} requests/s, P99 %{y:.3~g} s<extra></extra>",
            ),
            row=1,
            col=2,
        )
    _marks(figure, found)
    style(figure, 420, margin={"l": 10, "r": 24, "t": 76, "b": 46})
    figure.update_layout(legend={"y": 1.12})
    figure.update_annotations(selector={"yref": "paper"}, font={"size": 13, "color": INK})
    figure.update_xaxes(title_text=x, row=1, col=1)
    figure.update_xaxes(title_text="requests/s completed", rangemode="tozero", row=1, col=2)
    figure.update_yaxes(type="log", title_text="seconds", row=1, col=1)
    figure.update_yaxes(type="log", row=1, col=2)
    return figure


def _line(
    points: Sequence[Point], name: str, quantile: str, colour: str, dash: str, top: float
) -> go.Scatter:
    estimates = [p.latencies[name][quantile] for p in points]
    shown = [_shown(e.value, top) for e in estimates]
    bars = None
    if dash == "solid":
        up = [_shown(e.high, top) if e.high is not None else y for e, y in zip(estimates, shown, strict=True)]
        down = [
            e.low if e.low is not None and math.isfinite(e.low) else y
            for e, y in zip(estimates, shown, strict=True)
        ]
        bars = {
            "type": "data",
            "symmetric": False,
            "thickness": 1.2,
            "width": 4,
            "color": colour,
            "array": [(u or 0) - (y or 0) for u, y in zip(up, shown, strict=True)],
            "arrayminus": [(y or 0) - (d or 0) for d, y in zip(down, shown, strict=True)],
        }
    return go.Scatter(
        x=[p.level for p in points],
        y=shown,
        error_y=bars,
        mode="lines+markers",
        name=f"{name} {quantile}",
        line={"color": colour, "width": 2, "dash": dash},
        marker={"size": 6, "color": colour},
        text=[
            f"{units.seconds(e.value)} of {p.samples} requests"
            for e, p in zip(estimates, points, strict=True)
        ],
        hovertemplate=f"<b>{name} {quantile}</b> at %{{x:.3~g}}: %{{text}}<extra></extra>",
    )


def _marks(figure: go.Figure, found: SweepResult) -> None:
    """The knee and the capacity with their intervals, and the limits."""
    for name, one, colour, height in (
        ("knee", found.knee, MUTED, 0.98),
        ("capacity", found.capacity, GOOD, 0.9),
    ):
        if one.level is None:
            continue
        if one.low is not None and one.high is not None and one.high > one.low:
            figure.add_vrect(
                x0=one.low, x1=one.high, fillcolor=colour, opacity=0.12, line_width=0, row=1, col=1
            )
        label = {"text": name, "font": {"size": 11, "color": colour}, "y": height, "yanchor": "top"}
        figure.add_vline(
            x=one.level, line={"color": colour, "width": 1.2, "dash": "dash"}, annotation=label, row=1, col=1
        )
    for name, limit in (("E2E", found.slo.e2e_s), ("TTFT", found.slo.ttft_s)):
        if limit is not None:
            figure.add_hline(limit, line={"color": BAD, "width": 1, "dash": "dot"}, row=1, col=1)
            figure.add_annotation(
                x=0.01,
                xref="x domain",
                xanchor="left",
                y=math.log10(limit),  # an annotation's place on a logarithmic axis is the logarithm
                yanchor="bottom",
                text=f"limit of {name}",
                font={"size": 11, "color": BAD},
                showarrow=False,
                row=1,
                col=1,
            )


def _shown(value: float | None, top: float) -> float | None:
    return value if value is None or math.isfinite(value) else top
