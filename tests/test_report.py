"""The report: figures that any viewer reads, words no stronger than the data, a page that loads nothing."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_study import QuietSampler, run, study

from perflab.errors import StoreError
from perflab.measure.stats import Comparison, Estimate
from perflab.report import figures, html, look, manifest, tables, takeaways, units
from perflab.report.analysis import analyse
from perflab.report.headlines import headline
from perflab.report.summary import compare_runs, summarise
from perflab.report.timeline import timeline
from perflab.studies import session, store
from perflab.studies.define import Variant
from perflab.studies.store import Run
from perflab.types import RequestRecord

CHROMIUM = Path("/usr/bin/chromium")
CHARTS = 6


@pytest.fixture(scope="module")
def study_dir(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("study") / "s"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "NoiseSampler", QuietSampler)
        run(study(), out)
    return out


@pytest.fixture(scope="module")
def page(study_dir) -> Path:
    return html.write_report([study_dir], study_dir / "report.html")


def strict(figure) -> dict:
    """The figure's JSON, refusing NaN and infinity as a browser would."""

    def refuse(name):
        raise AssertionError(f"{name} in figure JSON")

    return json.loads(figure.to_json(), parse_constant=refuse)


def failed_run(variant: str = "broken", **changes) -> Run:
    records = [RequestRecord(f"r{i}", 0, 0, 4, end_ns=5, outcome="failed", error="x") for i in range(3)]
    reasons = [["failures", "3 of 3 requests"]]
    return Run({"variant": variant, "round": 0, "validity": {"reasons": reasons}, **changes}, records, [], [])


def test_the_page_holds_every_part_and_loads_nothing(page):
    text = page.read_text(encoding="utf-8")
    for anchor in (
        "ladder",
        "latency",
        "frontier",
        "time",
        "timeline",
        "quality",
        "validity",
        "manifest",
        "formulas",
    ):
        assert f'id="{anchor}"' in text
    head, rest = text.split("<script>", 1)
    own = head + re.sub(r"^.*?</script>", "", rest, count=1, flags=re.S)  # all but plotly.js
    assert not re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", own)
    assert "@import" not in own
    assert "url(" not in own
    assert "3.00× the output tokens/s of the baseline, same quality" in text


def test_the_page_opens_offline_in_a_browser(page):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip("chromium is not installed")
    said: list[str] = []
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            context = browser.new_context(offline=True, viewport={"width": 1400, "height": 1000})
            tab = context.new_page()
            tab.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
            tab.on("pageerror", lambda error: said.append(str(error)))
            tab.on("request", lambda request: asked.append(request.url))
            tab.goto(page.as_uri())
            tab.wait_for_function(
                f"document.querySelectorAll('.js-plotly-plot > .plot-container').length >= {CHARTS}"
            )
            drawn = tab.evaluate(
                "[...document.querySelectorAll('.js-plotly-plot')]"
                ".filter(p => p.querySelector('.main-svg path')).map(p => p.id)"
            )
            bars = tab.evaluate("document.querySelectorAll('#figure-ladder .bars .point path').length")
            wide = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        finally:
            browser.close()
    assert len(drawn) == CHARTS
    assert bars >= 3
    assert wide <= 0, "the page scrolls sideways"
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_figures_are_json_whatever_the_runs_hold(study_dir):
    good = analyse([study_dir]).summaries
    infinite = summarise("broken", [failed_run()])
    infinite.previous = infinite.first = Comparison(
        "cannot tell", Estimate(math.inf, None, None, 1), None, "x"
    )
    for summaries in (good, [infinite], [*good, infinite]):
        for draw in (
            figures.ladder,
            figures.latencies,
            figures.frontier,
            figures.where_time_goes,
            figures.speed_and_quality,
        ):
            assert strict(draw(summaries))["data"] is not None
        assert strict(timeline([s.typical for s in summaries]))


def test_the_ladder_figure_shows_the_ratios_and_the_answers(study_dir):
    bars = strict(figures.ladder(analyse([study_dir]).summaries))["data"][0]
    assert bars["y"] == ["without", "with", "other attention"]
    assert bars["x"] == pytest.approx([1.0, 3.0, 3.0], rel=0.01)
    assert bars["marker"]["color"] == [look.ACCENT, look.GOOD, look.UNSURE]


