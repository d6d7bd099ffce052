"""A run as a Chrome trace, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Owns the translation of records into trace events: requests and engine steps as slices, what happened
as marks, telemetry and the scheduler's state as counters, all on one time axis that starts with the
run. Computes nothing.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perflab.measure.latency import STEP_SEGMENTS, segments
from perflab.studies.store import Run
from perflab.types import RequestRecord, StepRecord

Event = dict[str, Any]
ENGINE, REQUESTS, MACHINE = 1, 2, 3
"""The processes of the trace."""

MAX_EVENTS = 200_000
"""About 30 MB of JSON; beyond, the last steps are left out and the file says how many."""


def chrome_trace(run: Run, max_events: int = MAX_EVENTS) -> dict[str, Any]:
    """Trace events in the JSON object format; `ts` and `dur` are microseconds since the run's start."""
    starts = [r.intended_ns for r in run.requests] + [s.start_ns for s in run.steps]
    origin = int(run.manifest.get("started_ns") or min(starts, default=0))
    events: list[Event] = [
        *_names(),
        *_requests(run.requests, origin),
        *_marks(run, origin),
        *_telemetry(run, origin),
    ]
    per_step = len(STEP_SEGMENTS) + 4
    room = max(0, (max_events - len(events)) // per_step)
    for step in run.steps[:room]:
        events += _step(step, origin)
    about = {
        "variant": run.variant,
        "kind": run.manifest.get("kind", "study"),
        "steps left out": max(0, len(run.steps) - room),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_trace(path: Path, run: Run) -> Path:
    """Write `chrome_trace` without spaces; returns the path."""
    path.write_text(json.dumps(chrome_trace(run), separators=(",", ":"), allow_nan=False), encoding="utf-8")
    return path


def _us(time_ns: int, origin: int) -> float:
    return (time_ns - origin) / 1000


def _slice(name: str, pid: int, tid: int, start: int, end: int, origin: int, **args: Any) -> Event:
    found = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": _us(start, origin)}
    return found | {"dur": (end - start) / 1000, "args": args}


def _counter(name: str, pid: int, time_ns: int, origin: int, **values: float) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(time_ns, origin), "args": values}


def _names() -> Iterator[Event]:
    for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests"), (MACHINE, "telemetry")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    yield {"ph": "M", "name": "thread_name", "pid": ENGINE, "tid": 1, "args": {"name": "steps"}}


def _step(step: StepRecord, origin: int) -> Iterator[Event]:
    yield _slice(
        f"step {step.index}",
        ENGINE,
        1,
        step.start_ns,
        step.delivered_ns,
        origin,
        rows=step.rows,
        prefill_tokens=step.prefill_tokens,
        decode_tokens=step.decode_tokens,
        preempted=step.preempted,
        failed_rows=step.failed_rows,
    )
    stamps = [step.start_ns, step.planned_ns, step.batched_ns, step.forwarded_ns, step.sampled_ns]
    stamps += [step.committed_ns, step.delivered_ns]
    for name, start, end in zip(STEP_SEGMENTS, stamps, stamps[1:], strict=False):
        if end > start:
            yield _slice(name, ENGINE, 1, start, end, origin)
    at = step.delivered_ns
    yield _counter("requests", ENGINE, at, origin, running=step.running, waiting=step.waiting)
    blocks = {"used": step.kv_blocks_used, "cached": step.kv_blocks_cached}
    yield _counter("KV blocks", ENGINE, at, origin, **blocks)
    tokens = {"prefill": step.prefill_tokens, "decode": step.decode_tokens}
    yield _counter("tokens in the step", ENGINE, step.start_ns, origin, **tokens)


def _requests(records: Sequence[RequestRecord], origin: int) -> Iterator[Event]:
    """A request takes the lowest lane that is free: as many lanes as requests were there at once."""
    busy: list[tuple[int, int]] = []  # (end, lane)
    free: list[int] = []
    lanes = 0
    for r in sorted(records, key=lambda r: r.intended_ns):
        end = max(filter(None, (r.end_ns, r.last_token_ns, r.sent_ns)))
        while busy and busy[0][0] <= r.intended_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            lanes += 1
            heapq.heappush(free, lanes)
            title = {"name": f"lane {lanes}"}
            yield {"ph": "M", "name": "thread_name", "pid": REQUESTS, "tid": lanes, "args": title}
        lane = heapq.heappop(free)
        heapq.heappush(busy, (end, lane))
        yield _slice(
            r.request_id,
            REQUESTS,
            lane,
            r.intended_ns,
            end,
            origin,
            outcome=r.outcome,
            prompt_tokens=r.prompt_tokens,
            output_tokens=r.output_tokens,
            cached_tokens=r.cached_tokens,
            error=r.error,
            first_step=r.first_step,
            last_step=r.last_step,
        )
        for name, start, stop in life(r, end):
            yield _slice(name, REQUESTS, lane, start, stop, origin)


def life(record: RequestRecord, end: int) -> Iterator[tuple[str, int, int]]:
    """Consecutive pieces of a request: its spans, and prefill and decode where the engine is ours.
    What overlaps is cut at the start of the later one, so that slices nest."""
    pieces = [(s.name, s.start_ns, s.end_ns) for s in segments(record, {}) or record.spans]
    if record.admitted_ns is not None and record.first_token_ns is not None:
        pieces.append(("prefill", record.admitted_ns, record.first_token_ns))
        if record.last_token_ns is not None:
            pieces.append(("decode", record.first_token_ns, record.last_token_ns))
    pieces.sort(key=lambda piece: (piece[1], piece[2]))
    for piece, later in zip(pieces, [*pieces[1:], ("", end, end)], strict=False):
        name, start, stop = piece[0], max(piece[1], record.intended_ns), min(piece[2], later[1], end)
        if stop > start:
            yield name, start, stop


def _marks(run: Run, origin: int) -> Iterable[Event]:
    for event in run.events:
        mark = {"ph": "i", "s": "g", "name": event.kind, "pid": ENGINE, "tid": 1}
        yield mark | {
            "ts": _us(event.time_ns, origin),
            "args": {"subject": event.subject, **{k: str(v) for k, v in event.detail.items()}},
        }


def _telemetry(run: Run, origin: int) -> Iterable[Event]:
    for sample in run.telemetry:
        label = " ".join(f"{k} {v}" for k, v in sorted(sample.labels.items()))
        yield _counter(sample.name, MACHINE, sample.time_ns, origin, **{label or "value": sample.value})
