"""The command line as a script sees it: help at once, exit codes, clear errors, clean stdout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perflab import cli
from perflab.errors import ModelError

COMMANDS = (("model", "fetch"), ("model", "path"), ("generate",), ("doctor",), ("study",), ("report",))
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