def test_stacked_segments_and_residual_add_up_to_e2e(study_dir):
    summaries = analyse([study_dir]).summaries
    drawn = strict(figures.where_time_goes(summaries))["data"]
    assert drawn[-1]["name"] == "residual"
    for i, s in enumerate(summaries):
        assert sum(trace["x"][i] for trace in drawn) == pytest.approx(s.time.e2e_s)


def test_the_timeline_shows_one_run_at_a_time_and_offers_all(study_dir):
    runs = [s.typical for s in analyse([study_dir]).summaries]
    figure = strict(timeline(runs, shown=1))
    buttons = figure["layout"]["updatemenus"][0]["buttons"]
    assert [b["label"] for b in buttons] == ["without", "with", "other attention"]
    assert [t["visible"] for t in figure["data"]] == buttons[1]["args"][0]["visible"]
    per_step = next(t for t in figure["data"] if t["name"] == "decode tokens" and t["visible"])
    assert sum(per_step["y"]) == sum(r.output_tokens for r in runs[1].requests)


def test_takeaways_say_what_the_figures_show(study_dir):
    analysis = analyse([study_dir])
    assert "“with”: 3.00×" in takeaways.ladder(analysis)
    assert "“other attention”: cannot tell" in takeaways.ladder(analysis)
    assert takeaways.validity(analysis) == "All 9 runs are valid."
    assert "other attention" in takeaways.quality(analysis)
    assert "unexplained" in takeaways.where_time_goes(analysis)


def test_a_faster_variant_of_other_quality_is_named_with_its_quality_and_not_the_headline(study_dir):
    analysis = analyse([study_dir])
    base, cached, other = analysis.summaries
    other.first = other.previous = replace(cached.first, ratio=Estimate(9.0, 8.0, 10.0, 3))
    for kl, best, tone in ((0.01, other, ""), (0.4, cached, "flag")):
        other.quality = {**other.quality, "kl_nats": {**other.quality["kl_nats"], "value": kl}}
        assert analysis.best is best
        assert tables.ladder(analysis).rows[2][8].tone == tone
    top = headline(analysis)
    assert top.title.startswith("3.00×")
    assert "“other attention” reaches 9.00×, with different quality (top-1" in top.detail
    assert "different quality" in takeaways.ladder(analysis)
    labels = [note["text"] for note in strict(figures.ladder(analysis.summaries))["layout"]["annotations"]]
    assert ["top-1" in label for label in labels] == [False, False, True]
    other.first = replace(other.first, answer="cannot tell")
    cached.first = replace(cached.first, answer="cannot tell")
    assert "is 9.00× by “other attention”, with different quality" in headline(analysis).detail
    other.first = replace(other.first, answer="faster", ratio=Estimate(90.0, 80.0, 95.0, 3))
    assert strict(figures.ladder(analysis.summaries))["layout"]["xaxis"]["type"] == "log"
    analysis.summaries = [base, other]
    assert analysis.best is other, "where nothing else is proven, it is the best"


def test_a_single_failed_run_still_makes_a_report(tmp_path):
    store.write_run(tmp_path / "one", failed_run())
    out = html.write_report([tmp_path / "one"], tmp_path / "r.html")
    assert "Nothing was measured" in out.read_text(encoding="utf-8")
    text = html.summary_markdown([tmp_path / "one"])
    assert "∞" in text
    assert "nan" not in text.lower().replace("dominan", "")


def test_runs_of_several_places_are_compared(tmp_path):
    for i, (name, gap) in enumerate((("before", 4), ("after", 2))):
        for number in range(3):
            records = [
                RequestRecord(
                    f"r{j}", 0, 0, 4, 1, 10, 10 + gap * 90, 10 + gap * 90, 10,
                    token_ns=[10 + gap * 10 * k for k in range(10)], chunk_tokens=[1] * 10,
                    outcome="completed",
                )
                for j in range(6)
            ]  # fmt: skip
            store.write_run(
                tmp_path / f"{i}-{number}", Run({"variant": name, "round": number}, records, [], [])
            )
    analysis = analyse([tmp_path / f"{i}-{n}" for i in range(2) for n in range(3)])
    assert [s.name for s in analysis.summaries] == ["before", "after"]
    assert analysis.summaries[1].first.ratio.value == pytest.approx(370 / 190)
    assert headline(analysis).title.endswith("quality not measured")


