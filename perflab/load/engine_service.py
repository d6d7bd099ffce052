"""The engine in this process as a service: what the driver sends goes to its thread.

Owns the copying of the engine's own records. Opens no socket.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any, Self, cast

from perflab.clock import Clock
from perflab.engine.drivers import AsyncEngine
from perflab.engine.engine import Engine
from perflab.errors import Rejected
from perflab.load.prompts import PromptEncoder
from perflab.load.workloads import TimedRequest
from perflab.types import EventRecord, Request, RequestRecord, StepRecord

_ENGINES = tuple(
    f.name
    for f in fields(RequestRecord)
    if f.name not in ("request_id", "intended_ns", "sent_ns", "requested_tokens", "session_id", "turn")
)
"""Fields that the engine knows better than the driver."""


class EngineService:
    """Serves from `engine`, which it closes at the end. `outputs` are token ids by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.clock: Clock = engine.clock
        self.outputs: dict[str, list[int]] = {}
        self.model = cast(Any, engine.model)  # as it was loaded, with its text side
        self._encoder = PromptEncoder(self.model.encode, self.model.chat)
        self._seen = len(engine.steps), len(engine.events)

    async def __aenter__(self) -> Self:
        self._async = AsyncEngine(self.engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._async.__aexit__()

    @property
    def steps(self) -> list[StepRecord]:
        return list(self.engine.steps)[self._seen[0] :]

    @property
    def events(self) -> list[EventRecord]:
        return list(self.engine.events)[self._seen[1] :]

    def prepare(self, request: TimedRequest, encoder: PromptEncoder | None) -> TimedRequest:
        """The request with the token ids of its prompt."""
        return replace(request, prompt=tuple((encoder or self._encoder).ids(request.prompt, request.salt)))

    async def send(self, request: TimedRequest, record: RequestRecord) -> None:
        """Stream one request; the engine's own stamps become those of `record`."""
        assert isinstance(request.prompt, tuple)
        asked = Request(
            request.request_id,
            request.prompt,
            request.params,
            priority=request.priority,
            intended_ns=record.intended_ns,
            deadline_ns=record.deadline_ns,
            request_class=request.request_class,
            spans=tuple(record.spans),
        )
        output = self.outputs[request.request_id] = []
        try:
            async for event in self._async.stream(asked):
                output.extend(event.token_ids)
                if event.error is not None:
                    record.error = str(event.error)
        except Rejected as error:
            record.error = str(error)
        finally:
            self._copy(record)

    def _copy(self, record: RequestRecord) -> None:
        """Take over what the engine recorded of this request."""
        error = record.error
        for own in reversed(self.engine.records):
            if own.request_id == record.request_id:
                for name in _ENGINES:
                    setattr(record, name, getattr(own, name))
                record.spans, record.error = list(own.spans), own.error or error
                pairs = list(zip(own.token_ns, own.chunk_tokens, strict=False))  # its thread may go on
                record.token_ns, record.chunk_tokens = [t for t, _ in pairs], [n for _, n in pairs]
                record.output_tokens = sum(record.chunk_tokens)
                return

    def settle(self) -> None:
        """Nothing is left to do: the engine stamps and counts by itself."""

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "engine",
            "model": self.model.name,
            "fingerprint": self.model.fingerprint,
            "notes": list(self.model.notes),
            "engine": asdict(self.engine.config),
        }
