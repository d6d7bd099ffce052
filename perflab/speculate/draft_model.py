"""Drafts from a smaller model with the same tokenizer, run by an executor of its own.

Owns that model's KV memory and, per request, a shadow of its sequence. A shadow draws by the request's own
sampling parameters, seed and positions: where the two models' distributions are alike, the same uniform
mostly brings the same token (common random numbers), so sampled requests are drafted as greedy ones are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perflab.clock import Clock
from perflab.config import EngineConfig
from perflab.engine.executor import LocalExecutor
from perflab.engine.kv import PagedKV
from perflab.engine.plan import Plan, StepResult
from perflab.engine.sequence import Sequence
from perflab.errors import ConfigError, NotNative
from perflab.models.loaded import LoadedModel
from perflab.models.runners import Runner, make_runner
from perflab.types import RequestRecord

_SHARE = 4  # of the target's KV bytes the drafter takes at most one in so many
_PROBE = "A tokenizer's probe: Zürich, 東京 — 1 2 34 567;\n\tx = {'y': [0.5]}  # ok? …"


class ModelDrafter:
    """`draft` guesses for `target`. Raises ConfigError where their tokenizers differ."""

    wants_features = False

    def __init__(self, draft: LoadedModel, target: LoadedModel, config: EngineConfig, clock: Clock) -> None:
        check_same_tokenizer(draft, target)
        own = replace(
            config,
            drafter="off",
            forced_acceptance=None,
            max_model_len=None,
            num_blocks=None,
            kv_bytes=max(1, config.kv_bytes // _SHARE),
            kv_cache=True,
            prefix_cache=False,
            chunked_prefill=True,
        )
        runner, own = _runner(draft, own)
        own = own.resolve(
            model_max_len=runner.max_positions,
            kv_bytes_per_token=runner.kv_shape.bytes_per_token(runner.dtype),
        )
        assert own.num_blocks is not None
        assert own.max_model_len is not None
        self._executor = LocalExecutor.for_config(runner, own, clock)
        self._kv = PagedKV(own.num_blocks, own.block_size, prefix_cache=False)
        self._longest, self._budget = own.max_model_len, own.max_num_batched_tokens
        self._shadows: dict[str, Sequence] = {}  # least recently used first

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[list[int]]:
        """See `Drafter.propose`."""
        shadows = [self._shadow(seq, limit) for seq, limit in zip(seqs, limits, strict=True)]
        lengths = [len(seq.tokens) for seq in seqs]
        rows = [row for row, shadow in enumerate(shadows) if shadow is not None]
        while rows:
            live = [shadow for row in rows if (shadow := shadows[row]) is not None]
            self._step(live)
            rows = [
                row
                for row, shadow in zip(rows, live, strict=True)
                if len(shadow.tokens) < lengths[row] + limits[row]
                and not shadow.is_finished
                and (len(shadow.tokens) == lengths[row] or shadow.tokens[-1] not in shadow.stop_set)
            ]
        vocabulary = self._executor.vocab_size or 0
        return [
            [t for t in shadow.tokens[length:] if t < vocabulary] if shadow is not None else []
            for shadow, length in zip(shadows, lengths, strict=True)
        ]

    def _shadow(self, seq: Sequence, limit: int) -> Sequence | None:
        """The request as this model knows it, brought up to the target's tokens, with memory for a draft;
        None where the text is too long or memory too short."""
        shadow = self._shadows.pop(seq.request_id, None)
        if shadow is None:
            params = replace(seq.params, logprobs=None, prompt_logprobs=None)
            record = RequestRecord(seq.request_id, 0, 0, seq.num_prompt_tokens, seed=seq.seed)
            request = replace(seq.request, params=params)
            shadow = Sequence(request, record, max_len=seq.max_len, eos_token_ids=seq.stop_token_ids)
        known = shadow.num_computed_tokens
        while known and shadow.tokens[known - 1] != seq.tokens[known - 1]:
            known -= 1
        shadow.tokens[known:] = seq.tokens[known:]
        shadow.num_computed_tokens = min(known, len(seq.tokens) - 1)
        self._shadows[seq.request_id] = shadow
        end = len(seq.tokens) + limit
        if end > self._longest or not self._grow(shadow, end - 1):
            self.forget(seq.request_id)
            return None
        return shadow

    def _grow(self, shadow: Sequence, tokens: int) -> bool:
        """At the cost of the request that was drafted for least recently, if it must be."""
        while not self._kv.grow(shadow, tokens):
            oldest = next(iter(self._shadows))
            if self._shadows[oldest] is shadow:
                return False
            self.forget(oldest)
        return True

    def _step(self, shadows: list[Sequence]) -> None:
        """One token more for each whose text is computed by then; long texts take several calls."""
        plan, room = Plan(), max(self._budget, len(shadows))
        for index, shadow in enumerate(shadows):
            pending = len(shadow.tokens) - shadow.num_computed_tokens
            count = max(1, min(pending, room - (len(shadows) - index - 1)))
            plan.seqs.append(shadow)
            plan.counts.append(count)
            plan.samples.append(count == pending)
            room -= count
        result = self._executor.run(plan)
        if result.errors or result.deferred:
            raise next(iter(result.errors.values()), MemoryError("no memory for the draft model's step"))
        for shadow, count, new in zip(shadows, plan.counts, result.token_ids, strict=True):
            shadow.num_computed_tokens += count
            shadow.tokens.extend(new)

    def observe(self, plan: Plan, result: StepResult) -> None:
        pass

    def forget(self, request_id: str) -> None:
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            self._kv.free(shadow)

    def check(self) -> None:
        """Every block is free or of a request that is known."""
        self._kv.check(self._shadows.values())


def _runner(model: LoadedModel, config: EngineConfig) -> tuple[Runner, EngineConfig]:
    """The target's kind of weights where this model can have them, else its own."""
    try:
        return make_runner(model, config), config
    except NotNative:
        config = replace(config, weights="model", kv_dtype="model", runner="auto")
        return make_runner(model, config), config


def check_same_tokenizer(draft: LoadedModel, target: LoadedModel) -> None:
    """Raises ConfigError unless a token means the same to both models."""
    one, other = _vocabulary(draft), _vocabulary(target)
    if one != other:
        raise ConfigError(
            f"drafter='model:{draft.name}' has another tokenizer than {target.name}, so its tokens mean "
            "something else there; choose a smaller model of the same family"
        )


def _vocabulary(model: LoadedModel) -> Any:
    tokenizer = model.tokenizer
    if tokenizer is None:
        return None
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else len(tokenizer)
    return vocabulary, list(tokenizer.encode(_PROBE))
