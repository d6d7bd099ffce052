"""Options that several commands share, said once. Owns their names and words only."""

from __future__ import annotations

from typing import Any

import typer

MODEL: Any = typer.Option(
    "--model", "-m", help="The embedded model's name, a hub id, a directory or a GGUF file."
)
DEVICE: Any = typer.Option("--device", help="auto, cpu or cuda.")
TRUST_CODE: Any = typer.Option(
    "--trust-remote-code", help="Run Python code that comes with the model. Off by default."
)
