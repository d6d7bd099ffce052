"""Workloads from files: prompt sets and arrival traces in the public formats.

Owns what these files look like; a format is known by its fields, gzip by the name's end. What cannot
be read is refused with the file and the line at fault.

| format | kind | known by |
|---|---|---|
| perflab's own prompts, HumanEval | JSON Lines | `prompt` |
| MT-bench, Spec-Bench | JSON Lines | `turns`; the first one is asked |
| GSM8K | JSON Lines | `question`, `answer` |
| ShareGPT | JSON | a list with `conversations` |
| plain text | .txt | paragraphs |
| perflab's own traces | CSV | `arrival_s,input_tokens,output_tokens` |
| Azure LLM inference 2023 | CSV | `TIMESTAMP,ContextTokens,GeneratedTokens` |
| Mooncake | JSON Lines | `timestamp` (ms), `input_length`, `output_length`, `hash_ids` |
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from perflab.errors import WorkloadError
from perflab.load.arrivals import Arrivals
from perflab.load.prompts import Blocks, Chat, Prompt, Synthetic
from perflab.load.workloads import TimedRequest, Workload, asked

MOONCAKE_BLOCK = 512
"""Tokens that one of Mooncake's `hash_ids` stands for (Qin et al., FAST 2025)."""


def from_prompts(
    path: Path,
    arrivals: Arrivals | None = None,
    max_tokens: int = 128,
    limit: int | None = None,
    ignore_eos: bool = False,
    seed: int = 0,
    requests: int | None = None,
    duration_s: float | None = None,
    count: Callable[[str], int] | None = None,
) -> Workload:
    """A workload from a file of prompts, at most `limit` of them, asked once each.

    `requests` or `duration_s` ask for another number, from the start again where there are too few.
    An `id`, `category` (the request class), `system` and `document` of a prompt are kept; a document
    is put before its question, so that questions on one document share a prefix. With `count`
    (tokens of a text) outputs are as long as the answers in the file, where it has them, at most
    `max_tokens`.

    Raises WorkloadError naming the line at fault.
    """
    path = Path(path)
    rows = list(_prompts(path))[:limit]
    if not rows:
        raise WorkloadError(f"{path}: holds no prompt")
    arrivals = arrivals or Arrivals()
    whole = len(rows) if requests is None and duration_s is None else requests
    made = []
    for i, arrival in enumerate(arrivals.times(whole, seed, duration_s)):
        again, at = divmod(i, len(rows))
        row = rows[at]
        output = min(max_tokens, max(1, count(row.answer))) if count and row.answer else max_tokens
        request = TimedRequest(
            row.name or f"{_stem(path)}-{at:04d}",
            row.chat,
            asked(output, ignore_eos),
            arrival,
            request_class=row.category,
        )
        made.append(request.repeated(again))
    return Workload(_stem(path), tuple(made), f"prompts of {path.name}", arrivals.open_loop, path.name)


class _Row(NamedTuple):
    chat: Chat
    name: str | None = None
    category: str = "default"
    answer: str = ""


def _prompts(path: Path) -> Iterator[_Row]:
    text = _read(path)
    if path.name.removesuffix(".gz").endswith(".txt"):
        paragraphs = (paragraph.strip() for paragraph in re.split(r"\n\s*\n", text))
        yield from (_Row(Chat(paragraph)) for paragraph in paragraphs if paragraph)
        return
    if text.lstrip().startswith("["):
        for number, talk in enumerate(_json(text, str(path)), 1):
            if (found := _shared_chat(talk, f"{path}: conversation {number}")) is not None:
                yield found
        return
    for number, row in _json_lines(text, path):
        where = f"{path}:{number}"
        category, answer = str(row.get("category", "default")), row.get("answer")
        asks = row.get("prompt", row.get("question"))
        if turns := row.get("turns"):
            asks = turns[0] if isinstance(turns, list) else None
        if not isinstance(asks, str):
            raise WorkloadError(
                f'{where}: an object with the text "prompt", "question" or a list "turns" is needed'
            )
        name = next((str(row[key]) for key in ("id", "task_id", "question_id") if key in row), None)
        if row.get("document") is not None:
            asks = f"{row['document']}\n\n{asks}"
        yield _Row(
            Chat(asks, row.get("system")),
            name,
            category,
            str(row.get("canonical_solution") or answer or ""),
        )


def _shared_chat(talk: Any, where: str) -> _Row | None:
    """The first question and answer of a ShareGPT conversation; None for one that has not both."""
    said = talk.get("conversations") if isinstance(talk, dict) else None
    if not isinstance(said, list):
        raise WorkloadError(f'{where}: an object with a list "conversations" is needed')
    turns = [t for t in said if isinstance(t, dict) and isinstance(t.get("value"), str) and t["value"]]
    turns = turns[1:] if turns and turns[0].get("from") == "system" else turns
    if len(turns) < 2 or turns[0].get("from") not in ("human", "user"):
        return None
    return _Row(Chat(turns[0]["value"]), talk.get("id"), answer=turns[1]["value"])


