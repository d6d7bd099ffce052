"""The machine beside a run: cores, frequency, memory, its bandwidth, GPUs, sampled on the run's clock.

Owns the sources and the thread that reads them. Knows no engine. A source that this machine does not
have is named in `Telemetry.missing` with the reason, never sampled as 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from perflab.clock import NS_PER_S, Clock, WallClock
from perflab.types import Sample

Reading = tuple[str, Mapping[str, str], float]  # name, labels, value
Source = Callable[[int], Iterable[Reading]]
"""Readings at a time in ns. Its first answer may be empty: a rate needs two."""

UNITS: Mapping[str, str] = {
    "core_busy": "share of one core",
    "process_cores": "cores",
    "core_frequency": "Hz",
    "process_rss": "bytes",
    "memory_bandwidth": "bytes/s",
    "gpu_busy": "share of the time in which a kernel ran",
    "gpu_memory_busy": "share of the time in which its memory was read or written",
    "gpu_memory": "bytes",
    "gpu_power": "W",
    "gpu_frequency": "Hz",
    "gpu_temperature": "°C",
}
"""The names of samples, and what their values count."""


class Unavailable(Exception):
    """A source that this machine does not have; says why."""


class _Rates:
    """Counters that only grow, as change per second since the last reading."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, float]] = {}

    def per_s(self, key: str, now_ns: int, value: float) -> float | None:
        before = self._before.get(key)
        self._before[key] = (now_ns, value)
        if before is None or now_ns <= before[0]:
            return None
        return (value - before[1]) * NS_PER_S / (now_ns - before[0])


def core_busy(read: Callable[[], Sequence[Any]] = lambda: psutil.cpu_times(percpu=True)) -> Source:
    """`core_busy` of each core: 1 − (idle + waiting for disks + taken by other machines) / all time."""
    before: list[tuple[float, float]] = []

    def sample(_now_ns: int) -> Iterator[Reading]:
        counted = []
        for times in read():
            values = times._asdict()
            whole = sum(v for name, v in values.items() if not name.startswith("guest"))
            counted.append((whole, whole - sum(values.get(n, 0.0) for n in ("idle", "iowait", "steal"))))
        for core, ((whole, busy), (whole_then, busy_then)) in enumerate(zip(counted, before, strict=False)):
            if whole > whole_then:
                share = (busy - busy_then) / (whole - whole_then)
                yield "core_busy", {"core": str(core)}, min(1.0, max(0.0, share))
        before[:] = counted

    return sample


def process(pid: int | None = None) -> Source:
    """`process_cores` (CPU seconds per second) and `process_rss` of a process, this one by default."""
    try:
        watched = psutil.Process(pid)
    except psutil.Error:
        raise Unavailable(f"no process {pid} that may be looked at") from None
    rates = _Rates()

    def sample(now_ns: int) -> Iterator[Reading]:
        try:
            with watched.oneshot():
                times, rss = watched.cpu_times(), watched.memory_info().rss
        except psutil.Error:
            return  # it has ended
        yield "process_rss", {}, float(rss)
        cores = rates.per_s("cpu", now_ns, times.user + times.system)
        if cores is not None:
            yield "process_cores", {}, cores

    return sample


def core_frequency() -> Source:
    """`core_frequency` as the kernel says it; in a virtual machine mostly the nominal one."""
    try:
        found = psutil.cpu_freq(percpu=True)
    except (OSError, NotImplementedError, AttributeError):
        found = []
    if not found:
        raise Unavailable("the system does not tell frequencies")

    def sample(_now_ns: int) -> Iterator[Reading]:
        for core, frequency in enumerate(psutil.cpu_freq(percpu=True)):
            yield "core_frequency", {"core": str(core)}, frequency.current * 1e6

    return sample


def memory_bandwidth(root: Path = Path("/sys/fs/resctrl")) -> Source:
    """`memory_bandwidth` of each socket, all processes together, from the kernel's resctrl counters."""
    files = sorted(root.glob("mon_data/mon_L3_*/mbm_total_bytes"))
    if not files:
        raise Unavailable(
            "the kernel's counters are not there: they need a processor that counts (Intel RDT, AMD QoS), "
            "no virtual machine, and as root `mount -t resctrl resctrl /sys/fs/resctrl`"
        )
    rates = _Rates()

    def sample(now_ns: int) -> Iterator[Reading]:
        for file in files:
            text = file.read_text().strip()
            rate = rates.per_s(file.parent.name, now_ns, float(text)) if text.isdigit() else None
            if rate is not None:
                yield "memory_bandwidth", {"socket": file.parent.name.rpartition("_")[2]}, rate

    return sample


