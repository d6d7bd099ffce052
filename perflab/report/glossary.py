"""The words a report uses, for a reader who does not work on inference every day, and the names that
other tools give to the same figures.

Owns the explanations; formulas live beside their functions in `measure`.
"""

from perflab.report.tables import Cell, Table

GLOSSARY: dict[str, str] = {
    "rung": "one variant of the ladder; it differs from the rung below by one switch.",
    "prefill": "computing the keys and values of a prompt; ends with the first token.",
    "decode": "computing one further token at a time.",
    "KV cache": "keys and values of the tokens so far, kept in blocks so that they are computed once.",
    "prefix cache": "blocks kept after a request ended, for prompts that start with the same tokens.",
    "continuous batching": "requests join and leave the batch at every step.",
    "chunked prefill": "long prompts are computed in pieces, so that running requests keep moving.",
    "packed weights": "weight matrices stored in the order in which this processor reads them.",
    "open loop": "requests start at times of their own, whether or not earlier ones were answered.",
    "closed loop": "a number of users, each of whom asks again when the last answer is complete.",
    "steady window": "the part of a run between its ramp and its drain.",
    "SLO": "a limit that a request must meet, such as TTFT below 2 s.",
    "residual": "E2E minus the sum of stamped segments; time that nothing accounts for.",
    "detectable": "the smallest change that this many paired rounds would find four times out of five.",
    "goodput": "requests that met every limit, in all or per second.",
    "valid run": "a run without any of the named faults; only valid runs are compared.",
    "speculation": "guessing a request's next tokens, which one step then verifies together; the output "
    "is that of the model alone.",
    "draft": "the tokens guessed for one request in one step.",
    "KL divergence": "how much the next-token distribution differs from the reference's; 0 is no difference.",
    "top-1 agreement": "how often the most likely next token is the same as the reference's.",
}


ELSEWHERE: tuple[tuple[str, str, str], ...] = (
    (
        "TTFT",
        "TTFT in vllm bench, SGLang's bench_serving, guidellm, aiperf, genai-perf, inference-perf, "
        "llmperf and evalscope, but from the actual send: that is “TTFT from sent” here. MLPerf's "
        "first-token latency counts from the scheduled start in its Server scenario, as here.",
        "“Time to first output token” (guidellm, aiperf) is the first token that is not reasoning.",
    ),
    (
        "TPOT",
        "TPOT in vllm bench, SGLang, inference-perf, evalscope and MLPerf. guidellm and genai-perf "
        "call it ITL (inter token latency); so does aiperf, or, where the server says how many tokens "
        "the first chunk held, it means “TPOT after first chunk”.",
        "guidellm's TPOT includes the first token: (last token − send) / N. inference-perf calls E2E "
        "/ N “normalized time per output token”. llmperf's inter-token latency is (last token − send) "
        "/ N too, with N from re-tokenised text.",
    ),
    (
        "ITL",
        "ITL in vllm bench, inference-perf and evalscope: gaps between chunks, pooled over all "
        "requests. aiperf calls it ICL (inter chunk latency).",
        "SGLang divides a gap by the tokens of its chunk and counts it once for each of them. What "
        "guidellm, aiperf and genai-perf call ITL is TPOT.",
    ),
    (
        "E2E",
        "E2EL in vllm bench, request latency in guidellm, aiperf and genai-perf, time per request in "
        "inference-perf, latency in evalscope: from the send to the end of the response; here from "
        "the intended start to the last token.",
        "",
    ),
    (
        "tokens per chunk",
        "output tokens per iteration in guidellm; decoded tokens per iteration in evalscope, (N − 1) "
        "/ (chunks − 1).",
        "",
    ),
    (
        "output tokens/s",
        "output token throughput in vllm bench, SGLang and aiperf: of completed requests, over the "
        "whole run.",
        "“Output token throughput per user” (aiperf, genai-perf) is that of one request's decoding, 1 "
        "/ TPOT; llmperf's request output throughput is N / E2E of one request.",
    ),
    (
        "goodput",
        "request goodput in vllm bench, goodput in aiperf: requests within every limit, divided by "
        "the whole run's time; here by the time in which requests were sent.",
        "",
    ),
    (
        "percentile",
        "Most tools take completed requests alone (“successes only” here), so that failures make them "
        "better, and interpolate between samples.",
        "vllm bench averages TPOT over requests but ITL over all gaps, so their means differ for one run.",
    ),
)
"""Our metric, the same figure under its name elsewhere, and where that name means something else."""


def elsewhere() -> Table:
    """`ELSEWHERE` as a table."""
    headers = ("here", "the same elsewhere", "the same name for something else")
    return Table(headers, tuple(tuple(map(Cell, row)) for row in ELSEWHERE), words=(0, 1, 2))
