"""The frame around the code: environments agree, files carry nothing of one machine, targets exist."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked_files() -> list[Path]:
    """Files that git tracks; skips where the tree is not a checkout (an unpacked archive)."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    out = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in out.split("\0") if name and (ROOT / name).is_file()]


def canonical(requirement: str) -> str:
    """Name of a requirement as package indexes compare names (PEP 503)."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonical(name): version for name, version in rows}


def test_conda_environment_is_the_same_as_pips() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert environment["name"] == PROJECT["name"]
    assert f"python={lowest}" in conda
    # the same two arguments that `make install` gives to pip, and nothing that pyproject.toml does not know
    install = next(
        line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "pip install" in line
    )
    assert pip == ["-c constraints.txt", "-e .[dev]"]
    assert '-c constraints.txt -e ".[dev]"' in install
    assert set(conda) <= {f"python={lowest}", "pip", "make"}


def test_everything_that_make_install_brings_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    own = [*PROJECT["dependencies"], *extras["dev"], *extras["lab"], *extras["quant"]]
    wanted = {canonical(requirement) for requirement in own} - {PROJECT["name"]}
    assert wanted - set(pins()) == set()
    assert pins()["torch"] == "2.13.0", "a local suffix such as +cpu would tie the pin to one build of torch"
    assert all(re.fullmatch(r"[0-9][0-9A-Za-z.]*", version) for version in pins().values())


def test_self_reference_of_extras_names_extras_that_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    named = [
        part
        for requirement in extras["dev"]
        if (match := re.fullmatch(rf"{PROJECT['name']}\[(.+)\]", requirement))
        for part in match.group(1).split(",")
    ]
    assert named
    assert set(named) <= set(extras)


MACHINE_PATH = re.compile(r"(?<![\w.~$})/-])/(?:work|root|home/\w+|Users/\w+)/")
REGISTRY_HOST = re.compile(
    r"pypi\.org|pythonhosted|files\.pythonhosted|registry\.npmjs|deb\.debian|download\.pytorch"
)
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".yml",
    ".yaml",
    ".ipynb",
    ".json",
    ".jsonl",
    ".csv",
    ".html",
    ".cfg",
    ".svg",
    "",
}


def test_files_carry_no_machine_paths_or_registry_hosts() -> None:
    bad = []
    for file in tracked_files():
        if file.suffix not in TEXT or file == Path(__file__).resolve():  # this file spells the patterns
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line) or REGISTRY_HOST.search(line):
                bad.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert bad == []


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("cd ", True),
        ('"', True),
        ("file=", True),
        ("`../data", False),
        ("application", False),
        ("$(ROOT)", False),
    ],
)
@pytest.mark.parametrize("folder", ["root", "work", "home/ann", "Users/ann"])
def test_machine_path_pattern(before: str, found: bool, folder: str) -> None:
    assert bool(MACHINE_PATH.search(f"{before}/{folder}/x.py")) == found


def test_no_tracked_file_is_large() -> None:
    sizes = {str(f.relative_to(ROOT)): f.stat().st_size for f in tracked_files()}
    assert sizes.pop("data/draft_head_smollm2-135m.safetensors") < 10_000_000
    assert {name: size for name, size in sizes.items() if size > 400_000} == {}


def test_makefile_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = next(line for line in text.splitlines() if line.startswith(".PHONY:")).split()[1:]
    helped = re.findall(r"^([a-z-]+):.*## ", text, flags=re.MULTILINE)
    assert sorted(phony) == sorted(helped)
    assert {
        "install",
        "study",
        "test",
        "lab",
        "lessons",
        "verify",
        "lint",
        "model",
        "doctor",
        "clean",
    } <= set(helped)


def test_readme_names_only_targets_and_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", readme):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"README names make {target}"
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", readme):
        assert (ROOT / link).exists(), f"README links to {link}"


def test_ci_script_is_strict_and_runs_the_readmes_commands() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    assert [line for line in script.splitlines() if line in ("make lint", "make test", "make lessons")] == [
        "make lint",
        "make test",
        "make lessons",
    ]


def test_readmes_python_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from perflab.models.tiny import tiny

    monkeypatch.setattr("perflab.engine.llm.load", lambda name: tiny("llama"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})
    assert capsys.readouterr().out.strip()


def test_readmes_commands_exist() -> None:
    from perflab import cli

    known = {c.name or c.callback.__name__ for c in cli.app.registered_commands if c.callback}
    known |= {str(group.name) for group in cli.app.registered_groups}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^\$ |`)perflab ([a-z]+)", readme, re.MULTILINE))
    assert named
    assert named <= known
