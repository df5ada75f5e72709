"""What compat takes for granted of modules, optimizers and torch.distributed."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from megacompile import compat
from tests.processes import group_of_one


class Asks(nn.Module):
    """Notes what `look` says within its forward."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(2))
        self.look = look
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.look())
        return x * self.weight * self.scale  # type: ignore[operator]


# --- modules


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


class Wrapper(torch.Tensor):
    """A wrapper, as torch sees it, that `to` gives as it is."""

    __tensor_flatten__ = __tensor_unflatten__ = None
    _is_param = True

    @property
    def data(self) -> Any:
        raise AssertionError("read")

    @data.setter
    def data(self, value: Any) -> None:
        self.given = value


def wrapped() -> tuple[nn.Linear, Wrapper]:
    layer = nn.Linear(2, 2, bias=False)
    wrapper = torch.ones(2, 2).as_subclass(Wrapper)
    compat.parameters_of(layer)["weight"] = wrapper  # type: ignore[assignment]
    layer.register_buffer("scale", torch.ones(()))
    return layer, wrapper


def test_a_wrapper_is_converted_by_its_data() -> None:
    compat.convert_in_place(Wrapper)
    layer, wrapper = wrapped()
    outer = nn.Sequential(layer)
    outer.float()
    assert layer.weight is wrapper and not hasattr(wrapper, "given")
    outer.double()
    assert layer.weight is wrapper and wrapper.given.dtype == torch.float64
    assert isinstance(layer.scale, Tensor) and layer.scale.dtype == torch.float64
    assert nn.Linear(2, 2).double().weight.dtype == torch.float64  # others as before

    # Dynamo captures what a frame calls that it leaves to Python: there the class must be seen
    layer, wrapper = wrapped()

    def convert(x: Tensor) -> Tensor:
        for _ in range(1):  # a break in a loop: the whole frame is left to Python
            torch._dynamo.graph_break()
            layer.to(torch.float64)
        return x + 1

    torch.compile(convert, backend="eager")(torch.ones(2))
    assert layer.weight is wrapper and wrapper.given.dtype == torch.float64


def test_what_modules_hold_is_found_at_once() -> None:
    """Modules once, and in torch's order."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh())
    model[2].register_forward_hook(print)
    compat.set_compiled_call(model[0], print)
    modules = compat.modules_of(model)
    assert compat.compiled_calls(modules) == [None, print, None, None]
    for found, each in (
        (compat.holders(modules, "parameters"), compat.parameters_of),
        (compat.holders(modules, "buffers"), compat.buffers_of),
        (compat.holders(modules, "forward_hooks"), lambda m: m._forward_hooks),
    ):
        held: list[Any] = [holder for m in modules if (holder := each(m))]
        assert len(found) == len(held) and all(a is b for a, b in zip(found, held, strict=True))
    model.append(nn.ModuleList([model[0]]))
    model.register_module("none", None)
    model[3].add_module("up", model)  # a circle
    assert compat.modules_of(model) == list(model.modules())


# --- optimizers


def test_scaled_losses_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp.GradScaler, "scale", inspect.unwrap(torch.amp.GradScaler.scale))
    compat.notice_scaled_losses()
    scalers = [torch.amp.GradScaler("cpu", enabled=on, init_scale=4.0) for on in (True, False)]
    seen: list[bool] = []
    for scaler in (scalers[0], None, *scalers):
        w = torch.ones(2, requires_grad=True)
        w.register_hook(lambda gradient: seen.append(compat.loss_is_scaled()))
        loss = w.sum()
        (scaler.scale(loss) if scaler else loss).backward()
    assert seen == [True, False, True, False] and not compat.loss_is_scaled()


def test_states_keep_their_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_process_value_according_to_param_policy"
    stock = inspect.getattr_static(torch.optim.Optimizer, name)
    monkeypatch.setattr(torch.optim.Optimizer, name, stock)
    ours, theirs = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = torch.optim.Adam([ours, theirs])
    saved = optimizer.state_dict()
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    saved["state"] = {0: moments, 1: dict(moments)}
    compat.keep_state_dtypes(lambda param: param is ours)
    optimizer.load_state_dict(saved)
    dtypes = [optimizer.state[param]["exp_avg"].dtype for param in (ours, theirs)]
    assert dtypes == [torch.float32, torch.bfloat16]
    assert optimizer.state[ours]["step"].dtype == torch.float32


# --- processes


@pytest.fixture
def group() -> Iterator[None]:
    with group_of_one():
        yield


def test_the_data_parallel_around(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = nn.parallel.DistributedDataParallel
    monkeypatch.setattr(kind, "__init__", inspect.unwrap(kind.__init__))
    checked: list[dict[str, Any]] = []
    made: list[nn.Module] = []

    def check(ddp: Any, given: dict[str, Any]) -> bool:
        checked.append(given)
        if given["module"] in made:
            nn.Module.__init__(ddp)
            ddp.mine = True
        return given["module"] in made

    compat.check_data_parallel(kind, check)
    model = Asks(compat.ddp_around)
    ddp = kind(model, bucket_cap_mb=1)
    ddp(torch.ones(2))
    model(torch.ones(2))
    assert model.seen == [ddp, None]
    assert [id(param) for param in compat.ddp_parameters(ddp)] == [id(model.weight)]
    (given,) = checked
    assert given["module"] is model and given["bucket_cap_mb"] == 1
    made.append(model)
    assert bool(kind(model).mine)


def test_what_makes_ranks_equal_sends_no_parts(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    assert callable(vars(dist)["_broadcast_coalesced"]), "torch has it"
    monkeypatch.setattr(dist, "_broadcast_coalesced", lambda _, found, *__: sent.append([*found]))
    part, copy = torch.zeros(1), torch.ones(2)
    for _ in range(2):
        compat.send_no_parts(lambda tensor: tensor is part)
    broadcast: Any = dist._broadcast_coalesced  # type: ignore[attr-defined, unused-ignore]
    broadcast(dist.group.WORLD, [part, copy], 1 << 20, 0)
    broadcast(dist.group.WORLD, [part], 1 << 20, 0)
    assert [[each is copy for each in tensors] for tensors in sent] == [[True]]


def test_collectives_are_asked_for(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "all_gather all_gather_into_tensor all_reduce all_to_all all_to_all_single broadcast"
    names += " gather recv reduce reduce_scatter reduce_scatter_tensor scatter send"
    for name in names.split():
        for module in (dist, dist.distributed_c10d):
            function = getattr(module, name)
            stock = function.__wrapped__ if hasattr(function, "of_megacompile") else function
            monkeypatch.setattr(module, name, stock)
    asked: list[Any] = []
    compat.ask_before_collectives(asked.append)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=0)
    assert len(asked) >= 2 and all(each is tensor for each in asked)


class Mark:
    """An attribute that no copy is to have."""

    def __call__(self) -> None:
        """Nothing."""


def test_attributes_that_copies_leave_out() -> None:
    compat.leave_out_of_copies(Mark)
    layer = nn.LSTM(2, 2)  # whose `__getstate__` is its own
    for module in (nn.Linear(2, 2), layer):
        vars(module).update(mark=Mark(), kept=[Mark])
        compat.set_compiled_call(module, Mark())
        copies = copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        for each in copies:
            assert not hasattr(each, "mark") and each.kept == [Mark]
            assert compat.compiled_call(each) is None
        assert isinstance(module.mark, Mark), "the module itself has it"
        assert isinstance(compat.compiled_call(module), Mark)
