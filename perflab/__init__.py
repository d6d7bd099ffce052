"""perflab: a performance laboratory for LLM inference. Measure, optimise, verify.

The names here are the public ones. Those that need torch are imported when first used, so that
reading a run or printing a help text does not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perflab.config import EngineConfig
from perflab.types import EventRecord, Request, RequestRecord, SamplingParams, StepRecord, TokenEvent

if TYPE_CHECKING:
    from perflab.engine.drivers import AsyncEngine
    from perflab.engine.engine import Engine
    from perflab.models.load import load as load_model
    from perflab.speculate.make import LLM, make_engine

_FOUND_IN = {
    "LLM": "perflab.speculate.make",
    "Engine": "perflab.engine.engine",
    "AsyncEngine": "perflab.engine.drivers",
    "make_engine": "perflab.speculate.make",
    "load_model": "perflab.models.load",  # `perflab.load` is the package of loads
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "EventRecord",
    "Request",
    "RequestRecord",
    "SamplingParams",
    "StepRecord",
    "TokenEvent",
    "load_model",
    "make_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module 'perflab' has no attribute {name!r}")
    return getattr(import_module(_FOUND_IN[name]), name.removesuffix("_model"))
