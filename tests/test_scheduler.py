"""Scheduling on the fake model: order, fairness, preemption, admission, batching, budgets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from fake_model import VOCAB, advance, alone, assert_empty, drain, fake_engine, request, take

from perflab.clock import seconds_to_ns
from perflab.engine.plan import StepResult
from perflab.errors import Rejected
from perflab.types import OUTCOME_OF, SamplingParams

MS = 1_000_000


def params(count: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=count, **more)


def script(seed: int, build: Callable) -> None:
    """A random life of an engine: arrivals, cancels, deadlines, priorities, tight memory."""
    rng = random.Random(seed)
    options = {
        "num_blocks": rng.choice((12, 20, 64)),
        "max_num_seqs": rng.choice((1, 3, 8)),
        "max_num_batched_tokens": rng.choice((8, 16, 64)),
        "policy": rng.choice(("fcfs", "priority", "sjf", "edf")),
        "batching": rng.choice(("static", "dynamic", "continuous")),
        "prefix_cache": rng.random() < 0.7,
        "chunked_prefill": rng.random() < 0.7,
        "ageing_s": rng.choice((0.005, 0.1)),
        "batch_timeout_s": rng.choice((0.0, 0.01)),
    }
    engine, clock, answer = build(options)
    capacity = engine.config.num_blocks * engine.config.block_size
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(4, 20))] for _ in range(3)]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    tokens: dict[str, list[int]] = {}
    for number in range(rng.randint(3, 12)):
        prompt = [*rng.choice(prefixes), *(rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 12)))]
        count = rng.randint(1, 12)
        sampling = params(count, n=rng.choice((1, 1, 1, 2)), seed=number, ignore_eos=rng.random() < 0.5)
        deadline = clock.now() + rng.randint(1, 60) * MS if rng.random() < 0.2 else None
        salt = (("salt", "s"),) if rng.random() < 0.2 else ()
        name = f"r{number}"
        try:
            ids = engine.submit(
                request(
                    name,
                    prompt,
                    params=sampling,
                    priority=rng.randint(-1, 2),
                    deadline_ns=deadline,
                    cache_keys=salt,
                )
            )
            asked.update(dict.fromkeys(ids, (prompt, sampling)))
        except Rejected:
            assert len(prompt) + count - 1 > capacity
        for _ in range(rng.randint(0, 4)):
            take(tokens, advance(engine))
            if rng.random() < 0.1 and asked:
                engine.cancel(rng.choice(list(asked)))
    for name, got in drain(engine).items():
        tokens.setdefault(name, []).extend(got)
    assert_empty(engine)
    for record in engine.records:
        if record.outcome == "rejected":
            continue
        prompt, sampling = asked[record.request_id]
        whole = answer(prompt, sampling)
        got = tokens.get(record.request_id, [])
        assert got == whole[: len(got)], record
        assert record.output_tokens == len(got)
        assert record.outcome == OUTCOME_OF[record.finish_reason]
        if record.outcome == "completed":
            assert got == whole


def fake_build(options: dict):
    engine, _, clock = fake_engine(**options)

    def answer(prompt: list[int], sampling: SamplingParams) -> list[int]:
        return alone(prompt, sampling.max_tokens, frozenset() if sampling.ignore_eos else frozenset({0}))

    return engine, clock, answer


@pytest.mark.parametrize("block", range(5))
def test_random_request_scripts_give_what_each_request_gives_alone(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        script(seed, fake_build)


# -- admission (a prompt longer than the pool must not stall the queue) ----------------------


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        (1002, 4, "251 blocks.*50 blocks|needs KV memory for 1005"),
        (150, 60, "needs KV memory for 209 tokens.*holds 200"),
        (5000, 1, "the model's limit is 4096"),
        (0, 1, "empty"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt: int, count: int, message: str) -> None:
    engine, _, _ = fake_engine(num_blocks=50)
    with pytest.raises(Rejected, match=message):
        engine.submit(request("big", [1] * prompt, params=params(count)))
    assert engine.records[0].outcome == "rejected"
    engine.submit(request("small", [1, 2, 3], params=params(4)))
    assert drain(engine) == {"small": alone([1, 2, 3], 4)}


def test_the_whole_pool_can_be_used_by_one_request() -> None:
    engine, _, _ = fake_engine(num_blocks=8)
    prompt = [5] * 28
    engine.submit(request("full", prompt, params=params(5, ignore_eos=True)))
    assert drain(engine)["full"] == alone(prompt, 5, frozenset())


def test_without_a_token_limit_a_request_runs_to_the_pool() -> None:
    engine, _, _ = fake_engine(num_blocks=8)
    engine.submit(request("open", [5] * 10, params=params(None, ignore_eos=True)))
    assert len(drain(engine)["open"]) == 8 * 4 + 1 - 10


# -- priority -----------------------------------------------------------------------------


def test_a_higher_priority_pushes_out_the_lowest_and_both_answer_right() -> None:
    engine, _, _ = fake_engine(num_blocks=12, policy="priority", ageing_s=10)
    tokens: dict[str, list[int]] = {}
    for name in "abc":
        engine.submit(request(name, [ord(name)] * 12, params=params(4, ignore_eos=True)))
    take(tokens, engine.step())
    engine.submit(request("urgent", [9] * 12, params=params(4, ignore_eos=True), priority=-10))
    for name, rest in drain(engine).items():
        tokens.setdefault(name, []).extend(rest)
    assert tokens.pop("urgent") == alone([9] * 12, 4, frozenset())
    assert tokens == {name: alone([ord(name)] * 12, 4, frozenset()) for name in "abc"}
    end = {record.request_id: record.end_ns for record in engine.records}
    preempted = [record.request_id for record in engine.records if record.preemptions]
    assert preempted
    assert all(end["urgent"] < end[name] for name in preempted)


def test_priority_counts_when_slots_are_short_and_memory_is_not() -> None:
    engine, _, _ = fake_engine(max_num_seqs=1, policy="priority", ageing_s=10)
    engine.submit(request("low", [1] * 8, params=params(20, ignore_eos=True), priority=5))
    engine.step()
    engine.submit(request("high", [2] * 8, params=params(3, ignore_eos=True)))
    drain(engine)
    low, high = engine.records
    assert high.end_ns < low.end_ns
    assert low.preemptions == 1


def test_planned_and_preempted_are_disjoint_and_planned_is_running() -> None:
    engine, executor, _ = fake_engine(num_blocks=10, policy="priority", ageing_s=1, max_num_batched_tokens=16)
    rng = random.Random(1)
    preempted: list[str] = []
    engine.scheduler._on_event = lambda kind, subject, detail: preempted.append(subject)

    def watch(plan):
        planned = {seq.request_id for seq in plan.seqs}
        assert planned.isdisjoint(preempted)
        assert planned <= {seq.request_id for seq in engine.scheduler.running}
        preempted.clear()

    executor.fault = watch
    for number in range(40):
        engine.submit(
            request(
                f"r{number}",
                [rng.randrange(1, 9) for _ in range(10)],
                params=params(8),
                priority=rng.randint(-3, 3),
            )
        )
        advance(engine)
    drain(engine)
    assert sum(record.preemptions for record in engine.records) > 0


def test_a_stream_of_high_priority_starves_nobody_beyond_the_bound() -> None:
    ageing_s = 0.05
    engine, _, clock = fake_engine(max_num_seqs=1, policy="priority", ageing_s=ageing_s)
    engine.submit(request("low", [1] * 4, params=params(2), priority=1))
    number = 0
    while engine.records[0].outcome is None:
        engine.submit(request(f"high{number}", [2] * 4, params=params(2), priority=0))
        advance(engine)
        number += 1
        assert number < 10_000
    # Whoever came later than one level's worth of waiting goes behind it.
    waited_for = [r for r in engine.records if r.request_id != "low" and r.end_ns and r.end_ns < clock.now()]
    assert max(record.sent_ns for record in waited_for) <= seconds_to_ns(ageing_s) + 10 * MS


# -- order ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", "abc"), ("sjf", "cab"), ("edf", "bca"), ("priority", "cba")],
)
def test_each_policy_serves_in_its_order(policy: str, order: str) -> None:
    engine, _, _ = fake_engine(max_num_seqs=1, policy=policy, ageing_s=1000)
    lengths = {"a": 20, "b": 30, "c": 4}
    deadlines = {"a": None, "b": seconds_to_ns(50), "c": seconds_to_ns(60)}
    priorities = {"a": 3, "b": 2, "c": 1}
    for name in "abc":
        engine.submit(
            request(
                name,
                [1] * lengths[name],
                params=params(2, ignore_eos=True),
                deadline_ns=deadlines[name],
                priority=priorities[name],
            )
        )
    drain(engine)
    assert "".join(r.request_id for r in sorted(engine.records, key=lambda r: r.end_ns)) == order


# -- batching -------------------------------------------------------------------------------


def test_a_static_batch_lets_nobody_in_until_all_have_left() -> None:
    engine, executor, _ = fake_engine(batching="static", max_num_seqs=2, max_num_batched_tokens=8)
    for number, count in enumerate((2, 9, 2, 2)):
        engine.submit(request(f"r{number}", [number + 1] * 6, params=params(count, ignore_eos=True)))
    drain(engine)
    for plan in executor.plans:
        names = {name for name, _ in plan}
        assert names <= {"r0", "r1"} or names <= {"r2", "r3"}


def test_a_dynamic_batch_waits_for_size_or_time_whichever_is_first() -> None:
    engine, executor, clock = fake_engine(batching="dynamic", max_num_seqs=3, batch_timeout_s=0.05)
    engine.submit(request("a", [1] * 4, params=params(1)))
    assert engine.step() == []
    assert engine.next_wake_ns() == seconds_to_ns(0.05)
    clock.advance(20 * MS)
    engine.submit(request("b", [1] * 4, params=params(1)))
    assert engine.step() == []
    assert engine.next_wake_ns() == seconds_to_ns(0.05), "the oldest one's wait counts, not the newest's"
    engine.submit(request("c", [1] * 4, params=params(1)))
    assert len(engine.step()) == 3
    engine.submit(request("d", [1] * 4, params=params(1)))
    assert engine.step() == []
    drain(engine)
    assert executor.plans[-1] == [("d", 4)]
    assert engine.records[-1].admitted_ns - engine.records[-1].sent_ns == seconds_to_ns(0.05)


def test_continuous_batching_lets_a_request_in_at_the_next_step() -> None:
    engine, executor, _ = fake_engine()
    engine.submit(request("a", [1] * 4, params=params(10, ignore_eos=True)))
    engine.step()
    engine.submit(request("b", [2] * 4, params=params(10, ignore_eos=True)))
    engine.step()
    assert executor.plans[1] == [("a", 1), ("b", 4)]


# -- budget: a long prompt stalls nobody ------------------------------------------------------


@pytest.mark.parametrize("budget", [256, 1024, 4096])
def test_a_running_request_gets_a_token_every_step_beside_a_long_prompt(budget: int) -> None:
    engine, executor, _ = fake_engine(
        num_blocks=2048, max_num_batched_tokens=budget, max_num_seqs=8, prefix_cache=False
    )
    engine.submit(request("a", [1] * 8, params=params(64, ignore_eos=True)))
    engine.step()
    prompt = [2 + i % 200 for i in range(4000)]
    engine.submit(request("b", prompt, params=params(1)))
    steps = 0
    while engine.records[1].outcome is None:
        events = engine.step()
        assert "a" in {event.request_id for event in events if event.token_ids}
        steps += 1
    assert steps == math.ceil(4000 / (budget - 1))
    assert all(sum(count for _, count in plan) <= budget for plan in executor.plans)


def test_an_urgent_long_prompt_leaves_a_token_for_each_row_behind_it() -> None:
    engine, executor, _ = fake_engine(num_blocks=256, max_num_batched_tokens=16, policy="priority")
    for name in "ab":
        engine.submit(request(name, [2] * 4, params=params(100, ignore_eos=True)))
    engine.step()
    engine.submit(request("long", [1] * 200, params=params(1), priority=-1))
    drain(engine)
    assert executor.plans[1] == [("long", 14), ("a", 1), ("b", 1)]
    assert all({"a", "b"} <= {name for name, _ in plan} for plan in executor.plans[1:15])


def test_short_jobs_do_not_queue_behind_the_chunks_of_a_long_prompt() -> None:
    engine, executor, _ = fake_engine(num_blocks=256, max_num_batched_tokens=16, policy="sjf")
    engine.submit(request("long", [1] * 400, params=params(1)))
    engine.step()
    engine.submit(request("short", [2] * 4, params=params(2, ignore_eos=True)))
    engine.step()
    assert executor.plans[1] == [("short", 4), ("long", 12)]
    drain(engine)


def test_without_chunks_a_prompt_is_computed_in_one_step_whatever_the_budget() -> None:
    engine, executor, _ = fake_engine(chunked_prefill=False, max_num_batched_tokens=16, num_blocks=128)
    engine.submit(request("a", [1] * 4, params=params(3, ignore_eos=True)))
    engine.step()
    engine.submit(request("b", [2] * 100, params=params(2)))
    engine.submit(request("c", [3] * 100, params=params(2)))
    drain(engine)
    prefills = [row for plan in executor.plans for row in plan if row[1] > 1]
    assert prefills == [("a", 4), ("b", 100), ("c", 100)]
    assert all(sum(count > 1 for _, count in plan) <= 1 for plan in executor.plans)


# -- prefix cache, samples, deadlines ---------------------------------------------------------


@pytest.mark.parametrize("length", [31, 32, 33])
def test_a_prompt_seen_before_is_taken_from_the_cache_but_for_its_last_token(length: int) -> None:
    engine, executor, _ = fake_engine(block_size=16)
    prompt = list(range(1, length + 1))
    engine.submit(request("first", prompt, params=params(3, ignore_eos=True)))
    drain(engine)
    engine.submit(request("second", prompt, params=params(3, ignore_eos=True)))
    assert drain(engine)["second"] == alone(prompt, 3, frozenset())
    cached = (length - 1) // 16 * 16
    assert engine.records[1].cached_tokens == cached
    assert ("second", length - cached) in executor.plans[-3]


def test_samples_of_one_prompt_share_its_full_blocks() -> None:
    engine, executor, _ = fake_engine(block_size=4)
    prompt = list(range(1, 18))
    ids = engine.submit(request("r", prompt, params=params(4, n=3, ignore_eos=True)))
    assert ids == ["r/0", "r/1", "r/2"]
    tokens: dict[str, list[int]] = {}
    take(tokens, engine.step())
    take(tokens, engine.step())
    tables = [seq.block_table for seq in engine.scheduler.running]
    assert len(tables) == 3
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert len({table[4] for table in tables}) == 3
    assert executor.plans[1] == [("r/0", 1), ("r/1", 1), ("r/2", 1)]
    for name, rest in drain(engine).items():
        tokens[name].extend(rest)
    assert list(tokens.values()) == [alone(prompt, 4, frozenset())] * 3


def test_a_deadline_ends_a_request_in_the_queue_and_while_running() -> None:
    engine, _, _ = fake_engine(max_num_seqs=1)
    engine.submit(request("runs", [1] * 4, params=params(200, ignore_eos=True), deadline_ns=10 * MS))
    engine.submit(request("waits", [2] * 4, params=params(5), deadline_ns=5 * MS))
    engine.submit(request("late", [3] * 4, params=params(5), deadline_ns=0))
    engine.submit(request("fine", [4] * 4, params=params(2, ignore_eos=True)))
    drain(engine)
    outcome = {record.request_id: record.outcome for record in engine.records}
    assert outcome == {"runs": "timed_out", "waits": "timed_out", "late": "timed_out", "fine": "completed"}
    runs = engine.records[0]
    assert runs.output_tokens > 0
    assert "while running" in runs.error
    assert "in the queue" in engine.records[1].error
    assert runs.end_ns <= 12 * MS


def test_spans_of_a_preempted_request_are_stamped_at_both_ends() -> None:
    engine, _, _ = fake_engine(max_num_seqs=1, policy="priority", ageing_s=10)
    engine.submit(request("low", [1] * 8, params=params(6, ignore_eos=True), priority=5))
    advance(engine)
    engine.submit(request("high", [2] * 8, params=params(3, ignore_eos=True)))
    drain(engine)
    low, high = engine.records
    assert [span.name for span in low.spans] == ["queue", "requeue"]
    requeue = low.spans[1]
    assert requeue.start_ns >= high.admitted_ns
    assert requeue.end_ns >= high.end_ns
    assert low.last_step > low.first_token_step >= low.first_step == 0


# -- what must not happen beside or after a failure -------------------------------------------------


def test_wiping_after_a_failure_never_touches_a_running_request() -> None:
    """A deadline's blocks are healthy: they are not wiped under their next owner."""
    engine, executor, clock = fake_engine(num_blocks=8, prefix_cache=False)
    engine.submit(request("late", [1] * 8, params=params(20, ignore_eos=True), deadline_ns=2 * MS))
    engine.step()
    clock.advance(3 * MS)
    engine.step()
    assert engine.records[0].outcome == "timed_out"
    engine.submit(request("b", [2] * 8, params=params(6, ignore_eos=True)))
    tokens: dict[str, list[int]] = {}
    take(tokens, engine.step())
    engine.submit(request("c", [3] * 8, params=params(4)))

    def fail_c(plan):
        rows = [seq.request_id for seq in plan.seqs]
        if "c" not in rows:
            return None
        results = [executor._row(*row) for row in zip(plan.seqs, plan.counts, plan.samples, strict=True)]
        row = rows.index("c")
        results[row] = []
        return StepResult(results, errors={row: ValueError("c")})

    executor.fault = fail_c
    take(tokens, engine.step())
    for name, rest in drain(engine).items():
        tokens.setdefault(name, []).extend(rest)
    assert tokens["b"] == alone([2] * 8, 6, frozenset())
    assert engine.records[2].outcome == "failed"


