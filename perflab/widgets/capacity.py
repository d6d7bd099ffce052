"""Views of a sweep: latency and completions over load, and a limit to move, with the capacity that it leaves.

Owns figures, sentences and widgets; capacity and knee are `measure.capacity`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython.display import display
from plotly.subplots import make_subplots

from perflab.measure import metrics, stats
from perflab.measure.metrics import SLO
from perflab.report import look, units
from perflab.report.figures import finite
from perflab.widgets import lessons, panels
from perflab.widgets.lessons import Swept

_MS = [digit * 10**decade for decade in range(6) for digit in (1, 2, 5)]
TICKS = {"tickvals": _MS, "ticktext": [units.seconds(ms / 1e3, 1) for ms in _MS]}
"""Of a logarithmic axis of milliseconds; those within its range are shown."""

LINES = (("mean", "#f59e0b", "dash"), ("p50", look.ACCENT, "solid"), ("p99", look.BAD, "solid"))


def curves(swept: Swept) -> go.Figure:
    """Over the rate that was asked: the latency of whole answers above, the rate that was completed below."""
    levels = list(swept.requests)
    figure = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.6, 0.4])
    latencies = {
        name: [lessons.e2e_ms(requests, name) for requests in swept.requests.values()] for name, *_ in LINES
    }
    for name, colour, dash in LINES:
        figure.add_scatter(
            x=levels,
            y=finite(latencies[name]),
            name=f"E2E, {name}",
            mode="lines+markers",
            line={"color": colour, "dash": dash},
            row=1,
            col=1,
        )
    figure.add_scatter(
        x=levels,
        y=levels,
        name="all that was asked",
        mode="lines",
        line={"color": look.MUTED, "dash": "dot"},
        row=2,
        col=1,
    )
    figure.add_scatter(
        x=levels,
        y=[point.rate for point in swept.result.usable],
        name="completed",
        mode="lines+markers",
        line={"color": look.GOOD},
        row=2,
        col=1,
    )
    look.style(figure, 520)
    knee = swept.result.knee.level
    if knee is not None:
        figure.add_vline(x=knee, line={"color": look.MUTED, "dash": "dash", "width": 1})
        figure.add_annotation(
            x=knee,
            y=1,
            yref="y domain",
            text="knee",
            showarrow=False,
            xanchor="left",
            yanchor="top",
            xshift=4,
        )
    figure.update_xaxes(rangemode="tozero")
    figure.update_xaxes(title_text="requests asked per second", row=2)
    figure.update_yaxes(type="log", title_text="E2E", **TICKS, row=1)
    figure.update_yaxes(title_text="requests/s", rangemode="tozero", row=2)
    return figure


def describe(swept: Swept) -> str:
    """Knee and saturation, what they rest on, and what the verdicts said."""
    result = swept.result
    knee, most = result.knee, result.saturation
    samples = [point.samples for point in result.usable]
    said = f"{len(samples)} levels, {min(samples)} to {max(samples)} requests each. " if samples else ""
    if knee.level is None or most is None:
        return f"{said}No knee: {knee.reason}."
    said += (
        f"At most {units.number(most)} requests/s were completed; the knee is at {units.number(knee.level)}"
    )
    said += f" ({units.number(knee.low)} to {units.number(knee.high)})." if knee.low != knee.high else "."
    names = sorted({name for point in result.usable for name, _ in point.reasons})
    return said + (f" Some of these short runs are not valid: {', '.join(names)}." if names else "")


def describe_averages(swept: Swept) -> str:
    """What the mean hides at the highest level, and what averaged percentiles hide."""
    level, requests = list(swept.requests.items())[-1]
    values = metrics.samples(requests, metrics.e2e_s)
    mean = sum(values) / len(values)
    slower = sum(value > mean for value in values) / len(values)
    each = [lessons.e2e_ms(found, "p99") / 1e3 for found in swept.requests.values()]
    everybody = [r for found in swept.requests.values() for r in found]
    pooled = lessons.e2e_ms(everybody, "p99") / 1e3
    return (
        f"At {units.number(level)} requests/s the mean is {units.seconds(mean)}; {units.percent(slower, 0)} "
        f"of the requests took longer, the slowest {units.seconds(max(values))}. "
        f"The P99s of all levels average {units.seconds(sum(each) / len(each))}; "
        f"the P99 of all requests together is {units.seconds(pooled)}."
    )


def frontier(swept: Swept) -> go.Figure:
    """What is completed against what it costs; the line joins the levels that no other beats in both."""
    points, best = swept.result.usable, swept.result.frontier
    figure = go.Figure()
    figure.add_scatter(
        x=[point.rate for point in best],
        y=[1e3 * (point.p99_s or 0.0) for point in best],
        name="no other level beats these in both",
        mode="lines",
        line={"color": look.ACCENT, "dash": "dot"},
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=[point.rate for point in points],
        y=[1e3 * value if value is not None else None for value in finite(point.p99_s for point in points)],
        text=[units.number(point.level) for point in points],
        name="requests asked per second",
        mode="markers+text",
        textposition="top center",
        marker={"size": 10, "color": [look.ACCENT if point in best else look.UNSURE for point in points]},
        hovertemplate="asked %{text}/s, completed %{x:.3~g}/s<br>P99 %{y:.3~g} ms<extra></extra>",
    )
    look.style(figure, 380)
    figure.update_xaxes(title_text="requests completed per second (more is better →)", rangemode="tozero")
    figure.update_yaxes(title_text="P99 of E2E, ms (less is better ↓)", rangemode="tozero")
    return figure


class LimitExplorer:
    """A limit on the whole answer and a share that must meet it; what the service bears follows at once."""

    def __init__(self, swept: Swept, limits_ms: Sequence[int], shares: Sequence[float]) -> None:
        self._swept = swept
        self.limit = panels.slider("limit, ms", limits_ms, limits_ms[len(limits_ms) // 2])
        self.share = panels.slider("must meet it, %", shares, shares[-2])
        self.caption = widgets.HTML(layout=panels.WIDE)
        self.canvas = panels.Canvas()
        self.figure = look.style(go.Figure(), 380, showlegend=True)
        self.figure.add_scatter(
            x=list(swept.requests), name="slowest of them", mode="lines+markers", line={"color": look.BAD}
        )
        self.figure.add_hline(y=1, line={"color": look.ACCENT, "dash": "dash"})
        self.figure.add_vrect(x0=0, x1=0, fillcolor=look.GOOD, opacity=0.12, line_width=0)
        self.figure.update_xaxes(title_text="requests asked per second", rangemode="tozero")
        self.figure.update_yaxes(type="log", title_text="E2E", **TICKS)
        for control in (self.limit, self.share):
            control.continuous_update = True
            control.observe(self.update, names="value")

    def update(self, change: Any = None) -> None:
        """Judge the requests that were measured by what the sliders say, and draw."""
        limit_ms, share = self.limit.value, self.share.value
        found = self._swept.capacity(SLO(e2e_s=limit_ms / 1e3), share / 100)
        level = found.level or 0.0
        slowest = [
            1e3 * stats.percentile_value(metrics.samples(requests, metrics.e2e_s), min(share / 100, 0.9999))
            for requests in self._swept.requests.values()
        ]
        self.figure.data[0].update(y=finite(slowest), name=f"{share:g} % are faster")
        line, area = self.figure.layout.shapes
        line.update(y0=limit_ms, y1=limit_ms)
        area.update(x1=level)
        self.canvas.draw(self.figure)
        most = self._swept.result.saturation
        told = f"<b>Capacity: {units.number(level)} requests/s</b>" if level else "<b>No level meets this</b>"
        if most and 0 < level <= most:  # a short run can end well beyond what lasts
            told += f", {units.percent(level / most, 0)} of the most that was completed"
        self.caption.value = panels.card(told + (f"; {found.reason}." if found.reason else "."))


def explore_limit(
    swept: Swept,
    limits_ms: Sequence[int] = (50, 100, 150, 200, 300, 400, 600, 800, 1200, 2000),
    shares: Sequence[float] = (50, 90, 95, 99),
) -> LimitExplorer:
    """Sliders over limit and share; nothing is run again, because every request was kept."""
    panel = LimitExplorer(swept, limits_ms, shares)
    display(widgets.VBox([panel.limit, panel.share, panel.caption, panel.canvas]))
    panel.update()
    return panel
