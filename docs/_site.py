"""A hook of mkdocs (mkdocs.yml): links in the site lead where they lead in the repository.

README.md is the first page. A file outside of docs/ that a page links to is below `source/`, a page
if it is markdown. A link to a folder leads to its README.md; without one, its text stays alone. The
page of decisions lists them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")  # in the navigation


def target(page: Path, link: str) -> Path | None:
    """The file that a link of a page leads to; None for a folder without a README.md."""
    path = (page.parent / link).resolve()
    readme = path / "README.md"
    return (readme if readme.exists() else None) if path.is_dir() else path


def place(path: Path) -> str:
    """The path of a file of the repository in the site's sources."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"source/{path.relative_to(ROOT).as_posix()}"


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, and the files outside of docs/ that pages link to."""
    seen = {path for path in DOCS.rglob("*") if path.is_file()}
    waiting = [*(ROOT / name for name in PAGES), *(p for p in seen if p.suffix == ".md")]
    while waiting:
        path = waiting.pop()
        if path not in seen and path.exists():
            files.append(File.generated(config, place(path), abs_src_path=str(path)))
        seen.add(path)
        if path.suffix == ".md":
            found = (target(path, link) for _, link, _ in LINK.findall(path.read_text()))
            waiting += {each for each in found if each is not None and each not in seen}
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page; add the list of decisions."""
    del config, files
    path, uri = Path(page.file.abs_src_path), page.file.src_uri
    if path == DOCS / "decisions" / "README.md":
        titles = {
            each.name: each.read_text().partition("\n")[0] for each in path.parent.glob("0*.md")
        }
        lines = [f"- [{titles[name].removeprefix('# ')}]({name})" for name in sorted(titles)]
        markdown = "\n".join([markdown, *lines])

    def rewritten(match: re.Match[str]) -> str:
        text, link, anchor = match.groups()
        leads = target(path, link)
        if leads is None:
            return text
        return f"[{text}]({os.path.relpath(place(leads), os.path.dirname(uri))}{anchor or ''})"

    return LINK.sub(rewritten, markdown)