def test_a_driver_never_sleeps_while_a_step_can_be_made() -> None:
    engine, _, clock = fake_engine(max_num_batched_tokens=16)
    engine.submit(request("r", [1] * 40, params=params(2), deadline_ns=clock.now() + seconds_to_ns(30)))
    assert engine.step() == []
    assert engine.next_wake_ns() is None
    drain(engine)
    assert engine.records[0].outcome == "completed"


@pytest.mark.parametrize("policy", ["edf", "priority"])
def test_a_promotion_that_empties_the_running_list_still_plans(policy: str) -> None:
    engine, executor, clock = fake_engine(num_blocks=4, policy=policy, max_num_seqs=2)
    engine.submit(request("a", [1] * 8, params=params(4, ignore_eos=True), priority=5))
    engine.step()
    deadline = clock.now() + seconds_to_ns(30)
    engine.submit(request("urgent", [2] * 12, params=params(2), priority=-5, deadline_ns=deadline))
    engine.step()
    assert executor.plans[-1] == [("urgent", 12)]
    drain(engine)
    assert {record.outcome for record in engine.records} == {"completed"}


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_late_arrival_never_takes_the_seat_of_a_member(batching: str) -> None:
    """Neither of one that waits for its first sample, nor of one that was cancelled."""
    engine, executor, _ = fake_engine(batching=batching, max_num_seqs=4, max_num_batched_tokens=8)
    engine.submit(request("n", [1] * 20, params=params(6, n=4, ignore_eos=True)))
    engine.step()
    engine.submit(request("late", [2] * 4, params=params(2, ignore_eos=True)))
    engine.cancel("n/3")
    drain(engine)
    members = {"n/0", "n/1", "n/2"}
    assert all({name for name, _ in plan} <= members or plan[0][0] == "late" for plan in executor.plans)
    assert executor.plans[-1] == [("late", 1)]


