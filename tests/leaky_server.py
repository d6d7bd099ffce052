"""A server in its own process, for memory: `python leaky_server.py BYTES` keeps as many a request."""

from __future__ import annotations

import sys

from live_server import serving

from perflab.engine.engine import Engine

kept: list[bytearray] = []


def leaking(engine: Engine, size: int) -> None:
    """Each request leaves `size` bytes behind, written to so that they are resident."""
    submit = engine.submit

    def submit_and_keep(request):
        kept.append(bytearray(b"x" * size))
        return submit(request)

    engine.submit = submit_and_keep


if __name__ == "__main__":
    with serving(prepare=lambda engine: leaking(engine, int(sys.argv[1])), keep_records=200) as live:
        print(live.url, flush=True)
        sys.stdin.read()  # until the test closes it
        live.assert_empty()
    print("empty", flush=True)
