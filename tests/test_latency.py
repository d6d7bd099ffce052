"""The decomposition closes where every moment is stamped, and shows what is not."""

from __future__ import annotations

import pytest

from perflab.config import EngineConfig
from perflab.engine.engine import Engine
from perflab.load.arrivals import Arrivals
from perflab.load.run import run_load
from perflab.load.workloads import PromptEncoder, synthetic
from perflab.measure import latency
from perflab.models.tiny import tiny
from perflab.types import RequestRecord, Span, StepRecord

NS = 1_000_000_000


def step(index: int, start: int, hops=(1, 1, 10, 2, 1, 1)) -> StepRecord:
    """A step from its start and the lengths of its six hops, in seconds."""
    stamps = [start]
    for hop in hops:
        stamps.append(stamps[-1] + hop)
    return StepRecord(index, *(s * NS for s in stamps))


def record(
    first_step: int, first_token_step: int, last_step: int, last_token: int, spans=(), intended: int = 0
):
    return RequestRecord(
        request_id="r",
        intended_ns=intended * NS,
        sent_ns=2 * NS,
        prompt_tokens=4,
        first_token_ns=last_token * NS,
        last_token_ns=last_token * NS,
        output_tokens=1,
        outcome="completed",
        first_step=first_step,
        first_token_step=first_token_step,
        last_step=last_step,
        spans=[Span(name, a * NS, b * NS) for name, a, b in spans],
    )


def test_a_fully_stamped_request_has_no_residual():
    steps = [step(0, 5), step(1, 21), step(2, 37)]
    r = record(0, 1, 2, last_token=52, spans=[("client_queue", 0, 2), ("queue", 2, 5)])
    d = latency.decompose(r, steps)
    assert d.e2e_s == 52
    assert d.segments == {
        "client queue": 2,
        "queue": 3,
        "schedule": 3,
        "batch": 3,
        "prefill forward": 20,
        "decode forward": 10,
        "sample": 6,
        "commit": 3,
        "detokenise": 2,  # the last step is cut at the delivery of the token
    }
    assert d.residual_s == pytest.approx(0)


def test_unstamped_time_between_steps_is_the_residual():
    r = record(0, 0, 1, last_token=45, spans=[("queue", 0, 5)])
    d = latency.decompose(r, [step(0, 5), step(1, 30)])
    assert d.residual_s == pytest.approx(9)


def test_steps_while_preempted_do_not_count_twice():
    steps = [step(i, 16 * i) for i in range(5)]
    r = record(0, 0, 4, last_token=80, spans=[("requeue", 16, 64)])
    d = latency.decompose(r, steps)
    assert d.segments["requeue"] == 48
    assert d.segments["decode forward"] == 10
    assert d.residual_s == pytest.approx(0)


def test_a_request_without_a_token_has_no_decomposition():
    r = record(0, 0, 0, last_token=1)
    r.last_token_ns = None
    assert latency.decompose(r, [step(0, 0)]) is None
    r.outcome = "failed"
    assert latency.average([r], [step(0, 0)]) is None


def test_a_request_of_a_foreign_server_is_all_residual():
    d = latency.decompose(record(-1, -1, -1, last_token=7, spans=[("client_queue", 0, 2)]), [])
    assert d.segments == {"client queue": 2}
    assert d.residual_s == 5


def test_the_average_closes_like_its_parts():
    steps = [step(0, 5), step(1, 21), step(2, 37)]
    rs = [
        record(0, 0, 0, last_token=21, spans=[("queue", 0, 5)]),
        record(0, 1, 2, last_token=53, spans=[("queue", 0, 5)]),
    ]
    mean = latency.average(rs, steps)
    assert mean.e2e_s == 37
    assert mean.segments["decode forward"] == 5
    assert list(mean.segments) == [s for s in latency.SEGMENTS if s in mean.segments]
    assert mean.residual_s == pytest.approx(0)


def test_step_shares_sum_to_one():
    shares = latency.step_shares([step(0, 0), step(1, 20)])
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["forward"] == pytest.approx(10 / 16)
    assert latency.step_shares([]) is None


class TickingClock:
    """One microsecond per look: what the spans leave out shows as whole ticks, on any machine."""

    def __init__(self) -> None:
        self.ns = 0

    def now(self) -> int:
        self.ns += 1000
        return self.ns

    def sleep_until(self, time_ns: int) -> None:
        self.ns = max(self.ns, time_ns)


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


@pytest.mark.parametrize(
    "switches",
    [
        {"num_blocks": 4, "max_num_seqs": 4},  # forces preemption
        {"max_num_seqs": 4, "max_num_batched_tokens": 16},
        {"kv_cache": False, "max_num_seqs": 2},
        {"batching": "dynamic", "batch_timeout_s": 1e-4, "max_num_seqs": 3},
        {"batching": "static", "max_num_seqs": 3, "prefix_cache": False, "attention": "sdpa"},
    ],
)
def test_the_engines_own_stamps_close(model, switches):
    config = EngineConfig(**{"max_num_batched_tokens": 64, "num_blocks": 64, **switches})
    engine = Engine(model, config, clock=TickingClock())
    arrivals = Arrivals("constant", rate_per_s=20_000)
    workload = synthetic(requests=8, input_tokens=30, output_tokens=(12, 8), arrivals=arrivals)
    run = run_load(engine, workload, PromptEncoder(model.encode, model.chat))
    preempted = [r for r in run.requests if r.preemptions]
    assert bool(preempted) == (config.num_blocks == 4)
    for r in run.requests:
        split = latency.decompose(r, run.steps)
        assert split.segments.get("requeue", 0) > 0 or not r.preemptions
        # Between two steps the loop looks at the clock a few times, and for each request that it sends.
        ticks = round(split.residual_s * 1e6)
        assert 0 <= ticks <= 3 * (r.last_step - r.first_step + 1) + 5 * len(run.requests)
