"""From a name to a model: the embedded default, a GGUF file, a Hugging Face directory or a hub id.

Owns what is accepted, which dtype and device are chosen, and the errors a user meets on the way.
Weights come from safetensors or GGUF, never from pickles; code from a hub runs only when asked
for. Does not know how a model is run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from perflab.clock import WallClock
from perflab.errors import ConfigError, ModelError
from perflab.models import assets, gguf, gguf_model, hub, identity
from perflab.models.identity import Identity
from perflab.models.loaded import Deferred, LoadedModel, fingerprint, freeze
from perflab.types import SamplingParams, Span

Progress = Callable[[str], None]

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def load(
    name: str | Path = assets.NAME,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal language model with its tokenizer, stop tokens and sampling defaults.

    name: `smollm2-135m` (the embedded model), a path to a `.gguf` file, a Hugging Face directory,
        or a hub id such as `Qwen/Qwen2.5-0.5B-Instruct`.
    dtype: `auto`, `fp32`, `bf16`, `fp16` or a torch dtype. `auto` is the checkpoint's own where
        this machine computes in it at speed, else fp32.
    device: `auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:1`, …
    progress: called with one line before each slow part.

    Raises ModelError where the model cannot be found, read or run here, ConfigError for a dtype
    or device that is no such thing; both name the remedy.
    """
    say = progress or (lambda message: None)
    place = choose_device(device)
    wanted = _parse_dtype(dtype)
    spans = _Stopwatch()
    name = str(name)
    if name == assets.NAME:
        source = assets.fetch(say)
        spans.mark("fetch")
        return _load_gguf(name, source, wanted, place, say, spans)
    path = Path(name).expanduser()
    if path.is_file():
        return _load_gguf(path.name, path, wanted, place, say, spans)
    if path.is_dir():
        return _load_directory(path, wanted, place, trust_remote_code, say, spans)
    if name.endswith(".gguf") or name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise ModelError(f"{name}: no such file or directory")
    return _load_hub(name, wanted, place, trust_remote_code, say, spans)


def _import_models(say: Progress, spans: _Stopwatch) -> None:
    """transformers with its models: seconds, once per process, shown as a part of their own."""
    say("Importing transformers")
    from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401

    spans.mark("import")


class _Stopwatch:
    """Exclusive spans of loading, one after the other."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.at = WallClock.now()

    def mark(self, name: str) -> None:
        start, self.at = self.at, WallClock.now()
        self.spans.append(Span(name, start, self.at))


def choose_device(device: str | torch.device) -> torch.device:
    """`auto` is CUDA where torch sees a GPU, else the CPU. Raises ConfigError for what is not here."""
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r}: choose auto, cpu, cuda or cuda:N") from error
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (place.index or 0) >= count:
            raise ConfigError(
                f"device={str(device)!r}: torch {torch.__version__} sees {count} CUDA devices here; use "
                "device='cpu', or install a CUDA build of torch and the driver"
            )
    elif place.type not in ("cpu", "mps"):
        raise ConfigError(f"device={str(device)!r}: choose auto, cpu, cuda or cuda:N")
    return place


def _parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if dtype == "auto":
        return None
    if isinstance(dtype, str):
        if dtype.removeprefix("torch.") not in _DTYPES:
            raise ConfigError(f"dtype={dtype!r}: choose auto, fp32, bf16 or fp16")
        return _DTYPES[dtype.removeprefix("torch.")]
    if dtype not in _DTYPES.values():
        raise ConfigError(f"dtype={dtype}: choose auto, fp32, bf16 or fp16")
    return dtype


def runs_bf16_fast(device: torch.device) -> bool:
    """Whether bf16 matrix products have instructions of their own on this device."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def choose_dtype(own: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The checkpoint's own dtype where the device computes in it at speed, else fp32."""
    if own == torch.float16 and device.type != "cpu":
        return torch.float16
    if own == torch.bfloat16 and runs_bf16_fast(device):
        return torch.bfloat16
    return torch.float32


def _load_gguf(
    name: str, path: Path, wanted: torch.dtype | None, device: torch.device, say: Progress, spans: _Stopwatch
) -> LoadedModel:
    key = _key([path], wanted, device)
    file = gguf.read(path)
    own = {"F32": torch.float32, "F16": torch.float16}.get(file.quantization, torch.bfloat16)
    dtype = wanted or choose_dtype(own, device)
    say("Reading the tokenizer")
    tokenizer, notes = gguf_model.build_tokenizer(file)
    spans.mark("tokenizer")
    if file.quantization not in ("F32", "F16", "BF16"):
        notes = (f"weights are dequantised from {file.quantization}", *notes)

    def read(spans: _Stopwatch) -> torch.nn.Module:
        _import_models(say, spans)
        say("Reading the weights")
        module = gguf_model.build_model(file, dtype).to(device)
        spans.mark("weights")
        return module

    if (known := identity.recall(key)) is not None:
        return _deferred(name, known, read, tokenizer, spans)
    return _assemble(name, read(spans), tokenizer, notes, spans, key)


