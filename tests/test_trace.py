"""Exports of runs and profiles: exact trace events on one axis, OpenTelemetry spans, speedscope files."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from perflab.clock import NS_PER_S
from perflab.errors import PerflabError
from perflab.report import otel
from perflab.report.trace import ENGINE, MACHINE, REQUESTS, chrome_trace, life, write_trace
from perflab.studies.store import Run
from perflab.types import EventRecord, RequestRecord, Sample, Span, StepRecord

US = 1000
START = 5_000_000


def request(name: str, start_us: int, first_us: int, end_us: int, **given: Any) -> RequestRecord:
    start, first, end = (START + t * US for t in (start_us, first_us, end_us))
    facts: dict[str, Any] = {
        "admitted_ns": start + 10 * US,
        "outcome": "completed",
        "finish_reason": "length",
    }
    return RequestRecord(
        name,
        start,
        start,
        7,
        first_token_ns=first,
        last_token_ns=end,
        end_ns=end,
        output_tokens=2,
        token_ns=[first, end],
        chunk_tokens=[1, 1],
        spans=[Span("queue", start, start + 10 * US)],
        **facts | given,
    )


def step(index: int, start_us: int) -> StepRecord:
    stamps = [START + (start_us + t) * US for t in (0, 1, 3, 60, 70, 75, 80)]
    return StepRecord(index, *stamps, rows=1, running=2, waiting=1, kv_blocks_used=3, decode_tokens=1)


def run() -> Run:
    requests = [request("a", 0, 100, 200), request("b", 50, 150, 250), request("c", 210, 220, 300)]
    return Run(
        {"started_ns": START, "ended_ns": START + NS_PER_S, "ended_at": "2026-01-02T03:04:05+00:00"},
        requests,
        [step(0, 10), step(1, 100)],
        [EventRecord(START + 120 * US, "preempted", "b", {"blocks": 2})],
        telemetry=[Sample(START + 90 * US, "core_busy", {"core": "1"}, 0.5)],
    )


def test_everything_is_on_one_axis_in_microseconds() -> None:
    events = chrome_trace(run())["traceEvents"]
    slices = {(e["pid"], e["name"], e["ts"]): e for e in events if e["ph"] == "X"}
    assert slices[ENGINE, "step 1", 100.0]["dur"] == 80
    assert slices[ENGINE, "forward", 103.0]["dur"] == 57
    assert slices[REQUESTS, "b", 50.0]["dur"] == 200
    assert slices[REQUESTS, "decode", 150.0]["dur"] == 100
    (mark,) = (e for e in events if e["ph"] == "i")
    assert (mark["name"], mark["ts"], mark["args"]) == ("preempted", 120.0, {"subject": "b", "blocks": "2"})
    (sample,) = (e for e in events if e["pid"] == MACHINE and e["ph"] == "C")
    assert (sample["ts"], sample["args"]) == (90.0, {"core 1": 0.5})
    counters = Counter(e["name"] for e in events if e["ph"] == "C" and e["pid"] == ENGINE)
    assert counters == {"requests": 2, "KV blocks": 2, "tokens in the step": 2}


def test_requests_share_lanes_only_when_they_do_not_overlap() -> None:
    events = chrome_trace(run())["traceEvents"]
    lanes = {
        e["name"]: e["tid"]
        for e in events
        if e["ph"] == "X" and e["pid"] == REQUESTS and "outcome" in e["args"]
    }
    assert lanes == {"a": 1, "b": 2, "c": 1}


def test_slices_of_one_lane_nest() -> None:
    """Perfetto drops slices that cross: in each lane one either holds the other or ends before it."""
    overlapping = request("a", 0, 100, 200)
    overlapping.spans += [
        Span("tokenise", START - 5 * US, START + 5 * US),
        Span("server", START, START + 500 * US),
    ]
    whole = run()
    whole.requests = [overlapping, *whole.requests[1:]]
    by_lane: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in chrome_trace(whole)["traceEvents"]:
        if e["ph"] == "X":
            by_lane.setdefault((e["pid"], e["tid"]), []).append((e["ts"], -e["dur"]))
    for found in by_lane.values():
        open_until: list[float] = []
        for start, minus in sorted(found):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or start - minus <= open_until[-1]
            open_until.append(start - minus)


def test_a_request_that_failed_before_any_token_is_there_too() -> None:
    failed = RequestRecord("x", START, START + US, 3, end_ns=START + 9 * US, outcome="failed", error="reset")
    events = chrome_trace(Run({"started_ns": START}, [failed], [], []))["traceEvents"]
    (found,) = (e for e in events if e["ph"] == "X")
    assert (found["dur"], found["args"]["error"]) == (9.0, "reset")


def test_a_long_run_is_cut_and_says_so(tmp_path: Path) -> None:
    long = run()
    long.steps = [step(i, 100 * i) for i in range(1000)]
    trace = chrome_trace(long, max_events=500)
    assert len(trace["traceEvents"]) <= 500
    shown = sum(e["name"].startswith("step ") for e in trace["traceEvents"] if e["ph"] == "X")
    assert trace["otherData"]["steps left out"] == 1000 - shown > 900
    assert json.loads(write_trace(tmp_path / "trace.json", run()).read_text()) == chrome_trace(run())


def test_the_pieces_of_a_request_are_consecutive() -> None:
    record = request("a", 0, 100, 200)
    assert record.end_ns is not None
    found = [(name, (s - START) // US, (e - START) // US) for name, s, e in life(record, record.end_ns)]
    assert found == [("queue", 0, 10), ("prefill", 10, 100), ("decode", 100, 200)]


def test_spans_reach_an_exporter_with_their_pieces() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter"
    ).InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    whole = run()
    whole.manifest["service"] = {"model": "m", "endpoint": "chat", "url": "http://host:8000/v1"}
    whole.requests[1].outcome, whole.requests[1].error = "timed_out", "after 1 s"
    assert otel.export(whole, provider) == 3

    spans = memory.get_finished_spans()
    roots = {s.attributes["gen_ai.response.id"]: s for s in spans if s.parent is None}
    a, b = roots["a"], roots["b"]
    assert a.name == "chat m"
    assert a.attributes["gen_ai.usage.output_tokens"] == 2
    assert (a.attributes["server.address"], a.attributes["server.port"]) == ("host", 8000)
    assert a.end_time - a.start_time == 200 * US
    wall_end = 1_767_323_045 * NS_PER_S  # the manifest's ended_at
    assert a.start_time == wall_end - NS_PER_S
    children = {
        s.name: s.end_time - s.start_time for s in spans if s.parent and s.parent.span_id == a.context.span_id
    }
    assert children == {"queue": 10 * US, "prefill": 90 * US, "decode": 100 * US}
    assert (b.attributes["error.type"], b.status.description) == ("timed_out", "after 1 s")
    assert "error.type" not in a.attributes
    assert a.events[0].name == "first token"


def test_names_are_those_of_the_conventions() -> None:
    conventions = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    known = {value for value in vars(conventions).values() if isinstance(value, str)}
    used = otel.attributes(request("a", 0, 1, 2, seed=1, session_id="s", requested_tokens=2), run())
    assert {name for name in used if name.startswith("gen_ai.")} <= known


def test_spans_go_to_an_endpoint_and_a_refusal_is_an_error() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    taken: list[int] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert otel.export(run(), endpoint=f"{address}/v1/traces") == 3
        assert taken
        assert taken[0] > 500
        with pytest.raises(PerflabError, match="did not take"):
            otel.export(run(), endpoint=f"{address}/elsewhere")
        server.shutdown()
