"""What compat takes for granted of tensors, operators and devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile import compat

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
aten = torch.ops.aten


def test_users_of_a_storage_are_counted_exactly() -> None:
    tensor = torch.zeros(4)
    assert compat.storage_users(tensor) == 1
    view, detached = tensor[1:], tensor.detach()
    assert [compat.storage_users(each) for each in (tensor, view, detached)] == [3, 3, 3]
    storage = tensor.untyped_storage()
    assert compat.storage_uses([storage]) == [4]  # for this count it is one
    assert compat.storage_users(tensor) == 3  # Python's object of the storage is none
    del storage, view
    param = torch.nn.Parameter(detached)
    assert compat.storage_users(tensor) == 3
    param.data = torch.ones(2)
    assert [compat.storage_users(each) for each in (tensor, param)] == [2, 1]
    value = torch.ones(4, requires_grad=True).exp()
    assert compat.storage_users(value) == 2  # its own node has saved it, as another tensor
    value.sum().backward()
    assert compat.storage_users(value) == 1


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


def test_versions_count_changes_in_place() -> None:
    tensor = torch.zeros(4)
    before = compat.version(tensor)
    assert list(map(compat.version, [tensor])) == [before]
    tensor[1:].add_(1)
    tensor.detach().add_(1)
    tensor.data.add_(1)  # on purpose, nobody is told
    assert compat.version(tensor) == before + 2
    targets, values = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    compat.FOREACH_COPY(targets, values)
    assert all(map(torch.equal, targets, values)) and min(list(map(compat.version, targets))) > 0
    mean, variance = torch.zeros(4), torch.ones(4)
    x = torch.randn(3, 4) + 1
    assert set(compat.COUNT_NO_VERSION) == {nn.functional.batch_norm, torch.batch_norm}
    nn.functional.batch_norm(x, mean, variance, training=True)
    torch.batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5, False)
    assert mean.any() and list(map(compat.version, [mean, variance])) == [0, 0]


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


# --- operators


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


def test_what_is_called_on_lists_of_gradients() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    listening = [torch.ones(2).as_subclass(Listening) for _ in params]
    for param, gradient in zip(params, listening, strict=True):
        param.grad = gradient
    Listening.asked.clear()
    torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    torch.optim.SGD(params, foreach=True).zero_grad(set_to_none=False)
    every = {compat.FOREACH_NORM, compat.FOREACH_MUL, compat.FOREACH_ZERO}
    assert every <= set(Listening.asked)
    # counters of other dtypes than the number's stay what they are
    counters = [torch.tensor(2, dtype=d) for d in (torch.float32, torch.float64, torch.int64)]
    before = [(id(counter), counter.dtype) for counter in counters]
    compat.FOREACH_ADD(counters, torch.tensor(1), alpha=1)
    assert [float(counter) for counter in counters] == [3.0] * 3
    assert [(id(counter), counter.dtype) for counter in counters] == before


# --- devices


def test_the_memory_and_streams_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator is set in C."""
    assert compat.free_device_bytes(torch.device("cpu")) > 2**20
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert (
        compat.use_expandable_segments() is False
    )  # what it is told: tests/unit/test_host_memory.py
    assert callable(torch._C._accelerator_setAllocatorSettings)
    assert hasattr(torch._C, "_accelerator_getAllocatorSettings") == (VERSION >= (2, 12))


def test_an_operator_that_takes_tensors_for_numbers() -> None:
    made = compat.taking_tensors(aten.addcmul.default, ("value",))
    x, half = torch.arange(4.0), torch.tensor(0.5, dtype=torch.float64)
    assert torch.equal(made(x, x, x, half), torch.addcmul(x, x, x, value=0.5))
    assert made is compat.taking_tensors(aten.addcmul.default, ("value",))
    with compat.fake_mode():
        fake = torch.empty(4)
        shape = made(fake, fake, fake, torch.empty((), dtype=torch.float64)).shape
    assert shape == (4,)
    random = compat.taking_tensors(aten.bernoulli.p, ("p",))
    assert torch.Tag.nondeterministic_seeded in random.tags
    assert compat.taking_tensors(aten.mul_.Tensor, ("other",)) is None  # changes its argument
    assert compat.taking_tensors(torch.relu, ()) is None
    graph = torch.fx.Graph()
    graph.call_function(made, (graph.placeholder("x"),))
    assert compat.taken_tensors(graph) == [("aten::addcmul", ("value",))]
    compat.define_taking("aten::addcmul", ("value",))  # as in another process: it is there


class _Like(torch.Tensor):
    pass


def test_clipping_takes_a_class_as_plain_when_it_is_told_so() -> None:
    from torch.utils import _foreach_utils

    before = [*_foreach_utils._foreach_supported_types]
    try:
        compat.take_as_plain(_Like)
        compat.take_as_plain(_Like)
        assert _foreach_utils._foreach_supported_types == [*before, _Like]
        like = torch.ones(2).as_subclass(_Like)
        assert _foreach_utils._has_foreach_support([like], torch.device("cpu"))
    finally:
        _foreach_utils._foreach_supported_types[:] = before


def test_dynamo_asks_classes_where_they_are_shown() -> None:
    class Shown(nn.Parameter):
        """Shows itself as a plain parameter."""

    builder: Any = torch._dynamo.variables.builder.VariableBuilder
    builder._type_dispatch()  # of what was compiled before
    compat.show_classes(Shown)
    assert builder._type_dispatch()[nn.Parameter] == builder.wrap_tensor
    tensors = torch._dynamo.variables.tensor.TensorVariable
    builtin = torch._dynamo.variables.builtin.BuiltinVariable
    methods = tensors.python_type, tensors.var_getattr, builder.wrap_tensor, builtin.call_type
    for method in methods:
        assert hasattr(method, "__wrapped__"), method


def test_arguments_of_operators_are_mapped_as_trees_are() -> None:
    """Through nested lists, tuples and names. What is no ATen operator may be given any class."""
    x, y = torch.ones(1), torch.zeros(1)
    given = ((x, [x, (y, None)], [[x]], 3), {"other": [y]})
    for func in (torch.ops.aten.cat.default, torch.cat):
        assert compat.map_values(id, func, given) == compat.tree_map(id, given)
    named = torch.ones(2, 2).max(0)
    doubled = compat.map_values(lambda v: v * 2, torch.ops.aten.max.dim, named)
    assert type(doubled) is type(named) and torch.equal(doubled.values, named.values * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_added_to_a_wider_sum(dtype: torch.dtype) -> None:
    """Rounded once, also where nothing is read of the first sum."""
    torch.manual_seed(0)
    a, b = torch.randn(4, 3).to(dtype), torch.randn(3, 5).to(dtype)
    total = torch.full((4, 5), float("nan"))
    compat.add_product(total, a, b, first=True)
    compat.add_product(total, a, b)
    torch.testing.assert_close(total, 2 * (a.float() @ b.float()))
