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

from megacompile.cli import COMMANDS, main
from tests.sources import ROOT
from tests.trace_events import faults

SCRIPT = """
import sys
import torch
from torch import nn
from megacompile import megacompile

print("arguments", sys.argv[1:], __name__)
models = [megacompile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) for _ in range(2)]
optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
for i in range(4):
    for model, optimizer in zip(models, optimizers):
        try:
            model(torch.randn(2, 8)).mean().backward()
            optimizer.step()
        except Exception as error:
            print("caught", type(error))
        optimizer.zero_grad()
    print("step", i + 1)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def _no_rates_on_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


# --- trace


def test_trace_prints_the_step_and_writes_it(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the update of step 2 to the backward of step 3, of every model; and read again."""
    argv, path = sys.argv[:], sys.path[:]
    out, again = tmp_path / "step.json", tmp_path / "again.json"
    assert main(["trace", "--save", str(out), str(script), "--batch", "7", "-x"]) == 0
    printed = capsys.readouterr()
    assert "arguments ['--batch', '7', '-x'] __main__" in printed.out
    assert "step 2\n" in printed.out and "step 3\n" not in printed.out
    assert "caught" not in printed.out
    assert "Sequential forward x1, Sequential backward x1" in printed.out
    assert printed.err == f"wrote {out}\n"
    document = json.loads(out.read_text())
    assert faults(document) == []
    complete = [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    times = {e["name"]: e["ts"] for e in complete}
    assert {"0UPDATE", "1UPDATE", "0F", "1F", "1B", "0B"} <= set(times)
    assert times["0UPDATE"] < times["0F"] < times["0B"]
    assert (sys.argv, sys.path) == (argv, path)
    assert main(["trace", "--save", str(again), str(out)]) == 0
    assert "Sequential forward x1" in capsys.readouterr().out
    assert faults(json.loads(again.read_text())) == []
    assert main(["trace", "--json", str(again)]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["total_s"] > 0
    (tmp_path / "bad.json").write_text("{}")
    assert main(["trace", str(tmp_path / "bad.json")]) != 0
    assert "bad.json" in capsys.readouterr().err


def test_trace_of_one_step_of_a_module(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As JSON, alone on stdout: the script's output goes to stderr."""
    monkeypatch.chdir(script.parent)
    command = ["trace", "--json", "--step", "2", "--go-on", "-m", "train", "argument"]
    assert main(command) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["predicted"] is None
    assert {run["model"] for run in found["measured"]["runs"]} == {"Sequential", "Sequential 2"}
    assert {"h2d", "compute", "d2h", "host"} == set(found["measured"]["streams"])
    assert "arguments ['argument'] __main__" in printed.err and "step 4\n" in printed.err


ERRORS: list[tuple[list[str], str]] = [
    (["trace", "--step", "9", "SCRIPT"], "after 4 optimizer steps"),
    (["trace", "--step", "0", "SCRIPT"], "--step: 0: needed 1 or more"),
    (["trace", "nowhere.py"], "'nowhere.py'"),
    (["trace", "--save", "step.txt", "SCRIPT"], "--save: step.txt"),
    (["trace", "EMPTY"], "no model"),
    (["trace", "-m", "nowhere.train"], "-m nowhere.train: "),
    (["demo", "--steps", "2"], "--steps: 2: needed 3 or more"),
    (["demo", "--device", "tpu"], "device='tpu'"),
    (["demo", "--steps", "many"], "argument --steps: many: needed 3 or more"),
    ([], "the following arguments are required: COMMAND"),
    (["nothing"], "argument COMMAND: invalid choice: 'nothing'"),
    (["trace"], "the following arguments are required: SCRIPT"),
]


@pytest.mark.parametrize(("arguments", "text"), ERRORS)
def test_errors_are_one_line(
    arguments: list[str], text: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = script.with_name("empty.py")
    empty.write_text("")
    names = {"SCRIPT": str(script), "EMPTY": str(empty)}
    try:
        code = main([names.get(a, a) for a in arguments])
    except SystemExit as end:  # argparse's
        code = end.code  # type: ignore[assignment]
    assert code == 2
    error = capsys.readouterr().err
    command = " ".join(["megacompile", *({*arguments[:1]} - {"nothing"})])
    assert error.startswith(f"{command}: ") and text in error and error.count("\n") == 1


def test_errors_of_the_script_are_the_scripts(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    package = script.with_name("lacking")
    package.mkdir()
    (package / "__init__.py").write_text("import nowhere_to_be_found")
    with pytest.raises(ModuleNotFoundError):
        main(["trace", "-m", "lacking.train"])
    for text, error in (("raise ValueError('mine')", ValueError), ("exit('no data')", SystemExit)):
        script.write_text(text)
        with pytest.raises(error):
            main(["trace", "--go-on", str(script)])


# --- demo, README and docs

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


# --- all of it


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--help"])
        out = capsys.readouterr().out
        assert ended.value.code == 0 and out.startswith("usage: python -m megacompile")
        return out

    every = said()
    for command in COMMANDS:
        assert f"{command.name} " in every and command.help in every
        own = said(command.name)
        assert "--json" in own and command.description.splitlines()[0] in own


MISTAKES = [
    ["frobnicate"], ["--help"], ["plan", "--help"], ["plan", "nowhere.json"],
    ["plan", "KNOWN", "--seq", "128"], ["plan", "os.path:missing"],
    ["plan", "a:b", "--gpu", "tpu"], ["demo", "--width", "33"], ["trace", "-m", "nowhere"],
    ["trace", "--save", "step.txt", "nowhere.py"], ["hardware", "--nonsense"],
]  # fmt: skip


def test_mistakes_are_found_without_torch(tmp_path: Path) -> None:
    """Importing it takes seconds. What needs it gets it then; so do the names of the package. And
    `logging.basicConfig(level=logging.INFO)` alone asks for nothing of ours."""
    config = {"model_type": "qwen2", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mistakes = [[str(tmp_path) if arg == "KNOWN" else arg for arg in argv] for argv in MISTAKES]
    code = f"""
import contextlib, io, logging, runpy, sys
import megacompile
from megacompile.cli import main
for argv in {mistakes}:
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
sys.argv = ["megacompile", "trace", "nowhere.py"]
runpy.run_module("megacompile", run_name="__main__")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    said = done.stderr.splitlines()[-1:]
    assert done.returncode == 2 and said[0].startswith("megacompile trace: "), done.stderr
    quiet, asked = done.stdout.split("asked for megacompile.plan")
    names_of = [{n for n in t.splitlines() if n.startswith("megacompile")} for t in (quiet, asked)]
    assert names_of == [set(), {"megacompile.plan"}]
