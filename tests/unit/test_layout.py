"""The tree is what pyproject.toml says, imports run downward, and importing is silent.

Every check is a function from its subject to a list of faults, and is tried on a planted fault too.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import networkx as nx

from tests.sources import LINKED, ROOT, files, imports

# From the ground up: a module imports from its own floor and from those before it.
FLOORS = (
    ("errors", "notices", "text"),
    ("choices", "code_counts", "garbage", "host_memory", "page_locks", "products", "sizes"),
    ("compat",),
    ("ir",),
    ("runtime.optim",),  # what an optimizer is: options, cost and the runtime ask
    ("packed",),
    ("log", "mesh_options", "option_checks", "options", "validate"),
    ("numa", "progress"),
    ("runtime.device.live",),
    ("runtime.device.forks",),
    ("runtime.device.background",),
    ("beside",),
    ("runtime.disk",),  # the cost model measures it
    ("cost",),
    ("tracing",),
    ("show",),
    ("verify",),
    ("passes.edit",),
    ("passes.capture",),
    ("passes.stages",),
    ("passes.schedule",),
    ("plan",),
    ("runtime.device",),
    ("runtime.checkpoint",),  # what fills the buckets of a model
    ("runtime.params",),
    ("runtime.updates",),
    ("runtime.ops",),
    ("runtime.step",),
    ("runtime.model",),
    ("api", "inspection"),
    ("lifetime",),
    ("cli",),
    ("", "__main__"),
)
APART = {"runtime": {"passes", "plan"}}  # who carries schedules out does not make them


# --- the tree


def package_faults(pyproject: dict[str, Any], root: Path) -> list[str]:
    """How the package list and the folders of pyproject.toml differ from the tree."""
    setuptools = pyproject["tool"]["setuptools"]
    folders: dict[str, str] = setuptools["package-dir"]
    faults = []
    expected = {"megacompile": "megacompile", **{f"megacompile.{n}": n for n in LINKED}}
    if folders != expected:
        faults.append(f"package-dir is {folders}, needed {expected}")
    for name in LINKED:
        link = root / "megacompile" / name
        if not link.is_symlink() or os.readlink(link) != f"../{name}":
            faults.append(f"megacompile/{name} is not a link to ../{name}")

    tree = set()
    for package, folder in expected.items():
        for path, subfolders, names in os.walk(root / folder):
            subfolders[:] = [s for s in subfolders if s != "__pycache__"]
            if any(name.endswith(".py") for name in names):
                parts = Path(path).relative_to(root / folder).parts
                tree.add(".".join((package, *parts)))
                if "__init__.py" not in names:
                    faults.append(f"{Path(path).relative_to(root)} has no __init__.py")
    listed = set(setuptools["packages"])
    faults += [f"{name} is in the tree, not in packages" for name in sorted(tree - listed)]
    faults += [f"{name} is in packages, not in the tree" for name in sorted(listed - tree)]
    return faults


def test_packages_are_the_tree() -> None:
    assert package_faults(tomllib.loads((ROOT / "pyproject.toml").read_text()), ROOT) == []


def test_package_faults_are_found(tmp_path: Path) -> None:
    for folder in ("megacompile", "passes/deep", "runtime"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "passes" / "prefetch.py").touch()
    for name in ("passes", "runtime"):
        (tmp_path / "megacompile" / name).symlink_to("../passes")
    packages = [f"megacompile{name}" for name in ("", ".passes", ".runtime", ".gone")]
    setuptools = {"packages": packages, "package-dir": {"megacompile": "megacompile"}}
    faults = package_faults({"tool": {"setuptools": setuptools}}, tmp_path)
    assert faults[0].startswith("package-dir is {'megacompile': 'megacompile'}, needed ")
    assert faults[1:] == [
        "megacompile/runtime is not a link to ../runtime",
        "passes has no __init__.py",
        "megacompile.passes.deep is in the tree, not in packages",
        "megacompile.gone is in packages, not in the tree",
    ]


# --- the import direction


def floor(module: str) -> int | None:
    """The floor of one of our modules; None where `FLOORS` does not know it."""
    name = module.removeprefix("megacompile").removeprefix(".")
    if name in LINKED:  # the package itself, which holds nothing
        return 0
    parts = name.split(".")
    floors = {name: i for i, known in enumerate(FLOORS) for name in known}
    names = (".".join(parts[:n]) for n in (3, 2, 1))  # a module before its package
    return next((floors[name] for name in names if name in floors), None)


def direction_faults(module: str, source: str, modules: set[str]) -> list[str]:
    """The imports of a module that go upward, across, or around the package."""
    importer = floor(module)
    if importer is None:
        return [f"{module} is on no floor: give it one in tests/unit/test_layout.py"]
    folder = module.removeprefix("megacompile.").partition(".")[0]
    faults = []
    for target, line, _ in imports(source, modules):
        root, _, rest = target.partition(".")
        if root == "":
            faults.append(f"{module}:{line}: a relative import")
        elif root in LINKED:
            faults.append(f"{module}:{line}: imports {target}, needed megacompile.{target}")
        elif root == "megacompile":
            imported = floor(target)
            if imported is None or imported > importer:
                faults.append(f"{module}:{line}: imports {target}, which is above it")
            elif rest.partition(".")[0] in APART.get(folder, ()):
                faults.append(f"{module}:{line}: {folder} imports {target}")
    return faults


def test_imports_run_downward() -> None:
    modules = files()
    assert {"megacompile", "megacompile.ir.ops", "megacompile.passes"} <= set(modules)
    faults = [
        fault
        for module, path in modules.items()
        for fault in direction_faults(module, path.read_text(), set(modules))
    ]
    assert faults == []


UPWARD = (
    ("passes.schedule.slots", "import megacompile.runtime.model.streamed", "above it"),
    ("runtime.ops.bound", "from megacompile.passes import edit", "runtime imports"),
    ("verify.proof", "def f():\n  import megacompile.passes.edit", "above it"),
    ("show.python", "from megacompile import api", "above it"),
    ("ir.ops", "def f():\n  from megacompile import show", "above it"),
    ("options", "if 1:\n  import megacompile.elsewhere", "above it"),
    ("api", "from passes import edit", "imports passes, needed megacompile.passes"),
    ("api", "from . import ir", "a relative import"),
    ("runtime.helper", "", "is on no floor"),
)
DOWNWARD = (
    ("api", "from megacompile import runtime, show, ir\nfrom megacompile.plan import compiler"),
    ("passes.schedule.slots", "from megacompile.passes.edit import x\nimport megacompile.ir.ops"),
    ("show.table", "import torch.fx\nfrom runtime_of_others import x"),
)


def test_wrong_directions_are_found() -> None:
    modules = {
        f"megacompile.{m}" for m in ("passes", "passes.edit", "runtime", "show", "api", "ir")
    }
    for module, source, fault in UPWARD:
        (found,) = direction_faults(f"megacompile.{module}", source, modules)
        assert fault in found
    for module, source in DOWNWARD:
        assert direction_faults(f"megacompile.{module}", source, modules) == []


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Modules that import one another, be it inside of functions."""
    graph = nx.DiGraph()
    for module, source in sources.items():
        for target, _, _ in imports(source, set(sources)):
            if target in sources and target != module:
                graph.add_edge(module, target)
    return [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]


def test_there_are_no_circles() -> None:
    assert circles({name: path.read_text() for name, path in files().items()}) == []


def test_circles_are_found() -> None:
    sources = {"m.a": "import m.b", "m.b": "def f():\n  from m import c", "m.c": "import m.a"}
    assert circles({**sources, "m.d": "import m.a"}) == [["m.a", "m.b", "m.c"]]


# --- importing


def test_import_is_silent_and_takes_no_device() -> None:
    program = (
        "import sys, torch\n"
        "print('torch is here', flush=True)\n"
        "print('torch is here', file=sys.stderr, flush=True)\n"
        "import megacompile\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, done.stderr):
        assert text.partition("torch is here\n")[2] == ""
