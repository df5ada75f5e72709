"""The rules of tests/README.md that can be read off the sources of the tests.

A rule is a function from a source to its faults, and is tried on planted faults. Files that do not
keep one yet are in a list, which only shrinks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sources import ROOT, dotted, files, imports

PUBLIC = {
    "megacompile",
    "megacompile.errors",
    "megacompile.cli",
}  # and the data that all hand around:
DATA = "megacompile.ir"  # which everybody hands around
WITH_INSIDE = ("unit", "compat")  # tiers whose tests import the module that they test
# Modules of the product that all tests and `tests.inside` import together: 60 are enough.
MODULES = 125
# Tests in the other tiers that still import what is inside. Empty it.
IMPORTS = {
    "equality/test_abstract.py",
    "equality/test_backward_writes.py",
    "equality/test_capture_calls.py",
    "equality/test_capture_inputs.py",
    "equality/test_capture_modules.py",
    "equality/test_dtypes.py",
    "equality/test_eager.py",
    "equality/test_gpu.py",
    "equality/test_stay.py",
    "equality/test_templates.py",
    "messages/test_capture.py",
    "messages/test_ranks.py",
    "messages/test_schedules.py",
    "messages/test_stages.py",
    "messages/test_training.py",
    "models/test_api.py",
    "models/test_captured_schedules.py",
    "models/test_chunked_head.py",
    "models/test_code_to_come.py",
    "models/test_compiled_beside.py",
    "models/test_compiled_updates.py",
    "models/test_drafts.py",
    "models/test_experts.py",
    "models/test_gpu_memory.py",
    "models/test_inductor.py",
    "models/test_inductor_stages.py",
    "ranks/test_data_parallel.py",
    "ranks/test_replicas.py",
    "ranks/test_simulated.py",
    "stateful/test_compiled_updates.py",
    "stateful/test_first_calls.py",
    "stateful/test_fork.py",
    "stateful/test_interrupts.py",
    "stateful/test_kept_gradients.py",
    "stateful/test_optimizers.py",
    "stateful/test_released.py",
    "stateful/test_surroundings.py",
    "stateful/test_training.py",
}
# Tests that still quote sentences. Empty it.
SENTENCES = {
    "compat/test_dynamo.py",
    "equality/test_disk.py",
    "equality/test_streamed.py",
    "models/test_compiled_updates.py",
    "models/test_gpu_memory.py",
    "ranks/test_data_parallel.py",
    "ranks/test_one_rank.py",
    "ranks/test_simulated.py",
    "stateful/test_bad_states.py",
    "stateful/test_owners.py",
    "stateful/test_released.py",
    "unit/test_agreement.py",
    "unit/test_compiled_updates.py",
    "unit/test_damaged_files.py",
    "unit/test_floats.py",
    "unit/test_scratch.py",
    "unit/test_verify_ranks.py",
}
# Tests that patch what is ours, and why nothing can be given there. Empty it.
PATCHES: dict[str, str] = {}


def converted() -> dict[str, str]:
    """The sources of the tests in the tier folders, by their path below tests/."""
    folder = ROOT / "tests"
    paths = (path for path in folder.glob("*/test_*.py") if path.parent.name != "zoo")
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(paths)}


def ours(source: str, modules: set[str]) -> Iterator[tuple[str, int]]:
    """The modules of the product that a source imports, but for the public ones, and where."""
    for target, line, _ in imports(source, modules):
        is_public = target in PUBLIC or target == DATA or target.startswith(f"{DATA}.")
        if target.partition(".")[0] == "megacompile" and not is_public:
            yield target, line


def import_faults(tier: str, source: str, modules: set[str]) -> list[str]:
    """What a test of a tier imports that is inside of the product."""
    if tier in WITH_INSIDE:
        return []
    return [f"{line}: imports {target}" for target, line in ours(source, modules)]


def patch_faults(source: str) -> list[str]:
    """Where a test sets an attribute of what it has imported from the product."""
    tree = ast.parse(source)
    names: set[str] = set()
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
            if str(text).partition(".")[0] in names | {"megacompile", "benchmarks"}:
                faults.append(f"{place.lineno}: patches {text}")
    return sorted(faults)


def _set_by(node: ast.AST) -> list[ast.expr]:
    """What a statement or a call sets an attribute of, or puts another thing in the place of."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        else:
            targets = [node.target]
        return [target.value for target in targets if isinstance(target, ast.Attribute)]
    if isinstance(node, ast.Call) and node.args:
        called = (dotted(node.func) or "").split(".")
        if called[-1] in ("setattr", "delattr") or called[-2:] == ["patch", "object"]:
            return [node.args[0]]
        if called[-1] == "patch" and isinstance(node.args[0], ast.Constant):
            return [node.args[0]]
    return []


