"""Runs against a service as they are on disk, made by hand: times in milliseconds, no service anywhere."""

from __future__ import annotations

from typing import Any

from perflab.studies.store import Run
from perflab.types import EventRecord, RequestRecord, Sample, Span

MS = 1_000_000
START = 5_000_000 * MS


def request(index: int, at_ms: float, ttft_ms: float, gap_ms: float, tokens: int = 5, **more: Any):
    """A request that completed: one token a chunk, evenly spaced."""
    intended = START + round(at_ms * MS)
    first = intended + round(ttft_ms * MS)
    times = [first + round(i * gap_ms * MS) for i in range(tokens)]
    spans = [Span("server_wait", intended, first), Span("stream", first, times[-1])]
    return RequestRecord(
        f"r{index}", intended, intended, 16, None, first, times[-1], times[-1], tokens,
        token_ns=times, chunk_tokens=[1] * tokens, outcome="completed", finish_reason="length",
        spans=spans, **more,
    )  # fmt: skip


def refused(index: int, at_ms: float, **more: Any) -> RequestRecord:
    """A request that was answered with 503 after a millisecond."""
    intended = START + round(at_ms * MS)
    return RequestRecord(
        f"r{index}", intended, intended, 16, end_ns=intended + MS, outcome="rejected",
        finish_reason="rejected", error="HTTP 503", **more,
    )  # fmt: skip


def bench(
    name: str = "http://127.0.0.1:8000",
    number: int = 0,
    *,
    ttft_ms: float = 100.0,
    requests: int = 40,
    refuses: int = 0,
    ended: str = "2026-01-01T10:00:00+00:00",
    **facts: Any,
) -> Run:
    """An open-loop run of two classes, one request each 50 ms, the last `refuses` of them refused.

    TTFT varies a little by request and round, so that percentiles and intervals have something to say.
    """
    records = [
        refused(i, 50 * i, request_class="chat")
        if i >= requests - refuses
        else request(
            i, 50 * i, ttft_ms * (1 + 0.002 * (i % 7) + 0.003 * number), 10.0,
            request_class=("chat", "batch")[i % 2],
        )
        for i in range(requests)
    ]  # fmt: skip
    samples = [
        Sample(START + i * 500 * MS, name, labels, value)
        for i in range(4)
        for name, labels, value in (
            ("running", {"source": "vllm:num_requests_running"}, float(i)),
            ("kv_use", {"source": "vllm:kv_cache_usage_perc"}, 0.1 * i),
            ("output_tokens", {"source": "vllm:generation_tokens_total"}, 1000.0 + 50 * i),
            ("core_busy", {"core": "0"}, 0.5),
            ("process_rss", {}, 2.0**30),
        )
    ]
    reasons = [["failures", f"{refuses} of {requests} requests"]] if refuses else []
    manifest = {
        "kind": "bench",
        "variant": name,
        "round": number,
        "ended_at": ended,
        "started_ns": START,
        "model": {"name": "m"},
        "service": {"kind": "http", "url": name},
        "load": {"kind": "synthetic", "rate_per_s": 20.0, "arrivals": "constant", "seed": number},
        "slo": {"ttft_s": 0.2, "tpot_s": None, "e2e_s": None},
        "workload": {"requests": requests, "open_loop": True},
        "client": {"loop_lag_p99_s": 0.002, "send_lateness_p99_s": 0.001, "cpu_share": 0.3},
        "validity": {"reasons": reasons, "notes": []},
        **facts,
    }
    return Run(manifest, records, [], [EventRecord(START + 700 * MS, "unready", "server")], telemetry=samples)
