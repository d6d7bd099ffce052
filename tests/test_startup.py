"""A new process: its parts add up, and what was found out before is not found out again."""

from __future__ import annotations

import pytest

from benchmarks import startup
from perflab.models import kernels

OPTIONS = ["smollm2-135m", "bf16", '{"num_threads": 1, "kv_bytes": 16777216}']


@pytest.mark.skipif(kernels.library() is None, reason="the torch path reads the module at every start")
def test_with_warm_caches_a_process_reads_no_weights_and_imports_no_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PERFLAB_PACKED_CACHE_BYTES", raising=False)
    first, later = startup.run("cached", OPTIONS), startup.run("cached", OPTIONS)
    assert not later["transformers"]
    assert not any("weights" in part or part.endswith(": import") for part in later["parts"])
    for found in (first, later):
        assert sum(found["parts"].values()) == pytest.approx(found["total"])
        assert {"import torch", "load: tokenizer", "first token"} <= set(found["parts"])
        assert min(found["parts"].values()) >= 0