def test_nobody_is_preempted_for_a_request_that_would_not_fit_anyway() -> None:
    engine, _, _ = fake_engine(num_blocks=8, policy="priority", ageing_s=1000)
    engine.submit(request("first", [1] * 18, params=params(2, ignore_eos=True), priority=1))
    engine.submit(request("last", [2] * 6, params=params(2, ignore_eos=True), priority=3))
    engine.step()
    engine.submit(request("head", [3] * 16, params=params(2, ignore_eos=True), priority=2))
    drain(engine)
    assert [record.preemptions for record in engine.records] == [0, 0, 0]


def test_urgent_whole_prompts_respect_the_budget_of_a_step() -> None:
    engine, executor, _ = fake_engine(
        num_blocks=512, policy="priority", chunked_prefill=False, max_num_batched_tokens=32
    )
    engine.submit(request("a", [1] * 4, params=params(40, ignore_eos=True), priority=5))
    engine.step()
    for number in range(5):
        engine.submit(request(f"u{number}", [number + 2] * 100, params=params(2, ignore_eos=True)))
    drain(engine)
    assert all(sum(count > 1 for _, count in plan) <= 1 for plan in executor.plans)


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    engine, _, _ = fake_engine()
    for number in range(1000):
        late = seconds_to_ns(10_000)
        engine.submit(request(str(number), [1] * 4, params=params(1), deadline_ns=late))
        engine.step()
    assert len(engine.scheduler._deadlines) < 100
