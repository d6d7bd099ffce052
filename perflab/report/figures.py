"""Figures of a report: pure functions from summaries and runs to plotly figures.

Owns what is drawn. Missing and infinite values become None, so that any viewer can read
the JSON. Each figure has a sentence computed from the same data in `takeaways`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from perflab.measure import latency
from perflab.measure.stats import Estimate
from perflab.report import units
from perflab.report.look import (
    ACCENT,
    BAD,
    INK,
    MUTED,
    SEGMENT_COLOURS,
    TONES,
    UNSURE,
    names_axis,
    rows_height,
    style,
)
from perflab.report.summary import CLOSE_KL, Summary

LEAST_SHOWN = 0.001
"""Share of a request below which a segment has no place in a legend: nobody could see it."""

WIDE_LADDER = 20.0
"""From this total on a linear axis would leave nothing to see of the first rungs."""


def finite(values: Iterable[float | None]) -> list[float | None]:
    """NaN and infinity as None."""
    return [None if v is None or not math.isfinite(v) else float(v) for v in values]


def ladder(summaries: Sequence[Summary]) -> go.Figure:
    """Speed-up over the first variant with its interval; the colour is the verdict on the step from
    the rung below. Where quality is not close to the reference, it stands beside the speed."""
    names = [s.name for s in summaries]
    ratios = [1.0, *(s.first.ratio.value if s.first else None for s in summaries[1:])]
    arms = [s.first.ratio.arms if s.first else (None, None) for s in summaries]
    highest = max((r for r in ratios if r and math.isfinite(r)), default=1.0)
    reach = 1.25 * highest
    figure = go.Figure(
        go.Bar(
            y=names,
            x=finite(ratios),
            orientation="h",
            marker={"color": [_tone(s) for s in summaries], "line": {"width": 0}},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [None if up is None else min(up, 10 * reach) for _, up in arms],
                "arrayminus": [down for down, _ in arms],
                "color": "#51607a",
                "thickness": 1.3,
                "width": 4,
            },
            customdata=[
                [
                    units.number(s.tokens_per_s.value),
                    units.interval(s.first.ratio, units.times) if s.first else "",
                ]
                for s in summaries
            ],
            hovertemplate="<b>%{y}</b><br>%{x:.3g}× the baseline (95 %: %{customdata[1]})"
            "<br>%{customdata[0]} output tokens/s<extra></extra>",
            showlegend=False,
        )
    )
    for s, ratio in zip(summaries, ratios, strict=True):
        changed = f", top-1 {units.percent(s.top1, 0)}" if (s.kl_nats or 0.0) > CLOSE_KL else ""
        changed = ", not the model's" if s.forced else changed
        figure.add_annotation(
            xref="paper",
            x=1.0,
            y=s.name,
            text=f"<b>{units.times(ratio)}</b>  "
            f"<span style='color:{MUTED}'>{units.number(s.tokens_per_s.value)} tok/s{changed}</span>",
            xanchor="left",
            xshift=10,
            showarrow=False,
        )
    for answer, colour in (("baseline", ACCENT), *TONES.items()):
        figure.add_trace(
            go.Bar(
                y=[None],
                x=[None],
                name={"baseline": "baseline"}.get(
                    answer, f"{answer} than the rung below" if answer != "cannot tell" else "cannot tell"
                ),
                marker={"color": colour},
                hoverinfo="skip",
            )
        )
    figure.add_vline(x=1, line={"color": "#51607a", "width": 1, "dash": "dot"})
    style(figure, rows_height(len(names)), barmode="overlay", margin={"l": 10, "r": 225, "t": 30, "b": 46})
    title = "output tokens/s, times the baseline"
    if highest > WIDE_LADDER:
        least = min(1.0, *(r for r in ratios if r and r > 0))
        figure.update_xaxes(type="log", dtick=1, range=[math.log10(0.8 * least), math.log10(reach)])
        title += " (logarithmic: an equal factor is an equal length)"
    else:
        figure.update_xaxes(range=[0, reach])
    figure.update_xaxes(title_text=title, ticksuffix="×")
    names_axis(figure)
    return figure


def _tone(summary: Summary) -> str:
    return ACCENT if summary.previous is None else TONES[summary.previous.answer]


def latencies(summaries: Sequence[Summary], metrics: Sequence[str] = ("TTFT", "ITL", "E2E")) -> go.Figure:
    """p50, p90 and p99 of each metric, one panel each, logarithmic time."""
    figure = make_subplots(
        rows=1, cols=len(metrics), shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=metrics
    )
    names = [s.name for s in summaries]
    marks = {
        0.5: ("p50", ACCENT, "circle"),
        0.9: ("p90", "#f59e0b", "diamond"),
        0.99: ("p99", BAD, "line-ns"),
    }
    for column, metric in enumerate(metrics, 1):
        for s in summaries:
            found = [s.latencies[metric][q].value for q in marks]
            known = [v for v in finite(found) if v is not None and v > 0]
            if len(known) > 1:
                figure.add_trace(
                    go.Scatter(
                        x=[1e3 * min(known), 1e3 * max(known)],
                        y=[s.name, s.name],
                        mode="lines",
                        line={"color": "#cfd7e3", "width": 5},
                        hoverinfo="skip",
                        showlegend=False,
                    ),
                    row=1,
                    col=column,
                )
        for q, (label, colour, symbol) in marks.items():
            values = [s.latencies[metric][q].value for s in summaries]
            figure.add_trace(
                go.Scatter(
                    x=[None if v is None or v <= 0 else 1e3 * v for v in finite(values)],
                    y=names,
                    mode="markers",
                    name=label,
                    legendgroup=label,
                    showlegend=column == 1,
                    marker={
                        "color": colour,
                        "size": 10,
                        "symbol": symbol,
                        "line": {"color": colour, "width": 2},
                    },
                    hovertemplate=f"<b>%{{y}}</b><br>{metric} {label}: %{{x:,.4~g}} ms<extra></extra>",
                ),
                row=1,
                col=column,
            )
    style(figure, rows_height(len(names)) + 30, margin={"l": 10, "r": 24, "t": 64, "b": 46})
    figure.update_annotations(font={"size": 13, "color": INK})
    figure.update_layout(legend={"y": 1.12})
    figure.update_xaxes(
        type="log", title_text="ms", dtick=1, minor={"ticks": "inside", "ticklen": 3, "tickcolor": "#c6ced9"}
    )
    names_axis(figure)
    return figure


def frontier(summaries: Sequence[Summary], metric: str = "E2E", q: float = 0.5) -> go.Figure:
    """Throughput against latency; the line joins variants that no other beats in both."""
    points = [
        (s, s.tokens_per_s.value, s.latencies[metric][q].value)
        for s in summaries
        if s.tokens_per_s.value and math.isfinite(s.latencies[metric][q].value or math.inf)
    ]
    figure = go.Figure()
    best = pareto([(x, y or 0.0) for _, x, y in points])
    figure.add_trace(
        go.Scatter(
            x=[x for x, _ in best],
            y=[y for _, y in best],
            mode="lines",
            name="no other variant beats these in both",
            showlegend=len(best) > 1,
            line={"color": ACCENT, "width": 2, "dash": "dot"},
            hoverinfo="skip",
        )
    )
    on = set(best)
    figure.add_trace(
        go.Scatter(
            x=[x for _, x, _ in points],
            y=[y for _, _, y in points],
            mode="markers+text",
            text=joint_labels([s.name for s, _, _ in points], [(x, y or 0.0) for _, x, y in points]),
            hovertext=[s.name for s, _, _ in points],
            textposition="top center",
            textfont={"size": 12, "color": MUTED},
            showlegend=False,
            cliponaxis=False,
            marker={
                "size": 12,
                "color": [ACCENT if (x, y) in on else UNSURE for _, x, y in points],
                "line": {"color": "#ffffff", "width": 1.5},
            },
            hovertemplate="<b>%{hovertext}</b><br>%{x:,.3~g} output tokens/s<br>"
            f"{metric} p50 %{{y:,.3~g}} s<extra></extra>",
        )
    )
    style(figure, 380)
    top = max((y or 0.0 for _, _, y in points), default=1.0)
    right = max((x or 0.0 for _, x, _ in points), default=1.0)
    figure.update_xaxes(title_text="output tokens/s (more is better →)", range=[0, right * 1.18])
    figure.update_yaxes(title_text=f"{metric} p50, s (less is better ↓)", range=[0, top * 1.12])
    return figure


def joint_labels(names: Sequence[str], points: Sequence[tuple[float, float]]) -> list[str]:
    """A label for each point; points too close to be told apart share one, a line for each name."""
    width = max((x for x, _ in points), default=1.0)
    height = max((y for _, y in points), default=1.0)
    labels = [""] * len(points)
    group: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if group:
            x, y = points[group[0]]
            if points[index][0] - x > 0.08 * width or abs(points[index][1] - y) > 0.12 * height:
                labels[group[-1]] = "<br>".join(names[i] for i in group)
                group = []
        group.append(index)
    if group:
        labels[group[-1]] = "<br>".join(names[i] for i in group)
    return labels


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points (more x is better, less y is better) that no other point beats, in order of x."""
    kept: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda p: (-p[0], p[1])):
        if not kept or y < kept[-1][1]:
            kept.append((x, y))
    return kept[::-1]


