"""Checks the docstrings of the product: `make lint` runs it.

A docstring starts with a verb or a noun. It does not start with a question word, "Let" or "Of",
and its first paragraph is no question.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("megacompile", "passes", "runtime")
_START = re.compile(r"(What|Who|Whom|Whose|Whether|How|Lets?|Of|Where|Why|Which)\b")
_WITH_DOCSTRINGS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def faults(source: str) -> Iterator[str]:
    """Docstrings that read badly, as "line: first words"."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, _WITH_DOCSTRINGS):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        first = " ".join(text.split("\n\n")[0].split())
        if _START.match(first) or first.endswith("?"):
            yield f"{getattr(node, 'lineno', 1)}: {first[:70]!r}"


def main() -> int:
    """Print every fault; returns the exit status."""
    found = [
        f"{path.relative_to(ROOT)}:{fault}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for fault in faults(path.read_text())
    ]
    print("\n".join(found) if found else "every docstring starts with a verb or a noun")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
