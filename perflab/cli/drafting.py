"""The command `train-drafter`: a draft head for a model, from the model's own answers to the head installed.

Owns the two stages' order, where their files lie and what is printed. How text is collected and a head is
trained is `perflab.speculate`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from perflab.cli.options import DEVICE, TRUST_CODE

if TYPE_CHECKING:
    from perflab.models.loaded import LoadedModel

CONTEXT = 1024  # tokens of the longest conversation that is collected, with room


def train_drafter(
    model: Annotated[str, typer.Argument(help="The embedded model's name, a hub id, a directory or a GGUF.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Save the head here instead of installing it.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Size of the training set.", min=1)] = 800_000,
    minutes: Annotated[
        float, typer.Option(help="Longest time of training, collecting left out.", min=0.01)
    ] = 50.0,
    vocabulary: Annotated[int, typer.Option(help="Frequent tokens that the head can draft.", min=1)] = 4096,
    seed: Annotated[int, typer.Option(help="Of the questions, of sampling and of the batches.")] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="Training set and checkpoints; default: in the user's cache.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the model: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, DEVICE] = "auto",
    trust_remote_code: Annotated[bool, TRUST_CODE] = False,
) -> None:
    """Train a small head that drafts tokens for a model, on what the model itself answers.

    Then --engine drafter=head or head+ngram uses it. Stopped with Ctrl-C, the same command goes on from the
    last part of the training set or the last checkpoint.

    Example: [bold]perflab train-drafter smollm2-135m --tokens 400000 --minutes 20[/bold]
    """
    from perflab.models.assets import cache_dir
    from perflab.models.load import load
    from perflab.speculate.head import head_path, installed

    loaded = load(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code, progress=_say)
    work = folder or cache_dir() / "training" / f"{head_path(loaded.name).stem}-{seed}"
    target = out or installed() / head_path(loaded.name)
    try:
        made = _make(loaded, work, tokens, minutes, vocabulary, seed)
    except KeyboardInterrupt:
        _say(f"Stopped. What was collected and checkpointed stays in {work}; the same command goes on.")
        raise typer.Exit(130) from None
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"{target.name}.draft")
    draft.write_bytes(made.read_bytes())
    draft.rename(target)
    typer.echo(target)


def _make(model: LoadedModel, folder: Path, tokens: int, minutes: float, vocabulary: int, seed: int) -> Path:
    """The head's file in `folder`, both stages going on from what lies there."""
    from perflab.config import EngineConfig
    from perflab.engine.llm import LLM
    from perflab.speculate.collect import collect
    from perflab.speculate.train import TrainConfig, Trainer

    batched = EngineConfig(
        max_num_seqs=96,
        max_num_batched_tokens=1024,
        max_model_len=min(CONTEXT, model.max_model_len),
        kv_bytes=2 << 30,
    )
    llm = LLM(model, batched)
    try:
        shards = collect(llm, folder / "texts", tokens, seed, _say)
    finally:
        llm.close()
    del llm  # its KV pool
    config = TrainConfig(vocabulary=vocabulary, epochs=8.0, minutes=minutes, seed=seed)
    trainer = Trainer(model, shards, folder, config, _say)
    _say(
        f"training on {sum(len(tokens) for tokens, _, _ in trainer.data.examples):,} tokens; "
        f"the head's {len(trainer.token_ids)} tokens are {trainer.coverage:.1%} of the answers"
    )
    return trainer.run()


def _say(message: str) -> None:
    Console(stderr=True).print(escape(message), highlight=False, soft_wrap=True)
