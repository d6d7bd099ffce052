"""One model behind an API: its engine, its name, what it may be asked, whether it can serve now.

Owns the engine's life (warm-up to close) and how many samples are in it. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from typing import Any, cast

from perflab.clock import NS_PER_S, Clock, seconds_to_ns
from perflab.engine.detokenizer import Detokenizer
from perflab.engine.drivers import AsyncEngine
from perflab.engine.engine import Engine
from perflab.errors import ModelError
from perflab.serve.errors import ApiError
from perflab.serve.metrics import Metrics
from perflab.serve.parse import Limits, Prompt
from perflab.types import Request, SamplingParams

LONG_TEXT = 16_384  # characters; a longer text is tokenised beside the loop
RETRY_AFTER_S = 1
STUCK_NS = seconds_to_ns(60)  # no step takes as long by itself


class Service:
    """Serves `engine` under `name`. Not ready before `warm_up`, nor while the engine is broken."""

    def __init__(self, engine: Engine, name: str | None = None, limits: Limits | None = None) -> None:
        self.engine = AsyncEngine(engine)
        self.model = cast(Any, engine.model)
        self.name: str = name or self.model.name
        self.limits = limits or Limits()
        self.clock: Clock = engine.clock
        self.metrics = Metrics(engine, self.name)
        self.token_bytes = Detokenizer(self.model.tokenizer).token_bytes
        self.samples = 0  # in the engine or on their way to it
        self._created = int(time.time())
        self._ids = itertools.count()
        self._run = secrets.token_hex(6)
        self._warm = False
        self._tokenising = asyncio.Lock()  # a tokenizer is not safe among threads

    def new_id(self) -> str:
        return f"{self._run}{next(self._ids):08x}"

    # -- its state ---------------------------------------------------------------------------

    async def warm_up(self) -> None:
        """As many requests as run at once, through every step that a request takes; then ready."""
        config, vocabulary = self.engine.engine.config, self.engine.engine.executor.vocab_size or 256
        assert config.max_model_len is not None
        room = min(config.max_model_len, self.engine.engine.scheduler.kv.capacity_tokens)
        tokens = max(1, min(4, room // 2))
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        long = max(1, min(config.max_num_batched_tokens, room - tokens))
        lengths = [long] + [min(16, long)] * (config.max_num_seqs - 1)
        requests = [
            Request(f"warm-up-{i}", [(i + j) % vocabulary for j in range(length)], params)
            for i, length in enumerate(lengths)
        ]
        async with self.engine.open(*requests) as deliveries:
            async for _ in deliveries:
                pass
        await self.engine.call(self.engine.engine.scheduler.kv.pool.clear_index)
        self.metrics.skip_steps()
        self._warm = True

    def check_health(self) -> None:
        """Raises ApiError while nothing can be served, though it may be again."""
        reason = self.engine.engine.health.reason
        if reason is not None:
            raise ApiError(503, f"the engine is broken: {reason}", None, "engine_broken", RETRY_AFTER_S)
        stuck = self.engine.stuck_ns()
        if stuck is None:
            raise ApiError(503, "the engine is closed", None, "engine_closed", RETRY_AFTER_S)
        if stuck > STUCK_NS:
            message = f"the engine has been in one step for {stuck / NS_PER_S:.0f} s"
            raise ApiError(503, message, None, "engine_stuck", RETRY_AFTER_S)

    def check_ready(self) -> None:
        self.check_health()
        if not self._warm:
            raise ApiError(503, "the engine is warming up", None, "warming_up", RETRY_AFTER_S)

    async def close(self) -> None:
        """End what still runs."""
        self._warm = False
        await self.engine.__aexit__()

    # -- what it serves ----------------------------------------------------------------------

    def card(self) -> dict[str, Any]:
        """The model as `/v1/models` lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "perflab",
            "max_model_len": self.engine.engine.config.max_model_len,
            "fingerprint": self.model.fingerprint,
        }

    def check_model(self, asked: str | None) -> None:
        if asked not in (None, self.name):
            raise ApiError(
                404, f"model {asked[:100]!r} is not here: {self.name!r} is", "model", "model_not_found"
            )

    def check_room(self, samples: int) -> None:
        """Raises ApiError where the queue is too long for as many more."""
        most = self.engine.engine.config.max_num_seqs + self.limits.max_waiting
        if self.samples + samples > most:
            raise ApiError(
                429,
                f"{self.samples} requests are being served or wait; {most} may",
                None,
                "queue_full",
                RETRY_AFTER_S,
            )

    def enter(self, samples: int) -> None:
        """Count samples in; whoever does takes them out of `samples` again."""
        self.check_room(samples)
        self.samples += samples

    async def token_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a text or a conversation. Raises ApiError for what has none, or too many."""
        param = "messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            ids = cast(list[int], prompt)
        else:
            ids = await self._encoded(prompt, param)
        if not ids:
            raise ApiError(400, "the prompt is empty: send at least one token", param, "invalid_value")
        most = self.limits.max_prompt_tokens or self.engine.engine.config.max_model_len
        if most is not None and len(ids) > most:
            message = f"the prompt has {len(ids)} tokens, {most} are allowed"
            raise ApiError(400, message, param, "context_length_exceeded")
        return ids

    async def _encoded(self, prompt: Any, param: str) -> list[int]:
        is_text = isinstance(prompt, str)
        encode = self.model.encode if is_text else self.model.chat
        length = len(prompt) if is_text else sum(len(message["content"]) for message in prompt)
        async with self._tokenising:
            try:
                return await asyncio.to_thread(encode, prompt) if length > LONG_TEXT else encode(prompt)
            except (ModelError, ValueError) as error:
                raise ApiError(400, str(error), param, "invalid_value") from None
            except Exception as error:  # a chat template's, by which it refuses a conversation
                if type(error).__module__.partition(".")[0] != "jinja2":
                    raise
                raise ApiError(400, f"the chat template: {error}", param, "invalid_value") from None

    def fit(self, params: SamplingParams, prompt_tokens: int) -> int | None:
        """`max_tokens` where the client left it open: up to the server's cap and the model's limit."""
        if params.max_tokens is not None or self.limits.max_tokens is None:
            return params.max_tokens
        config = self.engine.engine.config
        assert config.max_model_len is not None
        room = min(config.max_model_len, self.engine.engine.scheduler.kv.capacity_tokens + 1) - prompt_tokens
        return max(1, params.min_tokens, min(self.limits.max_tokens, room))
