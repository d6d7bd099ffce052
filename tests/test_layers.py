"""The house's rules that a reader relies on: imports point one way and modules stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "perflab"
MAX_LINES = 350

BASE = ("types", "config", "errors", "clock")
LADDER = (
    "models",
    "engine",
    "speculate",
    "parallel",
    "serve",
    "load",
    "simulate",
    "studies",
    "report",
    "widgets",
    "cli",
)
MEASURE_USERS = {"serve", "load", "simulate", "studies", "report", "widgets", "cli"}


def allowed(part: str) -> set[str]:
    """The parts of the package that `part` may import, itself among them."""
    if part == "measure":
        return {*BASE, "measure"}
    if part in BASE:
        return set(BASE)
    below = set(LADDER[: LADDER.index(part) + 1])
    if part == "speculate":
        below.discard("parallel")
    elif part == "parallel":
        below.discard("speculate")
    return {*BASE, *below} | ({"measure"} if part in MEASURE_USERS else set())


def part_of(module: str) -> str:
    """`perflab.engine.kv` -> `engine`."""
    return module.split(".")[1]


def imported_modules(source: str, module: str, is_package: bool = False) -> set[str]:
    """Every perflab module that the source names in an import statement, at any depth of its functions."""
    found: set[str] = set()
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            # `from perflab import load` and `from . import x` name the part only in the alias
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "perflab" else {base}
    return {name for name in found if name.startswith("perflab.")}


def modules() -> list[tuple[str, Path]]:
    files = sorted(PACKAGE.rglob("*.py"))
    names = [".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files]
    return [(name, file) for name, file in zip(names, files, strict=True) if name != "perflab"]


def wrong_imports(module: str, source: str, is_package: bool = False) -> list[str]:
    own = part_of(module)
    names = sorted(imported_modules(source, module, is_package))
    return [f"{module} imports {name}" for name in names if part_of(name) not in allowed(own)]


@pytest.mark.parametrize(
    ("module", "source", "is_package", "wrong"),
    [
        ("perflab.models.load", "from perflab.types import Span", False, 0),
        ("perflab.models.load", "def f():\n    from perflab.engine.kv import KV", False, 1),
        ("perflab.models.load", "from ..engine import kv", False, 1),
        ("perflab.models", "from . import tiny", True, 0),
        ("perflab.models", "from .. import engine", True, 1),
        ("perflab.models.load", "from perflab import report", False, 1),
        ("perflab.measure.stats", "import perflab.engine.engine", False, 1),
        ("perflab.types", "from perflab.models.load import load", False, 1),
        ("perflab.report.html", "from perflab.measure.stats import mean", False, 0),
        ("perflab.engine.engine", "from perflab.measure.stats import mean", False, 1),
    ],
)
def test_the_rule_itself(module: str, source: str, is_package: bool, wrong: int) -> None:
    assert len(wrong_imports(module, source, is_package)) == wrong


def test_imports_point_one_way() -> None:
    assert len(modules()) > 10, "no modules found: the rest of this test would be empty"
    wrong = [
        line
        for name, file in modules()
        for line in wrong_imports(name, file.read_text(encoding="utf-8"), file.name == "__init__.py")
    ]
    assert wrong == []


def test_modules_stay_small() -> None:
    sizes = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in modules()}
    assert {name: lines for name, lines in sizes.items() if lines > MAX_LINES} == {}


def test_every_module_says_what_it_owns() -> None:
    sources = {name: file.read_text(encoding="utf-8") for name, file in modules()}
    assert [
        name for name, text in sources.items() if text.strip() and not ast.get_docstring(ast.parse(text))
    ] == []
