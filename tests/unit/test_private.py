"""What is private in torch, by import, by name or as an object's attribute, is in compat alone.

Every check is a function from a source to a list of faults, and is tried on planted faults too.
"""

import ast
import functools

import pytest
import torch

from tests.sources import ROOT, dotted, files


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All of a source, parsed once for all checks."""
    return tuple(ast.walk(ast.parse(source)))


def is_private(name: str) -> bool:
    """Has a dotted name a part that is private by its underscore?"""
    return any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def private_torch_faults(source: str) -> list[str]:
    """Where a source imports or names a private part of torch, under whatever name it has it.

    The operators below `torch.ops` are exempt: what a captured graph calls has those names.
    """
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
    """Where a source reads or sets a private attribute, of something else than `self`, that torch's
    objects have."""
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


@pytest.mark.parametrize(
    ("source", "attributes", "names"),
    [
        ("f(x)[0]._schema.arguments", ["1: f(x)[0]._schema"], []),
        ("getattr(p, '_version', 0)", ["1: p._version"], []),
        ("setattr(self.model, '_apply', f)", ["1: self.model._apply"], []),
        ("a._seen; self._base; row._replace(x=1); sys._getframe(1)", [], []),
        ("torch.ops.aten._to_copy.default; x.__dict__; getattr(x, name)", [], []),
        ("import torch._dynamo", [], ["1: torch._dynamo"]),
        ("from torch._inductor import compile", [], ["1: torch._inductor.compile"]),
        ("from torch.fx.graph import _Namespace", [], ["1: torch.fx.graph._Namespace"]),
        ("import torch as t\nx = t.Tensor._make", [], ["2: torch.Tensor._make"]),
        ("import torch\ntorch.ops.aten._to_copy.default", [], []),
        ("from torchvision import _x\nimport os\nos._exit", [], []),
    ],
)
def test_what_is_private_is_found(source: str, attributes: list[str], names: list[str]) -> None:
    found = private_attribute_faults(source), private_torch_faults(source)
    assert found == (attributes, names)
