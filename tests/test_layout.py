"""The tree is what pyproject.toml says, imports run one way, and importing is silent.

Every check is a function from its subject to a list of faults, and is tried on a planted fault too.

    front (megacompile, __main__, cli/)
      |
     api, compiler, abstract   the only modules that import both passes and runtime
     / \\
    passes  runtime        never each other
     \\ /
    inspection (hazards, verify*, fusion, cost, memory, simulate, show, changes, timeline, ...)
      |
    base (ops, ir, errors, options, validate, compat, hardware, head, sizes, log)
"""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("passes", "runtime")  # top-level folders that are subpackages of megacompile
FOLDERS = (*LINKED, "cli")  # subpackages: their modules share a layer

LAYERS = {  # by module name below megacompile; "" is the package itself
    **dict.fromkeys(("", "__main__", "cli"), "front"),
    **dict.fromkeys(("api", "compiler", "alternatives", "abstract"), "api"),
    "passes": "passes",
    "runtime": "runtime",
    **dict.fromkeys(("hazards", "simulate", "show", "changes", "export"), "inspection"),
    **dict.fromkeys(("timeline", "critical", "prediction"), "inspection"),
    **dict.fromkeys(("perfetto", "plot"), "inspection"),
    **dict.fromkeys(("situation", "explanation"), "inspection"),
    **dict.fromkeys(("fusion", "cost", "memory", "optimizer_cost", "planner"), "inspection"),
    **dict.fromkeys(("verify", "verify_flow", "verify_activations"), "inspection"),
    **dict.fromkeys(("verify_gradients", "verify_memory"), "inspection"),
    **dict.fromkeys(("ops", "ir", "errors", "options", "validate", "compat", "hardware"), "base"),
    **dict.fromkeys(("head", "sizes", "log"), "base"),
}
MAY_IMPORT = {
    "front": {"api", "inspection", "base", "front"},
    "api": {"api", "passes", "runtime", "inspection", "base"},
    "passes": {"passes", "inspection", "base"},
    "runtime": {"runtime", "inspection", "base"},
    "inspection": {"inspection", "base"},
    "base": {"base"},
}
# Schedule's methods call these when they are called: inside a function, and nowhere else.
MAY_IMPORT_LATE = {
    ("megacompile.ir", f"megacompile.{name}") for name in ("show", "changes", "export")
}


# --- the tree


def files() -> dict[str, Path]:
    """Every module of the import package, by its dotted name."""
    found = {}
    for folder in ("megacompile", *LINKED):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if folder == "megacompile" and parts[1] in LINKED:
                continue  # the same file, seen through the link
            name = ".".join(parts if folder == "megacompile" else ("megacompile", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


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
    (tmp_path / "megacompile" / "passes").symlink_to("../passes")
    (tmp_path / "megacompile" / "runtime").symlink_to("../passes")
    setuptools = {
        "packages": [f"megacompile{name}" for name in ("", ".passes", ".runtime", ".gone")],
        "package-dir": {"megacompile": "megacompile"},
    }
    faults = package_faults({"tool": {"setuptools": setuptools}}, tmp_path)
    assert faults[0].startswith("package-dir is {'megacompile': 'megacompile'}, needed ")
    assert faults[1:] == [
        "megacompile/runtime is not a link to ../runtime",
        "passes has no __init__.py",
        "megacompile.passes.deep is in the tree, not in packages",
        "megacompile.gone is in packages, not in the tree",
    ]


# --- the import direction


class Import(NamedTuple):
    """One imported module."""

    target: str  # its dotted name
    line: int
    late: bool  # inside a function


def imports(source: str, modules: set[str]) -> Iterator[Import]:
    """What a source imports; `from a import b` is the module `a.b` if that is in `modules`."""

    def visit(node: ast.AST, late: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield Import(name if name in modules else origin, node.lineno, late)
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, late)

    yield from visit(ast.parse(source), late=False)


def layer(module: str) -> str | None:
    """The layer of one of our modules; None where `LAYERS` does not know it."""
    name = module.removeprefix("megacompile").removeprefix(".")
    folder = name.partition(".")[0]
    return LAYERS.get(folder if folder in FOLDERS else name)


def direction_faults(module: str, source: str, modules: set[str]) -> list[str]:
    """The imports of a module that go against the direction, or around the package."""
    importer = layer(module)
    if importer is None:
        return [f"{module} is in no layer: give it one in tests/test_layout.py and DESIGN's layout"]
    faults = []
    for target, line, late in imports(source, modules):
        root = target.partition(".")[0]
        if root == "":
            faults.append(f"{module}:{line}: a relative import")
        elif root in LINKED:
            faults.append(f"{module}:{line}: imports {target}, needed megacompile.{target}")
        elif root == "megacompile":
            allowed = late and (module, target) in MAY_IMPORT_LATE
            if layer(target) not in MAY_IMPORT[importer] and not allowed:
                faults.append(f"{module}:{line}: {importer} imports {layer(target)}: {target}")
    return faults


def test_imports_run_one_way() -> None:
    modules = files()
    assert {"megacompile", "megacompile.ir", "megacompile.passes"} <= set(modules)
    faults = [
        fault
        for module, path in modules.items()
        for fault in direction_faults(module, path.read_text(), set(modules))
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("passes.slots", "import megacompile.runtime.streams", "passes imports runtime"),
        ("runtime.slots", "from megacompile.passes import edit", "runtime imports passes"),
        ("runtime.slots", "from megacompile import passes", "runtime imports passes"),
        ("passes.slots", "from megacompile import megacompile", "passes imports front"),
        (
            "verify",
            "def f():\n  import megacompile.passes.edit",
            "inspection imports passes",
        ),
        ("show", "from megacompile import api", "inspection imports api"),
        ("ops", "from megacompile.show import table", "base imports inspection"),
        ("ir", "from megacompile import show", "base imports inspection"),  # not late
        ("ops", "def f():\n  from megacompile import show", "base imports inspection"),
        ("cli", "from megacompile.passes import edit", "front imports passes"),
        ("options", "if 1:\n  import megacompile.elsewhere", "base imports None"),
        ("api", "from passes import edit", "imports passes, needed megacompile.passes"),
        ("api", "import runtime.slots", "imports runtime.slots, needed megacompile.runtime.slots"),
        ("api", "from . import ir", "a relative import"),
        ("helper", "", "is in no layer"),
    ],
)
def test_wrong_directions_are_found(module: str, source: str, fault: str) -> None:
    modules = {f"megacompile.{m}" for m in ("passes", "passes.edit", "show", "api", "runtime")}
    (found,) = direction_faults(f"megacompile.{module}", source, modules)
    assert fault in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("api", "from megacompile import passes, runtime, show, ir"),
        ("passes.slots", "from megacompile.passes.edit import x\nfrom megacompile import ops"),
        ("ir", "def table():\n  from megacompile import show"),
        ("", "from megacompile.api import megacompile"),
        ("show", "import torch.fx\nfrom runtime_of_others import x"),
    ],
)
def test_right_directions_pass(module: str, source: str) -> None:
    modules = {f"megacompile.{m}" for m in ("passes", "runtime", "show", "ir", "ops")}
    assert direction_faults(f"megacompile.{module}".rstrip("."), source, modules) == []


