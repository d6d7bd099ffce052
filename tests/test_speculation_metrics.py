"""Speculation in numbers and in the report, against drafts whose right values are known by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_runs import MS, START, bench
from fake_target import FakeModel
from hypothesis import given, settings
from hypothesis import strategies as st
from test_report import strict
from test_study import QuietSampler, make_engine, study
from test_study import run as run_study

from perflab.engine.draft import count_draft
from perflab.measure import speculation
from perflab.measure.validity import judge
from perflab.models.tiny import tiny
from perflab.report import figures, html, tables, tables_service
from perflab.report.analysis import analyse
from perflab.report.sections import sections
from perflab.report.speculation import acceptance_figure, speculations
from perflab.report.summary import summarise
from perflab.speculate.make import make_engine as make_real_engine
from perflab.studies import session, store
from perflab.studies.define import Variant
from perflab.studies.store import Run
from perflab.studies.study import run_study as run_anywhere
from perflab.types import Request, RequestRecord, SamplingParams, StepRecord


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch):
    monkeypatch.setattr(session, "NoiseSampler", QuietSampler)


def drafted(*drafts: tuple[int, int], **more) -> RequestRecord:
    """A request with these drafts, each (guesses, of which so many held)."""
    record = RequestRecord("r", 0, 0, 4, **more)
    for proposed, accepted in drafts:
        count_draft(record, proposed, accepted)
    return record


def step(index: int, forward_ms: int, **more) -> StepRecord:
    """A step with 1 ms for each hop but the model's own time."""
    at = [index * 100 * MS]
    for hop in (1, 1, forward_ms, 1, 1, 1):
        at.append(at[-1] + hop * MS)
    return StepRecord(index, *at, **more)


def test_acceptance_by_place_is_of_the_drafts_that_reached_it():
    found = speculation.acceptance([drafted((3, 3), (3, 1), (3, 0)), drafted((2, 2)), drafted()])
    assert found.proposed == (4, 4, 3)
    assert found.reached == (4, 3, 1), "only the first draft reached its third place"
    assert found.accepted == (3, 2, 1)
    assert [e.value for e in found.by_place] == pytest.approx([3 / 4, 2 / 3, 1])
    assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (4, 11, 6)
    assert found.share == pytest.approx(6 / 11)


def test_the_mean_accepted_length_counts_drafts_or_requests():
    """One request with three drafts of 4, 2 and 1 tokens, one with a draft of 3; one without any."""
    found = speculation.acceptance([drafted((3, 3), (3, 1), (3, 0)), drafted((2, 2)), drafted()])
    assert sorted(found.lengths) == [(1, 2, 4), (3,)]
    assert found.length_by_tokens.value == pytest.approx(10 / 4)
    assert found.length_by_request.value == pytest.approx((7 / 3 + 3) / 2)


def test_no_drafts_are_missing_and_not_zero():
    found = speculation.acceptance([drafted()])
    assert (found.drafts, found.draft_tokens, found.by_place) == (0, 0, ())
    assert found.share is found.length_by_tokens.value is found.length_by_request.value is None
    none = speculation.work([])
    assert none.wasted is none.draft_s is none.forward_with_s is none.forward_without_s is None


def test_what_guessing_costs_a_step():
    """Of 30 + 6 + 2 rows computed three guesses were rejected; draft time counts where it was in vain too."""
    found = speculation.work(
        [
            step(0, 20, prefill_tokens=30, draft_ns=1 * MS),
            step(1, 12, decode_tokens=6, draft_tokens=4, accepted_tokens=1, draft_ns=2 * MS, verify_ns=MS),
            step(2, 10, decode_tokens=2, draft_ns=3 * MS, rollback_ns=6 * MS),
        ]
    )
    assert (found.steps, found.with_drafts, found.rows, found.rejected) == (3, 1, 38, 3)
    assert found.wasted == pytest.approx(3 / 38)
    assert found.step_s == pytest.approx((25 + 17 + 15) / 3 / 1e3)
    assert (found.draft_s, found.verify_s, found.rollback_s) == pytest.approx((2e-3, 1e-3 / 3, 2e-3))
    assert (found.forward_with_s, found.forward_without_s) == pytest.approx((0.012, 0.010))


