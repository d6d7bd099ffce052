"""Steps of one kind, one by one, for whoever observes them: decode of many rows, prefill of one prompt.

Owns the engine that takes them and its configuration. Observes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.engine.executor import LocalExecutor
from perflab.errors import ConfigError, StepFailed
from perflab.models.runners import Runner
from perflab.types import Request, SamplingParams, StepRecord


@dataclass(frozen=True, slots=True)
class Stage:
    """A kind of step: `rows` requests that bring one token each after `tokens` of context (decode), or one
    prompt of `tokens` (prefill, rows 1)."""

    name: str
    rows: int
    tokens: int

    @property
    def decode(self) -> bool:
        return self.name == "decode"


class Steps:
    """Steps of one stage, one by one, on an engine of its own without drafts; requests share nothing."""

    def __init__(self, model: Any, config: EngineConfig, stage: Stage, executor: LocalExecutor) -> None:
        self.stage = stage
        self.engine = Engine(model, replace(config, drafter="off"), executor=executor)
        self._random = np.random.default_rng(0)
        self._vocabulary = executor.vocab_size or 1
        self._next = 0

    def _submit(self, max_tokens: int) -> None:
        ids = self._random.integers(0, self._vocabulary, self.stage.tokens).tolist()
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.engine.submit(Request(f"step-{self._next}", ids, params))
        self._next += 1

    def prepare(self, steps: int) -> None:
        """So that the next `steps` steps are of the stage; for decode, every request is past its prompt.

        Raises StepFailed where a request ends before that.
        """
        if self.stage.decode:
            for _ in range(self.stage.rows):
                self._submit(steps + self.stage.rows + 8)
            while any(r.first_token_ns is None for r in self.engine.records):
                self.engine.step()
                for record in self.engine.records:
                    if record.outcome is not None:
                        raise StepFailed(f"a step of {self.stage.name} failed: {record.error}")

    def step(self) -> StepRecord:
        if not self.stage.decode:
            self._submit(1)
        self.engine.step()
        record = self.engine.steps[-1]
        brought = record.decode_tokens if self.stage.decode else record.prefill_tokens
        assert brought == (self.stage.rows if self.stage.decode else self.stage.tokens), record
        return record


def config_for(config: EngineConfig, stage: Stage, runner: Runner) -> EngineConfig:
    """`config`, resolved, with room for the stage in one step and without a prefix cache.

    Raises ConfigError where the model or the pool is too short for it.
    """
    budget = max(config.max_num_batched_tokens, stage.tokens, stage.rows)
    wide = replace(
        config,
        max_num_seqs=max(stage.rows, 1),
        max_num_batched_tokens=budget,
        prefix_cache=False,
        max_model_len=None,
    )
    kv_type = torch.int8 if config.kv_dtype == "int8" else runner.dtype
    wide = wide.resolve(
        model_max_len=runner.max_positions, kv_bytes_per_token=runner.kv_shape.bytes_per_token(kv_type)
    )
    assert wide.num_blocks is not None
    longest = stage.tokens + stage.rows + 80
    if longest > runner.max_positions or stage.rows * longest > wide.num_blocks * wide.block_size:
        raise ConfigError(
            f"{stage.name} of {stage.rows} × {stage.tokens} tokens: the model takes {runner.max_positions} "
            f"positions and the KV pool {wide.num_blocks * wide.block_size} tokens; choose fewer"
        )
    return wide
