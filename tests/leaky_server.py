"""A server in its own process, for memory: `python leaky_server.py BYTES` keeps as many a request."""

from __future__ import annotations

import sys

from live_server import serving

from perflab.serve.service import Service

kept: list[bytearray] = []


def leaking(service: Service, size: int) -> None:
    """Each request leaves `size` bytes behind, written to so that they are resident."""
    new_id = service.new_id

    def new_id_and_keep() -> str:
        kept.append(bytearray(b"x" * size))
        return new_id()

    service.new_id = new_id_and_keep


if __name__ == "__main__":
    with serving(keep_records=200) as live:
        leaking(live.service, int(sys.argv[1]))
        print(live.url, flush=True)
        sys.stdin.read()  # until the test closes it
        live.assert_empty()
    print("empty", flush=True)
