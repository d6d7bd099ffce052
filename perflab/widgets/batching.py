"""Views of batching: what more requests in a step give and cost, who holds a seat, what one request pays.

Owns figures and sentences; what they show is computed by `lessons` and `measure`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from perflab.config import Batching, EngineConfig
from perflab.load.arrivals import Arrivals
from perflab.load.run import RunRecords
from perflab.load.workloads import synthetic
from perflab.measure import latency, metrics, stats
from perflab.report import look, units
from perflab.widgets import lessons, panels

TIMEOUT = "time-out, ms"
WAITS, PROMPT, DECODE, KEPT = look.SEGMENT_COLOURS["queue"], "#1d4ed8", "#93c5fd", "#d5dae2"


def sizes(runs: Mapping[int, Sequence[RunRecords]]) -> go.Figure:
    """Runs by requests in a step: tokens per second of all on the left, the gap that one sees beside it."""
    requests = list(runs)
    rates = [stats.geometric_mean([lessons.tokens_per_s(run) for run in done]) for done in runs.values()]
    gaps = [
        stats.mean([1e3 * (metrics.itl_percentile(run.requests, 0.5).value or 0.0) for run in done])
        for done in runs.values()
    ]
    figure = make_subplots(
        cols=2, horizontal_spacing=0.12, subplot_titles=("all requests together", "each request")
    )
    ideal = [(rates[0].value or 0.0) * n / requests[0] for n in requests]
    figure.add_scatter(
        x=requests,
        y=ideal,
        name="if requests cost nothing",
        mode="lines",
        line={"color": look.MUTED, "dash": "dot"},
    )
    for column, (found, name, colour) in enumerate(
        ((rates, "tokens/s", look.ACCENT), (gaps, "gap between tokens (median)", look.BAD)), 1
    ):
        figure.add_scatter(
            x=requests,
            y=[estimate.value for estimate in found],
            error_y={
                "symmetric": False,
                "array": [estimate.arms[1] for estimate in found],
                "arrayminus": [estimate.arms[0] for estimate in found],
                "color": "#51607a",
                "thickness": 1.3,
            },
            mode="lines+markers",
            name=name,
            line={"color": colour},
            row=1,
            col=column,
        )
    look.style(figure, 360, margin={"t": 64}, legend={"y": -0.2, "yanchor": "top"})
    figure.update_layout(margin={"b": 90})
    figure.update_annotations(font={"size": 13, "color": look.INK})
    figure.update_xaxes(title_text="requests in a step", tickvals=requests, rangemode="tozero")
    reach = 1.15 * max(estimate.high or estimate.value or 0.0 for estimate in rates)
    figure.update_yaxes(title_text="output tokens/s", range=[0, reach], col=1)
    top = 1.15 * max(estimate.high or estimate.value or 0.0 for estimate in gaps)
    figure.update_yaxes(title_text="ms", range=[0, top], col=2)
    return figure


def seats(runs: Mapping[str, RunRecords], kept: Sequence[str]) -> go.Figure:
    """Each request of each run over the steps of the engine: it waits, its prompt is computed, tokens come.

    In the runs named by `kept` a seat stays taken, and empty, until the whole batch is done.
    """
    figure = make_subplots(
        rows=len(runs),
        shared_xaxes=True,
        vertical_spacing=0.1,
        subplot_titles=[_title(*r) for r in runs.items()],
    )
    for row, (name, run) in enumerate(runs.items(), 1):
        ends = {
            record.request_id: max(mate.last_step for mate in batch) + 1
            for batch in lessons.batches(run.requests)
            for record in batch
        }
        for part, colour in (("waits", WAITS), ("prompt", PROMPT), ("decode", DECODE), ("empty seat", KEPT)):
            spans = [
                {
                    "waits": (0, r.first_step),
                    "prompt": (r.first_step, r.first_token_step + 1),
                    "decode": (r.first_token_step + 1, r.last_step + 1),
                    "empty seat": (r.last_step + 1, ends[r.request_id] if name in kept else r.last_step + 1),
                }[part]
                for r in run.requests
            ]
            figure.add_bar(
                y=[r.request_id.split("-")[-1] for r in run.requests],
                base=[start for start, _ in spans],
                x=[end - start for start, end in spans],
                orientation="h",
                name=part,
                legendgroup=part,
                showlegend=row == 1,
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate=f"request %{{y}}, {part}: %{{x}} steps from step %{{base}}<extra></extra>",
                row=row,
                col=1,
            )
    look.style(figure, 90 + 230 * len(runs), barmode="overlay", bargap=0.25, margin={"t": 70})
    figure.update_layout(legend={"y": 1.06})
    figure.update_annotations(font={"size": 13, "color": look.INK}, x=0, xanchor="left")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False, showticklabels=False)
    figure.update_xaxes(range=[0, max(len(run.steps) for run in runs.values())])
    figure.update_xaxes(title_text="steps of the engine", row=len(runs), col=1)
    return figure


def _title(name: str, run: RunRecords) -> str:
    rows = max(step.rows for step in run.steps)
    return (
        f"{name}: {len(run.steps)} steps, {units.percent(lessons.empty_seats(run, rows))} of the seats empty"
    )


def explore_arrivals(
    bench: lessons.Bench,
    requests: int,
    prompt_tokens: int,
    output_tokens: Sequence[int],
    size: Sequence[int] = (1, 2, 4, 8),
    timeout_ms: Sequence[int] = (0, 50, 200, 500),
    gap_ms: Sequence[int] = (100, 50, 25, 10),
) -> panels.Explorer[RunRecords]:
    """Sliders over policy, size, time-out and the mean gap between requests (a Poisson process).

    Each setting runs the engine, and its bar is an average request.
    """

    def measure(policy: Batching, size: int, timeout_ms: int, gap_ms: int) -> RunRecords:
        arrivals = Arrivals("poisson", 1e3 / gap_ms)
        return bench.run(
            EngineConfig(
                max_num_seqs=size, batching=policy, batch_timeout_s=timeout_ms / 1e3, prefix_cache=False
            ),
            synthetic(requests, prompt_tokens, output_tokens, arrivals=arrivals, name="arrivals"),
        )

    def draw(found: Mapping[tuple[str, int, int, int], RunRecords]) -> go.Figure:
        named = {_setting(*key): latency.average(run.requests, run.steps) for key, run in found.items()}
        return panels.splits({name: parts for name, parts in named.items() if parts})

    policies = ("static", "dynamic", "continuous")
    explorer = panels.Explorer(
        {
            "policy": policies,
            "size, requests": size,
            TIMEOUT: timeout_ms,
            "mean gap, ms": gap_ms,
        },
        measure,
        draw,
        describe,
        start={"size, requests": size[-2], TIMEOUT: timeout_ms[-2], "mean gap, ms": gap_ms[1]},
    )
    panels.explore(explorer)
    for policy in policies[1:]:
        explorer.sliders["policy"].value = policy
    return explorer


def _setting(policy: str, size: int, timeout_ms: int, gap_ms: int) -> str:
    waits = f", {timeout_ms} ms" if policy == "dynamic" else ""
    return f"{policy} {size}{waits}, gap {gap_ms} ms"


def describe(run: RunRecords) -> str:
    """Throughput, rows of a step and waits of one run, as HTML."""
    ttft = [value for r in run.requests if (value := metrics.ttft_s(r)) is not None]
    rows = sum(step.rows for step in run.steps) / len(run.steps)
    return (
        f"<b>{lessons.tokens_per_s(run):,.0f} tokens/s</b>, {rows:.1f} requests in an average step. "
        f"First tokens came after {units.seconds(sum(ttft) / len(ttft))} on average, "
        f"the last of them after {units.seconds(max(ttft))}."
    )
