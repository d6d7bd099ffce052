"""Configuration refuses what is of the wrong kind or out of range, by name."""

from __future__ import annotations

import pytest

from perflab.config import EngineConfig
from perflab.errors import ConfigError, WorkloadError
from perflab.load.workloads import synthetic
from perflab.measure.metrics import SLO
from perflab.studies.define import Study, Variant


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_cache": "false"}, "kv_cache='false': must be true or false"),
        ({"max_num_seqs": 2.5}, "max_num_seqs=2.5: must be a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"num_blocks": "many"}, "num_blocks='many': must be a whole number or nothing"),
        ({"ageing_s": float("nan")}, "ageing_s=nan: must be a number"),
        ({"policy": "lifo"}, "policy='lifo': choose one of fcfs"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be 1 or more"),
        ({"max_num_batched_tokens": 4}, "is below max_num_seqs=16"),
        ({"runner": "fast"}, "runner='fast': choose one of auto, native, torch"),
        ({"weights": "int2"}, "weights='int2': choose one of model, int8, int8-dynamic, int4"),
        ({"keep": "head"}, "keep='head' holds for llm.int8, nf4, fp4 weights alone"),
        ({"kv_dtype": "fp8"}, "kv_dtype='fp8': choose one of model, int8"),
        (
            {"weights": "int4", "runner": "torch"},
            "weights='int4' needs the native runner: leave runner at 'auto'",
        ),
        (
            {"kv_dtype": "int8", "runner": "torch"},
            "kv_dtype='int8' needs native kernels: set attention='native' or runner='auto'",
        ),
        ({"num_threads": 0}, "num_threads=0: must be 1 or more"),
    ],
)
def test_a_wrong_switch_is_named(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trust_remote_code": "false"}, "trust_remote_code='false'"),
        ({"keep_texts": "no"}, "keep_texts='no'"),
        ({"model": None}, "model=None: must be text"),
        ({"name": ""}, "may be empty"),
        ({"repeats": "five"}, "repeats='five'"),
        ({"reference_dtype": "foo"}, "reference_dtype='foo'"),
        ({"time_budget_s": float("nan")}, "time_budget_s=nan"),
        ({"config": 5}, "config=5"),
    ],
)
def test_a_wrong_study_is_refused_before_anything_runs(fields, message) -> None:
    right = {"name": "s", "model": "m", "workload": synthetic(1), "variants": (Variant("a"),)}
    with pytest.raises(WorkloadError, match=message):
        Study(**{**right, **fields})


def test_wrong_limits_and_workloads_are_refused() -> None:
    with pytest.raises(WorkloadError, match="ttft_s='fast'"):
        SLO(ttft_s="fast")
    with pytest.raises(WorkloadError, match="tpot_s=-1"):
        SLO(tpot_s=-1)
    with pytest.raises(WorkloadError, match="output_tokens is empty"):
        synthetic(2, output_tokens=[])


def test_resolving_fills_in_sizes_and_drops_what_needs_a_cache() -> None:
    config = EngineConfig(kv_cache=False).resolve(model_max_len=64, kv_bytes_per_token=100)
    assert not config.prefix_cache
    assert not config.chunked_prefill
    assert config.max_model_len == 64
    assert config.num_blocks == 2 * 16 * 4
    with pytest.raises(ConfigError, match="above the model's own limit"):
        EngineConfig(max_model_len=65).resolve(model_max_len=64, kv_bytes_per_token=100)
    with pytest.raises(ConfigError, match="holds no block"):
        EngineConfig(kv_bytes=10).resolve(model_max_len=64, kv_bytes_per_token=100)
