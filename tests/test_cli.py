"""The command line as a script sees it: help at once, exit codes, clear errors, clean stdout."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_runs import bench

from perflab import cli
from perflab.errors import ModelError
from perflab.studies import store

COMMANDS = (
    ("model", "fetch"),
    ("model", "path"),
    ("generate",),
    ("doctor",),
    ("study",),
    ("report",),
    ("bench",),
    ("serve",),
    ("sweep",),
    ("compare",),
    ("profile",),
    ("train-drafter",),
)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process; gives exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(list(args))
        out, err = capsys.readouterr()
        code = stop.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err

    return call


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example(run: Run, command: tuple[str, ...]) -> None:
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert f"Example: perflab {' '.join(command)}" in out


def test_the_list_of_commands_is_complete(run: Run) -> None:
    groups = {name for command in COMMANDS for name in command[:1]}
    registered = {c.name or c.callback.__name__ for c in cli.app.registered_commands if c.callback}
    assert registered | {g.name for g in cli.app.registered_groups} == groups


def test_help_is_instant_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from perflab import cli\n"
        "try:\n    cli.main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'plotly', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("perflab ")


@pytest.mark.parametrize(
    "args",
    [
        ("nonsense",),
        ("generate",),
        ("generate", "  "),
        ("generate", "hello", "--max-tokens", "many"),
        ("study", "--nonsense"),
        ("study", "--quick", "--file", "mine.yaml"),
        ("report",),
    ],
)
def test_wrong_usage_ends_with_2(run: Run, args: tuple[str, ...]) -> None:
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert "Usage" in err


def test_a_missing_model_ends_with_1_and_the_remedy(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERFLAB_CACHE", str(tmp_path))
    code, out, err = run("model", "path")
    assert code == 1
    assert out == ""
    assert "perflab model fetch" in err
    assert "Traceback" not in err


def test_errors_of_the_package_are_one_panel_with_their_own_words(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ModelError("no weights in [here]: put model.safetensors beside config.json")

    monkeypatch.setattr("perflab.models.load.load", fail)
    code, out, err = run("generate", "hello")
    assert code == 1
    assert out == ""
    assert "no weights in [here]: put model.safetensors beside config.json" in err
    assert "Traceback" not in err


def test_interruption_ends_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("perflab.models.load.load", interrupted)
    assert run("generate", "hello")[0] == 130


STUDY = """
name: small
model: {model}
workload: {{kind: synthetic, requests: 5, input_tokens: 8, output_tokens: [3]}}
variants:
  - {{name: alone, config: {{max_num_seqs: 1}}}}
  - {{name: together, config: {{max_num_seqs: 4}}}}
repeats: 2
min_repeats: 2
quality_texts: 1
time_budget_s: 20
"""


@pytest.fixture
def small_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study file whose model is a random one; results go to a folder beside it."""
    from perflab.models.tiny import tiny
    from perflab.studies import study

    def load(name: str, dtype: str, device: str) -> Any:
        return tiny("llama")

    monkeypatch.setattr(study, "run_study", functools.partial(study.run_study, load_model=load))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.format(model="tiny"), encoding="utf-8")
    return path


def test_a_study_ends_in_a_report_and_is_found_again(run: Run, small_study: Path) -> None:
    code, out, err = run("study", "--file", str(small_study))
    report = small_study.parent / "runs" / "small-tiny" / "report.html"
    assert code == 0, err
    assert err.startswith("This study takes about 20 s")
    assert "alone" in out
    assert "together" in out
    assert out.strip().splitlines()[-1] == "Report: runs/small-tiny/report.html"
    assert report.exists()

    runs = {path: path.stat().st_mtime_ns for path in report.parent.glob("runs/*/manifest.json")}
    assert len(runs) == 4
    code, _, err = run("study", "--file", str(small_study))
    assert code == 0
    assert "round" not in err, "a finished study was measured again"
    assert {path: path.stat().st_mtime_ns for path in report.parent.glob("runs/*/manifest.json")} == runs

    report.unlink()
    code, out, _ = run("report", str(report.parent))
    assert code == 0
    assert report.exists()


def test_fresh_begins_anew_but_deletes_nothing_but_studies(
    run: Run, small_study: Path, tmp_path: Path
) -> None:
    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.txt").write_text("meow", encoding="utf-8")
    code, _, err = run("study", "--file", str(small_study), "--fresh", "--out", str(other))
    assert code == 1
    assert "holds no study" in err
    assert (other / "cat.txt").exists()

    out = tmp_path / "out"
    assert run("study", "--file", str(small_study), "--out", str(out))[0] == 0
    changed = small_study.read_text(encoding="utf-8").replace("requests: 5", "requests: 6")
    small_study.write_text(changed, encoding="utf-8")
    code, _, err = run("study", "--file", str(small_study), "--out", str(out))
    assert code == 1
    assert "another study" in err
    assert run("study", "--file", str(small_study), "--out", str(out), "--fresh")[0] == 0


