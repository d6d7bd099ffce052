"""A run's manifest: what was run, with what, on what, and whether it may be compared.

Owns which facts are written down. Prompts, outputs, paths and keys are not among them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from perflab.clock import NS_PER_S
from perflab.load.run import RunRecords
from perflab.load.workloads import PromptEncoder, Workload
from perflab.measure.metrics import SLO
from perflab.measure.validity import LATE_LIMIT_S, Expected, Noise, Verdict, judge
from perflab.models import machine
from perflab.studies.define import Study, Variant

THREADING = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "MKL_NUM_THREADS")
"""Environment variables that change how fast a CPU run is."""


def describe_run(
    study: Study,
    variant: Variant,
    number: int,
    workload: Workload,
    records: RunRecords,
    noise: Noise,
    engine: Any,
) -> dict[str, Any]:
    """Everything a reader needs to repeat and to judge one run, as JSON values."""
    model = engine.model
    longest = max((s.delivered_ns - s.start_ns for s in records.steps), default=0) / NS_PER_S
    expected = {r.request_id: Expected(r.prompt_length, r.output_length) for r in workload.requests}
    verdict = judge(
        records.requests,
        planned=records.planned,
        interrupted=records.interrupted,
        expected=expected,
        noise=noise,
        open_loop=workload.open_loop,
        late_limit_s=LATE_LIMIT_S + longest,
    )
    return {
        "study": study.name,
        "variant": variant.name,
        "description": variant.description,
        "round": number,
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "started_ns": records.started_ns,
        "ended_ns": records.ended_ns,
        "seed": study.seed,
        "slo": {f.name: getattr(study.slo, f.name) for f in fields(SLO)},
        "model": {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "notes": list(model.notes),
            "load_s": {span.name: (span.end_ns - span.start_ns) / NS_PER_S for span in model.load_spans},
        },
        "engine": asdict(engine.config),
        "workload": _workload(workload, records, workload.open_loop),
        **_judged(verdict, noise),
    }


def describe_service_run(
    *,
    kind: str,
    variant: str,
    service: Mapping[str, Any],
    workload: Workload,
    records: RunRecords,
    load: Mapping[str, Any],
    open_loop: bool,
    noise: Noise,
    slo: SLO | None = None,
    number: int = 0,
    exact_prompts: bool = True,
) -> dict[str, Any]:
    """The manifest of one run against a service, with its verdict, as JSON values.

    `kind` names the command that ran it, `service` is `Service.describe()`, `load` what was declared
    (no key, no path), `number` the round of a variant. Without `exact_prompts` the server's tokenizer
    was unknown, and the lengths of prompts are what it says.
    """
    slo = slo or SLO()
    expected = {
        r.request_id: Expected(r.prompt_length if exact_prompts else None, r.output_length)
        for r in workload.requests
    }
    verdict = judge(
        records.requests,
        planned=records.planned,
        interrupted=records.interrupted,
        expected=expected,
        noise=noise,
        open_loop=open_loop,
        client=records.client,
    )
    return {
        "kind": kind,
        "variant": variant,
        "round": number,
        "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "started_ns": records.started_ns,
        "ended_ns": records.ended_ns,
        "interrupted": records.interrupted,
        "slo": {f.name: getattr(slo, f.name) for f in fields(SLO)},
        "slos": {name: asdict(own) for name, own in workload.slos.items()},
        "model": {"name": service.get("model")},
        "service": dict(service),
        "load": dict(load),
        "workload": _workload(workload, records, open_loop),
        "client": asdict(records.client),
        **_judged(verdict, noise),
    }


def _workload(workload: Workload, records: RunRecords, open_loop: bool) -> dict[str, Any]:
    return {
        "name": workload.name,
        "description": workload.description,
        "source": workload.source,
        "fingerprint": workload.fingerprint,
        "requests": records.planned,
        "prompt_tokens": sum(r.prompt_tokens for r in records.requests),
        "output_tokens_asked": workload.output_tokens,
        "open_loop": open_loop,
    }


def _judged(verdict: Verdict, noise: Noise) -> dict[str, Any]:
    """The verdict, and the machine that it was found on."""
    return {
        "noise": asdict(noise),
        "validity": {"reasons": [list(reason) for reason in verdict.reasons], "notes": list(verdict.notes)},
        "machine": machine.manifest(),
        "environment": {name: os.environ[name] for name in THREADING if name in os.environ},
    }


def texts_of(workload: Workload, encoder: PromptEncoder, records: RunRecords, model: Any) -> dict[str, Any]:
    """Prompts and outputs by request, for a study that asked to keep them."""
    return {
        r.request_id: {
            "prompt": model.decode(encoder.ids(r.prompt)),
            "output": model.decode(records.outputs.get(r.request_id, [])),
        }
        for r in workload.requests
    }
