"""What a list of requests amounts to: latencies, rates, goodput. Each metric is one function.

Owns the definitions. Knows no engine and no run: `RequestRecord`s in, numbers in SI units out.
Missing is None, never 0. The formulas a report prints are `FORMULAS`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from perflab.clock import NS_PER_S
from perflab.config import check_types
from perflab.errors import WorkloadError
from perflab.measure import stats
from perflab.measure.rates import Rate as Rate
from perflab.measure.rates import steady_throughput as steady_throughput
from perflab.measure.rates import throughput as throughput
from perflab.types import RequestRecord

FORMULAS: dict[str, str] = {
    "TTFT": "first generated token − intended start. Empty and role-only chunks never count.",
    "time to first content": "first chunk of the answer itself − intended start; what a model thinks before "
    "it answers counts as tokens but not as content.",
    "TTFT from sent": "first generated token − actual send; leaves out the wait inside the load generator.",
    "ITL": "gap between successive token-bearing chunks, pooled over all completed requests.",
    "tokens per chunk": "tokens that a token-bearing chunk brings.",
    "TPOT": "(last token − first token) / (output tokens − 1), one value per completed request.",
    "TPOT after first chunk": "(last token − first token) / tokens that came after the first chunk.",
    "E2E": "last token − intended start, one value per request.",
    "output tokens/s": "tokens delivered / (last token − first intended start), whole run.",
    "peak tokens/s": "most tokens delivered in one of the run's equal parts of at most 1 s, per second; "
    "never below output tokens/s.",
    "requests/s": "completed requests / (last end − first intended start), whole run.",
    "steady window": "from the end of the first completions to the last completion before the requests "
    "in flight fall below half of their peak; none where that holds too few completions.",
    "goodput": "requests that met every SLO / (last − first intended start); its share is of all requests "
    "sent, failures being misses. Where all start at once only the share exists.",
    "percentile": "smallest sample that at least this share of the samples does not exceed; failures and "
    "time-outs count as +∞ in E2E, and in TTFT where no token came; requests cancelled by their user are "
    "left out and counted.",
    "interval": "95 %: of a percentile from order statistics (binomial, exact); of pooled ITL by bootstrap "
    "over requests; of a ratio of interleaved runs from Student's t of the log-ratios of the rounds.",
}


def ttft_s(record: RequestRecord) -> float | None:
    """Time to first token from the intended start, seconds."""
    return _seconds(record.first_token_ns, record.intended_ns)


def first_content_s(record: RequestRecord) -> float | None:
    """Time to the first chunk of the content channel from the intended start, seconds; None where none
    came. Beside TTFT, which counts reasoning too."""
    return _seconds(record.first_content_ns, record.intended_ns)


def ttft_from_sent_s(record: RequestRecord) -> float | None:
    """Time to first token from the actual send, seconds."""
    return _seconds(record.first_token_ns, record.sent_ns)


def e2e_s(record: RequestRecord) -> float | None:
    """Last token − intended start, seconds; None unless the request completed."""
    return _seconds(record.last_token_ns, record.intended_ns) if record.outcome == "completed" else None


def itl_s(record: RequestRecord) -> list[float]:
    """Gaps between successive token-bearing chunks, seconds; the wait for the first is not one of them."""
    times = [t for t, tokens in zip(record.token_ns, record.chunk_tokens, strict=True) if tokens > 0]
    return [(b - a) / NS_PER_S for a, b in itertools.pairwise(times)]


def tokens_per_chunk(record: RequestRecord) -> list[int]:
    """Tokens of each token-bearing chunk."""
    return [tokens for tokens in record.chunk_tokens if tokens > 0]


def tpot_s(record: RequestRecord) -> float | None:
    """(last token − first token) / (N − 1), seconds; None for fewer than two tokens."""
    span = _seconds(record.last_token_ns, record.first_token_ns)
    return None if span is None or record.output_tokens < 2 else span / (record.output_tokens - 1)


def s_per_token_by_two_lengths(short: RequestRecord, long: RequestRecord) -> float | None:
    """(E2E long − E2E short) / (N long − N short), seconds, of two requests of one prompt that differ in
    output length: what both spend on the prompt cancels, where E2E / N would charge it to the tokens.
    None where one did not complete or the lengths are equal."""
    more, times = long.output_tokens - short.output_tokens, (e2e_s(long), e2e_s(short))
    return None if more == 0 or None in times else (times[0] - times[1]) / more  # type: ignore[operator]


def tpot_after_first_chunk_s(record: RequestRecord) -> float | None:
    """(last token − first token) / tokens after the first chunk, seconds; None where there are none."""
    span, chunks = _seconds(record.last_token_ns, record.first_token_ns), tokens_per_chunk(record)
    after = record.output_tokens - chunks[0] if chunks else 0
    return None if span is None or after < 1 else span / after


def lateness_s(record: RequestRecord) -> float:
    """How much later than intended the load generator sent the request, seconds."""
    return (record.sent_ns - record.intended_ns) / NS_PER_S


def _seconds(end: int | None, start: int | None) -> float | None:
    return None if end is None or start is None else (end - start) / NS_PER_S


def counted(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests a percentile is about: all but those their user cancelled."""
    return [r for r in records if r.outcome != "cancelled"]


