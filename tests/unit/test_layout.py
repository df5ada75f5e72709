"""The tree is what pyproject.toml says, and imports run downward.

Every check is a function from its subject to a list of faults, and is tried on a planted fault too.
"""

import os
import tomllib

import networkx as nx

from tests.sources import LINKED, ROOT, files, imports

# From the ground up: a module imports from its own floor and from those before it.
FLOORS = (
    ("errors", "notices", "text"),
    ("garbage", "host_memory", "option_values"),
    ("compat",),
    ("ir",),
    ("runtime.optim",),  # what an optimizer is: options, cost and the runtime ask
    ("packed",),
    ("log", "option_checks", "options", "validate"),
    ("numa", "progress"),
    ("runtime.device.forks",),
    ("runtime.device.background",),
    ("beside",),
    ("runtime.disk",),  # the cost model measures it
    ("cost",),
    ("views",),
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


def test_packages_are_the_tree() -> None:
    """Those that pyproject.toml names, and the links to folders beside `megacompile`."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"megacompile": "megacompile", **{f"megacompile.{n}": n for n in LINKED}}
    assert setuptools["package-dir"] == folders
    for name in LINKED:
        assert os.readlink(ROOT / "megacompile" / name) == f"../{name}"
    tree = {
        ".".join((package, *path.parent.relative_to(ROOT / folder).parts))
        for package, folder in folders.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    packages = {
        ".".join((package, *path.parent.relative_to(ROOT / folder).parts))
        for package, folder in folders.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert tree == packages == set(setuptools["packages"])


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
    ("runtime.ops.bound", "from megacompile.passes import edit", "runtime imports"),
    ("views.python", "from megacompile import api", "above it"),
    ("ir.ops", "def f():\n  from megacompile import views", "above it"),
    ("options", "if 1:\n  import megacompile.elsewhere", "above it"),
    ("api", "from passes import edit", "imports passes, needed megacompile.passes"),
    ("api", "from . import ir", "a relative import"),
    ("runtime.helper", "", "is on no floor"),
)
DOWNWARD = (
    ("api", "from megacompile import runtime, views, ir\nfrom megacompile.plan import compiler"),
    (
        "passes.schedule.assign_slots",
        "from megacompile.passes.edit import x\nimport megacompile.ir.ops",
    ),
    ("views.graph", "import torch.fx\nfrom runtime_of_others import x"),
)


def test_wrong_directions_are_found() -> None:
    modules = {
        f"megacompile.{m}" for m in ("passes", "passes.edit", "runtime", "views", "api", "ir")
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
    sources = {"m.a": "import m.b", "m.b": "def f():\n  from m import c", "m.c": "import m.a"}
    assert circles({**sources, "m.d": "import m.a"}) == [["m.a", "m.b", "m.c"]]
