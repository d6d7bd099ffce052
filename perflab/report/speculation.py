"""The chapter on speculation: how far guesses held, what they cost, whose output is not the model's.

Owns its table, figure and words. Formulas are `measure.speculation`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from perflab.measure.speculation import Acceptance, Work, acceptance, work
from perflab.report import units
from perflab.report.analysis import Analysis
from perflab.report.figures_service import LINES
from perflab.report.look import style
from perflab.report.section import Section
from perflab.report.summary import NOT_THE_MODELS, Summary
from perflab.report.tables import Cell, Table, estimate

MISSING = Cell(units.MISSING, tone="muted")


@dataclass(frozen=True, slots=True)
class Speculation:
    """One variant that guesses: its name, how far its guesses held and what its steps did."""

    name: str
    drafter: str
    held: Acceptance
    work: Work
    forced: bool


def speculations(summaries: Sequence[Summary]) -> list[Speculation]:
    """The variants that guess ahead, also one whose drafter found nothing worth a guess."""
    found = []
    for s in summaries:
        held = acceptance(s.records)
        if held.drafts or s.drafter != "off":
            steps = work(step for run in s.used for step in run.steps)
            found.append(Speculation(s.name, s.drafter, held, steps, s.forced))
    return found


def chapter(analysis: Analysis) -> Section | None:
    """None where no variant speculates."""
    found = speculations(analysis.summaries)
    if not found:
        return None
    guessing = [one for one in found if one.held.drafts]
    return Section(
        "speculation",
        "Speculation: guesses and what they cost",
        takeaway(found),
        acceptance_figure(guessing) if guessing else None,
        costs(found),
        more=(("Acceptance by place in the draft", places(guessing)),) if guessing else (),
        note="Acceptance at a place is of the drafts that reached it, all guesses before it having held. "
        "The accepted length counts the model's own token too; token-weighted pools all drafts, per request "
        "averages requests.",
    )


def takeaway(found: Sequence[Speculation]) -> str:
    """Of each variant: how many guesses held, what a draft brought, what was computed in vain."""
    told = []
    for one in found:
        if not one.held.drafts:
            told.append(f"“{one.name}” made no guess: none was found that seemed to pay.")
            continue
        words = f"“{one.name}”: {units.percent(one.held.share, 0)} of {one.held.draft_tokens:,} guesses held"
        words += f", a draft brought {units.number(one.held.length_by_tokens.value)} tokens"
        if one.work.wasted is not None:
            words += f", {units.percent(one.work.wasted)} of the rows computed were thrown away"
        told.append(f"{words}{f'; {NOT_THE_MODELS}' if one.forced else ''}.")
    return " ".join(told)


def costs(found: Sequence[Speculation]) -> Table:
    """One line a variant: guesses, accepted lengths, times of a step, waste."""
    rows = []
    for one in found:
        held, done = one.held, one.work
        times = (done.draft_s, done.verify_s, done.rollback_s)
        rows.append(
            (
                Cell(one.name, NOT_THE_MODELS if one.forced else one.drafter, "flag" if one.forced else ""),
                Cell(f"{held.draft_tokens:,}", f"{held.drafts:,} drafts"),
                Cell(f"{held.accepted_tokens:,}", units.percent(held.share)) if held.drafts else MISSING,
                estimate(held.length_by_tokens),
                estimate(held.length_by_request),
                Cell(units.percent(done.with_drafts / done.steps, 0)) if done.steps else MISSING,
                *(Cell(units.seconds(t), _share(t, done.step_s)) for t in times),
                Cell(units.seconds(done.forward_with_s), f"without {units.seconds(done.forward_without_s)}"),
                Cell(units.percent(done.wasted)),
            )
        )
    headers = (
        "variant",
        "guesses",
        "accepted",
        "mean accepted length, token-weighted",
        "mean accepted length, per request",
        "steps with guesses",
        "draft a step",
        "verify a step",
        "rollback a step",
        "forward, with guesses",
        "wasted compute",
    )
    return Table(headers, tuple(rows))


def _share(part: float | None, whole: float | None) -> str:
    return f"{units.percent(part / whole)} of it" if part is not None and whole else ""


def places(found: Sequence[Speculation]) -> Table:
    """Proposed, reached and accepted guesses of each place, and the share of the reached that held."""
    rows = []
    for one in found:
        held = one.held
        counts = zip(held.proposed, held.reached, held.accepted, held.by_place, strict=True)
        for place, (proposed, reached, accepted, share) in enumerate(counts, 1):
            rows.append(
                (
                    Cell(one.name if place == 1 else ""),
                    Cell(str(place)),
                    *(Cell(f"{count:,}") for count in (proposed, reached, accepted)),
                    estimate(share, units.percent),
                )
            )
    headers = ("variant", "place", "proposed", "reached", "accepted", "acceptance")
    return Table(headers, tuple(rows))


def acceptance_figure(found: Sequence[Speculation]) -> go.Figure:
    """Conditional acceptance by place in the draft, a line a variant, with its interval."""
    figure = go.Figure()
    for index, one in enumerate(found):
        shares = one.held.by_place
        arms = [[None if arm is None else 100 * arm for arm in share.arms] for share in shares]
        colour = LINES[1:][index % len(LINES[1:])]
        figure.add_trace(
            go.Scatter(
                x=list(range(1, len(shares) + 1)),
                y=[None if share.value is None else 100 * share.value for share in shares],
                customdata=[[a, r] for a, r in zip(one.held.accepted, one.held.reached, strict=True)],
                mode="lines+markers",
                name=f"{one.name} (forced)" if one.forced else one.name,
                line={"color": colour, "width": 2.2, "dash": "dot" if one.forced else "solid"},
                marker={"size": 9, "color": colour},
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [up for _, up in arms],
                    "arrayminus": [down for down, _ in arms],
                    "color": colour,
                    "thickness": 1.3,
                    "width": 4,
                },
                hovertemplate=f"<b>{one.name}</b><br>place %{{x}}: %{{y:.1f}} %"
                "<br>%{customdata[0]} of %{customdata[1]} that reached it<extra></extra>",
            )
        )
    style(figure, 320, showlegend=True)
    figure.update_xaxes(title_text="place in the draft", dtick=1)
    figure.update_yaxes(title_text="held, of the drafts that reached it", range=[0, 104], ticksuffix=" %")
    return figure
