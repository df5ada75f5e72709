"""Other names for a gradient's, a parameter's or a state's memory, used behind `optimizer.step()`.

A guard cannot see an alias. The update in the background must be over before one is used, so the
step waits where there is one, and an export to another library waits like any other use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megacompile.runtime.params.guards import GuardedParameter
from tests.gate import Gate, in_flight
from tests.training import BUCKET, NAME, adamw, gradients, net, train
from tests.zoo import assert_same, equal, twins

# --- gradients


def flattened(model: nn.Module) -> Tensor:
    """All gradients as one flat tensor, of which each `p.grad` is a view."""
    params = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])
    offset = 0
    for param in params:
        param.grad = flat[offset : offset + param.numel()].view_as(param)
        offset += param.numel()
    return flat


GRADIENTS: dict[str, Callable[[Any], Tensor]] = {
    "flat gradients": flattened,
    "p.grad.view(-1)": lambda m: m.get_parameter(NAME).grad.view(-1),
    "p.grad.detach()": lambda m: m.get_parameter(NAME).grad.detach(),
    "p.grad.data": lambda m: m.get_parameter(NAME).grad.data,
    "numpy": lambda m: torch.from_numpy(m.get_parameter(NAME).grad.numpy()),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_an_alias_of_a_gradient_is_written_behind_the_step(gate: Gate, kind: str) -> None:
    plain, streamed = twins(net())
    for model in (plain, streamed):
        (optimizer,) = adamw(model)
        train(model, [optimizer], 2)
        optimizer.zero_grad()
        gradients(model, 2)
        alias = GRADIENTS[kind](model)
        if model is streamed:
            gate.reuse()
        optimizer.step()
        alias.zero_()
    assert BUCKET in gate.waited
    assert_same(plain, streamed)


def test_a_gradient_that_nobody_holds_makes_nobody_wait(gate: Gate) -> None:
    (plain, _), (streamed, _) = in_flight(gate)
    assert gate.waited == []
    assert_same(plain, streamed)


def test_gradients_of_the_users_own_are_known_by_one_name(gate: Gate) -> None:
    """What the user has put into `p.grad` is guarded itself."""
    plain, streamed = twins(net())
    for model in (plain, streamed):
        (optimizer,) = adamw(model)
        train(model, [optimizer], 2)
        gradients(model, 2)
        param = model.get_parameter(NAME)
        param.grad = mine = torch.full_like(param, 0.5)
        if model is streamed:
            gate.reuse()
        optimizer.step()
        if model is streamed:
            assert gate.waited == []
        mine.zero_()
    assert gate.waited == [BUCKET]
    assert_same(plain, streamed)


# --- exports

LIBRARY: Any = torch  # its stubs do not know all of these


EXPORTS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "to_dlpack": lambda p: LIBRARY.from_dlpack(LIBRARY.utils.dlpack.to_dlpack(p)),
    "torch.to_dlpack": lambda p: LIBRARY.from_dlpack(LIBRARY.to_dlpack(p)),
    "_to_dlpack_versioned": lambda p: LIBRARY.from_dlpack(LIBRARY._C._to_dlpack_versioned(p)),
    "from_dlpack": lambda p: LIBRARY.from_dlpack(p.detach()),
    "__dlpack__": lambda p: LIBRARY.from_dlpack(p.detach().__dlpack__()),
    "np.from_dlpack": lambda p: torch.from_numpy(np.from_dlpack(p.detach())),
    "np.asarray": lambda p: torch.from_numpy(np.asarray(p.detach())),
    "data_ptr": lambda p: (p.data_ptr(), p)[1],
    "untyped_storage": lambda p: torch.empty(0).set_(p.untyped_storage()).view(p.shape),
}


@pytest.mark.parametrize("how", EXPORTS)
def test_an_export_waits(gate: Gate, how: str) -> None:
    (plain, _), (streamed, _) = in_flight(gate)
    param = streamed.get_parameter(NAME)
    assert isinstance(param, GuardedParameter)
    found = EXPORTS[how](param)
    assert gate.waited == [BUCKET]
    assert equal(found.detach(), plain.get_parameter(NAME).detach())


def test_what_was_exported_is_an_alias(gate: Gate) -> None:
    _, streamed = twins(net())
    (optimizer,) = adamw(streamed)
    train(streamed, [optimizer], 2)
    capsule = LIBRARY.utils.dlpack.to_dlpack(streamed.get_parameter(NAME).detach())
    optimizer.zero_grad()
    gradients(streamed, 2)
    gate.reuse()
    optimizer.step()
    assert gate.waited == [BUCKET]
    del capsule


def test_a_guarded_class_has_no_way_past_python(gate: Gate) -> None:
    """Libraries that find this attribute on the class read the memory without a call."""
    _, (streamed, _) = in_flight(gate)
    param = streamed.get_parameter(NAME)
    assert not hasattr(type(param), "__dlpack_c_exchange_api__")
    assert gate.waited == []
    assert param.sum() is not None
    assert hasattr(type(param), "__dlpack_c_exchange_api__") == hasattr(
        Tensor, "__dlpack_c_exchange_api__"
    )
