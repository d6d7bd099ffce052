"""What is wanted of this engine beside the others, and whether the measured figures give it.

Owns the bars. Knows contenders by name and figures by the keys that their scripts print; how either
came about is not its concern.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.common import paired_ratio
from benchmarks.contenders import PRECISIONS, QUANTS

Results = dict[str, dict[int, dict[str, Any]]]  # records by contender, then by round


class Bar(NamedTuple):
    """What is wanted: `ours` at least `factor` times the best of `rivals` (a latency: at most).

    Without rivals the figure itself is at least `factor`.
    """

    figure: str
    ours: str
    rivals: Sequence[str]
    factor: float

    @property
    def falling(self) -> bool:
        """Whether less is better."""
        return self.figure.endswith("_ms")


class Verdict(NamedTuple):
    """A bar and what was found: a median of paired ratios, or of shares."""

    bar: Bar
    against: str
    value: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bar.factor if self.bar.falling else self.value >= self.bar.factor


_LLAMA = {
    precision: (f"llama.cpp server {quant}", f"llama-bench {quant}") for precision, quant in QUANTS.items()
}
BARS = (
    Bar("a_decode_tok_s", "perflab bf16", _LLAMA["bf16"], 1.05),
    Bar("a_decode_tok_s", "perflab bf16", ("vLLM bf16",), 2.0),
    Bar("a_decode_tok_s", "perflab int8", _LLAMA["int8"], 1.15),
    Bar("a_decode_tok_s", "perflab int4", _LLAMA["int4"], 1.1),
    Bar("a_share", "perflab bf16", (), 0.8),
    Bar("a_share", "perflab int8", (), 0.75),
    *(
        Bar(
            "a_ttft_ms",
            f"perflab {precision}",
            (_LLAMA[precision][0], *(f"{peer} {precision}" for peer in ("OpenVINO", "vLLM", "transformers"))),
            0.8,
        )
        for precision in PRECISIONS
    ),
    Bar("b_prefill_tok_s", "perflab bf16", ("OpenVINO bf16",), 1.0),
    Bar("b_prefill_tok_s", "perflab int8", ("OpenVINO int8",), 1.4),
    Bar("b_share", "perflab bf16", (), 0.85),
    Bar("c_out_tok_s", "perflab bf16", ("OpenVINO bf16",), 1.15),
    Bar("c_out_tok_s", "perflab int8", ("OpenVINO int8",), 1.6),
    Bar("c_out_tok_s", "perflab int8", ("vLLM bf16",), 3.0),
    Bar("c_out_tok_s", "perflab int8", (_LLAMA["int8"][0],), 3.0),
)


def values(results: Results, name: str, figure: str) -> dict[int, float]:
    """One figure of one contender by round, where it has it."""
    return {
        number: record[figure]
        for number, record in results.get(name, {}).items()
        if record.get(figure) is not None
    }


def judge(results: Results, bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """The bars whose both sides were measured, each against the rival with the best median."""
    verdicts = []
    for bar in bars:
        ours = values(results, bar.ours, bar.figure)
        if ours and not bar.rivals:
            verdicts.append(Verdict(bar, "", statistics.median(ours.values())))
        rivals = {name: values(results, name, bar.figure) for name in bar.rivals}
        medians = {name: statistics.median(found.values()) for name, found in rivals.items() if found}
        if not ours or not medians:
            continue
        best = (min if bar.falling else max)(medians, key=medians.__getitem__)
        both = sorted(ours.keys() & rivals[best].keys())
        if both:
            ratio = paired_ratio([ours[n] for n in both], [rivals[best][n] for n in both])
            verdicts.append(Verdict(bar, best, ratio))
    return verdicts