DRAFT = st.integers(1, 6).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size)))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(DRAFT, max_size=12), max_size=6))
def test_counts_add_up_whatever_the_drafts(requests):
    found = speculation.acceptance(drafted(*drafts) for drafts in requests)
    every = [draft for drafts in requests for draft in drafts]
    assert found.drafts == len(every)
    assert found.draft_tokens == sum(size for size, _ in every)
    assert found.accepted_tokens == sum(held for _, held in every)
    assert sorted(n for own in found.lengths for n in own) == sorted(1 + held for _, held in every)
    assert list(found.proposed) == sorted(found.proposed, reverse=True)
    for place, (proposed, reached, accepted) in enumerate(
        zip(found.proposed, found.reached, found.accepted, strict=True)
    ):
        assert proposed >= reached >= accepted
        share = found.by_place[place].value
        assert share is None if not reached else 0 <= share == accepted / reached <= 1
        assert reached == sum(size > place <= held for size, held in every)
    if every:
        assert found.length_by_tokens.value == pytest.approx(1 + found.accepted_tokens / found.drafts)
        means = [1 + sum(h for _, h in drafts) / len(drafts) for drafts in requests if drafts]
        assert found.length_by_request.value == pytest.approx(sum(means) / len(means))
        assert min(means) <= found.length_by_tokens.value + 1e-9
        assert found.length_by_tokens.value <= max(means) + 1e-9


