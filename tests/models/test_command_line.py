"""The command line: the output of each command; README and docs too. The wheel: it has every
module, runs away from the clone, and its types reach its users."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import megacompile as package
from megacompile import Schedule, __version__, errors, megacompile, schedules, updates
from megacompile.cli import main
from megacompile.ir import ops
from tests import inside
from tests.equality.nets import in_a_row
from tests.interrupts import watched
from tests.processes import python
from tests.sources import LINKED, ROOT, files
from tests.trace_events import faults
from tests.zoo import batch, equal, stack, step, tied, twins


@pytest.fixture(autouse=True)
def _no_rates_on_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


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
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"megacompile {__version__}\n"


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


def test_the_model_is_changed_in_place_and_returned() -> None:
    model, _ = tied()
    kind, params, state = type(model), dict(model.named_parameters()), model.state_dict()
    attributes = set(vars(model))
    assert megacompile(model, device="cpu", lowering="eager") is model
    assert type(model) is kind and list(model.state_dict()) == list(state)
    assert all(model.get_parameter(name) is param for name, param in params.items())
    assert all(equal(model.state_dict()[key], state[key]) for key in state)
    changed = set(vars(model)) - attributes
    assert changed <= {"_compiled_call_impl", "_apply", "_call_impl", "compile"}
    assert schedules(model) == [] and updates(model) == {}
    assert megacompile(model, device="cpu", lowering="eager") is model, "again, with the same"


def test_the_example_of_the_docstring_runs() -> None:
    """As it stands there, on a model that takes (x, y) and gives a loss."""
    text = inspect.getdoc(megacompile) or ""
    raised = re.findall(r"^    (\w+Error): ", text.partition("Raises:")[2], re.M)
    assert {"ModelError", "OptionError", "HostMemoryError"} <= set(raised)
    assert all(hasattr(package, name) for name in raised)
    model, inputs = stack()
    before = model.state_dict()["head.weight"].clone()
    names: dict[str, Any] = {
        "model": model,
        "megacompile": megacompile,
        "torch": torch,
        "data": [(batch(i)["x"], batch(i)["y"]) for i in range(2)],
    }
    exec(compile(textwrap.dedent(text.split("Example::")[1]), "<docstring>", "exec"), names)
    assert names["model"] is model and schedules(model) != []
    assert not equal(model.state_dict()["head.weight"], before), "it trained"
    assert all(p.grad is None for p in model.parameters())
    assert sorted(package.__all__) == package.__all__
    assert all(getattr(package, name).__doc__ for name in package.__all__)
    assert {name for name in vars(errors) if name.endswith("Error")} <= set(package.__all__)


def test_each_captured_graph_and_kind_of_call_has_a_schedule() -> None:
    def broken(m: Any, x: Tensor) -> Tensor:
        hidden = m.first(x).relu()
        torch._dynamo.graph_break()
        return m.last(hidden).square().mean()

    _, model = twins(in_a_row(broken))
    model(torch.ones(2, 4)).backward()
    assert [schedule.name for schedule in schedules(model)] == ["Applies", "Applies.1"]
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert [schedule.backward is None for schedule in schedules(model)].count(True) == 2
    assert len(schedules(model)) == 4


# One model, that makes two steps: the second adds to the gradients of the first.


class Watched:
    """What was verified and run of it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Schedule]] = []
        _, self.model = twins(stack()[0])
        looks = {
            vars(inside)["proof"].verify: self._look("verified"),
            vars(inside)["Executor"].__init__: self._look("made"),
        }
        with watched(looks):
            for _ in range(2):
                step(self.model, batch())
        (self.schedule,) = schedules(self.model)

    def _look(self, what: str) -> Any:
        def look(frame: FrameType) -> None:
            self.events.append((what, frame.f_locals["schedule"]))

        return look


@pytest.fixture(scope="module")
def stepped() -> Watched:
    return Watched()


