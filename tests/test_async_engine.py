"""The asyncio engine: streams, cancels, deadlines, disconnects, a thread that survives its steps."""

from __future__ import annotations

import asyncio
import random
import threading
import tracemalloc
from collections import deque
from concurrent.futures import Future
from itertools import pairwise

import numpy as np
import pytest
import torch
from fake_model import alone, assert_empty, fake_engine, request, take

from perflab.clock import WallClock
from perflab.engine.drivers import AsyncEngine
from perflab.engine.engine import Engine
from perflab.errors import EngineStopped, Rejected
from perflab.models.tiny import tiny
from perflab.types import Request, SamplingParams


def endless(**more) -> SamplingParams:
    return SamplingParams(max_tokens=150, ignore_eos=True, **more)


def wall_engine(**options) -> Engine:
    """The fake model on the machine's clock, its steps without a cost."""
    engine, executor, _ = fake_engine(**options)
    engine.clock = executor.clock = WallClock()
    executor.clock.advance = lambda ns: None
    return engine


async def collect(engine: AsyncEngine, one: Request, limit: int | None = None) -> list[int]:
    tokens: list[int] = []
    async for event in engine.stream(one):
        tokens.extend(event.token_ids)
        if limit is not None and len(tokens) >= limit:
            break
    return tokens


async def settled(engine: AsyncEngine) -> None:
    """Until the engine has nothing left; a command goes through the thread, so steps lie between."""
    for _ in range(2000):
        if not await engine.call(lambda: engine.engine.has_work):
            return
        await asyncio.sleep(0)
    raise AssertionError("the engine goes on without a client")


async def test_streams_run_beside_each_other_and_answer_as_alone() -> None:
    async with AsyncEngine(wall_engine()) as engine:
        prompts = [[i + 1] * 6 for i in range(10)]
        answers = await asyncio.gather(
            *(collect(engine, request(str(i), p, params=endless(seed=1))) for i, p in enumerate(prompts))
        )
        assert answers == [alone(prompt, 150, frozenset()) for prompt in prompts]
        assert engine.num_streams == 0
        steps = engine.engine.steps
        assert all(step.delivered_ns <= step.handed_ns for step in steps if step.sampled_tokens)
        assert all(a.handed_ns <= b.start_ns for a, b in pairwise(steps))
    assert_empty(engine.engine)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("slots", [1, 8])
async def test_clients_that_leave_take_their_requests_with_them(n: int, slots: int) -> None:
    """After three tokens, while still waiting in the queue, or by cancelling the task."""
    long = SamplingParams(max_tokens=1500, ignore_eos=True, n=n)  # more than the thread gives meanwhile
    async with AsyncEngine(wall_engine(max_num_seqs=slots, num_blocks=512)) as engine:
        leaving = [
            asyncio.create_task(collect(engine, request(f"leave{i}", [i + 1] * 5, params=long), 3))
            for i in range(20)
        ]
        waiting = [
            asyncio.create_task(collect(engine, request(f"wait{i}", [i + 1] * 5, params=long)))
            for i in range(5)
        ]
        await leaving[0]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*leaving, *waiting, return_exceptions=True)
        await settled(engine)
        assert engine.num_streams == 0
    assert_empty(engine.engine)
    outcomes = {record.outcome for record in engine.engine.records}
    assert "cancelled" in outcomes
    assert outcomes <= {"cancelled", "completed"}


@pytest.mark.parametrize("n", [1, 2])
async def test_an_id_may_be_used_again_at_once_after_its_stream_was_left(n: int) -> None:
    """Nothing of the request that was left reaches the next one of that name."""
    params = SamplingParams(max_tokens=1500, ignore_eos=True, n=n)
    async with AsyncEngine(wall_engine(num_blocks=512)) as engine:
        for _ in range(20):
            await collect(engine, request("same", [1] * 5, params=params), 3)
            task = asyncio.create_task(collect(engine, request("same", [2] * 5, params=params)))
            await asyncio.sleep(0)
            task.cancel()  # before it was submitted
            await asyncio.gather(task, return_exceptions=True)
            again = await collect(engine, request("same", [3] * 5, params=endless()))
            assert again == alone([3] * 5, 150, frozenset())
        await settled(engine)
        assert engine.num_streams == 0
    assert_empty(engine.engine)


