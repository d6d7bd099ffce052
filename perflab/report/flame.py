"""The flame graph as an interactive icicle, and its functions as a table.

Owns that picture. Pure: stacks in, a plotly figure or a table out.
"""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from perflab.measure.flame import Node, Stack, functions, tree
from perflab.report import units
from perflab.report.look import ACCENT, MUTED, style
from perflab.report.tables import Cell, Table

TOP = 25
PARTS = (
    ("perflab/", ACCENT),
    ("torch/", "#f59e0b"),
    ("transformers/", "#0f9d6b"),
    ("tokenizers/", "#8b5cf6"),
    ("asyncio/", "#c98a2b"),
)
"""Colours by where a function lives."""


def flame_figure(stacks: Mapping[Stack, float]) -> go.Figure:
    """Outermost on top, width by seconds; a click zooms in."""
    root = tree(stacks)
    while len(root.children) == 1 and not root.self_s:  # launchers that everything runs under say nothing
        root = next(iter(root.children.values()))
    ids: list[str] = []
    labels: list[str] = []
    parents: list[str] = []
    values: list[float] = []
    colours: list[str] = []
    hover: list[str] = []

    def add(node: Node, parent: str) -> None:
        own = str(len(ids))
        ids.append(own)
        parents.append(parent)
        labels.append(node.frame.function)
        values.append(node.total_s)
        colours.append(_colour(node.frame.file))
        share = node.total_s / root.total_s if root.total_s else 0.0
        hover.append(
            f"{node.frame}<br>{units.seconds(node.total_s)}, {units.percent(share)} of all"
            f"<br>itself {units.seconds(node.self_s)}"
        )
        for child in sorted(node.children.values(), key=lambda n: -n.total_s):
            add(child, own)

    add(root, "")
    figure = go.Figure(
        go.Icicle(
            ids=ids,
            labels=labels,
            parents=parents,
            values=values,
            branchvalues="total",
            marker={"colors": colours, "line": {"width": 1, "color": "#ffffff"}},
            hovertext=hover,
            hoverinfo="text",
            tiling={"orientation": "v"},
            pathbar={"visible": True},
            maxdepth=18,
            sort=False,
        )
    )
    return style(figure, 560, margin={"l": 4, "r": 4, "t": 28, "b": 8})


def _colour(file: str) -> str:
    return next((colour for start, colour in PARTS if file.startswith(start)), MUTED)


def functions_table(stacks: Mapping[Stack, float]) -> Table:
    """The functions with most time of their own, at most `TOP`; launchers have none."""
    whole = sum(stacks.values()) or 1.0
    rows = tuple(
        (
            Cell(row.frame.function, f"{row.frame.file}:{row.frame.line}" if row.frame.file else ""),
            Cell(units.seconds(row.self_s), units.percent(row.self_s / whole)),
            Cell(units.seconds(row.total_s), units.percent(row.total_s / whole)),
        )
        for row in functions(stacks)[:TOP]
        if row.self_s
    )
    return Table(("function", "itself", "with what it calls"), rows)
