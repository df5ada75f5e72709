"""The examples: with and without the one line they have the same losses.

Those whose packages are not there are skipped.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
STEPS = 4
TIMEOUT_S = 300
# The packages that each needs. The others of examples/ have tests of their own, or are no loops.
NEEDED = {
    "sft_trainer": ("transformers", "accelerate"),
    "lora_peft": ("transformers", "peft"),
    "qlora_bitsandbytes": ("transformers", "peft", "accelerate", "bitsandbytes"),
    "grpo_trl": ("trl",),
    "lightning_module": ("transformers", "lightning"),
    "accelerate_loop": ("transformers", "accelerate"),
    "diffusion_unet": ("diffusers",),
    "vision_vit": ("transformers",),
}
OTHERS = {"train_lm", "example_parts", "ranks"}
# Where a quantized product is computed by another kernel than in the plain loop.
LOOSE = {"qlora_bitsandbytes": 1e-4}


def test_every_example_is_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == NEEDED.keys() | OTHERS


def example(name: str) -> ModuleType:
    for package in NEEDED[name]:
        pytest.importorskip(package)
    return importlib.import_module(name)


def losses(name: str, *flags: str) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        found: list[float] = example(name).main(["--steps", str(STEPS), *flags])
    return found


@pytest.mark.parametrize("name", NEEDED)
def test_the_losses_are_those_of_the_plain_loop(name: str) -> None:
    plain = losses(name, "--device", "cpu", "--plain")
    streamed = losses(name, "--device", "cpu")
    assert len(plain) >= STEPS and len(set(plain)) > 1
    assert streamed == pytest.approx(plain, rel=LOOSE.get(name, 1e-5), abs=1e-6)


def test_ranks_have_the_losses_of_plain_ones() -> None:
    """examples/ranks.py, in two processes of torchrun."""
    pytest.importorskip("transformers")
    plain, shared = (torchrun("ranks", "--device", "cpu", *how) for how in (["--plain"], []))
    assert len(plain) == STEPS and len(set(plain)) > 1
    assert shared == pytest.approx(plain, abs=1e-4)  # it prints four digits


def torchrun(name: str, *flags: str) -> list[float]:
    """The losses that rank 0 prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(
        [*command, "--steps", str(STEPS), *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(x) for x in re.findall(r"^step \d+  loss (\S+)$", done.stdout, re.MULTILINE)]


@pytest.mark.gpu
@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("name", [name for name in NEEDED if name != "grpo_trl"])
def test_on_a_gpu(name: str) -> None:
    """Not GRPO: one token that is sampled otherwise is another run."""
    plain = losses(name, "--device", "cuda", "--plain")
    streamed = losses(name, "--device", "cuda")
    assert streamed == pytest.approx(plain, rel=1e-3)
    assert torch.isfinite(torch.tensor(streamed)).all()


@pytest.mark.parametrize("name", NEEDED)
def test_the_docstring_has_the_command(name: str) -> None:
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert f"python examples/{name}.py " in text
    assert f"python examples/{name}.py --plain" in text
    assert "megacompile(model" in text
