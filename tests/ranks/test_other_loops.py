"""Trainer, Accelerate and Lightning under torchrun: two processes, plain and megacompiled.

Those of the packages that are not there are skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import processes, torchrun_loops
from tests.ranks.here import Values, differing
from tests.torchrun_loops import SAVED, STEPS, WORLD

TIMEOUT_S = 500
HEAD = "lm_head.weight"  # another name of the embedding
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(count=WORLD))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loop", torchrun_loops.LOOPS)
def test_they_train_as_without_and_resume_from_what_they_save(
    loop: str, device: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec("accelerate" if loop == "trainer" else loop) is None:
        pytest.skip(f"needs {loop}")
    processes.torchrun(
        "tests.torchrun_loops",
        *(loop, str(tmp_path), device),
        ranks=WORLD,
        timeout_s=TIMEOUT_S,
        device=device,
    )
    first, other = (torch.load(tmp_path / str(rank)) for rank in range(WORLD))
    for found in (first, other):
        for way in found.keys() - {"plain", "saves", "resumes"}:
            as_plain(way, found["plain"], found[way])
        resumes(found["saves"], found["resumes"])
    for way in first.keys() - {"plain", "saves", "resumes"}:
        mine, theirs = (without_buffers(each[way]["values"]) for each in (first, other))
        assert not differing(mine, theirs), f"{way}: ranks differ"
        assert first[way]["losses"] != other[way]["losses"] or loop == "trainer", "rows of its own"
    FILES[loop](tmp_path, first["saves"]["saved"], first["saves"]["values"])


def without_buffers(values: Values) -> Values:
    """Where no DistributedDataParallel sends them, or none has since, they are a rank's own."""
    return {name: value for name, value in values.items() if "running" not in name}


def as_plain(way: str, plain: Any, ours: Any) -> None:
    """Losses, parameters and buffers are the plain ones."""
    assert len(plain["losses"]) >= STEPS
    near = 0.0 if way == "ddp" else 1e-5
    assert ours["losses"] == pytest.approx(plain["losses"], rel=near, abs=0.0)
    a, b = ours["values"], plain["values"]
    if way == "model parallel":
        a, b = without_buffers(a), without_buffers(b)
    assert not differing(a, b, near)


def resumes(first: Any, again: Any) -> None:
    """It goes on as one that was never interrupted, in every bit."""
    assert not differing(first["values"], again["values"])
    assert len(first["states"]) == len(first["values"].keys() - {HEAD})
    for ours, theirs in zip(first["states"], again["states"], strict=True):
        assert ours.keys() == {"step", "exp_avg", "exp_avg_sq"} and not differing(ours, theirs)
    assert differing(first["saved"], first["values"]), "two steps lie between"


# The files hold all of each tensor, and a plain model loads them.


def pretrained(folder: Path) -> Values:
    """What `from_pretrained()` finds."""
    from transformers import Qwen2ForCausalLM

    model, said = Qwen2ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    return dict(model.state_dict())


def whole_states(found: Any, values: Values) -> bool:
    """Has an optimizer's state dict all of each moment, as a plain optimizer loads it?"""
    moments = [state[key] for state in found["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    shapes = sorted(tuple(moment.shape) for moment in moments)
    expected = [tuple(value.shape) for name, value in values.items() if name != HEAD]
    return {type(moment) for moment in moments} == {Tensor} and shapes == sorted(2 * expected)


def of_trainer(folder: Path, saved: Values, last: Values) -> None:
    for step, values in ((SAVED, saved), (STEPS, last)):
        checkpoint = folder / "out" / f"checkpoint-{step}"
        assert not differing(pretrained(checkpoint), values)
        assert whole_states(torch.load(checkpoint / "optimizer.pt"), saved)
    assert not differing(pretrained(folder / "model"), last)


def of_accelerate(folder: Path, saved: Values, last: Values) -> None:
    from safetensors.torch import load_file

    for at, values in (("state", saved), ("model", last)):
        found = load_file(folder / at / "model.safetensors")
        assert differing(found, values) == [f"only in one: {HEAD}"]
    assert not differing(pretrained(folder / "pretrained"), last)
    assert whole_states(torch.load(folder / "state" / "optimizer.bin"), saved)


def of_lightning(folder: Path, saved: Values, last: Values) -> None:
    for step, values in ((SAVED, saved), (STEPS, last)):
        found = torch.load(folder / "out" / f"step={step}.ckpt", weights_only=False)
        ours = {name.removeprefix("model."): v for name, v in found["state_dict"].items()}
        assert not differing(ours, values)
        assert whole_states(found["optimizer_states"][0], saved)


FILES = {"trainer": of_trainer, "accelerate": of_accelerate, "lightning": of_lightning}
