"""Views of hardware limits: the roof with measured steps under it, shares of the ceiling, a floor to explore.

Owns widgets and nothing else: what they show is computed by `limits` and `roofline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython.display import display

from perflab.measure.roofline import Sizes, decode, floor
from perflab.report import look, units
from perflab.widgets import panels
from perflab.widgets.limits import Limits, Point

COLOURS = (look.BAD, look.ACCENT, look.GOOD, "#8b5cf6")
MARKS = ("circle", "diamond", "square")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def describe(limits: Limits) -> str:
    """The ceilings and the ridge of each format in a sentence."""
    rates = [
        f"{weights} {rate / 1e9:,.0f} GOP/s (ridge at {limits.of(weights).ridge:.0f} operations per byte)"
        for weights, rate in limits.operations_per_s.items()
    ]
    return f"Memory can be read at {limits.bytes_per_s / 1e9:.1f} GB/s. Products: {', '.join(rates)}."


def roof(points: Sequence[Point], limits: Limits) -> go.Figure:
    """The roof of each format of weights, and the steps under it: colour by variant, shape by regime."""
    intensities = [point.work.intensity for point in points]
    low, high = 0.4 * min(intensities), 3 * max(intensities)
    regimes = list(dict.fromkeys(point.regime.name for point in points))
    figure = go.Figure()
    for weights, dash in zip(
        dict.fromkeys(p.variant.weights for p in points), ("solid", "dash", "dot"), strict=False
    ):
        ceilings = limits.of(weights)
        corners = [low, min(max(ceilings.ridge, low), high), high]
        figure.add_scatter(
            x=corners,
            y=[ceilings.attainable(x) / 1e9 for x in corners],
            mode="lines",
            name=f"the roof, {weights}",
            line={"color": look.MUTED, "dash": dash},
            hoverinfo="skip",
        )
    for (name, mine), colour in zip(_by_variant(points).items(), COLOURS, strict=False):
        figure.add_scatter(
            x=[p.work.intensity for p in mine],
            y=[p.operations_per_s / 1e9 for p in mine],
            mode="markers",
            name=name,
            marker={
                "color": colour,
                "size": 12,
                "symbol": [MARKS[regimes.index(p.regime.name) % len(MARKS)] for p in mine],
            },
            customdata=[[p.regime.name, _words(p)] for p in mine],
            hovertemplate=f"<b>{name}</b>, %{{customdata[0]}}<br>%{{customdata[1]}}<extra></extra>",
        )
    for mark, name in zip(MARKS, regimes, strict=False):
        figure.add_scatter(
            x=[None],
            y=[None],
            mode="markers",
            name=name,
            marker={"symbol": mark, "color": look.INK, "size": 9},
        )
    look.style(figure, 480, legend={"y": -0.2, "yanchor": "top"}, margin={"b": 130})
    figure.update_xaxes(type="log", title_text="operations per byte read", dtick=1)
    figure.update_yaxes(type="log", title_text="GOP/s (10⁹ operations/s)", dtick=1)
    return figure


def shares(points: Sequence[Point]) -> go.Figure:
    """What share of its ceiling each step reaches, by regime; the dotted line is the ceiling."""
    figure = go.Figure()
    for (name, mine), colour in zip(_by_variant(points).items(), COLOURS, strict=False):
        figure.add_bar(
            x=[p.regime.name for p in mine],
            y=[100 * p.share for p in mine],
            name=name,
            marker={"color": colour},
            text=[units.seconds(p.step_s) for p in mine],
            textposition="outside",
            cliponaxis=False,
            hovertext=[_words(p) for p in mine],
            hovertemplate=f"<b>{name}</b>, %{{x}}<br>%{{hovertext}}<extra></extra>",
        )
    figure.add_hline(y=100, line={"color": look.MUTED, "dash": "dot"})
    look.style(figure, 340, barmode="group", bargap=0.25)
    figure.update_yaxes(title_text="share of the ceiling, %", rangemode="tozero")
    return figure


def _by_variant(points: Sequence[Point]) -> dict[str, list[Point]]:
    names = dict.fromkeys(point.variant.name for point in points)
    return {name: [point for point in points if point.variant.name == name] for name in names}


def _words(point: Point) -> str:
    return (
        f"a step takes {units.seconds(point.step_s)}, at least {units.seconds(point.floor.seconds)} "
        f"(bound by {point.floor.binds}): {units.percent(point.share, 0)} of the ceiling"
    )


class FloorExplorer:
    """Two sliders, and the ceiling of tokens/s over requests for each format of weights: nothing is run."""

    def __init__(self, sizes: Sizes, limits: Limits, kv: str, contexts: Sequence[int]) -> None:
        self._sizes, self._limits, self._kv = sizes, limits, kv
        self.context = panels.slider("context, tokens", contexts)
        self.requests = panels.slider("requests", BATCHES)
        self.canvas = panels.Canvas()
        self.figure = look.style(go.Figure(), 340)
        self.caption = widgets.HTML(layout=panels.WIDE)
        for weights in limits.operations_per_s:
            self.figure.add_scatter(x=BATCHES, name=weights, mode="lines+markers")
        self.figure.add_vline(x=1, line={"color": look.MUTED, "dash": "dot"})
        self.figure.update_xaxes(type="log", title_text="requests in a step", tickvals=BATCHES)
        self.figure.update_yaxes(title_text="tokens/s at most", rangemode="tozero")
        for control in (self.context, self.requests):
            control.observe(self.update, names="value")

    def update(self, change: Any = None) -> None:
        """Compute what the sliders say, and draw."""
        context, chosen = self.context.value, self.requests.value
        lines = []
        for trace in self.figure.data:
            weights = trace.name
            ceilings = self._limits.of(weights)
            floors = [floor(decode(self._sizes, n, context, weights, self._kv), ceilings) for n in BATCHES]
            trace.y = [n / least.seconds for n, least in zip(BATCHES, floors, strict=True)]
            here = floors[BATCHES.index(chosen)]
            lines.append(f"<b>{weights}</b>: {units.seconds(here.seconds)} a step, bound by {here.binds}")
        self.figure.layout.shapes[0].update(x0=chosen, x1=chosen)
        self.canvas.draw(self.figure)
        self.caption.value = panels.card(f"{chosen} × {context} tokens. " + "; ".join(lines))


def explore_floor(
    sizes: Sizes, limits: Limits, kv: str, contexts: Sequence[int] = (64, 256, 1024, 4096)
) -> FloorExplorer:
    """Sliders over context and requests; the floor follows at once."""
    panel = FloorExplorer(sizes, limits, kv, contexts)
    display(widgets.VBox([panel.context, panel.requests, panel.caption, panel.canvas]))
    panel.update()
    return panel
