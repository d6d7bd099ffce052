"""The answer of each part of a report in one line, a sentence below it, and how it reads.

Owns these words, which are never stronger than the weakest part: nothing is called best or faster
that valid runs do not prove.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perflab.measure import stats
from perflab.report import units
from perflab.report.analysis import Analysis
from perflab.report.summary import CLOSE_KL, Summary, interleaved, quality_words
from perflab.studies.sweep_result import SweepResult


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict in one line, a sentence below it, and how it reads: good, unsure or bad."""

    title: str
    detail: str
    tone: str


def headline(analysis: Analysis) -> Headline:
    """What the runs found."""
    if analysis.kind == "profile":
        return _profile(analysis)
    if analysis.sweep is not None:
        return _sweep(analysis.sweep)
    if len(analysis.summaries) == 1:
        return _alone(analysis)
    return _ladder(analysis) if analysis.kind == "study" else _changed(analysis)


def _profile(analysis: Analysis) -> Headline:
    """The largest part of a request's time; otherwise what its first chapter says. Then what others say."""
    from perflab.report.profile import sections_of

    s = analysis.baseline
    told = [(section.anchor, section.takeaway) for run in analysis.runs for section in sections_of(run)]
    rest = [words for anchor, words in told if not anchor.startswith(("waterfall", "shares", "telemetry"))]
    title = rest.pop(0).rstrip(".") if rest else "Nothing was profiled"
    if s.time is not None and s.time.segments:
        rest = rest if title == "Nothing was profiled" else [f"{title}.", *rest]
        name, value = max(s.time.segments.items(), key=lambda item: item[1])
        title = f"{name} takes the most: {units.percent(value / s.time.e2e_s, 0)} of an average request's "
        title = f"{title[0].upper()}{title[1:]}{units.seconds(s.time.e2e_s)}"
    return Headline(
        title,
        " ".join(rest[:3]) + ("" if s.valid else f" The run is invalid.{_faults(s)}"),
        "good" if s.valid else "unsure",
    )


def _sweep(found: SweepResult) -> Headline:
    """The capacity where there are limits, the knee otherwise; what is unknown is said."""
    unit = "users" if found.by == "users" else "requests/s"
    used = f"{len(found.usable)} of {len(found.points)} points count"
    told = []
    for name, one in (("Capacity", found.capacity), ("Knee", found.knee)):
        if one.level is None:
            told.append(f"{name}: unknown, {one.reason}")
            continue
        span = (
            f", between {units.number(one.low)} and {units.number(one.high)}"
            if one.high is not None
            else " or more"
        )
        told.append(
            f"{name}: {units.number(one.level)} {unit}{span}" + (f" ({one.reason})" if one.reason else "")
        )
    best = found.capacity if found.capacity.level is not None else found.knee
    if best.level is None:
        return Headline("The sweep found neither capacity nor knee", f"{'. '.join(told)}. {used}.", "unsure")
    what = "within the limits" if best is found.capacity else "at the knee; no limits were given"
    if best is found.knee and found.capacity.high is not None:
        what = "at the knee; the limits are missed at every level"
    title = f"{units.number(best.level)} {unit} {what}"
    return Headline(title, f"{'. '.join(told)}. {used}.", "good" if best is found.capacity else "unsure")


def _alone(analysis: Analysis) -> Headline:
    """One configuration: what it did, or why that does not count."""
    s = analysis.baseline
    rate = s.tokens_per_s.value
    if rate is None:
        return Headline(
            "Nothing was measured", f"No request of “{s.name}” brought a token.{_faults(s)}", "bad"
        )
    figures = [
        f"{units.number(rate)} output tokens/s",
        f"TTFT p50 {units.seconds(s.latencies['TTFT'][0.5].value)}",
    ]
    if s.goodput is not None:
        figures.insert(0, f"{units.percent(s.goodput.share.value)} of requests met every SLO")
    title = ", ".join(figures)
    done = f"{units.percent(s.completed_share)} of the requests completed. "
    if not s.valid:
        return Headline(
            f"Invalid: {', '.join(_reasons(s))}",
            f"Seen, and not to be quoted: {title}. {done}{_faults(s)}",
            "bad",
        )
    runs = f"{len(s.used)} valid runs of “{s.name}”" if len(s.used) > 1 else f"One valid run of “{s.name}”"
    missed = s.goodput is not None and (s.goodput.share.value or 0.0) < 0.9
    return Headline(
        title, f"{done}{runs}; there is nothing to compare it with.", "unsure" if missed else "good"
    )


def _reasons(s: Summary) -> list[str]:
    return sorted({reason[0] for run in s.runs for reason in run.reasons})


def _faults(s: Summary) -> str:
    """The reasons of the first invalid run in full."""
    told = [f"{name} ({detail})" for run in s.runs for name, detail in run.reasons]
    return f" Why: {'; '.join(dict.fromkeys(told[:4]))}." if told else ""


