"""Forked children and processes that parameters are sent to.

A child of a fork has a model of its own, which it may read and train, and the parent's stays as it
is. Children are ended, and waited for, whatever happens.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

from megacompile.errors import OptimizerError
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.guards import GuardedParameter
from tests import inside
from tests.gate import Gate, in_flight
from tests.training import BUCKET, NAME, adamw, gradients, net, train
from tests.zoo import assert_same, batch, equal, stack, step, twins

TIMEOUT_S = 60

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_child(function: Callable[[], Any]) -> Any:
    """What `function` gives in a forked child, which is ended after a minute at the latest."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(TIMEOUT_S)  # one that hangs is killed by it
        code = 1
        try:
            os.close(read)
            found = pickle.dumps(function())
            with os.fdopen(write, "wb") as file:
                file.write(found)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        found = file.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return pickle.loads(found)


def values(model: nn.Module) -> list[Any]:
    return [param.detach().clone().numpy() for param in model.parameters()]


def same(model: nn.Module, found: list[Any]) -> bool:
    return all(
        equal(param.detach(), torch.from_numpy(value))
        for param, value in zip(model.parameters(), found, strict=True)
    )


# --- a child that reads


def test_a_child_reads_while_an_update_is_in_flight(gate: Gate) -> None:
    """The fork waits for it: in the child there is nobody who would do it."""
    (plain, _), (streamed, _) = in_flight(gate)
    found = in_child(lambda: values(streamed))
    assert BUCKET in gate.ran
    assert same(plain, found)
    assert_same(plain, streamed)


