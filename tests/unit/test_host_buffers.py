"""Host memory that waits for a backward: what is lent, held, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megacompile import megacompile
from megacompile.errors import HostMemoryError
from megacompile.ir.tensors import TensorMeta
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.device.saved import OnHost
from tests import inside


def new_pool() -> Any:
    """The pool of a model that was not called yet."""
    return inside.machine(megacompile(torch.nn.Linear(2, 2), device="cpu")).activations


def test_what_is_lent_is_not_lent_again() -> None:
    of = new_pool()
    first, second = torch.full((100,), 1.0), torch.full((100,), 2.0)
    one, two = OnHost.of(of, first, None), OnHost.of(of, second, None)
    assert torch.equal(one.back(None), first) and torch.equal(two.back(None), second)
    assert (of.lent_bytes, of.held_bytes, of.peak_bytes) == (800, 800, 800)
    del one
    assert (of.held_bytes, of.lent_bytes) == (800, 400)
    three = OnHost.of(of, first, None)
    assert of.held_bytes == 800 and torch.equal(two.back(None), second)
    del two, three
    assert (of.held_bytes, of.lent_bytes) == (800, 0)


def test_a_smaller_value_takes_a_larger_buffer_but_not_a_huge_one() -> None:
    of = new_pool()
    OnHost.of(of, torch.zeros(1000), None)  # 4000 bytes, and free again
    for numel, held in ((500, 4000), (499, 1996)):  # no more is held than was in use at once
        value = OnHost.of(of, torch.ones(numel), None)
        assert of.held_bytes == held and torch.equal(value.back(None), torch.ones(numel))
        del value


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
        of = new_pool()
        waiting = OnHost.of(of, value, None)
        assert of.lent_bytes <= value.numel() * value.element_size()
        wanted = value.clone()
        if 0 not in value.stride():
            value.zero_()
        back = waiting.back(None)
        assert torch.equal(back, wanted) and back.dtype == wanted.dtype
        assert back.stride() == waiting.meta.stride == TensorMeta.of(make()).stride


def test_a_buffer_that_was_refused_takes_nothing_of_the_budget() -> None:
    budget = HostBudget(limit_bytes=2**20)
    with pytest.raises(HostMemoryError, match="host_memory"):
        budget.make(2**21, "a test", pin=False)
    assert budget.held_bytes == 0
    assert len(budget.make(2**20, "a test", pin=False)) == 2**20


@pytest.mark.gpu
def test_late_locking_on_the_gpu() -> None:
    buffer = HostBuffer(2**20, pin=False)
    values = buffer.bytes(2**20)
    values.fill_(7)
    assert not values.is_pinned()
    buffer.lock()
    assert values.is_pinned()
    assert bool(values.cuda(non_blocking=True).eq(7).all())
