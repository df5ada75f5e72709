"""The sources of the product and of its tests, and what they import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("passes", "runtime")  # top-level folders that are subpackages of megacompile


@cache
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


def dotted(node: ast.expr) -> str | None:
    """The text of `a.b.c`; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return None if value is None else f"{value}.{node.attr}"
    return None
