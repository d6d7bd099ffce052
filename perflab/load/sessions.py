"""Conversations of several turns whose prompts grow: each turn repeats everything said before it.

Owns how a session is made. The answers that later turns repeat are stand-ins of the right length, so
that a run asks the same of every server; when a turn may be sent is `pacing`'s.
"""

from __future__ import annotations

from perflab.errors import WorkloadError
from perflab.load.arrivals import Arrivals
from perflab.load.workloads import Blocks, TimedRequest, Workload, asked


def sessions(
    sessions: int = 8,
    turns: int = 4,
    system_tokens: int = 128,
    input_tokens: int = 32,
    output_tokens: int = 32,
    think_s: float = 0.0,
    arrivals: Arrivals | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    name: str = "sessions",
) -> Workload:
    """Sessions that start by `arrivals`, each of `turns` turns.

    Turn k asks with system_tokens + k · (input_tokens + output_tokens) + input_tokens tokens: the
    system prompt that all sessions share, the earlier turns of its own session, and a new question.
    A turn starts `think_s` after the end of the one before. Raises WorkloadError for impossible values.
    """
    for label, value in (("turns", turns), ("input_tokens", input_tokens), ("output_tokens", output_tokens)):
        if value < 1:
            raise WorkloadError(f"{label}={value}: must be 1 or more")
    if system_tokens < 0 or think_s < 0:
        raise WorkloadError(f"system_tokens={system_tokens}, think_s={think_s}: neither may be negative")
    arrivals = arrivals or Arrivals()
    made = []
    starts = arrivals.times(sessions if duration_s is None else None, seed, duration_s)
    for i, start in enumerate(starts):
        session = f"{name}-{i:03d}"
        first = 1 + (1000 * seed + i) * 2 * turns  # number of its first block; 0 is the system prompt
        said = [(0, system_tokens)] if system_tokens else []
        for turn in range(turns):
            said.append((first + 2 * turn, input_tokens))
            made.append(
                TimedRequest(
                    f"{session}.{turn}",
                    Blocks(tuple(said)),
                    asked(output_tokens, exact=True),
                    start,
                    session_id=session,
                    turn=turn,
                    think_s=think_s if turn else 0.0,
                )
            )
            said.append((first + 2 * turn + 1, output_tokens))
    text = f"{len(starts)} sessions of {turns} turns behind a shared prompt of {system_tokens} tokens"
    return Workload(name, tuple(made), text, arrivals.open_loop)
