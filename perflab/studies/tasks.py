"""Small tasks whose answers can be checked: sums, and Python functions.

Owns the items, how a model is asked for them, and the check. An answer in code is run only where the caller
says so: in a fresh process with its own folder and limits, which is no sandbox. Knows no model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from perflab.errors import WorkloadError

FOLDER = Path(__file__).resolve().parents[2] / "data" / "tasks"
SETS = ("arithmetic", "code")
ANSWER_TOKENS = {"arithmetic": 64, "code": 160}
"""Longest answer of each set, in tokens."""

_HOW = {
    "arithmetic": "{} Give the result as a number at the end.",
    "code": "{} Answer with the code alone.",
}
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.S)
_SECONDS, _BYTES, _FILE_BYTES = 5, 512 << 20, 1 << 20
_HARNESS = """
import json, resource, sys
def limit(kind, most):
    try:
        resource.setrlimit(kind, (most, most))
    except (ValueError, OSError):
        pass  # a system without this limit still has the wall-clock one
limit(resource.RLIMIT_CPU, {seconds})
limit(resource.RLIMIT_AS, {memory})
limit(resource.RLIMIT_FSIZE, {file})
limit(resource.RLIMIT_CORE, 0)
given = json.load(sys.stdin)
space = {{"__name__": "answer"}}
exec(given["code"], space)
assert given["tests"] and all(eval(test, space) for test in given["tests"])
sys.stdout.write(given["passed"]); sys.stdout.flush()
"""


@dataclass(frozen=True, slots=True)
class Task:
    """One question; `answer` is a number as text, `tests` are Python expressions that must be true."""

    name: str
    kind: str
    question: str
    answer: str = ""
    tests: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """What the model is asked."""
        return _HOW[self.kind].format(self.question)

    def passes(self, text: str) -> bool:
        """Whether a model's answer is right. A `code` task runs the answer."""
        if self.kind == "arithmetic":
            return last_number(text) == Fraction(self.answer)
        return run_code(code_of(text), self.tests)


def read(kind: str, file: Path | None = None) -> list[Task]:
    """The tasks of a set. Raises WorkloadError for an unknown set or a file that is missing or damaged."""
    if kind not in SETS:
        raise WorkloadError(f"{kind!r}: there is no such task set; choose from {', '.join(SETS)}")
    file = file or FOLDER / f"{kind}.jsonl"
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [
            Task(row["id"], kind, row["question"], row.get("answer", ""), tuple(row.get("tests", ())))
            for row in rows
        ]
    except (OSError, ValueError, KeyError) as error:
        raise WorkloadError(
            f"{file}: not a task set ({error!r}); take `data/tasks` from the project's repository"
        ) from None


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly: `1,234.5`, `-3`, `7/2`; None where there is none."""
    found = _NUMBER.findall(text)
    try:
        return Fraction(found[-1].replace(",", "")) if found else None
    except (ValueError, ZeroDivisionError):
        return None


def code_of(text: str) -> str:
    """The first fenced block of an answer, else all of it."""
    block = _BLOCK.search(text)
    return block[1] if block else text


def run_code(code: str, tests: tuple[str, ...], seconds: float = _SECONDS, memory: int = _BYTES) -> bool:
    """Whether every test holds after `code` ran, in `python -I` with an empty environment and folder.

    Limits: `seconds` of CPU and of waiting, `memory` bytes of address space (where the system has such a
    limit), files of 1 MiB. Whatever it started in its process group is killed. It is no sandbox: the code
    can read files and reach the network as the user can.
    """
    passed = secrets.token_hex(16)
    harness = _HARNESS.format(seconds=max(1, int(seconds)), memory=memory, file=_FILE_BYTES)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", harness],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            given = json.dumps({"code": code, "tests": tests, "passed": passed})
            process.communicate(given.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return process.returncode == 0 and out.read().endswith(passed.encode())
