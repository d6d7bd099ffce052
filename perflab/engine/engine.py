"""The loop around the four hops: plan, run, commit, deliver. Knows no thread and no asyncio.

Owns the live requests and the records of what happened. Memory and order are the scheduler's, the
model is the executor's; drivers (`LLM`, `AsyncEngine`, a load) call `step` as long as there is work.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any, Protocol

import torch

from perflab.clock import Clock, WallClock
from perflab.config import EngineConfig
from perflab.engine.detokenizer import Detokenizer
from perflab.engine.draft import Drafter, Drafting
from perflab.engine.executor import Executor, LocalExecutor
from perflab.engine.health import Health
from perflab.engine.kv import make_kv
from perflab.engine.logits import check_params
from perflab.engine.plan import Plan, StepResult
from perflab.engine.scheduler import Scheduler
from perflab.engine.sequence import Sequence, check_tokens
from perflab.errors import ConfigError, EngineStopped, Rejected
from perflab.models.runners import Runner, make_runner
from perflab.types import (
    EventRecord,
    FinishReason,
    Request,
    RequestRecord,
    SamplingParams,
    StepRecord,
    TokenEvent,
)

SEED_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of the n samples of one request


class ServedModel(Protocol):
    """What an engine must know of a model beside how to run it; `LoadedModel` is one."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def max_model_len(self) -> int: ...


