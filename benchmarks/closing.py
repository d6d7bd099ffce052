"""Spans close: over 200 requests through HTTP on the embedded engine, how much of E2E no stamp covers.

The server runs in a process of its own and shares the machine's monotonic clock with the client. Every
segment is stamped at both ends, none is computed as a difference; what is left over is the residual.
Wanted: |residual| under 2% of E2E at the median and under 5% at P99.

    python -m benchmarks.closing
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.common import finish, show
from benchmarks.servers import running, servers
from perflab.measure.latency import average_of, decompose
from perflab.measure.stats import percentile_value
from perflab.studies.service_run import LoadChoice, ServiceChoice, measure, warm
from perflab.types import RequestRecord

WANTED = {0.5: 0.02, 0.99: 0.05}


def closing(requests: Sequence[RequestRecord], title: str) -> dict[str, Any]:
    """Shows the mean waterfall of completed requests and returns what does not close."""
    parts = [part for record in requests if (part := decompose(record)) is not None]
    whole = average_of(parts)
    assert whole is not None, "no request got a token"
    rows = [(name, s * 1e3, f"{s / whole.e2e_s:.2%}") for name, s in whole.segments.items()]
    rows.append(("no stamp covers", whole.residual_s * 1e3, f"{whole.residual_s / whole.e2e_s:.2%}"))
    show(f"{title}: mean of {len(parts)} requests, E2E {whole.e2e_s * 1e3:.1f} ms", ("", "ms", "share"), rows)
    shares = sorted(abs(part.residual_s) / part.e2e_s for part in parts)
    found = {q: percentile_value(shares, q) for q in WANTED}
    show(
        "|residual| / E2E",
        ("", "found", "wanted"),
        [(f"P{q * 100:g}", f"{found[q]:.2%}", f"< {wanted:.0%}") for q, wanted in WANTED.items()],
    )
    return {
        "requests": len(parts),
        "residual_p50": found[0.5],
        "residual_p99": found[0.99],
        "residual_max": shares[-1],
        "segments_s": dict(whole.segments),
        "passed": all(found[q] < wanted for q, wanted in WANTED.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of the server's engine")
    args = parser.parse_args()
    load = LoadChoice(requests=args.requests, users=args.users, input_tokens=64, output_tokens=32)
    figures: dict[str, Any] = {"benchmark": "closing", "wanted": {"p50": WANTED[0.5], "p99": WANTED[0.99]}}
    with running(servers()["perflab"], args.threads) as url:
        for name, stream in (("streamed", True), ("whole", False)):
            service = ServiceChoice(url, "smollm2-135m", stream=stream)
            workload = load.workload()
            warm(service, load, workload, service.make)
            figures[name] = closing(measure(service, load, workload=workload).requests, name)
    finish(figures)


if __name__ == "__main__":
    main()
