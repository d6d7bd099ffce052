"""Whether a run may be compared: one verdict per run, with the reasons by name.

Owns the reasons and their limits. Knows no engine and no protocol: records and readings in, a verdict out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perflab.clock import NS_PER_S
from perflab.measure import metrics, rates
from perflab.measure.noise import Noise as Noise
from perflab.measure.noise import NoiseSampler as NoiseSampler
from perflab.measure.stats import percentile_value
from perflab.types import ClientHealth, RequestRecord

NOISE_LIMIT = 0.15
"""Share of the usable cores that other processes may take before a run is too noisy."""

MIN_COMPLETED = 5
LATE_LIMIT_S = 0.25
"""99th percentile of lateness in a loop that also runs the engine: a send waits for the step's end."""

CLIENT_LIMIT_S, CLIENT_SHARE = 0.02, 0.1
"""How late a client may send and wake at its 99th percentile: 20 ms, which a busy two-core machine's
scheduler alone can take, or a tenth of the median TTFT, where that is more. Beyond it a visible part of
what is reported as the server's latency is the client's."""

CLIENT_CPU_LIMIT = 0.9
"""Share of one core that the client's thread may use: above it, queueing in the client explodes."""

RATE_LIMIT = 0.95
"""Share of the asked rate that must be sent."""

TEMPLATE_TOKENS = 64
"""Tokens at the start of a prompt that a warm-up may have put into the cache: a chat template's own."""

TOKENIZER_LIMIT = 0.01
"""Relative difference of the prompts' token counts, client against server, above which they disagree."""

RETOKENISED_LIMIT = 0.05
"""Relative difference of re-tokenised outputs: special tokens and odd merges explain less than this."""

REASONS: dict[str, str] = {
    "incomplete": "the run was cut off before all its requests were sent or had ended",
    "too few samples": f"fewer than {MIN_COMPLETED} requests completed",
    "failures": "more than 1 % of the requests failed, timed out or were refused",
    "length mismatch": "prompts or outputs are not as long as the workload asked",
    "tokenizer mismatch": "the server counts other prompt lengths than the client's tokenizer",
    "cache-assisted": "the first request of the run found its prompt cached, so the cache was warm before it",
    "no steady state": "an open-loop run without a window in which requests were completed at one rate",
    "client-bound": "the load generator sent or received late because it was itself busy",
    "rate not met": f"requests were sent at less than {RATE_LIMIT:.0%} of the rate that was asked",
    "machine too noisy": f"other processes took more than {NOISE_LIMIT:.0%} of the usable cores",
}

Finding = tuple[str | None, str]
"""The name of a reason, None for a note, and its detail."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reasons` make a run invalid, each a (name, detail); `notes` are worth knowing only."""

    reasons: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "valid" if self.valid else "; ".join(f"{name} ({detail})" for name, detail in self.reasons)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a workload asked of one request; None where it left that to the model."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None


def judge(
    records: Sequence[RequestRecord],
    *,
    planned: int | None = None,
    interrupted: bool = False,
    expected: Mapping[str, Expected] | None = None,
    noise: Noise | None = None,
    open_loop: bool = False,
    late_limit_s: float = LATE_LIMIT_S,
    client: ClientHealth | None = None,
    warm_up_left_out: int = 0,
) -> Verdict:
    """The verdict of one run.

    planned: how many requests were to be sent. late_limit_s bounds the 99th percentile of lateness of
    an open-loop run that has no `client` readings; with them, their own limits hold. warm_up_left_out:
    requests that `records` no longer holds.
    """
    found = [
        *_complete(records, planned, interrupted, warm_up_left_out),
        *_lengths(records, expected or {}),
        *_tokenizers(records, expected or {}),
        *_cache(records),
        *_client(records, client),
        *(_open_loop(records, None if client else late_limit_s) if open_loop else _closed_loop(records)),
        *_noise(noise),
    ]
    reasons = tuple((name, detail) for name, detail in found if name is not None)
    return Verdict(reasons, tuple(detail for name, detail in found if name is None))