class Engine:
    """Serves requests of one model, one step at a time.

    Without an `executor` the model is a `LoadedModel` and runs in this process, on a `runner` of its
    own or one that it shares with other engines. With one, `config` must be resolved (`num_blocks`
    and `max_model_len` set).
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig | None = None,
        clock: Clock | None = None,
        executor: Executor | None = None,
        runner: Runner | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.model: ServedModel = model
        self.clock: Clock = clock or WallClock()
        config = config or EngineConfig()
        if executor is None:
            if config.num_threads is not None:
                torch.set_num_threads(config.num_threads)
            runner = runner or make_runner(model, config)
            config = config.resolve(
                model_max_len=runner.max_positions,
                kv_bytes_per_token=runner.kv_shape.bytes_per_token(
                    torch.int8 if config.kv_dtype == "int8" else runner.dtype
                ),
            )
            executor = LocalExecutor.for_config(runner, config, self.clock)
        self.config = config
        self.executor: Any = executor
        self._events: deque[EventRecord] = deque(maxlen=config.keep_records)
        self._records: deque[RequestRecord] = deque(maxlen=config.keep_records)
        self._steps: deque[StepRecord] = deque(maxlen=config.keep_records)
        self.health = Health(self._note)
        self.scheduler = Scheduler(config, make_kv(config, model.fingerprint), self._note)
        self._drafting: Drafting | None = None
        if drafter is not None:
            kv, most = self.scheduler.kv, config.max_draft_tokens
            self._drafting = Drafting(drafter, kv, self.clock, most, self._note)
            self.executor.wants_features = drafter.wants_features
        elif config.drafter != "off":
            raise ConfigError(f"drafter={config.drafter!r}: perflab.make_engine makes an engine with it")
        self._live: dict[str, Sequence] = {}
        self._seeds = random.Random(config.seed)
        self._detokenizer = Detokenizer(model.tokenizer) if model.tokenizer is not None else None
        self._step_index = 0
        self.last_step: StepRecord | None = None

    # -- requests in and out -----------------------------------------------------------------

    def submit(self, request: Request) -> list[str]:
        """Queue a request; returns the ids its events will carry (`id/0`, `id/1`, … for n > 1).

        Raises ValueError for parameters that make no sense for this model, Rejected (and records
        it) for a request that could never run.
        """
        params, now = request.params, self.clock.now()
        if self.executor.vocab_size is not None:
            check_params(params, self.executor.vocab_size)
            check_tokens(request, self.executor.vocab_size)
        if params.stop and self._detokenizer is None:
            raise ValueError("stop strings need a tokenizer; this model has none: use stop_token_ids")
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        ids = [request.request_id]
        if params.n > 1:
            ids = [f"{request.request_id}/{index}" for index in range(params.n)]
        if taken := [request_id for request_id in ids if request_id in self._live]:
            raise ValueError(f"request id {taken[0]!r} is in use: give each request its own")
        leader: Sequence | None = None
        for index, request_id in enumerate(ids):
            record = self._record(
                replace(request, request_id=request_id),
                (seed + index * SEED_STRIDE) % 2**63 if index else seed,
                now,
            )
            seq = Sequence(
                request,
                record,
                max_len=self._max_len(len(request.prompt_token_ids), params),
                eos_token_ids=self.model.stop_token_ids,
                index=index,
                leader=leader,
            )
            self._enqueue(seq, now)
            leader = leader or seq
        return ids

    def _record(self, request: Request, seed: int, now: int) -> RequestRecord:
        record = RequestRecord(
            request_id=request.request_id,
            intended_ns=now if request.intended_ns is None else request.intended_ns,
            sent_ns=now,
            prompt_tokens=len(request.prompt_token_ids),
            priority=request.priority,
            request_class=request.request_class,
            seed=seed,
            deadline_ns=request.deadline_ns,
            forced_acceptance=self.config.forced_acceptance,
            spans=list(request.spans),
        )
        self._records.append(record)
        return record

    def _enqueue(self, seq: Sequence, now: int) -> None:
        try:
            if not self.health.test(self.executor.self_test, now):
                raise Rejected(
                    f"{seq.request_id}: the engine is broken ({self.health.reason}); try again later"
                )
            self.scheduler.add(seq, now)
        except Rejected as error:
            seq.record.outcome = seq.record.finish_reason = "rejected"
            seq.record.error, seq.record.end_ns = str(error), now
            raise
        if self._detokenizer is not None:
            seq.text = self._detokenizer.stream(seq.params.stop)
        self._live[seq.request_id] = seq

    def _max_len(self, prompt: int, params: SamplingParams) -> int:
        if params.max_tokens is not None:
            return prompt + params.max_tokens
        assert self.config.max_model_len is not None
        return max(prompt + 1, min(self.config.max_model_len, self.scheduler.kv.capacity_tokens + 1))

    def cancel(self, request_id: str) -> bool:
        """End a request, or all samples of one, wherever it is; False if it is not here."""
        samples = [
            seq
            for key, seq in self._live.items()
            if key == request_id or seq.request.request_id == request_id
        ]
        for seq in samples:
            self.scheduler.finish(seq, "cancelled", self.clock.now())
        return bool(samples)

    def abort_all(self, error: Exception, reason: FinishReason = "error") -> None:
        """End every request with one reason, forget every cached prefix."""
        for seq in list(self._live.values()):
            self.scheduler.finish(seq, reason, self.clock.now(), error)
        self.scheduler.kv.pool.clear_index()

    def fail(self, error: Exception) -> None:
        """A driver's word that a step raised: every request ends with it, a self-test comes next."""
        self.abort_all(error)
        self.health.broke(f"{type(error).__name__}: {error}", self.clock.now())

    def close(self) -> list[TokenEvent]:
        """End what is left; returns the last events."""
        self.abort_all(EngineStopped("the engine was closed"), "cancelled")
        return self._deliver(self.scheduler.take_ended())

    # -- the loop ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def next_wake_ns(self) -> int | None:
        """When an idle step could find something to do: a batch's time-out, a deadline, a self-test."""
        wakes = (self.scheduler.next_wake_ns(), self.health.next_test_ns())
        return min((wake for wake in wakes if wake is not None), default=None)

    def step(self) -> list[TokenEvent]:
        """One pass of the four hops; returns what it brought, nothing if nothing could run."""
        now = self.clock.now
        start = now()
        if not self.health.ready and not self._mend(start):
            return self._deliver(self.scheduler.take_ended())
        if dirty := self.scheduler.kv.take_dirty():
            self.executor.wipe(dirty)  # before a plan can hand these blocks out
        plan = self.scheduler.plan(start)
        if not plan.seqs:
            return self._deliver(self.scheduler.take_ended())
        record, drafting = StepRecord(self._step_index, start), self._drafting
        if drafting is not None:
            drafting.propose(plan, record)
        record.planned_ns = now()
        result = self.executor.run(plan)
        if drafting is not None:
            drafting.observe(plan, result, record)
        events = self.scheduler.commit(plan, result, now())
        record.committed_ns = now()
        events = self._deliver(events)
        record.delivered_ns = now()
        self._step_index += 1
        self._keep(record, plan, result)
        if result.errors:
            self._after_errors(plan, result)
        return events

    def _mend(self, now: int) -> bool:
        """Try a broken engine again; while it stays broken nobody is left waiting."""
        if self.health.test(self.executor.self_test, now):
            return True
        self.abort_all(EngineStopped(f"the engine is broken: {self.health.reason}"))
        return False

    def _after_errors(self, plan: Plan, result: StepResult) -> None:
        for row, error in result.errors.items():
            self._note("request_failed", plan.seqs[row].request_id, {"error": str(error)})
        if len(result.errors) == len(plan.seqs):
            self.health.broke(str(next(iter(result.errors.values()))), self.clock.now())

    def _deliver(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Text for each event, then one time for all: the moment they can be read."""
        live = self._live
        if self._detokenizer is not None:
            for event in events:
                seq = live[event.request_id]
                try:
                    self._add_text(event, seq)
                except Exception as error:  # a tokenizer's: its request fails, the others go on
                    self._fail_text(event, seq, error)
        now = self.clock.now()
        for event in events:
            event.time_ns = now
            record = live[event.request_id].record
            if event.token_ids:
                if record.first_token_ns is None:
                    record.first_token_ns = now
                record.last_token_ns = now
                record.token_ns.append(now)
                record.chunk_tokens.append(len(event.token_ids))
            if event.finish_reason is not None:
                record.end_ns = now
                del live[event.request_id]
                if self._drafting is not None:
                    self._drafting.forget(event.request_id)
        return events

    def _add_text(self, event: TokenEvent, seq: Sequence) -> None:
        text = seq.text
        if event.token_ids:
            first = len(seq.tokens) - len(event.token_ids)
            for place, token in enumerate(event.token_ids, 1):
                event.text += text.push((token,), match=first + place > seq.min_len)
                if text.stopped:
                    self.scheduler.stop_after(seq, event, place, self.clock.now())
                    break
        if event.finish_reason is not None:
            event.text += text.finish()
            if text.stopped and event.finish_reason == "length":
                event.finish_reason = seq.record.finish_reason = "stop"

    def _fail_text(self, event: TokenEvent, seq: Sequence, error: Exception) -> None:
        self.scheduler.finish(seq, "error", self.clock.now(), error, announce=False)
        event.finish_reason = seq.record.finish_reason = "error"
        seq.record.outcome, seq.record.error, event.error = "failed", str(error), error

    def _keep(self, record: StepRecord, plan: Plan, result: StepResult) -> None:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        record.batched_ns, record.forwarded_ns = result.batched_ns, result.forwarded_ns
        record.sampled_ns = result.sampled_ns
        record.rows = len(plan.seqs)
        record.prefill_tokens = plan.prefill_tokens
        record.decode_tokens = sum(plan.counts) - plan.prefill_tokens
        record.sampled_tokens = sum(map(len, result.token_ids))
        record.running, record.waiting = len(scheduler.running), len(scheduler.waiting)
        record.kv_blocks_used, record.kv_blocks_cached = pool.num_used, pool.num_cached
        record.kv_blocks_total = pool.num_blocks
        record.preempted, record.failed_rows = plan.preempted, len(result.errors)
        self._steps.append(record)
        self.last_step = record

    def _note(self, kind: str, subject: str, detail: dict[str, Any]) -> None:
        if kind == "preempted" and self._drafting is not None:
            self._drafting.forget(subject)
        self._events.append(EventRecord(self.clock.now(), kind, subject, detail))

    # -- records -----------------------------------------------------------------------------

    def record(self, request_id: str) -> RequestRecord:
        """Of a request that has not ended."""
        return self._live[request_id].record

    @property
    def records(self) -> list[RequestRecord]:
        """Every request submitted, in order, the running ones included."""
        return list(self._records)

    @property
    def steps(self) -> list[StepRecord]:
        return list(self._steps)

    @property
    def events(self) -> list[EventRecord]:
        return list(self._events)

    def check(self) -> None:
        """Invariants of scheduler, KV memory and live requests; for tests, after each step."""
        self.scheduler.check()
        inside = {seq.request_id for seq in (*self.scheduler.running, *self.scheduler.waiting)}
        assert inside <= set(self._live)