def _load_directory(
    path: Path,
    wanted: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
    say: Progress,
    spans: _Stopwatch,
) -> LoadedModel:
    if not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _load_gguf(files[0].name, files[0], wanted, device, say, spans)
        found = (
            f"{len(files)} GGUF files: name one of them" if files else "neither config.json nor a GGUF file"
        )
        raise ModelError(f"{path} holds {found}")
    return _load_hub(str(path), wanted, device, trust_remote_code, say, spans)


def _load_hub(
    name: str,
    wanted: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
    say: Progress,
    spans: _Stopwatch,
) -> LoadedModel:
    path = Path(name)
    local = path.is_dir() and not trust_remote_code
    key = _key((file for file in path.iterdir() if file.is_file()), wanted, device) if local else None
    display = path.name if path.is_dir() else name

    def look(spans: _Stopwatch) -> hub.Checkpoint:
        _import_models(say, spans)
        say(f"Looking at {name}")
        return hub.find(name, trust_remote_code)

    def read(source: hub.Checkpoint, spans: _Stopwatch) -> torch.nn.Module:
        say("Reading the weights")
        module = source.model(wanted or choose_dtype(source.dtype, device), device)
        spans.mark("weights")
        return module

    known = identity.recall(key)
    source = look(spans) if known is None else hub.Checkpoint(name, None, {"trust_remote_code": False})
    say("Reading the tokenizer")
    tokenizer, notes = source.tokenizer()
    spans.mark("tokenizer")
    if known is not None:
        return _deferred(display, known, lambda spans: read(look(spans), spans), tokenizer, spans)
    return _assemble(display, read(source, spans), tokenizer, (*source.notes, *notes), spans, key)


def _key(files: Iterable[Path], wanted: torch.dtype | None, device: torch.device) -> str | None:
    """What the facts of these files are kept under; None where they are not kept: on other devices."""
    if device.type != "cpu":
        return None
    return identity.key(files, str(wanted or f"auto, bf16 {runs_bf16_fast(device)}"))


def _deferred(
    name: str,
    known: Identity,
    read: Callable[[_Stopwatch], torch.nn.Module],
    tokenizer: Any,
    spans: _Stopwatch,
) -> LoadedModel:
    """A model on the CPU whose weights wait until they are asked for."""

    def read_now() -> tuple[torch.nn.Module, tuple[Span, ...]]:
        later = _Stopwatch()
        return freeze(read(later)), tuple(later.spans)

    spans.mark("identity")
    return LoadedModel(
        name=name,
        fingerprint=known.fingerprint,
        module=None,  # type: ignore[arg-type]
        config=None,
        tokenizer=tokenizer,
        stop_token_ids=known.stop_token_ids,
        defaults=known.defaults,
        max_model_len=known.max_model_len,
        dtype=getattr(torch, known.dtype),
        device=torch.device("cpu"),
        notes=known.notes,
        load_spans=tuple(spans.spans),
        deferred=Deferred(read_now),
    )


def _assemble(
    name: str,
    module: torch.nn.Module,
    tokenizer: Any,
    notes: tuple[str, ...],
    spans: _Stopwatch,
    key: str | None,
) -> LoadedModel:
    """A model whose weights are here; what was found out about it is kept under `key`."""
    freeze(module)
    config: Any = module.config
    weight = next(module.parameters())
    if weight.device.type == "cpu" and weight.dtype == torch.float16:
        notes = (*notes, "fp16 has no fast path on this CPU: expect it to be slower than fp32")
    facts = Identity(
        fingerprint=fingerprint(module, config),
        stop_token_ids=stop_tokens(module.generation_config, tokenizer),
        defaults=sampling_defaults(module.generation_config),
        max_model_len=int(config.max_position_embeddings),
        dtype=str(weight.dtype).removeprefix("torch."),
        notes=notes,
    )
    spans.mark("fingerprint")
    identity.remember(key, facts)
    return LoadedModel(
        name=name,
        fingerprint=facts.fingerprint,
        module=module,
        config=config,
        tokenizer=tokenizer,
        stop_token_ids=facts.stop_token_ids,
        defaults=facts.defaults,
        max_model_len=facts.max_model_len,
        dtype=weight.dtype,
        device=weight.device,
        notes=notes,
        load_spans=tuple(spans.spans),
    )


def stop_tokens(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """End tokens of the generation config (one or several) and of the tokenizer, without repeats."""
    eos = getattr(generation_config, "eos_token_id", None)
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    if (own := getattr(tokenizer, "eos_token_id", None)) is not None:
        ids.append(own)
    return tuple(dict.fromkeys(int(i) for i in ids))


def sampling_defaults(generation_config: Any) -> SamplingParams:
    """The checkpoint's own sampling; what it leaves open is off, and without `do_sample` it is greedy."""

    def value(key: str, otherwise: Any) -> Any:
        found = getattr(generation_config, key, None)
        return otherwise if found is None else found

    always: dict[str, Any] = {"repetition_penalty": float(value("repetition_penalty", 1.0))}
    if (limit := value("max_new_tokens", None)) is not None:
        always["max_tokens"] = int(limit)
    if not value("do_sample", False):
        return SamplingParams(**always)
    return SamplingParams(
        temperature=float(value("temperature", 1.0)),
        top_k=int(value("top_k", 0)),
        top_p=float(value("top_p", 1.0)),
        min_p=float(value("min_p", 0.0)),
        **always,
    )
