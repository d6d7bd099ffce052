"""The command `bench`: one run against a service, a summary in the terminal, a run directory.

Owns what is printed. What a number means is `perflab.measure`'s.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from perflab.cli.options import load_choice, service_choice, takes

if TYPE_CHECKING:
    from perflab.studies.service_run import LoadChoice, ServiceChoice
    from perflab.studies.store import Run

QUANTILES = (0.5, 0.9, 0.99)


@takes(service=service_choice, load=load_choice)
def bench(
    service: ServiceChoice,
    load: LoadChoice,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder; default: under runs/.")
    ] = None,
) -> None:
    """Measure a service once: latencies, rates and a verdict.

    Ctrl-C ends the run and keeps what was measured. A key goes into PERFLAB_API_KEY.

    Example: [bold]perflab bench http://127.0.0.1:8000 --rate 2 --duration 60[/bold]
    """
    from perflab.studies.service_run import measure
    from perflab.studies.store import write_run

    folder = out or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    with Console(stderr=True).status("") as status:
        run = measure(
            service, load, on_progress=lambda ended, planned: status.update(f"{ended} of {planned} requests")
        )
    summary(run, Console())
    typer.echo(f"Run: {write_run(folder, run)}")


def summary(run: Run, console: Console) -> None:
    """One table of latencies with their intervals, the success rate beside them, and the verdict."""
    from perflab.measure import metrics
    from perflab.report import units

    count = metrics.counts(run.requests)
    judged = len(metrics.counted(run.requests))
    good = f"{count.completed}/{judged} succeeded"
    table = Table(title=str(run.manifest["variant"]), title_justify="left")
    table.add_column("latency")
    for q in QUANTILES:
        table.add_column(f"p{q * 100:g}", justify="right")
    table.add_column("of", justify="right")
    for name, latency in metrics.LATENCIES.items():
        cells = []
        for q in QUANTILES:
            found = latency(run.requests, q)
            span = units.interval(found, units.seconds)
            cells.append(units.seconds(found.value) + (f"\n[dim]{span}[/dim]" if span else ""))
        table.add_row(name, *cells, good)
    console.print(table)
    if rate := metrics.throughput(run.requests):
        console.print(
            f"{units.number(rate.output_tokens_per_s)} output tokens/s, "
            f"{units.number(rate.requests_per_s)} requests/s over {units.seconds(rate.seconds)}",
            highlight=False,
        )
    if run.valid:
        console.print("[green]valid[/green]")
    for name, detail in run.reasons:
        console.print(f"[red]not valid: {escape(name)}[/red] ({escape(detail)})", highlight=False)
    for note in run.manifest["validity"]["notes"]:
        console.print(f"[dim]{escape(note)}[/dim]", highlight=False)
