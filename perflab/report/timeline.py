"""The scheduler's steps and the clients' requests on one time axis, one run per choice.

Owns that figure. Pure: a run in, a plotly figure out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from perflab.clock import NS_PER_S
from perflab.report.look import ACCENT, GOOD, GRID, MUTED, SEGMENT_COLOURS, style
from perflab.studies.store import Run

MAX_REQUESTS = 60
MAX_STEPS = 1500
LIFE = (
    ("waiting", SEGMENT_COLOURS["queue"]),
    ("prefill", SEGMENT_COLOURS["prefill forward"]),
    ("decode", "#93c5fd"),
)


def timeline(runs: Sequence[Run], shown: int = -1) -> go.Figure:
    """Three panels over seconds since the run's start: requests, tokens per step, KV blocks.

    One run is shown at a time, chosen by its variant; at first the one at index `shown`. Long runs show
    their first
    `MAX_REQUESTS` requests and `MAX_STEPS` steps.
    """
    figure = make_subplots(
        rows=3,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.07,
        row_heights=[0.42, 0.29, 0.29],
        subplot_titles=("requests", "tokens in each step", "KV blocks"),
    )
    groups: list[int] = []
    shown %= len(runs)
    for index, run in enumerate(runs):
        for trace, row in _traces(run):
            trace.visible = index == shown
            figure.add_trace(trace, row=row, col=1)
            groups.append(index)
    style(figure, 620, barmode="stack", margin={"l": 10, "r": 24, "t": 78, "b": 46})
    figure.update_layout(legend={"y": 1.06, "x": 0, "font": {"size": 12}})
    figure.update_xaxes(title_text="seconds since the start of the run", row=3, col=1)
    figure.update_yaxes(
        title_text="", autorange="reversed", showticklabels=False, showgrid=False, row=1, col=1
    )
    figure.update_yaxes(title_text="tokens", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(title_text="blocks", rangemode="tozero", row=3, col=1)
    figure.update_annotations(font={"size": 12, "color": MUTED}, x=0, xanchor="left")
    if len(runs) > 1:
        buttons = [
            {
                "label": run.variant,
                "method": "update",
                "args": [{"visible": [group == index for group in groups]}],
            }
            for index, run in enumerate(runs)
        ]
        figure.update_layout(
            updatemenus=[
                {
                    "buttons": buttons,
                    "active": shown,
                    "x": 1,
                    "xanchor": "right",
                    "y": 1.19,
                    "yanchor": "top",
                    "bgcolor": "#ffffff",
                    "bordercolor": GRID,
                    "font": {"size": 12},
                }
            ]
        )
    return figure


def _traces(run: Run) -> list[tuple[Any, int]]:
    origin = int(run.manifest.get("started_ns") or min((r.intended_ns for r in run.requests), default=0))
    return [
        *((t, 1) for t in _lives(run, origin)),
        *((t, 2) for t in _tokens(run, origin)),
        *((t, 3) for t in _blocks(run, origin)),
    ]


def _since(time_ns: int, origin: int) -> float:
    return (time_ns - origin) / NS_PER_S


def _lives(run: Run, origin: int) -> list[Any]:
    """Bars of each request: waiting, prefill (admission to first token), decode."""
    shown = run.requests[:MAX_REQUESTS]
    bars: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in LIFE}
    for r in shown:
        last = r.last_token_ns or r.end_ns or r.sent_ns
        admitted = r.admitted_ns or last
        first = r.first_token_ns or last
        moments = (r.intended_ns, admitted, max(admitted, first), max(last, first))
        for (name, _), begin, end in zip(LIFE, moments, moments[1:], strict=False):
            bars[name].append((_since(begin, origin), max(0.0, (end - begin) / NS_PER_S)))
    names = [r.request_id for r in shown]
    return [
        go.Bar(
            y=names,
            base=[start for start, _ in bars[name]],
            x=[length for _, length in bars[name]],
            orientation="h",
            name=name,
            marker={"color": colour, "line": {"width": 0}},
            offset=-0.35,
            width=0.7,
            hovertemplate=f"%{{y}}<br>{name} %{{x:.3f}} s from %{{base:.3f}} s<extra></extra>",
        )
        for name, colour in LIFE
    ]


def _tokens(run: Run, origin: int) -> list[Any]:
    steps = run.steps[:MAX_STEPS]
    middles = [_since((s.start_ns + s.delivered_ns) // 2, origin) for s in steps]
    widths = [max(1e-6, 0.94 * (s.delivered_ns - s.start_ns) / NS_PER_S) for s in steps]
    kinds = (
        ("prefill tokens", SEGMENT_COLOURS["prefill forward"], [s.prefill_tokens for s in steps]),
        ("decode tokens", SEGMENT_COLOURS["decode forward"], [s.decode_tokens for s in steps]),
    )
    return [
        go.Bar(
            x=middles,
            y=values,
            width=widths,
            name=name,
            marker={"color": colour, "line": {"width": 0}},
            customdata=[[s.index, s.rows, (s.delivered_ns - s.start_ns) / 1e6] for s in steps],
            hovertemplate=f"step %{{customdata[0]}}: %{{y}} {name}<br>%{{customdata[1]}} requests, "
            "%{customdata[2]:.1f} ms<extra></extra>",
        )
        for name, colour, values in kinds
    ]


def _blocks(run: Run, origin: int) -> list[Any]:
    """Occupancy after each step: used by running requests, held by the prefix cache, and the pool."""
    steps = run.steps[:MAX_STEPS]
    if not any(s.kv_blocks_total for s in steps):
        end = _since(max((s.delivered_ns for s in steps), default=origin), origin)
        note = go.Scatter(x=[end / 2], y=[0.5], mode="text", text=["this variant keeps no KV blocks"])
        note.update(textfont={"color": MUTED, "size": 12}, hoverinfo="skip", showlegend=False)
        return [note]
    times = [_since(s.delivered_ns, origin) for s in steps]
    areas = (
        ("used by running requests", GOOD, [s.kv_blocks_used for s in steps]),
        ("prefix cache only", "#bfe3d4", [s.kv_blocks_cached for s in steps]),
    )
    traces: list[Any] = [
        go.Scatter(
            x=times,
            y=values,
            name=name,
            mode="lines",
            stackgroup="blocks",
            line={"width": 0.5, "color": colour, "shape": "hv"},
            hovertemplate=f"%{{y}} blocks {name}<extra></extra>",
        )
        for name, colour, values in areas
    ]
    total = [s.kv_blocks_total for s in steps]
    line = {"color": ACCENT, "width": 1, "dash": "dot"}
    return [*traces, go.Scatter(x=times, y=total, name="pool", mode="lines", line=line)]
