"""`generate` for a list of prompts, `stream` for one: the engine driven in the caller's thread.

Owns the loop of one call. Knows nothing of arrival times or services; see `AsyncEngine` for those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.models.load import load
from perflab.models.loaded import LoadedModel
from perflab.types import FinishReason, Request, RequestRecord, SamplingParams, TokenEvent, TokenLogprob

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(slots=True)
class Completion:
    """One finished sample of one prompt."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: Exception | None = None
    record: RequestRecord | None = None

    def add(self, event: TokenEvent) -> None:
        self.token_ids.extend(event.token_ids)
        self.text += event.text
        self.finish_reason = event.finish_reason
        self.error = event.error
        if event.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *event.logprobs]
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = list(event.prompt_logprobs)


class LLM:
    """A model with an engine around it. `make_engine` is what makes it; `perflab.LLM` is this class with one
    that knows drafters, where this one's raises ConfigError for a configuration that names any.

    >>> llm = LLM("smollm2-135m")
    >>> llm.generate(["What is a KV cache?"], SamplingParams(max_tokens=32))[0].text
    """

    make_engine: Callable[[Any, EngineConfig | None], Engine] = Engine

    def __init__(
        self,
        model: str | LoadedModel = "smollm2-135m",
        config: EngineConfig | None = None,
        **load_options: Any,
    ) -> None:
        self.model = load(model, **load_options) if isinstance(model, str) else model
        self.engine = self.make_engine(self.model, config)
        self._count = 0
        self._inboxes: dict[str, deque[TokenEvent]] = {}

    def token_ids(self, prompt: Prompt) -> list[int]:
        """A string is plain text, a list of messages goes through the chat template, ids stay ids."""
        if isinstance(prompt, str):
            return self.model.encode(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            return self.model.chat(prompt)  # type: ignore[arg-type]
        return list(prompt)  # type: ignore[arg-type]

    def _submit(self, prompt: Prompt, params: SamplingParams | None, cache_salt: str | None) -> list[str]:
        self._count += 1
        keys = (("salt", cache_salt),) if cache_salt is not None else ()
        request = Request(
            f"r{self._count}", self.token_ids(prompt), params or self.model.defaults, cache_keys=keys
        )
        return self.engine.submit(request)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the prompts, all `n` samples of one beside each other.

        `params` is one for all or one each; None takes the model's own defaults. A request that
        fails has `error` set and leaves the others alone. Raises Rejected for one that can't run.
        Interrupted, it cancels what is left.
        """
        asked: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        same = params is None or isinstance(params, SamplingParams)
        each: list[Any] = [params] * len(asked) if same else list(params)  # type: ignore[arg-type]
        if len(each) != len(asked):
            raise ValueError(f"{len(asked)} prompts, {len(each)} sampling parameters: give one, or one each")
        done: dict[str, Completion] = {}
        try:
            for prompt, own in zip(asked, each, strict=True):
                for request_id in self._submit(prompt, own, cache_salt):
                    done[request_id] = Completion(request_id)
            for event in self._events(done):
                done[event.request_id].add(event)
                if on_event is not None:
                    on_event(event)
        except BaseException:
            self._cancel(done)
            raise
        records = {record.request_id: record for record in self.engine.records}
        for request_id, completion in done.items():
            completion.record = records.get(request_id)
        return list(done.values())

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str | None = None
    ) -> Iterator[TokenEvent]:
        """Events of one request as they come; closing the iterator cancels it."""
        ids = self._submit(prompt, params, cache_salt)
        try:
            yield from self._events(ids)
        finally:
            self._cancel(ids)

    def close(self) -> None:
        """End whatever still runs."""
        self.engine.close()

    def _events(self, ids: Mapping[str, object] | Sequence[str]) -> Iterator[TokenEvent]:
        """Step until these requests have ended; events of others (an outer stream) wait for them."""
        left = set(ids)
        self._inboxes.update({request_id: deque() for request_id in left})
        try:
            while left:
                for request_id in sorted(left):
                    inbox = self._inboxes[request_id]
                    while inbox:
                        event = inbox.popleft()
                        if event.finish_reason is not None:
                            left.discard(request_id)
                        yield event
                if left and not any(self._inboxes[request_id] for request_id in left):
                    self._step()
        finally:
            for request_id in ids:
                self._inboxes.pop(request_id, None)

    def _step(self) -> None:
        """One step; its events go to whoever waits for them."""
        events = self.engine.step()
        for event in events:
            if event.request_id in self._inboxes:
                self._inboxes[event.request_id].append(event)
        if not events:
            wake = self.engine.next_wake_ns()
            if wake is not None:
                self.engine.clock.sleep_until(wake)

    def _cancel(self, ids: Mapping[str, object] | Sequence[str]) -> None:
        if sum(self.engine.cancel(request_id) for request_id in ids):
            self._step()
