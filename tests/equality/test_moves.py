"""Buckets move to where the plan wants them; copies and pickles are plain modules.

They move before anything runs, where a call can begin again. Each test of copies does the same to a
megacompiled model and to a plain copy of it, in the same process, and compares every bit.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from megacompile import DeviceMemoryError, megacompile, schedules
from megacompile.errors import HostMemoryError
from tests import disks, inside
from tests.equality.nets import assert_alike, trained
from tests.zoo import WIDTH, assert_close, assert_same, differences, equal, twins


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x).relu())
        return self.norm(x).square().mean()


class Talks(Net):
    """A line that Dynamo does not capture comes first."""

    def forward(self, x: Tensor) -> Tensor:
        _note(self)
        return super().forward(x)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _note(net: Net) -> None:
    net.calls += 1


def settled(model: nn.Module) -> bool:
    return inside.residents(model) == inside.buckets(model).keys()


def x_of(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.ones(4, 8) * seed + torch.arange(8)


def run(model: nn.Module, steps: int) -> list[Tensor]:
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(steps):
        loss = model(x_of(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def pair(kind: type[Net] = Net) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    return plain, megacompile(model, device="cpu", gpu_memory="2MiB", progress=False)


def captures(caplog: pytest.LogCaptureFixture) -> int:
    return len([r for r in caplog.records if r.name == "megacompile.capture"])


def test_the_first_call_has_them_where_they_belong(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = pair()
    with caplog.at_level(logging.INFO, "megacompile.capture"):
        for each in (model, plain):
            each(x_of(5))
        assert settled(model)
        (first,) = schedules(model)
        losses = run(model, 3)
    assert captures(caplog) == 1 and schedules(model) == [first]
    assert all(map(torch.equal, losses, run(plain, 3)))
    assert_same(plain, model)


def test_gradients_of_the_user_update_a_bucket_where_it_is() -> None:
    """The update's graph, which no backward has made, is that of the place."""
    plain, model = twins(Net(), lowering="inductor")
    names = list(inside.buckets(model))
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for seed in range(3):
            if each is model:
                inside.want(model, *names[seed % 2 :: 2])
            for param in each.parameters():
                param.grad = torch.full_like(param, seed + 1.0)
            optimizer.step()
    assert set(names[::2]) == inside.residents(model)
    assert_close(plain, model, 1e-6)


def test_a_move_that_does_not_fit_keeps_the_gradients() -> None:
    plain, model = pair()
    for each in (plain, model):
        each(x_of(0)).backward()
    inside.want(model)
    with disks.no_host_memory(inside.machine(model)), pytest.raises(HostMemoryError):
        model(x_of(1))
    assert_same(plain, model)
    assert all(map(torch.equal, run(model, 2), run(plain, 2)))
    assert_same(plain, model)


@pytest.mark.parametrize("held", [False, True])
def test_another_name_of_what_moves_is_told_of(*, held: bool) -> None:
    _, model = pair()
    state = model.state_dict() if held else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(model, 2)
    assert settled(model)
    assert len([w for w in said if "layers.0.weight" in str(w.message)]) == held
    del state


def test_what_has_run_is_not_run_again() -> None:
    plain, model = pair(Talks)
    losses = [each(x_of(7)).detach() for each in (plain, model)]
    assert torch.equal(*losses) and model.calls == plain.calls
    assert not inside.residents(model), "not in this call"
    assert all(map(torch.equal, run(model, 3), run(plain, 3)))
    assert settled(model) and model.calls == plain.calls


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(x).tanh())


def test_buckets_leave_the_device_for_larger_inputs(caplog: pytest.LogCaptureFixture) -> None:
    """The first batch is small, and puts all of them there. Nothing is captured again when they
    have left, nor for sizes that there is room for."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Layer() for _ in range(4)))
    model = copy.deepcopy(plain)
    megacompile(model, device="cpu", gpu_memory="2MiB", progress=False)
    pairs = [(each, torch.optim.AdamW(each.parameters(), lr=1e-2)) for each in (plain, model)]
    residents = []
    with caplog.at_level(logging.INFO, "megacompile.capture"):
        for rows in (8, 16, 100, 900, 1000, 50):
            x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
            for each, optimizer in pairs:
                each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            residents.append(len(inside.residents(model)))
    assert residents == [4, 4, 4, 0, 0, 0]
    assert captures(caplog) == 2, "8, any"
    assert_same(plain, model)


class Broken(nn.Module):
    """Two captured graphs. The first one draws random numbers."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.layers = first, nn.Sequential(*(Layer() for _ in range(4)))

    def forward(self, x: Tensor) -> Any:
        x = nn.functional.dropout(self.first(x), 0.5)
        torch._dynamo.graph_break()
        return self.layers(x)


