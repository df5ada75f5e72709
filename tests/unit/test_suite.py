"""What can be read off sources: the rules of tests/README.md, and what a page must have.

A rule is a function from a test's path and source to its faults, and is tried on planted faults.
docs/troubleshooting.md has the first words of every error and warning that a user can get, `...`
for what varies: the message of each `raise` of a `MegacompileError`, of each `warnings.warn`, and
each reason why a head is not computed in chunks, because a warning ends with it. Left out are
messages with fewer than three words of their own, which pass another error's text on.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megacompile import errors
from tests.faults.fault import check
from tests.faults.listed import FAULTS
from tests.sources import ROOT, dotted, files, imports

PUBLIC = {"megacompile", "megacompile.errors", "megacompile.cli"}
DATA = "megacompile.ir"  # which everybody hands around
WITH_INSIDE = ("unit", "compat")  # tiers whose tests import the module that they test
# Modules of the product that all tests and `tests.inside` import together.
MODULES = 60
# What has a message of its own, which a test plants itself.
LIBRARIES = {"ValueError", "KeyError", "RuntimeError", "AssertionError", "SystemExit"}


@functools.cache
def sources() -> dict[str, str]:
    """The sources of the tests in the tier folders, by their path below tests/."""
    folder = ROOT / "tests"
    paths = (path for path in folder.glob("*/test_*.py") if path.parent.name != "zoo")
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(paths)}


def inside(source: str) -> Iterator[tuple[int, str]]:
    """The modules of the product that a source imports, but for the public ones, and where."""
    for target, line, _ in imports(source, set(files())):
        is_public = target in PUBLIC or target == DATA or target.startswith(f"{DATA}.")
        if target.partition(".")[0] == "megacompile" and not is_public:
            yield line, target


def imported(path: str, source: str) -> list[str]:
    """What a test imports that is inside of the product, outside the tiers that may."""
    is_free = path.partition("/")[0] in WITH_INSIDE
    return [] if is_free else [f"{line}: {target}" for line, target in inside(source)]


def patched(path: str, source: str) -> list[str]:
    """Where a test sets an attribute of what it has imported from the product."""
    tree = ast.parse(source)
    names = {"megacompile", "benchmarks"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = getattr(node, "module", None)
            for alias in node.names:
                if (origin or alias.name).partition(".")[0] in ("megacompile", "benchmarks"):
                    names.add(alias.asname or alias.name.partition(".")[0])
    faults = []
    for node in ast.walk(tree):
        for place in _set_by(node):
            text: Any = place.value if isinstance(place, ast.Constant) else dotted(place)
            if str(text).partition(".")[0] in names:
                faults.append(f"{place.lineno}: {text}")
    return faults


def _set_by(node: ast.AST) -> list[ast.expr]:
    """What a statement or a call sets an attribute of, or puts another thing in the place of."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
        return [target.value for target in targets if isinstance(target, ast.Attribute)]
    if isinstance(node, ast.Call) and node.args:
        called = (dotted(node.func) or "").split(".")
        if called[-1] in ("setattr", "delattr") or called[-2:] == ["patch", "object"]:
            return [node.args[0]]
        if called[-1] == "patch" and isinstance(node.args[0], ast.Constant):
            return [node.args[0]]
    return []


def quoted(path: str, source: str) -> list[str]:
    """Where a test matches three words or more of a message of ours, but in tests/messages."""
    faults = []
    for node in ast.walk(ast.parse("" if path.startswith("messages/") else source)):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        if dotted(node.func) not in ("pytest.raises", "pytest.warns"):
            continue
        for keyword in node.keywords if dotted(node.args[0]) not in LIBRARIES else ():
            if keyword.arg == "match" and isinstance(keyword.value, ast.Constant):
                text = repr(keyword.value.value)[1:-1]
                faults += [f"{node.lineno}: {text}"] if len(text.split()) > 2 else []
    return faults


Rule = Callable[[str, str], list[str]]


@pytest.mark.parametrize("rule", [imported, quoted, patched])
def test_tests_keep_a_rule(rule: Rule) -> None:
    found = {path: rule(path, source) for path, source in sources().items()}
    assert {path: faults for path, faults in found.items() if faults} == {}


def test_few_modules_are_imported() -> None:
    every = [*sources().values(), (ROOT / "tests" / "inside.py").read_text()]
    found = {target for source in every for _, target in inside(source)}
    assert len(found) <= MODULES, sorted(found)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["matrix-0", "examples"])