# --- private torch APIs


def is_private(name: str) -> bool:
    """Whether a part of a dotted name is private by its underscore."""
    return any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def dotted(node: ast.expr) -> str | None:
    """The text of `a.b.c`; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return None if value is None else f"{value}.{node.attr}"
    return None


def private_torch_faults(source: str) -> list[str]:
    """Where a source imports or names a private part of torch, under whatever name it has it.

    The operators below `torch.ops` are exempt: what a captured graph calls has those names.
    """
    tree = ast.parse(source)
    names: dict[str, str] = {}  # local name -> what of torch it is
    used: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    used.append((node.lineno, alias.name))
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                used.append((node.lineno, f"{node.module}.{alias.name}"))
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)) is not None:
            first, _, rest = name.partition(".")
            if first in names and is_private(node.attr):
                used.append((node.lineno, f"{names[first]}.{rest}"))
    faults = {(line, n) for line, n in used if is_private(n) and not n.startswith("torch.ops.")}
    return [f"{line}: {name}" for line, name in sorted(faults)]


def test_private_torch_is_in_compat_alone() -> None:
    modules = files()
    assert private_torch_faults(modules.pop("megacompile.compat").read_text()) != []
    for path in (ROOT / "examples").glob("*.py"):
        modules[f"examples/{path.name}"] = path
    faults = {module: private_torch_faults(path.read_text()) for module, path in modules.items()}
    assert {module: found for module, found in faults.items() if found} == {}


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("import torch\ntorch._C._x()", ["2: torch._C", "2: torch._C._x"]),
        ("import torch._dynamo", ["1: torch._dynamo"]),
        ("from torch import _dynamo", ["1: torch._dynamo"]),
        ("from torch._inductor import compile", ["1: torch._inductor.compile"]),
        ("from torch.fx.graph import _Namespace", ["1: torch.fx.graph._Namespace"]),
        ("import torch as t\nx = t.Tensor._make", ["2: torch.Tensor._make"]),
        ("from torch import nn\nnn.Module._call_impl", ["2: torch.nn.Module._call_impl"]),
        ("import torch.utils._pytree as p", ["1: torch.utils._pytree"]),
        ("import torch\ntorch.ops.aten._to_copy.default", []),
        ("import torch\ntorch.Tensor.__torch_function__\nself._x\nx._torch", []),
        ("from torchvision import _x\nimport os\nos._exit", []),
    ],
)
def test_private_torch_is_found(source: str, faults: list[str]) -> None:
    assert private_torch_faults(source) == faults


# --- importing


def import_faults(statement: str) -> list[str]:
    """What a statement does in a new interpreter, once torch is there, that an import must not."""
    program = (
        "import sys, torch\n"
        "print('torch is here', flush=True)\n"
        "print('torch is here', file=sys.stderr, flush=True)\n"
        f"{statement}\n"
        "sys.exit(3 if torch.cuda.is_initialized() else 0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    faults = []
    for stream, text in (("stdout", done.stdout), ("stderr", done.stderr)):
        printed = text.partition("torch is here\n")[2]
        if printed:
            faults.append(f"prints on {stream}: {printed}")
    if done.returncode == 3:
        faults.append("starts a CUDA context")
    elif done.returncode:
        faults.append(f"exits with {done.returncode}")
    return faults


def test_import_is_silent_and_takes_no_device() -> None:
    assert import_faults("import megacompile") == []


def test_noisy_import_is_found() -> None:
    noise = "print('hi'); print('ho', file=sys.stderr); torch.cuda.is_initialized = lambda: True"
    assert import_faults(noise) == [
        "prints on stdout: hi\n",
        "prints on stderr: ho\n",
        "starts a CUDA context",
    ]
    (printed, exited) = import_faults("raise ImportError('no')")
    assert "ImportError: no" in printed
    assert exited == "exits with 1"
