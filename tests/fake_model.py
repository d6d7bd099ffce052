"""A model without weights whose next token is a hash of the KV that it reads.

Its executor writes each computed token into the slot that the block table names, and derives a
row's next token from everything it reads back through that table. A wrong block, a lost write or a
block handed to two requests changes the output. It shares no code with the real executor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace

from perflab.clock import VirtualClock
from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.engine.plan import Plan, StepResult
from perflab.types import Request, TokenEvent

VOCAB = 251
FAKE_MODEL = SimpleNamespace(
    fingerprint="fake", tokenizer=None, stop_token_ids=(0,), max_model_len=4096, name="fake"
)


def next_token(read: list[tuple[int, int]]) -> int:
    """Of (token, position) pairs as they lie in memory."""
    digest = hashlib.sha256(repr(read).encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB


def alone(prompt: list[int], count: int, stop: frozenset[int] = frozenset({0})) -> list[int]:
    """What the fake model answers to one request with nobody else around."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(list(zip(tokens, range(len(tokens)), strict=True))))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class FakeExecutor:
    """Memory as a dict from (block, offset) to (token, position); a step takes `step_ns`."""

    vocab_size = VOCAB

    def __init__(self, config: EngineConfig, clock: VirtualClock, step_ns: int = 1_000_000) -> None:
        self.block_size = config.block_size
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        self.clock, self.step_ns = clock, step_ns
        self.plans: list[list[tuple[str, int]]] = []
        self.fault: Callable[[Plan], StepResult | None] = lambda plan: None

    def run(self, plan: Plan) -> StepResult:
        self.clock.advance(self.step_ns)
        self.plans.append(
            [(seq.request_id, count) for seq, count in zip(plan.seqs, plan.counts, strict=True)]
        )
        faulty = self.fault(plan)
        if faulty is not None:
            return faulty
        return StepResult([self._row(*row) for row in zip(plan.seqs, plan.counts, plan.samples, strict=True)])

    def _row(self, seq, count: int, samples: bool) -> list[int]:
        start, size = seq.num_computed_tokens, self.block_size
        assert count >= 1
        for position in range(start, start + count):
            slot = (seq.block_table[position // size], position % size)
            self.memory[slot] = (seq.tokens[position], position)
        if not samples:
            return []
        assert start + count == len(seq.tokens)
        read = [self.memory[seq.block_table[p // size], p % size] for p in range(len(seq.tokens))]
        return [next_token(read)]

    def wipe(self, blocks: list[int]) -> None:
        self.memory = {slot: v for slot, v in self.memory.items() if slot[0] not in set(blocks)}

    def self_test(self) -> None:
        pass


def fake_engine(**options) -> tuple[Engine, FakeExecutor, VirtualClock]:
    defaults = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    config = EngineConfig(**{**defaults, **options}).resolve(model_max_len=4096, kv_bytes_per_token=1)
    clock = VirtualClock()
    executor = FakeExecutor(config, clock)
    return Engine(FAKE_MODEL, config, clock, executor), executor, clock


def drain(engine: Engine, max_steps: int = 10_000) -> dict[str, list[int]]:
    """Step until nothing is left, checking every invariant; the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            assert_empty(engine)
            return tokens
        take(tokens, advance(engine))
    raise AssertionError(f"still busy after {max_steps} steps: {engine.scheduler.running}")


def advance(engine: Engine) -> list[TokenEvent]:
    """One checked step; idle time passes up to the next wake."""
    events = engine.step()
    engine.check()
    if not events:
        wake = engine.next_wake_ns()
        if wake is not None and wake > engine.clock.now():
            engine.clock.sleep_until(wake)
    return events


def take(tokens: dict[str, list[int]], events: list[TokenEvent]) -> None:
    for event in events:
        tokens.setdefault(event.request_id, []).extend(event.token_ids)


def assert_empty(engine: Engine) -> None:
    """Nothing running, every block free, every request ended once."""
    assert not engine.scheduler.running
    assert not len(engine.scheduler.waiting)
    assert not engine._live
    assert engine.scheduler.kv.pool.num_used == 0
    engine.check()
    for record in engine.records:
        assert record.outcome is not None
        assert sum(record.chunk_tokens) == record.output_tokens


def request(request_id: str, prompt: list[int], **fields) -> Request:
    return Request(request_id, prompt, **fields)
