"""One run against a service: which service, which load, and the run directory's content.

Owns the two declarations that every command against a service shares. Knows no protocol and
computes no metric; keys stay in the environment.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perflab.config import EngineConfig
from perflab.errors import WorkloadError
from perflab.load.build import build
from perflab.load.drive import Beside, Limits, Service, run_service
from perflab.load.pacing import ClosedLoop, OpenLoop, Pacing
from perflab.load.prompts import PromptEncoder
from perflab.load.run import OnProgress
from perflab.load.workloads import Workload
from perflab.measure.metrics import SLO
from perflab.measure.noise import NoiseSampler, listening_pids
from perflab.measure.telemetry import Telemetry
from perflab.models.assets import NAME as EMBEDDED
from perflab.studies.manifest import describe_service_run
from perflab.studies.store import Run

API_KEY = "PERFLAB_API_KEY"
"""Environment variable that holds the key of a server that wants one."""

TELEMETRY_S = 0.5
"""Between samples of the machine: next to nothing, on one core too."""

WARM_UP_USERS, WARM_UP_TOKENS = 8, 8

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
    stream: bool = True
    retries: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields of every request's body

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
    def runner(self) -> Any:
        """Packed once for every engine on it."""
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
            from perflab.load.engine_service import EngineService
            from perflab.speculate.make import make_engine

            return EngineService(make_engine(self.loaded, self.config, runner=self.runner))
        from perflab.load.http_service import HTTPService

        key = os.environ.get(API_KEY)
        return HTTPService(
            self.url,
            self.model,
            key,
            self.endpoint,
            stream=self.stream,
            extra=self.extra,
            retries=self.retries,
            count=self._count if self.loaded is not None else None,
        )

    def _count(self, text: str) -> int:
        return len(self.loaded.tokenizer.encode(text, add_special_tokens=False))

    def beside(self) -> list[Beside]:
        """What is sampled of the server itself."""
        if self.url is None:
            return []
        from perflab.load.scrape import scraper

        parts = urlsplit(self.url)
        return [scraper(f"{parts.scheme}://{parts.netloc}/metrics", api_key=os.environ.get(API_KEY))]

    def local_pids(self) -> tuple[int, ...]:
        """The server's processes where it runs on this machine: their work is no noise."""
        parts = urlsplit(self.url or "")
        if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            return ()
        return listening_pids(parts.port or 80)


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """What is asked, when, and what counts as good enough.

    `rate_per_s` makes an open loop, `users` a closed one; without either all requests start at once,
    or by a trace's own times. `options` are a declaration's further keys, as `perflab.load.build` takes
    them; what is in it goes before the fields here. Every run has a new `salt`, unless it is switched off.
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
    salt: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    base: Path = Path()  # what paths in `options` are relative to

    def workload(self) -> Workload:
        """The requests of one run, under a new salt. Raises WorkloadError for a contradiction, naming it."""
        if self.users and self.rate_per_s:
            raise WorkloadError("users and rate_per_s: give users (closed loop) or a rate (open loop)")
        made = build({"kind": self.kind, "seed": self.seed, **self._fields(), **self.options}, self.base)
        return made.salted(secrets.token_hex(3)) if self.salt else made

    def _fields(self) -> dict[str, Any]:
        """Arguments of the kind's own maker."""
        if self.kind == "trace":
            return {"path": self.path, "limit": self.requests}
        timed = self.duration_s is not None and self.rate_per_s is not None and self.requests is None
        count = self.requests or (8 * self.users if self.users else 32)
        many: dict[str, Any] = {"duration_s": self.duration_s} if timed else {"requests": count}
        if self.rate_per_s:
            many["arrivals"] = {"kind": self.arrivals, "rate_per_s": self.rate_per_s, "cv": self.cv}
        sizes = {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens}
        if self.kind == "synthetic":
            return {**many, **sizes, "output_tokens": (self.output_tokens,)}
        if self.kind == "sessions":
            sessions = {"sessions": many.pop("requests")} if "requests" in many else {}
            return {**many, **sizes, **sessions, "think_s": self.think_s}
        if self.kind == "prompts":
            return {**many, "path": self.path, "max_tokens": self.output_tokens}
        return many

    def pacing(self) -> Pacing:
        if self.users is None:
            return OpenLoop()
        return ClosedLoop(self.users, self.think_s, self.duration_s, self.requests)

    def describe(self) -> dict[str, Any]:
        """The declaration for a manifest; of a path only the name."""
        facts = asdict(replace(self, path=None))
        del facts["base"]
        return facts | {"path": self.path.name if self.path else None}


def warm(service: ServiceChoice, load: LoadChoice, workload: Workload, make: Callable[[], Service]) -> int:
    """Short requests of the same kind, as many at once as the load may bring (but no more than it may);
    how many there were. Nothing of them is kept."""
    users = min(
        load.users or WARM_UP_USERS, load.limits.max_in_flight or WARM_UP_USERS, len(workload.requests)
    )
    few = replace(load, rate_per_s=None, users=users, duration_s=None, requests=users)
    asked = workload.first(users, WARM_UP_TOKENS)
    salt = secrets.token_hex(3)  # nothing of the run itself is to be in a cache
    measure(service, few, workload=asked.salted(salt) if load.salt else asked, make=make)
    return users


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
    beside: Sequence[Beside] = (),
) -> Run:
    """One run with its verdict, ready for `store.write_run`; interrupted, it holds what was measured.

    Beside it the machine is sampled, and a server's `/metrics`.
    """
    workload = workload or load.workload()
    pacing = load.pacing()
    made: list[Service] = []

    def once() -> Service:
        made.append((make or service.make)())
        return made[-1]

    noise = NoiseSampler(service.local_pids()).start()
    with Telemetry(TELEMETRY_S) as telemetry:
        records = run_service(
            once,
            workload,
            pacing=pacing,
            encoder=service.encoder,
            limits=load.limits,
            timeout_s=load.timeout_s,
            on_progress=on_progress,
            beside=[*service.beside(), *beside],
        )
    others = noise.stop()
    if service.loaded is None:  # only the server knows how long prompts were
        for record in records.requests:
            record.prompt_tokens = record.server_prompt_tokens or record.prompt_tokens
    facts = made[0].describe()
    manifest = describe_service_run(
        kind=kind,
        variant=variant or str(facts.get("url") or facts.get("model")),
        service=facts,
        workload=workload,
        records=records,
        load=load.describe(),
        open_loop=pacing.open_loop,
        noise=others,
        slo=load.slo,
        exact_prompts=service.loaded is not None,
        number=number,
    )
    manifest["telemetry"] = telemetry.about()
    samples = sorted([*records.telemetry, *telemetry.samples], key=lambda sample: sample.time_ns)
    return Run(manifest, records.requests, records.steps, records.events, telemetry=samples)
