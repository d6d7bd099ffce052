"""What else the machine was doing during a run, and what the load generator did itself.

Owns the sampler. Reads `/proc` where there is one; elsewhere noise is unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Noise:
    """What other processes took during a run. `others_share` is of the usable cores, 0 to 1."""

    others_share: float | None
    own_cpu_s: float
    wall_s: float


class NoiseSampler:
    """Busy time of the usable cores between `start` and `stop`, minus this process's own and that of
    the processes under test: `pids` with their descendants (a server on this machine)."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._pids = tuple(pids)

    def start(self) -> NoiseSampler:
        self._wall, self._own, self._busy = time.perf_counter(), self._measured(), busy_cpu_s()
        return self

    def stop(self) -> Noise:
        """The noise since `start`; `others_share` None where the system does not tell."""
        wall, own, busy = time.perf_counter() - self._wall, self._measured() - self._own, busy_cpu_s()
        if busy is None or self._busy is None or wall <= 0:
            return Noise(None, own, wall)
        others = max(0.0, busy - self._busy - own)
        return Noise(min(1.0, others / (wall * len(usable_cpus()))), own, wall)

    def _measured(self) -> float:
        return time.process_time() + sum(tree_cpu_s(pid) for pid in self._pids)


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants, those that ended and were waited for among them;
    0 for a process that is gone."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0.0
    total = 0.0
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        total += times.user + times.system + ended
    return total


def listening_pids(port: int) -> tuple[int, ...]:
    """Processes of this machine that listen on a TCP port, as far as this user may see them."""
    try:
        found = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return ()
    listening = (c for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port)
    return tuple(sorted({c.pid for c in listening if c.pid is not None}))


def usable_cpus() -> list[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def busy_cpu_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds the usable cores have been busy since boot (user, nice, system, irq, softirq, steal)."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return None
    wanted = {f"cpu{i}" for i in usable_cpus()}
    found = [[int(x) for x in line.split()[1:9]] for line in lines if line.split(" ", 1)[0] in wanted]
    if not found:
        return None
    ticks = sum(
        user + nice + system + irq + soft + steal for user, nice, system, _, _, irq, soft, steal in found
    )
    return ticks / os.sysconf("SC_CLK_TCK")
