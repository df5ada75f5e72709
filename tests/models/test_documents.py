"""The documentation: its links, the pages of the site, the snippets of the short pages, and the
notebook, which is committed without outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import megacompile
from tests.sources import ROOT

DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "tests" / "README.md"])
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    names, seen = set(), Counter[str]()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        names.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return names


def faults(page: Path) -> list[str]:
    """Links of a page to files or headings that are not there."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" in link:
            continue
        if not target.exists() or anchor and anchor not in anchors(target.read_text()):
            found.append(link)
    return found


def test_links_lead_to_files_and_headings(tmp_path: Path) -> None:
    assert {str(page): faults(page) for page in PAGES if faults(page)} == {}
    (tmp_path / "a.md").write_text("# The `b()` of c\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "b.md"
    good = "[](a.md#the-b-of-c) [](a.md#twice-1) [](https://example.org#x) [](#here)\n# Here\n"
    page.write_text(f"{good}[](a.md#none) [](c.md) [](#there)\n```\n# There\n[](d.md)\n```\n")
    assert faults(page) == ["a.md#none", "c.md", "#there"]


def test_the_site_has_every_page_and_name() -> None:
    """Each page of docs/ is in the navigation, each public name on the page of the API."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nnot_in_nav")[0]
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert [page for page in sorted(pages) if f": {page}\n" not in nav] == []
    listed = re.findall(r"^::: megacompile\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert "errors" in listed and len(listed) == len(set(listed))
    errors = {name for name in megacompile.__all__ if name.endswith("Error")}
    assert set(listed) - {"errors", "callbacks"} == set(megacompile.__all__) - errors


def test_the_site_is_built(tmp_path: Path) -> None:
    """As by `make docs`: a link or a name that leads nowhere is an error."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api" / "index.html").read_text()
    assert 'id="megacompile.megacompile"' in page and "checkpoint" in page


def snippets(page: str) -> list[str]:
    """The python blocks of a page."""
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "setup"), [("first-run.md", ""), ("slow.md", "recipes.md")])
def test_snippets_run(
    page: str,
    setup: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the first block of another page before it, which the page names."""
    if setup:
        pytest.importorskip("transformers")
        assert setup in (DOCS / page).read_text()
    monkeypatch.chdir(tmp_path)
    module = type(sys)("snippet")  # Dynamo imports it by its name
    monkeypatch.setitem(sys.modules, "snippet", module)
    torch.manual_seed(0)
    (snippet,) = snippets(page)
    exec("".join(snippets(setup)[:1] if setup else []) + snippet, vars(module))
    assert "OFFLOAD_GRAD" in capsys.readouterr().out.upper()


NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def cells() -> list[tuple[str, str]]:
    """The kind and the text of each cell."""
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    assert [each.get("outputs") for each in found if each.get("outputs")] == []
    return [(each["cell_type"], "".join(each["source"])) for each in found]


def test_a_text_comes_before_each_of_five_cells_of_code() -> None:
    assert [kind for kind, _ in cells()] == ["markdown", "code"] * 5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_cells_run(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They compare the losses with the plain model's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    module = types.ModuleType("quickstart")  # Dynamo imports it by its name
    monkeypatch.setitem(sys.modules, "quickstart", module)
    for kind, source in cells():
        if kind == "code":
            exec(compile(source, str(NOTEBOOK), "exec"), vars(module))
    shown = capsys.readouterr().out
    assert shown.count(" streamed, ") == 5 and f"128 MiB allowed, on {device}" in shown
    for name in ("8F", "PREFETCH@", "UPDATE"):  # the model is streamed
        assert name in shown
    assert "what would help" in shown
