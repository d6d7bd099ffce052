"""Token for token what transformers' `generate()` answers, over the grid of configurations."""

from __future__ import annotations

import pytest
import torch

from benchmarks import parity
from perflab.models import kernels
from perflab.models.tiny import ARCHITECTURES, tiny


def assert_parity(verdicts: list[parity.Verdict], cells: list[parity.Cell]) -> None:
    done = [verdict.cell for verdict in verdicts]
    paths = list(dict.fromkeys(cell.path for cell in done))
    assert done == [cell._replace(path=path) for path in paths for cell in cells]
    assert paths[0] == "torch"
    assert len(paths) == (1 if kernels.library() is None else 2)
    for verdict in verdicts:
        assert verdict.ok, (verdict.cell, verdict.wrong, verdict.excused)
        # A tight pool may evict what the first turn left before the second one asks for it.
        ample = verdict.cell.prefix_cache and verdict.cell.pool == "ample"
        assert verdict.cached_tokens > 0 or not ample
    for path in paths:
        tight = [
            verdict for verdict in verdicts if verdict.cell.pool == "tight" and verdict.cell.path == path
        ]
        assert any(verdict.preemptions for verdict in tight)
        assert any(verdict.cached_tokens for verdict in tight)
    assert not any(verdict.preemptions for verdict in verdicts if verdict.cell.pool == "ample")


def test_corners_of_the_grid_on_the_embedded_model() -> None:
    assert_parity(parity.check_embedded(parity.CORNERS, 6, 12, lambda verdict: None), parity.CORNERS)


@pytest.mark.verify
def test_the_whole_grid_on_the_embedded_model() -> None:
    assert_parity(parity.check_embedded(parity.GRID, 48, 64, lambda verdict: None), parity.GRID)


@pytest.mark.verify
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_whole_grid_on_tiny_models(arch: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert_parity(parity.check_tiny(arch, parity.GRID, lambda verdict: None), parity.GRID)
    finally:
        torch.set_num_threads(threads)


def test_a_wrong_token_is_found(monkeypatch) -> None:
    """The comparison can fail: an answer changed by one token, where the model was sure."""
    generate = parity.generate_alone

    def wrong(model, prompt, count):
        answer = generate(model, prompt, count)
        return [*answer[:3], (answer[3] + 1) % 250, *answer[4:]]

    monkeypatch.setattr(parity, "generate_alone", wrong)
    for verdict in parity.check_tiny("llama", parity.CORNERS[:1], lambda verdict: None):
        assert verdict.wrong
        assert not verdict.ok


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss"])
def test_each_architecture_is_checked_by_all_that_it_has(arch: str) -> None:
    paths = [cell.path for cell in parity.by_each_path(parity.CORNERS[:1], tiny(arch))]
    native = {"llama": ["native"]}.get(arch, ["native attention"]) if kernels.library() is not None else []
    assert paths == ["torch", *native]
