"""A fault, and where the probe goes that tells which tests reach it."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
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
            the statement itself.
    """

    id: str
    path: str
    old: str
    new: str
    wrong: str
    near: str = ""

    def at(self, source: str) -> int:
        """The offset in `source` of the first character that changes; raises `Outgrown`."""
        if (count := source.count(self.old)) != 1:
            raise Outgrown(f"fault {self.id!r}: its old text occurs {count} times in {self.path}")
        if _IDLE.sub("", self.old) == _IDLE.sub("", self.new):
            raise Outgrown(f"fault {self.id!r} changes no code")
        if self.near and source.count(self.near) != 1:
            raise Outgrown(f"fault {self.id!r}: no place for its probe in {self.path}")
        return source.index(self.old) + len(os.path.commonprefix([self.old, self.new]))

    def planted(self, source: str) -> str:
        """`source` with the fault; raises `Outgrown`, also if that does not compile."""
        self.at(source)
        faulty = source.replace(self.old, self.new)
        try:
            ast.parse(faulty)
        except SyntaxError as error:
            raise Outgrown(f"fault {self.id!r}: {self.path} does not compile: {error}") from error
        return faulty


def check(faults: Sequence[Fault], root: Path) -> None:
    """Raise `Outgrown` unless all faults apply to the tree in `root`."""
    ids = [fault.id for fault in faults]
    for name in {name for name in ids if ids.count(name) > 1}:
        raise Outgrown(f"two faults are called {name!r}")
    for path in {fault.path for fault in faults}:
        source = together = (root / path).read_text()
        group = [fault for fault in faults if fault.path == path]
        for fault in group:
            fault.at(source)
            if together.count(fault.old) == 1:  # most are apart: one parse for all of a file
                together = together.replace(fault.old, fault.new)
            else:
                fault.planted(source)
        try:
            ast.parse(together)
        except SyntaxError:
            for fault in group:
                fault.planted(source)
            raise


def probed(source: str, faults: Sequence[Fault]) -> str:
    """`source` with a probe ahead of the statement that each fault changes; of a signature, in the
    function; outside of functions, in all functions of the file."""
    tree = ast.parse(source)
    inserts: list[tuple[list[ast.stmt], ast.stmt | None, str]] = []
    for fault in faults:
        at = source.index(fault.near) if fault.near else fault.at(source)
        before = source[: at + len(source[at:]) - len(source[at:].lstrip())]
        line = before.count("\n") + 1
        column = len(before.rpartition("\n")[2].encode())  # ast counts bytes
        path = list(_enclosing(tree, (line, column)))
        functions = [node for _, node in path if isinstance(node, Function)]
        if not functions:
            everywhere = [node for node in ast.walk(tree) if isinstance(node, Function)]
            inserts += [(node.body, None, fault.id) for node in everywhere]
            continue
        body, statement = path[-1]
        if isinstance(statement, Function):
            inserts.append((statement.body, None, fault.id))
        elif isinstance(statement, ast.ClassDef):
            inserts.append((functions[-1].body, None, fault.id))
        else:
            inserts.append((body, statement, fault.id))
    for body, following, name in inserts:
        probe = ast.parse(PROBE.format(name)).body[0]
        docstring = ast.get_docstring(ast.Module(body, [])) is not None
        body.insert(body.index(following) if following else int(docstring), probe)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _enclosing(node: ast.AST, at: tuple[int, int]) -> Iterator[tuple[list[ast.stmt], ast.stmt]]:
    """The statements around a place, outermost first, each with the list that it stands in."""
    for _, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.stmt):
                decorators = getattr(child, "decorator_list", [])
                first = min([child.lineno, *(each.lineno for each in decorators)])
                start = (first, child.col_offset if first == child.lineno else 0)
                end = (child.end_lineno or 0, child.end_col_offset or 0)
                if start <= at <= end:
                    yield value, child
                    yield from _enclosing(child, at)
                    return
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                inner = list(_enclosing(child, at))
                yield from inner
                if inner:
                    return
