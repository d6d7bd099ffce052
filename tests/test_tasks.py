"""Answers to tasks: right ones pass, wrong ones do not, and code that misbehaves is stopped."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path

import psutil
import pytest

from perflab.errors import WorkloadError
from perflab.studies import tasks


def solutions() -> dict[str, str]:
    lines = (tasks.FOLDER / "code.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["id"]: row["solution"] for row in map(json.loads, lines)}


@pytest.mark.parametrize("kind", tasks.SETS)
def test_sets_are_complete(kind: str) -> None:
    found = tasks.read(kind)
    assert len(found) >= 24
    assert len({task.name for task in found}) == len({task.question for task in found}) == len(found)
    assert all(task.answer if kind == "arithmetic" else len(task.tests) > 1 for task in found)


@pytest.mark.parametrize(
    "text", ["12", "7 + 5 = 12.", "The sum is **12**", "$12", "12.0", "24/2", "It was 7, now 12"]
)
def test_a_right_number_passes(text: str) -> None:
    assert tasks.Task("a", "arithmetic", "", "12").passes(text)


@pytest.mark.parametrize("text", ["", "twelve", "12 or 13", "-12", "12.5", "1 2 0", "12/0"])
def test_a_wrong_number_does_not(text: str) -> None:
    assert not tasks.Task("a", "arithmetic", "", "12").passes(text)


def test_numbers_are_exact() -> None:
    assert tasks.last_number("about 1,234.50") == Fraction(2469, 2)
    assert tasks.last_number("none") is None


def test_the_code_set_has_right_solutions_and_its_tests_can_fail() -> None:
    own = solutions()
    for task in tasks.read("code"):
        assert task.passes(f"Here it is:\n```python\n{own[task.name]}```\nDone."), task.name
    wrong = own[task.name].replace("return", "return None and")
    assert not task.passes(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "",
        "def f(:",
        "def f(): return 2",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "while True: pass",
        "import time; time.sleep(60)",
        "keep = bytearray(4 << 30)",
        "print('x' * (64 << 20))",
    ],
)
def test_code_that_misbehaves_fails_and_ends(code: str) -> None:
    assert not tasks.run_code(code, ("f() == 1",), seconds=1.0)


def test_memory_is_what_stops_the_one_that_wants_too_much() -> None:
    code = "keep = bytearray({}); f = lambda: 1"
    assert tasks.run_code(code.format(1 << 20), ("f() == 1",))
    assert not tasks.run_code(code.format(4 << 30), ("f() == 1",))


def test_answers_see_no_environment_and_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFLAB_API_KEY", "secret")
    assert tasks.run_code("import os", ("'PERFLAB_API_KEY' not in os.environ", "os.listdir() == []"))


def test_a_process_that_an_answer_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    code = (
        f"import subprocess, sys; p = subprocess.Popen({sleep}); open({str(file)!r}, 'w').write(str(p.pid))"
    )
    assert tasks.run_code(code, ("p.poll() is None",))

    def runs() -> bool:
        try:
            return psutil.Process(int(file.read_text())).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    for _ in range(100):  # the kernel may take a moment
        if not runs():
            return
        time.sleep(0.05)
    raise AssertionError("the child still runs")


def test_a_missing_or_damaged_set_names_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"no\.jsonl.*repository"):
        tasks.read("code", tmp_path / "no.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(WorkloadError, match=r"bad\.jsonl.*id"):
        tasks.read("code", tmp_path / "bad.jsonl")
    with pytest.raises(WorkloadError, match=r"'maths'.*arithmetic, code"):
        tasks.read("maths")
