"""A fault, and where the probe goes that tells which tests reach it."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_IDLE = re.compile(r"#.*|\s")  # comments, spaces
PROBE = '__import__("_faults_plugin").reached({!r})'


class Outgrown(Exception):
    """The product has changed: a fault of the list does not apply any more."""


@dataclass(frozen=True)
class Fault:
    """One edit of the product.

    Args:
        id: its name, unique in the list.
        path: the file, relative to the root of the repository.
        old: a text that occurs exactly once in the file.
        new: what stands there instead.
        wrong: what goes wrong then, one sentence.
        near: another text of the file, which occurs once: the probe goes there, where torch traces
            the function itself.
    """

    id: str
    path: str
    old: str
    new: str
    wrong: str
    near: str = ""

    def planted(self, source: str) -> str:
        """`source` with the fault; raises `Outgrown` where it does not apply."""
        if (count := source.count(self.old)) != 1:
            raise Outgrown(f"fault {self.id!r}: its old text occurs {count} times in {self.path}")
        if _IDLE.sub("", self.old) == _IDLE.sub("", self.new):
            raise Outgrown(f"fault {self.id!r} changes no code")
        if self.near and source.count(self.near) != 1:
            raise Outgrown(f"fault {self.id!r}: no place for its probe in {self.path}")
        return source.replace(self.old, self.new)


def check(faults: Sequence[Fault], root: Path) -> None:
    """Raise `Outgrown` unless all faults apply to the tree in `root`, and compile."""
    ids = [fault.id for fault in faults]
    for name in {name for name in ids if ids.count(name) > 1}:
        raise Outgrown(f"two faults are called {name!r}")
    for fault in faults:
        faulty = fault.planted((root / fault.path).read_text())
        try:
            compile(faulty, fault.path, "exec", ast.PyCF_ONLY_AST)
        except SyntaxError as error:
            raise Outgrown(f"fault {fault.id!r} does not compile: {error}") from error


def probed(source: str, faults: Sequence[Fault]) -> str:
    """`source` with a probe in the function that each fault changes, or in all functions."""
    tree = ast.parse(source)
    every = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for fault in faults:
        text = fault.near or fault.old
        at = source.index(text) + len(text) - len(text.lstrip())
        line = source.count("\n", 0, at) + 1
        around = [each for each in every if each.lineno <= line <= (each.end_lineno or 0)]
        for function in around[-1:] or every:  # walks go from the outside in
            documented = ast.get_docstring(function) is not None
            probe = ast.parse(PROBE.format(fault.id)).body[0]
            function.body.insert(int(documented), probe)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
