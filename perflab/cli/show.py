"""How facts look in a terminal: plain rows for `doctor`, units written out.

Owns words and rounding. Measures nothing and prints nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = tuple[str, str]


def doctor_rows(facts: Mapping[str, Any], embedded: Path | None) -> Iterator[tuple[str, list[Row]]]:
    """Sections of (title, rows) from `perflab.models.machine.describe()`."""
    cpu, memory, engine = facts["cpu"], facts["memory"], facts["engine"]
    offers: list[Row] = [
        ("processor", str(cpu["model"])),
        ("cores", f"{cpu['usable_cores']} usable ({cpu['why_usable']})"),
        ("instructions", ", ".join(cpu["instructions"]) or "none of those that matter here"),
        ("memory", f"{_gib(memory['free_gib'])} free of {_gib(memory['total_gib'])}"),
    ]
    offers += [
        ("GPU", f"{gpu['name']}, {_gib(gpu['memory_gib'])}, compute capability {gpu['capability']}")
        for gpu in facts["gpus"]
    ] or [("GPU", "none that torch can use")]
    yield "This machine", offers

    measured: list[Row] = []
    if (bandwidth := facts.get("bandwidth")) is not None:
        best = max(bandwidth["loops"], key=bandwidth["loops"].__getitem__)
        loops = f"{best}, the fastest of {len(bandwidth['loops'])} loops"
        measured.append(("memory read", f"{bandwidth['best']:.1f} GB/s ({loops})"))
    if (matrix := facts.get("matrix_rates")) is not None:
        measured += [
            _rate(name, rate, "matrices") for name, rate in matrix["rates"].items() if rate is not None
        ]
    measured += [
        _rate(name, rate, "native kernels") for name, rate in (facts.get("native_rates") or {}).items()
    ]
    if measured:
        yield "Measured now", measured

    yield (
        "The engine will use",
        [
            ("device", str(engine["device"])),
            ("number format", str(engine["dtype"])),
            ("threads", str(engine["threads"])),
            ("matrix kernels", str(engine["kernels"])),
            ("native kernels", _native(facts["native"])),
            ("embedded model", "in the cache" if embedded else "not fetched yet: perflab model fetch"),
        ],
    )
    yield "Versions", [(name, str(version)) for name, version in facts["versions"].items()]


def _rate(format: str, rate: float, of: str) -> Row:
    return f"{format} {of}", f"{rate:,.0f} {'Gop/s' if format.startswith('int') else 'GFLOP/s'}"


def _native(native: Mapping[str, Any]) -> str:
    if native["isa"] is None:
        return str(native["missing"])
    return f"{native['isa']}; a thread with nothing to do spins for {native['spin_us']} µs, then sleeps"


def _gib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} GiB"