def _complete(
    records: Sequence[RequestRecord], planned: int | None, interrupted: bool, left_out: int
) -> Iterator[Finding]:
    count = metrics.counts(records)
    missing = (planned - count.sent - left_out if planned is not None else 0) + count.unfinished
    if interrupted or missing > 0:
        yield "incomplete", f"{missing} requests not sent or unfinished"
    if count.completed < MIN_COMPLETED:
        yield "too few samples", f"{count.completed} requests completed"
    bad = count.failed + count.timed_out + count.rejected
    if bad > 0.01 * count.sent:
        yield "failures", f"{bad} of {count.sent} requests"
    elif bad:
        yield None, f"{bad} of {count.sent} requests failed, timed out or were refused"
    if empty := sum(r.outcome == "completed" and not r.output_tokens for r in records):
        yield None, f"{empty} requests were answered without a token: they have no latency"
    if again := sum(r.attempts > 1 for r in records):
        yield None, f"{again} requests were sent more than once; the time of every attempt counts"
    if forced := sum(r.forced_acceptance is not None for r in records):
        yield None, f"guesses were accepted by force in {forced} requests: their output is not the model's"
    if left_out:
        yield None, f"{left_out} requests that started before the end of the warm-up are left out"


def _lengths(records: Sequence[RequestRecord], expected: Mapping[str, Expected]) -> Iterator[Finding]:
    wrong: list[str] = []
    totals = {"prompt": [0, 0], "output": [0, 0]}
    for r in records:
        want = _asked(expected, r)
        if want is None or r.outcome != "completed":
            continue
        for kind, asked, got in (
            ("prompt", want.prompt_tokens, r.prompt_tokens),
            ("output", want.output_tokens, r.output_tokens),
        ):
            if asked is not None and asked != got:
                wrong.append(f"{r.request_id}: {kind} of {got} tokens, asked {asked}")
                totals[kind][0] += got
                totals[kind][1] += asked
    if wrong:
        sums = (f"{kind}s of {got:,} of {asked:,} tokens" for kind, (got, asked) in totals.items() if asked)
        yield "length mismatch", f"{len(wrong)} requests, {', '.join(sums)}; e.g. {wrong[0]}"


def _asked(expected: Mapping[str, Expected], record: RequestRecord) -> Expected | None:
    """A request that was asked again goes by its first name and `~1`, `~2`, …"""
    name = record.request_id
    return expected.get(name) or expected.get(name.partition("~")[0])


def _tokenizers(records: Sequence[RequestRecord], expected: Mapping[str, Expected]) -> Iterator[Finding]:
    """A constant difference is what a chat template or a BOS adds; any other is another tokenizer."""
    pairs = [
        (r.prompt_tokens, r.server_prompt_tokens)
        for r in records
        if r.server_prompt_tokens is not None
        and (want := _asked(expected, r)) is not None
        and want.prompt_tokens is not None
    ]
    client, server = sum(c for c, _ in pairs), sum(s for _, s in pairs)
    added = {s - c for c, s in pairs}
    if added - {0}:
        told = f"the server counts {server:,} prompt tokens where the client made {client:,}"
        if len(pairs) > 1 and len(added) == 1 and 0 < min(added) <= TEMPLATE_TOKENS:
            yield None, f"{told}: {min(added)} more in each, as a chat template adds"
        elif abs(server - client) > TOKENIZER_LIMIT * client or len(added - {0}) > 0.5 * len(pairs):
            ratio = f" ({server / client:.2f} times as many)" if client else ""
            yield "tokenizer mismatch", told + ratio
        else:
            yield None, told
    retokenised = [
        (r.retokenised_tokens, r.server_output_tokens)
        for r in records
        if r.retokenised_tokens is not None and r.server_output_tokens is not None
    ]
    mine, theirs = sum(a for a, _ in retokenised), sum(b for _, b in retokenised)
    if abs(mine - theirs) > RETOKENISED_LIMIT * theirs:
        yield None, f"outputs re-tokenise to {mine:,} tokens where the server counts {theirs:,}"
    sources = {r.count_source for r in records if r.output_tokens}
    if guessed := sources & {"retokenised", "chunks"}:
        yield None, f"output tokens are counted from {' and '.join(sorted(guessed))}: the server tells none"


