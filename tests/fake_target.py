"""An engine without a model on a clock that jumps: what load and study tests need, on one screen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from perflab.clock import VirtualClock
from perflab.errors import Rejected
from perflab.types import OUTCOME_OF, RequestRecord, Span, StepRecord, TokenEvent

MS = 1_000_000


@dataclass(frozen=True)
class FakeModel:
    name: str = "fake"
    fingerprint: str = "f"
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    load_spans: tuple[Span, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages) -> list[int]:
        return self.encode("".join(m["content"] for m in messages))

    def decode(self, ids) -> str:
        return bytes(i % 128 for i in ids).decode()


class FakeEngine:
    """First come, first served; `max_num_seqs` requests a step, one token each, token i of a request is i."""

    def __init__(
        self, model, config, clock=None, step_ms=lambda config, index: 10.0, on_step=lambda engine: None
    ):
        self.model, self.config, self.clock = model, replace(config, num_blocks=8), clock or VirtualClock()
        self.records, self.steps, self.events = [], [], []
        self.waiting, self.running, self.closed = [], [], False
        self.step_ms, self.on_step, self.executor = step_ms, on_step, self

    def submit(self, request):
        now = self.clock.now()
        intended = now if request.intended_ns is None else request.intended_ns
        record = RequestRecord(
            request.request_id, intended, now, len(request.prompt_token_ids), spans=list(request.spans)
        )
        self.records.append(record)
        if len(request.prompt_token_ids) > 500:
            record.outcome, record.finish_reason, record.end_ns = "rejected", "rejected", now
            raise Rejected("too long")
        self.waiting.append((request, record))

    @property
    def has_work(self):
        return bool(self.waiting or self.running)

    def next_wake_ns(self):
        return None

    def step(self):
        self.on_step(self)
        start, index = self.clock.now(), len(self.steps)
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            request, record = self.waiting.pop(0)
            record.admitted_ns, record.first_step = start, index
            record.spans.append(Span("queue", record.sent_ns, start))
            self.running.append((request, record))
        hops = [
            round(self.step_ms(self.config, index) * MS * share) for share in (0.1, 0.1, 0.5, 0.1, 0.1, 0.1)
        ]
        stamps = [start + sum(hops[: i + 1]) for i in range(6)]
        self.clock.advance(sum(hops))
        events, now = [], self.clock.now()
        for request, record in list(self.running):
            token, record.output_tokens = record.output_tokens, record.output_tokens + 1
            record.token_ns.append(now)
            record.chunk_tokens.append(1)
            record.last_token_ns, record.last_step = now, index
            if token == 0:
                record.first_token_ns, record.first_token_step = now, index
            done = record.output_tokens == request.params.max_tokens
            events.append(
                TokenEvent(record.request_id, [token], now, finish_reason="length" if done else None)
            )
            if done:
                record.end_ns, record.finish_reason, record.outcome = now, "length", OUTCOME_OF["length"]
                self.running.remove((request, record))
        self.steps.append(
            StepRecord(index, start, *stamps, rows=len(events), decode_tokens=len(events), kv_blocks_total=8)
        )
        return events

    def score(self, token_ids):
        rows = torch.arange(len(token_ids) * 260, dtype=torch.float32).reshape(len(token_ids), 260)
        return torch.sin(rows) + (0.1 if self.config.attention == "batched" else 0.0) * torch.cos(rows)

    def close(self):
        self.closed = True
