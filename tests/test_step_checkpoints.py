"""States of an optimizer over streamed parameters: loaded, moved, set by hand, and after a kill."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from megacompile import megacompile
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
from tests.zoo import assert_same, twins


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
