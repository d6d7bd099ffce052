"""Engines with the drafter that their configuration names.

Owns that choice. Whoever builds an engine from a configuration calls `make_engine`.
"""

from __future__ import annotations

from typing import Any

from perflab.clock import Clock, WallClock
from perflab.config import EngineConfig
from perflab.engine import llm
from perflab.engine.draft import Drafter
from perflab.engine.engine import Engine
from perflab.engine.plan import Plan, StepResult
from perflab.engine.sequence import Sequence
from perflab.models.loaded import LoadedModel
from perflab.models.runners import Runner, make_runner
from perflab.speculate.adaptive import Adaptive, Source
from perflab.speculate.combine import Costly, LookupFirst
from perflab.speculate.ngram import NgramDrafter


def make_engine(
    model: Any, config: EngineConfig | None = None, clock: Clock | None = None, runner: Runner | None = None
) -> Engine:
    """An engine for a `LoadedModel`. Raises what `Engine` and `make_drafter` raise."""
    config = config or EngineConfig()
    if config.drafter == "off":
        return Engine(model, config, clock, runner=runner)
    clock, runner = clock or WallClock(), runner or make_runner(model, config)
    drafter = make_drafter(model, config, clock, runner)
    return Engine(model, config, clock, runner=runner, drafter=drafter)


class LLM(llm.LLM):
    __doc__ = llm.LLM.__doc__
    make_engine = staticmethod(make_engine)


def make_drafter(model: LoadedModel, config: EngineConfig, clock: Clock, runner: Runner) -> Drafter | None:
    """What `config.drafter` names, around it what adapts its drafts; None for `off`.

    Raises ModelError where a head or a model cannot be had, ConfigError where it does not fit.
    """
    if config.drafter == "off":
        return None
    source = _source(model, config, clock, runner)
    if config.forced_acceptance is not None:
        source = _Filled(source)
    return Adaptive(source, config.max_draft_tokens, clock) if config.adaptive_draft else source


def _source(model: LoadedModel, config: EngineConfig, clock: Clock, runner: Runner) -> Source:
    kind, _, name = config.drafter.partition(":")
    if kind == "ngram":
        return NgramDrafter()
    if kind == "model":
        from perflab.models.load import load
        from perflab.speculate.draft_model import ModelDrafter

        return Costly(ModelDrafter(load(name, dtype=model.dtype, device=model.device), model, config, clock))
    from perflab.speculate.head import HeadDrafter

    head = HeadDrafter.of(model, runner)
    return LookupFirst(NgramDrafter(), head) if kind == "head+ngram" else Costly(head)


class _Filled:
    """Another drafter's guesses, filled up to the limit with the last token: for forced acceptance, which
    asks what an engine makes of so many guesses of which so many hold."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.wants_features = source.wants_features
        self.num_kinds, self.costly_kind = source.num_kinds, source.costly_kind

    @property
    def kinds(self) -> list[int]:
        return [max(kind, 0) for kind in self._source.kinds]

    def propose(
        self, seqs: list[Sequence], limits: list[int], few: list[int] | None = None
    ) -> list[list[int]]:
        found = self._source.propose(seqs, limits, few)
        wanted = limits if few is None else few
        return [
            draft + [seq.tokens[-1]] * (limit - len(draft))
            for seq, draft, limit in zip(seqs, found, wanted, strict=True)
        ]

    def observe(self, plan: Plan, result: StepResult) -> None:
        self._source.observe(plan, result)

    def forget(self, request_id: str) -> None:
        self._source.forget(request_id)
