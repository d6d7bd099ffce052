"""Figures of runs against a service: how many requests were answered within which time, what changed.

Owns what is drawn. Pure functions from summaries to plotly figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from perflab.measure import metrics, stats
from perflab.report import units
from perflab.report.figures import finite
from perflab.report.look import ACCENT, BAD, GOOD, INK, MUTED, TONES, UNSURE, names_axis, rows_height, style
from perflab.report.summary import Summary, slo_of
from perflab.types import RequestRecord

LINES = (UNSURE, ACCENT, GOOD, "#f59e0b", "#8b5cf6", BAD, "#38a89d")
"""One colour a group; the first, what was before, is grey where there are several."""

PANELS: tuple[tuple[str, str, Callable[[RequestRecord], float | None]], ...] = (
    ("ttft_s", "first token within", metrics.ttft_s),
    ("e2e_s", "whole answer within", metrics.e2e_s),
)


def reached(summaries: Sequence[Summary]) -> go.Figure:
    """The share of all requests that had their first token, and their whole answer, within a time.

    A curve of failures stays below 100 %: what it never reaches stands as ∞ at the right edge.
    """
    figure = make_subplots(
        rows=1,
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.05,
        subplot_titles=[title for _, title, _ in PANELS],
    )
    colours = LINES[1:] if len(summaries) == 1 else LINES
    for column, (limit_name, _, metric) in enumerate(PANELS, 1):
        found = [sorted(metrics.samples(s.records, metric)) for s in summaries]
        known = [v for values in found for v in values if math.isfinite(v) and v > 0]
        low, high = min(known, default=0.001), max(known, default=1.0)
        edge = high * (high / low) ** 0.12 * 1.05
        for index, (s, values) in enumerate(zip(summaries, found, strict=True)):
            ends = [v for v in values if math.isfinite(v)]
            shares = [100 * (i + 1) / len(values) for i in range(len(ends))]
            colour = colours[index % len(colours)]
            figure.add_trace(
                go.Scatter(
                    x=[max(v, low) for v in (ends[:1] + ends)] + ([edge] if ends else []),
                    y=[0.0, *shares, shares[-1]] if ends else [],
                    mode="lines",
                    name=s.name if s.valid else f"{s.name} (invalid)",
                    legendgroup=s.name,
                    showlegend=column == 1,
                    line={
                        "color": colour,
                        "width": 2.2,
                        "shape": "hv",
                        "dash": "solid" if s.valid else "dot",
                    },
                    hovertemplate=f"<b>{s.name}</b><br>%{{y:.1f}} % within %{{x:.3~g}} s<extra></extra>",
                ),
                row=1,
                col=column,
            )
            if len(ends) < len(values):
                lost = 100 * (len(values) - len(ends)) / len(values)
                figure.add_trace(
                    go.Scatter(
                        x=[edge],
                        y=[shares[-1] if shares else 0.0],
                        mode="markers+text",
                        text=["∞"],
                        textposition="top center",
                        textfont={"size": 17, "color": colour},
                        marker={
                            "size": 9,
                            "color": colour,
                            "symbol": "x-thin",
                            "line": {"color": colour, "width": 2},
                        },
                        showlegend=False,
                        legendgroup=s.name,
                        cliponaxis=False,
                        hovertemplate=f"<b>{s.name}</b><br>{lost:.1f} % never<extra></extra>",
                    ),
                    row=1,
                    col=column,
                )
        limits = {getattr(slo_of(run), limit_name) for s in summaries for run in s.runs} - {None}
        for limit in limits:
            figure.add_vline(x=limit, line={"color": MUTED, "width": 1, "dash": "dash"}, row=1, col=column)
            figure.add_annotation(
                x=math.log10(limit),
                y=2,
                text=f"limit {units.seconds(limit)}",
                font={"size": 11, "color": MUTED},
                xanchor="left",
                yanchor="bottom",
                showarrow=False,
                row=1,
                col=column,
            )
        ticks = time_ticks(low, edge)
        figure.update_xaxes(
            type="log",
            title_text="from the intended start",
            tickvals=ticks,
            ticktext=[units.seconds(t, 2 if edge < 6 * low else 1) for t in ticks],
            row=1,
            col=column,
        )
    style(figure, 360, margin={"l": 10, "r": 30, "t": 76, "b": 46})
    figure.update_layout(legend={"y": 1.14})
    figure.update_annotations(selector={"yref": "paper"}, font={"size": 13, "color": INK})
    figure.update_yaxes(range=[0, 104], ticksuffix=" %")
    figure.update_yaxes(title_text="of all requests", row=1, col=1)
    return figure


def time_ticks(low: float, high: float) -> list[float]:
    """Values 1, 2 and 5 of each decade between two; more of them where the two are close, the decades
    alone where they are far apart."""
    if high < 6 * low:
        raw = (high - low) / 5
        step = next(s for k in (1, 2, 5, 10) if (s := k * 10.0 ** math.floor(math.log10(raw))) >= raw)
        return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    return [v for d in decades for step in steps if low <= (v := step * 10.0**d) <= high]


def changes(found: Sequence[tuple[str, stats.Comparison]], before: str) -> go.Figure:
    """How many times as fast each measure became, with its interval; the colour is the answer."""
    names = [name for name, _ in found]
    figure = go.Figure()
    for answer, colour in TONES.items():
        chosen = [(n, c) for n, c in found if c.answer == answer and c.ratio.value]
        arms = [c.ratio.arms for _, c in chosen]
        figure.add_trace(
            go.Scatter(
                x=finite(c.ratio.value for _, c in chosen),
                y=[n for n, _ in chosen],
                mode="markers",
                name=answer,
                marker={"size": 12, "color": colour},
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": [up and min(up, 10.0) for _, up in arms],
                    "arrayminus": [down for down, _ in arms],
                    "color": colour,
                    "thickness": 1.6,
                    "width": 5,
                },
                hovertemplate="<b>%{y}</b><br>%{x:.3g}× as fast<extra></extra>",
            )
        )
    figure.add_vline(x=1, line={"color": "#51607a", "width": 1, "dash": "dot"})
    style(figure, rows_height(len(names)), margin={"l": 10, "r": 24, "t": 30, "b": 46})
    figure.update_xaxes(title_text=f"times as fast as “{before}” (right of 1 is better →)", ticksuffix="×")
    figure.update_yaxes(categoryorder="array", categoryarray=names, range=[len(names) - 0.5, -0.5])
    names_axis(figure)
    figure.update_yaxes(autorange=None, range=[len(names) - 0.5, -0.5])
    return figure
