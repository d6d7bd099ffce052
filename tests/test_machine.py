"""Machine facts: plain, complete, honest about containers, silent about the host."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch

from perflab.cli import show
from perflab.models import kernels, machine
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


@pytest.mark.skipif(kernels.library() is None, reason=kernels.why_missing())
def test_native_kernels_are_named_and_measured() -> None:
    facts = machine.describe(quick=True)
    assert facts["native"] == {"isa": kernels.isa(), "missing": "", "spin_us": kernels.SPIN_US}
    if facts["engine"]["device"] == "cpu":
        assert facts["engine"]["kernels"] == f"native ({kernels.isa()})"
    assert "native sum of int64" in machine.measure_bandwidth(torch.device("cpu"), mib=16)["loops"]
    rates = machine.measure_native_rates(size=64)
    assert set(rates) == set(kernels.FORMATS)
    assert all(rate > 0 for rate in rates.values())
    said = dict(dict(show.doctor_rows({**facts, "native_rates": rates}, None))["The engine will use"])
    assert str(kernels.isa()) in said["native kernels"]


def test_what_native_kernels_lack_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERFLAB_NATIVE", raising=False)
    monkeypatch.setenv("PERFLAB_NATIVE_LIBRARY", "/nowhere/native.so")
    missing = kernels._load.__wrapped__()[1]
    assert "not built; install a C++20 compiler" in missing
    monkeypatch.setattr(kernels, "isa", lambda: None)
    monkeypatch.setattr(kernels, "why_missing", lambda: missing)
    facts = machine.describe(quick=True)
    assert "native" not in facts["engine"]["kernels"]
    said = dict(dict(show.doctor_rows(facts, None))["The engine will use"])
    assert said["native kernels"] == missing


def test_doctor_shows_what_was_measured_and_what_not() -> None:
    facts = machine.describe(quick=True)
    assert "Measured now" not in dict(show.doctor_rows(facts, None))
    loops = {"sum": 9.5, "dot": 8.0}
    facts["bandwidth"] = {"device": "cpu", "threads": 2, "mib": 512, "loops": loops, "best": 9.5}
    rates = {"fp32": 1234.0, "int8": None}
    facts["matrix_rates"] = {"device": "cpu", "threads": 2, "size": 8, "rates": rates}
    facts["native_rates"] = {"int4": 99.0}
    assert dict(show.doctor_rows(facts, None))["Measured now"] == [
        ("memory read", "9.5 GB/s (sum, the fastest of 2 loops)"),
        ("fp32 matrices", "1,234 GFLOP/s"),
        ("int4 native kernels", "99 Gop/s"),
    ]


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
