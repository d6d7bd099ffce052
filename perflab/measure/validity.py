"""Whether a run may be compared: one verdict per run, with the reasons by name.

Owns the reasons, their limits, and the sampler of what else the machine was doing. Reads
`/proc` where there is one; elsewhere noise is unknown, which is a note and no reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perflab.measure import metrics
from perflab.types import RequestRecord

NOISE_LIMIT = 0.15
"""Share of the usable cores that other processes may take before a run is too noisy."""

MIN_COMPLETED = 5
LATE_LIMIT_S = 0.25

REASONS: dict[str, str] = {
    "incomplete": "the run was cut off before all its requests were sent or had ended",
    "too few samples": f"fewer than {MIN_COMPLETED} requests completed",
    "failures": "more than 1 % of the requests failed, timed out or were refused",
    "length mismatch": "prompts or outputs are not as long as the workload asked",
    "cache-assisted": "the first request of the run found its prompt cached, so the cache was warm before it",
    "no steady state": "an open-loop run without a window in which a steady number of requests was in flight",
    "client-bound": "the load generator sent requests later than intended because it was itself busy",
    "machine too noisy": f"other processes took more than {NOISE_LIMIT:.0%} of the usable cores",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reasons` make a run invalid, each a (name, detail); `notes` are worth knowing only."""

    reasons: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "valid" if self.valid else "; ".join(f"{name} ({detail})" for name, detail in self.reasons)


@dataclass(frozen=True, slots=True)
class Noise:
    """What other processes took during a run. `others_share` is of the usable cores, 0 to 1."""

    others_share: float | None
    own_cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Expected:
    """What a workload asked of one request; None where it left that to the model."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None


class NoiseSampler:
    """Busy time of the usable cores, minus this process's own, between `start` and `stop`."""

    def start(self) -> NoiseSampler:
        self._wall, self._own, self._busy = time.perf_counter(), time.process_time(), busy_cpu_s()
        return self

    def stop(self) -> Noise:
        """The noise since `start`; `others_share` None where the system does not tell."""
        wall, own, busy = time.perf_counter() - self._wall, time.process_time() - self._own, busy_cpu_s()
        if busy is None or self._busy is None or wall <= 0:
            return Noise(None, own, wall)
        others = max(0.0, busy - self._busy - own)
        return Noise(min(1.0, others / (wall * len(usable_cpus()))), own, wall)


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


def judge(
    records: Sequence[RequestRecord],
    *,
    planned: int | None = None,
    interrupted: bool = False,
    expected: Mapping[str, Expected] | None = None,
    noise: Noise | None = None,
    open_loop: bool = False,
    late_limit_s: float = LATE_LIMIT_S,
) -> Verdict:
    """The verdict of one run. `planned` is how many requests the workload holds; `late_limit_s`
    bounds the 99th percentile of lateness of an open-loop run."""
    reasons: list[tuple[str, str]] = []
    notes: list[str] = []
    count = metrics.counts(records)
    missing = (planned - count.sent if planned is not None else 0) + count.unfinished
    if interrupted or missing > 0:
        reasons.append(("incomplete", f"{missing} requests not sent or unfinished"))
    if count.completed < MIN_COMPLETED:
        reasons.append(("too few samples", f"{count.completed} requests completed"))
    bad = count.failed + count.timed_out + count.rejected
    if bad > 0.01 * count.sent:
        reasons.append(("failures", f"{bad} of {count.sent} requests"))
    elif bad:
        notes.append(f"{bad} of {count.sent} requests failed, timed out or were refused")
    wrong = _length_mismatches(records, expected or {})
    if wrong:
        reasons.append(("length mismatch", f"{len(wrong)} requests, e.g. {wrong[0]}"))
    if warm := _warm_before(records):
        reasons.append(("cache-assisted", f"{warm} cached tokens at the first admission"))
    if open_loop:
        late = (
            metrics.stats.percentile_value([metrics.lateness_s(r) for r in records], 0.99) if records else 0.0
        )
        if late > late_limit_s:
            reasons.append(("client-bound", f"99th percentile of lateness {late:.2f} s"))
    if metrics.steady_throughput(records) is None:
        if open_loop:
            reasons.append(("no steady state", f"{count.completed} requests completed"))
        else:
            notes.append("no steady state: rates are those of the whole run, ramp and drain included")
    if noise is None or noise.others_share is None:
        notes.append("what other processes took is unknown on this system")
    elif noise.others_share > NOISE_LIMIT:
        reasons.append(("machine too noisy", f"others took {noise.others_share:.0%} of the usable cores"))
    return Verdict(tuple(reasons), tuple(notes))


def _length_mismatches(records: Sequence[RequestRecord], expected: Mapping[str, Expected]) -> list[str]:
    wrong = []
    for r in records:
        want = expected.get(r.request_id)
        if want is None or r.outcome != "completed":
            continue
        for kind, asked, got in (
            ("prompt", want.prompt_tokens, r.prompt_tokens),
            ("output", want.output_tokens, r.output_tokens),
        ):
            if asked is not None and asked != got:
                wrong.append(f"{r.request_id}: {kind} of {got} tokens, asked {asked}")
    return wrong


def _warm_before(records: Sequence[RequestRecord]) -> int:
    """Cached tokens of the requests admitted first, before any other could have filled the cache."""
    admitted = [r.admitted_ns for r in records if r.admitted_ns is not None]
    if not admitted:
        return 0
    return max(r.cached_tokens for r in records if r.admitted_ns == min(admitted))
