"""Quality beside the speed of two services: how far their answers agree, and, of engines of ours, fidelity.

Owns which prompts are asked for it. The formulas are `measure.quality`'s, the reference `studies.quality`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from perflab.load.drive import Service, drive
from perflab.load.engine_service import EngineService
from perflab.load.run import RunRecords
from perflab.measure import quality as formulas
from perflab.measure import stats
from perflab.studies import quality
from perflab.studies.service_run import LoadChoice

if TYPE_CHECKING:
    from perflab.studies.compare import Side

PROMPTS, TEXTS = 8, 6


async def beside(
    sides: Sequence[Side], services: Sequence[Service], load: LoadChoice, salt: str
) -> dict[str, Any]:
    """Greedy match of the answers to the same prompts, as JSON; for two engines also their distance from the
    fp32 reference where their numerics differ. Nothing where a service gives no answers to compare."""
    asked = replace(
        load, requests=PROMPTS, rate_per_s=None, users=None, duration_s=None, seed=load.seed + 5003
    )
    answers = []
    for side, service in zip(sides, services, strict=True):
        workload = asked.workload().salted(f"{salt}q")
        records = await drive(service, workload, encoder=side.encoder, timeout_s=load.timeout_s)
        answers.append(_answers(records))
    found: dict[str, Any] = {}
    shares = [
        formulas.greedy_match(a, b) / max(1, min(len(a), len(b)))
        for name, a in answers[0].items()
        if (b := answers[1].get(name)) is not None and type(a) is type(b)
    ]
    if shares:
        found["greedy_match"] = stats.bootstrap([[share] for share in shares], lambda x: float(x.mean()))
    if all(isinstance(service, EngineService) for service in services):
        found |= await _fidelity(sides, services)
    return found


def _answers(records: RunRecords) -> dict[str, Any]:
    """Answers of completed requests: token ids, or characters where the service gives text."""
    given: dict[str, Any] = records.outputs or {name: list(text) for name, text in records.texts.items()}
    return {
        r.request_id: given[r.request_id]
        for r in records.requests
        if r.outcome == "completed" and r.request_id in given
    }


async def _fidelity(sides: Sequence[Side], services: Sequence[Any]) -> dict[str, Any]:
    """Of each side by its name; nothing where both compute the same numbers on the same model."""
    first, second = (side.choice for side in sides)
    if first is None or second is None or first is second:
        return {}
    keys = [quality.numeric_key(s.engine.config, f"{s.model.fingerprint} {s.model.dtype}") for s in services]
    if keys[0] == keys[1]:
        return {}
    from perflab.engine.engine import Engine

    plain = replace(first.config, **quality.REFERENCE)  # type: ignore[arg-type]
    reference = replace(first, dtype="float32", config=plain)
    encoder = reference.encoder
    assert encoder is not None
    engine = Engine(reference.loaded, reference.config)
    texts = quality.texts(encoder, TEXTS)
    logits = quality.logits(engine.executor, texts)
    engine.close()
    return {
        "fidelity": {
            side.name: await service._async.call(
                lambda service=service: quality.measure_fidelity(service.engine.executor, logits, texts)
            )
            for side, service in zip(sides, services, strict=True)
        }
    }
