"""Servers' metrics pages: known names on one time axis, whatever else is on the page."""

from __future__ import annotations

import asyncio

import pytest

from perflab.clock import VirtualClock
from perflab.load.scrape import parse, scraper
from perflab.types import Sample
from tests.scripted_server import MS, VirtualLoop

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:generation_tokens_total{engine="0",model_name="m"} 1.234e+03
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:num_preemptions_total{engine="0",model_name="m"} NaN
vllm:num_requests_running{engine="1" 4
vllm:time_to_first_token_seconds_bucket{le="0.1"} 5
"""


def test_known_names_of_a_page_under_ours():
    labels = {"engine": "0", "model_name": "m"}
    assert parse(VLLM, 7) == [
        Sample(7, "running", {**labels, "source": "vllm:num_requests_running"}, 3.0),
        Sample(7, "waiting", {**labels, "source": "vllm:num_requests_waiting"}, 2.0),
        Sample(7, "kv_use", {**labels, "source": "vllm:kv_cache_usage_perc"}, 0.25),
        Sample(7, "output_tokens", {**labels, "source": "vllm:generation_tokens_total"}, 1234.0),
    ]


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ('sglang:token_usage{model_name="m"} 0.5', "kv_use", 0.5),
        ("llamacpp:requests_deferred 4", "waiting", 4.0),
        ("tgi_batch_current_size 6", "running", 6.0),
        ('nv_trt_llm_request_metrics{model="m",request_type="active",version="1"} 5', "running", 5.0),
        ('nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.1', "kv_use", 0.1),
        ('perflab:prefix_cache_hits_total{model_name="a\\"b"} 9', "prefix_cache_hits", 9.0),
        ('vllm:spec_decode_num_accepted_tokens_total{engine="0"} 7', "accepted_tokens", 7.0),
    ],
)
def test_servers_of_the_field(line: str, name: str, value: float):
    assert [(s.name, s.value) for s in parse(line, 0)] == [(name, value)]


def test_pages_that_are_none():
    assert (
        parse("", 0)
        == parse("<html>\n", 0)
        == parse('nv_trt_llm_request_metrics{request_type="max"} 1', 0)
        == []
    )


@pytest.mark.parametrize(("status", "times"), [("200 OK", [0, 500, 1000, 1200]), ("404 Not Found", [])])
def test_pages_are_read_on_an_interval_and_once_more_when_the_run_ends(status: str, times: list[int]):
    clock = VirtualClock()
    page = b"llamacpp:requests_processing 1\n"

    async def answer(reader, writer):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(page)}\r\n\r\n".encode() + page)

    async def run() -> list[Sample]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
        samples: list[Sample] = []
        task = asyncio.ensure_future(scraper(url)(clock, samples))
        await asyncio.sleep(1.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()
        return samples

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        samples = runner.run(run())
    assert [s.time_ns // MS for s in samples] == times


def test_no_server_is_no_error():
    asyncio.run(scraper("http://127.0.0.1:9/metrics")(VirtualClock(), []))
