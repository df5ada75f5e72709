"""Forked children and processes that parameters are sent to.

A child of a fork has a model of its own, which it may read and train, and the parent's stays as it
is. Children are ended, and waited for, whatever happens.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

from megacompile.errors import OptimizerError
from tests import inside
from tests.processes import CHILD_LIMIT_S, in_child, trains_in_a_child
from tests.stateful.late import late
from tests.zoo import assert_same, batch, equal, stack, step, twins

NAME = "layers.1.up.weight"

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def values(model: nn.Module) -> list[Any]:
    return [param.detach().clone().numpy() for param in model.parameters()]


def same(model: nn.Module, found: list[Any]) -> bool:
    pairs = zip(model.parameters(), found, strict=True)
    return all(equal(param.detach(), torch.from_numpy(value)) for param, value in pairs)


def some_steps(model: nn.Module, optimizer: Optimizer, start: int, count: int = 3) -> None:
    for k in range(start, start + count):
        optimizer.zero_grad()
        step(model, batch(k))
        optimizer.step()


def test_children_that_read_while_an_update_is_in_flight() -> None:
    """The fork waits for it: in the child there is nobody who would do it."""
    plain, streamed = twins(stack()[0])
    both = [(m, AdamW(m.parameters(), 0.01)) for m in (plain, streamed)]
    for model, optimizer in both:
        some_steps(model, optimizer, 0, 2)
    workers = late(streamed)

    def update(start: int) -> None:
        for model, optimizer in both:
            some_steps(model, optimizer, start, 1)
        assert workers.names, "in flight"

    class Data(Dataset[Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            param: nn.Parameter = streamed.get_parameter(NAME)
            return param.detach() + index

    update(2)
    assert same(plain, in_child(lambda: values(streamed)))
    assert not workers.names
    update(3)
    loader = DataLoader(
        Data(), num_workers=2, multiprocessing_context="fork", timeout=CHILD_LIMIT_S
    )
    for i, item in enumerate(loader):
        assert equal(item[0], plain.get_parameter(NAME).detach() + i)
    assert_same(plain, streamed)

    # an update that failed says so in both
    some_steps(streamed, both[1][1], 4, 1)
    workers.fails = "layers.1"

    def error_of() -> str:
        with pytest.raises(OptimizerError) as error:
            streamed.get_parameter(NAME).sum()
        return str(error.value)

    assert "out of numbers" in in_child(error_of)
    assert "out of numbers" in error_of()


@trains_in_a_child
def test_a_child_trains_and_ends() -> None:
    """Then the parent does: each has a thread of its own for updates."""
    plain, streamed = twins(stack()[0])
    mine, theirs = AdamW(plain.parameters()), AdamW(streamed.parameters())
    some_steps(plain, mine, 0)
    some_steps(streamed, theirs, 0)

    def trains() -> list[Any]:
        some_steps(streamed, theirs, 3)
        return values(streamed)

    found = in_child(trains)
    assert_same(plain, streamed)
    some_steps(plain, mine, 3)
    some_steps(streamed, theirs, 3)
    assert same(plain, found)
    assert_same(plain, streamed)
    # one that ends as a program does does not wait for threads that its parent has
    child = multiprocessing.get_context("fork").Process(
        target=some_steps, args=(streamed, AdamW(streamed.parameters()), 3)
    )
    child.start()
    child.join(CHILD_LIMIT_S)
    try:
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locking that does nothing."""
    stub = SimpleNamespace(cudaHostRegister=lambda *args: 0, cudaHostUnregister=lambda *args: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stub)


def test_a_child_and_page_locked_memory(cudart: None) -> None:
    """Processes share it: what a child writes is its own all the same."""
    size = 5 * 2**20 + 3
    flat = inside.page_locked(size).bytes(size).fill_(1)
    other = inside.page_locked(100).bytes(100).fill_(3)

    def writes() -> tuple[bool, bool, bool]:
        before = bool((flat == 1).all())
        flat.fill_(2)
        mine = inside.page_locked(100).bytes(100).fill_(9)
        return before, bool((flat == 2).all()), bool((mine == 9).all())

    assert in_child(writes) == (True, True, True)
    assert bool((flat == 1).all()) and bool((other == 3).all())
    assert bool((inside.page_locked(100).bytes(100) == 0).all())

    # a child that drops it gives back nothing of its parent's
    buffers = [inside.page_locked(2**20)]
    kept = torch.frombuffer(buffers[0], dtype=torch.uint8).fill_(5)

    def drops() -> None:
        nonlocal kept
        del kept
        buffers.clear()

    in_child(drops)
    assert bool((kept == 5).all())


def test_page_locked_memory_is_given_back(cudart: None) -> None:
    """Of the file that it lies in."""
    buffer = inside.page_locked(2**22)
    assert buffer._at is not None
    file, _ = buffer._at
    before = os.fstat(file).st_blocks
    in_child(lambda: None)
    buffer.bytes(2**22).fill_(1)
    del buffer
    assert os.fstat(file).st_blocks <= before - 2**22 // 512


SENT: dict[str, Callable[[Any], object]] = {
    "share_memory()": lambda model: model.share_memory(),
    "a spawned worker": lambda model: ForkingPickler.dumps(list(model.parameters())),
}


@pytest.mark.filterwarnings("ignore:megacompile. parameter")
def test_parameters_that_were_sent_are_trained_on() -> None:
    """Also between a backward and its step, and while an update is in flight."""
    for name, send in SENT.items():
        plain, streamed = twins(stack()[0])
        pair = [(m, AdamW(m.parameters(), 0.01)) for m in (plain, streamed)]
        for model, optimizer in pair:
            some_steps(model, optimizer, 0, 2)
        graphs = len(inside.graphs(streamed))
        workers = late(streamed)
        for model, optimizer in pair:
            optimizer.zero_grad()
            step(model, batch(7))
            if model is streamed and name != "a spawned worker":
                send(model)
            optimizer.step()
        if name == "a spawned worker":
            assert workers.names
            send(streamed)
            assert not workers.names, "they are sent as they will be"
        for model, optimizer in pair:
            some_steps(model, optimizer, 3)
        assert_same(plain, streamed)
        with torch.no_grad():
            for model, _ in pair:
                for param in model.parameters():
                    param.mul_(0.5)
        for model, optimizer in pair:
            some_steps(model, optimizer, 9, 1)
        assert_same(plain, streamed)
        assert len(inside.graphs(streamed)) == graphs, "nothing is captured anew"
