"""A whole profile on a tiny model: the run directory, its chapters, what is refused; figures exact from
synthetic records."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from perflab.cli import app
from perflab.config import EngineConfig
from perflab.errors import PerflabError
from perflab.measure import latency
from perflab.measure.flame import from_speedscope
from perflab.measure.memory import leak_verdict
from perflab.models.tiny import tiny
from perflab.report import figures_profile as figures
from perflab.report import profile as chapters
from perflab.studies import profile
from perflab.studies.profile import Instruments
from perflab.studies.service_run import LoadChoice, ServiceChoice
from perflab.studies.store import Run, read_run
from perflab.types import RequestRecord, Span, StepRecord

MS = 1_000_000
LOAD = LoadChoice(input_tokens=12, output_tokens=6, requests=8, users=4)


def tiny_service() -> ServiceChoice:
    service = ServiceChoice(config=EngineConfig(num_threads=1, kv_bytes=1 << 20, runner="torch"))
    service.__dict__["loaded"] = tiny()  # what the cached property would load by name
    return service


def test_every_instrument_leaves_its_part_and_its_chapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        profile, "ceilings", lambda: {"bytes_per_s": 1e10, "operations_per_s": {"fp32": 1e11}}
    )
    monkeypatch.setattr(profile.memory, "python_objects", lambda: {})  # seconds, with all of torch loaded
    use = Instruments(flame=True, operators=True, memory=True, leak_requests=120)
    said: list[str] = []
    profile.profile(tiny_service(), LOAD, use, tmp_path / "run", said.append)
    run = read_run(tmp_path / "run")
    assert run.manifest["kind"] == "profile"
    assert set(run.profile or {}) == {"flame", "operators", "ceilings", "memory"}
    files = {file.name for file in (tmp_path / "run").iterdir()}
    assert {"operators-decode.trace.json", "operators-prefill.trace.json", profile.FLAME_FILE} <= files
    assert not list(tmp_path.glob(".*"))
    stacks = from_speedscope(json.loads((tmp_path / "run" / profile.FLAME_FILE).read_text()))
    assert any(frame.file == "perflab/engine/engine.py" for stack in stacks for frame in stack)
    assert not any(frame.file.startswith("/") for stack in stacks for frame in stack)

    found = {section.anchor: section for section in chapters.sections_of(run)}
    assert list(found) == ["waterfall", "shares", "flame", "decode", "prefill", "memory", "telemetry"]
    assert all(section.takeaway for section in found.values())
    for section in found.values():
        for table in [section.table, *(table for _, table in section.more)]:
            if table is not None:
                assert all(len(row) == len(table.headers) for row in table.rows)
        if section.figure is not None:
            json.loads(section.figure.to_json())
    assert (run.profile or {})["memory"]["leak"]["answer"] != "leaking"
    assert {"operators: a decode step", "memory", "flame graph"} <= set(said)


def record() -> RequestRecord:
    spans = [Span("client_queue", 0, 2 * MS), Span("queue", 2 * MS, 10 * MS)]
    return RequestRecord(
        "r",
        0,
        2 * MS,
        5,
        admitted_ns=10 * MS,
        first_token_ns=40 * MS,
        last_token_ns=60 * MS,
        end_ns=60 * MS,
        output_tokens=2,
        outcome="completed",
        first_step=0,
        first_token_step=0,
        last_step=1,
        spans=spans,
    )


STEPS = [
    StepRecord(0, *(t * MS for t in (10, 11, 12, 38, 39, 39, 40))),
    StepRecord(1, *(t * MS for t in (41, 42, 42, 58, 59, 59, 60))),
]


def test_the_waterfall_draws_every_stamped_piece_where_it_was() -> None:
    figure = figures.waterfall(record(), STEPS)
    bars = {bar.y[0]: list(zip(bar.base, bar.x, strict=True)) for bar in figure.data}
    assert list(bars)[:2] == ["client queue", "queue"]
    assert bars["queue"] == [(2.0, 8.0)]
    assert bars["schedule"] == [(10.0, 1.0), (41.0, 1.0)]
    assert bars["prefill forward"] == [(12.0, 26.0)]
    assert bars["decode forward"] == [(42.0, 16.0)]
    assert sum(x for found in bars.values() for _, x in found) == 59.0  # 1 ms between the steps has no stamp


def test_shares_close_to_the_whole_with_their_residual() -> None:
    part = latency.decompose(record(), STEPS)
    assert part is not None
    (bar,) = figures.shares([part, part]).data
    assert bar.y[-1] == "residual"
    assert bar.x[-1] == pytest.approx(100 / 60)
    assert sum(bar.x) == pytest.approx(100)


def test_the_typical_request_is_the_median_of_completed_ones() -> None:
    run = Run({}, [], STEPS, [])
    assert chapters.typical(run) is None
    for number, end in enumerate((50, 90, 60, 70, 80)):
        one = record()
        one.request_id, one.last_token_ns = str(number), end * MS
        run.requests.append(one)
    run.requests[1].outcome = "failed"
    found = chapters.typical(run)
    assert found is not None
    assert found.request_id == "3"


def test_a_part_is_judged_by_the_ceiling_that_binds_it() -> None:
    ceilings = {"bytes_per_s": 1e9, "operations_per_s": {"fp32": 1e10, "int8": 4e10}}
    assert figures.floor_of({"bytes": 1e6, "operations": 1e6}, "fp32", ceilings) == pytest.approx(1e-3)
    assert figures.floor_of({"bytes": 1e6, "operations": 8e7}, "int4", ceilings) == pytest.approx(2e-3)
    assert figures.floor_of({"bytes": 1e6, "operations": None}, "fp32", ceilings) == pytest.approx(1e-3)
    assert figures.floor_of({"bytes": None, "operations": 1e6}, "fp32", ceilings) is None
    assert figures.floor_of({"bytes": 1e6}, "fp32", None) is None


def cold(pages_left: list[float | None]) -> dict[str, Any]:
    def state(total: float, **more: Any) -> dict[str, Any]:
        phases = {"import": 1.0, "weights": total - 1.5, "first token": 0.5}
        steady = {"requests": 2, "seconds": 0.5, "warm_up_s": 0.25}
        return {"phases_s": phases, "total_s": total, "until_steady": steady, **more}

    states = {"warm": state(2.0), "cold page cache": state(5.0, pages_left=pages_left)}
    return {"states": states, "repeats": 3, "precision": "bfloat16", "runner": "native"}


def test_a_cold_start_shows_its_phases_and_whether_it_was_cold() -> None:
    (section,) = (
        s
        for s in chapters.sections_of(Run({}, [], [], [], profile={"cold_start": cold([0.0, 0.0])}))
        if s.anchor == "cold-start"
    )
    assert "2.00 s (warm) to 5.00 s (cold page cache)" in section.takeaway.replace("\u202f", " ")
    assert "checked" in section.note
    bars = {bar.name: list(bar.x) for bar in section.figure.data}  # type: ignore[union-attr]
    assert bars == {
        "import": [1.0, 1.0],
        "weights": [0.5, 3.5],
        "first token": [0.5, 0.5],
        "warm-up after it": [0.25, 0.25],
    }
    assert "not all cold" in chapters._cold_start(cold([0.4])).note
    assert "is not cold" in chapters._cold_start(cold([None])).note


def test_memory_says_what_the_verdict_says() -> None:
    counts = list(range(0, 400, 4))
    for leak, words in ((0, "does not leak"), (12_288, "It leaks: 12.0 KiB a request")):
        rss = [10**8 + leak * n for n in counts]
        found = {
            "of": "this process",
            "resident": {"rss": 1 << 20},
            "allocators": {},
            "kv_pool": None,
            "objects": [["builtins.dict", 3, 720]],
            "samples": [counts, rss],
            "leak": asdict(leak_verdict(counts, rss)),
            "whole_pool": True,
        }
        section = chapters._memory(found)
        assert ("first time" in chapters._memory(found | {"whole_pool": False}).takeaway) == (leak > 0)
        assert words in section.takeaway
        assert section.more[1][1].rows[0][1].text == "+3"
        line = figures.resident(found).data[1]
        assert line.y[1] - line.y[0] == pytest.approx(leak * (line.x[1] - line.x[0]) / (1 << 20))


def test_what_cannot_be_seen_is_refused_before_anything_runs(tmp_path: Path) -> None:
    away = ServiceChoice(url="http://192.0.2.1:8000/v1")
    for use, words in (
        (Instruments(operators=True), "--operators needs the model"),
        (Instruments(cold_start=True), "--cold-start needs the model"),
        (Instruments(flame=True), "--pid"),
        (Instruments(memory=True), "--pid"),
    ):
        with pytest.raises(PerflabError, match=words):
            profile.profile(away, LOAD, use, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ceilings_are_the_higher_of_before_and_after() -> None:
    a = {"bytes_per_s": 2.0, "operations_per_s": {"fp32": 5.0, "bf16": 9.0}}
    b = {"bytes_per_s": 3.0, "operations_per_s": {"fp32": 6.0, "bf16": 8.0}}
    assert profile.higher(a, b) == {"bytes_per_s": 3.0, "operations_per_s": {"fp32": 6.0, "bf16": 9.0}}


def test_a_cost_within_the_spread_is_no_cost() -> None:
    assert "no more than" in chapters._cost({"overhead": -0.16, "spread": 0.2})
    assert chapters._cost({"overhead": 0.25, "spread": 0.2}).startswith("costs 25.0")


def test_a_taken_directory_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(PerflabError, match="already holds"):
        profile.profile(tiny_service(), LOAD, Instruments(), tmp_path)


def test_stages_follow_the_load() -> None:
    found = profile.stages(LoadChoice(input_tokens=64, users=4), EngineConfig())
    assert [(s.name, s.rows, s.tokens) for s in found] == [("decode", 4, 64), ("prefill", 1, 64)]


def test_the_command_names_its_instruments() -> None:
    shown = CliRunner().invoke(app, ["profile", "--help"], env={"COLUMNS": "160", "TERM": "dumb"})
    assert shown.exit_code == 0
    assert all(
        name in shown.output for name in ("--cold-start", "--flame", "--operators", "--memory", "--all")
    )
