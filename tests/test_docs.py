"""README and docs/: excerpts are what their commands print, snippets run, links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megacompile.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")],
    key=str,
)


def blocks(text: str, language: str) -> Iterator[str]:
    """The fenced blocks of a page."""
    yield from re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


RECIPES = list(blocks((ROOT / "docs" / "recipes.md").read_text(), "python"))  # [0]: the setup


def rows(table: str) -> list[str]:
    """The rows of a schedule's table, whatever the widths of its columns."""
    return [" ".join(line.split()) for line in table.splitlines() if line.strip()]


def broken_links(page: Path) -> list[str]:
    """Links of a page to files that are not there."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    return [t for t in targets if "://" not in t and not (page.parent / t).exists()]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the demo prints, with its schedule's code."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        assert main(["demo", "--steps", "3", "--device", "cpu", "--code"]) == 0
    return out.getvalue()


def test_the_table_is_the_one_that_the_demo_prints(printed: str) -> None:
    table = printed.partition("steps by streams:")[2].partition("\nIts Python:")[0]
    shown = "\n".join(blocks((ROOT / "README.md").read_text(), "text"))
    assert rows(table) == rows(shown)


def test_the_code_is_the_one_that_the_demo_prints(printed: str) -> None:
    """Some of its lines, in their order."""
    (shown,) = blocks((ROOT / "docs" / "design.md").read_text(), "text")
    code = iter(rows(printed))
    missing = [line for line in rows(shown) if line not in code]  # which goes on behind it
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("[a](a.md) [b](b.md#part) [c](https://example.org) ![d](d.png)")
    assert broken_links(page) == ["b.md", "d.png"]


@pytest.mark.parametrize("number", range(1, len(RECIPES)))
@pytest.mark.filterwarnings("ignore")
def test_recipes_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)
    names = {"__name__": "recipe"}
    try:
        exec(RECIPES[0] + RECIPES[number], names)
    except ImportError as error:
        pytest.skip(str(error).strip().partition("\n")[0])
