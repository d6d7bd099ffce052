"""perflab's figures beside those of other tools that measure the same server under the same load.

Owns the loads, the order of the runs and what counts as agreement. How tools are called is
`benchmarks.tools`'s, how servers are started `benchmarks.servers`'s.

First a mock with scripted times, where everyone must come within 3 % of perflab. Then a real engine,
which is not the same twice: there the interval of the paired difference must contain zero, and a
difference of 10 % must have been detectable. The server has one core, the client another; tools
take turns, in alternating order; prompts are new in every run, so that no prefix cache helps.

    python -m benchmarks.agreement                                    about 8 minutes
    python -m benchmarks.agreement --parts mock --tools guidellm,aiperf
    python -m benchmarks.agreement --parts real --server llama.cpp --rounds 8
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import mock, servers, tools
from benchmarks.common import console, finish, show
from benchmarks.tools import FIGURES, Figures, Load, Tool
from perflab.measure import stats

LIMIT = 0.03  # on the mock
DETECTABLE = 0.10  # on the engine: an interval that would hide more proves nothing
CONFIDENCE = 0.95  # of all intervals of the real part together
SERVER_CORE, CLIENT_CORE = 0, 1
DEFAULT_TOOLS = "guidellm,vllm bench"

PATIENCE = 2  # failures of a tool after which it is left out
Results = dict[str, dict[int, Figures]]  # by tool, then by round
Differences = dict[str, dict[str, dict[str, Any]]]  # by tool, then by figure


def rounds(
    present: Sequence[Tool], number: int, one: Callable[[Tool, int], Figures], failed: dict[str, str]
) -> Results:
    """Everyone in turn, `number` times; an interrupt keeps what was measured.

    Who fails misses that round, and is left out after a second failure; `failed` holds the reason.
    """
    results: Results = {tool.name: {} for tool in present}
    failures = dict.fromkeys(results, 0)
    runs = 0
    try:
        for at in range(number):
            for tool in present if at % 2 == 0 else reversed(present):
                if failures[tool.name] == PATIENCE:
                    continue
                start, runs = time.perf_counter(), runs + 1
                try:
                    found = one(tool, runs)
                except ValueError as error:
                    failures[tool.name] += 1
                    failed[tool.name] = str(error)
                    said = f"failed: {error}"
                else:
                    results[tool.name][at] = found
                    said = f"TTFT {found.ttft_ms:.1f} ms, TPOT {found.tpot_ms:.2f} ms, "
                    said += f"{found.tokens_per_s:.1f} tokens/s"
                    said += "".join(f" [{note}]" for note in found.notes)
                line = f"  {at + 1}/{number} {tool.name} ({time.perf_counter() - start:.0f} s): {said}"
                console.print(line, highlight=False, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print("  stopped: what follows is what was measured until now")
    return results


def differences(results: Results, confidence: float = CONFIDENCE) -> Differences:
    """By tool and figure: the tool's figure relative to perflab's of the same round, minus 1.

    The median and the extremes of the rounds, and the interval of the geometric mean with what it
    could have found; `confidence` is that of all intervals together (Bonferroni). `defined` is the
    same for a rate by perflab's window, where the tool's is another.
    """
    each = 1 - (1 - confidence) / (max(1, len(results) - 1) * len(FIGURES))
    made: Differences = {}
    for name, theirs in results.items():
        pairs = [(results["perflab"][at], theirs[at]) for at in theirs if at in results["perflab"]]
        if name == "perflab" or not pairs:
            continue
        made[name] = {
            figure: _difference([(getattr(a, figure), getattr(b, figure)) for a, b in pairs], each)
            for figure in FIGURES
        }
        windowed = [(a.tokens_per_s, b.windowed) for a, b in pairs if b.windowed]
        if windowed:
            made[name]["tokens_per_s"]["defined"] = _difference(windowed, each)
    return made


def _difference(pairs: Sequence[tuple[float, float]], confidence: float) -> dict[str, Any]:
    ours, theirs = zip(*pairs, strict=True)
    ratios = [y / x for x, y in pairs]
    compared = stats.compare(ours, theirs, confidence)
    low, high = compared.ratio.low, compared.ratio.high
    return {
        "perflab": statistics.median(ours),
        "tool": statistics.median(theirs),
        "difference": statistics.median(ratios) - 1,
        "least": min(ratios) - 1,
        "most": max(ratios) - 1,
        "low": None if low is None else low - 1,
        "high": None if high is None else high - 1,
        "detectable": compared.detectable,
    }


def judge(found: Differences, part: str) -> None:
    """Add `verdict` to every difference: yes within the limit on the mock, or elsewhere where a sharp
    interval contains zero; `defined` where that holds by perflab's definition only; else NO."""

    def fits(row: dict[str, Any]) -> bool:
        if part == "mock":
            return abs(row["difference"]) <= LIMIT
        return row["low"] is not None and row["low"] <= 0 <= row["high"] and row["detectable"] <= DETECTABLE

    for by_figure in found.values():
        for row in by_figure.values():
            explained = "defined" in row and fits(row["defined"])
            row["verdict"] = "yes" if fits(row) else "defined" if explained else "NO"


