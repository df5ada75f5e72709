"""The examples: with and without the one line they have the same losses. The demo resumes.

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
from typing import Any

import from_scratch
import pytest
import torch
import train_lm

from benchmarks import bottlenecks, workloads
from benchmarks.peers import page
from benchmarks.peers.__main__ import main
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


def losses(name: str, *flags: str) -> list[float]:
    for package in NEEDED[name]:
        pytest.importorskip(package)
    example: Any = importlib.import_module(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        found: list[float] = example.main(["--steps", str(STEPS), *flags])
    return found


@pytest.mark.parametrize("name", NEEDED)
def test_the_losses_are_those_of_the_plain_loop(name: str) -> None:
    plain = losses(name, "--device", "cpu", "--plain")
    streamed = losses(name, "--device", "cpu")
    assert len(plain) >= STEPS and len(set(plain)) > 1
    assert streamed == pytest.approx(plain, rel=LOOSE.get(name, 1e-5), abs=1e-6)


@pytest.mark.thorough
def test_ranks_have_the_losses_of_plain_ones() -> None:
    """examples/ranks.py, in two processes of torchrun: rank 0 prints its losses."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples" / "ranks.py")]
    command += ["--steps", str(STEPS), "--device", "cpu"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = []
    for how in (["--plain"], []):
        done = subprocess.run(
            [*command, *how], env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr[-4000:]
        lines = re.findall(r"^step \d+  loss (\S+)$", done.stdout, re.MULTILINE)
        found.append([float(x) for x in lines])
    plain, shared = found
    assert len(plain) == STEPS and len(set(plain)) > 1
    assert shared == pytest.approx(plain, abs=1e-4)  # it prints four digits


@pytest.mark.gpu
@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("name", [name for name in NEEDED if name != "grpo_trl"])
def test_on_a_gpu(name: str) -> None:
    """Not GRPO: one token that is sampled otherwise is another run."""
    plain = losses(name, "--device", "cuda", "--plain")
    streamed = losses(name, "--device", "cuda")
    assert streamed == pytest.approx(plain, rel=1e-3)
    assert torch.isfinite(torch.tensor(streamed)).all()


TINY = (
    *("--device", "cpu", "--layers", "2", "--width", "32", "--heads", "2", "--context", "16"),
    *("--steps", "6", "--warmup", "2", "--validate-every", "3", "--corpus-bytes", "100000"),
)


@pytest.mark.parametrize(
    "flags", [("--dropout", "0.3", "--clip", "0.1"), ("--dtype", "bfloat16", "--float8", "rowwise")]
)
def test_a_resumed_run_goes_on_exactly(flags: tuple[str, ...], tmp_path: Path) -> None:
    """From streamed to plain and back, with every bit of every loss, and the random state."""
    if "--float8" in flags:
        pytest.importorskip("torchao.float8")
    path = str(tmp_path / "run.pt")
    whole = train_lm.main([*TINY, *flags, "--plain"])
    assert sorted(whole.train) == [1, 2, 3, 4, 5, 6] and sorted(whole.validation) == [3, 6]
    first = train_lm.main([*TINY, *flags, "--checkpoint", path, "--stop-at", "2"])
    assert first.train == {step: whole.train[step] for step in (1, 2)}
    for way in (["--plain"], []):
        second = train_lm.main([*TINY, *flags, *way, "--resume", path])
        assert second.train == {step: whole.train[step] for step in (3, 4, 5, 6)}
        assert second.validation == whole.validation


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


def test_it_equals_the_plain_model(capsys: pytest.CaptureFixture[str]) -> None:
    from_scratch.main()  # which compares losses and parameters
    shown = capsys.readouterr().out
    assert "stages: 0 embed, 1 blocks.0, 2 blocks.1, 3 blocks.2, 4 blocks.3, 5 head" in shown
    assert shown.count("streamed") == 4


def test_the_page_is_what_the_files_give() -> None:
    """Of the results that are in the repository."""
    assert page.main(["--check"]) == 0


@pytest.mark.thorough
def test_from_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "r.json"
    few = ["--device", "cpu", "--tokens", "2x16", "--repeats", "1", "--warm", "0", "--steps", "1"]
    peers = ["--peer", "plain", "megacompile", "roundpipe"]
    assert main([*few, *peers, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "tiny, 2x16, plain #1: ok" in text and "tiny, 2x16, megacompile #1: ok" in text
    assert "roundpipe #1: not installed" in text
    with pytest.raises(SystemExit):
        main([*few, "--out", str(out)])
    assert "is there already" in capsys.readouterr().err


def test_what_is_staged_is_what_is_predicted() -> None:
    """Of the situation that takes a moment to build; `--predict` shows all four."""
    (row,) = bottlenecks.main(["--predict", "--only", "activations offloaded"])
    assert (row["staged"], row["explain"], row["right"]) == ("d2h", "d2h", "yes")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", [name for name in workloads.CASES if name[-2:] not in ("16", "24")]
)
def test_a_workload_has_the_losses_of_the_plain_loop(case: str) -> None:
    """The shapes that people train, made tiny; one case of each, whatever the memory."""
    (row,) = workloads.main(["--tiny", "--device", "cpu", "--steps", "3", "--case", case])
    if "skipped" in str(row["s a step"]):
        pytest.skip(str(row["s a step"]))
    assert row["late captures"] == 0
    assert float(str(row["losses apart"])) < (1e-2 if workloads.CASES[case].in_backward else 1e-3)
