"""Which Python code was running when: sampled stacks, their tree, and speedscope's file format.

Owns the two samplers: pyinstrument inside this process, one thread of it, and py-spy beside another
process. Neither changes what is measured into calls and returns; both see a call into native code
as the Python function that made it. Knows no engine.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from perflab.clock import NS_PER_S, WallClock
from perflab.errors import PerflabError


class Frame(NamedTuple):
    """A function, by the line where it is defined; `file` counts from its package."""

    function: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})" if self.file else self.function


Stack = tuple[Frame, ...]
"""Outermost first."""


@dataclass(slots=True)
class Flame:
    """Seconds by stack, how they were sampled, and what the method cannot see."""

    stacks: dict[Stack, float]
    method: str
    interval_s: float
    seconds: float  # from start to end of sampling
    unseen: str
    cpu_s: float | None = field(default=None)  # of the whole process meanwhile

    def add(self, stack: Stack, seconds: float) -> None:
        self.stacks[stack] = self.stacks.get(stack, 0.0) + seconds


IN_PROCESS = (
    "other threads than the sampled one; what runs inside a native call (kernels, BLAS) is its caller's; "
    "functions far shorter than the interval appear by chance, in proportion to their time"
)
BESIDE = (
    "what runs inside a native call is its caller's; samples are taken without stopping the process, "
    "so that a few stacks may be torn"
)


@contextmanager
def sampled(interval_s: float = 0.001) -> Iterator[Flame]:
    """Sample the calling thread inside the `with`; the yielded flame is filled at its end.

    Raises PerflabError where pyinstrument is not installed, ValueError for an interval below 0.1 ms.
    """
    if interval_s < 1e-4:
        raise ValueError(f"interval_s={interval_s}: 0.0001 or more; below, sampling is what is measured")
    try:
        from pyinstrument import Profiler
    except ImportError:
        raise PerflabError("pyinstrument is not installed: pip install 'perflab[profile]'") from None
    found = Flame({}, "pyinstrument", interval_s, 0.0, IN_PROCESS)
    profiler = Profiler(interval=interval_s, async_mode="disabled")
    clock = WallClock()
    start = clock.now()
    profiler.start()
    try:
        yield found
    finally:
        session = profiler.stop()
        found.seconds = (clock.now() - start) / NS_PER_S
        found.cpu_s = session.cpu_time
        for identifiers, seconds in session.frame_records:
            found.add(_own_frames(identifiers), seconds)


def _own_frames(identifiers: Iterable[str]) -> Stack:
    """pyinstrument's `function\\0file\\0line\\1attributes`, without the thread and this module's frame."""
    frames = []
    for identifier in identifiers:
        function, file, line = identifier.partition("\x01")[0].split("\x00")[:3]
        if file == "<thread>" or (file == __file__ and function == "sampled"):
            continue
        frames.append(Frame(function, short(file), int(line)))
    return tuple(frames)


def short(file: str) -> str:
    """A path from its package on: no place of this machine belongs into a result."""
    parts = Path(file).parts
    for place in reversed(range(len(parts) - 1)):
        part = parts[place]
        if part in ("site-packages", "dist-packages") or re.fullmatch(r"python3\.\d+", part):
            return "/".join(parts[place + 1 :])
        if part == "perflab":
            return "/".join(parts[place:])
    return parts[-1] if parts else file


def watch(pid: int, seconds: float, rate: int = 100, native: bool = False) -> Flame:
    """Sample another Python process by py-spy for some seconds, all its threads that use a core.

    native: also the frames of its extension modules. Raises PerflabError where py-spy is missing or
    may not look at the process.
    """
    program = Path(sys.executable).with_name("py-spy")
    found = str(program) if program.exists() else shutil.which("py-spy")
    if found is None:
        raise PerflabError("py-spy is not installed: pip install 'perflab[profile]'")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stacks"
        command = [found, "record", "--pid", str(pid), "--format", "raw", "--output", str(out), "--threads"]
        command += ["--function", "--rate", str(rate), "--duration", str(max(1, round(seconds)))]
        command += ["--native"] if native else ["--nonblocking"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise PerflabError(
                f"py-spy cannot look at process {pid}: {last}. It needs the same user and, on Linux, "
                "kernel.yama.ptrace_scope=0 or root"
            )
        return parse_raw(out.read_text(), 1 / rate, native)


_RAW_FRAME = re.compile(r"(?P<function>.*) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")


def parse_raw(text: str, interval_s: float, native: bool = False) -> Flame:
    """Collapsed stacks, `outer (file:line);inner (file:line) count` a line, as py-spy and others write.

    Raises PerflabError for a line that is none.
    """
    flame = Flame({}, "py-spy --native" if native else "py-spy", interval_s, 0.0, BESIDE)
    for line in filter(None, map(str.strip, text.splitlines())):
        stack, _, count = line.rpartition(" ")
        if not stack or not count.isdigit():
            raise PerflabError(f"not a line of collapsed stacks: {line[:80]!r}")
        frames = []
        for name in stack.split(";"):
            match = _RAW_FRAME.match(name)
            place = (short(match["file"]), int(match["line"] or 0)) if match else ()
            frames.append(Frame(match["function"] if match else name, *place))
        flame.add(tuple(frames), int(count) * interval_s)
    flame.seconds = sum(flame.stacks.values())
    return flame


@dataclass(slots=True)
class Node:
    """A frame of the tree: its own seconds, those with what it called, and its callees."""

    frame: Frame
    self_s: float = 0.0
    total_s: float = 0.0
    children: dict[Frame, Node] = field(default_factory=dict)


OTHERS = Frame("(others)")


def tree(stacks: Mapping[Stack, float], least: float = 0.002) -> Node:
    """All stacks merged from the outside. What takes less than the share `least` of the whole is merged
    into `(others)` under its caller, which bounds the size: at most 1/least leaves."""
    root = Node(Frame("all"))
    for stack, seconds in stacks.items():
        node = root
        node.total_s += seconds
        for frame in stack:
            node = node.children.setdefault(frame, Node(frame))
            node.total_s += seconds
        node.self_s += seconds
    _prune(root, least * root.total_s)
    return root


def _prune(node: Node, least_s: float) -> None:
    small = [child for child in node.children.values() if child.total_s < least_s]
    if small:
        for child in small:
            del node.children[child.frame]
        rest = sum(child.total_s for child in small)
        node.children[OTHERS] = Node(OTHERS, rest, rest)
    for child in node.children.values():
        _prune(child, least_s)


class Function(NamedTuple):
    frame: Frame
    self_s: float
    total_s: float  # a recursive function counts once per stack


def functions(stacks: Mapping[Stack, float]) -> list[Function]:
    """Seconds of each function, its own and with callees; most of its own first."""
    own: dict[Frame, float] = {}
    total: dict[Frame, float] = {}
    for stack, seconds in stacks.items():
        if stack:
            own[stack[-1]] = own.get(stack[-1], 0.0) + seconds
        for frame in set(stack):
            total[frame] = total.get(frame, 0.0) + seconds
    rows = [Function(frame, own.get(frame, 0.0), total[frame]) for frame in total]
    return sorted(rows, key=lambda row: (-row.self_s, -row.total_s, row.frame))


def speedscope(flame: Flame, name: str = "perflab") -> dict[str, Any]:
    """The flame as a speedscope file (https://www.speedscope.app/file-format-schema.json): JSON values."""
    frames: dict[Frame, int] = {}
    samples = [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in flame.stacks]
    weights = list(flame.stacks.values())
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": "perflab",
        "activeProfileIndex": 0,
        "shared": {
            "frames": [
                {"name": f.function, **({"file": f.file, "line": f.line} if f.file else {})} for f in frames
            ]
        },
        "profiles": [
            {
                "type": "sampled",
                "name": f"{name} ({flame.method})",
                "unit": "seconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": samples,
                "weights": weights,
            }
        ],
    }


def from_speedscope(file: Mapping[str, Any]) -> dict[Stack, float]:
    """Seconds by stack from the first sampled profile of a speedscope file."""
    frames = [Frame(f["name"], f.get("file", ""), f.get("line", 0)) for f in file["shared"]["frames"]]
    profile = next(p for p in file["profiles"] if p["type"] == "sampled")
    stacks: dict[Stack, float] = {}
    for sample, weight in zip(profile["samples"], profile["weights"], strict=True):
        stack = tuple(frames[i] for i in sample)
        stacks[stack] = stacks.get(stack, 0.0) + weight
    return stacks
