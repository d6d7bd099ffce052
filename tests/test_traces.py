"""Files in the public formats become the workloads that they describe; what is wrong is named by its line."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from perflab.errors import WorkloadError
from perflab.load.arrivals import Arrivals
from perflab.load.prompts import Blocks, Chat, Synthetic
from perflab.load.traces import from_prompts, from_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-16 18:16:46.6805900,879,55\r
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]},
    {"timestamp": 1500, "input_length": 1024, "output_length": 5, "hash_ids": [0, 7]},
    {"timestamp": 2500, "input_length": 513, "output_length": 5, "hash_ids": [0, 1]},
]


def lines(path: Path, rows: list) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_azure_traces_keep_times_and_lengths(tmp_path):
    (tmp_path / "azure.csv").write_text(AZURE)
    load = from_trace(tmp_path / "azure.csv", max_input=10_000, max_output=10_000)
    assert load.open_loop
    assert [r.arrival_s for r in load.requests] == pytest.approx([0.0, 4.314579, 60.0])
    assert [(r.prompt_length, r.output_length) for r in load.requests] == [(374, 44), (396, 109), (879, 55)]
    assert isinstance(load.requests[0].prompt, Synthetic)


def test_a_trace_is_scaled_in_time_and_cut_to_a_window(tmp_path):
    (tmp_path / "azure.csv").write_text(AZURE)
    load = from_trace(tmp_path / "azure.csv", speed=10.0, start_s=1.0, duration_s=100.0)
    assert [r.prompt_length for r in load.requests] == [396, 879]
    assert [r.arrival_s for r in load.requests] == pytest.approx([0.0, 5.5685421])
    assert len(from_trace(tmp_path / "azure.csv", duration_s=5.0).requests) == 2
    with pytest.raises(WorkloadError, match="no request from 100 s on"):
        from_trace(tmp_path / "azure.csv", start_s=100.0)


def test_mooncake_blocks_become_shared_prefixes(tmp_path):
    load = from_trace(lines(tmp_path / "m.jsonl", MOONCAKE), max_input=10_000)
    assert [r.arrival_s for r in load.requests] == [0.0, 1.5, 2.5]
    assert [r.prompt for r in load.requests] == [
        Blocks(((0, 512), (1, 188))),
        Blocks(((0, 512), (7, 512))),
        Blocks(((0, 512), (1, 1))),
    ]
    assert [r.prompt_length for r in load.requests] == [700, 1024, 513]
    assert from_trace(tmp_path / "m.jsonl", max_input=600).requests[1].prompt == Blocks(((0, 512), (7, 88)))


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{**MOONCAKE[0], "hash_ids": [0]}], "1 blocks do not hold 700 tokens"),
        ([MOONCAKE[0], {"timestamp": 1}], ":2: .* does not hold three numbers"),
        ([{**MOONCAKE[0], "timestamp": "soon"}], ":1"),
        ([{**MOONCAKE[0], "output_length": 0}], "output tokens must be 1 or more"),
    ],
)
def test_bad_mooncake_lines_are_named(tmp_path, rows, named):
    with pytest.raises(WorkloadError, match=named):
        from_trace(lines(tmp_path / "m.jsonl", rows))


PROMPTS = {
    "mt_bench": (
        {"question_id": 81, "category": "writing", "turns": ["First?", "Second?"]},
        ("81", "writing", Chat("First?")),
    ),
    "gsm8k": ({"question": "How many?", "answer": "#### 18"}, ("gsm8k-0000", "default", Chat("How many?"))),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    return 1\n"},
        ("HumanEval/0", "default", Chat("def f():\n")),
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_sets_are_read_by_their_fields(tmp_path, name):
    row, (request_id, category, prompt) = PROMPTS[name]
    (request,) = from_prompts(lines(tmp_path / f"{name}.jsonl", [row])).requests
    assert (request.request_id, request.request_class, request.prompt) == (request_id, category, prompt)


def test_outputs_are_as_long_as_the_answers_in_the_file_where_asked(tmp_path):
    file = lines(tmp_path / "g.jsonl", [{"question": "a b", "answer": "one two three"}, {"question": "c"}])
    load = from_prompts(file, max_tokens=9, ignore_eos=True, count=lambda text: len(text.split()))
    assert [r.params.max_tokens for r in load.requests] == [3, 9]
    assert [r.params.max_tokens for r in from_prompts(file, max_tokens=9).requests] == [9, 9]


def test_gzip_is_read_by_its_name(tmp_path):
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(PROMPTS["humaneval"][0]))
    load = from_prompts(tmp_path / "HumanEval.jsonl.gz")
    assert load.name == "HumanEval"
    assert load.requests[0].request_id == "HumanEval/0"
    (tmp_path / "broken.jsonl.gz").write_bytes((tmp_path / "HumanEval.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(WorkloadError, match="cannot be read"):
        from_prompts(tmp_path / "broken.jsonl.gz")


def test_sharegpt_keeps_conversations_that_a_user_began_and_someone_answered(tmp_path):
    talks = [
        {
            "id": "a",
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello you"}],
        },
        {"id": "b", "conversations": [{"from": "gpt", "value": "Go on"}, {"from": "human", "value": "No"}]},
        {"id": "c", "conversations": [{"from": "human", "value": "alone"}]},
        {
            "id": "d",
            "conversations": [
                {"from": "system", "value": "Be kind."},
                {"from": "human", "value": "Why?"},
                {"from": "gpt", "value": "So."},
            ],
        },
    ]
    (tmp_path / "sharegpt.json").write_text(json.dumps(talks))
    load = from_prompts(tmp_path / "sharegpt.json", count=lambda text: len(text.split()))
    assert [(r.request_id, r.prompt) for r in load.requests] == [("a", Chat("Hi")), ("d", Chat("Why?"))]
    assert [r.params.max_tokens for r in load.requests] == [2, 1]
    (tmp_path / "sharegpt.json").write_text(json.dumps([talks[0], {"id": "x"}]))
    with pytest.raises(WorkloadError, match="conversation 2"):
        from_prompts(tmp_path / "sharegpt.json")


def test_plain_text_is_asked_by_paragraph(tmp_path):
    (tmp_path / "page.txt").write_text("One\nand more.\n \nTwo.\n\n\n", encoding="utf-8")
    assert [r.prompt for r in from_prompts(tmp_path / "page.txt").requests] == [
        Chat("One\nand more."),
        Chat("Two."),
    ]


def test_too_few_prompts_are_asked_again_under_other_names_and_salts(tmp_path):
    file = lines(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    load = from_prompts(file, Arrivals("constant", 2.0), duration_s=2.5).salted("s")
    assert [r.request_id for r in load.requests] == ["p-0000", "p-0001", "p-0000~1", "p-0001~1", "p-0000~2"]
    assert [r.salt for r in load.requests] == ["s", "s", "s.1", "s.1", "s.2"]
    assert len(from_prompts(file, requests=3).requests) == 3
    assert len(from_prompts(file, limit=1, requests=3).requests) == 3


ROWS = {
    "azure_llm_2023_conv.csv": 19_366,
    "azure_llm_2023_code.csv": 8_819,
    "mooncake_conversation.jsonl": 12_031,
    "mooncake_synthetic.jsonl": 3_993,
    "spec_bench.jsonl": 480,
    "mt_bench.jsonl": 80,
    "gsm8k_test.jsonl": 1_319,
    "HumanEval.jsonl.gz": 164,
}


@pytest.mark.verify
@pytest.mark.parametrize("name", ROWS)
def test_the_real_files_are_read_whole(name):
    file = Path(os.environ.get("PERFLAB_SHARED_DATA", "")) / name
    if not file.is_file():
        pytest.skip("set PERFLAB_SHARED_DATA to the directory that holds the public files")
    is_trace = name.startswith(("azure", "mooncake"))
    load = from_trace(file, max_input=10**9, max_output=10**9) if is_trace else from_prompts(file)
    assert len(load.requests) == ROWS[name]
    if name.startswith("mooncake"):
        blocks = [number for r in load.requests for number, _ in r.prompt.blocks]
        reused = 1 - len(set(blocks)) / len(blocks)
        assert reused == pytest.approx({"conversation": 0.37, "synthetic": 0.64}[load.name[9:]], abs=0.01)
    elif name.startswith("azure"):
        lengths = [r.prompt_length for r in load.requests]
        assert sum(lengths) / len(lengths) == pytest.approx(1155 if "conv" in name else 2048, abs=1)