def _changed(analysis: Analysis) -> Headline:
    """Before and after: judged on one figure, so that looking at many finds nothing by chance."""
    base, name = analysis.baseline, analysis.measure.name
    others = analysis.summaries[1:]
    said = [f"“{s.name}”: {c.answer}{_by(c)}" for s in others if (c := s.first)]
    judged = f"Judged on {name}, against “{base.name}”"
    answers = {s.first.answer for s in others if s.first}
    reasons = sorted({c.reason for s in others if (c := s.first) and c.answer == "cannot tell" and c.reason})
    why = f" {why_not(reasons)}" if reasons else ""
    if answers == {"cannot tell"}:
        seen = ", ".join(
            f"“{s.name}” {units.times(s.first.ratio.value)}"
            for s in others
            if s.first and s.first.ratio.value
        )
        return Headline(
            "Cannot tell which is faster",
            f"{judged}.{why}" + (f" Seen, unproven: {seen} as fast." if seen else ""),
            "unsure",
        )
    if len(others) == 1 and others[0].first is not None:
        comparison = others[0].first
        ratio = comparison.ratio
        pairs = "pairs of runs" if interleaved(base, others[0]) else "runs of each, not interleaved"
        title = f"“{others[0].name}” is {comparison.answer} than “{base.name}”"
        title += f": {name} {units.times(ratio.value)} as fast"
        detail = f"95 % interval {units.interval(ratio, units.times)} from {ratio.n} {pairs}."
        tone = "good" if comparison.answer == "faster" else "bad"
        return Headline(title, f"{detail}{_at_what_cost(base, others[0])}", tone)
    best = analysis.best
    tone = "bad" if answers <= {"slower", "cannot tell"} and "slower" in answers else "good"
    title = (
        f"“{best.name}” is fastest" if best is not base else f"Nothing is proven faster than “{base.name}”"
    )
    return Headline(title, f"{judged}. {'; '.join(said)}.{why}", tone)


def _by(comparison: stats.Comparison) -> str:
    return f" ({units.times(comparison.ratio.value)})" if comparison.answer != "cannot tell" else ""


def _at_what_cost(base: Summary, other: Summary) -> str:
    """What a gain may have cost: fewer requests that complete, other quality."""
    words = ""
    before, after = base.completed_share, other.completed_share
    if before is not None and after is not None and after < before:
        words += (
            f" But only {units.percent(after)} of its requests completed, before {units.percent(before)}."
        )
    return words + (f" Output: {quality_words(other)}." if other.quality is not None or other.forced else "")


def _ladder(analysis: Analysis) -> Headline:
    """A study: the best proven variant against the plainest one."""
    best, base = analysis.best, analysis.baseline
    if best is not base and best.first is not None and best.first.ratio.value is not None:
        ratio = best.first.ratio
        tone = "good" if (best.kl_nats or 0.0) <= CLOSE_KL else "unsure"
        title = f"{units.times(ratio.value)} the output tokens/s of the baseline, {quality_words(best)}"
        detail = (
            f"“{best.name}” against “{base.name}”, 95 % interval {units.interval(ratio, units.times)} "
            f"from {ratio.n} paired rounds."
        )
        fastest = analysis.proven[0]
        if fastest is not best and fastest.first is not None:
            speed = units.times(fastest.first.ratio.value)
            detail += f" “{fastest.name}” reaches {speed}, with {quality_words(fastest)}."
        return Headline(title, detail, tone)
    answers = [s.first for s in analysis.summaries[1:] if s.first is not None]
    if answers and all(c.answer == "slower" for c in answers):
        return Headline("Every variant is slower than the baseline", f"The baseline is “{base.name}”.", "bad")
    reasons = sorted({c.reason for c in answers if c.answer == "cannot tell" and c.reason})
    seen = _highest_seen(analysis)
    if steps := takeaway_steps(analysis):
        names = ", ".join(f"“{s.name}” {units.times(c.ratio.value)}" for s, c in steps)
        title = f"{len(steps)} of {len(answers)} steps are proven, the total is not"
        return Headline(title, f"Against the rung below: {names}. {why_not(reasons)}{seen}", "unsure")
    spoilt = any(not run.valid for run in analysis.runs)
    title = "Cannot tell: too few valid runs" if spoilt else "Cannot tell: no variant is proven faster"
    return Headline(title, f"{why_not(reasons)}{seen}", "unsure")


def _highest_seen(analysis: Analysis) -> str:
    """The highest ratio of all, where none is proven, with its quality where that is different."""
    ratios = {s: value for s in analysis.summaries[1:] if s.first and (value := s.first.ratio.value)}
    known = [s for s, value in ratios.items() if math.isfinite(value)]
    if not known:
        return ""
    top = max(known, key=ratios.__getitem__)
    quality = f", with {quality_words(top)}" if (top.kl_nats or 0.0) > CLOSE_KL else ""
    return f" The highest ratio seen, unproven, is {units.times(ratios[top])} by “{top.name}”{quality}."


def why_not(reasons: Sequence[str]) -> str:
    """The reasons of comparisons that cannot tell, as sentences."""
    why = "; ".join(reasons[:2]) or "no two runs could be paired"
    advice = " Run it again on a quiet machine." if "noisy" in why else ""
    return f"{why[0].upper()}{why[1:]}.{advice}"


def takeaway_steps(analysis: Analysis) -> list[tuple[Summary, stats.Comparison]]:
    """Rungs whose gain over the rung below is proven, largest first."""
    proven = [(s, s.previous) for s in analysis.summaries if s.previous and s.previous.answer == "faster"]
    return sorted(proven, key=lambda pair: -(pair[1].ratio.value or 0.0))
