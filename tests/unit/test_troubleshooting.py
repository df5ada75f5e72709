"""docs/troubleshooting.md has every error and warning that a user can get.

What must be there is read from the source: the message of each `raise` of an error that derives
from `MegacompileError`, of each `warnings.warn`, and each reason why a head is not computed in
chunks, because a warning ends with it. Its first words stand in the page, `...` for what varies.

Left out: assertions and errors of other classes (bugs of megacompile, or Python's own protocols),
`raise` without an error, and messages with fewer than three words of their own (they pass another
error's text on).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from megacompile import errors
from megacompile.errors import MegacompileError
from tests.sources import ROOT, files

PAGE = ROOT / "docs" / "troubleshooting.md"
FIRST = 8  # words of a message that the page must have
HOLE = "..."
REASONS = ("_Whole",)  # raised for their text, which a warning ends with
SAYS = ("_say",)  # methods that warn with their argument
SAID = ("ignored_options", "unsupported_reason")  # functions whose text a warning passes on


def user_errors(modules: Mapping[str, ast.Module]) -> set[str]:
    """The classes that derive from `MegacompileError`, and those whose text a warning takes."""
    known = {
        n
        for n, c in vars(errors).items()
        if isinstance(c, type) and issubclass(c, MegacompileError)
    }
    for module in modules.values():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(b) in known for b in node.bases):
                known.add(node.name)
    return known | set(REASONS)


def template(node: ast.expr) -> str | None:
    """The text of an expression, `...` where it is computed; None where it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [HOLE if isinstance(v, ast.FormattedValue) else template(v) for v in node.values]
        return "".join(part or "" for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = template(node.left), template(node.right)
        return None if left is None and right is None else (left or HOLE) + (right or HOLE)
    return None


def called(node: ast.expr) -> str:
    """The last name of what a call calls; "" for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    return ast.unparse(node.func).rpartition(".")[2]


def functions(modules: Mapping[str, ast.Module]) -> dict[str, list[ast.FunctionDef]]:
    """Those of each name. Each call that is looked up would walk the whole source for them."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for module in modules.values():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(node)
    return found


def returned(name: str, named: Mapping[str, list[ast.FunctionDef]]) -> list[str]:
    """The texts that functions of a name return."""
    parts = [node for function in named.get(name, ()) for node in ast.walk(function)]
    made = [template(n.value) for n in parts if isinstance(n, ast.Return) and n.value is not None]
    return [text for text in made if text is not None]


def texts(node: ast.expr, named: Mapping[str, list[ast.FunctionDef]]) -> list[str]:
    """The messages that an expression may be: its own, or those of the function that it calls."""
    text = template(node)
    return returned(called(node), named) if text is None else [text]


def messages(modules: Mapping[str, ast.Module]) -> dict[str, str]:
    """Message -> where it is raised or warned."""
    known, named = user_errors(modules), functions(modules)
    found: dict[str, str] = {}
    for path, module in modules.items():
        for node in ast.walk(module):
            given: list[ast.expr] = []
            line = 0
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                given, line = node.exc.args if called(node.exc) in known else [], node.lineno
            elif isinstance(node, ast.Call) and called(node) in ("warn", *SAYS):
                given, line = node.args, node.lineno
            elif isinstance(node, ast.Call) and called(node) == "warn_once":
                given, line = node.args[1:], node.lineno  # after its subject
            for text in texts(given[0], named) if given else ():
                found[text] = f"{path}:{line}"
    for name in SAID:
        found |= dict.fromkeys(returned(name, named), name)
    return found


def first_words(message: str) -> str:
    """What the page must have of a message; "" where it has too few words of its own."""
    line = message.partition("\n")[0].replace("(shown once)", "")
    words = re.sub(r"^[^a-zA-Z-]+", "", line).split()  # it may begin with what varies
    own = [word for word in words if re.search(r"[a-zA-Z]{2}", word)]
    return " ".join(words[:FIRST]) if len(own) >= 3 else ""


def plain(page: str) -> str:
    """The text of a page without its marks."""
    return " ".join(re.sub(r"\.{4,}", HOLE, page.replace("`", "")).split())


def missing(found: Mapping[str, str], page: str) -> list[str]:
    """The messages that a page does not have."""
    text = plain(page)
    wanted = [(place, plain(first_words(message))) for message, place in found.items()]
    return [f"{place}: {words}" for place, words in wanted if words not in text]


def test_every_message_is_in_the_page() -> None:
    found = messages({str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in files().values()})
    assert len(found) > 100 and set(SAID) <= set(found.values())
    assert missing(found, PAGE.read_text()) == []


def test_messages_are_read_from_the_source() -> None:
    source = """
class Own(OptionError): pass
class Other(ValueError): pass
def why(): return f"the reason is {x} or so, and more"
def f():
    raise Own(f"got {x!r} of "
              f"{y}; needed more than two")
    raise Other("is not for users at all")
    raise AssertionError("is a bug and nothing else")
    raise OptionError(why())
    warnings.warn("one two " + three, stacklevel=2)
    self._say("a b c")
    notices.warn_once("subject", "d e f", of=self)
    raise OptionError(f"{x}: {y}")
"""
    found = messages({"m.py": ast.parse(source)})
    said = "got ... of ...; needed more than two"
    reason = "the reason is ... or so, and more"
    assert set(found) == {said, reason, "one two ...", "a b c", "d e f", "...: ..."}
    shown = {message: words for message in found if (words := first_words(message))}
    assert shown == {said: said, reason: reason}
    found = {f"...: {said}": "m.py:1", "one two three": "m.py:2"}
    assert missing(found, f"| `{said.replace('more than', 'more` than')} |") == [
        "m.py:2: one two three"
    ]
    assert missing(found, "`one two three`") == [f"m.py:1: {said}"]