def test_schedules_are_verified_before_they_run(stepped: Watched) -> None:
    kinds = [what for what, _ in stepped.events]
    assert kinds == ["verified", "made"] * (len(kinds) // 2) and len(kinds) > 2
    verified, made = ([s for what, s in stepped.events if what == k] for k in ("verified", "made"))
    for mine, theirs in zip(verified, made, strict=True):
        assert mine.code().splitlines()[2:] == theirs.code().splitlines()[2:]  # but for `lower`


def test_the_history_has_every_pass_and_what_it_did(stepped: Watched) -> None:
    schedule, history = stepped.schedule, stepped.schedule.history
    names = [record.name for record in history]
    assert names[0] == "checkpoints" and names[-1] == "lower" and len(set(names)) == len(names)
    first = names.index("partition")
    for part in (history[:first], history[first:]):
        for earlier, later in zip(part, part[1:], strict=False):
            assert later.before == earlier.after, f"{later.name} goes on behind {earlier.name}"
    final = [ops.actions(graph) for graph in schedule.graphs.values()]
    assert history[-1].after.splitlines() == final
    after = {record.name: record.after for record in history}
    assert after["partition"] == "0F 1F 2F 3F 4F"
    assert after["plan"] == "0F 1F 2F 3F 4F\n4B 3B 2B 1B 0B"
    assert "2PREFETCH@2 0F 3PREFETCH@0 1F" in after["slots"]


TAKEN = """
import gc, torch
from pathlib import Path
from torch import nn
from megacompile import megacompile

def resident():
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmRSS:")) * 1024

megacompile(nn.Linear(2, 2), device="cpu", progress=False)  # imports
torch.zeros(2**23 - 2**10)  # malloc's threshold rises when a mapping is freed
before = resident()
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
size = sum(p.nbytes for p in model.parameters())
megacompile(model, device="cpu", progress=False)
print((resident() - before) / size)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about the GNU C library's malloc")
def test_what_parameters_leave_goes_back_to_the_system() -> None:
    """They take their memory once."""
    assert float(python("-c", TAKEN).stdout) < 1.3


TIMEOUT_S = 300
SCRIPT = '''
"""A script of a user, for mypy --strict."""

import torch
from torch import nn

from megacompile import Explanation, Schedule, explain, megacompile, schedules

model: nn.Linear = megacompile(nn.Linear(4, 1), device="cpu", gpu_memory="1GiB", resident=0)
model(torch.ones(2, 4)).square().mean().backward()
schedule: Schedule = schedules(model)[0]
explanation: Explanation = explain(model, changes=False)
print(schedule.table(), explanation)
'''


def run(*command: str | Path, folder: Path) -> str:
    """Run a command in a folder and return its output."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, offline: a build leaves files next to them."""
    found = {d.name: d.version for d in metadata.distributions(name="setuptools")}
    if importlib.util.find_spec("pip") is None or int(found.get("setuptools", "0")[:2]) < 77:
        pytest.skip("needs pip and setuptools 77")
    folder = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("megacompile", *LINKED):
        caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=caches)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps")
    run(*pip, "--wheel-dir", "dist", ".", folder=folder)
    (built,) = (folder / "dist").iterdir()
    return built


def test_the_wheel_has_every_module(wheel: Path) -> None:
    wanted = {
        f"{name.replace('.', '/')}{'/__init__' if path.name == '__init__.py' else ''}.py"
        for name, path in files().items()
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (header,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        version = message_from_bytes(archive.read(header))["Version"]
    assert names == {*wanted, "megacompile/py.typed"}
    assert version == __version__
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.thorough
def test_it_runs_away_from_the_clone(wheel: Path, tmp_path: Path) -> None:
    """In a new environment, which borrows this one's dependencies after pip has installed it."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", wheel, folder=tmp_path)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", where, folder=tmp_path).strip())
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))

    where = "import megacompile; print(megacompile.__file__)"
    assert Path(run(python, "-c", where, folder=tmp_path).strip()).is_relative_to(packages)
    demo = (python, "-m", "megacompile", "demo", "--device", "cpu", "--steps", "3")
    assert "offload_grad" in run(*demo, folder=tmp_path)

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert "OFFLOAD_GRAD" in run(python, script, folder=tmp_path)
    pytest.importorskip("mypy")
    mypy = (python, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache")
    run(*mypy, script, folder=tmp_path)
    script.write_text(SCRIPT.replace("gpu_memory=", "gpu_memori="))  # types are known, not `Any`
    with pytest.raises(AssertionError, match="gpu_memori"):
        run(*mypy, script, folder=tmp_path)