@pytest.mark.parametrize("forced", [None, 0.6])
def test_an_engine_records_requests_and_steps_that_agree(forced):
    """The counts of requests and those of steps come by different ways and are of the same guesses."""
    model = tiny("llama")
    switches = {"drafter": "ngram", "adaptive_draft": False, "forced_acceptance": forced}
    config = study(config=switches).engine_config(Variant("v"))
    engine = make_real_engine(model, config)
    for i in range(4):
        text = ([5, 6, 7, 8] * (i + 2))[: 9 + i]
        engine.submit(Request(f"r{i}", text, SamplingParams(max_tokens=24, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    held, done = speculation.acceptance(engine.records), speculation.work(engine.steps)
    assert held.draft_tokens > 10
    assert done.rejected == held.draft_tokens - held.accepted_tokens
    assert sum(s.draft_tokens for s in engine.steps) == held.draft_tokens
    assert 0 <= done.wasted < 1
    assert done.draft_s > 0 < done.rollback_s
    assert done.draft_s + done.verify_s + done.rollback_s < done.step_s
    assert any("not the model's" in note for note in judge(engine.records).notes) == (forced is not None)
    if forced is not None:
        assert held.share > 0.3, "guesses are taken whatever the model draws"
    engine.close()


class Guessing:
    """`FakeEngine`'s records with a draft of three for each request, of which two held, where a variant
    names a drafter; twice as fast then."""

    def __new__(cls, model, config):
        guesses = config.drafter != "off"

        def on_step(engine):
            for s in engine.steps[-1:] if guesses else ():
                s.decode_tokens, s.draft_tokens, s.accepted_tokens, s.draft_ns = 4 * s.rows, 3, 2, MS
            for r in engine.records if guesses else ():
                r.draft_proposed, r.draft_reached, r.draft_accepted = [1, 1, 1], [1, 1, 1], [1, 1, 0]
                r.forced_acceptance = config.forced_acceptance

        made = make_engine(model, config, on_step=on_step)
        made.step_ms = lambda config, index: (5.0 if guesses else 10.0) * (1 + 0.001 * (index % 5))
        return made


@pytest.fixture
def speculative(tmp_path) -> Path:
    """A study of a plain variant, one that guesses, one whose guesses are accepted by force."""
    guess = {"drafter": "ngram"}
    chosen = study(
        variants=(
            Variant("plain"),
            Variant("lookup", guess),
            Variant("forced", {**guess, "forced_acceptance": 0.7}),
        )
    )
    run_study(chosen, tmp_path / "s", make=Guessing)
    return tmp_path / "s"


def test_a_study_shows_speculation_where_a_variant_speculates(speculative):
    analysis = analyse([speculative])
    [chapter] = [s for s in sections(analysis) if s.anchor == "speculation"]
    names = [row[0].text for row in chapter.table.rows]
    assert names == ["lookup", "forced"], "the plain variant does not speculate"
    lookup = chapter.table.rows[0]
    assert lookup[2].note.startswith("66.7"), "two of three guesses held"
    assert lookup[3].text.startswith("3.00"), "the model's own token counts"
    assert "67\u202f% of" in chapter.takeaway
    drawn = strict(chapter.figure)["data"]
    assert [trace["name"] for trace in drawn] == ["lookup", "forced (forced)"]
    assert drawn[0]["y"] == [100.0, 100.0, 0.0]
    page = html.write_report([speculative], speculative / "report.html").read_text(encoding="utf-8")
    assert 'id="speculation"' in page
    for name in speculation.FORMULAS:
        assert f"<dt>{name}</dt>" in page


def test_forced_acceptance_is_marked_and_never_the_best(speculative):
    analysis = analyse([speculative])
    _, lookup, forced = analysis.summaries
    assert lookup.first.answer == forced.first.answer == "faster"
    assert analysis.best is lookup
    assert [s.name for s in analysis.proven] == ["lookup"]
    row = tables.ladder(analysis).rows[2]
    assert "not the model's" in row[0].note
    assert row[8].tone == "flag"
    assert "not the model's" in tables.qualities(analysis.summaries).rows[2][0].note
    labels = [note["text"] for note in strict(figures.ladder(analysis.summaries))["layout"]["annotations"]]
    assert ["not the model's" in label for label in labels[:3]] == [False, False, True]
    assert "not the model's" not in tables.ladder(analysis).rows[1][0].note
    assert all("not the model's" in " ".join(tables.notes_of(run)) for run in forced.runs)
    assert "not the model's" in html.summary_markdown([speculative])


def test_two_services_of_which_one_is_forced_say_so(tmp_path):
    runs = [bench("plain"), bench("forced", ttft_ms=50)]
    for r in runs[1].requests:
        r.forced_acceptance = 0.5
    for i, run in enumerate(runs):
        store.write_run(tmp_path / f"r{i}", run)
    analysis = analyse([tmp_path / "r0", tmp_path / "r1"])
    assert "not the model's" in tables_service.results(analysis).rows[1][0].note


def test_a_service_run_shows_it_and_one_without_does_not(tmp_path):
    plain, run = bench("plain"), bench("http://127.0.0.1:1")
    count_draft(run.requests[0], 4, 1)
    store.write_run(tmp_path / "plain", plain)
    store.write_run(tmp_path / "run", run)
    assert "speculation" not in [s.anchor for s in sections(analyse([tmp_path / "plain"]))]
    [chapter] = [s for s in sections(analyse([tmp_path / "run"])) if s.anchor == "speculation"]
    assert chapter.table.rows[0][1].text == "4"
    assert chapter.table.rows[0][6].text == "–", "no steps are known of a server elsewhere"


def test_a_drafter_that_never_guessed_is_said(tmp_path):
    facts = {"service": {"kind": "engine", "engine": {"drafter": "ngram"}}}
    store.write_run(tmp_path / "run", bench(**facts))
    [chapter] = [s for s in sections(analyse([tmp_path / "run"])) if s.anchor == "speculation"]
    assert "made no guess" in chapter.takeaway
    assert chapter.figure is None


def test_the_figure_takes_places_that_nobody_reached():
    [one] = speculations(analysis_of(drafted((3, 0))))
    assert strict(acceptance_figure([one]))["data"][0]["y"] == [0.0, None, None]


def analysis_of(record: RequestRecord):
    record.outcome, record.intended_ns = "completed", START
    return [summarise("one", [Run({"variant": "one"}, [record], [], [])])]


@pytest.mark.parametrize("notes", [(), ("weights are dequantised from Q4_1",)])
def test_the_report_says_what_the_reference_is_made_of(tmp_path, notes):
    def load(name, dtype, device):
        return replace(FakeModel(name), notes=notes)

    run_anywhere(study(), tmp_path / "s", load_model=load, make_engine=make_engine)
    [chapter] = [s for s in sections(analyse([tmp_path / "s"])) if s.anchor == "quality"]
    assert ("its own weights are dequantised from Q4_1" in chapter.note) == bool(notes)
