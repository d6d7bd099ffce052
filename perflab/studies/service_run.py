"""One run against a service: which service, which load, and the run directory's content.

Owns the two declarations that every command against a service shares. Knows no protocol and
computes no metric; keys stay in the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from perflab.config import EngineConfig
from perflab.errors import WorkloadError
from perflab.load.build import build
from perflab.load.drive import Limits, Service, run_service
from perflab.load.pacing import ClosedLoop, OpenLoop, Pacing
from perflab.load.prompts import PromptEncoder
from perflab.load.run import OnProgress
from perflab.load.workloads import Workload
from perflab.measure.metrics import SLO
from perflab.measure.validity import NoiseSampler
from perflab.models.assets import NAME as EMBEDDED
from perflab.studies.manifest import describe_service_run
from perflab.studies.store import Run

API_KEY = "PERFLAB_API_KEY"
"""Environment variable that holds the key of a server that wants one."""

_PIECES = re.compile(r" ?\w{1,8}|[^\w ]| +")
"""About what tokenizers of large vocabularies take for one token of English."""


@dataclass(frozen=True)
class ServiceChoice:
    """A server at `url`, or the engine in this process on `model` where there is none.

    `model` is the name that the server is asked for; None takes the first it lists. `tokenizer` names
    the model whose tokenizer makes prompts of an exact length and counts outputs; None uses `model`
    where that is the embedded one or a local path.
    """

    url: str | None = None
    model: str | None = None
    endpoint: str = "chat"
    tokenizer: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False

    @cached_property
    def loaded(self) -> Any:
        """The model (its weights wait until an engine asks); None where only the server knows it."""
        from perflab.models.load import load

        name = self.tokenizer or self.model or (None if self.url else EMBEDDED)
        if name is None or (
            self.url and not self.tokenizer and not (name == EMBEDDED or Path(name).exists())
        ):
            return None
        return load(name, dtype=self.dtype, device=self.device, trust_remote_code=self.trust_remote_code)

    @cached_property
    def _runner(self) -> Any:
        from perflab.models.runners import make_runner

        return make_runner(self.loaded, self.config)

    @cached_property
    def encoder(self) -> PromptEncoder:
        """With the model's tokenizer, else one that guesses: prompts are then about as long as asked."""
        if self.loaded is None:
            return PromptEncoder(lambda text: [0] * len(_PIECES.findall(text)))
        return PromptEncoder(self.loaded.encode, self.loaded.chat)

    def make(self) -> Service:
        """A fresh service: a client, or an engine on weights that were packed once."""
        if self.url is None:
            from perflab.engine.engine import Engine
            from perflab.load.engine_service import EngineService

            return EngineService(Engine(self.loaded, self.config, runner=self._runner))
        from perflab.load.http_service import HTTPService

        return HTTPService(self.url, self.model, os.environ.get(API_KEY), self.endpoint)


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """What is asked, when, and what counts as good enough.

    `rate_per_s` makes an open loop, `users` a closed one; without either all requests start at once.
    `requests` None takes what `duration_s` needs. `options` go to the workload's kind as they are.
    """

    kind: str = "synthetic"
    path: Path | None = None
    input_tokens: int = 128
    output_tokens: int = 64
    requests: int | None = None
    rate_per_s: float | None = None
    arrivals: str = "poisson"
    cv: float = 1.0
    users: int | None = None
    think_s: float = 0.0
    duration_s: float | None = None
    slo: SLO = field(default_factory=SLO)
    timeout_s: float | None = 600.0
    limits: Limits = field(default_factory=Limits)
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def workload(self) -> Workload:
        """The requests. Raises WorkloadError for a contradiction, naming it."""
        if self.users and self.rate_per_s:
            raise WorkloadError("users and rate_per_s: give users (closed loop) or a rate (open loop)")
        arrivals = {"kind": self.arrivals, "rate_per_s": self.rate_per_s, "cv": self.cv}
        spec: dict[str, Any] = {"kind": self.kind, "seed": self.seed}
        count = self.requests or self._count()
        if self.kind == "synthetic":
            spec |= {"requests": count, "input_tokens": self.input_tokens}
            spec |= {"output_tokens": (self.output_tokens,)}
        else:
            spec |= {"path": self.path, "limit": self.requests}
        if self.kind == "prompts":
            spec["max_tokens"] = self.output_tokens
        if self.rate_per_s and self.kind != "trace":
            spec["arrivals"] = arrivals
        return build(spec | dict(self.options))

    def _count(self) -> int:
        if self.rate_per_s and self.duration_s:
            return max(1, round(self.rate_per_s * self.duration_s))
        return 8 * self.users if self.users else 32

    def pacing(self) -> Pacing:
        if self.users is None:
            return OpenLoop()
        return ClosedLoop(self.users, self.think_s, self.duration_s, self.requests)

    def describe(self) -> dict[str, Any]:
        """The declaration for a manifest; of a path only the name."""
        facts = asdict(replace(self, path=None))
        return facts | {"path": self.path.name if self.path else None}


def measure(
    service: ServiceChoice,
    load: LoadChoice,
    *,
    kind: str = "bench",
    variant: str | None = None,
    number: int = 0,
    workload: Workload | None = None,
    on_progress: OnProgress | None = None,
    make: Callable[[], Service] | None = None,
    beside: Sequence[Any] = (),
) -> Run:
    """One run with its verdict, ready for `store.write_run`; interrupted, it holds what was measured."""
    workload = workload or load.workload()
    pacing = load.pacing()
    made: list[Service] = []

    def once() -> Service:
        made.append((make or service.make)())
        return made[-1]

    noise = NoiseSampler().start()
    records = run_service(
        once,
        workload,
        pacing=pacing,
        encoder=service.encoder,
        limits=load.limits,
        timeout_s=load.timeout_s,
        on_progress=on_progress,
        beside=beside,
    )
    facts = made[0].describe()
    manifest = describe_service_run(
        kind=kind,
        variant=variant or str(facts.get("url") or facts.get("model")),
        service=facts,
        workload=workload,
        records=records,
        load=load.describe(),
        open_loop=pacing.open_loop,
        noise=noise.stop(),
        slo=load.slo,
        exact_prompts=service.loaded is not None,
        number=number,
    )
    return Run(manifest, records.requests, records.steps, records.events, telemetry=records.telemetry)
