"""The tree is what pyproject.toml says, imports run downward, and compat alone knows torch.

What is private in torch, by import, by name or as an attribute of an object, is in compat alone.
Every check is a function from its subject to a list of faults, and is tried on a planted fault too.
"""

import ast
import functools
import os
import tomllib

import networkx as nx
import torch

from tests.sources import LINKED, ROOT, dotted, files, imports

# From the ground up: a module imports from its own floor and from those before it.
FLOORS = (
    ("errors", "notices", "text"),
    ("garbage", "host_memory", "option_values"),
    ("compat",),
    ("ir",),
    ("runtime.optim",),  # what an optimizer is: options, cost and the runtime ask
    ("packed",),
    ("log", "option_checks", "options", "validate"),
    ("progress",),
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
    ("callbacks",),
    ("lifetime",),
    ("cli",),
    ("", "__main__"),
)
APART = {"passes", "plan"}  # no part of the runtime but `runtime.model` knows who makes schedules


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
    folders = module.removeprefix("megacompile.").split(".")
    apart = folders[0] == "runtime" and folders[1:2] != ["model"]
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
            elif apart and rest.partition(".")[0] in APART:
                faults.append(f"{module}:{line}: runtime imports {target}")
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


def test_wrong_directions_are_found() -> None:
    modules = {
        f"megacompile.{m}" for m in ("passes", "passes.edit", "runtime", "views", "api", "ir")
    }
    for module, source, fault in UPWARD:
        (found,) = direction_faults(f"megacompile.{module}", source, modules)
        assert fault in found


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


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All of a source, parsed once for all checks."""
    return tuple(ast.walk(ast.parse(source)))


def is_private(name: str) -> bool:
    """Has a dotted name a part that is private by its underscore?"""
    return any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def private_torch_faults(source: str) -> list[str]:
    """Where a source imports or names a private part of torch, but for `torch.ops`."""
    names: dict[str, str] = {}  # local name -> what of torch it is
    used: list[tuple[int, str]] = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    used.append((node.lineno, alias.name))
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                used.append((node.lineno, f"{node.module}.{alias.name}"))
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes(source) if names else ():
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            first, _, rest = (dotted(node) or "").partition(".")
            if first in names:
                used.append((node.lineno, f"{names[first]}.{rest}"))
    faults = {(line, n) for line, n in used if is_private(n) and not n.startswith("torch.ops.")}
    return [f"{line}: {name}" for line, name in sorted(faults)]


ASKED_BY_NAME = {"delattr", "getattr", "hasattr", "setattr"}


@functools.cache
def names_of_torch() -> set[str]:
    """The private attributes of the objects that a model and its graphs are made of."""
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    graph = torch.fx.symbolic_trace(module)
    objects = (
        module,
        module.weight,
        optimizer,
        graph,
        graph.graph,
        next(iter(graph.graph.nodes)),
        torch.ops.aten.mm.default,
        torch.ops.aten.mm,
        module(torch.zeros(1, 1)).grad_fn,
    )
    return {name for each in objects for name in dir(each) if is_private(name)}


def private_attribute_faults(source: str) -> list[str]:
    """Where a source reads or sets a private attribute of torch's objects, but of `self`."""
    faults = []
    for node in nodes(source):
        if isinstance(node, ast.Attribute):
            value, name = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func) in ASKED_BY_NAME
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            value, name = node.args[0], str(node.args[1].value)
        else:
            continue
        known = dotted(value) in ("self", "cls") or (dotted(value) or "").startswith("torch.ops.")
        if name in names_of_torch() and not known:
            faults.append((node.lineno, f"{ast.unparse(value)}.{name}"))
    return [f"{line}: {text}" for line, text in sorted(faults)]


def test_what_is_private_in_torch_is_in_compat_alone() -> None:
    sources = {module: path.read_text() for module, path in files().items()}
    compat = {m: sources.pop(m) for m in tuple(sources) if m.startswith("megacompile.compat")}
    for folder in ("examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            sources[str(path.relative_to(ROOT))] = path.read_text()
    for check in (private_torch_faults, private_attribute_faults):
        assert sum(check(source) != [] for source in compat.values()) > 5
        faults = {module: check(source) for module, source in sources.items()}
        assert {module: found for module, found in faults.items() if found} == {}
