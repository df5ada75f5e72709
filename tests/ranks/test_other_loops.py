"""Trainer, Accelerate and Lightning under torchrun: two gloo processes, plain and megacompiled.

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
from tests.ranks import other_saves
from tests.ranks.here import Values, differing
from tests.ranks.other_saves import SAVED, STEPS
from tests.zoo import equal

WORLD = 2
TIMEOUT_S = 300
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(count=WORLD))]


def torchrun(module: str, loop: str, folder: Path, *how: str, device: str = "cpu") -> list[Any]:
    """What each process found of a loop."""
    package = {"trainer": "accelerate", "model_parallel": "lightning"}.get(loop, loop)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    arguments = loop, str(folder), *how
    processes.torchrun(module, *arguments, ranks=WORLD, timeout_s=TIMEOUT_S, device=device)
    return [torch.load(folder / str(rank)) for rank in range(WORLD)]


@pytest.mark.parametrize("how", ["ddp", "mesh"])
@pytest.mark.parametrize("loop", torchrun_loops.LOOPS)
def test_losses_and_parameters_are_the_plain_ones(loop: str, how: str, tmp_path: Path) -> None:
    """A DistributedDataParallel is around the model; or ranks share it, and one line changes."""
    ranks = torchrun("tests.torchrun_loops", loop, tmp_path, *(["mesh"] if how == "mesh" else []))
    for plain, ours in ranks:
        assert plain["schedules"] == 0 and ours["schedules"] > 0 and len(plain["losses"]) >= 4
        if how == "ddp":
            assert plain["losses"] == ours["losses"]
        assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert not differing(ours["params"], plain["params"], 0.0 if how == "ddp" else 1e-5)
        for name, param in ours["params"].items():
            if "running" not in name:  # a buffer is this rank's own when the last step is over
                assert equal(param, ranks[0][1]["params"][name]), f"{name} differs between ranks"
    assert ranks[0][1]["losses"] != ranks[1][1]["losses"] or loop == "trainer", "rows of its own"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loop", other_saves.LOOPS)
def test_a_run_resumes_from_what_loops_save(device: str, loop: str, tmp_path: Path) -> None:
    """It goes on as one that was never interrupted, in every bit; the files hold all of each
    tensor, and a plain model loads them."""
    for found in torchrun("tests.ranks.other_saves", loop, tmp_path, device, device=device):
        params, states = found["first"]
        again, of_again = found["again"]
        assert not differing(params, again)
        assert len(states) == len(params) and states[0].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for ours, theirs in zip(states, of_again, strict=True):
            assert not differing(ours, theirs)
        assert differing(found["saved"], params), "two steps lie between"
    FILES[loop](tmp_path, found["saved"], params)


def pretrained(folder: Path) -> Values:
    """What `from_pretrained()` finds."""
    from transformers import Qwen2ForCausalLM

    model, said = Qwen2ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    return {name: param.detach() for name, param in model.named_parameters()}


def whole_states(found: Any, params: Values) -> bool:
    """Has an optimizer's state dict all of each moment, as a plain optimizer loads it?"""
    moments = [state[key] for state in found["state"].values() for key in ("exp_avg", "exp_avg_sq")]
    shapes = sorted(tuple(moment.shape) for moment in moments)
    expected = sorted(tuple(param.shape) for param in params.values() for _ in range(2))
    return {type(moment) for moment in moments} == {Tensor} and shapes == expected


def of_trainer(folder: Path, saved: Values, last: Values) -> None:
    for step, values in ((SAVED, saved), (STEPS, last)):
        checkpoint = folder / "out" / f"checkpoint-{step}"
        assert not differing(pretrained(checkpoint), values)
        assert whole_states(torch.load(checkpoint / "optimizer.pt"), saved)
    assert not differing(pretrained(folder / "model"), last)


def of_accelerate(folder: Path, saved: Values, last: Values) -> None:
    from safetensors.torch import load_file

    state, model = (load_file(folder / at / "model.safetensors") for at in ("state", "model"))
    assert not differing(state, saved)
    assert not differing(model, last)
    assert not differing(pretrained(folder / "pretrained"), last)
    assert whole_states(torch.load(folder / "state" / "optimizer.bin"), saved)


def of_lightning(folder: Path, saved: Values, last: Values) -> None:
    for step, values in ((SAVED, saved), (STEPS, last)):
        found = torch.load(folder / "out" / f"step={step}.ckpt", weights_only=False)
        ours = {name.removeprefix("model."): v for name, v in found["state_dict"].items()}
        assert equal(ours.pop("lm_head.weight"), values["model.embed_tokens.weight"])
        assert not differing(ours, values)
        assert whole_states(found["optimizer_states"][0], saved)


FILES = {"trainer": of_trainer, "accelerate": of_accelerate, "lightning": of_lightning}
