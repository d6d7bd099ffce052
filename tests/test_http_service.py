"""An OpenAI-compatible server's answers, played from scripts at exact times: what the records then hold."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perflab.clock import NS_PER_S, clock_id
from perflab.errors import ServiceError, WorkloadError
from perflab.load.http_service import HTTPService
from perflab.load.pacing import ClosedLoop
from perflab.load.prompts import Chat
from perflab.load.sse import Answer, EventReader, apportion
from perflab.load.workloads import TimedRequest
from perflab.measure import metrics
from perflab.measure.metrics import SLO
from perflab.types import RequestRecord, SamplingParams
from tests.scripted_server import CLOSE, MS, RESET, end, play, sse, token, workload


def only(script, **options) -> RequestRecord:
    records, _ = play(script, **options)
    assert len(records.requests) == 1
    return records.requests[0]


def stream(first_ms: float, gap_ms: float, n: int, usage: int | None = None, text: str = "w "):
    """`n` one-token chunks and the end beside the last."""
    times = [first_ms + i * gap_ms for i in range(n)]
    return [*((ms, token(text)) for ms in times), (times[-1], end(n if usage is None else usage))]


# what counts, and when


def test_many_tokens_a_chunk():
    script = [(100, token("w "))] + [(100 + 40 * i, token("w w w w ")) for i in range(1, 17)]
    record = only([*script, (740, end(65))])
    assert metrics.ttft_s(record) == 0.1
    assert metrics.itl_s(record) == [0.04] * 16
    assert metrics.tpot_s(record) == 0.64 / 64 == 0.01
    assert metrics.tokens_per_chunk(record) == [1] + [4] * 16
    assert record.output_tokens == 65
    assert record.count_source == "usage"
    mean = 65 / 0.74
    peak = max(4 / 0.04, 1 / 0.1)
    assert peak >= mean


def test_mean_gap_leaves_the_first_wait_out():
    record = only(stream(500, 20, 50))
    gaps = metrics.itl_s(record)
    assert gaps == [0.02] * 49
    assert sum(gaps) + metrics.ttft_s(record) == pytest.approx(metrics.e2e_s(record), abs=1e-12)
    assert metrics.e2e_s(record) == 1.48


def test_one_token_has_no_gap_and_no_tpot_but_is_judged():
    record = only(stream(500, 20, 1))
    assert (metrics.itl_s(record), metrics.tpot_s(record)) == ([], None)
    assert metrics.goodput([record], SLO(ttft_s=0.6, tpot_s=0.01)).met == 1
    assert metrics.goodput([record], SLO(ttft_s=0.4)).met == 0


ROLE = sse(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])


@pytest.mark.parametrize(
    "noise",
    [
        ROLE,
        b": keep-alive\n\n",
        b":\n\n",
        b"event: ping\ndata:\n\n",
        b"\n\n",
        b"retry: 3000\n\n",
        sse(choices=[]),
    ],
)
def test_what_brings_no_token_is_no_first_token(noise: bytes):
    script = [(5, noise), (200, token()), (210, noise), (220, token()), (240, token()), (250, noise)]
    record = only([*script, (250, end(3))])
    assert record.token_ns == [200 * MS, 220 * MS, 240 * MS]
    assert record.error is None
    assert (record.output_tokens, record.server_prompt_tokens) == (3, 3)
    assert metrics.ttft_s(record) == 0.2
    assert next(span for span in record.spans if span.name == "first_byte").end_ns == 5 * MS


@pytest.mark.parametrize("channel", ["reasoning", "reasoning_content"])
def test_thinking_is_generating(channel: str):
    script = [(150 + 50 * i, token("t ", channel)) for i in range(37)]
    details = {"completion_tokens_details": {"reasoning_tokens": 37}}
    record = only([*script, (2000, token()), (2050, token()), (2050, end(39, **details))])
    assert metrics.ttft_s(record) == 0.15
    assert record.first_content_ns == 2000 * MS
    assert metrics.tpot_s(record) == pytest.approx(1.9 / 38)
    assert record.reasoning_tokens == 37
    cut = only([*script, (2000, end(37, reason="length", **details))])
    assert (cut.first_token_ns, cut.first_content_ns) == (150 * MS, None)
    assert (cut.outcome, cut.finish_reason) == ("completed", "length")


def test_missing_values_are_not_zeros_in_percentiles():
    records, _ = play(
        lambda i: (
            stream(150, 10, 4) if i % 2 else [(150, token("t ", "reasoning")), (160, end(1, reason="length"))]
        ),
        workload(6, 1.0),
    )
    contents = [r.first_content_ns for r in records.requests]
    assert [c is None for c in contents] == [True, False] * 3
    assert metrics.samples(records.requests, metrics.ttft_s) == [0.15] * 6
    assert metrics.per_token_samples(records.requests) == pytest.approx([0.01] * 3)


# counting


def spaces(text: str) -> int:
    """A tokenizer that takes runs of up to 15 spaces for one token."""
    return -(-len(text) // 15)


def test_usage_is_trusted_before_the_tokenizer_and_both_are_kept():
    record = only(stream(100, 10, 100, text=" "), make={"count": spaces})
    assert (record.output_tokens, record.count_source) == (100, "usage")
    assert record.retokenised_tokens == 7
    assert metrics.tpot_s(record) == pytest.approx(0.01)


def test_without_usage_the_tokenizer_counts_else_the_chunks():
    script = [(100 + 10 * i, token(" ")) for i in range(100)] + [(1090, end())]
    record = only(script, make={"count": spaces})
    assert (record.output_tokens, record.count_source, sum(record.chunk_tokens)) == (7, "retokenised", 7)
    assert only(script).count_source == "chunks"
    assert only(script).output_tokens == 100


@pytest.mark.parametrize(
    "more",
    [
        {"token_ids": [1, 2, 3]},
        {"logprobs": {"content": [{}, {}, {}]}},
        {"logprobs": {"tokens": ["a", "b", "c"]}},
    ],
)
def test_token_ids_and_logprobs_count_exactly(more: dict):
    record = only([(10, token("w", **more)), (20, token("", token_ids=[7])), (20, end(99))])
    assert (record.chunk_tokens, record.count_source) == ([3, 1], "token_ids")
    assert record.server_output_tokens == 99


def test_length_asked_and_length_given():
    record = only(stream(10, 1, 382), load=workload(max_tokens=5000))
    assert (record.requested_tokens, record.output_tokens) == (5000, 382)


@given(st.integers(0, 500), st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_apportion_keeps_the_total_and_is_fair(total: int, weights: list[int]):
    parts = apportion(total, weights)
    assert sum(parts) == total
    assert min(parts) >= (1 if total >= len(weights) else 0)
    pairs = sorted(zip(weights, parts, strict=True))
    assert all(a[1] <= b[1] + 1 for a, b in itertools.pairwise(pairs))


# the wire


WIRE = (
    b": hello\r\n\r\n"
    + ROLE
    + token("f\u00fcr ").replace(b"\n", b"\r\n")
    + b'data: {"choices": [{"index": 0,\ndata: "delta": {"content": "two"}}]}\n\n'
    + sse(choices=[{"text": " three"}])
    + end(3).replace(b"\n", b"\r")
)


@given(st.lists(st.integers(1, len(WIRE) - 1), max_size=8))
def test_reads_may_end_anywhere(cuts: list[int]):
    answer = Answer()
    reader, ends = EventReader(answer), sorted({*cuts, len(WIRE)})
    for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
        reader.feed(WIRE[a:b], i)
    reader.close(len(ends))
    assert "".join(answer.content) == "f\u00fcr two three"
    assert (answer.end(), answer.error, answer.usage["completion_tokens"]) == ("stop", None, 3)
    assert answer.times == sorted(answer.times)


def test_events_of_one_read_share_its_time():
    record = only(
        [(100, token() + token() + token()), (150, token()[:20]), (160, token()[20:]), (160, end(4))]
    )
    assert record.token_ns == [100 * MS] * 3 + [160 * MS]
    assert metrics.itl_s(record) == [0.0, 0.0, 0.06]


def test_done_may_be_missing_where_a_reason_came():
    finish = sse(choices=[{"delta": {}, "finish_reason": "length"}])
    assert only([(10, token()), (20, finish)]).finish_reason == "length"
    assert only([(10, token()), (20, b"data: [DONE]")]).finish_reason == "stop"
    cut = only([(10, token()), (20, b"")])
    assert (cut.outcome, cut.output_tokens) == ("failed", 1)
    assert "without a finish reason" in cut.error


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (sse(error={"message": "out of memory", "code": 500}), "error in the stream: out of memory"),
        (b'error: {"message": "slot gone"}\n\n', "slot gone"),
        (b"data: {broken\n\n", "malformed JSON in the answer: {broken"),
        (b"data: [1]\n\n", "no JSON object"),
        (sse(choices=[{"delta": {}, "finish_reason": "abort"}]), "'abort'"),
        (sse(choices=["x"]), "malformed"),
    ],
)
def test_errors_in_the_stream_are_named_and_what_came_is_kept(bad: bytes, words: str):
    record = only([(10, token()), (30, token()), (40, bad), (50, end(2))])
    assert (record.outcome, record.finish_reason) == ("failed", "error")
    assert words in record.error
    assert record.token_ns == [10 * MS, 30 * MS]
    assert (metrics.ttft_s(record), metrics.e2e_s(record)) == (0.01, None)


def test_an_answer_without_a_token_is_a_failure():
    record = only([(10, ROLE + end(0))])
    assert (record.outcome, record.error) == ("failed", "an answer without a token")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([(30, RESET)], "connection lost before the answer"),
        ([(10, token()), (20, token()), (30, RESET)], "connection lost after 2 chunks"),
        ([(10, token()), (20, token()), (30, CLOSE)], "connection lost after 2 chunks"),
    ],
)
def test_a_lost_connection_is_named(script, words: str):
    record = only(script)
    assert (record.outcome, record.end_ns) == ("failed", 30 * MS)
    assert words in record.error


# refusals and retries


def plain(status: str, more: str = ""):
    return lambda i: f"{status}\r\nContent-Type: application/json{more}"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("429 Too Many", "rejected"),
        ("503 Full", "rejected"),
        ("408 Late", "timed_out"),
        ("504 Late", "timed_out"),
        ("400 Bad", "failed"),
        ("500 Oh", "failed"),
        ("401 No", "failed"),
        ("307 There", "failed"),
    ],
)
def test_statuses(status: str, outcome: str):
    body = json.dumps({"error": {"message": "queue is full"}}).encode()
    record = only([(7, body)], head=plain(status))
    assert (record.outcome, record.end_ns, record.token_ns) == (outcome, 7 * MS, [])
    assert record.error == f"HTTP {status[:3]}: queue is full"


def test_a_deadline_of_the_server_within_a_stream_is_a_timeout():
    late = sse(error={"message": "past its deadline", "type": "timeout_error", "code": "deadline_exceeded"})
    record = only([(10, token("w ")), (30, late)])
    assert (record.outcome, record.finish_reason) == ("timed_out", "deadline")
    assert (record.token_ns, record.end_ns) == ([10 * MS], 30 * MS), "what came before it is kept"


def test_refusing_is_no_way_to_be_fast():
    serves, _ = play(lambda i: stream(100, 100, 10), workload(10, 0.1))
    refuses, _ = play(
        lambda i: stream(50, 50, 10) if i % 2 else [(0, b"{}")],
        workload(10, 0.1),
        head=lambda i: "200 OK\r\nContent-Type: text/event-stream" if i % 2 else "503 Full",
    )
    p99 = [metrics.LATENCIES["E2E"](run.requests, 0.99).value for run in (serves, refuses)]
    assert p99 == [1.0, float("inf")]
    good = [metrics.goodput(run.requests, SLO(e2e_s=1.0)) for run in (serves, refuses)]
    assert [g.met for g in good] == [10, 5]
    assert metrics.samples(refuses.requests, metrics.e2e_s, success_only=True) == [0.5] * 5


def test_retries_are_counted_and_their_time_is_the_requests():
    record = only(
        lambda i: stream(100, 10, 3) if i == 2 else [(20, b"{}")],
        head=lambda i: (
            "200 OK\r\nContent-Type: text/event-stream" if i == 2 else "503 Full\r\nRetry-After: 0.5"
        ),
        make={"retries": 2},
    )
    assert (record.outcome, record.attempts, record.error) == ("completed", 3, None)
    assert metrics.ttft_s(record) == 1.14
    retries = [span for span in record.spans if span.name == "retry"]
    assert [(s.start_ns, s.end_ns) for s in retries] == [(0, 520 * MS), (520 * MS, 1040 * MS)]
    spent = only([(20, b"{}")], head=plain("503 Full"), make={"retries": 1, "retry_s": 0.1})
    assert (spent.outcome, spent.attempts, spent.end_ns) == ("rejected", 2, 140 * MS)


def test_a_connection_that_idled_out_is_made_again():
    records, server = play(lambda i: [(0, RESET)] if i == 1 else stream(10, 1, 2), workload(2, 1.0))
    assert [r.outcome for r in records.requests] == ["completed"] * 2
    assert [r.attempts for r in records.requests] == [1, 2]
    assert len(server.bodies) == 3


# time-outs and clients that leave


def test_timed_out_keeps_what_came_and_closes_the_connection():
    records, server = play([(100, token()), (200, token()), (900, end(3))], timeout_s=0.5)
    record = records.requests[0]
    assert (record.outcome, record.finish_reason, record.end_ns) == ("timed_out", "deadline", 500 * MS)
    assert record.token_ns == [100 * MS, 200 * MS]
    assert record.error == "timed out after 0.5 s"
    assert server.gone == [500.0]
    assert metrics.samples([record], metrics.e2e_s) == [float("inf")]
    assert metrics.samples([record], metrics.ttft_s) == [0.1]


def test_a_client_that_gave_up_waiting_is_gone_from_the_server():
    """A queue that keeps requests of clients that have left serves nobody: the server must see them go."""
    records, server = play(lambda i: stream(1000, 10, 2), workload(5), make={"first_byte_timeout_s": 0.3})
    assert {r.outcome for r in records.requests} == {"timed_out"}
    assert {r.error for r in records.requests} == {"no first byte within 0.3 s"}
    assert server.gone == [300.0] * 5
    slow = only([(100, token()), (1000, end(1))], make={"first_byte_timeout_s": 0.3})
    assert slow.outcome == "completed"


def test_nobody_listens():
    async def run():
        async with HTTPService("http://127.0.0.1:9", "m") as service:
            record = RequestRecord("r", 0, 0, 0)
            await service.send(TimedRequest("r", "x"), record)
            return record

    record = asyncio.run(run())
    assert record.outcome == "failed"
    assert record.error.startswith("no connection: ")


# spans, bodies, addresses


def test_spans_follow_each_other_and_close():
    records, server = play(lambda i: stream(100, 20, 5), workload(3, 1.0))
    first, second, _ = records.requests
    assert [s.name for s in first.spans] == ["connect", "send", "server_wait", "first_byte", "stream"]
    assert [s.name for s in second.spans] == ["send", "server_wait", "first_byte", "stream"]
    assert server.connections == 1
    for record in records.requests:
        at = record.intended_ns
        for span in record.spans:
            assert span.start_ns == at
            at = span.end_ns
        assert at == record.end_ns


def test_the_servers_own_spans_are_taken_where_the_clock_is_shared():
    extra = {
        "clock_id": clock_id(),
        "spans": [["queue", 1, 5], ["prefill forward", 5, 9]],
        "step_indices": [0],
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 1}

    def last(facts):
        return [(10, token()), (20, sse(choices=[], usage=usage, perflab=facts) + b"data: [DONE]\n\n")]

    spans = {s.name: (s.start_ns, s.end_ns) for s in only(last(extra)).spans}
    assert (spans["server.queue"], spans["server.prefill forward"]) == ((1, 5), (5, 9))
    assert not [s for s in only(last(extra | {"clock_id": "other"})).spans if s.name.startswith("server.")]


def test_a_body_that_is_not_streamed_has_no_first_token_time():
    body = {"choices": [{"message": {"content": "w w w"}, "finish_reason": "stop"}]}
    body["usage"] = {"prompt_tokens": 3, "completion_tokens": 3}
    record = only([(500, json.dumps(body).encode())], head=plain("200 OK"), make={"stream": False})
    assert (record.outcome, record.output_tokens, record.chunk_tokens) == ("completed", 3, [3])
    assert (metrics.ttft_s(record), metrics.tpot_s(record), metrics.e2e_s(record)) == (None, None, 0.5)
    broken = only([(500, b"<html>")], head=plain("200 OK"))
    assert broken.error == "malformed JSON in the answer: <html>"


def test_bodies_ask_for_what_the_workload_asks():
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=4, stop=("x",))
    load = workload()
    request = TimedRequest("r", Chat("hi", "be brief"), params)
    service = HTTPService("http://u:p@host:1/v1/", "m", api_key="secret", extra={"return_token_ids": True})
    assert service.body(request) == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "temperature": 0.0,
        "max_tokens": 9,
        "ignore_eos": True,
        "seed": 4,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    assert "secret" not in str(service.describe())
    assert service.describe()["url"] == "http://host:1/v1"
    _, server = play(stream(1, 1, 1), load, make={"endpoint": "completions"})
    assert server.bodies[0]["prompt"] == "a b c"


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1", "http://h:1/v1"),
        ("https://h/api/openai/", "https://h/api/openai"),
        ("http://h/v1/chat/completions", "http://h/v1"),
    ],
)
def test_addresses(given: str, base: str):
    assert HTTPService(given).base == base


def test_wrong_addresses_and_endpoints_say_what_to_do():
    with pytest.raises(WorkloadError, match="give a server's address"):
        HTTPService("localhost:8000")
    with pytest.raises(WorkloadError, match="choose one of chat, completions"):
        HTTPService("http://h", endpoint="responses")

    async def enter():
        async with HTTPService("http://127.0.0.1:9"):
            pass

    with pytest.raises(ServiceError, match=r"no server answers at http://127.0.0.1:9/v1"):
        asyncio.run(enter())


def test_users_stay_after_a_timeout():
    records, _ = play(
        lambda i: [(100, token()), (5000, end(1))] if i < 2 else stream(50, 10, 2),
        workload(6),
        pacing=ClosedLoop(2),
        timeout_s=0.5,
    )
    assert [r.outcome for r in records.requests] == ["timed_out"] * 2 + ["completed"] * 4
    assert [r.intended_ns // MS for r in records.requests] == [0, 0, 500, 500, 560, 560]
    assert (records.ended_ns - records.started_ns) / NS_PER_S == 0.62


def test_a_connection_that_is_not_kept_is_not_held():
    head = "200 OK\r\nContent-Type: text/event-stream\r\nConnection: close"
    records, server = play(lambda i: stream(10, 1, 2), workload(3, 1.0), head=lambda i: head)
    assert [r.outcome for r in records.requests] == ["completed"] * 3
    assert server.connections == 3


def test_a_body_may_end_with_its_connection():
    """HTTP/1.0's way: neither a length nor chunks."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + token() + end(1))
        writer.close()

    async def run() -> RequestRecord:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with (
            server,
            HTTPService(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m") as service,
        ):
            await service.send(TimedRequest("r", "x"), record := RequestRecord("r", 0, 0, 0))
            assert not service._client.idle
            return record

    record = asyncio.run(run())
    assert (record.outcome, record.output_tokens) == ("completed", 1)


@pytest.mark.parametrize(
    "answer", [b"no http at all\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
)
def test_what_is_no_http_is_named(answer: bytes):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)

    async def run() -> RequestRecord:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with (
            server,
            HTTPService(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m") as service,
        ):
            await service.send(TimedRequest("r", "x"), record := RequestRecord("r", 0, 0, 0))
            return record

    record = asyncio.run(run())
    assert record.outcome == "failed"
    assert "no HTTP" in record.error
