"""The decomposition closes where every moment is stamped, and shows what is not."""

from __future__ import annotations

from itertools import pairwise

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


SERVED = [
    ("client_queue", 0, 2),
    ("tokenise", 2, 3),
    ("connect", 3, 5),
    ("send", 5, 8),
    ("server_wait", 8, 15),
    ("first_byte", 15, 16),
    ("stream", 16, 41),
]


def test_what_a_foreign_server_took_is_unattributed():
    d = latency.decompose(record(-1, -1, -1, last_token=40, spans=SERVED))
    assert d.segments == {"client queue": 2, "tokenise": 1, "connect": 2, "send": 3, "unattributed": 32}
    assert d.residual_s == 0


def test_a_server_on_the_same_clock_stands_for_the_clients_wait():
    server = [
        ("server.receive", 7, 9),
        ("server.tokenise", 9, 10),
        ("server.queue", 11, 13),
        ("server.prefill forward", 13, 20),
        ("server.decode forward", 20, 30),
        ("server.hand_back", 30, 32),
        ("server.serialise", 32, 33),
        ("server.write", 33, 36),
    ]
    r = record(-1, -1, -1, last_token=40, spans=[*SERVED, *server])
    d = latency.decompose(r)
    assert d.segments == {
        "client queue": 2,
        "tokenise": 1,
        "connect": 2,
        "network up": 2,
        "receive": 2,
        "server tokenise": 1,
        "queue": 2,
        "prefill forward": 7,
        "decode forward": 10,
        "hand back": 2,
        "serialise": 1,
        "write": 3,
        "network down": 4,
    }
    assert d.residual_s == 1  # between the server's tokenise and its queue nobody looked at the clock
    assert list(d.segments) == [s for s in latency.SEGMENTS if s in d.segments]
    way = latency.segments(r, [])
    assert all(a.end_ns <= b.start_ns for a, b in pairwise(way))
    assert way[0].start_ns == r.intended_ns
    assert way[-1].end_ns == r.last_token_ns


def test_a_write_that_the_client_overtook_is_cut_at_the_last_token():
    server = [("server.receive", 7, 9), ("server.serialise", 9, 38), ("server.write", 38, 44)]
    d = latency.decompose(record(-1, -1, -1, last_token=40, spans=[*SERVED, *server]))
    assert d.segments["write"] == 2
    assert "network down" not in d.segments
    assert d.residual_s == 0


def test_spans_that_end_before_the_write_leave_the_rest_open():
    """A server that lost track of its request must not have the gap booked as network."""
    d = latency.decompose(record(-1, -1, -1, last_token=40, spans=[*SERVED, ("server.receive", 7, 9)]))
    assert "network down" not in d.segments
    assert d.residual_s == 31


def test_closing_is_the_share_of_time_that_no_stamp_covers():
    parts = [
        latency.Decomposition(f"{i}", 10.0, {"queue": 10.0 - gap}) for i, gap in enumerate([0.1] * 99 + [5])
    ]
    found = latency.closing(parts)
    assert (found.requests, found.median, found.p99) == (100, pytest.approx(0.01), pytest.approx(0.01))
    assert latency.closing(parts[90:]).p99 == pytest.approx(0.5)
    overlapping = [latency.Decomposition("o", 10.0, {"queue": 11.0})]
    assert latency.closing(overlapping).median == pytest.approx(0.1)
    assert latency.closing([]) is None


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
