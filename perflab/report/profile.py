"""The chapters of a profile: where time and memory go, with what each instrument costs and cannot see.

Owns their words and tables. Figures are `figures_profile`'s and `flame`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from perflab.measure import latency, metrics
from perflab.measure.flame import from_speedscope
from perflab.measure.stats import Estimate
from perflab.report import figures_profile as figures
from perflab.report import units
from perflab.report.flame import flame_figure, functions_table
from perflab.report.section import Section
from perflab.report.tables import Cell, Table
from perflab.studies.profile import FLAME_FILE
from perflab.studies.store import Run
from perflab.types import RequestRecord

MISSING = Cell(units.MISSING, tone="muted")


def sections_of(run: Run) -> list[Section]:
    """The chapters that this run holds something for, in reading order."""
    found = run.profile or {}
    chapters = [_waterfall(run), _shares(run)]
    if "cold_start" in found:
        chapters.append(_cold_start(found["cold_start"]))
    chapters.append(_flame(run, found.get("flame")))
    for stage in found.get("operators", []):
        chapters.append(_step(stage, found.get("ceilings")))
    if "memory" in found:
        chapters.append(_memory(found["memory"]))
    chapters.append(_telemetry(run))
    return [section for section in chapters if section is not None]


def typical(run: Run) -> RequestRecord | None:
    """The completed request of median E2E."""
    done = [
        (e2e, r) for r in run.requests if r.outcome == "completed" and (e2e := metrics.e2e_s(r)) is not None
    ]
    done.sort(key=lambda pair: pair[0])
    return done[len(done) // 2][1] if done else None


def _waterfall(run: Run) -> Section | None:
    record = typical(run)
    parts = record and latency.decompose(record, run.steps)
    if not record or not parts or not parts.segments:
        return None
    most = max(parts.segments, key=lambda name: parts.segments[name])
    rows = [
        (Cell(name), Cell(units.seconds(s)), Cell(units.percent(s / parts.e2e_s)))
        for name, s in [*parts.segments.items(), ("residual", parts.residual_s)]
    ]
    return Section(
        "waterfall",
        "One request, end to end",
        f"Of {units.seconds(parts.e2e_s)} the most, {units.percent(parts.segments[most] / parts.e2e_s)}, is "
        f"{most}; {units.percent(abs(parts.residual_s) / parts.e2e_s)} is covered by no stamp.",
        figures.waterfall(record, run.steps),
        more=(("Seconds by segment", Table(("segment", "seconds", "of E2E"), tuple(rows))),),
        note=f"Request {record.request_id}, the one of median E2E: {record.prompt_tokens} tokens in, "
        f"{record.output_tokens} out. Every bar is stamped at both ends; none is a difference of others.",
    )


def _shares(run: Run) -> Section | None:
    parts = [d for r in run.requests if r.outcome == "completed" and (d := latency.decompose(r, run.steps))]
    closing, mean = latency.closing(parts), latency.average_of(parts)
    if closing is None or mean is None or not mean.segments:
        return None
    top = sorted(mean.segments, key=lambda name: -mean.segments[name])[:2]
    shares = " and ".join(f"{name} {units.percent(mean.segments[name] / mean.e2e_s)}" for name in top)
    return Section(
        "shares",
        "Where the time of all requests goes",
        f"Over {closing.requests} requests: {shares}. The residual is "
        f"{units.percent(closing.median)} of E2E at "
        f"the median, {units.percent(closing.p99)} at p99.",
        figures.shares(parts),
        note="A request waits for its whole step, so a step's time counts in full for each of its rows.",
    )


def _cold_start(found: Mapping[str, Any]) -> Section:
    states = found["states"]
    phases = figures.phases(found)
    rows = []
    for name, state in states.items():
        cells = [Cell(units.seconds(state["phases_s"].get(p))) for p in phases]
        steady = state["until_steady"]
        late = Cell(units.seconds(steady["warm_up_s"]), f"over {steady['requests']:.0f} requests")
        rows.append((Cell(name), *cells, Cell(units.seconds(state["total_s"])), late))
    slowest = max(states, key=lambda n: states[n]["total_s"])
    fastest = min(states, key=lambda n: states[n]["total_s"])
    return Section(
        "cold-start",
        "Cold start, in new processes",
        f"From nothing to the first token takes {units.seconds(states[fastest]['total_s'])} ({fastest}) to "
        f"{units.seconds(states[slowest]['total_s'])} ({slowest}).",
        figures.cold_starts(found),
        Table(("caches", *phases, "first token after", "warm-up after it"), tuple(rows)),
        note=f"Medians, starts of each kind: {found['repeats']}, interleaved, {found['precision']}, "
        f"{found['runner']} runner. “Nothing packed”: without the cache of packed weights. The engine "
        "compiles nothing. “Warm-up after it”: what requests took beyond steady ones "
        "until their times were steady. "
        f"{_pages(states)}",
    )


def _pages(states: Mapping[str, Any]) -> str:
    left = [share for state in states.values() for share in state.get("pages_left", [])]
    if not left or None in left:
        return "The page cache could not be dropped here: “cold page cache” is not cold."
    worst = max(left)
    if worst > 0.01:
        return (
            f"Up to {units.percent(worst)} of the model's files stayed in the page cache, held by other "
            "processes: “cold page cache” is not all cold."
        )
    return "The page cache held nothing of the model's files before a cold start (checked)."


def _flame(run: Run, about: Mapping[str, Any] | None) -> Section | None:
    file = run.path / FLAME_FILE if run.path else None
    if about is None or file is None or not file.is_file():
        return None
    stacks = from_speedscope(json.loads(file.read_text(encoding="utf-8")))
    whole = sum(stacks.values())
    table = functions_table(stacks)
    words = f"Sampling {_cost(about)} of {about['compared']}." if about["overhead"] is not None else ""
    top = (
        f"{table.rows[0][0].text} itself has {table.rows[0][1].note}" if table.rows else "nothing was sampled"
    )
    return Section(
        "flame",
        "Flame graph",
        f"Of {units.seconds(whole)} sampled, {top}. {words}".strip(),
        flame_figure(stacks),
        more=(("Functions", table),),
        note=f"{about['method']}, every {units.seconds(about['interval_s'])}; width is time, a click zooms "
        "in. "
        f"Not seen: {about['unseen']}. {FLAME_FILE} opens in speedscope.app.",
    )


def _cost(found: Mapping[str, Any]) -> str:
    """What an instrument costs, unless the same work differs as much without it."""
    cost, spread = found["overhead"], found["spread"]
    if abs(cost) <= spread:
        return f"costs no more than what runs differ by without it, {units.percent(spread)}"
    return f"costs {units.percent(cost)}"


def _step(stage: Mapping[str, Any], ceilings: Mapping[str, Any] | None) -> Section:
    """The layers' parts, with torch's operators folded."""
    parts, what = stage["parts"], stage["stage"]
    sums: dict[str, dict[str, Any]] = {}
    for row in parts["rows"]:
        own = sums.setdefault(row["part"], {"seconds": 0.0, "bytes": 0.0, "operations": 0.0})
        for key in own:
            own[key] += row[key] or 0.0
    forward = parts["forward_s"]
    covered = sum(s["seconds"] for s in sums.values())
    rows = [_work_row((Cell(name),), s, forward, stage["weights"], ceilings) for name, s in sums.items()]
    rows.append((Cell("all parts"), *_timed(covered, forward), MISSING, MISSING, MISSING))
    rows.append((Cell("forward pass as a whole"), *_timed(forward, forward), MISSING, MISSING, MISSING))
    most = max(sums, key=lambda name: sums[name]["seconds"])
    call = parts["call_s"]
    alone = "" if call is None else f" A call without work takes {units.seconds(call)}."
    operators, why = _operators(stage, ceilings)
    return Section(
        what["name"],
        f"A {what['name']} step, layer by layer",
        f"{most[0].upper()}{most[1:]} takes the most, {units.percent(sums[most]['seconds'] / forward)} of "
        f"the forward pass of {units.seconds(forward)}.",
        figures.layers(parts["rows"]),
        Table(("part", "time", "of the forward pass", "GB/s", "Gop/s", "of the roofline"), tuple(rows)),
        (("torch's operators", operators),),
        note=f"{_stage(what)}, {stage['weights']}, {stage['runner']} runner. Timed: {parts['method']}. "
        f"Not seen: {parts['unseen']}.{alone} Amber: faster than the ceilings: "
        f"operands came from a cache, or the machine was busy when they were measured. {why}",
    )


def _stage(what: Mapping[str, Any]) -> str:
    if what["name"] == "decode":
        return f"{what['rows']} requests with {what['tokens']} tokens of context each"
    return f"A prompt of {what['tokens']} tokens"


def _timed(seconds: float, whole: float) -> tuple[Cell, Cell]:
    return Cell(units.seconds(seconds)), Cell(units.percent(seconds / whole if whole else None))


def _work_row(
    names: tuple[Cell, ...],
    row: Mapping[str, Any],
    whole: float,
    weights: str,
    ceilings: Mapping[str, Any] | None,
) -> tuple[Cell, ...]:
    seconds = row["seconds"]
    least = figures.floor_of(row, weights, ceilings)
    rates = [
        Cell(units.number(row[key] / seconds / 1e9)) if row.get(key) and seconds else MISSING
        for key in ("bytes", "operations")
    ]
    share = MISSING
    if least is not None and seconds:
        share = Cell(units.percent(least / seconds), tone="flag" if least > seconds else "")
    return (*names, *_timed(seconds, whole), *rates, share)


def _operators(stage: Mapping[str, Any], ceilings: Mapping[str, Any] | None) -> tuple[Table, str]:
    """The table, and how it came about."""
    found = stage["operators"]
    whole = found["step_s"]
    rows = [
        _work_row(
            (Cell(r["operator"], r["shapes"]), Cell(units.number(r["calls"]))),
            r,
            whole,
            stage["weights"],
            ceilings,
        )
        for r in found["rows"][:25]
    ]
    headers = ("operator", "calls", "time", "of the step", "GB/s", "Gop/s", "of the roofline")
    schedule, size = found["schedule"], found["trace_bytes"]
    opaque = " A native step is one call that it cannot look into." if stage["runner"] == "native" else ""
    return Table(headers, tuple(rows)), (
        f"torch.profiler saw {schedule['active']} steps after {schedule['wait']} of waiting and "
        f"{schedule['warm_up']} of warm-up ({found['events']:,} events"
        f"{f', {size / 1e3:,.0f} kB of trace' if size else ''}): a step then takes "
        f"{units.seconds(found['observed_step_s'])} instead of {units.seconds(whole)}, so it {_cost(found)}. "
        f"Bytes of operators are counted from shapes, for products and pointwise ones.{opaque}"
    )


def _memory(found: Mapping[str, Any]) -> Section:
    leak = found["leak"]
    slope = Estimate(**leak["slope_bytes_per_request"])

    def kib(value: float) -> str:
        return f"{units.number(value / 1024)} KiB"

    pool = (
        ""
        if found["whole_pool"]
        else " The server's KV pool enters resident memory block by block: only growth that goes on after "
        "all of it was used once is a leak, so use more --leak-requests or a smaller pool."
    )
    growth = f"{kib(slope.value)} a request ({units.interval(slope, kib)})" if slope.value is not None else ""
    words = {
        "leaking": "It leaks",
        "steady": "It does not leak",
        "cannot tell": "Whether it leaks cannot be told",
    }
    if not found["whole_pool"]:
        words["leaking"] = "It grows, by a leak or by a KV pool that is used for the first time"
    takeaway = f"{words[leak['answer']]}: {growth or leak['reason']}."
    places = [("resident", found["resident"]), ("allocator", found["allocators"])]
    places.append(("KV pool, at its fullest", found["kv_pool"] or {}))
    rows = [
        (Cell(place), Cell(name), Cell(f"{units.number(size / (1 << 20))} MiB"))
        for place, sizes in places
        for name, size in sizes.items()
    ]
    more = [("Where it is", Table(("", "", "size"), tuple(rows), words=(0, 1)))]
    if found["objects"]:
        objects = [
            (Cell(n), Cell(f"{number:+,}"), Cell(f"{size:+,}")) for n, number, size in found["objects"]
        ]
        more.append(("Python objects: growth", Table(("type", "objects", "bytes"), tuple(objects))))
    return Section(
        "memory",
        "Memory",
        takeaway,
        figures.resident(found),
        more=tuple(more),
        note=f"Of {found['of']}, after {leak['warm_up_requests']} requests of warm-up. Leaking: the whole "
        f"interval is above {kib(leak['limit_bytes_per_request'])} a request; steady: below. A tensor's "
        "or an extension's "
        f"memory is in “resident” and the allocator, not among Python objects.{pool}",
    )


def _telemetry(run: Run) -> Section | None:
    about = run.manifest.get("telemetry")
    if not about:
        return None
    missing = about["missing"]
    rows = tuple((Cell(name), Cell(why)) for name, why in missing.items())
    return Section(
        "telemetry",
        "What was sampled beside it",
        f"The machine was sampled every {units.seconds(about['interval_s'])}, at "
        f"{units.percent(about['overhead']['share'])} of one core.",
        table=Table(("not to be had here", "why"), rows, words=(0, 1)) if rows else None,
    )