def test_tests_import_the_public_api() -> None:
    modules = set(files())
    found = {
        path: import_faults(path.partition("/")[0], source, modules)
        for path, source in converted().items()
    }
    faulty = {path: faults for path, faults in found.items() if faults}
    assert {path: faults for path, faults in faulty.items() if path not in IMPORTS} == {}
    assert faulty.keys() == IMPORTS, "the list has no file without need"


def test_tests_patch_nothing_of_ours() -> None:
    found = {path: patch_faults(source) for path, source in converted().items()}
    patched = {path: faults for path, faults in found.items() if faults}
    assert {path: faults for path, faults in patched.items() if path not in PATCHES} == {}
    assert patched.keys() == PATCHES.keys(), "the list has no file without need"


def test_few_modules_are_imported() -> None:
    modules = set(files())
    sources = [*converted().values(), (ROOT / "tests" / "inside.py").read_text()]
    found = {target for source in sources for target, _ in ours(source, modules)}
    assert len(found) <= MODULES, sorted(found)


def test_messages_are_in_one_folder() -> None:
    """Elsewhere `match=` has one identifier or number, not words of a sentence."""
    found = {path: sentence_faults(source) for path, source in converted().items()}
    own = {
        path: faults
        for path, faults in found.items()
        if faults and not path.startswith("messages/")
    }
    assert {path: faults for path, faults in own.items() if path not in SENTENCES} == {}
    assert own.keys() == SENTENCES, "the list has no file without need"


LIBRARIES = {"ValueError", "KeyError", "RuntimeError", "AssertionError", "SystemExit"}


def sentence_faults(source: str) -> list[str]:
    """Where `pytest.raises` or `pytest.warns` matches three words or more of a message of ours."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and dotted(node.func) in RAISES and node.args):
            continue
        if dotted(node.args[0]) in LIBRARIES:
            continue  # which a test plants itself
        for keyword in node.keywords:
            if keyword.arg == "match" and isinstance(keyword.value, ast.Constant):
                text = repr(keyword.value.value)
                if len(text.split()) > 2:
                    faults.append(f"{node.lineno}: {text[1:-1]}")
    return faults


RAISES = ("pytest.raises", "pytest.warns")


@pytest.mark.parametrize(
    ("tier", "source", "faults"),
    [
        ("models", "from megacompile.plan import planner", ["1: imports megacompile.plan.planner"]),
        ("ranks", "import megacompile.api", ["1: imports megacompile.api"]),
        ("equality", "from megacompile import compat", ["1: imports megacompile.compat"]),
        ("models", "def f():\n  import megacompile.log", ["2: imports megacompile.log"]),
        ("models", "from megacompile import megacompile, OptionError", []),
        ("models", "import megacompile as mc\nfrom megacompile.errors import TraceError", []),
        ("stateful", "from megacompile.ir import ops\nfrom tests import inside", []),
        ("unit", "from megacompile.plan import planner", []),
    ],
)
def test_imports_of_the_inside_are_found(tier: str, source: str, faults: list[str]) -> None:
    assert import_faults(tier, source, set(files())) == faults


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("from megacompile import api\np.setattr(api, 'f', 1)", ["2: patches api"]),
        ("import megacompile.api as a\na.f = 1", ["2: patches a"]),
        ("from megacompile.plan.tries import Tries\nmonkeypatch.setattr(Tries, 'add', f)",
         ["2: patches Tries"]),
        ("from unittest import mock\nfrom megacompile.plan.tries import Tries\n"
         "with mock.patch.object(Tries, 'add'): pass", ["3: patches Tries"]),
        ("p.setattr('megacompile.api.f', 1)", ["1: patches megacompile.api.f"]),
        ("@mock.patch('megacompile.api.f')\ndef f(): pass", ["1: patches megacompile.api.f"]),
        ("from megacompile import numa\ndel numa.node_of", ["2: patches numa"]),
        ("from megacompile import numa\nmodel.numa.x = 1\nnuma.bind(1)", []),
        ("import torch\np.setattr(torch.cuda, 'synchronize', f)\np.setattr('os.getpid', f)", []),
    ],
)  # fmt: skip
def test_patches_are_found(source: str, faults: list[str]) -> None:
    assert patch_faults(source) == faults


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("with pytest.raises(OptionError, match='there are 2 CUDA devices'): f()", 1),
        ("with pytest.warns(UserWarning, match='said once for all'): f()", 1),
        ("with pytest.raises(OptionError, match='lookahead'): f()", 0),
        ("with pytest.raises(ValueError, match='in the stage of ours'): f()", 0),
    ],
)
def test_sentences_are_found(source: str, count: int) -> None:
    assert len(sentence_faults(source)) == count
