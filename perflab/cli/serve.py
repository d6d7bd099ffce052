"""The command `serve`: a model behind an OpenAI-compatible HTTP API until it is told to stop.

Owns its options and what is said on the way. The server is `perflab.serve`'s.
"""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console

from perflab.cli.options import DEVICE, MODEL, TRUST_CODE
from perflab.errors import PerflabError
from perflab.models.assets import NAME as EMBEDDED

_ENGINE, _LIMITS = "Engine", "What clients may ask for"


def _option(panel: str, words: str, **more: Any) -> Any:
    return typer.Option(help=words, rich_help_panel=panel, **more)


def serve(
    model: Annotated[str, MODEL] = EMBEDDED,
    host: Annotated[
        str, typer.Option(help="Address to listen on; loopback unless you say so.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name in the API; default: its own.")] = None,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable with the key that clients must send, if it is set.")
    ] = "PERFLAB_API_KEY",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, DEVICE] = "auto",
    weights: Annotated[
        str, _option(_ENGINE, "model, int8, int8-dynamic, int4, llm.int8, nf4 or fp4.")
    ] = "model",
    kv_dtype: Annotated[str, _option(_ENGINE, "Keys and values: model or int8.")] = "model",
    batching: Annotated[str, _option(_ENGINE, "static, dynamic or continuous.")] = "continuous",
    batch_timeout: Annotated[float, _option(_ENGINE, "Seconds that a dynamic batch waits.")] = 0.05,
    policy: Annotated[str, _option(_ENGINE, "Order of the queue: fcfs, priority, sjf or edf.")] = "fcfs",
    max_num_seqs: Annotated[int, _option(_ENGINE, "Requests that run at once.", min=1)] = 16,
    max_num_batched_tokens: Annotated[int, _option(_ENGINE, "Token budget of a step.", min=1)] = 512,
    max_model_len: Annotated[int | None, _option(_ENGINE, "Prompt and answer together, in tokens.")] = None,
    num_blocks: Annotated[int | None, _option(_ENGINE, "KV pool, in blocks of 16 tokens.")] = None,
    prefix_cache: Annotated[bool, _option(_ENGINE, "Share what prompts have in common.")] = True,
    threads: Annotated[int | None, _option(_ENGINE, "CPU threads of the model.", min=1)] = None,
    max_waiting: Annotated[int, _option(_LIMITS, "Longest queue; beyond it status 429.", min=0)] = 1024,
    queue_timeout: Annotated[
        float | None, _option(_LIMITS, "Seconds in the queue; then status 503.", min=0.001)
    ] = None,
    max_tokens: Annotated[int | None, _option(_LIMITS, "Longest answer, in tokens.", min=1)] = None,
    max_prompt_tokens: Annotated[int | None, _option(_LIMITS, "Longest prompt, in tokens.", min=1)] = None,
    max_samples: Annotated[int, _option(_LIMITS, "Answers per request: prompts × n.", min=1)] = 128,
    max_body_bytes: Annotated[int, _option(_LIMITS, "Longest body.", min=1)] = 4 << 20,
    shutdown: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get at the end.")
    ] = 10.0,
    access_log: Annotated[bool, typer.Option("--access-log", help="A line per request.")] = False,
    trust_remote_code: Annotated[bool, TRUST_CODE] = False,
) -> None:
    """Serve a model to OpenAI clients: /v1/chat/completions, /v1/completions, /v1/models.

    Beside them /health, /ready and /metrics (Prometheus). Ctrl-C or SIGTERM stops it.

    Example: [bold]perflab serve --port 8000[/bold]
    """
    from perflab.config import EngineConfig
    from perflab.serve.parse import Limits

    config = EngineConfig(
        weights=weights,  # type: ignore[arg-type]
        kv_dtype=kv_dtype,  # type: ignore[arg-type]
        batching=batching,  # type: ignore[arg-type]
        batch_timeout_s=batch_timeout,
        policy=policy,  # type: ignore[arg-type]
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        prefix_cache=prefix_cache,
        num_threads=threads,
        keep_records=KEEP_RECORDS,
    )
    limits = Limits(max_body_bytes, max_prompt_tokens, max_tokens, max_samples, max_waiting, queue_timeout)
    api_key = os.environ.get(api_key_env) or None
    console = Console(stderr=True)
    try:
        from perflab.serve.server import listen, make_server, url_of
    except ImportError as error:
        raise PerflabError(f"{error.name} is missing: pip install 'perflab[serve]'") from error
    bound = listen(host, port)
    with console.status(f"loading {model}") as status:
        from perflab.models.load import load
        from perflab.serve.service import Service
        from perflab.speculate.make import make_engine

        loaded = load(
            model, dtype=dtype, device=device, trust_remote_code=trust_remote_code, progress=status.update
        )
        status.update("preparing the engine")
        service = Service(make_engine(loaded, config), name, limits)
    if api_key is None and not _is_loopback(host):
        console.print(f"[yellow]anyone who reaches {host} may use it: set {api_key_env} to a key[/yellow]")
    console.print(f"{service.name} at {url_of(bound)}/v1", highlight=False)
    server = make_server(service, api_key=api_key, shutdown_s=shutdown, access_log=access_log)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[bound])


KEEP_RECORDS = 2048  # steps and requests: a longer answer lacks the spans of its first steps


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
