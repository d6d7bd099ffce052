"""The command `bench`: one run against a service, a summary in the terminal, a run directory.

Owns what is printed. What a number means is `perflab.measure`'s.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perflab.cli.options import ENGINE, load_choice, service_choice, takes
from perflab.errors import StoreError

if TYPE_CHECKING:
    from perflab.studies.service_run import LoadChoice, ServiceChoice
    from perflab.studies.store import Run

QUANTILES = (0.5, 0.9, 0.99)
MOST_ERRORS = 5


@takes(service=service_choice, load=load_choice)
def bench(
    service: ServiceChoice,
    load: LoadChoice,
    warm_up: Annotated[
        bool, typer.Option("--warm-up/--no-warm-up", help="A few short requests first, not counted.")
    ] = True,
    engine: Annotated[str, ENGINE] = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder; default: under runs/.")
    ] = None,
) -> None:
    """Measure a service once: latencies, rates and a verdict.

    Ctrl-C ends the run and keeps what was measured. A key goes into PERFLAB_API_KEY.

    Example: [bold]perflab bench http://127.0.0.1:8000 --rate 2 --duration 60[/bold]
    """
    from perflab.studies.kept import kept
    from perflab.studies.service_run import measure, warm
    from perflab.studies.sides import service_of
    from perflab.studies.store import write_run

    folder = out or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    if folder.exists():
        raise StoreError(f"{folder} already holds something; choose another directory or delete it")
    service = service_of(engine, service)
    workload = load.workload()
    with Console(stderr=True).status("getting ready") as status, kept(service) as make:
        warmed = warm(service, load, workload, make) if warm_up else 0
        run = measure(
            service,
            load,
            workload=workload,
            make=make,
            on_progress=lambda ended, planned: status.update(f"{ended} of {planned} requests"),
        )
    run.manifest["warm_up_requests"] = warmed
    summary(run, Console())
    typer.echo(f"Run: {write_run(folder, run)}")
    if run.manifest["interrupted"]:
        raise typer.Exit(130)


def summary(run: Run, console: Console) -> None:
    """One table of latencies with their intervals, the success rate beside them; rates; the verdict."""
    from perflab.measure import metrics
    from perflab.report import units

    done, judged = metrics.counts(run.requests).completed, len(metrics.counted(run.requests))
    table = Table(title=str(run.manifest["variant"]), title_justify="left", box=box.SIMPLE, pad_edge=False)
    for heading in ("", "succeeded", *(f"p{q * 100:g}" for q in QUANTILES)):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for name, latency in metrics.LATENCIES.items():
        found = [latency(run.requests, q) for q in QUANTILES]
        spans = [units.interval(estimate, units.seconds) for estimate in found]
        cells = [
            f"{units.seconds(estimate.value)}\n[dim]{span}[/dim]"
            for estimate, span in zip(found, spans, strict=True)
        ]
        table.add_row(name, f"{done}/{judged}", *cells)
    console.print(table)
    for what, rate in (
        ("whole run", metrics.throughput(run.requests)),
        ("steady window", metrics.steady_throughput(run.requests)),
    ):
        if rate is not None:
            tokens, requests = units.number(rate.output_tokens_per_s), units.number(rate.requests_per_s)
            console.print(
                f"{what}: {tokens} output tokens/s, {requests} requests/s over {units.seconds(rate.seconds)}",
                highlight=False,
            )
    slo = metrics.SLO(**run.manifest["slo"])
    if slo != metrics.SLO():
        good = metrics.goodput(run.requests, slo)
        rate_s = "" if good.requests_per_s is None else f", {units.number(good.requests_per_s)} requests/s"
        console.print(f"within the limits: {good.met} of {good.sent}{rate_s}", highlight=False)
    for error, count in Counter(r.error for r in run.requests if r.error).most_common(MOST_ERRORS):
        console.print(f"[red]{count} ×[/red] {escape(str(error))}", highlight=False)
    console.print("[green]valid[/green]" if run.valid else "[red]not valid[/red]")
    for name, detail in run.reasons:
        console.print(f"  [red]{escape(name)}[/red]: {escape(detail)}", highlight=False)
    for note in run.manifest["validity"]["notes"]:
        console.print(f"  [dim]{escape(note)}[/dim]", highlight=False)