def test_only_rounds_that_both_have_and_that_are_valid_are_paired():
    def one(variant, number, span_ns, reasons=()):
        record = RequestRecord(
            "r",
            0,
            0,
            4,
            0,
            1,
            span_ns,
            span_ns,
            2,
            token_ns=[1, span_ns],
            chunk_tokens=[1, 1],
            outcome="completed",
        )
        return Run(
            {"variant": variant, "round": number, "validity": {"reasons": list(reasons)}}, [record], [], []
        )

    noisy = [["machine too noisy", "90 %"]]
    a = summarise("a", [one("a", i, 1000) for i in range(3)])
    b = summarise("b", [one("b", 0, 500), one("b", 2, 501), one("b", 5, 10)])
    assert compare_runs(a, b).ratio.n == 2
    assert compare_runs(a, b).answer == "faster"
    c = summarise("c", [one("c", 0, 500), one("c", 1, 900, noisy), one("c", 2, 501)])
    assert compare_runs(a, c).ratio.value == pytest.approx(2.0, rel=0.01)
    d = summarise("d", [one("d", 0, 500), one("d", 1, 500, noisy), one("d", 2, 501, noisy)])
    assert compare_runs(a, d).answer == "cannot tell"
    assert compare_runs(a, d, compare_invalid=True).answer == "faster"


def test_names_cannot_break_the_page(study_dir, tmp_path):
    evil = '</script><script>alert("x")</script>'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "NoiseSampler", QuietSampler)
        short = study(repeats=1, min_repeats=1, variants=(Variant("plain"), Variant(evil)))
        run(replace(short, name=evil), tmp_path / "s")
    text = html.write_report([tmp_path / "s"], tmp_path / "r.html").read_text(encoding="utf-8")
    assert evil not in text
    assert text.count("<script") == html.render([analyse([study_dir])]).count("<script")


def test_a_report_that_cannot_be_written_is_said(study_dir, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        html.write_report([study_dir], tmp_path / "file" / "r.html")
    with pytest.raises(StoreError, match="no finished run"):
        html.write_report([tmp_path], tmp_path / "r.html")


def test_markdown_holds_the_ladder(study_dir):
    text = html.summary_markdown([study_dir])
    assert "| rung |" in text
    assert "**3.00× the output tokens/s of the baseline, same quality.**" in text
    assert all(
        line.count("|") == text.splitlines()[i - 1].count("|")
        for i, line in enumerate(text.splitlines())
        if line.startswith("|--")
    )


def test_tables_flag_too_few_samples_and_keep_missing_apart(study_dir):
    cells = tables.latencies(analyse([study_dir]).summaries).rows[0]
    assert cells[1].tone == ""  # p50 of 18 requests
    assert cells[2].tone == "flag"  # p90 needs 36
    assert tables.estimate(Estimate(None)).text == units.MISSING
    assert tables.ladder(analyse([study_dir])).rows[0][3].text == "baseline"


@pytest.mark.parametrize(
    ("shape", "value", "text"),
    [
        (units.number, 1234.5, "1,234"),
        (units.number, 0.01234, "0.0123"),
        (units.number, 9.999, "10.00"),
        (units.number, 3.4e-11, "3.4e-11"),
        (units.number, math.inf, "∞"),
        (units.number, None, "–"),
        (units.number, 0.0, "0"),
        (units.seconds, 0.0000123, "12.3 µs"),
        (units.seconds, 0.1, "100 ms"),
        (units.seconds, 12.34, "12.3 s"),
        (units.seconds, math.inf, "∞"),
        (units.times, 3.0, "3.00×"),
        (units.percent, 0.99999, "99.9 %"),
        (units.percent, 1.0, "100.0 %"),
        (units.percent, None, "–"),
    ],
)
def test_numbers_read_well(shape, value, text):
    assert shape(value).replace(units.THIN, " ") == text


def test_the_frontier_is_what_nobody_beats():
    points = [(1.0, 5.0), (2.0, 4.0), (2.0, 6.0), (3.0, 4.5), (4.0, 9.0)]
    assert figures.pareto(points) == [(2.0, 4.0), (3.0, 4.5), (4.0, 9.0)]


def test_facts_are_flattened_without_empties():
    lines = manifest.flat({"a_b": {"c": 1.5, "d": None, "e": []}, "f": [1, "x"], "g": ""})
    assert lines == [("a b · c", "1.50"), ("f", "1, x")]


def test_points_that_lie_together_share_a_label():
    points = [(10.0, 5.0), (100.0, 1.0), (50.0, 2.0), (51.0, 2.1), (52.0, 4.0)]
    assert figures.joint_labels(list("abcde"), points) == ["a", "b", "", "c<br>d", "e"]
    assert figures.joint_labels([], []) == []
