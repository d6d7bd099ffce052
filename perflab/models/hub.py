"""Hugging Face checkpoints: a directory, or a hub id with its local cache.

Owns the questions asked before any weight is read (is it there, is it a causal text model, may its
code run) and the wording of what goes wrong. Does not choose dtype or device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perflab.errors import ModelError
from perflab.models import assets

_HUB_TIMEOUT_S = 5.0
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A causal text model that was looked at and not yet loaded."""

    name: str
    config: Any
    options: dict[str, Any]  # for every from_pretrained

    @property
    def dtype(self) -> torch.dtype | None:
        return getattr(self.config, "dtype", None)

    @property
    def notes(self) -> tuple[str, ...]:
        quantization = getattr(self.config, "quantization_config", None)
        if quantization is None:
            return ()
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        )
        return (f"weights are quantized by {getattr(method, 'value', method)}",)

    def tokenizer(self) -> tuple[Any, tuple[str, ...]]:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.name, **self.options)
            if len(tokenizer) <= len(tokenizer.all_special_ids):  # made up where there are no files
                raise OSError("no vocabulary")
            return tokenizer, ()
        except (OSError, ValueError, KeyError, TypeError) as error:
            return None, (
                f"no tokenizer could be read ({_first_line(error).rstrip(':')}): only token ids can be sent",
            )
        except ImportError as error:
            raise _missing_package(self.name, error) from error

    def model(self, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        kwargs = dict(self.options, config=self.config, dtype=dtype, use_safetensors=True)
        if getattr(self.config, "quantization_config", None) is not None:
            kwargs["device_map"] = {"": device}
        try:
            with _quiet(Path(self.name).is_dir()):
                model: Any = AutoModelForCausalLM.from_pretrained(self.name, **kwargs)
        except ImportError as error:
            raise _missing_package(self.name, error) from error
        except OSError as error:
            if "safetensors" in str(error):
                if Path(self.name).is_dir() and not _pickles(self.name):
                    raise ModelError(f"{self.name} holds no weights (*.safetensors)") from error
                raise ModelError(
                    f"{self.name} has no safetensors weights, and pickled ones (.bin, .pt) can run code, so "
                    "they are not loaded: convert them with transformers' save_pretrained, or take "
                    "a revision with safetensors"
                ) from error
            raise ModelError(f"the weights of {self.name} cannot be read: {_first_line(error)}") from error
        except (ValueError, RuntimeError, KeyError) as error:
            raise ModelError(f"{self.name} cannot be loaded: {_first_line(error)}") from error
        return model if "device_map" in kwargs else model.to(device)


def _pickles(directory: str) -> list[Path]:
    return [path for path in Path(directory).iterdir() if path.suffix in (".bin", ".pt", ".pth")]


def find(name: str, trust_remote_code: bool) -> Checkpoint:
    """Look at a directory or hub id without loading weights.

    Raises ModelError where it is not there or is no causal text model that an engine with a KV
    cache of attention layers can run.
    """
    from transformers import AutoConfig

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    unreachable = None if Path(name).is_dir() else _reach(name)
    if unreachable:
        options["local_files_only"] = True
    try:
        config = AutoConfig.from_pretrained(name, **options)
    except ImportError as error:
        raise _missing_package(name, error) from error
    except (OSError, ValueError, KeyError) as error:
        if unreachable:
            raise ModelError(
                f"{name} is not in the local cache and the hub cannot be reached ({unreachable}): check the "
                "network, or give the path of a directory or GGUF file, which works offline (the embedded "
                f"model is called {assets.NAME})"
            ) from error
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{name} brings its own Python code, which is not run unless you ask for it: read the code, "
                "then load it with trust_remote_code=True"
            ) from error
        raise ModelError(f"the configuration of {name} cannot be read: {_first_line(error)}") from error
    _refuse_other_kinds(name, config, trust_remote_code)
    return Checkpoint(name, config, options)


def _reach(name: str) -> str | None:
    """Why the hub cannot be asked about `name` within seconds, or None. Raises if there is no such model."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except HFValidationError as error:
        raise ModelError(f"{name!r} is neither a file, a directory nor a hub id (owner/name)") from error
    except GatedRepoError as error:
        raise ModelError(f"{name} is gated: accept its terms on the hub and run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name}: no such model on the hub and no such file or directory here (for a private one, run "
            "`hf auth login`)"
        ) from error
    except Exception as error:  # every transport has its own kinds; all mean: not now
        return _first_line(error)
    return None


def _refuse_other_kinds(name: str, config: Any, trust_remote_code: bool) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    architectures = getattr(config, "architectures", None) or []
    what = ", ".join(architectures) or f"model type {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder ({what}); only decoder-only causal models run here")
    if any(hasattr(config, part) for part in ("vision_config", "audio_config", "vision_tower")):
        raise ModelError(f"{name} takes more than text ({what}); only text models run here")
    causal = not architectures or any(a.endswith(("ForCausalLM", "LMHeadModel")) for a in architectures)
    both_ways = getattr(config, "use_bidirectional_attention", False) or not getattr(
        config, "is_decoder", True
    )
    if not causal or both_ways:
        raise ModelError(f"{name} is not a causal language model ({what}): it cannot generate text")
    remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if remote:
        return
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{name} is not a causal language model that transformers knows ({what})")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        raise ModelError(f"{name} keeps a recurrent state ({what}); only attention layers run here")
    if others := set(getattr(config, "layer_types", None) or ()) - _LAYER_KINDS:
        raise ModelError(
            f"{name} has layers of kind {', '.join(sorted(others))} ({what}); full and sliding attention "
            "run here"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(f"{name} has an attention of its own that cannot be replaced ({what})")
    if getattr(config, "max_position_embeddings", None) is None:
        raise ModelError(f"{name} states no context length ({what}); only models with one run here")


@contextmanager
def _quiet(on: bool) -> Iterator[None]:
    """No progress bars of transformers: reading a directory is short, a download is not."""
    from transformers.utils import logging

    on = on and logging.is_progress_bar_enabled()
    if on:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if on:
            logging.enable_progress_bar()


def _missing_package(name: str, error: ImportError) -> ModelError:
    return ModelError(f"{name} needs a package that is not installed: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
