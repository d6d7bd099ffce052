"""Many clients: 500 streams at once, a thousand that leave, and what that leaves in memory."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
from live_server import serving

from perflab.measure.memory import LeakVerdict, leak_verdict

HERE = Path(__file__).parent


async def ask(session: aiohttp.ClientSession, url: str, rng: random.Random, stay: float) -> str:
    """One stream; with probability 1 - `stay` its client leaves at a random moment."""
    body = {
        "prompt": [rng.randrange(256) for _ in range(rng.randint(1, 60))],
        "max_tokens": rng.randint(1, 40),
        "ignore_eos": True,
        "stream": rng.random() < 0.8,
        "n": rng.choice((1, 1, 1, 2)),
    }
    leaves = rng.random() >= stay
    limit = aiohttp.ClientTimeout(total=rng.expovariate(1 / 0.05) if leaves else 60)
    try:
        async with session.post(f"{url}/v1/completions", json=body, timeout=limit) as response:
            assert response.status == 200
            return "done" if "finish_reason" in await response.text() else "cut"
    except TimeoutError:
        return "left"


async def crowd(url: str, count: int, at_once: int, stay: float, seed: int = 0, on_end=lambda ended: None):
    """`count` requests, `at_once` of them at a time; how they ended."""
    rng = random.Random(seed)
    ends: list[str] = []
    left = iter(range(count))

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in left:
            ends.append(await ask(session, url, rng, stay))
            on_end(len(ends))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(at_once)))
    return ends


def test_a_crowd_of_which_half_leaves() -> None:
    with serving(num_blocks=128) as live:
        ends = asyncio.run(crowd(live.url, 100, 40, stay=0.5))
        assert set(ends) == {"done", "left"}
        live.assert_empty()


@pytest.mark.verify
def test_five_hundred_streams_at_once() -> None:
    with serving() as live:
        ends = asyncio.run(crowd(live.url, 500, 500, stay=1.0))
        assert ends == ["done"] * 500
        live.assert_empty()
        ends = asyncio.run(crowd(live.url, 1000, 500, stay=0.0))
        assert ends.count("left") > 500
        live.assert_empty()


@contextmanager
def server_process(leak_bytes: int) -> Iterator[tuple[str, psutil.Process]]:
    """A server in a process of its own; at the end it must have been empty."""
    command = [sys.executable, str(HERE / "leaky_server.py"), str(leak_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip(), psutil.Process(child.pid)
            child.stdin.close()
            assert child.stdout.readline().strip() == "empty"
        finally:
            child.kill()


def memory_after(leak_bytes: int, count: int) -> LeakVerdict:
    """Judge a server's resident memory over `count` requests, nearly all of which leave."""
    requests, rss = [], []
    with server_process(leak_bytes) as (url, process):

        def look(ended: int) -> None:
            if ended % 20 == 0:
                requests.append(ended)
                rss.append(process.memory_info().rss)

        asyncio.run(crowd(url, 1000, 50, stay=0.1))  # caches, pools and bounded records fill
        asyncio.run(crowd(url, count, 50, stay=0.1, seed=1, on_end=look))
    return leak_verdict(requests, rss)


@pytest.mark.verify
def test_disconnects_leave_no_memory_behind_and_a_planted_leak_is_found() -> None:
    clean = memory_after(0, 4000)
    assert clean.slope_bytes_per_request.high < 2048, clean
    assert not clean.leaking
    leaky = memory_after(10_240, 4000)
    assert leaky.leaking, leaky
    assert 4_000 < leaky.slope_bytes_per_request.value < 20_000