async def test_a_late_answer_to_a_cancel_does_not_end_the_next_request_of_that_name(monkeypatch) -> None:
    answer: Future[list[str]] = Future()
    async with AsyncEngine(wall_engine(num_blocks=512)) as engine:
        async with engine.open(request("a", [1] * 5, params=endless())) as first:
            await anext(first)
            with monkeypatch.context() as patch:
                patch.setattr(engine._thread, "call", lambda command: answer)
                first.leave()  # the request ends by itself before the engine hears of this
        await asyncio.wait_for(first.over.wait(), 10)
        async with engine.open(request("a", [2] * 5, params=endless())) as second:
            answer.set_result(["a"])
            tokens = [token async for events in second for event in events for token in event.token_ids]
        assert tokens == alone([2] * 5, 150, frozenset())
        assert engine.num_streams == 0
    assert_empty(engine.engine)


async def test_an_id_in_use_is_refused_and_its_stream_goes_on() -> None:
    second_was_refused = threading.Event()
    fake = wall_engine(num_blocks=512)
    fake.executor.clock.advance = lambda ns: second_was_refused.wait(10)  # or the first could be over by then
    async with AsyncEngine(fake) as engine:
        async with engine.open(request("a", [1], params=endless())) as first:
            with pytest.raises(ValueError, match="in use"):
                await collect(engine, request("a", [1], params=endless()))
            second_was_refused.set()
            tokens = [token async for events in first for event in events for token in event.token_ids]
        assert tokens == alone([1], 150, frozenset())


async def test_several_requests_of_one_caller_come_together_and_leave_together() -> None:
    async with AsyncEngine(wall_engine(num_blocks=512)) as engine:
        asked = [request(str(i), [i + 1] * 5, params=endless()) for i in range(3)]
        found: dict[str, list[int]] = {}
        async with engine.open(*asked) as deliveries:
            assert [record.request_id for record in deliveries.records] == ["0", "1", "2"]
            async for events in deliveries:
                take(found, events)
        assert found == {str(i): alone([i + 1] * 5, 150, frozenset()) for i in range(3)}
        with pytest.raises(Rejected):  # the last of them: the others go with it
            async with engine.open(*asked, request("big", [1] * 5000, params=endless())):
                raise AssertionError("submitted")
        async with engine.open(*asked) as deliveries:
            await anext(deliveries)
            deliveries.leave()
            with pytest.raises(StopAsyncIteration):
                await anext(deliveries)
        await settled(engine)
        assert engine.num_streams == 0
    assert_empty(engine.engine)


async def test_a_thousand_disconnects_at_random_moments_leave_nothing() -> None:
    rng = random.Random(0)
    async with AsyncEngine(wall_engine(num_blocks=400, keep_records=50)) as engine:

        async def client(number: int) -> None:
            task = asyncio.create_task(
                collect(
                    engine,
                    request(str(number), [rng.randrange(1, 9)] * 9, params=endless()),
                    rng.randint(1, 20),
                )
            )
            for _ in range(rng.randint(0, 6)):
                await asyncio.sleep(0)
            if rng.random() < 0.5:
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for first in range(0, 1000, 50):
            await asyncio.gather(*(client(number) for number in range(first, first + 50)))
        await settled(engine)
        assert engine.num_streams == 0
    assert_empty(engine.engine)
    assert len(engine.engine.records) == 50


