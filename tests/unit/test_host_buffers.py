"""Host memory that waits for a backward or is made ahead: what is lent, held, and given back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from megacompile.errors import HostMemoryError
from megacompile.ir.tensors import TensorMeta
from megacompile.runtime.device.activations import HostPool, OnHost, taken
from megacompile.runtime.device.buffers import BuffersAhead, HostBuffer, Wanted
from megacompile.runtime.device.host_budget import HostBudget

CPU = torch.device("cpu")
PAGE = 4096

# --- the pool


def test_what_is_lent_is_not_lent_again() -> None:
    of = HostPool(pin=False)
    first, second = torch.full((100,), 1.0), torch.full((100,), 2.0)
    one, two = of.store(first, None), of.store(second, None)
    assert torch.equal(one.back(None), first) and torch.equal(two.back(None), second)
    assert (of.lent_bytes, of.held_bytes, of.peak_bytes) == (800, 800, 800)
    del one
    assert (of.held_bytes, of.lent_bytes) == (800, 400)
    three = of.store(first, None)
    assert of.held_bytes == 800 and torch.equal(two.back(None), second)
    del two, three
    assert (of.held_bytes, of.lent_bytes) == (800, 0)


def test_a_smaller_value_takes_a_larger_buffer_but_not_a_huge_one() -> None:
    of = HostPool(pin=False)
    of.store(torch.zeros(1000), None)  # 4000 bytes, and free again
    half = of.store(torch.ones(500), None)
    assert of.held_bytes == 4000 and torch.equal(half.back(None), torch.ones(500))
    del half
    few = of.store(torch.ones(499), None)
    assert of.held_bytes == 1996, "no more is held than was in use at once"
    assert torch.equal(few.back(None), torch.ones(499))


def test_too_little_host_memory_is_an_error() -> None:
    of = HostPool(pin=False, budget=HostBudget(5 * 2**20))
    small = of.store(torch.zeros(2**20), None)
    with pytest.raises(HostMemoryError):
        of.store(torch.zeros(2**20), None)
    assert of.lent_bytes == small.buffer.size_bytes == of.held_bytes == 4 * 2**20


TENSORS: list[Callable[[], Tensor]] = [
    lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    lambda: torch.randn(3, 1).expand(3, 50),
    lambda: torch.randn(6, 12)[1:4, 2:9],
    lambda: torch.randn(40)[::2],
    lambda: torch.randn(()),
    lambda: torch.randn(3, 0, 2),
    lambda: torch.randn(3, 5) > 0,
    lambda: torch.randn(9).bfloat16(),
    lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
]


def test_a_tensor_comes_back_as_it_was() -> None:
    """Values and strides: these choose the kernels, and compiled code relies on them."""
    for make in TENSORS:
        value = make()
        of = HostPool(pin=False)
        waiting = of.store(value, None)
        assert of.lent_bytes <= value.numel() * value.element_size()
        wanted = value.clone()
        if 0 not in value.stride():
            value.zero_()
        back = waiting.back(None)
        assert torch.equal(back, wanted) and back.dtype == wanted.dtype
        assert back.stride() == waiting.meta.stride == TensorMeta.of(make()).stride


def test_a_backward_that_was_planned_otherwise_finds_what_it_needs() -> None:
    of = HostPool(pin=False)
    value = torch.randn(3, 4)
    waiting = of.store(value, None)
    assert torch.equal(taken({"copy": waiting}, "y", {"copy": "y"}, of, None), value)
    stored = taken({"y": value}, "copy", {"copy": "y"}, of, None)
    assert isinstance(stored, OnHost) and torch.equal(stored.back(None), value)
    assert taken({"y": value}, "y", {}, of, None) is value
    with pytest.raises(KeyError):
        taken({"y": value}, "z", {}, of, None)


@pytest.mark.gpu
def test_late_locking_on_the_gpu() -> None:
    buffer = HostBuffer(2**20, pin=False)
    values = buffer.bytes(2**20)
    values.fill_(7)
    assert not values.is_pinned()
    buffer.lock()
    assert values.is_pinned()
    assert bool(values.cuda(non_blocking=True).eq(7).all())


# --- buffers that are made ahead


def plain_buffer(wanted: Wanted) -> HostBuffer:
    return HostBuffer(wanted.size_bytes, pin=wanted.pin)


class Slow:
    """Makes buffers once it `may`."""

    def __init__(self) -> None:
        self.began, self.may = threading.Event(), threading.Event()
        self.made: list[int] = []

    def __call__(self, wanted: Wanted) -> HostBuffer:
        self.began.set()
        assert self.may.wait(60)
        self.made.append(wanted.size_bytes)
        return plain_buffer(wanted)


def test_what_is_not_begun_is_left_to_who_asks_and_what_is_begun_is_waited_for() -> None:
    slow = Slow()
    ahead = BuffersAhead(slow)
    ahead.begin(Wanted(n * PAGE, pin=False) for n in (1, 2, 2, 3))
    assert slow.began.wait(60)
    assert ahead.take(2 * PAGE, pin=False) is None, "the first of two"
    found: list[Any] = []
    asks = threading.Thread(target=lambda: found.append(ahead.take(PAGE, pin=False)))
    asks.start()
    slow.may.set()
    asks.join()
    assert found[0] is not None
    ahead.await_idle()
    assert slow.made == [PAGE, 2 * PAGE, 3 * PAGE]
    assert ahead.take(2 * PAGE, pin=False) is not None


def test_what_nobody_will_ask_for_is_not_made_and_a_failure_is_not_told() -> None:
    slow = Slow()
    ahead = BuffersAhead(slow)
    ahead.begin(Wanted(n * PAGE, pin=False) for n in (1, 2, 3))
    assert slow.began.wait(60)
    ahead.forget()
    slow.may.set()
    ahead.await_idle()
    assert slow.made == [PAGE] and ahead.take(PAGE, pin=False) is None

    def fails(wanted: Wanted) -> HostBuffer:
        raise HostMemoryError("none left")

    ahead = BuffersAhead(fails)
    ahead.begin([Wanted(PAGE, pin=False)])
    ahead.await_idle()
    assert ahead.take(PAGE, pin=False) is None


# --- with a budget


def made_ahead(budget: HostBudget, pages: int) -> BuffersAhead:
    budget.make_ahead([Wanted(pages * PAGE, pin=False)], "states", CPU)
    assert budget._ahead is not None
    budget._ahead.await_idle()
    return budget._ahead


def test_what_nobody_asks_for_makes_room() -> None:
    budget = HostBudget(4 * PAGE)
    made_ahead(budget, 3)
    mine = budget.make(4 * PAGE, "mine", pin=False)
    assert budget.held_bytes == len(mine)
    with pytest.raises(HostMemoryError):
        budget.make(PAGE, "more", pin=False)
    assert budget.held_bytes == len(mine)
    del mine
    assert budget.held_bytes == 0


def test_what_waits_for_its_backward_comes_before_what_nobody_has_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine has so little left that one of them must go."""
    budget = HostBudget()
    pool = HostPool(pin=False, budget=budget)
    made_ahead(budget, 2)
    real = psutil.virtual_memory()

    def memory() -> Any:
        return real._replace(available=(2**28 + (2 if budget._ahead else 5) * PAGE))

    monkeypatch.setattr(psutil, "virtual_memory", memory)
    lent = pool.lend(4 * PAGE)
    assert lent.size_bytes == 4 * PAGE == budget.held_bytes
