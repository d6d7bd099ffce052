"""The commands `study` and `report`: run or resume a study with progress, render what it left.

Owns where a study goes by default and how its course is told. What a study does is `perflab.studies`'.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from perflab.cli.options import DEVICE, MODEL, TRUST_CODE
from perflab.errors import PerflabError
from perflab.models.assets import NAME as EMBEDDED

if TYPE_CHECKING:
    from perflab.measure.stats import Comparison
    from perflab.report.analysis import Analysis
    from perflab.studies.study import Progress as StudyProgress
    from perflab.studies.study import Study

RUNS = Path("runs")


def study(
    model: Annotated[str | None, MODEL] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A study of your own, in YAML, instead of the ladder.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first report in about two minutes.")] = False,
    minutes: Annotated[float | None, typer.Option(help="Time for all of it.", min=0.1)] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Its folder; default: under runs/.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume/--fresh", help="Go on where it stopped, or delete its runs and begin anew."),
    ] = True,
    device: Annotated[str | None, DEVICE] = None,
    trust_remote_code: Annotated[bool, TRUST_CODE] = False,
) -> None:
    """Measure a model rung by rung and write report.html.

    Stopped with Ctrl-C it keeps its finished runs; the same command goes on from there.

    Example: [bold]perflab study --quick[/bold]
    """
    chosen = _chosen(model, file, quick, minutes, device, trust_remote_code)
    folder = out or default_folder(chosen)
    if not resume:
        _delete(folder)

    from perflab.report.analysis import analyse
    from perflab.report.html import write_report
    from perflab.studies.study import run_study

    with _told() as tell:
        result = run_study(chosen, folder, progress=tell)
    if not result.runs:
        Console(stderr=True).print("stopped before a run was finished: there is nothing to report")
        raise typer.Exit(130)
    report = write_report([folder], folder / "report.html")
    Console().print(summary_table(analyse([folder])))
    for name, why in result.failures.items():
        Console(stderr=True).print(f"[yellow]left out: {escape(name)}: {escape(why)}[/yellow]")
    if result.interrupted:
        Console(stderr=True).print(f"[yellow]{escape(result.message)}[/yellow]")
    typer.echo(f"Report: {report}")
    if result.interrupted:
        raise typer.Exit(130)


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="What any command left: runs, studies, folders of runs. First: before."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File or folder; default: report.html in the first folder."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a summary in Markdown instead, for a pull request.")
    ] = False,
    compare_invalid: Annotated[
        bool, typer.Option("--compare-invalid", help="Let runs with an invalid verdict into comparisons.")
    ] = False,
) -> None:
    """Render any number of runs as one file, without running anything; several are compared.

    Example: [bold]perflab report runs/before runs/after[/bold]
    """
    from perflab.report.html import save, summary_markdown, write_report

    if markdown:
        text = summary_markdown(folders, compare_invalid)
        if out is None:
            typer.echo(text, nl=False)
        else:
            typer.echo(f"Summary: {save(text, out, 'report.md')}")
        return
    written = write_report(folders, out or folders[0] / "report.html", compare_invalid)
    typer.echo(f"Report: {written}")


def _chosen(
    model: str | None, file: Path | None, quick: bool, minutes: float | None, device: str | None, trust: bool
) -> Study:
    """The study that the options name. Raises BadParameter where two of them contradict each other."""
    if file is not None and quick:
        raise typer.BadParameter(
            "a study of your own has its own length: use --minutes", param_hint="--quick"
        )
    with Console(stderr=True).status("looking at this machine"):
        from perflab.studies.ladder import default_study
        from perflab.studies.study import load_study_file

        chosen = (
            load_study_file(file)
            if file
            else default_study(model or EMBEDDED, quick, device=device or "auto")
        )
    return replace(
        chosen,
        model=model or chosen.model,
        device=device or chosen.device,
        trust_remote_code=trust or chosen.trust_remote_code,
        time_budget_s=minutes * 60 if minutes else chosen.time_budget_s,
    )


def default_folder(study: Study) -> Path:
    """Where a study goes: the same place for the same study, so that it is found again.

    Models of the same name in different places go to different ones: a hub id counts whole, a path by
    a hash of where it leads.
    """
    from perflab.studies.session import slug

    model, place = study.model, ""
    if Path(model).exists():
        path = Path(model).resolve()
        model, place = path.name, f" {hashlib.sha256(str(path).encode()).hexdigest()[:6]}"
    return RUNS / slug(f"{study.name} {model}{place}")


def _delete(folder: Path) -> None:
    """Remove a study's folder; refuses to remove anything else."""
    if not folder.exists():
        return
    if not (folder / "study.json").exists():
        raise PerflabError(f"{folder} holds no study, so --fresh does not delete it: name another with --out")
    shutil.rmtree(folder)


@contextmanager
def _told() -> Iterator[Callable[[StudyProgress], None]]:
    """Shows where a study is: a bar in a terminal, a line for each stage and run elsewhere.

    The first message, which says how long it takes, stays on the screen.
    """
    from perflab.studies.session import duration

    console = Console(stderr=True)
    seen: list[str] = []
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        refresh_per_second=2,  # it draws while a run is measured
    )
    task = bar.add_task("", total=1.0, left="")

    def tell(progress: StudyProgress) -> None:
        left = "" if progress.left_s is None else f"about {duration(progress.left_s)} left"
        bar.update(task, description=escape(progress.message), completed=progress.fraction, left=left)
        first = progress.stage not in seen
        seen.append(progress.stage)
        if not console.is_terminal or (first and progress.stage in ("load", "done")):
            console.print(escape(progress.message), highlight=False)

    with bar:
        yield tell


def summary_table(analysis: Analysis) -> Table:
    """The ladder for a terminal: rate, speed-up over the variant before (step) and over the first (total)."""
    from perflab.report import units

    colours = {"faster": "green", "slower": "red", "cannot tell": "yellow"}

    def speed_up(found: Comparison | None, answer: bool) -> str:
        if found is None:
            return ""
        ratio, colour = units.times(found.ratio.value), colours[found.answer]
        return f"{ratio} [{colour}]{found.answer}[/{colour}]" if answer else f"[{colour}]{ratio}[/{colour}]"

    table = Table(
        title=str(analysis.study.get("name", "")), title_justify="left", box=box.SIMPLE, pad_edge=False
    )
    table.add_column("variant", no_wrap=True)
    for heading in ("tokens/s", "step", "total"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("top-1 agreement", justify="right", no_wrap=True)
    for summary in analysis.summaries:
        table.add_row(
            Text(summary.name),
            units.number(summary.tokens_per_s.value),
            speed_up(summary.previous, answer=True),
            speed_up(summary.first, answer=False),
            "not the model's" if summary.forced else units.percent(summary.top1),
        )
    return table
