"""The command `profile`: a measured run with whichever instruments were asked for, written and rendered.

Owns its options and what is printed. What is observed and how is `perflab.studies.profile`'s.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from perflab.cli.options import ENGINE, load_choice, service_choice, takes

if TYPE_CHECKING:
    from perflab.studies.service_run import LoadChoice, ServiceChoice

_INSTRUMENTS = "Which instruments"


@takes(service=service_choice, load=load_choice)
def profile(
    service: ServiceChoice,
    load: LoadChoice,
    cold_start: Annotated[
        bool,
        typer.Option(
            "--cold-start",
            help="Start new processes, with warm and cold caches.",
            rich_help_panel=_INSTRUMENTS,
        ),
    ] = False,
    flame: Annotated[
        bool, typer.Option("--flame", help="Sample stacks: a flame graph.", rich_help_panel=_INSTRUMENTS)
    ] = False,
    operators: Annotated[
        bool,
        typer.Option(
            "--operators",
            help="Take a decode and a prefill step apart: layers and operators.",
            rich_help_panel=_INSTRUMENTS,
        ),
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Memory, and whether it leaks.", rich_help_panel=_INSTRUMENTS)
    ] = False,
    all_: Annotated[
        bool, typer.Option("--all", help="Everything the service allows.", rich_help_panel=_INSTRUMENTS)
    ] = False,
    starts: Annotated[
        int, typer.Option(min=1, help="Cold starts of each kind.", rich_help_panel=_INSTRUMENTS)
    ] = 3,
    leak_requests: Annotated[
        int, typer.Option(min=100, help="Requests for the leak verdict.", rich_help_panel=_INSTRUMENTS)
    ] = 400,
    pid: Annotated[
        int | None,
        typer.Option(
            help="The server's process, where it is not the one at its port.", rich_help_panel=_INSTRUMENTS
        ),
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option(help="Also send the requests' spans to this OTLP/HTTP address, …/v1/traces."),
    ] = None,
    engine: Annotated[str, ENGINE] = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder; default: under runs/.")
    ] = None,
) -> None:
    """Say where time and memory go: one run, its trace for Perfetto, and the instruments asked for.

    The measured run is observed by telemetry alone; every other instrument gets runs of its own and
    says what it costs.

    Example: [bold]perflab profile --flame --operators --users 4[/bold]
    """
    from perflab.report.html import write_report
    from perflab.report.profile import sections_of
    from perflab.report.trace import write_trace
    from perflab.studies.profile import Instruments
    from perflab.studies.profile import profile as run_profile
    from perflab.studies.sides import service_of

    service = service_of(engine, service)
    ours = service.url is None
    use = Instruments(
        cold_start=cold_start or (all_ and ours),
        flame=flame or all_,
        operators=operators or (all_ and ours),
        memory=memory or all_,
        repeats=starts,
        leak_requests=leak_requests,
        pid=pid,
    )
    folder = out or Path("runs") / f"profile-{datetime.now():%Y%m%d-%H%M%S}"
    with Console(stderr=True).status("") as status:
        run = run_profile(service, load, use, folder, lambda message: status.update(escape(message)))
    trace = write_trace(folder / "trace.json", run)
    console = Console()
    for section in sections_of(run):
        console.print(f"[bold]{escape(section.title)}[/bold]\n  {escape(section.takeaway)}", highlight=False)
    if otlp:
        from perflab.report.otel import export

        console.print(f"{export(run, endpoint=otlp)} requests sent to {escape(otlp)}", highlight=False)
    typer.echo(f"Trace: {trace}")
    typer.echo(f"Report: {write_report([folder], folder / 'report.html')}")
