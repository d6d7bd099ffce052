"""Reports of runs against services: any number, compared in the order given, no more than they show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runs import bench
from test_compare import FakeService, Machine
from test_report import strict
from test_study import QuietSampler, study
from test_study import run as run_study
from test_sweep import Queue, swept

from perflab.errors import StoreError
from perflab.measure.metrics import SLO
from perflab.report import figures_service, headlines, html, tables_service, takeaways
from perflab.report.analysis import analyse, parts
from perflab.report.glossary import ELSEWHERE
from perflab.report.manifest import about, manifest
from perflab.report.sections import sections
from perflab.report.timeline import timeline
from perflab.studies import compare, service_run, session, store
from perflab.studies.compare import Compare, Side, run_compare
from perflab.studies.service_run import LoadChoice


def written(folder: Path, *runs) -> Path:
    """A folder of runs, as several `perflab bench` leave them."""
    for i, run in enumerate(runs):
        store.write_run(folder / f"run-{i}", run)
    return folder


def anchors(analysis) -> list[str]:
    return [section.anchor for section in sections(analysis)]


@pytest.fixture
def before_after(tmp_path) -> list[Path]:
    """Two folders of four runs of the same service, the second with three quarters of the TTFT."""
    return [
        written(tmp_path / "old", *(bench(number=i) for i in range(4))),
        written(tmp_path / "new", *(bench(number=i, ttft_ms=75) for i in range(4))),
    ]


def test_one_run_says_what_was_measured_and_only_chapters_it_fills(tmp_path):
    store.write_run(tmp_path / "one", bench())
    analysis = analyse([tmp_path / "one"])
    assert anchors(analysis) == [
        "results",
        "latency",
        "goodput",
        "rates",
        "time",
        "timeline",
        "client",
        "validity",
    ]
    top = headlines.headline(analysis)
    assert top.title.startswith("100.0")
    assert "met every SLO" in top.title
    assert top.tone == "good"
    facts = dict(about([analysis]))
    assert facts["service"] == "http://127.0.0.1:8000"
    assert "Constant arrivals, 20.0 requests/s" in facts["workload"]


def test_before_and_after_are_in_the_order_given_and_judged_on_latency(before_after):
    analysis = analyse(before_after)
    assert [s.name for s in analysis.summaries] == ["old", "new"]
    assert analysis.measure.name == "E2E p50", "an open loop decides the rate, so the rate decides nothing"
    assert analysis.summaries[1].first.answer == "faster"
    top = headlines.headline(analysis)
    assert top.title == "“new” is faster than “old”: E2E p50 1.22× as fast"  # (100 + 40) / (75 + 40)
    turned = analyse(before_after[::-1])
    assert [s.name for s in turned.summaries] == ["new", "old"]
    assert turned.summaries[1].first.answer == "slower"
    assert headlines.headline(turned).tone == "bad"
    found = {c.measure.name: c.comparison for c in tables_service.changes_of(analysis, analysis.summaries[1])}
    assert found["TTFT p50"].ratio.value == pytest.approx(4 / 3, rel=1e-6)
    assert found["TPOT p50"].answer == "cannot tell"
    row = next(r for r in tables_service.changes(analysis).rows if r[1].text == "TTFT p50")
    shown = [float(cell.text.split("\u202f")[0]) for cell in row[2:4]]
    assert shown[0] / shown[1] == pytest.approx(4 / 3, rel=0.01), "the row's two values have the row's ratio"


def test_runs_that_did_not_alternate_say_so(tmp_path):
    def at(hour, i):
        return f"2026-01-01T{hour:02d}:{i:02d}:00+00:00"

    apart = [
        written(tmp_path / name, *(bench(number=i, ended=at(hour, i)) for i in range(3)))
        for hour, name in ((8, "a"), (9, "b"))
    ]
    assert "did not alternate" in takeaways.changes(analyse(apart))
    mixed = [
        written(tmp_path / name, *(bench(number=i, ended=at(9, 2 * i + k)) for i in range(3)))
        for k, name in enumerate(("c", "d"))
    ]
    assert "did not alternate" not in takeaways.changes(analyse(mixed))


def test_one_run_each_and_other_loads_cannot_tell(tmp_path):
    store.write_run(tmp_path / "a", bench())
    store.write_run(tmp_path / "b", bench(ttft_ms=50))
    analysis = analyse([tmp_path / "a", tmp_path / "b"])
    assert headlines.headline(analysis).title == "Cannot tell which is faster"
    assert "Needs two paired runs" in headlines.headline(analysis).detail
    assert sections(analysis)[1].figure is None, "a ratio without an interval is no picture"
    load = {"kind": "synthetic", "rate_per_s": 5.0, "seed": 0}
    same = [written(tmp_path / "c", *(bench(number=i) for i in range(3)))]
    same.append(written(tmp_path / "d", *(bench(number=i, ttft_ms=50, load=load) for i in range(3))))
    assert analyse(same).summaries[1].first.reason == "the two were measured under different loads"


def test_refusing_makes_nobody_fast(tmp_path):
    """Half refused at once and the rest served in half the time: slower, and the table says why."""
    serves = written(tmp_path / "serves", *(bench(number=i) for i in range(3)))
    refuses = written(tmp_path / "refuses", *(bench(number=i, ttft_ms=50, refuses=21) for i in range(3)))
    analysis = analyse([serves, refuses])
    assert analysis.best.name == "serves", "invalid runs are never best"
    other = analysis.summaries[1]
    assert other.first.answer == "cannot tell"
    cells = tables_service.results(analysis).rows[1]
    assert (cells[1].text.replace("\u202f", " "), cells[1].note) == ("47.5 %", "63 refused")
    assert cells[7].text == "∞"  # E2E p50, on the line of the success rate
    inclusive, alone = (tables_service.percentiles([other]).rows[0][k].text for k in (2, 6))
    assert inclusive == "∞"
    assert alone.endswith("ms")
    goodput = {r[1].text: r[4].text for r in tables_service.classes(analysis).rows[2:]}
    assert goodput["chat"] != goodput["batch"]
    drawn = strict(figures_service.reached(analysis.summaries))["data"]
    never = [trace for trace in drawn if trace.get("text") == ["∞"]]
    assert [round(t["y"][0], 1) for t in never] == [47.5, 47.5], (
        "one mark in each panel, where the curve ends"
    )
    text = html.write_report([serves, refuses], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "“refuses” is" not in text


def test_an_invalid_run_alone_is_named_so_first(tmp_path):
    store.write_run(tmp_path / "one", bench(refuses=20))
    top = headlines.headline(analyse([tmp_path / "one"]))
    assert top.title == "Invalid: failures"
    assert "20 of 40 requests" in top.detail
    assert top.tone == "bad"


def test_classes_are_judged_by_their_own_limits(tmp_path):
    strict_batch = {"batch": {"ttft_s": 0.05, "tpot_s": None, "e2e_s": None}}
    store.write_run(tmp_path / "one", bench(slos=strict_batch))
    analysis = analyse([tmp_path / "one"])
    shares = {row[1].text: row[4].text.split("\u202f")[0] for row in tables_service.classes(analysis).rows}
    assert shares == {"chat": "100.0", "batch": "0.0"}
    assert analysis.baseline.goodput.share.value == 0.5


def test_goodput_of_several_runs_is_per_second_of_each(tmp_path):
    later = bench(number=1)
    for record in later.requests:  # the second run is an hour later on the same clock
        record.intended_ns += 3600 * 10**9
    folder = written(tmp_path / "two", bench(), later)
    rate = analyse([folder]).baseline.goodput.requests_per_s
    assert rate == pytest.approx(40 / 1.95), "not 80 requests in an hour"


def test_kinds_are_parts_with_an_answer_each(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "NoiseSampler", QuietSampler)
        run_study(study(repeats=2, min_repeats=2), tmp_path / "s")
    store.write_run(tmp_path / "b", bench())
    paths = [tmp_path / "b", tmp_path / "s"]
    assert [a.kind for a in parts(paths)] == ["study", "bench"]
    text = html.write_report(paths, tmp_path / "r.html").read_text(encoding="utf-8")
    assert text.count('class="verdict') == 2
    for anchor in ("part-1", "part-2", "1-ladder", "1-latency", "2-results", "2-latency"):
        assert text.count(f'id="{anchor}"') == 1
    drawn = json.loads(text.split('id="figures">')[1].split("</script>")[0])
    assert all(f'id="figure-{name}"' in text for name in drawn)
    summary = html.summary_markdown(paths)
    assert summary.count("\n# ") == 2
    assert "| run |" in summary


def test_manifests_say_once_what_is_shared(before_after):
    listed = dict(manifest([analyse(before_after)]))
    assert ("load · rate per s", "20.0") in listed["shared by all runs"]
    alone = dict(manifest([analyse(before_after[:1])]))
    assert list(alone) == ["the run"]
    assert not any("ns" in name.split() for name, _ in alone["the run"])


def test_samples_events_and_requests_share_a_time_axis():
    run = bench()
    figure = strict(timeline([run]))
    titles = [note["text"] for note in figure["layout"]["annotations"]]
    assert titles == [
        "requests",
        "output tokens/s as the client received them",
        "requests in flight",
        "KV use that the server reports",
        "machine",
        "memory",
    ]
    traces = {trace["name"]: trace for trace in figure["data"]}
    assert traces["events"]["x"][0] == pytest.approx(0.7)
    assert traces["core 0 busy"]["y"] == [50.0] * 4
    assert traces["process rss"]["y"] == [1.0] * 4
    assert traces["server: running"]["x"] == pytest.approx([0.0, 0.5, 1.0, 1.5])


def test_what_the_server_says_stands_beside_what_the_client_counted(tmp_path):
    store.write_run(tmp_path / "one", bench())
    rows = {
        row[1].text: [c.text for c in row[2:]]
        for row in tables_service.server(analyse([tmp_path / "one"])).rows
    }
    assert rows == {
        "requests running": ["highest", "3.00", ""],
        "KV cache in use": ["highest", "30\u202f%", ""],
        "output tokens": ["added during the run", "150", "200"],
    }


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("study.json", "{"),
        ("study.json", "[]"),
        ("study.json", '{"fingerprint": "x"}'),
        ("study.json", '{"declaration": {"variants": [3]}}'),
        ("quality.json", "5"),
        ("failures.json", "[1]"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, name, content):
    store.write_run(tmp_path / "runs" / "one", bench())
    (tmp_path / name).write_text(content)
    with pytest.raises(StoreError, match=str(tmp_path)):
        html.write_report([tmp_path], tmp_path / "r.html")
    assert list(tmp_path.glob(".*")) == []


def test_a_folder_as_target_takes_the_report(tmp_path):
    store.write_run(tmp_path / "one", bench())
    (tmp_path / "out").mkdir()
    assert html.write_report([tmp_path / "one"], tmp_path / "out") == tmp_path / "out" / "report.html"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["report.html"]


def test_time_axes_have_ticks_whatever_the_range():
    assert figures_service.time_ticks(0.02, 0.6) == pytest.approx([0.02, 0.05, 0.1, 0.2, 0.5])
    assert figures_service.time_ticks(3.9, 7.2) == pytest.approx([4, 5, 6, 7])
    assert len(figures_service.time_ticks(1e-4, 100.0)) == 7


def test_names_elsewhere_cover_the_metrics_and_the_misleading_ones():
    told = {row[0]: " ".join(row[1:]) for row in ELSEWHERE}
    assert {"TTFT", "TPOT", "ITL", "E2E", "goodput"} <= set(told)
    for tool in ("vllm bench", "SGLang", "guidellm", "aiperf", "genai-perf", "llmperf", "inference-perf"):
        assert any(tool in text for text in told.values()), tool
    assert "guidellm's TPOT includes the first token" in told["TPOT"]
    assert "ICL" in told["ITL"]


def test_replacing_the_name_of_a_run_replaces_nothing_else(tmp_path):
    """Two services under the same load are two groups of one part, by their own names."""
    for i, name in enumerate(("http://a:1", "http://b:2")):
        run = bench(name)
        store.write_run(tmp_path / str(i), replace(run))
    assert [s.name for s in analyse([tmp_path / "0", tmp_path / "1"]).summaries] == [
        "http://a:1",
        "http://b:2",
    ]


def test_a_sweep_has_its_capacity_as_its_answer_and_uses_no_invalid_point(tmp_path):
    queue = Queue(0.1, 2, verdict=lambda load, n: [("machine too noisy", "90 %")] if n == 5 else [])
    found = swept(tmp_path, queue, slo=SLO(e2e_s=0.5))
    analysis = analyse([tmp_path / "sweep"])
    top = headlines.headline(analysis)
    assert top.title == f"{found.capacity.level:.1f} requests/s within the limits"
    assert f"{len(found.points) - 1} of {len(found.points)} points count" in top.detail
    assert [s.runs[0].manifest["sweep"]["probe"] for s in analysis.summaries] == [False] * len(
        analysis.summaries
    )
    marks = [row[1].text for row in tables_service.points(analysis.sweep).rows]
    assert marks.count("not used") == 1
    assert {"knee", "capacity"} <= set(marks)
    assert anchors(analysis)[0] == "points"
    text = html.write_report([tmp_path / "sweep"], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Kleinrock" in text, "the formula of the knee"
    alone = analyse([next((tmp_path / "sweep" / "runs").iterdir())])
    assert alone.kind == "bench", "one point by itself is a run like any other"


def test_a_comparison_gives_the_answer_of_the_command(tmp_path, monkeypatch):
    for module in (compare, service_run):
        monkeypatch.setattr(module, "NoiseSampler", lambda *_: QuietSampler())
    machine = Machine(seed=1)
    sides = [
        Side(name, lambda ms=ms: FakeService(machine, ms)) for name, ms in (("plain", 1.0), ("quick", 0.8))
    ]
    told = run_compare(
        *sides, LoadChoice(output_tokens=8), Compare(pairs=12, quality=False), tmp_path / "comparison"
    )
    analysis = analyse([tmp_path / "comparison"])
    assert analysis.summaries[1].first.ratio == told.found.ratio
    assert (
        headlines.headline(analysis).title == "“quick” is faster than “plain”: output tokens/s 1.25× as fast"
    )
    assert "12 pairs of runs" in headlines.headline(analysis).detail
    assert [row[1].text for row in tables_service.changes(analysis).rows] == [
        "output tokens/s",
        "mean TTFT",
        "mean TPOT",
        "mean E2E",
    ]
    (tmp_path / "comparison" / "compare.json").write_text("{}")
    with pytest.raises(StoreError, match="comparison"):
        analyse([tmp_path / "comparison"])
