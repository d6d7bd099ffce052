"""What is asked of a service: requests with prompts, lengths and intended starts.

Owns workloads and how they are made and mixed. What prompts are is `prompts`, what files hold is
`traces`; sends nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from perflab.errors import WorkloadError
from perflab.load.arrivals import Arrivals
from perflab.load.prompts import Blocks, Chat, Prompt, PromptEncoder, Synthetic
from perflab.measure.metrics import SLO
from perflab.types import SamplingParams

__all__ = [
    "Blocks",
    "Chat",
    "Prompt",
    "PromptEncoder",
    "Synthetic",
    "TimedRequest",
    "TrafficClass",
    "Workload",
    "mix",
    "synthetic",
]


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of a workload; `arrival_s` and `deadline_s` count from the start of the run and
    from the intended start.

    A turn of a session is sent no sooner than `think_s` after the end of the turn before.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival_s: float = 0.0
    request_class: str = "default"
    priority: int = 0
    deadline_s: float | None = None
    session_id: str | None = None
    turn: int = 0
    think_s: float = 0.0
    again: int = 0  # how often the workload asked the same before
    salt: str = field(default="", compare=False)  # of one run; see `Workload.salted`

    @property
    def prompt_length(self) -> int | None:
        """Tokens of the prompt where the workload fixes them."""
        if isinstance(self.prompt, Synthetic | Blocks):
            return self.prompt.tokens
        return len(self.prompt) if isinstance(self.prompt, tuple) else None

    @property
    def output_length(self) -> int | None:
        """Tokens of the output where the workload fixes them (`ignore_eos` and a limit)."""
        return self.params.max_tokens if self.params.ignore_eos and not self.params.stop else None

    def repeated(self, times: int) -> TimedRequest:
        """The same request asked once more, as another one: with its own id, session and salt."""
        if not times:
            return self
        return replace(
            self,
            request_id=f"{self.request_id}~{times}",
            session_id=self.session_id and f"{self.session_id}~{times}",
            again=self.again + times,
            salt=self.salt and f"{self.salt}.{times}",
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. The same workload asks the same of every variant.

    `slos` holds the limits of each request class that has its own.
    """

    name: str
    requests: tuple[TimedRequest, ...]
    description: str = ""
    open_loop: bool = False
    source: str = field(default="", compare=False)
    slos: Mapping[str, SLO] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = [r.request_id for r in self.requests]
        if len(set(ids)) != len(ids):
            raise WorkloadError(f"workload {self.name!r}: request ids must differ")
        if any(a.arrival_s > b.arrival_s for a, b in zip(self.requests, self.requests[1:], strict=False)):
            raise WorkloadError(f"workload {self.name!r}: requests must be in order of arrival")

    @property
    def fingerprint(self) -> str:
        """A hash of everything that is asked; equal for equal work, whatever its salt."""
        rows = [[type(r.prompt).__name__, {**asdict(r), "salt": ""}] for r in self.requests]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def output_tokens(self) -> int:
        """Most tokens the requests may bring."""
        return sum(r.params.max_tokens or 0 for r in self.requests)

    def first(self, n: int, max_tokens: int | None = None) -> Workload:
        """The first `n` requests, outputs cut to `max_tokens`: the same kind of work, less of it."""
        chosen = self.requests[:n]
        if max_tokens is not None:
            chosen = tuple(replace(r, params=_shorter(r.params, max_tokens)) for r in chosen)
        return replace(self, requests=chosen)

    def salted(self, salt: str) -> Workload:
        """Every prompt begins with `salt`, inside its exact length, so that nothing is in a server's
        prefix cache from an earlier run. One salt for all of a run: what requests were meant to share
        (documents, sessions) they still share; a prompt that is asked again gets another one.
        """
        salts = (f"{salt}.{r.again}" if r.again else salt for r in self.requests)
        made = tuple(replace(r, salt=s) for r, s in zip(self.requests, salts, strict=True))
        return replace(self, requests=made)


def _shorter(params: SamplingParams, max_tokens: int) -> SamplingParams:
    limit = min(params.max_tokens or max_tokens, max_tokens)
    return replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))


