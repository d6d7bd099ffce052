"""What is asked: a list of requests with prompts, sampling parameters and intended starts.

Owns prompts and their exact lengths. Knows a model only through its tokenizer, and no engine.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from perflab.errors import WorkloadError
from perflab.load.arrivals import Arrivals
from perflab.load.text import TEXT
from perflab.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A prompt of exactly `tokens` tokens, cut from plain prose with any tokenizer.

    Its first `shared_tokens` are those of document number `document`, the same in every prompt
    that names it; the rest depends on `seed`.
    """

    tokens: int
    seed: int = 0
    document: int = 0
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shared_tokens <= self.tokens or self.tokens < 1:
            raise WorkloadError(f"a prompt of {self.tokens} tokens cannot share {self.shared_tokens} of them")


@dataclass(frozen=True, slots=True)
class Chat:
    """A user message with an optional system message, sent through the model's chat template."""

    user: str
    system: str | None = None


Prompt = str | tuple[int, ...] | Synthetic | Chat


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of a workload; `arrival_s` and `deadline_s` count from the start of the run and
    from the intended start."""

    request_id: str
    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival_s: float = 0.0
    request_class: str = "default"
    priority: int = 0
    deadline_s: float | None = None
    session_id: str | None = None
    turn: int = 0
    think_s: float = 0.0  # after the end of the session's turn before
    salt: str = field(default="", compare=False)  # of one run; see `Workload.salted`

    @property
    def prompt_length(self) -> int | None:
        """Tokens of the prompt where the workload fixes them."""
        if isinstance(self.prompt, Synthetic):
            return self.prompt.tokens
        return len(self.prompt) if isinstance(self.prompt, tuple) else None

    @property
    def output_length(self) -> int | None:
        """Tokens of the output where the workload fixes them (`ignore_eos` and a limit)."""
        return self.params.max_tokens if self.params.ignore_eos and not self.params.stop else None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. The same workload asks the same of every variant."""

    name: str
    requests: tuple[TimedRequest, ...]
    description: str = ""
    open_loop: bool = False
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        ids = [r.request_id for r in self.requests]
        if len(set(ids)) != len(ids):
            raise WorkloadError(f"workload {self.name!r}: request ids must differ")
        if any(a.arrival_s > b.arrival_s for a, b in zip(self.requests, self.requests[1:], strict=False)):
            raise WorkloadError(f"workload {self.name!r}: requests must be in order of arrival")

    @property
    def fingerprint(self) -> str:
        """A hash of everything that is asked; equal for equal work."""
        rows = [[type(r.prompt).__name__, asdict(r)] for r in self.requests]
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


def _shorter(params: SamplingParams, max_tokens: int) -> SamplingParams:
    limit = min(params.max_tokens or max_tokens, max_tokens)
    return replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))


class PromptEncoder:
    """Turns prompts into token ids with one model's tokenizer; owns the encoded page of prose.

    `encode` and `chat` are those of `LoadedModel`.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], chat: Callable[[Any], list[int]] | None = None
    ) -> None:
        self._encode, self._chat = encode, chat
        self._pool: list[int] | None = None
        self._start: list[int] = []

    def ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; exactly as many as asked where the length is fixed."""
        if isinstance(prompt, str):
            return self._encode(prompt)
        if isinstance(prompt, Chat):
            messages = [{"role": "user", "content": prompt.user}]
            if prompt.system is not None:
                messages.insert(0, {"role": "system", "content": prompt.system})
            if self._chat is None:
                return self._encode("\n".join(m["content"] for m in messages))
            return self._chat(messages)
        if isinstance(prompt, Synthetic):
            return self._synthetic(prompt)
        return list(prompt)

    def _synthetic(self, prompt: Synthetic) -> list[int]:
        if self._pool is None:
            self._start = self._encode("")  # a BOS, where the tokenizer adds one
            self._pool = self._encode(TEXT)[len(self._start) :]
        shared = self._cut(prompt.document * 977, prompt.shared_tokens)
        own = self._cut(prompt.seed * 613 + 331, prompt.tokens - prompt.shared_tokens)
        return (self._start + shared + own)[: prompt.tokens]

    def _cut(self, offset: int, n: int) -> list[int]:
        assert self._pool is not None
        size = len(self._pool)
        return [self._pool[(offset + i) % size] for i in range(n)]


def _greedy(max_tokens: int, exact: bool) -> SamplingParams:
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
) -> Workload:
    """Prompts of exactly `input_tokens`, outputs of exactly `output_tokens` (cycled over requests).

    `shared_tokens` of each prompt come from one of `documents` documents in turn; every
    `unshared_every`-th request shares nothing.
    """
    if not output_tokens:
        raise WorkloadError("output_tokens is empty: give one number of tokens or more")
    arrivals = arrivals or Arrivals()
    made = []
    for i, arrival in enumerate(arrivals.times(requests, seed)):
        alone = bool(unshared_every) and (i + 1) % unshared_every == 0
        prompt = Synthetic(input_tokens, 1000 * seed + i, i % documents, 0 if alone else shared_tokens)
        params = _greedy(output_tokens[i % len(output_tokens)], exact=True)
        made.append(TimedRequest(f"{name}-{i:03d}", prompt, params, arrival))
    return Workload(name, tuple(made), description, arrivals.open_loop)


