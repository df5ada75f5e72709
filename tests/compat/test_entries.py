"""Every entry of compat has a test, and the package states the versions of torch.

The tests of what the entries do are beside this file, by subject. They ask torch itself, so they
fail where a new version does something else: `make matrix` runs them on every version.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

from megacompile import compat

ROOT = Path(__file__).resolve().parents[2]
ALIASES = {"Tensors"}  # types of this package's own


def entries(source: str) -> set[str]:
    """The public functions, classes and constants of a module."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.add(node.targets[0].id)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if not name.startswith("_")} - ALIASES


def uncovered(names: set[str], tests: list[str]) -> set[str]:
    """The names that no test function asks `compat` for."""
    asked = set()
    for source in tests:
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                        if node.value.id == "compat":
                            asked.add(node.attr)
    return names - asked


def matrix() -> list[str]:
    """The versions that `make matrix` runs, oldest first."""
    found = re.search(r"^MATRIX \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].split()


SOURCES = {
    path.stem: path.read_text()
    for path in (ROOT / "megacompile" / "compat").glob("*.py")
    if path.stem != "__init__"
}
HOMES = {name: stem for stem, source in SOURCES.items() for name in entries(source)}
ENTRIES = {*HOMES}


def test_the_package_states_its_versions() -> None:
    assert f"torch {matrix()[0]} to {matrix()[-1]}:" in (compat.__doc__ or "")


def test_every_entry_is_what_callers_get() -> None:
    """No other module of the package has an import of that name."""
    for name, stem in HOMES.items():
        home = importlib.import_module(f"megacompile.compat.{stem}")
        assert getattr(compat, name) is getattr(home, name), name


def test_every_entry_has_a_test() -> None:
    tests = [path.read_text() for path in (ROOT / "tests" / "compat").glob("test_*.py")]
    assert uncovered(ENTRIES, tests) == set()


def test_the_bounds_of_torch_are_what_the_matrix_runs() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = [each for each in dependencies if re.match(r"torch\W", each)]
    major, minor = matrix()[-1].split(".")
    assert torch == f"torch>={matrix()[0]},<{major}.{int(minor) + 1}"


def test_entries_without_a_test_are_found() -> None:
    tests = ["def test_a():\n  assert compat.a\ncompat.b", "def test_c():\n  x.d"]
    assert uncovered({"a", "b", "d"}, tests) == {"b", "d"}
