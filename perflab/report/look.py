"""How figures look: colours, axes, fonts. Owns no data."""

from __future__ import annotations

import plotly.graph_objects as go

INK, MUTED, GRID, PAPER = "#1c2733", "#66758a", "#e6eaf0", "#ffffff"
ACCENT, GOOD, BAD, UNSURE = "#2563eb", "#0f9d6b", "#d1453b", "#97a3b4"
TONES = {"faster": GOOD, "slower": BAD, "cannot tell": UNSURE}
SEGMENT_COLOURS = {
    "client queue": "#c3cad6",
    "connect": "#94a3b8",
    "send": "#0ea5e9",
    "receive": "#84cc16",
    "serialise": "#c084fc",
    "unattributed": "#9ca3af",
    "tokenise": "#8b5cf6",
    "queue": "#e2b96b",
    "requeue": "#c98a2b",
    "schedule": "#7dd3c0",
    "batch": "#38a89d",
    "prefill forward": "#1d4ed8",
    "decode forward": "#60a5fa",
    "sample": "#f472b6",
    "commit": "#fb923c",
    "detokenise": "#a3a847",
    "retry": "#b91c1c",
    "network up": "#0891b2",
    "parse": "#4d7c0f",
    "server tokenise": "#a78bfa",
    "hand over": "#fcd34d",
    "hand on": "#d9f99d",
    "hand back": "#fdba74",
    "write": "#e879f9",
    "network down": "#22d3ee",
    "residual": "#374151",
}
FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'Noto Sans', sans-serif"


def style(figure: go.Figure, height: int, **layout: object) -> go.Figure:
    """The report's look: white, quiet grid, room for long names."""
    figure.update_layout(
        template="none",
        height=height,
        font={"family": FONT, "size": 13, "color": INK},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        margin={"l": 10, "r": 24, "t": 30, "b": 46},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        hoverlabel={"font": {"family": FONT, "size": 12}, "bgcolor": "#ffffff", "bordercolor": GRID},
        bargap=0.38,
    )
    figure.update_layout(**layout)
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": "#c6ced9", "ticks": "", "automargin": True}
    figure.update_xaxes(
        title_font={"size": 12, "color": MUTED}, tickfont={"size": 12, "color": MUTED}, **axis
    )
    figure.update_yaxes(title_font={"size": 12, "color": MUTED}, **axis)
    return figure


def rows_height(count: int, least: int = 220) -> int:
    """Pixels for `count` horizontal bars."""
    return max(least, 110 + 34 * count)


def names_axis(figure: go.Figure) -> None:
    """The first name on top, as in a table."""
    figure.update_yaxes(autorange="reversed", tickfont={"size": 13, "color": INK}, showgrid=False)
