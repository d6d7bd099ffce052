"""Views for notebooks: a slider for a prediction, text as it streams, figures, a verdict.

Owns widgets and nothing else: what they show is computed by `lessons`, `measure` and `report`.
Every function displays and returns no widget, so that a cell ends without a representation.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython.display import display

from perflab.clock import NS_PER_S
from perflab.errors import PerflabError
from perflab.load.run import RunRecords
from perflab.measure import metrics
from perflab.measure.latency import Decomposition
from perflab.measure.stats import Estimate
from perflab.report import figures, look, units
from perflab.report.analysis import Summary
from perflab.report.timeline import timeline
from perflab.studies.store import Run
from perflab.types import RequestRecord, TokenEvent
from perflab.widgets import lessons
from perflab.widgets.lessons import Paired, Prediction

T = TypeVar("T")
WIDTH = 800
WIDE = widgets.Layout(width="100%", max_width=f"{WIDTH}px")
MOST_BARS = 7


def _html(text: str) -> widgets.HTML:
    return widgets.HTML(text, layout=WIDE)


def card(text: str, colour: str = look.ACCENT) -> str:
    """HTML text set off by a coloured edge."""
    style = (
        f"border-left:4px solid {colour};background:#f6f8fb;color:{look.INK};padding:10px 14px;"
        "border-radius:4px;line-height:1.5;font-size:14px"
    )
    return f"<div style='{style}'>{text}</div>"


def note(text: str) -> None:
    """A remark in the flow of a lesson."""
    display(_html(card(html.escape(text))))


def _as_data(figure: go.Figure) -> dict[str, Any]:
    """A figure as data for the notebook's own renderer, as wide as the text.

    A FigureWidget brings all of plotly.js along, and where that takes more than two seconds to load,
    anywidget drops what was sent meanwhile: the figure stays empty.
    """
    facts = json.loads(figure.update_layout(width=WIDTH).to_json())
    return {"application/vnd.plotly.v1+json": facts, "text/plain": "a figure"}


def show(figure: go.Figure) -> None:
    """A figure in the flow of a lesson."""
    display(_as_data(figure), raw=True)


class Canvas(widgets.Output):
    """A widget that shows a figure until it is given the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.figure = go.Figure()

    def draw(self, figure: go.Figure) -> None:
        self.figure = figure
        shown = {"output_type": "display_data", "data": _as_data(figure), "metadata": {}}
        self.outputs = (shown,)


class Guess:
    """A prediction that the reader makes with a slider; `prediction` is what it says now."""

    def __init__(self, question: str, slider: widgets.FloatSlider, unit: str) -> None:
        self._question, self._slider, self._unit = question, slider, unit

    @property
    def prediction(self) -> Prediction:
        return Prediction(self._question, self._slider.value, self._unit)


def predict(question: str, low: float, high: float, start: float, step: float = 0.5, unit: str = "") -> Guess:
    """Ask for a prediction before anything is measured."""
    slider = widgets.FloatSlider(
        value=start,
        min=low,
        max=high,
        step=step,
        readout_format=".0f" if step >= 1 else ".1f",
        layout=widgets.Layout(width="420px"),
    )
    row = widgets.HBox([widgets.Label("My prediction:"), slider, widgets.Label(unit)])
    display(widgets.VBox([_html(card(f"<b>{html.escape(question)}</b>")), row]))
    return Guess(question, slider, unit)


def verdict(guess: Guess, measured: Estimate) -> None:
    """What the measurement says of the prediction."""
    found = lessons.judge(guess.prediction, measured)
    marks = {"holds": ("✓", look.GOOD), "cannot tell": ("?", look.UNSURE)}
    mark, colour = marks.get(found.answer, ("✗", look.BAD))
    question = html.escape(guess.prediction.question)
    display(_html(card(f"{question}<br><b>{mark}</b> {html.escape(found.text)}", colour)))


def working(work: Callable[[Callable[[str], None]], T]) -> T:
    """Run `work` with a line that says what it is doing; the line goes when it is done."""
    line = _html("")
    display(line)

    def say(message: str) -> None:
        line.value = f"<span style='color:{look.MUTED}'>{html.escape(message)} …</span>"

    try:
        return work(say)
    finally:
        line.close()


def stream(events: Iterable[tuple[TokenEvent, RequestRecord]]) -> RequestRecord:
    """Show an answer as it comes, and its latencies below; returns the request's record."""
    text, figures_line = _html(""), _html("")
    display(widgets.VBox([text, figures_line]))
    shown, record = "", None
    for event, record in events:
        shown += event.text
        text.value = card(html.escape(shown).replace("\n", "<br>"))
        gaps = sorted(metrics.itl_s(record))
        parts = [
            f"<b>TTFT</b> {units.seconds(metrics.ttft_s(record))}",
            f"<b>ITL</b> {units.seconds(gaps[len(gaps) // 2]) if gaps else units.MISSING} (median)",
            f"<b>tokens</b> {record.prompt_tokens} in, {record.output_tokens} out",
        ]
        figures_line.value = f"<span style='color:{look.MUTED}'>{' &nbsp;·&nbsp; '.join(parts)}</span>"
    if record is None:
        raise ValueError("the stream held no event")
    return record