def test_the_workers_of_a_data_loader_read_the_model(gate: Gate) -> None:
    class Data(Dataset[Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            param: nn.Parameter = streamed.get_parameter(NAME)
            return param.detach() + index

    (plain, _), (streamed, _) = in_flight(gate)
    loader = DataLoader(Data(), num_workers=2, multiprocessing_context="fork", timeout=TIMEOUT_S)
    for i, item in enumerate(loader):
        assert equal(item[0], plain.get_parameter(NAME).detach() + i)
    assert_same(plain, streamed)


def test_an_update_that_failed_says_so_in_both(gate: Gate) -> None:
    _, streamed = twins(net())
    (optimizer,) = adamw(streamed)
    train(streamed, [optimizer], 2)
    optimizer.zero_grad()
    gradients(streamed, 2)
    gate.fails = BUCKET
    optimizer.step()

    def says() -> str:
        with pytest.raises(OptimizerError) as error:
            streamed.get_parameter(NAME).sum()
        return str(error.value)

    assert "out of numbers" in in_child(says)
    assert "out of numbers" in says()


# --- a child that writes and trains


def test_what_a_child_writes_is_its_own() -> None:
    plain, streamed = twins(stack()[0])
    for each in (plain, streamed):
        step(each, batch(0))

    def writes() -> list[Any]:
        with torch.no_grad():
            for param in streamed.parameters():
                param.fill_(7.0)
                param.grad.zero_()
        return values(streamed)

    assert all((value == 7).all() for value in in_child(writes))
    assert_same(plain, streamed)


def some_steps(model: nn.Module, optimizer: Optimizer, start: int) -> None:
    for k in range(start, start + 3):
        optimizer.zero_grad()
        step(model, batch(k))
        optimizer.step()


trains_in_a_child = pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch's autograd refuses to run in a forked child"
)


@trains_in_a_child
@pytest.mark.parametrize("make", [AdamW, lambda p: SGD(p, 0.1, 0.9)], ids=["adamw", "sgd"])
def test_a_child_trains(make: Callable[..., Optimizer]) -> None:
    """Then the parent does: each has a thread of its own for updates."""
    plain, streamed = twins(stack()[0])
    mine, theirs = make(plain.parameters()), make(streamed.parameters())
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


@trains_in_a_child
def test_a_child_that_ends_as_a_program_does_ends() -> None:
    """It does not wait for threads that its parent has."""
    _, streamed = twins(stack()[0])
    some_steps(streamed, AdamW(streamed.parameters()), 0)
    child = multiprocessing.get_context("fork").Process(
        target=some_steps, args=(streamed, AdamW(streamed.parameters()), 3)
    )
    child.start()
    child.join(TIMEOUT_S)
    try:
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()


# --- page-locked memory, which is shared


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locking that does nothing."""
    stub = SimpleNamespace(cudaHostRegister=lambda *args: 0, cudaHostUnregister=lambda *args: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stub)


def test_a_child_writes_to_page_locked_memory(cudart: None) -> None:
    size = 5 * 2**20 + 3
    buffer = HostBuffer(size, pin=True)
    flat = buffer.bytes(size)
    flat.fill_(1)
    other = HostBuffer(100, pin=True).bytes(100).fill_(3)

    def writes() -> tuple[bool, bool, bool]:
        before = bool((flat == 1).all())
        flat.fill_(2)
        mine = HostBuffer(100, pin=True).bytes(100).fill_(9)
        return before, bool((flat == 2).all()), bool((mine == 9).all())

    assert in_child(writes) == (True, True, True)
    assert bool((flat == 1).all()) and bool((other == 3).all())
    later = HostBuffer(100, pin=True).bytes(100)
    assert bool((later == 0).all())


def test_page_locked_memory_is_given_back(cudart: None) -> None:
    """Of the file that it lies in."""
    buffer = HostBuffer(2**22, pin=True)
    file, before = buffer._file, os.fstat(buffer._file.fd or 0).st_blocks
    in_child(lambda: None)
    buffer.bytes(2**22).fill_(1)
    del buffer
    assert file.fd is not None
    assert os.fstat(file.fd).st_blocks <= before - 2**22 // 512


def test_a_child_gives_back_nothing_of_its_parents(cudart: None) -> None:
    buffers = [HostBuffer(2**20, pin=True)]
    flat = torch.frombuffer(buffers[0], dtype=torch.uint8).fill_(5)
    aside = buffers[0]._file, buffers[0]._at

    def drops() -> None:
        nonlocal flat
        del flat
        buffers.clear()

    in_child(drops)
    assert bool((flat == 5).all()) and aside[1] is not None


def test_without_a_file_it_stays_as_it_was(cudart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megacompile.runtime.device.buffers.SharedFile.take", lambda file, size: None
    )
    flat = HostBuffer(100, pin=True).bytes(100)
    assert bool((flat.fill_(4) == 4).all())


# --- parameters that are sent to another process


def shared_by_method(model: Any) -> None:
    model.share_memory()


def shared_by_queue(model: Any) -> None:
    """As a queue does it that `state_dict()` is put into."""
    ForkingPickler.dumps(model.state_dict())


def shared_by_parameter(model: Any) -> None:
    """As a spawned worker gets the parameters."""
    ForkingPickler.dumps(list(model.parameters()))


SENT = [shared_by_method, shared_by_queue, shared_by_parameter]


@pytest.mark.parametrize("send", SENT)
@pytest.mark.parametrize("masters", [False, True], ids=["", "masters"])
def test_parameters_that_were_sent_are_trained_on(
    send: Callable[..., None], masters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostBucket, "said_moved", False)
    options = {"compute_dtype": torch.bfloat16} if masters else {}
    _, reference = twins(stack()[0], **options)
    plain, streamed = twins(stack()[0], **options)
    del plain
    pair = [(m, AdamW(m.parameters(), 0.01)) for m in (reference, streamed)]
    for model, optimizer in pair:
        some_steps(model, optimizer, 0)
    graphs = len(inside.streamed(streamed).graphs)
    send(streamed)
    with pytest.warns(UserWarning, match="moved to memory that processes share"):
        some_steps(*pair[1], 3)
    some_steps(*pair[0], 3)
    assert_same(reference, streamed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, optimizer in pair:
            some_steps(model, optimizer, 6)
    assert_same(reference, streamed)
    with torch.no_grad():
        for model in (reference, streamed):
            for param in model.parameters():
                param.mul_(0.5)
    for model, optimizer in pair:
        some_steps(model, optimizer, 9)
    assert_same(reference, streamed)
    assert len(inside.streamed(streamed).graphs) == graphs, "nothing is captured anew"


@pytest.mark.parametrize("send", SENT)
@pytest.mark.filterwarnings("ignore:megacompile. parameter")
def test_parameters_that_are_sent_between_backward_and_step(send: Callable[..., None]) -> None:
    plain, streamed = twins(stack()[0])
    for model in (plain, streamed):
        optimizer = AdamW(model.parameters(), 0.01)
        some_steps(model, optimizer, 0)
        optimizer.zero_grad()
        step(model, batch(7))
        if model is streamed:
            send(model)
        optimizer.step()
        some_steps(model, optimizer, 3)
    assert_same(plain, streamed)


@pytest.mark.filterwarnings("ignore:megacompile. parameter")
def test_parameters_in_flight_are_sent_as_they_will_be(gate: Gate) -> None:
    (plain, _), (streamed, _) = in_flight(gate)
    param = streamed.get_parameter(NAME)
    assert isinstance(param, GuardedParameter)
    shared_by_parameter(streamed)
    assert BUCKET in gate.waited
    assert_same(plain, streamed)
