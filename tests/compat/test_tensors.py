"""What compat takes for granted of tensors, operators and devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from megacompile import compat

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
aten = torch.ops.aten


@pytest.mark.gpu
def test_allocation_in_a_pool_that_has_ended_already() -> None:
    compat.end_allocation(torch.device("cuda", 0), torch.cuda.graph_pool_handle())


@pytest.mark.gpu
def test_random_numbers_after_a_capture_that_was_no_failure() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        compat.end_random_capture()
    assert torch.rand(8, device="cuda").unique().numel() == 8


def test_whose_memory_it_is() -> None:
    """Alone, shared with a base, or a part of it."""
    tensor, other = torch.zeros(4), torch.zeros(4)
    assert compat.is_alone(tensor)
    part = tensor[1:][1:]
    assert not compat.is_alone(tensor) and not compat.is_alone(part)
    assert compat.storage_key(tensor) == compat.storage_key(part) != compat.storage_key(other)
    assert compat.base_of(part) is tensor
    assert compat.base_of(tensor) is compat.base_of(tensor.detach()) is None
    del tensor
    assert not compat.is_alone(part), "it fills a part of its storage"
    whole = torch.arange(12.0)
    turned = whole[2:8].view(2, 3).t()
    storage = compat.own_storage(turned)
    assert (storage.data_ptr(), storage.nbytes()) == (turned.data_ptr(), 24)
    assert compat.own_storage(torch.empty(0, 3)).nbytes() == 0


class Listening(Tensor):
    asked: list[Any] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func)
        with compat.without_torch_function():
            return func(*args, **(kwargs or {}))


def test_what_asks_for_no_data() -> None:
    """And what overwrites all of a tensor, as a subclass is told of it: not a part of it."""
    tensor = torch.zeros(2).as_subclass(Listening)
    Listening.asked.clear()
    version, base = tensor._version, tensor._base
    looks = (tensor.shape, tensor.dtype, tensor.device, tensor.is_leaf, tensor.grad, tensor.ndim)
    tensor.requires_grad_()
    tensor.grad = None
    sizes = (tensor.size(), tensor.dim(), tensor.stride(), tensor.is_contiguous(), len(tensor))
    assert looks and sizes and base is not None and version == 0
    assert len(Listening.asked) > 10 and set(Listening.asked) <= compat.METADATA
    data: Any = vars(torch._C.TensorBase)["data"]
    for function in (Tensor.add, Tensor.data_ptr, Tensor.tolist, data.__get__):
        assert function not in compat.METADATA
    tensor = torch.zeros(2).as_subclass(Listening)
    Listening.asked.clear()
    tensor.copy_(torch.ones(2))
    tensor.zero_()
    tensor.fill_(2.0)
    tensor.data = torch.ones(2)
    assert set(Listening.asked) == compat.OVERWRITING
    assert not compat.OVERWRITING & {Tensor.add_, Tensor.__setitem__, Tensor.clone}


def node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") if a is Tensor else a for i, a in enumerate(args)]
    return graph.call_function(target, tuple(given), kwargs)


def test_what_operators_are() -> None:
    assert compat.operator_name(aten.mm.default) == "mm"
    assert compat.operator_name(torch.relu) == compat.operator_name("x") == ""
    add = node(aten.add.Tensor, Tensor, 2)
    assert dict(compat.arguments_of(add)) == {"self": add.args[0], "other": 2, "alpha": 1}
    assert dict(compat.arguments_of(node(aten.add.Tensor, Tensor, 2, alpha=3)))["alpha"] == 3
    assert list(compat.arguments_of(node(torch.relu, Tensor))) == []
    attention = aten.scaled_dot_product_attention.default, *[Tensor] * 3, None
    for given in ((aten.bernoulli.p, Tensor, 0.5), (*attention, 0.1)):
        assert compat.is_random(node(*given))
    for given in ((aten.mm.default, Tensor, Tensor), (*attention, 0.0)):
        assert not compat.is_random(node(*given))
    assert compat.returns_views(aten.view.default) and compat.returns_views(aten.split.Tensor)
    assert not compat.returns_views(aten.mm.default) and not compat.returns_views(aten.add_.Tensor)
    assert compat.is_mutable(aten.add_.Tensor) and not compat.is_mutable(aten.add.Tensor)
    kernel = compat.kernel_of(aten.sum.dim_IntList)
    assert kernel is not aten.sum.dim_IntList and compat.kernel_of(torch.add) is torch.add
    x = torch.ones(2, 3)
    assert torch.equal(kernel(x, [1], keepdim=True), x.sum(1, keepdim=True))


def test_what_an_operator_writes() -> None:
    a, b = torch.zeros(2), torch.ones(2)
    assert [id(x) for x in compat.written(aten.add_.Tensor, (a, b), {})] == [id(a)]
    assert [id(x) for x in compat.written(aten.add.out, (a, a), {"out": b})] == [id(b)]
    assert [*map(id, compat.written(aten._foreach_add_.Scalar, ([a, b], 1), {}))] == [id(a), id(b)]
    assert compat.written(aten.add.Tensor, (a, b), {}) == []


def test_the_memory_and_streams_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator is set in C."""
    assert compat.free_device_bytes(torch.device("cpu")) > 2**20
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert (
        compat.use_expandable_segments() is False
    )  # what it is told: tests/unit/test_host_memory.py
    assert callable(torch._C._accelerator_setAllocatorSettings)
    assert hasattr(torch._C, "_accelerator_getAllocatorSettings") == (VERSION >= (2, 12))
