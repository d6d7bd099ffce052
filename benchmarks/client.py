"""Whether the load generator can be the bottleneck: perflab's client against guidellm's, on one core each.

    python -m benchmarks.client [--repeats 3] [--quick]

A mock that answers at once runs on one core, the client in turn on another, interleaved: short
answers for the rate of requests, long ones for the rate of streamed tokens. Then perflab sends at half
the rate that it reached, by the clock, and its lateness is the result.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from benchmarks import mock, tools
from benchmarks.common import finish, interleave, paired_ratio, show
from benchmarks.servers import MODEL

PORT = 8731
USERS = 32
RATIO, LATE_S = 2.0, 0.005
"""What must be reached: times guidellm's rates, and the 99th percentile of send lateness below."""

SHAPES = {"requests/s": (1, 3000), "tokens/s": (256, 300)}
"""What is measured: (tokens of an answer, answers)."""


def rates(url: str, core: int, repeats: int, scale: float) -> dict[str, dict[str, list[float]]]:
    """Every repeat's rate, by shape and client."""
    everyone = tools.tools()
    found = {}
    for name, (tokens, count) in SHAPES.items():
        prompts = [(f"Prompt number {i} of a few words", tokens) for i in range(round(count * scale))]
        load = tools.Load(url, "mock", MODEL, prompts, USERS)

        def rate(
            client: str, load: tools.Load = load, each: int = tokens if name == "requests/s" else 1
        ) -> float:
            return tools.run(everyone[client], load, core).tokens_per_s / each

        runs: dict[str, Callable[[], float]] = {
            client: (lambda client=client: rate(client)) for client in ("perflab", "guidellm")
        }
        found[name] = interleave(runs, repeats, warm_up={client: lambda: None for client in runs})
    return found


def lateness(url: str, core: int, rate: float, seconds: float = 5.0) -> float:
    """99th percentile of send lateness at a constant rate, seconds; runs on `core` from then on."""
    from perflab.load.arrivals import Arrivals
    from perflab.load.drive import run_service
    from perflab.load.http_service import HTTPService
    from perflab.load.workloads import TimedRequest, Workload, asked
    from perflab.measure import metrics, stats

    os.sched_setaffinity(0, {core})
    starts = Arrivals("constant", rate).times(duration_s=seconds)
    made = tuple(
        TimedRequest(f"r{i}", "A few words", asked(1, exact=True), at) for i, at in enumerate(starts)
    )
    records = run_service(lambda: HTTPService(url, "mock", endpoint="completions"), Workload("late", made))
    assert all(r.outcome == "completed" for r in records.requests), records.requests[0].error
    return stats.percentile_value([metrics.lateness_s(r) for r in records.requests], 0.99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a fifth of the answers")
    chosen = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) > 1, "two cores are needed: one for the mock, one for the client"
    with mock.running(PORT, cores[0]) as url:
        found = rates(url, cores[1], chosen.repeats, 0.2 if chosen.quick else 1.0)
        reached = sorted(found["requests/s"]["perflab"])[chosen.repeats // 2]
        every = sorted(lateness(url, cores[1], reached / 2) for _ in range(chosen.repeats))
    late = every[len(every) // 2]
    ratios = {name: paired_ratio(by["perflab"], by["guidellm"]) for name, by in found.items()}
    show(
        f"Clients on one core against a mock on another, {USERS} users, median of {chosen.repeats}",
        ["", "perflab", "guidellm", "ratio", "at least"],
        [
            [name, *(sorted(by[c])[len(by[c]) // 2] for c in ("perflab", "guidellm")), ratios[name], RATIO]
            for name, by in found.items()
        ],
    )
    show(
        "Sending by the clock",
        ["requests/s", "lateness p99, ms", "each", "below"],
        [[reached / 2, 1e3 * late, " ".join(f"{1e3 * x:.2g}" for x in every), 1e3 * LATE_S]],
    )
    finish(
        {
            "rates": found,
            "ratios": ratios,
            "lateness_p99_s": every,
            "holds": min(ratios.values()) >= RATIO and late < LATE_S,
        }
    )


if __name__ == "__main__":
    main()
