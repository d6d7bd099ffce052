"""A chapter of a report as a value. Owns its shape alone: who writes one imports nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from perflab.report.tables import Table


@dataclass(frozen=True, slots=True)
class Section:
    """A chapter of the report: its takeaway, a figure, a table; `more` holds folded tables by title.

    `anchor` is one word, unique in its part of the report; its capitalised form stands in the menu.
    """

    anchor: str
    title: str
    takeaway: str
    figure: go.Figure | None = None
    table: Table | None = None
    more: tuple[tuple[str, Table], ...] = ()
    unfolded: bool = False
    note: str = ""
