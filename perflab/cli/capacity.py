"""The commands `sweep` and `compare`: how much load a service bears, and which of two is faster.

Owns what is printed and the exit codes. How points and pairs are measured is `perflab.studies`'.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perflab.cli.options import ENGINE, load_choice, service_choice, takes

if TYPE_CHECKING:
    from perflab.studies.compare_result import Compared
    from perflab.studies.service_run import LoadChoice, ServiceChoice
    from perflab.studies.session import Progress
    from perflab.studies.sweep import SweepResult

RUNS = Path("runs")


@takes(service=service_choice, load=load_choice)
def sweep(
    service: ServiceChoice,
    load: LoadChoice,
    by: Annotated[str, typer.Option(help="What is raised: rate (requests/s) or users.")] = "rate",
    minutes: Annotated[float, typer.Option(help="Time for all of it, loading left out.", min=0.1)] = 10.0,
    points: Annotated[
        int, typer.Option(help="Levels of the ladder; more follow beside the edge.", min=3)
    ] = 8,
    levels: Annotated[
        str | None, typer.Option(help="These levels alone, with commas between: 1,2,4,8.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds of sending per point.")] = None,
    attain: Annotated[float, typer.Option(help="Share of the requests that must meet every limit.")] = 0.99,
    most_users: Annotated[int, typer.Option(help="Users that fill the service, to estimate its range.")] = 32,
    allow_invalid: Annotated[
        bool, typer.Option("--allow-invalid", help="Use points whatever their verdict.")
    ] = False,
    engine: Annotated[str, ENGINE] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The sweep's folder.")] = None,
) -> None:
    """Find how much load a service bears: its knee, and the highest rate within your limits.

    Give limits with --slo-ttft, --slo-tpot or --slo-e2e. Stopped with Ctrl-C it keeps its points; the same
    command goes on from there.

    Example: [bold]perflab sweep http://127.0.0.1:8000 --slo-ttft 0.5 --minutes 5[/bold]
    """
    from perflab.studies.session import slug
    from perflab.studies.sides import service_of
    from perflab.studies.sweep import Sweep, run_sweep

    if load.rate_per_s or load.users or load.duration_s or load.requests:
        raise typer.BadParameter(
            "a sweep chooses how many, how fast and how long: use --by, --levels and --seconds",
            param_hint="--rate, --users, --duration, --requests",
        )
    given = tuple(_number(level) for level in levels.split(",")) if levels else ()
    chosen = Sweep(
        by,  # type: ignore[arg-type]
        minutes,
        points,
        given,
        seconds,
        attain,
        most_users,
        allow_invalid,
    )
    folder = out or RUNS / slug(f"sweep {service.url or service.model or 'embedded'}")
    with _told() as tell:
        found = run_sweep(service_of(engine, service), load, chosen, folder, tell)
    console = Console()
    console.print(points_table(found))
    for line in conclusions(found):
        console.print(line, highlight=False)
    typer.echo(f"Sweep: {folder}")
    if found.interrupted:
        Console(stderr=True).print(f"[yellow]{escape(found.message)}[/yellow]")
        raise typer.Exit(130)


def points_table(found: SweepResult) -> Table:
    """One row a point, by level: what was reached, at which latency, from how many requests."""
    from perflab.report import units

    limited = found.points and found.points[0].attained is not None
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in (
        "users" if found.by == "users" else "asked/s",
        "done/s",
        "tok/s",
        "TTFT p99",
        "E2E p50",
        "E2E p99",
        *(["in SLO"] if limited else []),
        "sent",
    ):
        table.add_column(heading, justify="right")
    table.add_column("")
    good = found.usable
    for p in sorted(found.points, key=lambda p: (p.level, p.samples)):
        kinds = (("TTFT", "p99"), ("E2E", "p50"), ("E2E", "p99"))
        latencies = [units.seconds(p.latencies[metric][q].value) for metric, q in kinds]
        share = [units.percent(p.attained.value if p.attained else None)] if limited else []
        marks = [
            name
            for name, level in (("capacity", found.capacity.level), ("knee", found.knee.level))
            if p.level == level and p in good
        ]
        table.add_row(
            f"{p.level:g}",
            units.number(p.rate),
            units.number(p.tokens_per_s),
            *latencies,
            *share,
            str(p.samples),
            escape(", ".join(marks)),
            style="" if p in good else "dim",
        )
    return table


def conclusions(found: SweepResult) -> list[str]:
    """The capacity, the knee and the saturation, each with its interval, in words."""
    from perflab.report import units

    unit = "users" if found.by == "users" else "requests/s"
    unused: dict[str, list[str]] = {}
    for p in found.points:
        if p not in found.usable:
            why = ", ".join(name for name, _ in p.reasons) or "more samples of this level are there"
            unused.setdefault(why, []).append(f"{p.level:g}")

    def between(low: float | None, high: float | None) -> str:
        return f"between {units.number(low)} and {units.number(high)}" if high is not None else "or more"

    lines = [f"[dim]Not used (grey), {why}: {', '.join(levels)}[/dim]" for why, levels in unused.items()]
    for name, one in (("Capacity", found.capacity), ("Knee", found.knee)):
        text = f"[bold]{name}[/bold]: "
        if one.level is None:
            text += one.reason
        else:
            text += f"{units.number(one.level)} {unit} ({between(one.low, one.high)})"
            text += f"; {one.reason}" if one.reason else ""
        lines.append(text)
    if found.saturation is not None:
        lines.append(f"[bold]Most that was completed[/bold]: {units.number(found.saturation)} requests/s")
    return lines


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number", param_hint="--levels") from None


@contextmanager
def _told() -> Iterator[Callable[[Progress], None]]:
    """Shows where a study is: its plan and each of its runs as a line, what is left beside a spinner."""
    from perflab.studies.session import duration

    console = Console(stderr=True)
    with console.status("") as status:

        def tell(progress: Progress) -> None:
            left = "" if not progress.left_s else f" ({duration(progress.left_s)} left)"
            if progress.stage in ("load", "plan", "done") or not console.is_terminal:
                console.print(escape(progress.message), highlight=False)
            status.update(escape(progress.message) + left)

        yield tell


@functools.wraps(service_choice)
def base_choice(**options: Any) -> ServiceChoice:
    """The options of a service without its address, which each side has for itself."""
    return service_choice(None, **options)


base_choice.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [p for p in inspect.signature(service_choice).parameters.values() if p.name != "url"]
)


@takes(service=base_choice, load=load_choice)
def compare(
    service: ServiceChoice,
    load: LoadChoice,
    a: Annotated[str, typer.Argument(help="An address, engine switches (weights=int4), default, or runs.")],
    b: Annotated[str | None, typer.Argument(help="The other one, which may be faster or slower.")] = None,
    minutes: Annotated[float, typer.Option(help="Time for all pairs.", min=0.05)] = 1.0,
    pairs: Annotated[int | None, typer.Option(help="So many pairs; default: as many as fit.")] = None,
    metric: Annotated[
        str | None, typer.Option(help="tokens, ttft, tpot or e2e; default: tokens, with --rate e2e.")
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate", help="Exit with 3 where B is slower for certain, for CI.")
    ] = False,
    margin: Annotated[float, typer.Option(help="With --gate: so much slower may pass, as a share.")] = 0.0,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="With --gate: exit with 4 unless B is within the margin for certain."),
    ] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Compare A with itself: it must not find a difference.")
    ] = False,
    quality: Annotated[bool, typer.Option("--quality/--no-quality", help="Compare the answers too.")] = True,
    allow_invalid: Annotated[
        bool, typer.Option("--allow-invalid", help="Answer even where a run is invalid.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The comparison's folder.")] = None,
) -> None:
    """Tell which of two is faster: many short runs in pairs, the order of each drawn by lot.

    Many short runs tell more than few long ones: a machine's noise comes in stretches. Exit codes of
    --gate: 0 passed, 3 slower by more than the margin, 4 cannot tell (--strict, or a side was invalid).

    Example: [bold]perflab compare default weights=int8-dynamic[/bold]
    """
    from perflab.measure.paired import gate as gate_of
    from perflab.studies.compare import Compare, Side, run_compare
    from perflab.studies.compare_stored import compare_stored
    from perflab.studies.sides import service_of

    if self_test == (b is not None):
        raise typer.BadParameter("give two to compare, or one with --self-test", param_hint="B")
    if strict and margin <= 0:
        raise typer.BadParameter("--strict needs a --margin above 0", param_hint="--margin")
    if b is not None and all(
        Path(text.rpartition("@")[0] or text).is_dir() or Path(text).is_dir() for text in (a, b)
    ):
        found = compare_stored(a, b, metric or "tokens", allow_invalid=allow_invalid)
    else:
        chosen = Compare(minutes, pairs, metric, quality=quality, allow_invalid=allow_invalid)
        first = service_of(a, service)
        second = service_of(b, service) if b is not None else first
        sides = Side.of(first, a), Side.of(second, b or f"{a}, again")
        folder = out or RUNS / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
        with _told() as tell:
            found = run_compare(*sides, load, chosen, folder, tell)
        typer.echo(f"Comparison: {folder}", err=True)
    show_comparison(found, Console())
    if found.interrupted:
        raise typer.Exit(130)
    if gate:
        verdict = gate_of(found.found, margin, strict)
        if found.refused:
            verdict = "cannot tell"
        raise typer.Exit({"pass": 0, "slower": 3, "cannot tell": 4}[verdict])


def show_comparison(found: Compared, console: Console) -> None:
    """Every metric with its ratio and interval, the answer in words, quality beside it."""
    from perflab.report import units
    from perflab.studies.compare_result import METRICS

    colours = {"faster": "green", "slower": "red", "cannot tell": "yellow"}
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("", "A", "B", "B is × as fast", "interval", "finds"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for name, one in found.by_metric.items():
        of = METRICS[name]
        shape = units.number if of.higher_is_better else units.seconds
        table.add_row(
            of.name,
            *(shape(value) for value in found.medians[name]),
            units.times(one.ratio.value),
            units.interval(one.ratio),
            units.detectable(one),
            style="bold" if name == found.metric else "dim",
        )
    console.print(f"A: {found.names[0]}\nB: {found.names[1]}", highlight=False, markup=False)
    console.print(table)
    colour = colours[found.answer]
    text = (
        f"B is [{colour}]{found.answer}[/{colour}]"
        if found.answer != "cannot tell"
        else "[yellow]cannot tell[/yellow]"
    )
    reason = f": {escape(found.found.reason)}" if found.found.reason else ""
    console.print(
        f"{text} by {METRICS[found.metric].name}, from {found.pairs} pairs{reason}", highlight=False
    )
    match = found.quality.get("greedy_match")
    if match is not None:
        console.print(
            f"Greedy answers agree over {units.percent(match.value)} of their length", highlight=False
        )
    for name, facts in found.quality.get("fidelity", {}).items():
        console.print(
            f"Quality of {escape(name)}: KL {units.number(facts['kl_nats']['value'])} nats, top-1 agreement "
            f"{units.percent(facts['top1']['value'])} with fp32",
            highlight=False,
        )
    for note in found.notes:
        console.print(f"[dim]{escape(note)}[/dim]", highlight=False)
