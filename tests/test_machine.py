"""Machine facts: plain, complete, honest about containers, silent about the host."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch

from perflab.models import machine
from perflab.models.load import runs_bf16_fast

GIB = 1 << 30


def test_quick_description_is_plain_and_complete() -> None:
    facts = machine.describe(quick=True)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["bandwidth"] is None
    assert facts["matrix_rates"] is None
    assert 1 <= facts["cpu"]["usable_cores"] <= facts["cpu"]["logical_cores"]
    assert 0 < facts["memory"]["free_gib"] <= facts["memory"]["total_gib"]
    assert facts["versions"]["torch"] == torch.__version__
    if facts["engine"]["device"] == "cpu":
        bf16 = runs_bf16_fast(torch.device("cpu"))
        assert facts["engine"]["dtype"] == ("bf16" if bf16 else "fp32")


def test_rows_say_what_was_measured_and_what_not() -> None:
    facts = machine.describe(quick=True)
    assert "Read bandwidth" not in dict(machine.rows(facts))
    facts["bandwidth"] = {"device": "cpu", "threads": 2, "mib": 512, "loops": {"sum": 9.5}, "best": 9.5}
    facts["matrix_rates"] = {
        "device": "cpu",
        "threads": 2,
        "size": 8,
        "rates": {"fp32": 1234.0, "int8": None},
    }
    rows = dict(machine.rows(facts))
    assert rows["Read bandwidth"].startswith("9.5 GB/s")
    assert rows["  fp32"] == "1,234 GFLOP/s"
    assert rows["  int8"] == "not available"
    assert all(isinstance(label, str) and isinstance(value, str) for label, value in rows.items())


def test_bandwidth_is_the_best_of_its_loops() -> None:
    found = machine.measure_bandwidth(torch.device("cpu"), mib=16)
    assert found["best"] == max(found["loops"].values()) > 0
    assert found["mib"] == 16
    assert len(found["loops"]) >= 4


def test_matrix_rates_cover_the_three_kinds() -> None:
    found = machine.measure_matrix_rates(torch.device("cpu"), size=64)
    assert set(found["rates"]) == {"fp32", "bf16", "int8"}
    assert found["rates"]["fp32"] > 0


def test_manifest_names_no_host_or_path() -> None:
    text = json.dumps(machine.manifest())
    for secret in (platform.node(), str(Path.home())):
        assert len(secret) < 5 or secret not in text
    assert {"cpu", "usable_cores", "threads", "os", "versions"} <= set(machine.manifest())


@pytest.mark.parametrize(("line", "cores"), [("150000 100000", 1.5), ("max 100000", None)])
def test_cpu_quota_of_a_container(tmp_path: Path, line: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(line + "\n")
    assert machine.cgroup_cpus(tmp_path) == cores


def test_cpu_quota_of_an_old_container(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.cgroup_cpus(tmp_path) == 3.0
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine.cgroup_cpus(tmp_path) is None


def test_the_tightest_memory_limit_above_the_process_counts(tmp_path: Path) -> None:
    inner = tmp_path / "user" / "task"
    inner.mkdir(parents=True)
    (tmp_path / "user" / "memory.max").write_text(str(4 * GIB))
    (tmp_path / "user" / "memory.current").write_text(str(3 * GIB))
    (tmp_path / "user" / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    (inner / "memory.max").write_text("max")
    (inner / "memory.current").write_text(str(GIB))
    assert list(machine.cgroup_memory(tmp_path, "/user/task")) == [(4 * GIB, 2 * GIB)]