def test_what_the_makefile_runs_is_there(target: str) -> None:
    command = ["make", "-n", target, "MATRIX_0=there", "PY=python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [word for word in done.stdout.split() if word.startswith("tests/")]
    assert len(paths) > 5 and [path for path in paths if not (ROOT / path).exists()] == []


PLANTED: list[tuple[Rule, str, str, list[str]]] = [
    (imported, "models", "from megacompile.plan import planner", ["1: megacompile.plan.planner"]),
    (imported, "models", "import megacompile as m\nfrom megacompile.errors import TraceError", []),
    (imported, "unit", "from megacompile.plan import planner", []),
    (patched, "", "from megacompile import api\np.setattr(api, 'f', 1)", ["2: api"]),
    (patched, "", "@mock.patch('megacompile.api.f')\ndef f(): pass", ["1: megacompile.api.f"]),
    (patched, "", "from megacompile import log\nmodel.log.x = 1\ndel log.f", ["3: log"]),
    (quoted, "", "with pytest.raises(OptionError, match='there are 2'): f()", ["1: there are 2"]),
    (quoted, "messages/", "with pytest.raises(OptionError, match='there are 2'): f()", []),
    (quoted, "", "with pytest.raises(ValueError, match='in the stage of ours'): f()", []),
]  # fmt: skip


def test_faults_are_found() -> None:
    for rule, path, source, faults in PLANTED:
        assert rule(path, source) == faults, (rule.__name__, source)


PAGE = ROOT / "docs" / "troubleshooting.md"
FIRST = 8  # words of a message that the page must have
HOLE = "..."
REASONS = ("_Whole",)  # raised for their text, which a warning ends with
WARNS = ("warn", "warn_once")
SAYS = ("_say",)  # methods that warn with their argument
MADE = ("_refused",)  # methods that make an error of their argument
SAID = ("ignored_options", "unsupported_reason")  # functions whose text a warning passes on


def called(node: ast.AST | None) -> str:
    """The last name of what a call calls; "" for anything else."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


Named = Mapping[str, list[ast.FunctionDef]]  # the functions of each name


def texts(node: ast.AST | None, named: Named) -> list[str]:
    """The messages that an expression may be: its own, `...` where it is computed, or those that
    the function that it calls returns."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = (texts(v, {}) if isinstance(v, ast.Constant) else [HOLE] for v in node.values)
        return ["".join(itertools.chain(*parts))]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = (texts(side, {}) for side in (node.left, node.right))
        return ["".join((left or [HOLE]) + (right or [HOLE]))] if left or right else []
    return returned(called(node), named)


def returned(name: str, named: Named) -> list[str]:
    """The texts that functions of a name return."""
    parts = [node for function in named.get(name, ()) for node in ast.walk(function)]
    return [text for n in parts if isinstance(n, ast.Return) for text in texts(n.value, {})]


def messages(modules: Mapping[str, ast.Module]) -> dict[str, str]:
    """Message -> where it is raised or warned."""
    every = [(path, node) for path, module in modules.items() for node in ast.walk(module)]
    known = {name for name in vars(errors) if name.endswith("Error")}  # and what derives from them
    named: dict[str, list[ast.FunctionDef]] = {}
    for _, node in every:
        if isinstance(node, ast.FunctionDef):
            named.setdefault(node.name, []).append(node)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b) in known for b in node.bases):
            known.add(node.name)
    found: dict[str, str] = {}
    for path, node in every:
        call = node.exc if isinstance(node, ast.Raise) else node
        says = {*known, *REASONS, *MADE} if isinstance(node, ast.Raise) else {*WARNS, *SAYS}
        if isinstance(call, ast.Call) and call.args and called(call) in says:
            given = call.args[called(call) == "warn_once"]  # after its subject
            found |= dict.fromkeys(texts(given, named), f"{path}:{call.lineno}")
    for name in SAID:
        found |= dict.fromkeys(returned(name, named), name)
    return found


def first_words(message: str) -> str:
    """What the page must have of a message; "" where it has too few words of its own."""
    line = message.partition("\n")[0].replace("(shown once)", "")
    words = re.sub(r"^[^a-zA-Z-]+", "", line).split()  # it may begin with what varies
    own = [word for word in words if re.search(r"[a-zA-Z]{2}", word)]
    return " ".join(words[:FIRST]) if len(own) >= 3 else ""


def plain(page: str) -> str:
    """The text of a page without its marks."""
    return " ".join(re.sub(r"\.{4,}", HOLE, page.replace("`", "")).split())


def missing(found: Mapping[str, str], page: str) -> list[str]:
    """The messages that a page does not have."""
    text = plain(page)
    wanted = [(place, plain(first_words(message))) for message, place in found.items()]
    return [f"{place}: {words}" for place, words in wanted if words not in text]


def test_every_message_is_in_the_page() -> None:
    found = messages({str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in files().values()})
    assert len(found) > 100 and set(SAID) <= set(found.values())
    assert missing(found, PAGE.read_text()) == []


def test_every_fault_applies_and_compiles() -> None:
    check(FAULTS, Path(__file__).parents[2])
    assert len(FAULTS) >= 160