def _cache(records: Sequence[RequestRecord]) -> Iterator[Finding]:
    """Looks at the requests that began before any other could have filled the cache: those of the first
    step; where the steps are unknown, the coldest of those sent before the first token came."""
    admitted = [r.admitted_ns for r in records if r.admitted_ns is not None]
    if admitted:
        first = max((r for r in records if r.admitted_ns == min(admitted)), key=lambda r: r.cached_tokens)
    elif tokens := [r.first_token_ns for r in records if r.first_token_ns is not None]:
        first = min((r for r in records if r.sent_ns <= min(tokens)), key=lambda r: r.cached_tokens)
    else:
        return
    told = f"{first.cached_tokens} cached tokens at the first admission"
    if first.cached_tokens > min(TEMPLATE_TOKENS, first.prompt_tokens / 2):
        yield "cache-assisted", told
    elif first.cached_tokens:
        yield None, told


def _client(records: Sequence[RequestRecord], client: ClientHealth | None) -> Iterator[Finding]:
    if client is None:
        return
    ttfts = metrics.samples(records, metrics.ttft_s, success_only=True)
    limit = max(CLIENT_LIMIT_S, CLIENT_SHARE * percentile_value(ttfts, 0.5)) if ttfts else CLIENT_LIMIT_S
    for what, seconds in (
        ("its event loop woke", client.loop_lag_p99_s),
        ("it sent", client.send_lateness_p99_s),
    ):
        if seconds is not None and seconds > limit:
            yield "client-bound", f"{what} {seconds * 1e3:.0f} ms late at the 99th percentile"
    if client.cpu_share is not None and client.cpu_share > CLIENT_CPU_LIMIT:
        yield "client-bound", f"it used {client.cpu_share:.0%} of a core"


def _open_loop(records: Sequence[RequestRecord], late_limit_s: float | None) -> Iterator[Finding]:
    late = percentile_value([metrics.lateness_s(r) for r in records], 0.99) if records else 0.0
    if late_limit_s is not None and late > late_limit_s:
        yield "client-bound", f"99th percentile of lateness {late:.2f} s"
    intended, sent = sorted(r.intended_ns for r in records), sorted(r.sent_ns for r in records)
    if len(records) >= MIN_COMPLETED and intended[-1] > intended[0] and sent[-1] > sent[0]:
        asked_s, sent_s = ((t[-1] - t[0]) / NS_PER_S for t in (intended, sent))
        n = len(records) - 1
        if sent_s - (CLIENT_LIMIT_S if late_limit_s is None else late_limit_s) > asked_s / RATE_LIMIT:
            yield "rate not met", f"sent {n / sent_s:.3g} requests/s, asked {n / asked_s:.3g}"
    window = rates.steady_throughput(records)
    if window is None:
        yield "no steady state", f"{metrics.counts(records).completed} requests completed"
    elif (change := rates.trend(records, window)) is not None:
        yield "no steady state", f"the rate of completions changed by {change:+.0%} over the window"


def _closed_loop(records: Sequence[RequestRecord]) -> Iterator[Finding]:
    if rates.steady_throughput(records) is None:
        yield None, "no steady state: rates are those of the whole run, ramp and drain included"


def _noise(noise: Noise | None) -> Iterator[Finding]:
    if noise is None or noise.others_share is None:
        yield None, "what other processes took is unknown on this system"
    elif noise.others_share > NOISE_LIMIT:
        yield "machine too noisy", f"others took {noise.others_share:.0%} of the usable cores"
