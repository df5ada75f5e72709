"""The command line: the output and errors of each command. README and docs too."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megacompile.cli import main
from tests.sources import ROOT
from tests.trace_events import faults


@pytest.fixture(autouse=True)
def _no_rates_on_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


ERRORS: list[tuple[list[str], str]] = [
    (["demo", "--steps", "2"], "needed 3 or more"),
    (["demo", "--steps", "0"], "--steps: invalid positive value: '0'"),
    (["demo", "--device", "tpu"], "device='tpu'"),
    (["demo", "--steps", "many"], "--steps: invalid positive value: 'many'"),
    (["hardware", "--disk", "/absent/folder"], "/absent/folder"),
    ([], "the following arguments are required: COMMAND"),
    (["nothing"], "argument COMMAND: invalid choice: 'nothing'"),
    (["plan"], "the following arguments are required: TARGET"),
]


@pytest.mark.parametrize(("arguments", "text"), ERRORS)
def test_errors_are_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as end:  # argparse's
        code = end.code  # type: ignore[assignment]
    assert code == 2
    error = capsys.readouterr().err
    command = " ".join(["megacompile", *({*arguments[:1]} - {"nothing"})])
    assert error.startswith(f"{command}: ") and text in error and error.count("\n") == 1


PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


def blocks(text: str, language: str) -> Iterator[str]:
    """The fenced blocks of a page."""
    yield from re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def rows(table: str) -> list[str]:
    """The rows of a schedule's table, whatever the widths of its columns."""
    return [" ".join(line.split()) for line in table.splitlines() if line.strip()]


def test_demo_prints_what_readme_and_docs_show(tmp_path: Path) -> None:
    out, file = io.StringIO(), tmp_path / "demo.json"
    with contextlib.redirect_stdout(out):
        command = ["demo", "--steps", "3", "--device", "cpu", "--code", "--save", str(file)]
        assert main(command) == 0
    printed = out.getvalue()
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]
    assert len(losses) == 2 and "GPT forward x1, GPT backward x1" in printed
    assert faults(json.loads(file.read_text())) == []
    table = printed.partition("steps by streams:")[2].partition("\nIts Python:")[0]
    shown = "\n".join(blocks((ROOT / "README.md").read_text(), "text"))
    assert rows(table) == rows(shown)
    (shown,) = blocks((ROOT / "docs" / "design.md").read_text(), "text")
    code = iter(rows(printed))
    assert [line for line in rows(shown) if line not in code] == []  # in their order


def broken_links(page: Path) -> list[str]:
    """Links of a page to files that are not there."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    return [t for t in targets if "://" not in t and not (page.parent / t).exists()]


def test_links_lead_somewhere(tmp_path: Path) -> None:
    assert {str(page): broken_links(page) for page in PAGES if broken_links(page)} == {}
    page = tmp_path / "a.md"
    page.write_text("[a](a.md) [b](b.md#part) [c](https://example.org) ![d](d.png)")
    assert broken_links(page) == ["b.md", "d.png"]


RECIPES = list(blocks((ROOT / "docs" / "recipes.md").read_text(), "python"))  # [0]: the setup


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(1, len(RECIPES)))
@pytest.mark.filterwarnings("ignore")
def test_recipes_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    try:
        exec(RECIPES[0] + RECIPES[number], {"__name__": "recipe"})
    except ImportError as error:
        pytest.skip(str(error).strip().partition("\n")[0])


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--help"])
        out = capsys.readouterr().out
        assert ended.value.code == 0 and out.startswith("usage: python -m megacompile")
        return out

    every = said()
    for command in ("demo", "plan", "hardware"):
        assert f"{command} " in every and "--" in said(command)


MISTAKES = [
    ["frobnicate"], ["--help"], ["plan", "--help"], ["plan", "a:b", "--gpu", "tpu"],
    ["demo", "--width", "33"], ["demo", "--save"],
    ["hardware", "--nonsense"],
]  # fmt: skip


def test_help_and_mistakes_need_no_torch() -> None:
    """Importing it takes seconds. What needs it gets it then; so do the names of the package. And
    `logging.basicConfig(level=logging.INFO)` alone asks for nothing of ours."""
    code = f"""
import contextlib, io, logging, runpy, sys
import megacompile
from megacompile.cli import main
for argv in {MISTAKES}:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code
    assert code == (0 if "--help" in argv else 2), (argv, code)
    assert "torch" not in sys.modules and "transformers" not in sys.modules, argv
assert set(megacompile.__all__) <= set(dir(megacompile))
assert not hasattr(megacompile, "nonsense") and "torch" not in sys.modules
assert megacompile.errors.MegacompileError is megacompile.MegacompileError
for name in megacompile.__all__:
    assert getattr(megacompile, name).__module__.startswith("megacompile."), name
torch = sys.modules["torch"]
logging.basicConfig(level=logging.INFO, format="%(name)s", stream=sys.stdout)
for name in (None, "megacompile.plan"):
    if name:
        logging.getLogger(name).setLevel(logging.INFO)
    print("asked for", name)
    model = megacompile.megacompile(
        torch.nn.Linear(2, 2), device="cpu", lowering="eager", progress=False
    )
    model(torch.ones(1, 2)).sum().backward()
sys.argv = ["megacompile", "demo", "--steps", "2"]
runpy.run_module("megacompile", run_name="__main__")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    said = done.stderr.splitlines()[-1:]
    assert done.returncode == 2 and said[0].startswith("megacompile demo: "), done.stderr
    quiet, asked = done.stdout.split("asked for megacompile.plan")
    names_of = [{n for n in t.splitlines() if n.startswith("megacompile")} for t in (quiet, asked)]
    assert names_of == [set(), {"megacompile.plan"}]
