"""The examples: with and without the one line they have the same losses. The demo resumes.

Those whose packages are not there are skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
import train_lm

from tests.sources import ROOT

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
OTHERS = {"train_lm", "example_parts", "ranks", "from_scratch"}
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


@pytest.mark.thorough
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


def test_docstrings_have_the_command() -> None:
    for name in NEEDED:
        text = (ROOT / "examples" / f"{name}.py").read_text()
        assert f"python examples/{name}.py --plain" in text and "megacompile(model" in text, name


TINY = (
    *("--device", "cpu", "--layers", "2", "--width", "32", "--heads", "2", "--context", "16"),
    *("--steps", "6", "--warmup", "2", "--validate-every", "3", "--corpus-bytes", "100000"),
)


def test_streamed_losses_are_the_plain_ones() -> None:
    flags = ("--dropout", "0.3", "--clip", "0.1")
    plain = train_lm.main([*TINY, *flags, "--plain"])
    streamed = train_lm.main([*TINY, *flags])
    assert sorted(plain.train) == [1, 2, 3, 4, 5, 6]
    assert sorted(plain.validation) == [3, 6]
    assert streamed == plain  # every bit of every loss


def test_float8_is_streamed_as_it_is_plain(tmp_path: Path) -> None:
    pytest.importorskip("torchao.float8")
    path = tmp_path / "run.pt"
    flags = [*TINY, "--dtype", "bfloat16"]
    float8 = [*flags, "--float8", "rowwise"]
    plain = train_lm.main([*float8, "--plain"])
    assert train_lm.main([*float8, "--checkpoint", str(path), "--stop-at", "2"]).train == {
        step: plain.train[step] for step in (1, 2)
    }
    resumed = train_lm.main([*float8, "--resume", str(path)])
    assert resumed.train == {step: plain.train[step] for step in (3, 4, 5, 6)}
    assert resumed.validation == plain.validation
    assert plain.validation != train_lm.main([*flags, "--plain"]).validation
    assert plain.train[1] == pytest.approx(train_lm.main([*flags, "--stop-at", "1"]).train[1], 0.01)


def test_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    """From streamed to plain and back."""
    flags = [*TINY, "--dropout", "0.3"]  # so that the random state matters
    path = str(tmp_path / "run.pt")
    whole = train_lm.main([*flags, "--plain"])
    first = train_lm.main([*flags, "--checkpoint", path, "--stop-at", "2"])
    assert first.train == {step: whole.train[step] for step in (1, 2)}
    for way in (["--plain"], []):
        second = train_lm.main([*flags, *way, "--resume", path])
        assert second.train == {step: whole.train[step] for step in (3, 4, 5, 6)}
        assert second.validation == whole.validation


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--width", "30", "--heads", "4"], "got --heads 4, needed a divisor of --width 30"),
        (["--batch", "0"], "argument --batch: got '0', needed an integer from 1"),
        (["--clip", "nan"], "argument --clip: got 'nan', needed a number from 0"),
        (["--device", "cuda:99"], "argument --device: got 'cuda:99', but this machine has"),
        (["--float8", "rowwise", "--width", "40"], "got --width 40, needed a multiple of 16"),
        (["--stop-at", "7"], "got --stop-at 7, but the run ends at --steps 6"),
        (["--checkpoint-every", "2"], "got --checkpoint-every, needed --checkpoint PATH"),
        (["--resume", "no/such/run.pt"], "got --resume no/such/run.pt, needed a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flag_says_what_it_needs(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        train_lm.main([*TINY, *flags])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_what_is_no_run_to_resume(tmp_path: Path) -> None:
    path, text = str(tmp_path / "run.pt"), tmp_path / "text.pt"
    train_lm.main([*TINY, "--plain", "--checkpoint", path, "--stop-at", "1"])
    text.write_text("not a checkpoint")
    for flags, said in (
        ([path, "--seed", "1", "--layers", "3"], "seed was 0, is 1; layers was 2"),
        ([path, "--stop-at", "1"], "is at step 1, and the run ends at step 1"),
        ([str(text)], "is not a checkpoint of this program"),
    ):
        with pytest.raises(SystemExit, match=said):
            train_lm.main([*TINY, "--plain", "--resume", *flags])
