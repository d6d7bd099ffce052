"""Views of the KV cache: what a step computes without it, memory through time, what shared prefixes save.

Owns figures and sentences; what they show is computed by `lessons`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from perflab.clock import NS_PER_S
from perflab.config import EngineConfig
from perflab.load.run import RunRecords
from perflab.load.workloads import Workload, synthetic
from perflab.measure import metrics
from perflab.report import look, units
from perflab.widgets import lessons, panels

COLOURS = (look.BAD, look.ACCENT, look.GOOD)


def growth(runs: Mapping[str, RunRecords]) -> go.Figure:
    """Step by step of one request: tokens that went through the model, and the model's time."""
    figure = make_subplots(
        cols=2, horizontal_spacing=0.12, subplot_titles=("tokens computed in the step", "time in the model")
    )
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        values = (
            [step.prefill_tokens + step.decode_tokens for step in run.steps],
            [1e3 * (step.forwarded_ns - step.batched_ns) / NS_PER_S for step in run.steps],
        )
        for column, ys in enumerate(values, 1):
            figure.add_scatter(
                x=[step.index + 1 for step in run.steps],
                y=ys,
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                mode="lines+markers",
                marker={"size": 5},
                line={"color": colour},
                row=1,
                col=column,
            )
    look.style(figure, 340, margin={"t": 70, "b": 50}, legend={"y": 1.14})
    figure.update_annotations(font={"size": 13, "color": look.INK})
    figure.update_xaxes(title_text="token of the answer")
    figure.update_yaxes(title_text="tokens", rangemode="tozero", col=1)
    figure.update_yaxes(title_text="ms", rangemode="tozero", col=2)
    return figure


def memory(run: RunRecords, block_size: int, longest: int | None = None) -> go.Figure:
    """Positions of the KV pool after each step: blocks of running requests, kept as prefixes, the pool.

    With `longest`, also what running requests really hold, and what a cache without pages would have
    set aside: room for `longest` tokens each.
    """
    steps = [step.index + 1 for step in run.steps]
    figure = go.Figure()
    areas = (
        ("blocks of running requests", look.GOOD, [step.kv_blocks_used for step in run.steps]),
        ("blocks kept as prefixes", "#bfe3d4", [step.kv_blocks_cached for step in run.steps]),
    )
    for name, colour, blocks in areas:
        if any(blocks):
            figure.add_scatter(
                x=steps,
                y=[block_size * count for count in blocks],
                name=name,
                mode="lines",
                stackgroup="blocks",
                line={"width": 0.5, "color": colour, "shape": "hv"},
            )
    lines = [("the pool", look.ACCENT, "dot", [block_size * step.kv_blocks_total for step in run.steps])]
    if longest is not None:
        lines = [
            ("tokens held", look.INK, "solid", lessons.tokens_held(run)),
            ("set aside without pages", look.BAD, "dash", [longest * step.running for step in run.steps]),
        ]
    for name, colour, dash, values in lines:
        figure.add_scatter(
            x=steps, y=values, name=name, mode="lines", line={"color": colour, "dash": dash, "shape": "hv"}
        )
    look.style(figure, 360)
    figure.update_xaxes(title_text="steps of the engine")
    figure.update_yaxes(title_text="tokens of memory", rangemode="tozero")
    return figure


def explore_pool(
    bench: lessons.Bench,
    workload: Workload,
    blocks: Sequence[int],
    block_size: Sequence[int] = (16, 8, 32),
    seats: int = 8,
) -> panels.Explorer[RunRecords]:
    """Sliders over the pool's tokens and the block size; the memory of the newest run is drawn.

    `blocks` counts blocks of the first size; the pool keeps its tokens when the size changes.
    """
    pools = {count * block_size[0]: count for count in blocks}

    def measure(pool: int, size: int) -> RunRecords:
        config = EngineConfig(
            max_num_seqs=seats, block_size=size, num_blocks=pool // size, prefix_cache=False
        )
        return bench.run(config, workload)

    def draw(found: Mapping[tuple[int, int], RunRecords]) -> go.Figure:
        (_, size), run = list(found.items())[-1]
        return memory(run, size)

    explorer = panels.Explorer(
        {"pool, tokens": tuple(pools), "block, tokens": block_size}, measure, draw, describe_pool
    )
    panels.explore(explorer)
    return explorer


