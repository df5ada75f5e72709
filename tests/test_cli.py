"""The command line: what each command prints and writes, and how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megacompile import api
from megacompile.cli import COMMANDS, main
from tests.test_perfetto import faults

ROOT = Path(__file__).resolve().parent.parent

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
    """From the update of step 2 to the backward of step 3, of every model; there it ends."""
    argv, path = sys.argv[:], sys.path[:]
    out = tmp_path / "step.json"
    assert main(["trace", "--save", str(out), str(script), "--batch", "7", "-x"]) == 0
    printed = capsys.readouterr()
    assert "arguments ['--batch', '7', '-x'] __main__" in printed.out
    assert "step 2\n" in printed.out
    assert "step 3\n" not in printed.out
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
    assert api.LISTENERS == []


def test_a_saved_trace_is_read_again(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "step.json", tmp_path / "again.json"
    assert main(["trace", "--save", str(out), str(script)]) == 0
    capsys.readouterr()
    assert main(["trace", "--save", str(again), str(out)]) == 0
    printed = capsys.readouterr()
    assert "Sequential forward x1" in printed.out
    assert printed.err == f"wrote {again}\n"
    assert faults(json.loads(again.read_text())) == []
    assert main(["trace", "--json", str(again)]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["total_s"] > 0
    (tmp_path / "bad.json").write_text("{}")
    assert main(["trace", str(tmp_path / "bad.json")]) != 0
    assert "is not a trace that megacompile saved" in capsys.readouterr().err


def test_trace_as_json(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else on stdout: what the script prints goes to stderr."""
    assert main(["trace", "--json", "--step", "2", "--go-on", str(script)]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["predicted"] is None
    measured = found["measured"]
    assert {run["model"] for run in measured["runs"]} == {"Sequential", "Sequential 2"}
    assert {"h2d", "compute", "d2h", "host"} == set(measured["streams"])
    assert "step 4\n" in printed.err, "--go-on"


def test_the_first_step_can_be_traced(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--step", "1", str(script)]) == 0
    printed = capsys.readouterr().out
    assert "Sequential forward x1, Sequential backward x1" in printed
    assert "step 1\n" not in printed


def test_trace_of_a_module(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(script.parent)
    assert main(["trace", "-m", "train", "argument"]) == 0
    assert "arguments ['argument'] __main__" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--step", "9", "SCRIPT"], "ended after 4 optimizer steps of megacompiled models"),
        (["--step", "0", "SCRIPT"], "--step 0: needed 1 or more"),
        (["nowhere.py"], "there is no file 'nowhere.py'"),
        (["--save", "step.txt", "SCRIPT"], "--save step.txt: got the ending '.txt'; needed .json"),
        (["--save", "no/where.json", "SCRIPT"], "there is no folder 'no'"),
        (["EMPTY"], "megacompiled no model"),
        (["-m", "nowhere"], "-m nowhere: there is no module of that name that can be run"),
        (["-m", "nowhere.train"], "-m nowhere.train: there is no module"),
        (["-m", "megacompile.nowhere"], "-m megacompile.nowhere: there is no module"),
        (["-m", "megacompile.cli"], "(a package needs a __main__.py); run the command where"),
        (["-m", ""], "-m : there is no module"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], text: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = script.with_name("empty.py")
    empty.write_text("")
    names = {"SCRIPT": str(script), "EMPTY": str(empty)}
    assert main(["trace", *(names.get(a, a) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megacompile trace: ")
    assert text in error
    assert error.count("\n") == 1


def test_a_package_that_lacks_another(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the package's own."""
    package = script.with_name("lacking")
    package.mkdir()
    (package / "__init__.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(script.parent)
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        main(["trace", "-m", "lacking.train"])


def test_an_error_of_the_script_is_the_scripts(script: Path) -> None:
    script.write_text(SCRIPT + "\nraise ValueError('mine')\n")
    with pytest.raises(ValueError, match="mine"):
        main(["trace", "--go-on", str(script)])
    assert api.LISTENERS == []
    script.write_text("import sys; sys.exit('no data')")
    with pytest.raises(SystemExit, match="no data"):
        main(["trace", str(script)])


# --- demo


SMALL = ["--steps", "4", "--layers", "2", "--width", "32", "--batch", "1", "--device", "cpu"]


def test_demo_prints_losses_schedule_and_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo.json"
    assert main(["demo", *SMALL, "--code", "--save", str(out)]) == 0
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]
    assert len(losses) == 2
    assert "step | h2d" in printed
    assert "def run_backward(inputs):" in printed
    assert "GPT forward x1, GPT backward x1" in printed
    assert faults(json.loads(out.read_text())) == []


def test_demo_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, "--steps", "25", "--batch", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    losses = found["losses"]
    assert len(losses) == 25
    assert sum(losses[-5:]) / 5 < losses[0] - 0.5
    assert found["measured"]["streams"]["compute"]["busy_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "2"], "--steps 2: needed 3 or more"),
        (["--width", "48"], "--width 48: needed a multiple of 32"),
        (["--device", "tpu"], "device='tpu'"),
        (["--save", "x"], "--save x: got the ending ''"),
    ],
)
def test_errors_of_demo(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megacompile demo: ")
    assert text in error
    assert error.count("\n") == 1


# --- all of it


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "megacompile: the following arguments are required: COMMAND"),
        (["nothing"], "megacompile: argument COMMAND: invalid choice: 'nothing'"),
        (["trace"], "megacompile trace: the following arguments are required: SCRIPT"),
        (["demo", "--steps", "many"], "megacompile demo: argument --steps: invalid int value"),
    ],
)
def test_errors_of_the_arguments(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(text)
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", [None, *(module.NAME for module in COMMANDS)])
def test_help(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"] if command is None else [command, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m megacompile")
    for module in COMMANDS:
        if command is None:
            assert f"{module.NAME} " in printed and module.HELP in printed
        elif command == module.NAME:
            assert "--json" in printed
            assert str(module.__doc__).splitlines()[0] in printed


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megacompile", "trace", "nowhere.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("megacompile trace: there is no file 'nowhere.py'")
    assert done.stdout == ""


# --- mistakes are answered at once

MISTAKES = [
    ["frobnicate"],
    ["--help"],
    ["plan", "--help"],
    ["plan"],
    ["plan", "nowhere"],
    ["plan", "nowhere.json"],
    ["plan", "model.gguf"],
    ["plan", "UNKNOWN"],
    ["plan", "KNOWN", "--seq", "128"],
    ["plan", "no_such_module:f"],
    ["plan", "os.path:missing"],
    ["plan", "a:b", "--gpu", "tpu"],
    ["plan", "a:b", "--gpu-memory", "24"],
    ["plan", "a:b", "--host-memory", "much"],
    ["plan", "a:b", "--batch", "0"],
    ["demo", "--width", "33"],
    ["demo", "--nonsense"],
    ["trace", "nowhere.py"],
    ["trace", "-m", "nowhere"],
    ["trace", "--save", "step.txt", "nowhere.py"],
    ["hardware", "--nonsense"],
]


def test_mistakes_are_found_without_torch(tmp_path: Path) -> None:
    """Importing it takes seconds; all of them together take less than one."""
    pytest.importorskip("transformers")
    config = {"model_type": "qwen2", "max_position_embeddings": 64}
    for name, changed in {"KNOWN": {}, "UNKNOWN": {"model_type": "qwen33"}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | changed))
    names = {name: str(tmp_path / name) for name in ("KNOWN", "UNKNOWN")}
    mistakes = [[names.get(arg, arg) for arg in argv] for argv in MISTAKES]
    code = f"""
import contextlib, io, sys, time
from megacompile.cli import main
for argv in {mistakes}:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code
    assert code == (0 if "--help" in argv else 2), (argv, code)
    assert "torch" not in sys.modules and "transformers" not in sys.modules, argv
assert time.process_time() < 1, time.process_time()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_package_imports_torch_when_it_is_needed() -> None:
    code = """
import sys
import megacompile
assert "torch" not in sys.modules
assert set(megacompile.__all__) <= set(dir(megacompile))
assert not hasattr(megacompile, "nonsense") and "torch" not in sys.modules
assert megacompile.errors.MegacompileError is megacompile.MegacompileError
assert megacompile.compat.__name__ == "megacompile.compat"
for name in megacompile.__all__:
    assert getattr(megacompile, name).__module__.startswith("megacompile."), name
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
