"""The wheel: it has every module, runs away from the clone, and its types reach its users."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest

import megacompile
from tests.sources import LINKED, ROOT, files

TIMEOUT_S = 300
SCRIPT = '''
"""A training loop of a user, for mypy --strict."""

import torch
from torch import Tensor, nn

from megacompile import Explanation, MegacompileError, Schedule, explain, megacompile, schedules


def train(steps: int) -> Tensor:
    """Returns the last loss."""
    model: nn.Linear = megacompile(nn.Linear(4, 1), device="cpu", gpu_memory="1GiB")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    schedule: Schedule = schedules(model)[0]
    explanation: Explanation = explain(model, changes=False)
    print(schedule.table(), explanation)
    return loss


try:
    print("last loss", train(3).item())
except MegacompileError as error:
    print(error)
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
    assert version == megacompile.__version__
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
    assert "last loss" in run(python, script, folder=tmp_path)
    pytest.importorskip("mypy")
    mypy = (python, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache")
    run(*mypy, script, folder=tmp_path)
    script.write_text(SCRIPT.replace("gpu_memory=", "gpu_memori="))  # types are known, not `Any`
    with pytest.raises(AssertionError, match="gpu_memori"):
        run(*mypy, script, folder=tmp_path)