def token_times(record: RequestRecord) -> go.Figure:
    """When each token came: seconds from the intended start, and the gap before it in ms."""
    times = [(t - record.intended_ns) / NS_PER_S for t in record.token_ns]
    gaps = [1e3 * (b - a) for a, b in zip([0.0, *times], times, strict=False)]
    first, later = (look.SEGMENT_COLOURS[name] for name in lessons.MODEL_SEGMENTS)
    figure = go.Figure(
        go.Bar(
            x=list(range(1, len(gaps) + 1)),
            y=gaps,
            marker={"color": [first, *(later for _ in gaps[1:])]},
            customdata=[
                ["TTFT" if index == 0 else "ITL", units.seconds(time)] for index, time in enumerate(times)
            ],
            hovertemplate="token %{x}: %{customdata[0]} %{y:.3~g} ms<br>at %{customdata[1]}<extra></extra>",
        )
    )
    look.style(figure, 280, bargap=0.25)
    figure.update_xaxes(title_text="token")
    figure.update_yaxes(title_text="wait for it, ms", rangemode="tozero")
    return figure


def pair(result: Paired) -> None:
    """Both configurations: how many tokens/s, and what their requests did over time."""
    runs = [_as_run(name, run) for name, run in zip(result.names, result.runs, strict=True)]
    first, second = (Summary(name, [run]) for name, run in zip(result.names, runs, strict=True))
    for summary, rates in zip((first, second), result.rates, strict=True):
        summary.tokens_per_s = Estimate(sum(rates) / len(rates), n=len(rates))
    second.first = second.previous = result.comparison
    show(figures.ladder([first, second]).update_layout(showlegend=False))
    over_time = timeline(runs)
    used = max(step.kv_blocks_used for run in runs for step in run.steps)
    over_time.update_yaxes(range=[0, 1.3 * used], row=3, col=1)  # the pool is far larger than one lesson
    over_time.update_layout(height=600)
    show(over_time)


def _as_run(name: str, run: RunRecords) -> Run:
    return Run({"variant": name}, run.requests, run.steps, run.events)


def splits(named: dict[str, Decomposition], as_share: bool = False) -> go.Figure:
    """Where the time goes, one bar per name."""
    return figures.where_time_goes([_as_summary(name, parts) for name, parts in named.items()], as_share)


def _as_summary(name: str, parts: Decomposition) -> Summary:
    summary = Summary(name, [])
    summary.time = parts
    return summary


def describe_split(parts: Decomposition) -> str:
    """One sentence on a split, as HTML."""
    name, share = lessons.largest(parts)
    return (
        f"An average request took <b>{units.seconds(parts.e2e_s)}</b>; most of it, {units.percent(share)}, "
        f"was <b>{name}</b>. No stamp covers {units.seconds(parts.residual_s)} "
        f"({units.percent(parts.residual_s / parts.e2e_s, 2)})."
    )


def slider(name: str, values: Sequence[Any], start: Any = None) -> Any:
    """A slider over `values` that tells its new one when it is let go."""
    return widgets.SelectionSlider(
        options=values,
        value=values[0] if start is None else start,
        description=name,
        continuous_update=False,
        style={"description_width": "150px"},
        layout=widgets.Layout(width="450px"),
    )


class Explorer(Generic[T]):
    """Sliders by name, and what was measured at each setting tried; none is measured twice.

    `draw` gets what was tried by setting, the newest last, at most `MOST_BARS` of them; `describe`
    says the newest in HTML.
    """

    def __init__(
        self,
        sliders: Mapping[str, Sequence[Any]],
        measure: Callable[..., T],
        draw: Callable[[dict[tuple[Any, ...], T]], go.Figure],
        describe: Callable[[T], str],
        start: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._measure, self._draw, self._describe = measure, draw, describe
        self.results: dict[tuple[Any, ...], T] = {}
        self.sliders = {name: slider(name, values, start.get(name)) for name, values in sliders.items()}
        self.canvas = Canvas()
        self.caption = _html("")
        for control in self.sliders.values():
            control.observe(self.update, names="value")

    def update(self, change: Any = None) -> None:
        """Measure what the sliders say, if need be, and draw."""
        setting = tuple(control.value for control in self.sliders.values())
        if setting in self.results:
            self.results[setting] = self.results.pop(setting)  # the newest is the last
        else:
            self.caption.value = card("measuring …", look.MUTED)
            try:
                self.results[setting] = self._measure(*setting)
            except PerflabError as error:
                self.caption.value = card(html.escape(str(error)), look.BAD)
                return
        self.caption.value = card(self._describe(self.results[setting]))
        self.redraw()

    def redraw(self, change: Any = None) -> None:
        """Draw what was measured."""
        self.canvas.draw(self._draw(dict(list(self.results.items())[-MOST_BARS:])))

    @property
    def figure(self) -> go.Figure:
        """What is shown."""
        return self.canvas.figure


def explore(explorer: Explorer[Any], *beside: widgets.Widget) -> None:
    """Show an explorer, other controls beside its sliders, with its first setting measured."""
    controls = widgets.HBox([widgets.VBox(list(explorer.sliders.values())), *beside])
    display(widgets.VBox([controls, explorer.caption, explorer.canvas]))
    explorer.update()


def explore_split(
    measure: Callable[[int, int], Decomposition],
    prompt_tokens: tuple[int, ...] = (16, 64, 128, 256),
    requests: tuple[int, ...] = (1, 2, 4, 8),
) -> Explorer[Decomposition]:
    """Sliders over prompt length and batch; `measure(prompt_tokens, requests)` runs the engine."""
    shares = widgets.Checkbox(value=False, description="as shares", indent=False)
    explorer = Explorer(
        {"prompt tokens": prompt_tokens, "requests at once": requests},
        measure,
        lambda found: splits({f"{t} tokens × {n}": parts for (t, n), parts in found.items()}, shares.value),
        describe_split,
    )
    shares.observe(explorer.redraw, names="value")
    explore(explorer, shares)
    return explorer
