"""A server in a lesson: its own process where none is given, and views of what was measured on it.

Owns the life of that process and the views. What runs mean is said by `report`.
"""

from __future__ import annotations

import atexit
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import plotly.graph_objects as go
from IPython.display import FileLink, display

from perflab.errors import PerflabError
from perflab.measure import latency, metrics
from perflab.report import units
from perflab.report.analysis import analyse
from perflab.report.html import write_report
from perflab.report.sections import sections
from perflab.studies.store import Run
from perflab.widgets import panels

START_S, STOP_S = 180.0, 20.0
_ADDRESS = re.compile(r"at\s+(http://\S+)/v1")


class Server:
    """`perflab serve` in a process of its own on a free loopback port, ready to answer, until `close`
    or the end of this process.

    With a `url` it starts nothing and stands for the server that is there. Raises PerflabError with
    the process's last words if it does not get ready.
    """

    def __init__(self, url: str | None = None, model: str = "smollm2-135m") -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.url = url or self._start(model)

    def _start(self, model: str) -> str:
        command = [sys.executable, "-c", "from perflab.cli import main; main()"]
        with tempfile.TemporaryFile() as said:
            self._process = subprocess.Popen(
                [*command, "serve", "--port", "0", "--model", model], stdout=said, stderr=said
            )
            atexit.register(self.close)
            until, alive = time.monotonic() + START_S, True
            while alive and time.monotonic() < until:
                alive = self._process.poll() is None
                said.seek(0)
                words = said.read().decode(errors="replace")
                found = _ADDRESS.search(words)
                if found and _answers(f"{found[1]}/ready"):
                    return found[1]
                time.sleep(0.1)
        self.close()
        raise PerflabError(f"perflab serve did not get ready: {words.strip()[-500:] or 'it said nothing'}")

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        atexit.unregister(self.close)
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def look(folders: Sequence[Path], *anchors: str) -> None:
    """Chapters of the runs' report by anchor, each with its sentence and its figure."""
    chapters = {section.anchor: section for section in sections(analyse(folders))}
    for anchor in anchors:
        if section := chapters.get(anchor):
            panels.note(section.takeaway)
            if section.figure is not None:
                panels.show(section.figure)


def report(folders: Sequence[Path], out: Path) -> Path:
    """Write the runs' report and link to it."""
    written = write_report(folders, out)
    display(FileLink(str(written)))
    return written


def explore(
    measure: Callable[[float, int, int], Run],
    rates: Sequence[float],
    input_tokens: Sequence[int] = (64, 256, 16),
    output_tokens: Sequence[int] = (16, 64, 4),
) -> panels.Explorer[Run]:
    """Sliders over rate and lengths; `measure(rate, input_tokens, output_tokens)` asks the server."""

    def draw(found: Mapping[tuple[float, int, int], Run]) -> go.Figure:
        named = {
            f"{rate:g}/s, {tokens_in} in, {tokens_out} out": latency.average(run.requests, run.steps)
            for (rate, tokens_in, tokens_out), run in found.items()
        }
        return panels.splits({name: parts for name, parts in named.items() if parts})

    sliders = {"requests/s": rates, "input tokens": input_tokens, "output tokens": output_tokens}
    explorer = panels.Explorer(sliders, measure, draw, describe)
    panels.explore(explorer)
    return explorer


def describe(run: Run) -> str:
    """Success, latencies and the verdict of a run, as HTML."""
    done = metrics.counts(run.requests)
    parts = [
        f"{name} p50 {units.seconds(metrics.LATENCIES[name](run.requests, 0.5).value)}, "
        f"p90 {units.seconds(metrics.LATENCIES[name](run.requests, 0.9).value)}"
        for name in ("TTFT", "TPOT")
    ]
    verdict = "valid" if run.valid else f"not valid: {', '.join(name for name, _ in run.reasons)}"
    return f"<b>{done.completed} of {done.sent}</b> completed; {'; '.join(parts)}. The run is {verdict}."
