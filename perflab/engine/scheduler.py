"""Decides what each step computes, and takes its results in.

Owns the running list and, through `WaitingQueue`, the waiting one; asks a KV manager for memory.
Knows no tensors, threads or clocks: time comes in as an argument, the model's work as a
`StepResult`.

The running list is kept in the queue's order. Rows are planned from its head and victims are
taken from its tail, so a row that is planned is never preempted in the same step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from perflab.config import EngineConfig
from perflab.engine.deadlines import Deadlines, late
from perflab.engine.kv import NoKV, PagedKV
from perflab.engine.limits import StepLimits
from perflab.engine.plan import Plan, StepResult
from perflab.engine.queue import WaitingQueue, batch_gate, order_policy
from perflab.engine.sequence import Sequence
from perflab.errors import Rejected
from perflab.types import OUTCOME_OF, FinishReason, Span, TokenEvent

_KEY = attrgetter("key")


class Scheduler:
    """plan → (executor) → commit. `on_event(kind, subject, detail)` hears of preemption and limits."""

    def __init__(
        self,
        config: EngineConfig,
        kv: PagedKV | NoKV,
        on_event: Callable[[str, str, dict[str, Any]], None] = lambda *_: None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(order_policy(config))
        self._gate = batch_gate(config)
        self._on_event = on_event
        self._deadlines = Deadlines()
        self._ended: list[TokenEvent] = []
        self._limits = StepLimits(config.max_num_seqs, config.max_num_batched_tokens)
        self._step = 0

    # -- requests in and out ---------------------------------------------------------------

    def add(self, seq: Sequence, now: int) -> None:
        """Queue a request. Raises Rejected where it could never run, with need and capacity."""
        self._refuse_impossible(seq)
        seq.queued_ns = now
        self.waiting.add(seq)
        self._deadlines.add(seq, len(self.running) + len(self.waiting))

    def _refuse_impossible(self, seq: Sequence) -> None:
        prompt, model_len = seq.num_prompt_tokens, self.config.max_model_len
        if prompt == 0:
            raise Rejected(f"{seq.request_id}: the prompt is empty; send at least one token")
        if model_len is not None and seq.max_len > model_len:
            raise Rejected(
                f"{seq.request_id}: {prompt} prompt tokens and {seq.max_len - prompt} output tokens need "
                f"{seq.max_len}, the model's limit is {model_len}; shorten the prompt or lower max_tokens"
            )
        capacity = self.kv.capacity_tokens
        if seq.max_len - 1 > capacity:
            raise Rejected(
                f"{seq.request_id}: needs KV memory for {seq.max_len - 1} tokens "
                f"({self.kv.blocks_for(seq.max_len - 1)} blocks), the pool holds {capacity} "
                f"({self.kv.pool.num_blocks} blocks); lower max_tokens or raise num_blocks"
            )

    def finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        now: int,
        error: Exception | None = None,
        *,
        announce: bool = True,
    ) -> None:
        """End a request wherever it is, between two steps; its last event comes with the next delivery
        unless the caller says that it announces the end itself."""
        if seq.is_finished:
            return
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
            if seq.record.admitted_ns is None:
                seq.record.spans.append(Span("queue", seq.queued_ns, now))
            else:
                _close_requeue(seq, now)
        self._end(seq, reason, now, error)
        if announce:
            self._ended.append(TokenEvent(seq.request_id, (), finish_reason=reason, error=error))

    def stop_after(self, seq: Sequence, event: TokenEvent, count: int, now: int) -> None:
        """A stop string was complete after `count` of the event's tokens: what came after them goes."""
        surplus = len(event.token_ids) - count
        if surplus:
            del seq.tokens[-surplus:]
            event.token_ids = event.token_ids[:count]
            event.logprobs = event.logprobs and event.logprobs[:count]
        if not seq.is_finished:
            self.finish(seq, "stop", now, announce=False)
        seq.record.output_tokens = seq.num_output_tokens
        seq.record.finish_reason = event.finish_reason = "stop"

    def _end(self, seq: Sequence, reason: FinishReason, now: int, error: Exception | None = None) -> None:
        self.kv.free(seq, discard=reason == "error")
        record = seq.record
        record.outcome = OUTCOME_OF[reason]
        record.finish_reason = reason
        record.output_tokens = seq.num_output_tokens
        record.end_ns = now
        if error is not None:
            record.error = str(error)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._ended or len(self.waiting))

    def next_wake_ns(self) -> int | None:
        """When an idle step could find something to do; None while a step can be made now."""
        if self.running or self._ended or (len(self.waiting) and self.config.batching == "continuous"):
            return None
        wakes = (self._gate.next_wake_ns(self.waiting, len(self.running)), self._deadlines.next_ns())
        return min((wake for wake in wakes if wake is not None), default=None)

    # -- plan ------------------------------------------------------------------------------

    def plan(self, now: int) -> Plan:
        """The next step's rows. Expires deadlines, grows or preempts what runs, lets others in."""
        for seq in self._deadlines.take_late(now) if len(self._deadlines) else ():
            waited = "while running" if seq in self.running else "in the queue"
            self.finish(seq, "deadline", now, late(seq, waited))
        plan = Plan()
        if self.config.batching == "continuous":
            self._promote(plan, now)
        plan.room = self._plan_running(plan, now)
        if len(self.waiting) and not (plan.preempted and self.running):
            plan.room = self._admit(plan, plan.room, now)
        return plan

    def _plan_running(self, plan: Plan, now: int) -> int:
        running, budget = self.running, self._limits.tokens
        while len(running) > self._limits.rows:
            self._preempt(plan, now)
        whole = not self.config.chunked_prefill
        add_seq, add_count, add_sample = plan.seqs.append, plan.counts.append, plan.samples.append
        row = 0
        while row < len(running):
            seq = running[row]
            computed = seq.num_computed_tokens
            pending = count = len(seq.tokens) - computed
            if pending > 1 and not whole:
                # One token stays for each row behind, so that a long prompt stalls nobody.
                count = min(pending, max(1, budget - (len(running) - row - 1)))
            if computed + count > seq.capacity and not self._grow(plan, seq, computed + count, now):
                break
            add_seq(seq)
            add_count(count)
            add_sample(count == pending)
            if pending > 1:
                plan.prefill_tokens += count
            budget -= count
            row += 1
        return budget

    def _grow(self, plan: Plan, seq: Sequence, num_tokens: int, now: int) -> bool:
        """Room for `seq`, at the cost of those behind it; False if it had to go itself."""
        while not self.kv.grow(seq, num_tokens):
            if self._preempt(plan, now) is seq:
                return False
        return True

    def _preempt(self, plan: Plan, now: int) -> Sequence:
        seq = self.running.pop()
        self.kv.free(seq)
        seq.reset_computed()
        seq.record.preemptions += 1
        seq.record.spans.append(Span("requeue", now, now))
        self.waiting.put_back(seq)
        plan.preempted += 1
        self._on_event("preempted", seq.request_id, {"tokens": len(seq.tokens)})
        return seq

    def _promote(self, plan: Plan, now: int) -> None:
        """Let those who come before running requests in before the budget is given out; a preemptive
        policy makes room for them, if those behind them hold enough."""
        promised = 0
        while len(self.waiting) and self.running:
            head = self.waiting[0]
            if self._waits_for_leader(head) or not head.key[0] < self.running[-1].key[0]:
                return
            prefix = self.kv.find_prefix(head)
            pending = len(head.tokens) - len(prefix) * self.kv.block_size
            if promised and not self.config.chunked_prefill and promised + pending > self._limits.tokens:
                return  # prompts that are never split go one by one beyond the budget
            if len(self.running) < self._limits.rows and self._enter(head, prefix, len(head.tokens), now):
                promised += pending
                continue
            if not self.waiting.policy.preemptive or not self._fits_without_those_behind(head, prefix):
                return
            self._preempt(plan, now)

    def _fits_without_those_behind(self, head: Sequence, prefix: list[int]) -> bool:
        behind = [seq for seq in self.running if seq.key[0] > head.key[0]]
        reserve = len(self.running) - len(behind) if head.record.preemptions else 0
        return self.kv.fits_without(behind, prefix, len(head.tokens), reserve)

    def _admit(self, plan: Plan, budget: int, now: int) -> int:
        seats = min(
            self._gate.seats(self.waiting, len(self.running), now), self._limits.rows - len(self.running)
        )
        chunked, index, entered = self.config.chunked_prefill, 0, 0
        while entered < seats and index < len(self.waiting) and budget > 0:
            seq = self.waiting[index]
            if self._waits_for_leader(seq) or not self._gate.admits(seq):
                index += 1
                continue
            prefix = self.kv.find_prefix(seq)
            pending = len(seq.tokens) - len(prefix) * self.kv.block_size
            if not chunked and pending > budget and plan.prefill_tokens:
                break
            count = min(pending, budget) if chunked else pending
            if not self._enter(seq, prefix, len(seq.tokens), now):
                break
            self._gate.entered(seq)
            plan.seqs.append(seq)
            plan.counts.append(count)
            plan.samples.append(count == pending)
            plan.prefill_tokens += count if pending > 1 else 0
            budget -= count
            entered += 1
        return budget

    @staticmethod
    def _waits_for_leader(seq: Sequence) -> bool:
        """The samples of one prompt wait until its first has computed it, then share its blocks."""
        leader = seq.leader
        return leader is not None and not leader.is_finished and leader.num_output_tokens == 0

    def _enter(self, seq: Sequence, prefix: list[int], num_tokens: int, now: int) -> bool:
        """From waiting to running, with room for all its tokens; False changes nothing."""
        # One block stays for each running request, or a preempted one would come back only to be
        # preempted again when they grow.
        reserve = len(self.running) if seq.record.preemptions else 0
        if not self.kv.admit(seq, prefix, num_tokens, reserve):
            return False
        self.waiting.remove(seq)
        insort(self.running, seq, key=_KEY)
        record = seq.record
        if record.admitted_ns is None:
            record.admitted_ns = now
            record.first_step = self._step
            record.cached_tokens = seq.num_computed_tokens
            record.spans.append(Span("queue", seq.queued_ns, now))
        else:
            _close_requeue(seq, now)
        return True

    # -- commit ----------------------------------------------------------------------------

    def commit(self, plan: Plan, result: StepResult, now: int) -> list[TokenEvent]:
        """Take a step's tokens in: advance counters, share full blocks, end who is done."""
        events, self._ended = self._ended, []
        settle, step = self.kv.settle, self._step
        gone = False
        for row, (first, scored) in result.prompt_logprobs.items():
            plan.seqs[row].keep_prompt_logprobs(first, scored)
        for row, (seq, count, new) in enumerate(zip(plan.seqs, plan.counts, result.token_ids, strict=True)):
            if row in result.deferred or row in result.errors:
                seq.draft = []
                continue
            computed = seq.num_computed_tokens = seq.num_computed_tokens + count
            if not new:
                if computed >= seq.next_boundary:
                    settle(seq)
                continue
            tokens = seq.tokens
            reason: FinishReason | None = None
            for accepted, token in enumerate(new, 1):
                tokens.append(token)
                if token in seq.stop_set and len(tokens) > seq.min_len:
                    reason = "stop"
                elif len(tokens) >= seq.max_len:
                    reason = "length"
                else:
                    continue
                new = new[:accepted]
                break
            if seq.draft:
                computed = seq.num_computed_tokens = len(tokens) - 1
                seq.draft = []
                self.kv.shrink(seq, computed)
            if computed >= seq.next_boundary:
                settle(seq)
            record = seq.record
            if record.first_token_step < 0:
                record.first_token_step = step
            record.last_step = step
            logprobs = result.logprobs[row][: len(new)] if row in result.logprobs else None
            event = TokenEvent(record.request_id, new, 0, "", reason, logprobs)
            if seq.prompt_logprobs is not None:
                event.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
            events.append(event)
            if reason is not None:
                self._end(seq, reason, now)
                gone = True
        for row, error in result.errors.items():
            seq, gone = plan.seqs[row], True
            seq.record.last_step = step
            self._end(seq, "error", now, error)
            events.append(TokenEvent(seq.request_id, (), finish_reason="error", error=error))
        if gone:
            self.running = [seq for seq in self.running if not seq.is_finished]
        if self._limits.after_step(result.out_of_memory):
            self._on_event("batch_limited", "engine", self._limits.as_dict())
        self._step += 1
        return events

    def take_ended(self) -> list[TokenEvent]:
        """Events of requests that ended without a step."""
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """Every request in exactly one place, every block accounted for."""
        running = list(self.running)
        assert [seq.key for seq in running] == sorted(seq.key for seq in running)
        assert not any(seq.is_finished for seq in (*running, *self.waiting))
        assert not any(seq.block_table for seq in self.waiting)
        assert {id(seq) for seq in running}.isdisjoint(id(seq) for seq in self.waiting)
        assert all(0 <= seq.num_computed_tokens < len(seq.tokens) for seq in running)
        assert not any(seq.draft for seq in (*running, *self.waiting))
        self.kv.check(running)


def _close_requeue(seq: Sequence, now: int) -> None:
    spans = seq.record.spans
    spans[-1] = Span("requeue", spans[-1].start_ns, now)