def asked(max_tokens: int, exact: bool) -> SamplingParams:
    """Greedy, up to `max_tokens`, or exactly as many."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=exact)


def synthetic(
    requests: int = 12,
    input_tokens: int = 64,
    output_tokens: Sequence[int] = (24,),
    shared_tokens: int = 0,
    documents: int = 1,
    unshared_every: int = 0,
    arrivals: Arrivals | None = None,
    seed: int = 0,
    name: str = "synthetic",
    description: str = "",
    duration_s: float | None = None,
) -> Workload:
    """Prompts of exactly `input_tokens`, outputs of exactly `output_tokens` (cycled over requests).

    `shared_tokens` of each prompt come from one of `documents` documents in turn; every
    `unshared_every`-th request shares nothing. With `duration_s` as many requests as arrive in it.
    """
    if not output_tokens:
        raise WorkloadError("output_tokens is empty: give one number of tokens or more")
    arrivals = arrivals or Arrivals()
    times = arrivals.times(requests if duration_s is None else None, seed, duration_s)
    made = []
    for i, arrival in enumerate(times):
        alone = bool(unshared_every) and (i + 1) % unshared_every == 0
        prompt = Synthetic(input_tokens, 1000 * seed + i, i % documents, 0 if alone else shared_tokens)
        params = asked(output_tokens[i % len(output_tokens)], exact=True)
        made.append(TimedRequest(f"{name}-{i:03d}", prompt, params, arrival))
    return Workload(name, tuple(made), description, arrivals.open_loop)


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """One kind of request in a mixed load: its share of the requests is its weight's share."""

    name: str
    workload: Workload
    weight: float = 1.0
    slo: SLO | None = None
    priority: int = 0
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if not (self.weight > 0 and self.workload.requests):
            raise WorkloadError(
                f"class {self.name!r}: weight={self.weight} must be above 0, its workload not empty"
            )


def mix(
    classes: Sequence[TrafficClass],
    arrivals: Arrivals,
    requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    name: str = "mix",
) -> Workload:
    """Classes merged into one load: at each arrival one is drawn by weight and asks its next request.

    A class that ran through its workload begins again. A session is drawn as a whole; its later turns
    keep their distance in time from its first. Raises WorkloadError for classes of one name.
    """
    names = [c.name for c in classes]
    if not names or len(set(names)) != len(names):
        raise WorkloadError(f"classes {names}: one or more are needed, each with its own name")
    weights = np.array([c.weight for c in classes])
    times = arrivals.times(requests, seed, duration_s)
    drawn = np.random.default_rng([seed, 0x6D6978]).choice(
        len(classes), len(times), p=weights / weights.sum()
    )
    chains = [in_sessions(c.workload.requests) for c in classes]
    used = [0] * len(classes)
    made: list[TimedRequest] = []
    for arrival, k in zip(times, drawn.tolist(), strict=True):
        chosen, (again, at) = classes[k], divmod(used[k], len(chains[k]))
        used[k] += 1
        for request in chains[k][at]:
            made.append(
                replace(
                    request.repeated(again),
                    request_id=f"{chosen.name}-{request.repeated(again).request_id}",
                    session_id=request.session_id and f"{chosen.name}-{request.repeated(again).session_id}",
                    arrival_s=arrival + request.arrival_s - chains[k][at][0].arrival_s,
                    request_class=chosen.name,
                    priority=chosen.priority,
                    deadline_s=request.deadline_s if chosen.deadline_s is None else chosen.deadline_s,
                )
            )
    slos = {c.name: c.slo for c in classes if c.slo is not None}
    made.sort(key=lambda r: r.arrival_s)  # stable: turns keep their order
    return Workload(name, tuple(made), f"mix of {', '.join(names)}", arrivals.open_loop, slos=slos)


def in_sessions(requests: Iterable[TimedRequest]) -> list[tuple[TimedRequest, ...]]:
    """Requests by session, turns in order; a request without a session stands alone."""
    found: dict[str, list[TimedRequest]] = {}
    for request in requests:
        found.setdefault(request.session_id or f"\0{request.request_id}", []).append(request)
    return [tuple(chain) for chain in found.values()]
