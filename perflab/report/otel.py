"""Requests as OpenTelemetry spans, under the names of its conventions for generative AI.

Owns the translation; where spans go is the caller's tracer provider, or an OTLP endpoint. Needs the
`otel` extra. Prompts and outputs are never in a span.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from perflab.clock import NS_PER_S
from perflab.errors import PerflabError
from perflab.measure import metrics
from perflab.report.trace import life
from perflab.studies.store import Run
from perflab.types import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

SCOPE = "perflab"
BATCH = 512  # spans of one message
_MISSING = "OpenTelemetry is not installed: pip install 'perflab[otel]'"


def attributes(record: RequestRecord, run: Run) -> dict[str, Any]:
    """`gen_ai.*`, `server.*` and `error.type` as OpenTelemetry's semantic conventions name them, `perflab.*`
    for what they have no name for (times there count from the intended start). Only what is known."""
    service, model = run.manifest.get("service", {}), run.manifest.get("model", {})
    name, first = service.get("model") or model.get("name"), record.first_token_ns
    where = urlsplit(str(service.get("url") or ""))
    found = {
        "gen_ai.operation.name": "chat" if service.get("endpoint") == "chat" else "text_completion",
        "gen_ai.provider.name": "perflab" if record.first_step >= 0 else "openai",
        "gen_ai.request.model": name,
        "gen_ai.request.max_tokens": record.requested_tokens,
        "gen_ai.request.seed": record.seed,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.response.finish_reasons": (record.finish_reason,) if record.finish_reason else None,
        "gen_ai.response.id": record.request_id,
        "gen_ai.conversation.id": record.session_id,
        "gen_ai.response.time_to_first_chunk": None if first is None else (first - record.sent_ns) / NS_PER_S,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": record.reasoning_tokens,
        "server.address": where.hostname,
        "server.port": where.port,
        "error.type": None if record.outcome in ("completed", None) else record.outcome,
        "perflab.variant": run.variant,
        "perflab.request_class": record.request_class,
        "perflab.ttft_s": metrics.ttft_s(record),
        "perflab.tpot_s": metrics.tpot_s(record),
        "perflab.preemptions": record.preemptions,
        "perflab.attempts": record.attempts,
    }
    return {key: value for key, value in found.items() if value is not None}


def export(run: Run, provider: TracerProvider | None = None, endpoint: str | None = None) -> int:
    """Send one span per request with its pieces as children; returns how many requests.

    The run's monotonic times are put on the wall clock by `ended_at` of its manifest. `endpoint`: an
    OTLP/HTTP address such as http://localhost:4318/v1/traces; the environment's OTEL_* settings where
    None. Raises PerflabError without the extra, or where the endpoint does not take them.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.trace import SpanKind, Status, StatusCode
    except ImportError:
        raise PerflabError(_MISSING) from None
    sender = _Sender() if provider is None else None
    tracer = (sender.provider if sender else provider).get_tracer(SCOPE)  # type: ignore[union-attr]
    shift = _wall_shift(run)
    for record in run.requests:
        end = max(filter(None, (record.end_ns, record.last_token_ns, record.sent_ns)))
        facts = attributes(record, run)
        span = tracer.start_span(
            f"{facts['gen_ai.operation.name']} {facts.get('gen_ai.request.model', '')}".strip(),
            kind=SpanKind.CLIENT,
            start_time=record.intended_ns + shift,
            attributes=facts,
        )
        inside = trace.set_span_in_context(span)
        for name, start, stop in life(record, end):
            child = tracer.start_span(name, context=inside, start_time=start + shift)
            child.end(stop + shift)
        if record.first_token_ns is not None:
            span.add_event("first token", timestamp=record.first_token_ns + shift)
        if "error.type" in facts:
            span.set_status(Status(StatusCode.ERROR, record.error or str(record.outcome)))
        span.end(end + shift)
    if sender:
        sender.send(endpoint)
    return len(run.requests)


def _wall_shift(run: Run) -> int:
    """What to add to the run's times for nanoseconds since 1970; to the second, as `ended_at` is."""
    from datetime import datetime

    ended_at, ended_ns = run.manifest.get("ended_at"), run.manifest.get("ended_ns")
    if ended_at and ended_ns:
        return int(datetime.fromisoformat(ended_at).timestamp()) * NS_PER_S - int(ended_ns)
    return time.time_ns() - max(_ends(run.requests), default=0)


def _ends(records: Iterable[RequestRecord]) -> list[int]:
    return [record.end_ns or record.sent_ns for record in records]


class _Sender:
    """Spans kept until all are there, then sent to an OTLP endpoint, so that a failure is known."""

    def __init__(self) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider as SDKProvider
            from opentelemetry.sdk.trace.export import SimpleSpanProcessor
            from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        except ImportError:
            raise PerflabError(_MISSING) from None
        self._kept = InMemorySpanExporter()
        self.provider = SDKProvider(resource=Resource.create({"service.name": SCOPE}))
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))

    def send(self, endpoint: str | None) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult

        exporter = OTLPSpanExporter(endpoint=endpoint)
        spans = self._kept.get_finished_spans()
        for start in range(0, len(spans), BATCH):
            if exporter.export(spans[start : start + BATCH]) is not SpanExportResult.SUCCESS:
                raise PerflabError(
                    f"{endpoint or 'the OTLP endpoint'} did not take the spans; is it running?"
                )
        exporter.shutdown()
