"""What a Prometheus scrape finds: the field's usual names under `perflab:`, one registry per app.

Owns counters and histograms of requests and steps; gauges are read from the engine at the scrape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from perflab.clock import NS_PER_S
from perflab.engine.engine import Engine
from perflab.types import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_GAPS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2,
)
_LONG = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class Metrics:
    """Fed by the answers as they are written; `text` is what `/metrics` sends."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model = model_name
        self._seen_step = -1
        self.registry = CollectorRegistry()
        self.skip_steps()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"perflab:{name}", what, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Any:
            made = Histogram(
                f"perflab:{name}", what, ("model_name",), buckets=buckets, registry=self.registry
            )
            return made.labels(model_name)

        one = {"model_name": model_name}
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests with a first token.").labels(
            **one
        )
        self.generation_tokens = counter("generation_tokens", "Tokens generated and delivered.").labels(**one)
        self._preemptions = counter("num_preemptions", "Requests pushed out of memory.").labels(**one)
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up.").labels(**one)
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.").labels(**one)
        self._drafted = counter("spec_decode_num_draft_tokens", "Guesses verified.").labels(**one)
        self._accepted = counter("spec_decode_num_accepted_tokens", "Guesses that held.").labels(**one)
        self._success = counter("request_success", "Samples that ended, by reason.", "finished_reason")
        self._refused = counter("request_refused", "Requests answered with an error, by code.", "code")
        self._ttft = histogram("time_to_first_token_seconds", "From the request's first byte.", _SECONDS)
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between deliveries of one sample.", _GAPS
        )
        self._tpot = histogram("time_per_output_token_seconds", "(last − first token) / (N − 1).", _GAPS)
        self._e2e = histogram("e2e_request_latency_seconds", "First byte to last token.", _LONG)
        self._queue = histogram("request_queue_time_seconds", "Waiting for the first step.", _LONG)
        self._iteration = histogram("iteration_tokens_total", "Tokens computed per step.", _TOKENS)
        self.registry.register(self)

    def refused(self, code: str | None) -> None:
        self._refused.labels(self._model, code or "error").inc()

    def first_token(self, record: RequestRecord, time_ns: int) -> None:
        self._ttft.observe((time_ns - record.intended_ns) / NS_PER_S)
        self.prompt_tokens.inc(record.prompt_tokens)
        self._queries.inc(record.prompt_tokens)
        self._hits.inc(record.cached_tokens)
        if record.admitted_ns is not None:
            self._queue.observe((record.admitted_ns - record.sent_ns) / NS_PER_S)

    def ended(self, record: RequestRecord, reason: str) -> None:
        """Nothing more comes of this sample."""
        self._success.labels(self._model, reason).inc()
        if record.outcome == "completed" and record.last_token_ns is not None:
            self._e2e.observe((record.last_token_ns - record.intended_ns) / NS_PER_S)
            if record.output_tokens > 1 and record.first_token_ns is not None:
                length = record.last_token_ns - record.first_token_ns
                self._tpot.observe(length / (record.output_tokens - 1) / NS_PER_S)
        self.take_steps()

    def skip_steps(self) -> None:
        """Leave out what the engine has done so far: the warm-up."""
        steps = self._engine.steps
        self._seen_step = steps[-1].index if steps else -1

    def take_steps(self) -> None:
        """Count the steps since the last call, as far as the engine still keeps them."""
        steps = self._engine.steps
        for step in steps[max(0, self._seen_step + 1 - steps[0].index) if steps else 0 :]:
            self._iteration.observe(step.prefill_tokens + step.decode_tokens)
            self._preemptions.inc(step.preempted)
            self._drafted.inc(step.draft_tokens)
            self._accepted.inc(step.accepted_tokens)
            self._seen_step = step.index

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's protocol: the engine's state now."""
        scheduler = self._engine.scheduler
        pool = scheduler.kv.pool
        for name, what, value in (
            ("num_requests_running", "Requests in the running batch.", len(scheduler.running)),
            ("num_requests_waiting", "Requests in the queue.", len(scheduler.waiting)),
            ("kv_cache_usage_perc", "KV blocks in use, 1 is all.", pool.num_used / max(1, pool.num_blocks)),
        ):
            gauge = GaugeMetricFamily(f"perflab:{name}", what, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge

    def text(self) -> bytes:
        self.take_steps()
        return generate_latest(self.registry)
