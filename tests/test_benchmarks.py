"""The comparisons with other engines and other tools, without any of them: parsing, ratios, order."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agreement, bars, contenders, foreign, mock, peers, servers, tools
from benchmarks.contenders import Contender, parse, run
from benchmarks.tools import Figures, Tool
from perflab.studies.store import Run
from perflab.types import RequestRecord, Sample

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


GUIDELLM = {
    "time_to_first_token_ms": {"mean": 104.4, "median": 103.5, "count": 16},
    "inter_token_latency_ms": {"mean": 10.07, "median": 10.01, "count": 496},
    "time_per_output_token_ms": {"mean": 13.02, "median": 12.92, "count": 512},
    "output_tokens_per_second": {"mean": 289.8, "median": 293.4, "count": 512},
    "output_token_count": {"total_sum": 512.0, "median": 32.0, "count": 16},
}
RECORDED: dict[str, tuple[str, Any, Figures]] = {
    "guidellm": (
        "guidellm.json",
        {"benchmarks": [{"metrics": {name: {"successful": found} for name, found in GUIDELLM.items()}}]},
        Figures(16, 512, 103.5, 10.01, 289.8),
    ),
    "vllm bench": (
        "vllm.json",
        {
            **{"completed": 16, "failed": 0, "total_output_tokens": 512, "output_throughput": 309.9},
            **{"median_ttft_ms": 102.5, "median_tpot_ms": 10.0, "median_itl_ms": 9.999},
            **{"start_times": [7.0, 7.4], "latencies": [0.7, 1.2]},
        },
        Figures(16, 512, 102.5, 10.0, 309.9, windowed=pytest.approx(512 / 1.6)),  # type: ignore[arg-type]
    ),
    "aiperf": (
        "aiperf/profile_export_aiperf.json",
        {
            "request_count": {"unit": "requests", "avg": 16.0},
            "output_sequence_length": {"unit": "tokens", "avg": 32.0, "sum": 512.0},
            "time_to_first_token": {"unit": "ms", "avg": 2165.7, "p50": 103.6},
            "inter_token_latency": {"unit": "ms", "avg": 10.03, "p50": 10.02},
            "output_token_throughput": {"unit": "tokens/sec", "avg": 51.4},
        },
        Figures(16, 512, 103.6, 10.02, 51.4),
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_each_tools_own_names_become_one_vocabulary(name: str, tmp_path: Path) -> None:
    file, content, expected = RECORDED[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(content))
    assert tools.tools()[name].read(tmp_path) == expected


def test_every_tool_is_asked_for_the_same_load() -> None:
    load = tools.Load("http://127.0.0.1:9", "m", Path("/models/m"), [("a", 37)] * 23, 5)
    for tool in tools.tools(Path("/home")).values():
        words = " ".join(str(word) for word in tool.command(load, Path("/folder")))
        for said in ("http://127.0.0.1:9", "/folder/prompts.jsonl", "5"):
            assert said in words, tool.name
        assert ("23" in words) == (tool.name != "perflab")  # which takes all of them
        words = " ".join(str(word) for word in tool.command(load._replace(rate=7.25), Path("/folder")))
        assert "7.25" in words
        assert "concurren" not in words
    assert servers.missing(*tools.tools(Path("/home"))["aiperf"][4:6]) is not None


def scripted_tool(code: str) -> Tool:
    """A tool that runs `code` and leaves `figures.json`."""

    def read(folder: Path) -> Figures:
        return Figures(**json.loads((folder / "figures.json").read_text()))

    return Tool("scripted", lambda load, folder: [sys.executable, "-c", code], read, "")


def test_a_tool_that_fails_or_answers_half_is_told_by_name_of_the_fault() -> None:
    load = tools.Load("", "m", Path(), [("first", 2), ("second", 4)], 1)
    code = """if True:
        import json
        rows = [json.loads(line) for line in open("prompts.jsonl")]
        for said in ("prompt", "text"):
            assert [row[said] for row in rows] == ["first", "second"]
        for said in ("output_tokens", "output_tokens_count", "output_length"):
            assert [row[said] for row in rows] == [2, 4]
        found = dict(completed=2, output_tokens=TOKENS, ttft_ms=1, tpot_ms=2, tokens_per_s=3)
        json.dump(found, open("figures.json", "w"))
    """
    assert tools.run(scripted_tool(code.replace("TOKENS", "6")), load) == Figures(2, 6, 1, 2, 3)
    with pytest.raises(ValueError, match="2 of 2 answers, 5 of 6 tokens"):
        tools.run(scripted_tool(code.replace("TOKENS", "5")), load)
    with pytest.raises(ValueError, match="cannot be read: FileNotFoundError"):
        tools.run(scripted_tool("pass"), load)
    with pytest.raises(ValueError, match="exit code 1: no luck"):
        tools.run(scripted_tool("raise SystemExit('no luck')"), load)
    with pytest.raises(ValueError, match=r"no end after 0\.2 s"):
        tools.run(scripted_tool("import time; time.sleep(60)"), load, timeout_s=0.2)


def figures(ttft: float, rate: float) -> Figures:
    return Figures(1, 1, ttft, 10.0, rate)


def test_agreement_is_a_difference_within_the_limit_or_an_interval_with_zero(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = {
        "perflab": dict(enumerate([figures(100, 400), figures(102, 410), figures(99, 396), figures(1, 1)])),
        "guidellm": dict(enumerate([figures(101, 360), figures(101, 369.5), figures(100.5, 356)])),
    }
    found = agreement.differences(results)
    row = found["guidellm"]["tokens_per_s"]
    assert row["difference"] == pytest.approx(-0.1)
    assert (row["least"], row["most"]) == (pytest.approx(356 / 396 - 1), pytest.approx(369.5 / 410 - 1))
    agreement.judge(found, "mock")
    assert [found["guidellm"][f]["verdict"] for f in tools.FIGURES] == ["yes", "yes", "NO"]
    agreement.judge(found, "real")
    assert [found["guidellm"][f]["verdict"] for f in tools.FIGURES] == ["yes", "yes", "NO"]
    same_window = {
        at: f._replace(windowed=f.tokens_per_s / 0.9 * (1 + 0.001 * (at - 1)))
        for at, f in results["guidellm"].items()
    }
    defined = agreement.differences({**results, "guidellm": same_window})
    agreement.judge(defined, "real")
    assert [defined["guidellm"][f]["verdict"] for f in tools.FIGURES] == ["yes", "yes", "defined"]
    agreement.table("", defined, "real")
    assert "by perflab's window: -0.0%" in capsys.readouterr().out.replace("+0.0%", "-0.0%")
    assert found["guidellm"]["ttft_ms"]["detectable"] > 0.01
    agreement.table("", found, "real")
    assert "its own TPOT is E2E/N" in capsys.readouterr().out
    wild = {**results, "aiperf": {at: figures(50 * 2**at, 400) for at in range(3)}}
    blunt = agreement.differences(wild)["aiperf"]
    agreement.judge({"aiperf": blunt}, "real")
    assert blunt["ttft_ms"]["low"] < 0 < blunt["ttft_ms"]["high"]
    assert blunt["ttft_ms"]["verdict"] == "NO"  # an interval that hides everything shows nothing
    few = agreement.differences({name: {0: rows[0]} for name, rows in results.items()})
    agreement.judge(few, "real")
    assert few["guidellm"]["ttft_ms"]["verdict"] == "NO"  # one pair has no interval
    assert agreement.differences({"perflab": results["perflab"], "aiperf": {}}) == {}


def test_tools_take_turns_and_who_fails_twice_is_left_out() -> None:
    present = [scripted_tool("")._replace(name=name) for name in "abc"]
    ran: list[str] = []

    def one(tool: Tool, number: int) -> Figures:
        ran.append(tool.name)
        if tool.name == "b" and number > 3:
            raise ValueError("gone")
        if number == 12:
            raise KeyboardInterrupt
        return figures(number, number)

    failed: dict[str, str] = {}
    results = agreement.rounds(present, 9, one, failed)
    assert "".join(ran) == "abc" + "cba" + "abc" + "ca" + "a"
    assert failed == {"b": "gone"}
    assert {name: {at: found.ttft_ms for at, found in rows.items()} for name, rows in results.items()} == {
        "a": {0: 1, 1: 6, 2: 7, 3: 11},
        "b": {0: 2},
        "c": {0: 3, 1: 4, 2: 9, 3: 10},
    }


def test_the_mock_answers_the_same_request_alike() -> None:
    first = mock.times(17, 5, 0.1, 0.02, 0.3)
    assert first == mock.times(17, 5, 0.1, 0.02, 0.3) != mock.times(18, 5, 0.1, 0.02, 0.3)
    assert list(first) == sorted(first)
    assert mock.times(0, 3, 0.1, 0.02, 0.0) == pytest.approx((0.1, 0.12, 0.14))


def test_a_server_that_does_not_start_is_told_with_its_last_words() -> None:
    code = "raise SystemExit('no {threads} threads')"
    dying = servers.Server("dying", [sys.executable, "-c", code], start_s=30)
    with pytest.raises(ValueError, match="dying did not start: no 3 threads"), servers.running(dying, 3):
        pass


def test_what_is_wrong_with_a_run_against_a_foreign_server_is_named() -> None:
    def request(number: int, **changes: Any) -> RequestRecord:
        facts = {"output_tokens": 4, "requested_tokens": 4, "server_prompt_tokens": 8, "outcome": "completed"}
        record = RequestRecord(f"r{number}", 0, 0, 8, count_source="usage")
        for name, value in (facts | changes).items():
            setattr(record, name, value)
        return record

    names = ("running", "waiting", "prompt_tokens", "output_tokens")
    pages = [Sample(at, name, {"source": f"x:{name}"}, float(3 * at)) for name in names for at in (1, 2, 4)]
    noise = [["machine too noisy", "others took 90%"]]
    manifest: dict[str, Any] = {"validity": {"reasons": noise}}
    sound = Run(manifest, [request(0), request(1)], [], [], telemetry=pages)
    assert list(foreign.faults(sound)) == []
    assert foreign.scraped(sound) == {"running": 12, "waiting": 12, "prompt_tokens": 9, "output_tokens": 9}
    worse = [request(0, output_tokens=3), request(1, outcome="failed", error="HTTP 500: x")]
    worse += [request(2, server_prompt_tokens=9), request(3, count_source="chunks")]
    bad = {"validity": {"reasons": [*noise, ["no steady state", "why"]]}}
    assert [
        fault.split(":")[0] for fault in foreign.faults(Run(bad, worse, [], [], telemetry=pages[3:]))
    ] == [
        "1 of 4 requests failed",
        "tokens were counted by chunks",
        "1 requests have another output length than asked",
        "1 requests have another prompt length than asked",
        "the server's page gave no running",
        "no steady state",
    ]