def describe_pool(run: RunRecords) -> str:
    """How many requests ran together, who was put back, and what was computed twice, as HTML."""
    needed = sum(r.prompt_tokens + r.output_tokens - 1 for r in run.requests)
    again = lessons.tokens_computed(run) - needed
    put_back = sum(r.preemptions for r in run.requests)
    together = max(step.running for step in run.steps)
    return (
        f"At most <b>{together} requests</b> ran together, {len(run.steps)} steps in all. "
        f"Requests were put back <b>{put_back} times</b>, and {again:,} tokens were computed again "
        f"({units.percent(again / needed, 0)} of the {needed:,} that were needed)."
    )


def prefixes(runs: Mapping[str, RunRecords]) -> go.Figure:
    """Where prompt tokens came from, and how long an average request waited for its first token."""
    names = list(runs)
    figure = make_subplots(
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.06,
        subplot_titles=("tokens of all prompts", "time to first token, average"),
    )
    cached = [sum(r.cached_tokens for r in run.requests) for run in runs.values()]
    prompts = [sum(r.prompt_tokens for r in run.requests) for run in runs.values()]
    computed = [total - found for total, found in zip(prompts, cached, strict=True)]
    for name, colour, values in (("computed", "#1d4ed8", computed), ("from the cache", "#bfe3d4", cached)):
        figure.add_bar(
            y=names, x=values, orientation="h", name=name, marker={"color": colour}, text=values, col=1, row=1
        )
    waits = [mean_ttft_s(run) for run in runs.values()]
    figure.add_bar(
        y=names,
        x=[1e3 * wait for wait in waits],
        orientation="h",
        showlegend=False,
        marker={"color": look.ACCENT},
        text=[units.seconds(wait) for wait in waits],
        row=1,
        col=2,
    )
    look.style(figure, look.rows_height(len(names)) + 20, barmode="stack", margin={"t": 70})
    figure.update_layout(legend={"y": 1.2})
    figure.update_annotations(font={"size": 13, "color": look.INK})
    figure.update_xaxes(title_text="ms", col=2)
    look.names_axis(figure)
    return figure


def mean_ttft_s(run: RunRecords) -> float:
    """Seconds from intended start to first token, mean over requests that got one."""
    waits = [value for r in run.requests if (value := metrics.ttft_s(r)) is not None]
    return sum(waits) / len(waits)


def explore_sharing(
    bench: lessons.Bench, requests: int, prompt_tokens: int, output_tokens: int, seats: int
) -> panels.Explorer[RunRecords]:
    """Sliders over how much of a prompt is shared, and from how many documents; every setting is a bar."""
    shares = [prompt_tokens * part // 8 // 16 * 16 for part in (7, 6, 4, 2, 0)]  # whole blocks are found

    def measure(shared: int, documents: int) -> RunRecords:
        load = synthetic(requests, prompt_tokens, (output_tokens,), shared, documents, name="shared")
        return bench.run(EngineConfig(max_num_seqs=seats), load)

    def draw(found: Mapping[tuple[int, int], RunRecords]) -> go.Figure:
        return prefixes({f"{shared} shared, {n} documents": run for (shared, n), run in found.items()})

    explorer = panels.Explorer(
        {"shared tokens": shares, "documents": (2, 1, 4, 8)}, measure, draw, describe_sharing
    )
    panels.explore(explorer)
    return explorer


def describe_sharing(run: RunRecords) -> str:
    """Share of prompt tokens that were not computed, and the wait for a first token, as HTML."""
    share = units.percent(lessons.cached_share(run), 0)
    return (
        f"<b>{share}</b> of all prompt tokens came from the cache; "
        f"first tokens came after {units.seconds(mean_ttft_s(run))} on average."
    )
