"""Checks docstrings and class names, but for those of tests: `make lint` runs it.

A docstring starts with a verb or a noun. It does not start with a question word, "Let" or "Of",
and its first paragraph is no question. It has none of the words that read as a translation. A class
name of the product is used once.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("megacompile", "passes", "runtime")
FOLDERS = (*PRODUCT, "benchmarks", "examples")
_START = re.compile(r"(What|Who|Whom|Whose|Whether|How|Lets?|Of|Where|Why|Which)\b")
_WORDS = re.compile(r"\b([Ss]omebody|[Nn]obody|[Ww]hoever|[Aa]new)\b")  # say who; "again"
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
        for word in _WORDS.findall(text):
            yield f"{getattr(node, 'lineno', 1)}: {word!r}"


def repeated(sources: Mapping[str, str]) -> list[str]:
    """Names of classes that several modules define at their top level, with the modules."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    return [f"class {name}: {', '.join(each)}" for name, each in places.items() if len(each) > 1]


def main() -> int:
    sources = {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(ROOT / "megacompile" / "passes")
        and not path.is_relative_to(ROOT / "megacompile" / "runtime")
    }
    found = [f"{path}:{fault}" for path, source in sources.items() for fault in faults(source)]
    found += repeated({p: source for p, source in sources.items() if p.startswith(PRODUCT)})
    print(
        "\n".join(found)
        if found
        else "docstrings start with a verb or a noun; classes have names of their own"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
