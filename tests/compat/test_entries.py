"""Every entry of compat states the versions of torch that it was seen on, and has a test.

The tests of what the entries do are beside this file, by subject. They ask torch itself, so they
fail where a new version does something else: `make matrix` runs them on every version.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

from megacompile import compat

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"torch (\d\.\d+) to (\d\.\d+)")
ALIASES = {"Tensors"}  # types of this package's own


def entries(source: str) -> dict[str, str]:
    """The public functions, classes and constants of a module, with how each begins."""
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name, stop = node.name, node.body[0].lineno - 1
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, stop = node.targets[0].id, node.end_lineno or 0
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, stop = node.target.id, node.end_lineno or 0
        else:
            continue
        if not name.startswith("_") and name not in ALIASES:
            found[name] = "\n".join(lines[node.lineno - 1 : stop])
    return found


def unmarked(source: str, versions: tuple[str, str]) -> list[str]:
    """The entries that do not say that they were seen on these versions, the first and the last."""
    return [
        name
        for name, text in entries(source).items()
        if (mark := MARK.search(text)) is None or mark.groups() != versions
    ]


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


def test_every_entry_states_its_versions() -> None:
    versions = (matrix()[0], matrix()[-1])
    faults = {name: unmarked(source, versions) for name, source in SOURCES.items()}
    assert {name: found for name, found in faults.items() if found} == {}


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


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("def f():  # torch 2.11 to 2.15\n  pass", []),
        ("@d\ndef f(\n  a,\n) -> None:  # torch 2.11 to 2.15\n  pass", []),
        ("A = (  # torch 2.11 to 2.15\n  1,\n)", []),
        ("def _f(): ...\n_A = 1", []),
        ("def f():\n  return 1  # torch 2.11 to 2.15", ["f"]),
        ("def f():  # torch 2.11 to 2.13\n  pass\nA = 1", ["f", "A"]),
    ],
)
def test_entries_without_their_versions_are_found(source: str, faults: list[str]) -> None:
    assert unmarked(source, ("2.11", "2.15")) == faults


def test_entries_without_a_test_are_found() -> None:
    tests = ["def test_a():\n  assert compat.a\ncompat.b", "def test_c():\n  x.d"]
    assert uncovered({"a", "b", "d"}, tests) == {"b", "d"}
