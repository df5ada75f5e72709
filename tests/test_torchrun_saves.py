"""Trainer, Accelerate and Lightning save what two processes share, and resume from it.

Those of the packages that are not there are skipped.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile
from megacompile.runtime.model import loops
from tests import processes
from tests.torchrun_saves import LOOPS, SAVED, STEPS
from tests.zoo import equal

WORLD = 2
TIMEOUT_S = 300
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(count=WORLD))]
NEEDS = {"trainer": "accelerate", "accelerate": "accelerate", "lightning": "lightning"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_resumes_from_what_loops_save(device: str, loop: str, tmp_path: Path) -> None:
    """It goes on as one that was never interrupted, in every bit; the files hold all of each
    tensor, and a plain model loads them."""
    if importlib.util.find_spec(NEEDS[loop]) is None:
        pytest.skip(f"needs {NEEDS[loop]}")
    arguments = loop, str(tmp_path), device
    processes.torchrun(
        "tests.torchrun_saves", *arguments, ranks=WORLD, timeout_s=TIMEOUT_S, device=device
    )
    for found in (torch.load(tmp_path / str(rank)) for rank in range(WORLD)):
        params, states = found["first"]
        again, of_again = found["again"]
        assert not differing(params, again)
        assert len(states) == len(params) and states[0].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for ours, theirs in zip(states, of_again, strict=True):
            assert not differing(ours, theirs)
        assert differing(found["saved"], params), "two steps lie between"
    FILES[loop](tmp_path, found["saved"], params)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The tensors that are not equal in every bit, by name."""
    return sorted(found.keys() ^ expected.keys()) or [
        f"{name}: {float((value.double() - found[name].double()).abs().max()):.2g} apart"
        for name, value in expected.items()
        if not equal(value, found[name])
    ]


def pretrained(folder: Path) -> dict[str, Tensor]:
    """What `from_pretrained()` finds."""
    from transformers import Qwen2ForCausalLM

    model, said = Qwen2ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    return {name: param.detach() for name, param in model.named_parameters()}


def whole_states(found: Any, params: dict[str, Tensor]) -> bool:
    """Has an optimizer's state dict all of each moment, as a plain optimizer loads it?"""
    moments = [state[key] for state in found["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    shapes = sorted(tuple(moment.shape) for moment in moments)
    expected = sorted(tuple(param.shape) for param in params.values() for _ in range(2))
    return {type(moment) for moment in moments} == {Tensor} and shapes == expected


def of_trainer(folder: Path, saved: dict[str, Tensor], last: dict[str, Tensor]) -> None:
    for step, values in ((SAVED, saved), (STEPS, last)):
        checkpoint = folder / "out" / f"checkpoint-{step}"
        assert not differing(pretrained(checkpoint), values)
        assert whole_states(torch.load(checkpoint / "optimizer.pt"), saved)
    assert not differing(pretrained(folder / "model"), last)


def of_accelerate(folder: Path, saved: dict[str, Tensor], last: dict[str, Tensor]) -> None:
    from safetensors.torch import load_file

    state, model = (load_file(folder / at / "model.safetensors") for at in ("state", "model"))
    assert not differing(state, saved)
    assert not differing(model, last)
    assert not differing(pretrained(folder / "pretrained"), last)
    assert whole_states(torch.load(folder / "state" / "optimizer.bin"), saved)


def of_lightning(folder: Path, saved: dict[str, Tensor], last: dict[str, Tensor]) -> None:
    for step, values in ((SAVED, saved), (STEPS, last)):
        found = torch.load(folder / "out" / f"step={step}.ckpt", weights_only=False)
        ours = {name.removeprefix("model."): v for name, v in found["state_dict"].items()}
        assert equal(ours.pop("lm_head.weight"), values["model.embed_tokens.weight"])
        assert not differing(ours, values)
        assert whole_states(found["optimizer_states"][0], saved)


FILES = {"trainer": of_trainer, "accelerate": of_accelerate, "lightning": of_lightning}


def test_a_loop_that_is_imported_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves the model first: from then on it saves what ranks share."""
    loop = types.ModuleType("accelerate.checkpointing")
    vars(loop)["load_model"] = stock = lambda model: model
    model = megacompile(nn.Linear(2, 2), device="cpu")
    monkeypatch.setattr(loops, "_SHARED", [])
    monkeypatch.setattr(loops, "_TAKEN", set())
    monkeypatch.setitem(sys.modules, "accelerate.checkpointing", loop)
    model.to("cpu")
    assert vars(loop)["load_model"] is stock, "no ranks share a model"
    monkeypatch.setattr(loops, "_SHARED", [lambda model: []])
    model.to("cpu")
    ours = vars(loop)["load_model"]
    assert ours is not stock and ours(model) is model
