"""What is around a megacompiled model: default devices, threads, tracers, kernels, odd dtypes.

Each gives what the plain model gives, or an error that says what to do.
"""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW

from megacompile import ModelError, megacompile
from megacompile.errors import OptimizerError
from tests import inside
from tests.equality.nets import Applies
from tests.processes import CHILD_LIMIT_S, in_child, in_threads, python, trains_in_a_child
from tests.stateful.late import late
from tests.training import losses_of, take_steps
from tests.zoo import Inputs, assert_close, assert_same, equal, stack, stacks, twins

THREADS = 3

needs_compiler = pytest.mark.skipif(not inside.has_cpp_compiler(), reason="needs a C++ compiler")


def train(model: nn.Module, inputs: Inputs, steps: int = 3) -> list[float]:
    optimizer = AdamW(model.parameters(), lr=0.01)
    return losses_of(model, optimizer, [inputs] * steps, clip=0.1)


def test_default_device() -> None:
    plain, streamed, inputs = stacks()
    copied = copy.deepcopy(plain)
    torch.set_default_device("meta")
    try:
        made = megacompile(copied, device="cpu", lowering="eager")
        found = [train(model, inputs) for model in (streamed, made)]
    finally:
        torch.set_default_device(None)
    assert found == [train(plain, inputs)] * 2
    assert_same(plain, streamed)
    assert_same(plain, made)


def test_first_calls_in_threads() -> None:
    """What says that FX traces is of the process: another thread's call was refused, and all later
    ones where two tracers ended in another order than they began."""
    plain, inputs = stack()
    models = [twins(copy.deepcopy(plain))[1] for _ in range(THREADS + 1)]
    want = train(plain, inputs)
    found: list[list[float]] = []
    in_threads([lambda m=m: found.append(train(m, inputs)) for m in models[:THREADS]])  # type: ignore[misc]
    assert found == [want] * THREADS
    assert not torch.fx._symbolic_trace._is_fx_tracing_flag
    assert train(models[THREADS], inputs) == want


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "force_compile_during_fx_trace"),
    reason="this torch always refuses",
)
def test_a_call_while_another_thread_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is compiled already waits for nobody."""
    _, model, inputs = stacks()
    want = model(**inputs)
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    assert torch.equal(model(**inputs), want)


class Attention(nn.Module):
    """Attention whose kernels differ in their last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, -1, 3, 2, 16).transpose(1, 3).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + y.transpose(1, 2).reshape(x.shape)


