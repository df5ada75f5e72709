"""Ctrl-C at every instruction of the start of an update, and then a checkpoint is loaded."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from megacompile import trace
from megacompile.runtime.step.step import PreparedStep
from megacompile.runtime.updates.flight import Flight
from megacompile.runtime.updates.update import BucketUpdate
from tests import inside
from tests.training import take_steps
from tests.zoo import WIDTH, assert_same, batch, step, twins


class Interrupts:
    """Ctrl-C at the nth instruction of `PreparedStep.start` and of what it calls of ours.

    An update that has begun goes on when it is waited for, or at the end of the block: no sooner
    than whatever the loop does first, which is the worst that may happen.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = -1
        self.seen = 0
        self.may = threading.Event()
        self.may.set()
        start, run, wait = PreparedStep.start, BucketUpdate.__call__, Flight.wait

        def traced_start(prepared: PreparedStep) -> None:
            self.seen = 0
            sys.settrace(self._called)
            try:
                start(prepared)
            finally:
                sys.settrace(None)

        def held_run(update: BucketUpdate) -> None:
            assert self.may.wait(60)
            run(update)

        def opening_wait(flight: Flight) -> None:
            self.may.set()
            wait(flight)

        monkeypatch.setattr(PreparedStep, "start", traced_start)
        monkeypatch.setattr(BucketUpdate, "__call__", held_run)
        monkeypatch.setattr(Flight, "wait", opening_wait)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("megacompile"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self._instruction


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    made = Interrupts(monkeypatch)
    yield made
    made.may.set()


class Loss(nn.Module):
    """One bucket: there are some hundred instructions for each."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(x), y)


def nets() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return twins(Loss())


def at_rest(model: Any, interrupts: Interrupts) -> None:
    """Whatever was started in the background has come to its end."""
    interrupts.may.set()
    over = threading.Event()
    inside.streamed(model).machine.host_updates.workers._host.submit(over.set)
    assert over.wait(60)


@pytest.mark.parametrize("aliased", [False, True], ids=["", "aliased"])
def test_an_old_update_never_overwrites_a_checkpoint(interrupts: Interrupts, aliased: bool) -> None:
    plain, model = nets()
    optimizers = [SGD(each.parameters(), 0.1, 0.9) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        step(each, batch(0))
        optimizer.step()
    checkpoint = copy.deepcopy((plain.state_dict(), optimizers[0].state_dict()))
    aliases = dict(model.state_dict()) if aliased else {}
    gradients = {n: torch.randn_like(p) for n, p in plain.named_parameters()}

    def interrupted(at: int) -> bool:
        for name, param in model.named_parameters():
            param.grad = gradients[name].clone()
        interrupts.at = at
        interrupts.may.clear()
        if aliased:
            interrupts.may.set()  # the step itself waits
        try:
            optimizers[1].step()
        except KeyboardInterrupt:
            return True
        return False

    at = 0
    while interrupted(at := at + 1):
        for name, alias in aliases.items():
            alias.copy_(checkpoint[0][name])
        if not aliased:
            model.load_state_dict(checkpoint[0])
        optimizers[1].load_state_dict(copy.deepcopy(checkpoint[1]))
        at_rest(model, interrupts)
        for name, param in model.state_dict().items():
            assert torch.equal(param, checkpoint[0][name]), (at, name)
    assert at > 300, "every instruction of it"
    interrupts.may.set()
    interrupts.at = -1
    model.load_state_dict(checkpoint[0])
    optimizers[1].load_state_dict(copy.deepcopy(checkpoint[1]))
    take_steps(plain, optimizers[0], 3)
    take_steps(model, optimizers[1], 3)
    assert_same(plain, model)


def test_a_trace_does_not_wait_for_what_was_interrupted(interrupts: Interrupts) -> None:
    _, model = nets()
    optimizer = SGD(model.parameters(), 0.1, 0.9)
    take_steps(model, optimizer, 3)
    for at in range(1, interrupts.seen, 29):
        step(model, batch(0))
        interrupts.at = at
        with trace(model) as traced:
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            interrupts.at = -1
            take_steps(model, optimizer, 3)
        assert traced.spans
