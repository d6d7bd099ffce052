"""Quality is measured through a variant's own KV pool, and what a narrow pool gives for its loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_model import drain
from test_engine import in_dtype

from perflab.config import EngineConfig
from perflab.engine import executor
from perflab.engine.engine import Engine
from perflab.engine.executor import SCORED_TOKENS
from perflab.engine.plan import Plan
from perflab.load.text import TEXT
from perflab.measure import quality
from perflab.models import kernels
from perflab.models.load import load
from perflab.models.tiny import tiny
from perflab.types import Request, SamplingParams

NEEDS_KERNELS = pytest.mark.skipif(kernels.library() is None, reason=kernels.why_missing())
IDS = [(17 * i + i * i // 7) % 251 for i in range(2 * SCORED_TOKENS + 40)]
CONTEXT_KL = 0.01  # nats, the most that an int8 pool may cost over 1,000 tokens


def engine(model, **switches) -> Engine:
    return Engine(model, EngineConfig(packed_linears=False, num_blocks=80, **switches))


def kl_by_position(model, ids, **switches) -> np.ndarray:
    """KL of a pool of another kind from one of the model's dtype, nats [len(ids)]."""
    both = [engine(model, runner="native"), engine(model, runner="native", **switches)]
    a, b = (one.executor.score(ids).numpy() for one in both)
    rows = range(0, len(ids), 200)  # the logarithms in double precision, a few rows at a time
    return np.concatenate([quality.kl_divergence(a[i : i + 200], b[i : i + 200]) for i in rows])


@pytest.mark.parametrize("attention", ["batched", pytest.param("native", marks=NEEDS_KERNELS)])
def test_a_text_scored_in_steps_has_the_logits_of_one_pass(attention) -> None:
    model = tiny("llama")
    one = engine(model, runner="torch", attention=attention)
    with torch.inference_mode():
        whole = model.module(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(one.executor.score(IDS), whole, atol=1e-4, rtol=1e-4)
    assert not one.executor.kv.key.any(), "requests that run keep their blocks to themselves"


@NEEDS_KERNELS
@pytest.mark.parametrize("switches", [{"runner": "native"}, {"runner": "torch", "attention": "native"}])
def test_a_narrow_pool_shows_in_the_score(switches) -> None:
    model = tiny("llama")
    exact, narrow = (engine(model, kv_dtype=kind, **switches) for kind in ("model", "int8"))
    a, b = (one.executor.score(IDS).numpy() for one in (exact, narrow))
    kl = quality.kl_divergence(a, b)
    assert 0 < kl[1:].mean() < CONTEXT_KL


def static_scales(pool, scale: float) -> None:
    """What the pool holds as if it had been written with one scale for everything."""
    for name in ("key", "value"):
        stored, scales = getattr(pool, name), getattr(pool, f"{name}_scale")
        values = stored.float() * scales[..., None]
        stored.copy_((values / scale).round().clamp(-127, 127).to(torch.int8))
        scales.fill_(scale)


@pytest.mark.verify
@NEEDS_KERNELS
def test_an_int8_pool_is_close_over_a_long_context_and_a_static_scale_is_not(monkeypatch) -> None:
    """Mean KL of every stretch of 1,000 tokens, so that a drift with length cannot hide in the mean."""
    model = load("smollm2-135m", dtype="float32")
    ids = model.encode(TEXT)
    ids = (ids * (1 + 1000 // len(ids)))[:1000]

    def worst() -> float:
        kl = kl_by_position(model, ids, kv_dtype="int8")
        return max(float(part.mean()) for part in np.split(kl[:1000], (50, 100, 200, 400, 700)))

    assert worst() < CONTEXT_KL

    forward = executor.NativeForward.__call__

    def careless(self, batch, kv):
        output = forward(self, batch, kv)
        if kv is not None and kv.key_scale is not None:
            static_scales(kv, 0.05)
        return output

    monkeypatch.setattr(executor.NativeForward, "__call__", careless)
    assert worst() > CONTEXT_KL


@NEEDS_KERNELS
def test_the_same_bytes_hold_nearly_twice_the_requests_in_int8() -> None:
    """1 / 0.53 as many: of bf16 heads of 64 values, 64 bytes and one fp32 scale are left of 128."""
    model = in_dtype(tiny("llama", head_dim=64), torch.bfloat16)

    def most_at_once(kv_dtype: str) -> tuple[int, int, int]:
        config = EngineConfig(
            runner="native",
            kv_dtype=kv_dtype,
            kv_bytes=1 << 22,
            max_num_seqs=64,
            prefix_cache=False,
        )
        own = Engine(model, config)
        length = 16 * 8  # tokens of one request in all
        params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
        seats = own.config.num_blocks * 16 // length
        for i in range(seats):
            own.submit(Request(f"r{i}", [(i + 3 * j) % 251 for j in range(length - 32)], params))
        drain(own)
        assert all(record.outcome == "completed" for record in own.records)
        return seats, max(s.rows for s in own.steps), sum(record.preemptions for record in own.records)

    exact, narrow = most_at_once("model"), most_at_once("int8")
    assert exact[2] == narrow[2] == 0
    assert (exact[0], narrow[0]) == (exact[1], narrow[1]), "all of them ran at once"
    assert narrow[1] / exact[1] > 1 / 0.55


def test_log_probabilities_of_a_prompt_come_once_though_the_request_is_preempted() -> None:
    own = engine(tiny("llama"), runner="torch", max_num_batched_tokens=16)
    prompt = IDS[:40]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    own.submit(Request("r", prompt, params))
    given, preempted = [], False
    while own.has_work:
        events = own.step()
        given += [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
        if given and not preempted:
            preempted = True
            own.scheduler._preempt(Plan(), own.clock.now())
    assert own.records[0].preemptions == 1
    assert [len(one) for one in given] == [len(prompt)]


def test_top_agreement_is_the_share_of_the_leading_tokens_that_both_have() -> None:
    reference = np.array([[9.0, 8, 7, 6, 5, 4, 3, 2], [9.0, 8, 7, 6, 5, 4, 3, 2]])
    variant = np.array([[5.0, 6, 7, 8, 9, 0, 0, 0], [0.0, 0, 0, 9, 8, 7, 6, 5]])
    assert quality.top_agreement(reference, variant).tolist() == [1.0, 0.4]
    assert quality.top_agreement(reference, variant, 1).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"k=9.*8"):
        quality.top_agreement(reference, variant, 9)
    with pytest.raises(ValueError, match="differ in shape"):
        quality.top_agreement(reference, variant[:1])
