"""Models that several tests share; the embedded one is loaded once per session and dtype."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from perflab.models.load import load
from perflab.models.loaded import LoadedModel


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session", autouse=True)
def _nothing_packed_before() -> Iterator[None]:
    """Tests pack for themselves: what an earlier build packed must not answer for this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERFLAB_PACKED_CACHE_BYTES", "0")
        yield


@pytest.fixture(scope="session")
def embedded() -> LoadedModel:
    """The embedded model in fp32 on the CPU."""
    return load(dtype="fp32", device="cpu")


@pytest.fixture(scope="session")
def embedded_bf16() -> LoadedModel:
    """The embedded model in bf16 on the CPU."""
    return load(dtype="bf16", device="cpu")
