"""The words a report uses, for a reader who does not work on inference every day, and the names that
other tools give to the same figures.

Owns the explanations; formulas live beside their functions in `measure`.
"""

from perflab.report.tables import Table

GLOSSARY: dict[str, str] = {
    "rung": "one variant of the ladder; it differs from the rung below by one switch.",
    "prefill": "computing the keys and values of a prompt; ends with the first token.",
    "decode": "computing one further token at a time.",
    "KV cache": "keys and values of the tokens so far, kept in blocks so that they are computed once.",
    "prefix cache": "blocks kept after a request ended, for prompts that start with the same tokens.",
    "continuous batching": "requests join and leave the batch at every step.",
    "chunked prefill": "long prompts are computed in pieces, so that running requests keep moving.",
    "packed weights": "weight matrices stored in the order in which this processor reads them.",
    "SLO": "a limit that a request must meet, such as TTFT below 2 s.",
    "residual": "E2E minus the sum of stamped segments; time that nothing accounts for.",
    "detectable": "the smallest change that this many paired rounds would find four times out of five.",
    "valid run": "a run without any of the named faults; only valid runs are compared.",
    "KL divergence": "how much the next-token distribution differs from the reference's; 0 is no difference.",
    "top-1 agreement": "how often the most likely next token is the same as the reference's.",
}


def elsewhere() -> Table:
    """Our metric, what other tools call it, and where a same name means something else."""
    return Table(("here", "elsewhere", "same name, other meaning"), (), words=(0, 1, 2))
