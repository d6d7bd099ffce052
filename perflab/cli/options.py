"""Options that several commands share, said once: which model, which service, which load.

Owns their names and words, and how they become a `ServiceChoice` and a `LoadChoice`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from perflab.studies.service_run import LoadChoice, ServiceChoice

MODEL: Any = typer.Option(
    "--model", "-m", help="The embedded model's name, a hub id, a directory or a GGUF file."
)
DEVICE: Any = typer.Option("--device", help="auto, cpu or cuda.")
TRUST_CODE: Any = typer.Option(
    "--trust-remote-code", help="Run Python code that comes with the model. Off by default."
)
ENGINE: Any = typer.Option("--engine", help="Switches of our engine, such as weights=int4,max_num_seqs=8.")

_SERVICE, _LOAD, _GOALS, _CAPS = "Which service", "Which load", "What counts as good", "What it may use"


def takes(**makers: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the options of each maker; the command gets what the maker makes of them.

    >>> @takes(service=service_choice, load=load_choice)
    ... def bench(service, load, out=None): ...
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        groups = {name: _parameters(maker) for name, maker in makers.items()}
        own = [p for p in _parameters(command) if p.name not in makers]

        def run(**given: Any) -> Any:
            made = {
                name: makers[name](**{p.name: given.pop(p.name) for p in group})
                for name, group in groups.items()
            }
            return command(**made, **given)

        everything = [p for group in groups.values() for p in group] + own
        run.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in everything}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True, localns={"ServiceChoice": Any, "LoadChoice": Any})
    return [
        p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for p in inspect.signature(function).parameters.values()
    ]


def service_choice(
    url: Annotated[
        str | None,
        typer.Argument(
            help="An OpenAI-compatible server, such as http://127.0.0.1:8000; default: our engine."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The name to ask a server for, or the model to run here.",
            rich_help_panel=_SERVICE,
        ),
    ] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.", rich_help_panel=_SERVICE)] = "chat",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="A model whose tokenizer the server uses: makes prompt lengths exact.",
            rich_help_panel=_SERVICE,
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Ask for streams.", rich_help_panel=_SERVICE)
    ] = True,
    retries: Annotated[
        int,
        typer.Option(min=0, help="Sends after a refusal or a lost connection.", rich_help_panel=_SERVICE),
    ] = 0,
    extra: Annotated[
        str | None,
        typer.Option(help="JSON: more fields of every request's body.", rich_help_panel=_SERVICE),
    ] = None,
    device: Annotated[str, DEVICE] = "auto",
    trust_remote_code: Annotated[bool, TRUST_CODE] = False,
) -> ServiceChoice:
    from perflab.studies.service_run import ServiceChoice

    try:
        fields = json.loads(extra or "{}")
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"not JSON ({error.msg})", param_hint="--extra") from None
    if not isinstance(fields, dict):
        raise typer.BadParameter("a JSON object is needed", param_hint="--extra")
    return ServiceChoice(
        url,
        model,
        endpoint,
        tokenizer,
        device=device,
        trust_remote_code=trust_remote_code,
        stream=stream,
        retries=retries,
        extra=fields,
    )


def load_choice(
    data: Annotated[
        Path | None,
        typer.Option(
            help="Prompts or, with --trace, a trace instead of synthetic prompts.", rich_help_panel=_LOAD
        ),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="--data holds arrivals and lengths.", rich_help_panel=_LOAD)
    ] = False,
    workload: Annotated[
        Path | None,
        typer.Option(help="A workload declared in YAML, as in a study's file.", rich_help_panel=_LOAD),
    ] = None,
    input_tokens: Annotated[int, typer.Option(min=1, rich_help_panel=_LOAD)] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, rich_help_panel=_LOAD)] = 64,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="How many; default: what --duration needs.", rich_help_panel=_LOAD),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second, sent whatever the server does (open loop).", rich_help_panel=_LOAD
        ),
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="With --rate: constant, poisson or gamma.", rich_help_panel=_LOAD)
    ] = "poisson",
    cv: Annotated[
        float, typer.Option(help="With gamma: coefficient of variation of the gaps.", rich_help_panel=_LOAD)
    ] = 1.0,
    users: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Users who each wait for an answer before they ask again (closed loop).",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    think: Annotated[
        float, typer.Option(min=0, help="Seconds that a user thinks.", rich_help_panel=_LOAD)
    ] = 0.0,
    duration: Annotated[float | None, typer.Option(help="Seconds of sending.", rich_help_panel=_LOAD)] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.", rich_help_panel=_LOAD)] = 0,
    salt: Annotated[
        bool,
        typer.Option(
            "--salt/--no-salt", help="Prompts new to every prefix cache, each run.", rich_help_panel=_LOAD
        ),
    ] = True,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Most seconds to the first token.", rich_help_panel=_GOALS)
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(help="Most seconds per further token.", rich_help_panel=_GOALS)
    ] = None,
    slo_e2e: Annotated[
        float | None, typer.Option(help="Most seconds to the last token.", rich_help_panel=_GOALS)
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds after which a request is given up.", rich_help_panel=_CAPS),
    ] = 600.0,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="More requests wait in the client.", rich_help_panel=_CAPS)
    ] = None,
    max_requests: Annotated[int | None, typer.Option(min=1, rich_help_panel=_CAPS)] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1, rich_help_panel=_CAPS)] = None,
    max_seconds: Annotated[float | None, typer.Option(rich_help_panel=_CAPS)] = None,
) -> LoadChoice:
    from perflab.load.drive import Limits
    from perflab.measure.metrics import SLO
    from perflab.studies.service_run import LoadChoice

    declared = _declared(workload)
    return LoadChoice(
        declared.pop("kind", "synthetic" if data is None else "trace" if trace else "prompts"),
        data,
        input_tokens,
        output_tokens,
        requests,
        rate,
        arrivals,
        cv,
        users,
        think,
        duration,
        SLO(slo_ttft, slo_tpot, slo_e2e),
        timeout,
        Limits(max_in_flight, max_requests, max_output_tokens, max_seconds),
        seed,
        salt,
        declared,
        workload.parent if workload else Path(),
    )


def _declared(file: Path | None) -> dict[str, Any]:
    import yaml

    from perflab.errors import WorkloadError

    if file is None:
        return {}
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise WorkloadError(f"{file}: cannot be read as YAML ({error})") from None
    if not isinstance(found, dict):
        raise WorkloadError(f"{file}: a workload is a mapping with a kind, such as {{kind: synthetic}}")
    return found
