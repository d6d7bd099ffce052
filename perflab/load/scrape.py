"""A server's own metrics through a run: its `/metrics` page, read on an interval, on the run's time axis.

Owns what the field's servers call the quantities that a report needs. Pages are kept as they come
and parsed after the run, so that parsing is never what a client waits for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from perflab.clock import NS_PER_S, Clock, seconds_to_ns
from perflab.load.drive import Beside
from perflab.load.http_client import Body, Client, Exchange
from perflab.types import Sample

NAMES: dict[str, tuple[str, ...]] = {
    "running": (
        "perflab:num_requests_running",
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "tgi_batch_current_size",
        "llamacpp:requests_processing",
    ),
    "waiting": (
        "perflab:num_requests_waiting",
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "tgi_queue_size",
        "llamacpp:requests_deferred",
        "nv_inference_pending_request_count",
    ),
    "kv_use": (
        "perflab:kv_cache_usage_perc",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "llamacpp:kv_cache_usage_ratio",
    ),
    "prompt_tokens": (
        "perflab:prompt_tokens_total",
        "vllm:prompt_tokens_total",
        "sglang:prompt_tokens_total",
        "tgi_request_input_length_sum",
        "llamacpp:prompt_tokens_total",
    ),
    "output_tokens": (
        "perflab:generation_tokens_total",
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
        "tgi_request_generated_tokens_sum",
        "llamacpp:tokens_predicted_total",
    ),
    "preemptions": (
        "perflab:num_preemptions_total",
        "vllm:num_preemptions_total",
        "sglang:num_retracted_reqs",
    ),
    "prefix_cache_hits": (
        "perflab:prefix_cache_hits_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
        "sglang:cached_tokens_total",
        "llamacpp:prompt_tokens_cached_total",
    ),
    "prefix_cache_queries": (
        "perflab:prefix_cache_queries_total",
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
    ),
    "draft_tokens": (
        "perflab:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    "accepted_tokens": (
        "perflab:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ),
}
"""Our name of each quantity, and the servers': shares are 0 to 1, totals count from a server's start."""

PATIENCE_S = 5.0
KNOWN = {theirs: ours for ours, names in NAMES.items() for theirs in names}
TRITON = {
    ("nv_trt_llm_request_metrics", "request_type", "active"): "running",
    ("nv_trt_llm_request_metrics", "request_type", "waiting"): "waiting",
    ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "fraction"): "kv_use",
}
"""Triton's TensorRT-LLM backend puts the quantity into a label."""

BARE = {*KNOWN, *(name for name, _, _ in TRITON)}


def scraper(url: str, interval_s: float = 0.5, api_key: str | None = None) -> Beside:
    """Reads the page at `url` for as long as a run lasts; gives up where there is none.

    Needs `prometheus_client`; without it nothing is sampled.
    """
    parts = urlsplit(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def scrape(clock: Clock, samples: list[Sample]) -> None:
        client = Client(url, headers, clock.now)
        pages: list[tuple[int, bytes]] = []

        async def read() -> bool:
            """Keep the page as it is now; False where there is none."""
            page = Body()
            exchange = Exchange(partial(_first, page))
            with suppress(TimeoutError):  # a busy server may answer the next one
                async with asyncio.timeout(PATIENCE_S):
                    await client.send(parts.path, None, exchange)
                if exchange.status != 200:
                    return False
                pages.append((exchange.stamps["stream"], page.data))
            return True

        due = clock.now()
        try:
            while await read():
                due = max(due + seconds_to_ns(interval_s), clock.now())
                await asyncio.sleep((due - clock.now()) / NS_PER_S)
        except OSError:
            return
        except asyncio.CancelledError:  # the run has ended: only now are its last tokens on the page
            with suppress(OSError):
                await read()
            raise
        finally:
            client.close()
            for time_ns, data in pages:
                samples += parse(data.decode(errors="replace"), time_ns)

    return scrape


def _first(page: Body, exchange: Exchange) -> Body:
    return page


def parse(page: str, time_ns: int) -> list[Sample]:
    """What a page says of the quantities in `NAMES`, under our names; `source` is the server's."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        return []
    wanted = [line for line in page.splitlines() if line.split("{", 1)[0].split(" ", 1)[0] in BARE]

    def found() -> Iterator[Sample]:
        for line in wanted:  # one by one: a broken line spoils no other
            with suppress(ValueError):
                for family in text_string_to_metric_families(line + "\n"):
                    for name, labels, value, *_ in family.samples:
                        ours = KNOWN.get(name) or _triton(name, labels)
                        if ours and math.isfinite(value):
                            yield Sample(time_ns, ours, {**labels, "source": name}, float(value))

    return list(found())


def _triton(name: str, labels: dict[str, str]) -> str | None:
    found = (TRITON.get((name, label, value)) for label, value in labels.items())
    return next((ours for ours in found if ours), None)