def from_trace(
    path: Path,
    limit: int | None = None,
    speed: float = 1.0,
    max_input: int = 1024,
    max_output: int = 256,
    seed: int = 0,
    start_s: float = 0.0,
    duration_s: float | None = None,
) -> Workload:
    """A workload with a trace's arrivals and lengths, and synthetic prompts.

    Replays `duration_s` seconds of the trace (all where None) from `start_s` on, at most `limit`
    requests, at `speed` (2 is twice as fast). Prompts are cut at `max_input`, outputs at `max_output`.
    Block ids become shared prefixes: equal ids, equal tokens. Raises WorkloadError naming the row
    at fault.
    """
    path = Path(path)
    if speed <= 0:
        raise WorkloadError(f"speed={speed}: must be above 0")
    rows = sorted(_trace(path), key=lambda row: row.arrival_s)
    first = rows[0].arrival_s + start_s if rows else 0.0
    rows = [r for r in rows if 0 <= r.arrival_s - first < (duration_s or float("inf"))][:limit]
    if not rows:
        raise WorkloadError(f"{path}: holds no request" + (f" from {start_s:g} s on" if start_s else ""))
    first = rows[0].arrival_s
    made = [
        TimedRequest(
            f"{_stem(path)}-{i:05d}",
            _prompt_of(row, max_input, 1000 * seed + i),
            asked(min(row.output_tokens, max_output), exact=True),
            (row.arrival_s - first) / speed,
        )
        for i, row in enumerate(rows)
    ]
    text = f"trace {path.name} at {speed:g}× speed"
    return Workload(_stem(path), tuple(made), text, True, source=path.name)


class _Arrival(NamedTuple):
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def _prompt_of(row: _Arrival, max_input: int, seed: int) -> Prompt:
    tokens = min(row.input_tokens, max_input)
    if not row.blocks:
        return Synthetic(tokens, seed)
    starts = range(0, tokens, MOONCAKE_BLOCK)
    lengths = [min(MOONCAKE_BLOCK, tokens - start) for start in starts]
    return Blocks(tuple(zip(row.blocks, lengths, strict=False)))


def _trace(path: Path) -> Iterator[_Arrival]:
    text = _read(path)
    if text.lstrip().startswith("{"):
        for number, row in _json_lines(text, path):
            yield _checked(f"{path}:{number}", row, "timestamp", "input_length", "output_length", 1e-3)
        return
    reader = csv.DictReader(text.splitlines())
    columns = set(reader.fieldnames or ())
    names = "TIMESTAMP", "ContextTokens", "GeneratedTokens"
    if not columns.issuperset(names):
        names = "arrival_s", "input_tokens", "output_tokens"
    if missing := set(names) - columns:
        raise WorkloadError(f"{path}: the columns {', '.join(sorted(missing))} are missing")
    for number, row in enumerate(reader, 2):
        yield _checked(f"{path}:{number}", row, *names)


def _checked(
    where: str, row: Mapping[str, Any], when: str, asks: str, answers: str, scale: float = 1.0
) -> _Arrival:
    try:
        time = _seconds(row[when], scale)
        found = _Arrival(time, int(row[asks]), int(row[answers]), tuple(row.get("hash_ids") or ()))
    except (KeyError, TypeError, ValueError):
        raise WorkloadError(f"{where}: {dict(row)} does not hold three numbers") from None
    if found.arrival_s < 0 or found.input_tokens < 1:
        raise WorkloadError(f"{where}: arrival must be 0 or more, input tokens 1 or more")
    if found.output_tokens < 1:
        raise WorkloadError(f"{where}: output tokens must be 1 or more")
    if found.blocks and len(found.blocks) * MOONCAKE_BLOCK < found.input_tokens:
        raise WorkloadError(f"{where}: {len(found.blocks)} blocks do not hold {found.input_tokens} tokens")
    return found


def _seconds(value: Any, scale: float) -> float:
    try:
        return float(value) * scale
    except ValueError:
        # seven digits after the point, one more than Python reads
        return datetime.fromisoformat(str(value)[:26]).replace(tzinfo=UTC).timestamp()


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


def _json_lines(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not empty."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            row = _json(line, f"{path}:{number}")
            if not isinstance(row, dict):
                raise WorkloadError(f"{path}:{number}: each line must hold one JSON object")
            yield number, row


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{where}: not JSON ({error.msg})") from None


def _read(path: Path) -> str:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        return path.read_text(encoding="utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read ({error}); check the path") from None
