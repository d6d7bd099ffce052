"""Flame graphs: stacks merge exactly, files round-trip, live samplers see the function that burns time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from perflab.errors import PerflabError
from perflab.measure import flame
from perflab.measure.flame import OTHERS, Flame, Frame
from perflab.report.flame import flame_figure, functions_table

MAIN, STEP, FORWARD, SAMPLE = (
    Frame(name, "perflab/engine.py", line)
    for name, line in (("main", 1), ("step", 2), ("forward", 3), ("sample", 4))
)
STACKS = {
    (MAIN, STEP, FORWARD): 6.0,
    (MAIN, STEP, SAMPLE): 1.0,
    (MAIN, STEP): 0.5,
    (MAIN,): 2.5,
}


def test_the_tree_adds_up() -> None:
    root = flame.tree(STACKS)
    main = root.children[MAIN]
    step = main.children[STEP]
    assert (root.total_s, main.self_s, main.total_s) == (10.0, 2.5, 10.0)
    assert (step.self_s, step.total_s) == (0.5, 7.5)
    assert {f: n.total_s for f, n in step.children.items()} == {FORWARD: 6.0, SAMPLE: 1.0}


def test_small_branches_are_merged_and_nothing_is_lost() -> None:
    stacks = {(MAIN, Frame(f"f{i}", "x", i)): 0.001 for i in range(500)} | {(MAIN, STEP): 9.5}
    main = flame.tree(stacks, least=0.01).children[MAIN]
    assert set(main.children) == {STEP, OTHERS}
    assert main.children[OTHERS].total_s == pytest.approx(0.5)
    assert main.total_s == pytest.approx(10.0)


def test_functions_count_recursion_once() -> None:
    found = {row.frame: row for row in flame.functions(STACKS | {(MAIN, STEP, MAIN, STEP): 4.0})}
    assert (found[STEP].self_s, found[STEP].total_s) == (4.5, 11.5)
    assert found[MAIN].total_s == 14.0
    assert flame.functions(STACKS)[0].frame == FORWARD


def test_speedscope_round_trips() -> None:
    file = flame.speedscope(Flame(dict(STACKS), "pyinstrument", 0.001, 10.0, ""), "run")
    assert flame.from_speedscope(file) == STACKS
    (profile,) = file["profiles"]
    assert profile["endValue"] == sum(profile["weights"]) == 10.0
    assert len(profile["samples"]) == len(profile["weights"])
    assert file["shared"]["frames"][0] == {"name": "main", "file": "perflab/engine.py", "line": 1}


def test_collapsed_stacks_are_read() -> None:
    text = (
        "thread (0x7f);main (/x/lib/python3.11/asyncio/run.py:3);<listcomp> (a b.py:9) 12\nmain (m.py:1) 3\n"
    )
    found = flame.parse_raw(text, 0.01)
    outer = (Frame("thread", "0x7f"), Frame("main", "asyncio/run.py", 3), Frame("<listcomp>", "a b.py", 9))
    assert found.stacks == {outer: pytest.approx(0.12), (Frame("main", "m.py", 1),): pytest.approx(0.03)}
    assert found.seconds == pytest.approx(0.15)
    with pytest.raises(PerflabError, match="collapsed"):
        flame.parse_raw("no count here", 0.01)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/venvs/me/venv/lib/python3.11/site-packages/torch/nn/linear.py", "torch/nn/linear.py"),
        ("/usr/lib/python3.11/asyncio/tasks.py", "asyncio/tasks.py"),
        ("/venvs/me/perflab/perflab/engine/engine.py", "perflab/engine/engine.py"),
        ("/venvs/me/work/script.py", "script.py"),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
    ],
)
def test_no_place_of_this_machine_is_shown(path: str, shown: str) -> None:
    assert flame.short(path) == shown


def burn(seconds: float) -> int:
    until, n = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        n += 1
    return n


def test_the_sampler_in_process_sees_what_burns() -> None:
    with flame.sampled(0.001) as found:
        burn(0.3)
    by_function: dict[str, float] = {}
    for row in flame.functions(found.stacks):
        by_function[row.frame.function] = by_function.get(row.frame.function, 0.0) + row.total_s
    assert by_function["burn"] > 0.5 * sum(found.stacks.values())
    assert "sampled" not in by_function
    assert found.seconds >= 0.3
    with pytest.raises(ValueError, match="interval_s"), flame.sampled(0.0):
        pass


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    code = "import time\ndef spin():\n  t=time.time()\n  while time.time()-t<20: pass\nspin()"
    child = subprocess.Popen([sys.executable, "-c", code])
    yield child
    child.kill()
    child.wait()


def test_another_process_is_seen_by_py_spy(busy: subprocess.Popen[bytes]) -> None:
    time.sleep(0.2)
    try:
        found = flame.watch(busy.pid, 1)
    except PerflabError as error:
        pytest.skip(str(error))
    assert any(frame.function == "spin" for stack in found.stacks for frame in stack)


def test_a_process_that_is_not_there_is_named() -> None:
    with pytest.raises(PerflabError, match="py-spy"):
        flame.watch(2**22 + 1, 1)


def test_the_picture_holds_every_second_and_the_table_the_order() -> None:
    (icicle,) = flame_figure(STACKS).data
    assert icicle.labels[0] == "main"
    values = dict(zip(icicle.labels, icicle.values, strict=True))
    assert values == {"main": 10.0, "step": 7.5, "forward": 6.0, "sample": 1.0}
    table = functions_table(STACKS)
    assert [row[0].text for row in table.rows] == ["forward", "main", "sample", "step"]