def where_time_goes(summaries: Sequence[Summary], as_share: bool = False) -> go.Figure:
    """An average request's E2E by segment, stacked, one bar per rung, residual last."""
    known = [(s, s.time) for s in summaries if s.time is not None]
    names = [s.name for s, _ in known]
    order = latency.ordered(name for _, time in known for name in time.segments)
    figure = go.Figure()
    for segment in [*order, "residual"]:
        values = [
            time.residual_s if segment == "residual" else time.segments.get(segment, 0.0) for _, time in known
        ]
        shares = [v / time.e2e_s if time.e2e_s else 0.0 for v, (_, time) in zip(values, known, strict=True)]
        figure.add_trace(
            go.Bar(
                y=names,
                x=[100 * share for share in shares] if as_share else values,
                name=segment,
                orientation="h",
                marker={"color": SEGMENT_COLOURS.get(segment, "#94a3b8"), "line": {"width": 0}},
                showlegend=segment == "residual" or max(shares, default=0.0) >= LEAST_SHOWN,
                customdata=[
                    [units.seconds(v), units.percent(share)] for v, share in zip(values, shares, strict=True)
                ],
                hovertemplate=f"<b>%{{y}}</b><br>{segment}: "
                "%{customdata[0]} (%{customdata[1]})<extra></extra>",
            )
        )
    style(figure, rows_height(len(names)) + 40, barmode="relative")
    figure.update_xaxes(
        title_text="share of E2E, %"
        if as_share
        else "seconds of an average request, intended start to last token"
    )
    names_axis(figure)
    return figure