def test_an_interrupted_study_ends_with_130_and_reports_what_it_has(
    run: Run, small_study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perflab.studies.session import Session

    measure, calls = Session.measure, []

    def interrupted_at_the_third(self: Session, *args: Any) -> bool:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(self, *args)

    monkeypatch.setattr(Session, "measure", interrupted_at_the_third)
    code, out, err = run("study", "--file", str(small_study))
    assert code == 130
    assert "go on from there" in err
    assert "Report: runs/small-tiny/report.html" in out
    code, _, err = run("study", "--file", str(small_study))
    assert code == 0
    assert len(calls) == 5  # two done, one interrupted, the two that were left


def test_interrupted_before_the_first_run_ends_with_130_too(
    run: Run, small_study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("perflab.studies.session.Session.measure", interrupted)
    code, out, err = run("study", "--file", str(small_study))
    assert code == 130
    assert out == ""
    assert "nothing to report" in err


def test_options_override_what_the_file_says(
    run: Run, small_study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def remember(study: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(study)
        raise ModelError("that will do")

    monkeypatch.setattr("perflab.studies.study.run_study", remember)
    given = ("--model", "other", "--minutes", "0.5", "--device", "cpu", "--trust-remote-code")
    assert run("study", "--file", str(small_study), *given)[0] == 1
    assert run("study", "--file", str(small_study))[0] == 1
    told, plain = seen
    assert (told.model, told.time_budget_s, told.device, told.trust_remote_code) == ("other", 30, "cpu", True)
    assert (plain.model, plain.time_budget_s, plain.device, plain.trust_remote_code) == (
        "tiny",
        20,
        "auto",
        False,
    )


def test_a_report_goes_into_a_folder_or_onto_the_screen(run: Run, tmp_path: Path) -> None:
    for name, ttft in (("before", 100.0), ("after", 50.0)):
        store.write_run(tmp_path / name, bench(ttft_ms=ttft))
    folders = str(tmp_path / "before"), str(tmp_path / "after")
    (tmp_path / "out").mkdir()
    code, out, _ = run("report", *folders, "--out", str(tmp_path / "out"))
    assert code == 0
    assert out == f"Report: {tmp_path / 'out' / 'report.html'}\n"
    code, out, _ = run("report", *folders, "--markdown")
    assert code == 0
    assert out.startswith("# ")
    assert "## Before and after: “before” against “after”" in out
    code, out, _ = run("report", *folders, "--markdown", "--out", str(tmp_path / "out"))
    assert (tmp_path / "out" / "report.md").read_text(encoding="utf-8").startswith("# ")


def test_a_damaged_study_is_one_sentence(run: Run, tmp_path: Path) -> None:
    store.write_run(tmp_path / "runs" / "one", bench())
    (tmp_path / "study.json").write_text('{"fingerprint": "x"}', encoding="utf-8")
    code, out, err = run("report", str(tmp_path))
    assert code == 1
    assert out == ""
    assert "Traceback" not in err
    assert "run again" in err


def test_models_of_one_name_go_to_folders_of_their_own(tmp_path: Path) -> None:
    from perflab.cli.studies import default_folder

    def folder(model: str) -> str:
        return default_folder(SimpleNamespace(name="ladder", model=model)).name  # type: ignore[arg-type]

    for place in ("a", "b"):
        (tmp_path / place / "mine").mkdir(parents=True)
    paths = [folder(str(tmp_path / place / "mine")) for place in ("a", "b")]
    assert len({*paths, folder("mine"), folder("ORG/mine"), folder("OTHER/mine")}) == 5
    assert paths[0] == folder(f"{tmp_path}/b/../a/mine")
    assert folder("mine") == "ladder-mine"


def test_a_report_of_nothing_says_so(run: Run, tmp_path: Path) -> None:
    code, out, err = run("report", str(tmp_path))
    assert code == 1
    assert out == ""
    assert str(tmp_path) in err.replace("\n", "")


def test_generate_streams_to_stdout_and_remarks_to_stderr(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from perflab.models.tiny import tiny

    monkeypatch.setattr("perflab.models.load.load", lambda name, **options: tiny("llama"))
    code, out, err = run("generate", "hello", "--raw", "--max-tokens", "5")
    assert code == 0
    assert out.endswith("\n")
    assert "5 tokens in, 5 out (length)" in err
    again = run("generate", "hello", "--raw", "--max-tokens", "5")[1]
    assert again == out


def test_doctor_prints_words_or_json(run: Run) -> None:
    code, out, _ = run("doctor", "--quick")
    assert code == 0
    assert "The engine will use" in out
    code, out, _ = run("doctor", "--quick", "--json")
    assert code == 0
    assert json.loads(out)["engine"]["threads"] >= 1