def attends(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Layers of attention, of which some may choose their kernel."""
    first, second, third, fourth = m.layers
    x = first(x)
    if m.within:
        with sdpa_kernel(SDPBackend.MATH):
            x = third(second(x))
    else:
        x = third(second(x))
    return fourth(x), x


@pytest.mark.parametrize("within", [False, True])
def test_the_kernel_of_attention_is_the_one_of_the_call(within: bool) -> None:
    """Also in a backward that is traced later, because other outputs were expected, and for lengths
    that change. What a captured graph sets is set for each of its stages, and for nothing else."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Attention() for _ in range(4))
    plain, streamed = twins(Applies(attends, layers=layers, within=within))
    cuda: Any = torch.backends.cuda
    flash, math = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
    kernels = [[flash, math]] * 3 if within else [[flash], [math], [flash]]
    for alone, length in ((False, 100), (True, 100), (True, 60)):
        found, x = [], torch.randn(2, length, 32)
        for kernel in kernels:
            outputs = []
            for model in (plain, streamed):
                with sdpa_kernel(kernel):
                    last, other = model(x)
                assert cuda.math_sdp_enabled() and cuda.flash_sdp_enabled()
                loss = last.square().mean() if alone else last.mean() + other.mean()
                loss.backward()
                outputs.append(last.detach())
            assert equal(*outputs)
            found.append(outputs[0])
        assert equal(found[0], found[2]) and equal(found[0], found[1]) == within
        assert_same(plain, streamed)


TRACERS: dict[str, Callable[[Any, Inputs], Any]] = {
    "torch.func": lambda m, i: torch.func.grad(lambda x: m(x, i["y"]))(i["x"]),
    "torch.func, vmap": lambda m, i: torch.func.vmap(lambda x: m(x[None])[0])(i["x"]),
    "torch.export": lambda m, i: torch.export.export(m, (i["x"],)).module()(i["x"]),
    "torch.jit.trace": lambda m, i: torch.jit.trace(m, (i["x"],))(i["x"]),
}


@pytest.mark.filterwarnings("ignore")
def test_tracers_are_refused_and_take_a_copy() -> None:
    plain, streamed, inputs = stacks()
    for tracer in TRACERS.values():
        with pytest.raises(ModelError):
            tracer(streamed, inputs)
        wanted, got = (tracer(model, inputs) for model in (plain, copy.deepcopy(streamed)))
        assert equal(wanted.detach(), got.detach())
        assert train(plain, inputs, 1) == train(streamed, inputs, 1), "and it still works"
    assert_same(plain, streamed)


@needs_compiler
@pytest.mark.filterwarnings("ignore:megacompile")
def test_odd_parameters_with_inductor() -> None:
    """One without elements and a complex one beside others."""

    def odd(model: Any, x: Tensor) -> Tensor:
        hidden = torch.cat([torch.tanh(model.first(x)), model.empty]) * model.factor
        return torch.view_as_real(hidden).square().sum()

    torch.manual_seed(0)
    factor = nn.Parameter(torch.full((4,), 0.5, dtype=torch.complex64))
    named = {"first": nn.Linear(4, 4), "empty": nn.Parameter(torch.empty(0, 4)), "factor": factor}
    plain, streamed = twins(Applies(odd, **named), lowering="inductor")
    inputs = {"x": torch.randn(2, 4)}
    assert train(plain, inputs) == pytest.approx(train(streamed, inputs), rel=1e-5)
    assert_close(plain, streamed, 1e-5)


def test_dynamo_disabled_and_no_home() -> None:
    """In a process of its own: both are read when torch is imported."""
    program = (
        "from tests.zoo import stacks, assert_steps_same\n"
        "assert_steps_same(*stacks())\n"
        "print('the same')"
    )
    nowhere = "/proc/none"
    result = python("-c", program, TORCHDYNAMO_DISABLE="1", HOME=nowhere, XDG_CACHE_HOME="")
    assert "the same" in result.stdout
    assert "megacompile" in result.stderr, "it says that it is not captured"


NAME = "layers.1.up.weight"


class Meets(nn.Module):
    """Notes how many calls are inside at once; the first one gives a second one time to come."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.inside, self.most, self.second = 0, 0, threading.Event()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def meet(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.inside == 1:
            self.second.wait(0.3)
        else:
            self.second.set()
        self.inside -= 1

    def forward(self, x: Tensor) -> Tensor:
        self.meet()
        return self.layer(x)


def test_one_call_of_a_model_at_a_time() -> None:
    """It lends its parameters to a call."""
    model = megacompile(Meets(), device="cpu", lowering="eager")
    in_threads([lambda: model(torch.ones(1, 2))] * 2)
    assert model.most == 1


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def values(model: nn.Module) -> list[Any]:
    return [param.detach().clone().numpy() for param in model.parameters()]


def same(model: nn.Module, found: list[Any]) -> bool:
    pairs = zip(model.parameters(), found, strict=True)
    return all(equal(param.detach(), torch.from_numpy(value)) for param, value in pairs)


@forks
def test_an_update_that_failed_says_so_in_both_processes() -> None:
    _, model = twins(stack()[0])
    workers = late(model)
    take_steps(model, AdamW(model.parameters(), 0.01), 3)
    workers.fails = "layers.1"

    def error_of() -> str:
        with pytest.raises(OptimizerError) as error:
            model.get_parameter(NAME).sum()
        return str(error.value)

    assert "out of numbers" in in_child(error_of)
    assert "out of numbers" in error_of()


@forks
def test_an_update_that_begins_during_a_fork_is_the_parents() -> None:
    """The child has the values of before: it waited for good for those that nobody makes there."""
    plain, streamed = twins(stack()[0])
    mine, theirs = AdamW(plain.parameters(), 0.01), AdamW(streamed.parameters(), 0.01)
    take_steps(plain, mine, 3)
    take_steps(streamed, theirs, 3)
    with inside.begun_in_a_fork(streamed, lambda: take_steps(streamed, theirs, 1, start=3)):
        found = in_child(lambda: values(streamed))
    assert same(plain, found)
    take_steps(plain, mine, 1, start=3)
    assert_same(plain, streamed)


@forks
@trains_in_a_child
def test_a_child_trains_and_ends() -> None:
    """Then the parent does: each has a thread of its own for updates."""
    plain, streamed = twins(stack()[0])
    mine, theirs = AdamW(plain.parameters()), AdamW(streamed.parameters())
    take_steps(plain, mine, 3)
    take_steps(streamed, theirs, 3)

    def trains() -> list[Any]:
        take_steps(streamed, theirs, 3, start=3)
        return values(streamed)

    found = in_child(trains)
    assert_same(plain, streamed)
    take_steps(plain, mine, 3, start=3)
    take_steps(streamed, theirs, 3, start=3)
    assert same(plain, found)
    assert_same(plain, streamed)
    # one that ends as a program does does not wait for threads that its parent has
    child = multiprocessing.get_context("fork").Process(
        target=take_steps, args=(streamed, AdamW(streamed.parameters()), 3)
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


@forks
def test_a_child_drops_page_locked_memory(cudart: None) -> None:
    """It gives back nothing of its parent's."""
    buffers = [inside.page_locked(2**20)]
    kept = torch.frombuffer(buffers[0], dtype=torch.uint8).fill_(5)

    def drops() -> None:
        nonlocal kept
        del kept
        buffers.clear()

    in_child(drops)
    assert bool((kept == 5).all())


@forks
def test_page_locked_memory_is_given_back(cudart: None) -> None:
    """Although a child maps it."""
    buffer = inside.page_locked(2**20)
    address = buffer.bytes(2**20).fill_(1).data_ptr()
    here, there = multiprocessing.Pipe()

    def reads() -> None:
        for _ in range(2):
            there.send(ctypes.string_at(address, 1))
            there.recv()

    child = multiprocessing.get_context("fork").Process(target=reads)
    child.start()
    try:
        assert here.recv() == b"\1"
        del buffer
        here.send(None)
        assert here.recv() == b"\0"
    finally:
        child.kill()
        child.join()
