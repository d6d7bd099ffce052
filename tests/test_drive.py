"""The driver in virtual time: who is sent when, what is the client's own doing, how a run ends early."""

from __future__ import annotations

import asyncio

import pytest
from fake_model import assert_empty
from virtual_loop import run

from perflab.clock import NS_PER_S
from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.load.arrivals import Arrivals
from perflab.load.drive import Limits, drive, new_loop, run_service
from perflab.load.engine_service import EngineService
from perflab.load.pacing import ClosedLoop
from perflab.load.run import RunRecords
from perflab.load.workloads import Synthetic, TimedRequest, Workload, synthetic
from perflab.measure import metrics
from perflab.measure.validity import judge
from perflab.models.tiny import tiny
from perflab.types import RequestRecord, Sample, SamplingParams

MS = NS_PER_S // 1000


class Sleeper:
    """Answers one token after `service_s`; `block_s` is work of the client's own for each answer."""

    def __init__(self, service_s: float = 0.05, block_s: float = 0.0) -> None:
        self.clock = self.loop = asyncio.get_running_loop()
        self.service_s, self.block_s = service_s, block_s
        self.prepared: list[str] = []
        self.settled = self.running = self.most = 0

    def prepare(self, request, encoder):
        self.prepared.append(request.request_id)
        return request

    async def send(self, request: TimedRequest, record: RequestRecord) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.service_s)
            now = self.clock.now()
            record.first_token_ns = record.last_token_ns = record.end_ns = now
            record.token_ns, record.chunk_tokens, record.output_tokens = [now], [1], 1
            record.outcome, record.finish_reason = "completed", "stop"
        finally:
            self.running -= 1
        self.loop._jumping.now += self.block_s

    def settle(self) -> None:
        self.settled += 1


def driven(workload: Workload, service_s: float = 0.05, block_s: float = 0.0, **options):
    async def main() -> tuple[RunRecords, Sleeper]:
        service = Sleeper(service_s, block_s)
        return await drive(service, workload, collect=False, **options), service

    return run(main())


def constant(n: int, rate: float) -> Workload:
    return synthetic(n, arrivals=Arrivals("constant", rate))


def test_sends_at_the_intended_time_and_waits_for_all():
    records, service = driven(constant(50, 50.0))
    assert [r.sent_ns for r in records.requests] == [i * 20 * MS for i in range(50)]
    assert all(r.intended_ns == r.sent_ns and not r.spans for r in records.requests)
    assert records.ended_ns == 49 * 20 * MS + 50 * MS
    assert (records.planned, records.interrupted, service.settled) == (50, False, 1)
    assert service.prepared == [r.request_id for r in records.requests]
    assert (records.client.send_lateness_p99_s, records.client.loop_lag_p99_s) == (0.0, 0.0)
    assert not [name for name, _ in judge(records.requests, open_loop=True, client=records.client).reasons]


def test_a_client_that_is_the_bottleneck_says_so():
    """40 ms of its own work for each answer of a 50 ms service, asked for 50 a second: it reaches 25."""
    records, _ = driven(constant(100, 50.0), block_s=0.04)
    reached = metrics.throughput(records.requests)
    assert reached is not None
    assert 20 < reached.requests_per_s < 27
    verdict = judge(records.requests, open_loop=True, client=records.client)
    names = [name for name, _ in verdict.reasons]
    assert "client-bound" in names
    assert records.client.loop_lag_p99_s > 0.04
    assert records.client.send_lateness_p99_s > 0.5


def test_latencies_count_from_the_intended_start_of_a_late_send():
    records, _ = driven(constant(100, 50.0), block_s=0.04)
    late = records.requests[-1]
    assert late.sent_ns > late.intended_ns
    assert late.spans[0]._replace(name="") == ("", late.intended_ns, late.sent_ns)
    assert metrics.ttft_s(late) - metrics.ttft_from_sent_s(late) == pytest.approx(metrics.lateness_s(late))