def speed_and_quality(summaries: Sequence[Summary]) -> go.Figure:
    """Speed-up, top-1 agreement and greedy match with the fp32 reference, side by side per rung."""
    names = [s.name for s in summaries]
    panels = ("total speed-up", "top-1 agreement, %", "greedy match, %")
    figure = make_subplots(rows=1, cols=3, shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=panels)
    speed = [1.0 if s.first is None else s.first.ratio.value for s in summaries]
    figure.add_trace(
        go.Bar(
            y=names,
            x=finite(speed),
            orientation="h",
            marker={"color": [_tone(s) for s in summaries]},
            hovertemplate="<b>%{y}</b><br>%{x:.3g}× the baseline<extra></extra>",
        ),
        row=1,
        col=1,
    )
    top1 = [Estimate(**s.quality["top1"]) if s.quality else Estimate(None) for s in summaries]
    for column, found in ((2, top1), (3, [s.greedy for s in summaries])):
        arms = [[None if arm is None else 100 * arm for arm in e.arms] for e in found]
        figure.add_trace(
            go.Scatter(
                y=names,
                x=[None if e.value is None else 100 * e.value for e in found],
                mode="markers",
                marker={"size": 10, "color": ACCENT},
                error_x={
                    "symmetric": False,
                    "array": [up for _, up in arms],
                    "arrayminus": [down for down, _ in arms],
                    "color": "#9bb4e8",
                    "width": 4,
                },
                hovertemplate=f"<b>%{{y}}</b><br>{panels[column - 1]}: %{{x:.2f}}<extra></extra>",
            ),
            row=1,
            col=column,
        )
        lows = [100 * (e.value - (e.arms[0] or 0.0)) for e in found if e.value is not None]
        least = min(95.0, min(lows, default=95.0) - 2.0)
        figure.update_xaxes(range=[max(-2.0, least), 100 + 0.06 * (100 - max(0.0, least))], row=1, col=column)
    style(figure, rows_height(len(names)), showlegend=False, margin={"l": 10, "r": 24, "t": 40, "b": 30})
    figure.update_annotations(font={"size": 13, "color": INK})
    figure.update_xaxes(ticksuffix="×", rangemode="tozero", row=1, col=1)
    names_axis(figure)
    return figure
