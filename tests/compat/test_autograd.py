"""What compat takes for granted of autograd, modules, optimizers, tensors, operators and devices.

And of torch.distributed: what several processes see, and how long their groups wait.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megacompile import compat
from megacompile.compat import patches
from tests.processes import group_of_one


def leaf(size: int = 3) -> Tensor:
    return torch.ones(size, requires_grad=True)


def test_a_replaced_static_method_stays_one() -> None:
    """A subclass of an optimizer may call it with `self.`."""

    class Owner:
        @staticmethod
        def double(x: int) -> int:
            return 2 * x

    patches.replace(Owner, "double", lambda stock, x: stock(x) + 1)
    assert (Owner.double(3), Owner().double(3)) == (7, 7)


def test_a_replaced_function_is_pickled_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray and `torch.multiprocessing` send functions that refer to collectives."""
    module: Any = ModuleType("with_double")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("def double(x): return 2 * x", vars(module))
    patches.replace(module, "double", lambda stock, x: stock(x) + 1)
    assert module.double(3) == 7
    assert pickle.loads(pickle.dumps(module.double)) is copy.deepcopy(module.double)
    assert copy.deepcopy(module.double) is module.double


def test_saved_tensors_hooks_are_off_and_come_back() -> None:
    packed: list[str] = []

    def hooks(name: str) -> Any:
        def pack(tensor: Tensor) -> Tensor:
            packed.append(name)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    with hooks("outer"):
        with hooks("inner"):
            with compat.without_saved_tensors_hooks():
                leaf().exp()
            assert packed == []
            leaf().exp()
        leaf().exp()
    leaf().exp()
    assert packed == ["inner", "outer"]


def test_backward_calls_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (torch.autograd, torch.autograd.graph):
        stock = inspect.unwrap(module._engine_run_backward)
        monkeypatch.setattr(module, "_engine_run_backward", stock)
    a, seen, stand_in = leaf(), list[compat.BackwardCall](), leaf()
    compat.note_backward_calls(
        lambda given: a if given is stand_in else given, lambda given, gradient: -gradient
    )
    a.register_hook(lambda gradient: seen.extend(compat.backward_calls()))
    for call in (
        lambda loss: loss.backward(),
        lambda loss: loss.backward(inputs=[a]),
        lambda loss: torch.autograd.backward([loss], inputs=[a]),
        lambda loss: torch.autograd.grad(loss, [a]),
    ):
        loss, at = a.exp().sum(), len(seen)
        noted: list[Any] = []
        loss.register_hook(lambda g, n=noted: n.extend(c.roots for c in compat.backward_calls()))
        call(loss)
        (roots,) = noted
        assert roots[0] is loss and len(seen) == at + 1
        assert isinstance(seen[-1], compat.BackwardCall) and seen[-1].roots == ()
    assert compat.backward_calls() == ()
    for inputs in ({"inputs": [a, stand_in]}, {"inputs": (a, stand_in)}):
        gradients = torch.autograd.grad(a.exp().sum(), **inputs)
        assert torch.equal(gradients[0], a.exp()) and torch.equal(gradients[1], -a.exp())
    unused: Any = torch.autograd.grad(a.sum(), [leaf()], allow_unused=True)
    assert unused == (None,)
    a.grad = None
    a.exp().sum().backward(inputs=[stand_in])
    assert [each.grad is None for each in (stand_in, a)] == [True, False]


def test_hooks_change_places() -> None:
    order: list[int] = []
    model = torch.nn.Linear(1, 1)
    hooks = [model.register_forward_hook(lambda *_, i=i: order.append(i)) for i in range(4)]
    compat.move_hook(hooks[2], last=False)
    compat.move_hook(hooks[0], last=True)
    model(torch.zeros(1))
    assert order == [2, 1, 3, 0]
    hooks[3].remove()
    compat.move_hook(hooks[3], last=True)  # of what is gone


def test_a_group_of_gpus_serves_the_host() -> None:
    with group_of_one(timedelta(seconds=7), "cuda:gloo"):
        group = dist.group.WORLD
        value = torch.ones(2)
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(value)
        for _ in range(2):
            compat.serve_the_host(group, torch.device("cuda"))
            dist.all_reduce(value)
        assert value.tolist() == [1.0, 1.0]
        assert compat.group_timeout_s(group, CPU) == (7, False)


def test_a_store_that_is_gone_raises() -> None:
    there = C10D.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = C10D.TCPStore("127.0.0.1", there.port, is_master=False, timeout=timedelta(seconds=2))
    client.set("key", "value")
    del there
    with pytest.raises(compat.STORE_ERRORS):
        client.get("key")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with group_of_one(timedelta(seconds=20)):
        compat.use_dtensor()
        yield init_device_mesh("cpu", (1,))


def shared(mesh: DeviceMesh, *shape: int) -> Any:
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))


def test_a_part_behind_the_beginning_of_its_memory_is_copied(mesh: DeviceMesh) -> None:
    """As in a bucket. Torch's own deepcopy fails there."""
    param = shared(mesh, 3, 2)
    compat.set_local(param, torch.arange(8.0)[2:].view(3, 2))
    state = param.detach()
    assert state.storage_offset() == 2
    for source in (param, state):
        first, again = copy.deepcopy([source, source])
        assert first is again and type(first) is DTensor
        assert isinstance(first, nn.Parameter) == isinstance(source, nn.Parameter)
        assert first.requires_grad == source.requires_grad
        assert compat.local(first).data_ptr() != compat.local(source).data_ptr()
        assert first.full_tensor().equal(torch.arange(2.0, 8.0).view(3, 2))
    assert compat.use_dtensor() is DTensor


CPU = torch.device("cpu")
C10D: Any = dist  # whose stubs leave its stores out


def test_frames_that_live_have_names_of_their_own() -> None:
    model, seen = nn.Linear(2, 2), []
    model.register_forward_hook(lambda *_: seen.append(1))
    frames = [compat.frame_of(model, "framed") for _ in range(3)]
    names = [frame.__code__.co_name for frame in frames]
    assert names == ["framed", "framed_2", "framed_3"]
    frames[0](torch.ones(2))
    assert seen == [1], "a call of it runs hooks"
    del frames[1]
    assert compat.frame_of(model, "framed").__code__.co_name == "framed_2"


def test_sizes_of_a_frame_that_is_gone_are_forgotten() -> None:
    kinds: list[type] = []

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Any:
        kinds.extend(map(type, examples))
        return module

    for length in (3, 4):
        frame = compat.frame_of(nn.ReLU(), "sized")
        torch.compile(frame, backend=backend)(torch.ones(length))
        assert frame.__code__.co_name == "sized"
        del frame
    assert kinds == [Tensor, Tensor]  # and no torch.SymInt


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
    assert compat.use_expandable_segments() is False  # what it is told: tests/unit/test_hardware.py
    assert callable(torch._C._accelerator_setAllocatorSettings)
    assert hasattr(torch._C, "_accelerator_getAllocatorSettings") == (VERSION >= (2, 12))


@pytest.mark.gpu
def test_a_scaler_on_the_device_finds_infinite_gradients_on_the_host() -> None:
    """The flag of the device is copied behind work that takes a second."""
    compat.wait_for_scales()
    weight = leaf()
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(torch.ones((), device="cuda"))  # it makes the scale
    weight.grad = torch.full_like(weight, torch.inf)
    torch.cuda._sleep(2_000_000_000)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1.0, 1.0, 1.0] and scaler.get_scale() == 2.0