def test_more_in_flight_than_allowed_wait_in_the_client():
    records, service = driven(synthetic(6), limits=Limits(max_in_flight=2))
    assert service.most == 2
    assert [r.sent_ns // MS for r in records.requests] == [0, 0, 50, 50, 100, 100]
    queues = [[s for s in r.spans if s.name == "client_queue"] for r in records.requests]
    assert [(q[0].start_ns, q[0].end_ns // MS) if q else None for q in queues] == [
        None,
        None,
        (0, 50),
        (0, 50),
        (0, 100),
        (0, 100),
    ]
    assert records.client.send_lateness_p99_s == 0.0


@pytest.mark.parametrize(
    ("limits", "sent"),
    [
        (Limits(requests=3), 3),
        (Limits(output_tokens=4), 6),  # the fourth token comes at 110 ms; what is in flight then ends as well
        (Limits(seconds=0.1), 5),
        (Limits(), 20),
    ],
)
def test_nothing_is_sent_after_a_limit(limits: Limits, sent: int):
    records, _ = driven(constant(20, 50.0), limits=limits)
    assert len(records.requests) == sent
    assert {r.outcome for r in records.requests} == {"completed"}
    at_once, _ = driven(synthetic(20), limits=Limits(requests=3))
    assert len(at_once.requests) == 3
    incomplete = "incomplete" in dict(judge(records.requests, planned=records.planned).reasons)
    assert incomplete == (sent < 20)


def test_a_timeout_is_the_requests_end_and_the_users_go_on():
    records, service = driven(synthetic(4), service_s=1.0, pacing=ClosedLoop(2), timeout_s=0.3)
    assert [r.outcome for r in records.requests] == ["timed_out"] * 4
    assert [(r.intended_ns // MS, r.end_ns // MS) for r in records.requests] == [(0, 300)] * 2 + [
        (300, 600)
    ] * 2
    assert service.running == 0


def test_a_closed_loop_asks_again_for_as_long_as_it_lasts():
    records, service = driven(synthetic(3), pacing=ClosedLoop(2, duration_s=0.2))
    assert len(records.requests) == records.planned == 8
    assert len({r.request_id for r in records.requests}) == 8
    assert records.ended_ns == 200 * MS
    assert len(service.prepared) == 8


def test_interrupted_keeps_what_was_measured():
    told = []

    async def main() -> RunRecords:
        task = asyncio.ensure_future(
            drive(Sleeper(), constant(50, 50.0), collect=False, on_progress=lambda *p: told.append(p))
        )
        await asyncio.sleep(0.505)
        task.cancel()
        return await task

    records = run(main())
    assert records.interrupted
    outcomes = [r.outcome for r in records.requests]
    assert outcomes == ["completed"] * 23 + [None] * 3
    assert told == [(i + 1, 50) for i in range(23)]
    assert dict(judge(records.requests, planned=50, interrupted=True).reasons)["incomplete"]


def test_what_is_sampled_beside_a_run_lasts_as_long():
    async def sample(clock, samples: list[Sample]) -> None:
        while True:
            samples.append(Sample(clock.now(), "x", {}, 1.0))
            await asyncio.sleep(0.1)

    records, _ = driven(constant(16, 50.0), beside=[sample])
    assert [s.time_ns // MS for s in records.telemetry] == [0, 100, 200, 300]


# the engine in this process


def engine(**options) -> Engine:
    return Engine(tiny("llama"), EngineConfig(num_blocks=64, **options))


def test_the_engines_own_stamps_are_the_records():
    made = engine()
    load = synthetic(5, input_tokens=20, output_tokens=(4, 7))
    records = run_service(lambda: EngineService(made), load, pacing=ClosedLoop(2))
    assert [r.output_tokens for r in records.requests] == [4, 7, 4, 7, 4]
    assert {r.prompt_tokens for r in records.requests} == {20}
    own = {r.request_id: r for r in made.records}
    for record in records.requests:
        assert record.token_ns == own[record.request_id].token_ns
        assert record.first_step == own[record.request_id].first_step >= 0
        assert len(records.outputs[record.request_id]) == record.output_tokens
        assert record.requested_tokens == record.output_tokens
    assert len(records.steps) == len(made.steps) > 0
    assert_empty(made)


def test_the_engine_refuses_and_gives_up_like_a_server():
    made = engine(max_model_len=64)
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    load = Workload(
        "w",
        (
            TimedRequest("long", Synthetic(500)),
            TimedRequest("short", Synthetic(8), SamplingParams(max_tokens=2)),
        ),
    )
    records = run_service(lambda: EngineService(made), load)
    assert [r.outcome for r in records.requests] == ["rejected", "completed"]
    assert "500" in records.requests[0].error
    assert_empty(made)

    made = engine()
    load = Workload("w", (TimedRequest("r", Synthetic(8), endless),))
    records = run_service(lambda: EngineService(made), load, timeout_s=0.05)
    assert records.requests[0].outcome in ("timed_out", "completed")
    assert sum(records.requests[0].chunk_tokens) == records.requests[0].output_tokens
    assert_empty(made)


def test_timers_of_the_drivers_loop_are_never_early():
    async def sleeps() -> list[float]:
        loop, late = asyncio.get_running_loop(), []
        for seconds in (0.0001, 0.0012, 0.0031):
            due = loop.time() + seconds
            await asyncio.sleep(seconds)
            late.append(loop.time() - due)
        return late

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert min(runner.run(sleeps())) >= -1e-6
