"""Telemetry: exact rates from counters, what is missing is named, the thread costs little and always ends."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from perflab.clock import NS_PER_S, VirtualClock
from perflab.measure import telemetry
from perflab.measure.telemetry import Reading, Source, Telemetry, Unavailable
from perflab.types import Sample

Times = namedtuple("Times", "user nice system idle iowait steal guest")


def test_a_core_is_busy_by_what_passed_since_the_last_reading() -> None:
    readings = iter(
        [
            [Times(10, 0, 5, 80, 5, 0, 10), Times(0, 0, 0, 100, 0, 0, 0)],
            [Times(13, 0, 6, 84, 6, 1, 13), Times(0, 0, 0, 110, 0, 0, 0)],
        ]
    )
    sample = telemetry.core_busy(lambda: next(readings))
    assert list(sample(0)) == []
    assert list(sample(1)) == [("core_busy", {"core": "0"}, 0.4), ("core_busy", {"core": "1"}, 0.0)]


def test_bandwidth_is_the_change_of_the_kernels_counter(tmp_path: Path) -> None:
    file = tmp_path / "mon_data" / "mon_L3_01" / "mbm_total_bytes"
    file.parent.mkdir(parents=True)
    file.write_text("1000\n")
    sample = telemetry.memory_bandwidth(tmp_path)
    assert list(sample(0)) == []
    file.write_text("5000\n")
    assert list(sample(NS_PER_S // 2)) == [("memory_bandwidth", {"socket": "01"}, 8000.0)]
    file.write_text("Unavailable\n")
    assert list(sample(NS_PER_S)) == []
    with pytest.raises(Unavailable, match="resctrl"):
        telemetry.memory_bandwidth(tmp_path / "nothing")


class NVMLError(Exception):
    pass


def nvml(count: int) -> SimpleNamespace:
    """Two sensors, one that this model lacks."""

    def no_sensor(*_: object) -> float:
        raise NVMLError("not supported")

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=50, memory=25),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=1 << 30),
        nvmlDeviceGetPowerUsage=lambda _: 70_500,
        nvmlDeviceGetClockInfo=lambda *_: 1980,
        nvmlDeviceGetTemperature=no_sensor,
    )


def test_gpus_through_nvml_in_si_units() -> None:
    found = {(name, labels["gpu"]): value for name, labels, value in telemetry.gpus(nvml(2))(0)}
    assert found["gpu_busy", "1"] == 0.5
    assert found["gpu_memory", "0"] == 1 << 30
    assert found["gpu_power", "0"] == 70.5
    assert found["gpu_frequency", "0"] == 1.98e9
    assert len(found) == 10
    with pytest.raises(Unavailable, match="no NVIDIA GPU"):
        telemetry.gpus(nvml(0))


def counting(_now_ns: int) -> Iterator[Reading]:
    yield "count", {}, 1.0


def failing_later() -> Source:
    answers = iter([1.0])

    def sample(_now_ns: int) -> Iterator[Reading]:
        yield "fragile", {}, next(answers)

    return sample


def absent() -> Source:
    raise Unavailable("no such thing here")


def test_missing_and_broken_sources_are_named_and_the_others_go_on() -> None:
    sources: dict[str, Callable[[], Source]] = {
        "count": lambda: counting,
        "fragile": failing_later,
        "absent": absent,
    }
    clock = VirtualClock(5)
    watch = Telemetry(1.0, sources=sources, clock=clock)
    for _ in range(3):
        watch.take()
        clock.advance(NS_PER_S)
    assert [s.time_ns for s in watch.samples if s.name == "count"] == [5, 5 + NS_PER_S, 5 + 2 * NS_PER_S]
    assert [s.value for s in watch.samples if s.name == "fragile"] == [1.0]
    assert watch.missing["absent"] == "no such thing here"
    assert watch.missing["fragile"].startswith("stopped: ")


def test_the_thread_samples_this_process_and_ends() -> None:
    with Telemetry(0.01) as watch:
        sum(range(2_000_000))
    assert not [t for t in threading.enumerate() if t.name == "telemetry"]
    names = {s.name for s in watch.samples}
    assert {"process_rss", "process_cores"} <= names
    assert names <= set(telemetry.UNITS)
    assert 0 < watch.overhead.share < 1
    assert set(watch.missing) <= set(telemetry.SOURCES)
    assert all(s.value > 1 << 20 for s in watch.samples if s.name == "process_rss")
    with pytest.raises(ValueError, match="interval_s"):
        Telemetry(0)


def test_a_process_that_ended_gives_no_more_samples() -> None:
    with pytest.raises(Unavailable, match="no process"):
        telemetry.process(2**22 + 1)


def test_series_are_by_name_and_labels_in_order() -> None:
    samples = [
        Sample(2, "a", {"core": "1"}, 1.0),
        Sample(1, "a", {"core": "1"}, 2.0),
        Sample(1, "b", {}, 3.0),
    ]
    found = telemetry.series(samples)
    assert [s.value for s in found["a", (("core", "1"),)]] == [2.0, 1.0]
    assert [s.value for s in found["b", ()]] == [3.0]
