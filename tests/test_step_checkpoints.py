"""States of an optimizer over streamed parameters: loaded, moved, set by hand, and after a kill."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from megacompile import megacompile
from megacompile.errors import OptimizerError
from megacompile.runtime.updates.update import BucketUpdate
from tests.gate import Gate, in_flight
from tests.training import (
    BUCKET,
    NAME,
    OPTIMIZERS,
    STEPS,
    adamw,
    backward,
    gradients,
    move,
    net,
    train,
)
from tests.zoo import assert_same, equal, twins


@pytest.mark.parametrize("case", ["adamw", "adam, amsgrad", "sgd, momentum", "muon", "adafactor"])
def test_states_move_between_plain_and_streamed(case: str) -> None:
    make = OPTIMIZERS[case]
    plain, streamed = twins(net())
    reference = copy.deepcopy(plain)
    train(reference, make(reference), 9)
    on = make(plain)
    train(plain, on, 3)
    there = make(streamed)
    move((plain, *on), (streamed, *there))
    train(streamed, there, 3, start=3)
    move((streamed, *there), (plain, *on))
    train(plain, on, 3, start=6)
    assert_same(reference, plain)


def test_states_loaded_while_gradients_accumulate() -> None:
    plain, streamed = twins(net())
    donor = net()
    of_donor = adamw(donor)
    train(donor, of_donor, 4)
    for model in (plain, streamed):
        optimizers = adamw(model)
        train(model, optimizers, 2)
        model.zero_grad()
        backward(model, 2, 0)
        move((donor, *of_donor), (model, *optimizers))
        backward(model, 2, 1)
        optimizers[0].step()
        train(model, optimizers, 2, start=3)
    assert_same(plain, streamed)


def test_states_loaded_while_a_step_is_in_flight(gate: Gate) -> None:
    donor = net()
    of_donor = adamw(donor)
    train(donor, of_donor, 4)
    (plain, mine), (streamed, theirs) = in_flight(gate)
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        move((donor, *of_donor), (model, optimizer))
    assert_same(plain, streamed)
    gate.held = False
    gate.open()
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        train(model, [optimizer], 2, start=3)
    assert_same(plain, streamed)


def test_states_that_the_user_set() -> None:
    """What the user puts into `optimizer.state` is what the next step reads."""
    plain, streamed = twins(net())
    for model in (plain, streamed):
        (optimizer,) = adamw(model)
        train(model, [optimizer], 2)
        state = optimizer.state[model.get_parameter(NAME)]
        state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)
        optimizer.state[model.head.weight]["exp_avg_sq"].mul_(4)
        del optimizer.state[model.head.bias]
        train(model, [optimizer], 2, start=2)
    assert_same(plain, streamed)


CHECKPOINT_AT, KILLED_AT = 3, 6


def train_until_killed(folder: str) -> None:
    """Runs in a process of its own, which dies in the middle of step `KILLED_AT`."""
    torch.set_num_threads(1)
    model = megacompile(net(), device="cpu", lowering="eager")
    (optimizer,) = adamw(model)
    train(model, [optimizer], CHECKPOINT_AT)
    torch.save((model.state_dict(), optimizer.state_dict()), Path(folder, "new"))
    os.replace(Path(folder, "new"), Path(folder, "checkpoint"))
    train(model, [optimizer], KILLED_AT - CHECKPOINT_AT, start=CHECKPOINT_AT)
    run, started = BucketUpdate.__call__, threading.Event()

    def slow(update: BucketUpdate) -> None:
        if update.bucket.layout.name == BUCKET:
            started.set()
            threading.Event().wait()  # for ever
        run(update)

    optimizer.zero_grad()
    gradients(model, KILLED_AT)
    BucketUpdate.__call__ = slow  # type: ignore[assignment, method-assign]
    optimizer.step()
    assert started.wait(60)
    Path(folder, "in_flight").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_in_the_middle_of_a_step_and_resumed(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    code = f"from tests import test_step_checkpoints as t; t.train_until_killed({str(tmp_path)!r})"
    killed = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "in_flight").exists()
    whole, resumed = twins(net())
    train(whole, adamw(whole), STEPS)
    (optimizer,) = adamw(resumed)
    states = torch.load(tmp_path / "checkpoint")
    resumed.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    train(resumed, [optimizer], STEPS - CHECKPOINT_AT, start=CHECKPOINT_AT)
    assert_same(whole, resumed)


# --- states as torch.optim has them: their order, and who else has them


def shape(found: dict[str, Any]) -> list[Any]:
    """The keys of a state dict, in order."""
    return [(key, list(state)) for key, state in found["state"].items()]


@pytest.mark.parametrize("case", sorted(OPTIMIZERS))
def test_state_dict_has_the_order_of_torch(case: str) -> None:
    found = []
    for model in twins(net()):
        optimizers = OPTIMIZERS[case](model)
        train(model, optimizers, 1)
        found.append([shape(optimizer.state_dict()) for optimizer in optimizers])
    assert found[0] == found[1]


def test_state_dict_has_the_order_of_torch_beside_other_parameters() -> None:
    """A parameter that the model does not have is among its own; a bias gets a gradient later."""
    found = []
    for model in twins(net()):
        other = torch.nn.Parameter(torch.ones(3))
        params = list(model.parameters())
        late = model.head.bias.requires_grad_(False)
        optimizer = AdamW([*params[:4], other, *params[4:]], lr=1e-2)
        for i in range(3):
            late.requires_grad_(i > 0)
            optimizer.zero_grad()
            other.square().sum().backward()
            gradients(model, i)
            optimizer.step()
        found.append(shape(optimizer.state_dict()))
    assert found[0] == found[1]


def test_a_step_that_fails_leaves_no_states() -> None:
    _, streamed = twins(net())
    optimizer = AdamW(streamed.parameters(), lr=1e-2)
    gradients(streamed, 0)
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(OptimizerError, match="lr"):
        optimizer.step()
    assert not optimizer.state


def test_state_dict_has_the_order_of_torch_with_an_update_in_the_backward() -> None:
    plain = net()
    streamed = copy.deepcopy(plain)
    found = []
    for model, in_backward in ((plain, False), (streamed, True)):
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if in_backward:
            megacompile(model, device="cpu", lowering="eager", optimizer=optimizer)
        backward(model, 0, 0)
        optimizer.step()
        found.append(shape(optimizer.state_dict()))
    assert found[0] == found[1]


@pytest.mark.parametrize("case", sorted(OPTIMIZERS))
def test_what_was_loaded_goes_on_being_the_state(case: str) -> None:
    """`load_state_dict(found)` keeps the tensors of `found`, and steps write to them."""
    found = []
    for model in twins(net()):
        optimizers = OPTIMIZERS[case](model)
        train(model, optimizers, 2)
        saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        for optimizer, of_it in zip(optimizers, saved, strict=True):
            optimizer.load_state_dict(of_it)
        train(model, optimizers, 3, start=2)
        for optimizer, of_it in zip(optimizers, saved, strict=True):
            for key, state in optimizer.state_dict()["state"].items():
                assert all(value is of_it["state"][key][name] for name, value in state.items())
        found.append([v for of_it in saved for s in of_it["state"].values() for v in s.values()])
    assert len(found[0]) == len(found[1]) and all(map(equal, *found))


def test_two_models_have_the_states_that_both_loaded() -> None:
    """In torch their optimizers then share these, which is seldom wanted."""
    found = []
    for model in twins(net()):
        other = copy.deepcopy(model)
        (optimizer,), (its,) = adamw(model), adamw(other)
        train(model, [optimizer], 2)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        its.load_state_dict(saved)
        for i in range(2, 5):
            train(model, [optimizer], 1, start=i)
            train(other, [its], 1, start=i)
        found.append([model, other])
    for plain, streamed in zip(*found, strict=True):
        assert_same(plain, streamed)
