"""Which runner serves a model under a configuration.

Owns the choice and its words. Knows nothing of how either runs.
"""

from __future__ import annotations

import warnings

from perflab.config import TORCH_WEIGHTS, EngineConfig
from perflab.errors import NotNative
from perflab.models import kernels
from perflab.models.bnb import BnbRunner
from perflab.models.loaded import LoadedModel
from perflab.models.native import NativeRunner
from perflab.models.runner import HFRunner

Runner = HFRunner | NativeRunner


def make_runner(model: LoadedModel, config: EngineConfig) -> Runner:
    """The native runner where configuration, model and machine allow it, else transformers' module.

    Raises NotNative where the configuration insists on what only native kernels do.
    """
    if config.weights in TORCH_WEIGHTS:
        return BnbRunner(model, config.weights, config.keep)
    if config.runner != "torch":
        try:
            return NativeRunner(model, config.weights, config.num_threads)
        except NotNative as reason:
            if config.runner == "native" or config.weights != "model":
                wanted = f"runner={config.runner!r}, weights={config.weights!r}"
                raise NotNative(f"{wanted}: {reason}; runner='torch' with weights='model' runs it") from None
            if kernels.library() is None:
                warnings.warn(f"running on torch, slower than need be: {reason}", stacklevel=2)
    return HFRunner(model, packed=config.packed_linears)


def runner_key(config: EngineConfig) -> tuple[object, ...]:
    """What of a configuration makes a different runner."""
    if config.weights in TORCH_WEIGHTS:
        return (config.weights, config.keep)
    if config.runner == "torch":
        return ("torch", config.packed_linears)
    return (config.runner, config.weights, config.num_threads, config.packed_linears)
