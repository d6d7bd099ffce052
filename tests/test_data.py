"""The data that ship with the project: complete, as their READMEs describe, and reproducible."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from perflab.load.traces import from_prompts, from_trace

DATA = Path(__file__).resolve().parent.parent / "data"
SETS = {"chat": 24, "shared_document_qa": 18, "code": 16, "summarise": 10, "chinese_english": 16}


def rows(name: str) -> list[dict[str, str]]:
    text = (DATA / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", SETS)
def test_prompt_sets_are_complete(name: str) -> None:
    found = rows(name)
    fields = {"id", "category", "prompt"} | ({"document"} if name == "shared_document_qa" else set())
    assert len(found) == SETS[name]
    assert all(set(row) == fields and all(row.values()) for row in found)
    assert len({row["id"] for row in found}) == len(found)
    assert len({row["prompt"] for row in found}) == len(found)


def test_every_prompt_set_is_described() -> None:
    readme = (DATA / "prompts" / "README.md").read_text(encoding="utf-8")
    described = {
        name: int(count) for name, count in re.findall(r"^\| `(\w+)\.jsonl` \| (\d+) \|", readme, re.M)
    }
    assert described == SETS
    assert {path.stem for path in (DATA / "prompts").glob("*.jsonl")} == set(SETS)


def test_questions_share_their_documents() -> None:
    counts = pd.Series([row["document"] for row in rows("shared_document_qa")]).value_counts()
    assert counts.tolist() == [6, 6, 6]
    assert all(300 <= len(document.split()) <= 450 for document in counts.index)


def test_passages_have_the_length_they_claim() -> None:
    passages = [row["prompt"].split("\n\n", 1)[1] for row in rows("summarise")]
    assert all(120 <= len(passage.split()) <= 250 for passage in passages)


def test_chinese_set_is_in_both_languages() -> None:
    prompts = [row["prompt"] for row in rows("chinese_english")]
    chinese = [bool(re.search(r"[\u4e00-\u9fff]", prompt)) for prompt in prompts]
    latin = [bool(re.search(r"[A-Za-z]{4}", prompt)) for prompt in prompts]
    assert sum(chinese) >= 10
    assert sum(latin) >= 6


def test_traces_are_what_the_script_writes(tmp_path: Path) -> None:
    written = runpy.run_path(str(DATA / "traces" / "make_traces.py"))["write"](tmp_path)
    assert {path.name for path in written} == {path.name for path in (DATA / "traces").glob("*.csv")}
    for path in written:
        assert path.read_bytes() == (DATA / "traces" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("name", "rate", "cv", "input_mu", "output_mu"),
    [("chat", 5.53, (1.0, 1.25), 6.63, 5.02), ("code", 2.57, (10.0, 16.0), 7.00, 2.79)],
)
def test_traces_have_the_statistics_they_aim_at(
    name: str, rate: float, cv: tuple[float, float], input_mu: float, output_mu: float
) -> None:
    trace = pd.read_csv(DATA / "traces" / f"{name}.csv")
    gaps = np.diff(trace["arrival_s"])
    assert list(trace.columns) == ["arrival_s", "input_tokens", "output_tokens"]
    assert trace["arrival_s"].iloc[0] == 0
    assert (gaps >= 0).all()
    assert (trace[["input_tokens", "output_tokens"]] >= 1).all(axis=None)
    assert len(trace) / trace["arrival_s"].iloc[-1] == pytest.approx(rate, rel=0.1)
    assert cv[0] < gaps.std() / gaps.mean() < cv[1]
    # medians, since the caps cut the tails that a mean of logarithms would feel
    assert np.log(trace["input_tokens"].median()) == pytest.approx(input_mu, abs=0.2)
    assert np.log(trace["output_tokens"].median()) == pytest.approx(output_mu, abs=0.2)


def test_every_data_folder_says_how_it_was_made_and_its_licence() -> None:
    for folder in (DATA / "prompts", DATA / "traces"):
        readme = (folder / "README.md").read_text(encoding="utf-8")
        assert "made" in readme
        assert "Licence: Apache-2.0" in readme


@pytest.mark.parametrize("name", SETS)
def test_prompt_sets_load_as_workloads(name: str) -> None:
    workload = from_prompts(DATA / "prompts" / f"{name}.jsonl", max_tokens=8)
    assert len(workload.requests) == SETS[name]


def test_traces_load_as_workloads() -> None:
    workload = from_trace(DATA / "traces" / "code.csv", limit=20, max_input=64, max_output=8)
    assert workload.open_loop
    assert [r.prompt_length for r in workload.requests] == [64] * 20