def leaked_bytes_per_request(engine: Engine, leak: list[bytes] | None = None) -> tuple[float, float]:
    """Slope of Python's own memory over a thousand aborted requests, and its standard error."""
    sizes, taken = np.zeros(50), 0  # made before, or the measurement itself would grow
    engine.executor.plans = deque(maxlen=10)
    tracemalloc.start()
    try:
        for number in range(1200):
            engine.submit(request(str(number), [number % 7 + 1] * 9, params=endless()))
            for _ in range(number % 5):
                engine.step()
            engine.cancel(str(number))
            engine.step()
            if leak is not None:
                leak.append(bytes(300))
            if number >= 200 and number % 20 == 0:  # after the bounded records are full
                sizes[taken] = tracemalloc.get_traced_memory()[0]
                taken += 1
    finally:
        tracemalloc.stop()
    x = np.arange(len(sizes)) * 20.0
    (slope, _), covariance = np.polyfit(x, sizes, 1, cov=True)
    return float(slope), float(covariance[0, 0] ** 0.5)


def test_a_thousand_aborts_leak_nothing_and_a_planted_leak_is_found() -> None:
    slope, error = leaked_bytes_per_request(wall_engine(keep_records=50))
    assert abs(slope) + 3 * error < 10
    slope, error = leaked_bytes_per_request(wall_engine(keep_records=50), leak=[])
    assert slope - 3 * error > 200


async def test_a_deadline_ends_a_stream_with_what_it_had() -> None:
    engine = AsyncEngine(wall_engine(num_blocks=2048))
    async with engine:
        now = engine.engine.clock.now()
        events = [
            event
            async for event in engine.stream(
                Request(
                    "late",
                    [1],
                    SamplingParams(max_tokens=4000, ignore_eos=True),
                    deadline_ns=now + 30_000_000,
                )
            )
        ]
    assert events[-1].finish_reason == "deadline"
    assert engine.engine.records[0].outcome == "timed_out"


async def test_a_sleeping_engine_wakes_for_a_batch_time_out() -> None:
    engine = wall_engine(batching="dynamic", batch_timeout_s=0.02, max_num_seqs=4)
    async with AsyncEngine(engine) as running:
        assert len(await asyncio.wait_for(collect(running, request("a", [1], params=endless())), 20)) == 150
    record = engine.records[0]
    assert record.admitted_ns - record.sent_ns >= 20_000_000


async def test_a_refusal_reaches_the_caller_and_others_go_on() -> None:
    async with AsyncEngine(wall_engine(num_blocks=50)) as engine:
        with pytest.raises(Rejected, match="needs KV memory"):
            await collect(engine, request("big", [1] * 1002, params=endless()))
        assert await collect(engine, request("small", [1], params=endless())) == alone([1], 150, frozenset())
        assert engine.num_streams == 0


async def test_an_exception_that_escapes_a_step_ends_requests_not_the_engine() -> None:
    inner = wall_engine()
    plan, raised = inner.scheduler.plan, []

    def faulty(now: int):
        if not raised and inner.scheduler.running:
            raised.append(True)
            raise RuntimeError("a bug in the scheduler")
        return plan(now)

    inner.scheduler.plan = faulty
    async with AsyncEngine(inner) as engine:
        events = [event async for event in engine.stream(request("a", [1], params=endless()))]
        assert events[-1].finish_reason == "error"
        assert "a bug in the scheduler" in str(events[-1].error)
        await settled(engine)
        assert await collect(engine, request("b", [1], params=endless())) == alone([1], 150, frozenset())
    assert_empty(inner)


async def test_closing_ends_streams_and_refuses_new_ones() -> None:
    engine = AsyncEngine(wall_engine(num_blocks=4096))
    endless_params = SamplingParams(max_tokens=4000, ignore_eos=True)
    task = asyncio.create_task(collect(engine, request("a", [1], params=endless_params)))
    await asyncio.sleep(0.01)
    await engine.__aexit__()
    assert len(await asyncio.wait_for(task, 10)) < 4000
    with pytest.raises(EngineStopped):
        await collect(engine, request("b", [1], params=endless()))


async def test_text_streams_from_a_real_model() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = tiny("llama")
        async with AsyncEngine(Engine(model)) as engine:
            one = Request("a", model.encode("hello"), SamplingParams(max_tokens=20, min_tokens=20))
            events = [event async for event in engine.stream(one)]
        ids = [token for event in events for token in event.token_ids]
        assert "".join(event.text for event in events) == model.decode(ids)
    finally:
        torch.set_num_threads(before)