def gpus(nvml: Any = None) -> Source:
    """Each NVIDIA GPU through NVML: busy shares, memory, power, clock, temperature."""
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            raise Unavailable("pynvml is not installed: pip install 'perflab[profile]'") from None
        nvml = pynvml
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise Unavailable(f"no NVIDIA GPU or driver ({error})") from None
    if not handles:
        raise Unavailable("no NVIDIA GPU")

    def readings(handle: Any) -> Iterator[tuple[str, Callable[[], float]]]:
        use = nvml.nvmlDeviceGetUtilizationRates
        yield "gpu_busy", lambda: use(handle).gpu / 100
        yield "gpu_memory_busy", lambda: use(handle).memory / 100
        yield "gpu_memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used
        yield "gpu_power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
        yield "gpu_frequency", lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        yield (
            "gpu_temperature",
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        )

    def sample(_now_ns: int) -> Iterator[Reading]:
        for index, handle in enumerate(handles):
            for name, read in readings(handle):
                try:
                    yield name, {"gpu": str(index)}, float(read())
                except nvml.NVMLError:
                    continue  # this model has no such sensor

    return sample


SOURCES: Mapping[str, Callable[[], Source]] = {
    "cores": core_busy,
    "process": process,
    "frequency": core_frequency,
    "memory bandwidth": memory_bandwidth,
    "GPU": gpus,
}
"""Everything that may be there, by the name under which it is missing."""

SLOW, EVERY = ("frequency",), 10
"""Sources that cost more than they change: read at every tenth sample."""


class Overhead(NamedTuple):
    """What sampling cost: CPU seconds of its thread, and that over the wall time."""

    cpu_s: float
    share: float


class Telemetry:
    """Samples every `interval_s` in a thread of its own, from `with` to its end.

    `sources`: what to read, by name; those that raise `Unavailable` when made go to `missing`.
    `pid`: the process to watch, this one by default. Raises ValueError for an interval below 1 ms.
    """

    def __init__(
        self,
        interval_s: float = 0.1,
        pid: int | None = None,
        sources: Mapping[str, Callable[[], Source]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if interval_s < 1e-3:
            raise ValueError(f"interval_s={interval_s}: 0.001 (a millisecond) or more")
        self.interval_s, self.clock = interval_s, clock or WallClock()
        self.samples: list[Sample] = []
        self.missing: dict[str, str] = {}
        self._sources: dict[str, Source] = {}
        wanted = sources if sources is not None else {**SOURCES, "process": lambda: process(pid)}
        for name, make in wanted.items():
            try:
                self._sources[name] = make()
            except Unavailable as reason:
                self.missing[name] = str(reason)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ticks = 0
        self._cpu_s = self._wall_s = 0.0

    def take(self) -> None:
        """One reading of every source, stamped with the time before it."""
        now = self.clock.now()
        for name, source in list(self._sources.items()):
            if name in SLOW and self._ticks % EVERY:
                continue
            try:
                self.samples += [Sample(now, *reading) for reading in source(now)]
            except Exception as error:  # a sensor that goes away must not end what is measured
                self.missing[name] = f"stopped: {type(error).__name__}: {error}"
                del self._sources[name]
        self._ticks += 1

    def _run(self) -> None:
        start, cpu = time.perf_counter(), time.thread_time()
        self.take()
        while not self._stop.wait(self.interval_s):
            self.take()
        self.take()
        self._cpu_s, self._wall_s = time.thread_time() - cpu, time.perf_counter() - start

    def __enter__(self) -> Telemetry:
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None, "telemetry ends where it began"
        self._stop.set()
        self._thread.join()

    @property
    def overhead(self) -> Overhead:
        """Of the whole `with`; known after it."""
        return Overhead(self._cpu_s, self._cpu_s / self._wall_s if self._wall_s else 0.0)

    def about(self) -> dict[str, Any]:
        """For a manifest: how often, at what cost, and what this machine does not tell."""
        return {"interval_s": self.interval_s, "overhead": self.overhead._asdict(), "missing": self.missing}


def series(samples: Iterable[Sample]) -> dict[tuple[str, tuple[tuple[str, str], ...]], list[Sample]]:
    """Samples by name and labels, each in order of time."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[Sample]] = {}
    for sample in sorted(samples, key=lambda s: s.time_ns):
        found.setdefault((sample.name, tuple(sorted(sample.labels.items()))), []).append(sample)
    return found
