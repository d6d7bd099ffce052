"""The comparison with other engines, without any of them: parsing, skipping, ratios, shares, order."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bars, contenders, peers
from benchmarks.contenders import Contender, parse, run

BENCH = [
    {"n_prompt": 512, "n_gen": 0, "avg_ts": 848.8, "avg_ns": 603_000_000},
    {"n_prompt": 0, "n_gen": 128, "avg_ts": 177.5, "avg_ns": 721_000_000},
]
READS = {"sum": 20.0, "maximum": 30.0}
RATES: dict[str, float | None] = {"fp32": 100.0, "bf16": 400.0, "int8": None}


def script(name: str, code: str, engine: str = "vLLM", precision: str = "bf16") -> Contender:
    return Contender(name, engine, precision, precision, [sys.executable, "-c", code])


def test_the_last_line_of_json_counts_whatever_else_is_printed() -> None:
    text = 'loading\n{"a_ttft_ms": 1}\n{"a_ttft_ms": 40.5, "a_decode_tok_s": 80}\nbye\n'
    assert parse("vLLM", text) == {"a_ttft_ms": 40.5, "a_decode_tok_s": 80}
    with pytest.raises(ValueError, match="no line of JSON"):
        parse("OpenVINO", "Killed\n")


def test_llama_bench_is_read_from_its_own_format() -> None:
    assert parse("llama-bench", json.dumps(BENCH)) == {"a_decode_tok_s": 177.5, "b_prefill_tok_s": 848.8}
    with pytest.raises(ValueError, match="no result"):
        parse("llama-bench", "[]")


def test_who_is_not_installed_is_skipped_with_the_command_that_installs_it(tmp_path: Path) -> None:
    everyone = {c.name: c for c in contenders.contenders(tmp_path / "scripts", tmp_path)}
    assert contenders.missing(everyone["perflab bf16"]) is None
    for name, part in (("vLLM bf16", "vllm"), ("llama-bench Q4_0", "llamacpp"), ("OpenVINO int8", "ov")):
        why = contenders.missing(everyone[name])
        assert why is not None
        assert why.endswith(f"setup.sh {part}")
    for path in everyone["llama-bench Q4_0"].needs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert contenders.missing(everyone["llama-bench Q4_0"]) is None
    assert contenders.missing(everyone["llama.cpp server Q4_0"]) is not None


def test_every_bar_is_about_contenders_and_figures_that_exist() -> None:
    names = {c.name for c in contenders.contenders(Path("scripts"))}
    for bar in bars.BARS:
        assert bar.ours in names
        assert bar.figure in peers.LABELS
    assert {rival for bar in bars.BARS for rival in bar.rivals} - names == {
        *("vLLM int8", "vLLM int4", "transformers int8", "transformers int4")
    }


def test_a_run_gets_the_parts_and_none_of_our_thread_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = "import json, os, sys"
    code += "; print(json.dumps({'argv': sys.argv[1:], 'omp': 'OMP_NUM_THREADS' in os.environ}))"
    assert run(script("x", code), "ac") == {"argv": ["--parts", "ac"], "omp": False}
    bench = script(
        "x", f"import sys; assert sys.argv[1:] == ['-n', '128', '-p', '0']; print('{json.dumps(BENCH)}')"
    )
    record = run(bench._replace(engine="llama-bench"), "ac")
    assert record["a_decode_tok_s"] == 177.5
    assert len(record["a_other_cpu"]) == 1
    with pytest.raises(ValueError, match="out of luck"):
        run(script("x", "raise SystemExit('out of luck')"), "a")


def test_rounds_alternate_and_one_that_fails_is_left_out_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def fake(contender: Contender, parts: str) -> dict[str, Any]:
        ran.append(contender.name)
        if contender.name == "b" and len(ran) > 3:
            raise ValueError("gone")
        if len(ran) == 8:
            raise KeyboardInterrupt
        return {"a_decode_tok_s": float(len(ran))}

    monkeypatch.setattr(peers, "run", fake)
    monkeypatch.setattr(peers, "ceilings", lambda: (READS, RATES))
    results: bars.Results = {}
    failed: dict[str, str] = {}
    with pytest.raises(KeyboardInterrupt):
        peers.rounds([script(name, "") for name in "abc"], 5, "a", results, failed)
    assert "".join(ran) == "abc" + "cba" + "ac"
    assert failed == {"b": "gone"}
    assert bars.values(results, "a", "a_decode_tok_s") == {0: 1.0, 1: 6.0, 2: 7.0}


def test_the_ratio_is_the_median_of_pairs_against_the_rival_with_the_better_median() -> None:
    def rates(*found: float | None) -> dict[int, dict[str, Any]]:
        return {number: {"a_decode_tok_s": rate} for number, rate in enumerate(found)}

    results = {"us": rates(100, 50, 90, 80), "slow": rates(99, 1, 1, 1), "fast": rates(50, 40, 60, None)}
    (verdict,) = bars.judge(results, [bars.Bar("a_decode_tok_s", "us", ("slow", "fast", "absent"), 1.6)])
    assert verdict.against == "fast"
    assert verdict.value == 1.5  # of 2.0, 1.25 and 1.5
    assert not verdict.ok
    assert bars.judge(results, [bars.Bar("a_decode_tok_s", "us", ("absent",), 1.0)]) == []
    assert bars.judge(results, [bars.Bar("a_decode_tok_s", "us", (), 85.0)])[0].ok
    late = {
        "us": {0: {"a_ttft_ms": 30.0}},
        "them": {0: {"a_ttft_ms": 40.0}},
        "tortoise": {0: {"a_ttft_ms": 90.0}},
    }
    (verdict,) = bars.judge(late, [bars.Bar("a_ttft_ms", "us", ("tortoise", "them"), 0.8)])
    assert (verdict.against, verdict.value, verdict.ok) == ("them", 0.75, True)


def test_shares_are_of_the_fastest_loop_and_of_the_matrix_rate_where_there_is_one() -> None:
    record = {"a_decode_tok_s": 100.0, "b_prefill_tok_s": 1000.0}
    shared = peers.with_shares(record, script("x", ""), READS, RATES)
    assert shared["a_share"] == pytest.approx(2 * 134.48e6 * 100 / 30e9, rel=1e-3)
    assert shared["b_share"] == pytest.approx(2 * 106.17e6 * 1000 / 400e9, rel=1e-3)
    assert "b_share" not in peers.with_shares(record, script("x", "", precision="int8"), READS, RATES)


def test_the_tables_and_the_last_line_take_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    kept = {"reads_gb_s": READS, "matrix_gop_s": RATES, "a_share": 0.5, "d_peak_rss_mb": 700}
    results = {
        "perflab bf16": {n: {"a_decode_tok_s": 110.0 + n, "a_other_cpu": [0.01], **kept} for n in range(3)},
        "llama-bench BF16": {0: {"a_decode_tok_s": 100.0, "a_other_cpu": [0.2], **kept}},
    }
    peers.tables(results, "ab")
    peers.ceiling_lines(results)
    printed = capsys.readouterr().out
    for text in ("110–112", "20.0% !", "perflab bf16 ÷ llama-bench BF16", "1.10", "maximum 30.0"):
        assert text in printed
    last = peers.summary(results, {"vLLM bf16": "gone"}, {})
    assert json.loads(json.dumps(last))["runs"] == {"perflab bf16": 3, "llama-bench BF16": 1}
    assert [bar["ok"] for bar in last["bars"]] == [True, False]
    peers.tables({}, "abc")
    peers.ceiling_lines({})
    assert capsys.readouterr().out == ""