def samples(
    records: Iterable[RequestRecord],
    metric: Callable[[RequestRecord], float | None],
    success_only: bool = False,
) -> list[float]:
    """One value per request, with +inf for a request that failed, timed out, was refused or never ended.

    Where a failed request has a value (a first token did come) the value stands. `success_only`
    takes completed requests alone. Use it with `ttft_s`, `ttft_from_sent_s` and `e2e_s`.
    """
    values = []
    for record in counted(records):
        value = metric(record)
        if record.outcome == "completed":
            if value is not None:
                values.append(value)
        elif not success_only:
            values.append(math.inf if value is None else value)
    return values


def per_token_samples(
    records: Iterable[RequestRecord], metric: Callable[[RequestRecord], float | None] = tpot_s
) -> list[float]:
    """One value per completed request that has one; a failure's TPOT stays missing."""
    found = (metric(r) for r in records if r.outcome == "completed")
    return [value for value in found if value is not None]


def itl_groups(records: Iterable[RequestRecord]) -> list[list[float]]:
    """Each completed request's gaps, for pooling and for bootstrap over requests."""
    return [itl_s(r) for r in records if r.outcome == "completed"]


def itl_percentile(records: Iterable[RequestRecord], q: float, confidence: float = 0.95) -> stats.Estimate:
    """The q-quantile of the pooled gaps, seconds, with a bootstrap interval over requests."""
    return stats.bootstrap(
        itl_groups(records), lambda gaps: stats.percentile_value(gaps, q), confidence=confidence, draws=400
    )


@dataclass(frozen=True, slots=True)
class Counts:
    """How many requests ended how; `unfinished` were running when the run was cut off."""

    sent: int
    completed: int
    failed: int
    timed_out: int
    rejected: int
    cancelled: int
    unfinished: int


def counts(records: Iterable[RequestRecord]) -> Counts:
    """Requests by outcome; the six kinds sum to `sent`."""
    outcomes = [r.outcome for r in records]
    return Counts(
        len(outcomes),
        *(
            outcomes.count(kind)
            for kind in ("completed", "failed", "timed_out", "rejected", "cancelled", None)
        ),
    )


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits a request must meet, all of them; None is no limit. Seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        check_types(self, WorkloadError)
        for name, limit in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s), ("e2e_s", self.e2e_s)):
            if limit is not None and limit <= 0:
                raise WorkloadError(f"{name}={limit}: must be above 0; leave it out for no limit")

    def met_by(self, record: RequestRecord) -> bool:
        """Whether a completed request is within every limit. A metric that it cannot have (TPOT of
        a single token) is no miss."""
        if record.outcome != "completed":
            return False
        pairs = ((self.ttft_s, ttft_s(record)), (self.tpot_s, tpot_s(record)), (self.e2e_s, e2e_s(record)))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every SLO: per second of the sending window, and as a share of all sent."""

    met: int
    sent: int
    requests_per_s: float | None
    share: stats.Estimate


def goodput(records: Sequence[RequestRecord], slo: SLO) -> Goodput:
    """Met / (last intended start − first), and met / sent; failures are misses, user cancels left out.

    The rate is None where all requests were to start at the same time.
    """
    judged = counted(records)
    met = sum(slo.met_by(r) for r in judged)
    starts = [r.intended_ns for r in judged]
    window = (max(starts) - min(starts)) / NS_PER_S if starts else 0.0
    return Goodput(met, len(judged), met / window if window > 0 else None, stats.share(met, len(judged)))


def goodput_by_class(
    records: Sequence[RequestRecord], slos: Mapping[str, SLO], default: SLO = SLO()
) -> dict[str, Goodput]:
    """Goodput of each request class under its own limits, or `default`; classes in order of name."""
    names = sorted({r.request_class for r in records})
    return {n: goodput([r for r in records if r.request_class == n], slos.get(n, default)) for n in names}


def success(records: Iterable[RequestRecord]) -> stats.Estimate:
    """Completed / all but those that their user cancelled, with Wilson's interval."""
    judged = counted(records)
    return stats.share(sum(r.outcome == "completed" for r in judged), len(judged))


def after_warm_up(records: Sequence[RequestRecord], until_ns: int) -> tuple[list[RequestRecord], int]:
    """The requests whose intended start is at `until_ns` or later, and how many were left out.

    By start, not by overlap: a request that began in the warm-up and ended after it had the warm-up's
    latency.
    """
    kept = [r for r in records if r.intended_ns >= until_ns]
    return kept, len(records) - len(kept)


LATENCIES: dict[str, Callable[[Sequence[RequestRecord], float], stats.Estimate]] = {
    "TTFT": lambda records, q: stats.percentile(samples(records, ttft_s), q),
    "ITL": itl_percentile,
    "TPOT": lambda records, q: stats.percentile(per_token_samples(records), q),
    "E2E": lambda records, q: stats.percentile(samples(records, e2e_s), q),
}
"""The latency metrics a report tabulates: name to (records, quantile) → estimate in seconds."""