def broken(first: nn.Module) -> tuple[Any, Any]:
    """(plain, megacompiled), whose buckets live on the device, with room for few rows."""
    torch.manual_seed(0)
    plain = Broken(first)
    model = megacompile(
        copy.deepcopy(plain), device="cpu", lowering="eager", gpu_memory="2MiB", progress=False
    )
    models: tuple[Any, Any] = plain, model
    for each in models:
        each.optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
    for rows in (8, 8):
        train(models, rows)
    assert len(inside.residents(model)) >= 4
    return models


def train(models: tuple[Any, ...], rows: int) -> None:
    for each in models:
        torch.manual_seed(rows)
        each(torch.randn(rows, 64)).square().mean().backward()
        each.optimizer.step()
        each.optimizer.zero_grad()


@pytest.mark.parametrize("first", [nn.Identity(), nn.Linear(64, 64)])
def test_a_call_that_has_begun_begins_again_where_nothing_fits_otherwise(first: nn.Module) -> None:
    plain, model = broken(first)
    for rows in (1100, 1100, 8):
        train((plain, model), rows)
        assert inside.residents(model) <= {"first"}
    assert_same(plain, model)


def test_a_call_that_cannot_begin_again_fails_and_the_next_one_runs() -> None:
    """The BatchNorm has counted its batch."""
    plain, model = broken(nn.BatchNorm1d(64))
    with pytest.raises(DeviceMemoryError):
        train((model,), 1100)
    model.load_state_dict(plain.state_dict())
    train((plain, model), 1100)
    assert_same(plain, model)


pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")


class Own(nn.Module):
    """A layer whose class says itself how it is copied, or what its state is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class NestedState(Own):
    def __getstate__(self) -> dict[str, Any]:
        return {"attributes": dict(self.__dict__)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["attributes"])


class First(nn.LSTM):
    """What it computes, without its state."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: First(WIDTH, WIDTH, num_layers=2),
    "nested state": NestedState,
    "fx": lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
}


def within(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Linear(WIDTH, WIDTH))


def through_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: list[Callable[[nn.Module], Any]] = [
    copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_file
]  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_copy_is_a_plain_module(name: str) -> None:
    """They are equal, and have nothing of ours."""
    torch.manual_seed(0)
    models = twins(within(LAYERS[name]()))
    x = torch.randn(3, 2, WIDTH)
    assert_alike(models, trained(x))
    for way in WAYS:
        copies = [way(each) for each in models]
        for each in copies:
            each.zero_grad()
            with torch.no_grad():
                for param in each.parameters():
                    param.mul_(2)
        assert_alike(copies, trained(x))
        assert differences(*models) == [], "its parameters are its own"
        assert not any(inside.is_streamed(module) for module in copies[1].modules())
        again = copy.deepcopy(copies[1])
        for each in (copies[1], again):
            each.forward = types.MethodType(lambda self, x: x + 1, each)
            assert equal(each(x), x + 1), "and so are its methods"
            each.to("meta")
            assert {param.device.type for param in each.parameters()} == {"meta"}


def test_a_move_touches_no_parameter_that_stays() -> None:
    """Setting `data` would wait for values that are still on their way to the host."""
    model = megacompile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), device="cpu")
    model(torch.randn(3, WIDTH)).sum().backward()
    held = [(p, p.data_ptr(), p.grad) for p in model.parameters()]
    calls: list[Any] = []

    class Record(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(args[:1] and args[0] is p for p, _, _ in held) and "set" in func.__name__:
                calls.append(func)
            return func(*args, **(kwargs or {}))

    with Record():
        model.to("meta")
    assert calls == []
    assert all((p.data_ptr(), p.grad) == (at, grad) for p, at, grad in held)
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    model.to(torch.float64)  # a dtype changes
    assert {p.dtype for p in model.parameters()} == {torch.float64}


class Modes(nn.Module):
    """Says in which mode it is, and by which method it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x)) * (self.scale if self.training else 3)

    def middle(self, x: Tensor) -> Tensor:
        return self.last(x.tanh())


def test_a_shallow_copy_is_a_module_of_its_own_around_the_same_layers() -> None:
    models = twins(Modes())
    x = torch.randn(2, WIDTH)

    def use(model: Any) -> Any:
        model(x).sum().backward()
        shallow = copy.copy(model)
        found = [shallow(x)]
        shallow.training = False
        found += [shallow(x), model(x)]
        shallow.forward = types.MethodType(lambda self, x: self.first(x) * self.scale, shallow)
        found += [shallow(x), model(x)]
        torch.stack(found).square().mean().backward()
        assert model.training and not shallow.training
        return found

    assert_alike(models, use)
    with pytest.raises(ValueError, match="Modes"):
        schedules(copy.copy(models[1]))
