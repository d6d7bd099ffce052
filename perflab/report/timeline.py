"""Clients' requests, the scheduler's steps, a server's own metrics and the machine on one time axis, one
run per choice.

Owns that figure. Pure: runs in, a plotly figure out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from perflab.clock import NS_PER_S
from perflab.report.look import ACCENT, BAD, GOOD, GRID, MUTED, SEGMENT_COLOURS, style
from perflab.report.telemetry import in_flight, kv_use, machine, memory, tokens
from perflab.studies.store import Run

MAX_REQUESTS = 60
MAX_STEPS = 1500
MAX_EVENTS = 200
LIFE = (
    ("waiting", SEGMENT_COLOURS["queue"]),
    ("prefill", SEGMENT_COLOURS["prefill forward"]),
    ("decode", "#93c5fd"),
)
Panel = tuple[str, str, Callable[[Run, int], list[Any]]]


def worth_showing(run: Run) -> bool:
    """Whether the run holds anything that happened over time: steps, tokens or samples."""
    return bool(run.steps or run.telemetry or any(r.token_ns for r in run.requests))


def timeline(runs: Sequence[Run], shown: int = -1, names: Sequence[str] = ()) -> go.Figure:
    """Panels over seconds since the run's start: requests with events, tokens, KV, and what was sampled.

    A panel is there if any of the runs holds something for it. One run is shown at a time, chosen by
    its name (its variant unless given); at first the one at index `shown`. Long runs with steps show
    their first `MAX_REQUESTS` requests and `MAX_STEPS` steps, others each n-th request.
    """
    drawn = [_panels(run) for run in runs]
    panels = [panel for panel in PANELS if any(found.get(panel[0]) for found in drawn)]
    heights = [1.45 if title == "requests" else 1.0 for title, *_ in panels]
    figure = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.21 / max(3, len(panels)),
        row_heights=[h / sum(heights) for h in heights],
        subplot_titles=[title for title, *_ in panels],
    )
    groups: list[int] = []
    shown %= len(runs)
    for index, found in enumerate(drawn):
        for row, (title, *_) in enumerate(panels, 1):
            for trace in found.get(title) or ():
                trace.visible = index == shown
                trace.legend = f"legend{row}" if row > 1 else "legend"
                figure.add_trace(trace, row=row, col=1)
                groups.append(index)
    style(figure, 150 + 157 * len(panels), barmode="stack", margin={"l": 10, "r": 24, "t": 78, "b": 46})
    for row in range(1, len(panels) + 1):  # each panel's legend on the line of its title
        top = {
            "y": figure.get_subplot(row, 1).yaxis.domain[1],
            "x": 1,
            "xanchor": "right",
            "yanchor": "bottom",
        }
        look = {"orientation": "h", "font": {"size": 11}, "bgcolor": "rgba(0,0,0,0)", "traceorder": "normal"}
        figure.update_layout({f"legend{row}" if row > 1 else "legend": {**top, **look}})
    figure.update_xaxes(title_text="seconds since the start of the run", row=len(panels), col=1)
    for row, (title, unit, _) in enumerate(panels, 1):
        figure.update_yaxes(title_text=unit, rangemode="tozero", row=row, col=1)
        if title == "requests":
            figure.update_yaxes(autorange="reversed", showticklabels=False, showgrid=False, row=row, col=1)
    figure.update_annotations(font={"size": 12, "color": MUTED}, x=0, xanchor="left")
    if len(runs) > 1:
        buttons = [
            {"label": name, "method": "update", "args": [{"visible": [group == index for group in groups]}]}
            for index, name in enumerate(names or [run.variant for run in runs])
        ]
        figure.update_layout(
            updatemenus=[
                {
                    "buttons": buttons,
                    "active": shown,
                    "x": 1,
                    "xanchor": "right",
                    "y": 1.0 + 66 / (26 + 157 * len(panels)),
                    "yanchor": "top",
                    "bgcolor": "#ffffff",
                    "bordercolor": GRID,
                    "font": {"size": 12},
                }
            ]
        )
    return figure


def _panels(run: Run) -> dict[str, list[Any]]:
    origin = int(run.manifest.get("started_ns") or min((r.intended_ns for r in run.requests), default=0))
    return {title: make(run, origin) for title, _, make in PANELS}


def _since(time_ns: int, origin: int) -> float:
    return (time_ns - origin) / NS_PER_S


def _lives(run: Run, origin: int) -> list[Any]:
    """Bars of each request: waiting, prefill (admission to first token), decode; events across them.

    Where the server does not tell when a request was admitted, all up to the first token is waiting.
    """
    shown = run.requests[:MAX_REQUESTS]
    if not run.steps:  # no steps to lie beside: spread over the whole run
        shown = run.requests[:: math.ceil(len(run.requests) / MAX_REQUESTS) or 1]
    bars: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in LIFE}
    for r in shown:
        last = r.last_token_ns or r.end_ns or r.sent_ns
        first = r.first_token_ns or last
        admitted = r.admitted_ns or first
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
        if any(length for _, length in bars[name])
    ] + _events(run, origin, names)


def _events(run: Run, origin: int, names: list[str]) -> list[Any]:
    """A line across the requests at each thing that happened to the service."""
    if not run.events or not names:
        return []
    times = [_since(event.time_ns, origin) for event in run.events[:MAX_EVENTS]]
    told = [f"{event.kind} {event.subject}" for event in run.events[:MAX_EVENTS]]
    trace = go.Scatter(
        x=[x for time in times for x in (time, time, None)],
        y=[y for _ in times for y in (names[0], names[-1], None)],
        text=[word for text in told for word in (text, text, "")],
        mode="lines",
        name="events",
        line={"color": BAD, "width": 1.2, "dash": "dot"},
        hovertemplate="%{text} at %{x:.3f} s<extra></extra>",
    )
    return [trace]


def _tokens(run: Run, origin: int) -> list[Any]:
    """Prefill and decode tokens of each engine step, as wide as the step."""
    steps = run.steps[:MAX_STEPS]
    middles = [_since((s.start_ns + s.delivered_ns) // 2, origin) for s in steps]
    widths = [max(1e-6, 0.94 * (s.delivered_ns - s.start_ns) / NS_PER_S) for s in steps]
    if not steps:
        return []
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
    if not steps:
        return []
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


PANELS: tuple[Panel, ...] = (
    ("requests", "", _lives),
    ("tokens in each step", "tokens", _tokens),
    ("output tokens/s as the client received them", "tokens/s", tokens),
    ("requests in flight", "requests", in_flight),
    ("KV blocks", "blocks", _blocks),
    ("KV use that the server reports", "%", kv_use),
    ("machine", "%", machine),
    ("memory", "GiB", memory),
)
"""Title, unit of its axis, and what draws it; in this order from top to bottom."""