def from_prompts(
    path: Path,
    arrivals: Arrivals | None = None,
    max_tokens: int = 128,
    limit: int | None = None,
    ignore_eos: bool = False,
    seed: int = 0,
) -> Workload:
    """A workload from JSON Lines with `prompt`, and optionally `id`, `category`, `system`, `document`.

    A document is put before its question, so that questions on one document share a prefix.
    Raises WorkloadError naming the line at fault.
    """
    rows = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise WorkloadError(
                f"{path}:{number}: not JSON ({error.msg}); each line holds one object"
            ) from None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise WorkloadError(f'{path}:{number}: an object with the text "prompt" is needed')
        rows.append(row)
    rows = rows[:limit]
    if not rows:
        raise WorkloadError(f"{path}: holds no prompt")
    arrivals = arrivals or Arrivals()
    made = []
    for i, (row, arrival) in enumerate(zip(rows, arrivals.times(len(rows), seed), strict=True)):
        text = row["prompt"] if row.get("document") is None else f"{row['document']}\n\n{row['prompt']}"
        made.append(
            TimedRequest(
                str(row.get("id", f"{path.stem}-{i:04d}")),
                Chat(text, row.get("system")),
                _greedy(max_tokens, ignore_eos),
                arrival,
                request_class=str(row.get("category", "default")),
            )
        )
    return Workload(path.stem, tuple(made), f"prompts of {path.name}", arrivals.open_loop, source=path.name)


def from_trace(
    path: Path,
    limit: int | None = None,
    speed: float = 1.0,
    max_input: int = 1024,
    max_output: int = 256,
    seed: int = 0,
) -> Workload:
    """A workload from a CSV trace with the columns arrival_s, input_tokens and output_tokens.

    Prompts are synthetic and of the trace's lengths, cut at `max_input`; outputs are of its lengths,
    cut at `max_output`. `speed` 2 replays twice as fast. Raises WorkloadError naming the row at fault.
    """
    if speed <= 0:
        raise WorkloadError(f"speed={speed}: must be above 0")
    reader = csv.DictReader(_read(path).splitlines())
    if missing := {"arrival_s", "input_tokens", "output_tokens"} - set(reader.fieldnames or ()):
        raise WorkloadError(f"{path}: the columns {', '.join(sorted(missing))} are missing")
    rows = []
    for number, row in enumerate(reader, 2):
        try:
            rows.append((float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"])))
        except (TypeError, ValueError):
            raise WorkloadError(f"{path}:{number}: {dict(row)} does not hold three numbers") from None
        if min(rows[-1]) < 0 or min(rows[-1][1:]) < 1:
            raise WorkloadError(f"{path}:{number}: arrival must be 0 or more, token counts 1 or more")
    rows = sorted(rows)[:limit]
    if not rows:
        raise WorkloadError(f"{path}: holds no request")
    made = [
        TimedRequest(
            f"{path.stem}-{i:05d}",
            Synthetic(min(n_in, max_input), 1000 * seed + i),
            _greedy(min(n_out, max_output), exact=True),
            (arrival - rows[0][0]) / speed,
        )
        for i, (arrival, n_in, n_out) in enumerate(rows)
    ]
    return Workload(path.stem, tuple(made), f"trace {path.name} at {speed:g}× speed", True, source=path.name)


def _read(path: Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read ({error}); check the path") from None


def build(spec: Mapping[str, Any], base: Path = Path()) -> Workload:
    """A workload from its declaration, as a study file holds it.

    `{kind: synthetic | prompts | trace, …}`; the other keys are the arguments of `synthetic`,
    `from_prompts` and `from_trace`, `arrivals` being `{kind, rate_per_s, cv}`. Paths are relative
    to `base`. Raises WorkloadError for an unknown kind or argument.
    """
    options = dict(spec)
    kind = options.pop("kind", "synthetic")
    try:
        if isinstance(options.get("arrivals"), Mapping):
            options["arrivals"] = Arrivals(**options["arrivals"])
        if kind == "synthetic":
            return synthetic(**options)
        if kind in ("prompts", "trace"):
            path = base / options.pop("path")
            return from_prompts(path, **options) if kind == "prompts" else from_trace(path, **options)
    except KeyError as error:
        raise WorkloadError(f"workload of kind {kind!r} needs {error}") from None
    except TypeError as error:
        raise WorkloadError(f"workload of kind {kind!r}: {error}") from None
    raise WorkloadError(f"workload kind={kind!r}: choose one of synthetic, prompts, trace")