def table(title: str, found: Differences, part: str) -> None:
    """A row per tool and figure; what a tool means by its names below."""
    rows = []
    for tool, by_figure in found.items():
        for figure, row in by_figure.items():
            cells = [tool, FIGURES[figure], f"{row['perflab']:.4g}", f"{row['tool']:.4g}"]
            cells += [f"{row['difference']:+.1%}", f"{row['least']:+.1%} … {row['most']:+.1%}"]
            if part != "mock":
                sharp = row["low"] is not None
                cells += [f"{row['low']:+.1%} … {row['high']:+.1%}" if sharp else "–"]
                cells += [f"{row['detectable']:.1%}" if sharp else "–"]
            rows.append([*cells, row["verdict"]])
    columns = ["", "median", "perflab", "tool", "difference", "rounds"]
    columns += ["within 3 %"] if part == "mock" else ["interval", "detectable", "agree"]
    show(title, columns, rows)
    for tool, by_figure in found.items():
        said = f"  {tool}: {tools.tools()[tool].means}"
        if defined := by_figure["tokens_per_s"].get("defined"):
            said += f" (its tokens/s by perflab's window: {defined['difference']:+.1%})"
        console.print(said, highlight=False, markup=False, soft_wrap=True)


def on_mock(present: Sequence[Tool], number: int, failed: dict[str, str]) -> Results:
    """96 requests of 8 users: first token after 150 ms, then one each 15 ms, both with a spread of 20 %."""
    prompts = [(f"Request #{i}: what is on the other side of the sea?", 64) for i in range(96)]
    with mock.running(8790, SERVER_CORE, ttft=0.15, gap=0.015, jitter=0.2) as url:
        load = Load(url, "mock", servers.MODEL, prompts, 8)
        return rounds(present, number, lambda tool, run: tools.run(tool, load, CLIENT_CORE), failed)


def on_engine(name: str, present: Sequence[Tool], number: int, failed: dict[str, str]) -> Results:
    """32 requests at a constant 3 a second, 64 tokens in, 20 to 44 out; the model has one thread.

    No closed loop: users who ask again at once wait for the end of a step that has just begun, and a
    tool that needs some milliseconds to ask again waits less. A first run warms up.
    """
    from perflab.load.prompts import PromptEncoder, Synthetic
    from perflab.models.load import load as load_model

    encoder = PromptEncoder(load_model("smollm2-135m").encode)

    def prompts(run: int) -> list[tuple[str, int]]:
        return [(str(encoder.text(Synthetic(64, seed=1000 * run + i))), 20 + 7 * i % 25) for i in range(32)]

    with servers.running(servers.servers()[name], threads=1, core=SERVER_CORE) as url:
        model = tools.first_model(url)

        def one(tool: Tool, run: int) -> Figures:
            return tools.run(tool, Load(url, model, servers.MODEL, prompts(run), rate=3.0), CLIENT_CORE)

        one(present[0], 0)
        return rounds(present, number, one, failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default="mock,real")
    parser.add_argument("--tools", default=DEFAULT_TOOLS, help="beside perflab, with commas between")
    parser.add_argument("--server", default="perflab", choices=list(servers.servers()))
    parser.add_argument("--rounds", type=int, help="default: 3 on the mock, 6 on the engine")
    args = parser.parse_args()
    everyone = tools.tools()
    chosen = [everyone["perflab"]]
    failed: dict[str, str] = {}
    for name in filter(None, args.tools.split(",")):
        if name not in everyone:
            parser.error(f"no tool {name!r}: choose from {', '.join(everyone)}")
        if why := servers.missing(everyone[name].needs, everyone[name].install):
            failed[name] = why
            console.print(f"  without {name}: {why}", highlight=False, markup=False, soft_wrap=True)
        else:
            chosen.append(everyone[name])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # ends like Ctrl-C: the server first, then tables
    figures: dict[str, Any] = {"benchmark": "agreement", "server": args.server}
    for part in args.parts.split(","):
        if part == "mock":
            title, gone = "A mock with scripted times", dict(failed)
            results = on_mock(chosen, args.rounds or 3, gone)
        else:
            title, gone = f"A real engine: {args.server}", dict(failed)
            results = on_engine(args.server, chosen, args.rounds or 6, gone)
        found = differences(results)
        judge(found, part)
        table(title, found, part)
        figures[part] = {"rounds": len(results["perflab"]), "tools": found, "failed": gone}
    finish(figures)


if __name__ == "__main__":
    main()
