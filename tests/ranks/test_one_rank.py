"""What is refused where ranks share a model, and what such a model may do: in a group of this
process alone."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Adafactor, AdamW

from megacompile import full_parameters, megacompile, released, schedules
from megacompile.errors import ModelError, OptimizerError, OptionError, OptionTypeError
from tests import inside, quantized
from tests.processes import group_of_one


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with group_of_one(datetime.timedelta(seconds=20)):
        yield


@pytest.fixture
def mesh(group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def shared(mesh: DeviceMesh, **options: Any) -> Any:
    return megacompile(net(), mesh=mesh, device="cpu", **options)


def step(model: Any) -> Tensor:
    loss: Tensor = model(torch.ones(3, 4)).square().mean()
    loss.backward()
    return loss.detach()


# The option.


def test_a_mesh_that_is_none(group: None) -> None:
    model = net()
    wrong: list[tuple[Any, type[Exception]]] = [
        ("cpu", OptionTypeError),
        (init_device_mesh("cpu", (1, 1, 1)), OptionError),
        (DeviceMesh("meta", [0], _init_backend=False), OptionError),
    ]
    for mesh, error in wrong:
        with pytest.raises(error, match="mesh"):
            megacompile(model, mesh=mesh, device="cpu")
    assert type(model[0].weight) is nn.Parameter


def test_options_that_do_not_go_together(mesh: DeviceMesh, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="disk_weights"):
        shared(mesh, disk=tmp_path, disk_weights=True)
    model = shared(mesh)
    assert megacompile(model, mesh=mesh, device="cpu") is model
    with pytest.raises(OptionError, match="already"):
        megacompile(model, device="cpu")


# The model.


class Scalar(nn.Linear):
    """Has a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient)
    return model


def trained() -> nn.Module:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return model


UNDIVIDED: dict[str, tuple[Callable[[], nn.Module], str]] = {  # with what the error names
    "no dimension": (Scalar, "scale"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "weight"),
    "hooks": (hooked, "weight"),
    "a gradient": (trained, "weight"),
    "packed": (lambda: quantized.model(quantized.OWN["state"]), "packed"),
}


@pytest.mark.parametrize(("make", "named"), UNDIVIDED.values(), ids=UNDIVIDED)
def test_a_model_that_cannot_be_divided(
    mesh: DeviceMesh, make: Callable[[], nn.Module], named: str
) -> None:
    model = make()
    with pytest.raises(ModelError, match=named):
        megacompile(model, mesh=mesh, device="cpu")
    assert not any(isinstance(param, DTensor) for param in model.parameters())


def test_a_parameter_that_came_since(mesh: DeviceMesh) -> None:
    model = shared(mesh)
    step(model)
    model[0].bias = nn.Parameter(torch.zeros(6))
    with pytest.raises(ModelError, match=r"0\.bias"):
        step(model)
    other = distribute_tensor(torch.zeros(6), mesh, [Replicate()])
    model[0].bias = nn.Parameter(other)
    with pytest.raises(ModelError, match=r"0\.bias"):
        step(model)
    model[0].bias = nn.Parameter(other.redistribute(placements=model[0].weight.placements))
    step(model)
    assert model[0].bias.grad is not None


# Optimizers.


def test_states_from_before_are_divided(mesh: DeviceMesh) -> None:
    plain, model = net(), net()
    optimizers = [AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        step(each)
        optimizer.step()
        optimizer.zero_grad()
    megacompile(model, mesh=mesh, device="cpu")
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        step(each)
        optimizer.step()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert want.equal(got.full_tensor()), name  # type: ignore[attr-defined]
        assert (
            optimizers[0]
            .state[want]["exp_avg"]
            .equal(optimizers[1].state[got]["exp_avg"].full_tensor())
        )


def test_states_that_go_by_no_rows(mesh: DeviceMesh) -> None:
    model = net()
    optimizer = Adafactor(model.parameters())
    step(model)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(OptionError, match="'row_var'"):
        megacompile(model, mesh=mesh, device="cpu")
    assert type(model[0].weight) is nn.Parameter and optimizer.state[model[0].weight]


def test_a_step_that_takes_no_dtensors(mesh: DeviceMesh) -> None:
    model = shared(mesh)
    optimizer = Adafactor(model.parameters())
    step(model)
    before = model[0].weight.full_tensor().clone()
    with pytest.raises(OptimizerError, match="Adafactor"):
        optimizer.step()
    assert model[0].weight.full_tensor().equal(before)
    AdamW(model.parameters()).step()
    assert not model[0].weight.full_tensor().equal(before)


# What a model may do afterwards.


def test_other_names_of_a_part_are_noticed(mesh: DeviceMesh) -> None:
    """Nobody could guard them while an update runs: the step waits for it then."""
    model = shared(mesh)
    step(model)
    (bucket, *_) = inside.buckets(model).values()
    for i, param in enumerate(bucket.params):
        assert not bucket.aliased(i)
        alias = param.detach()
        assert bucket.aliased(i)
        alias = param.to_local()  # type: ignore[attr-defined]
        assert bucket.aliased(i)
        del alias
        assert not bucket.aliased(i)


def test_memory_is_given_back_and_taken_again(mesh: DeviceMesh) -> None:
    model, plain = shared(mesh, resident="all"), net()
    optimizers = [AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(2):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step(each)
            optimizer.step()
        with released(model):
            moved = [param.full_tensor() for param in model.parameters()]
        for want, got in zip(plain.parameters(), moved, strict=True):
            assert want.equal(got)
    full = dict(full_parameters(model))
    for name, param in plain.named_parameters():
        value = full.pop(name)
        assert type(value) is Tensor and value.equal(param)
    assert schedules(model) and not full
