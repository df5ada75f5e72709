"""Constants and functions that are equal, and layers that share because theirs are."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import megacompile, schedules
from megacompile.ir.constants import constant_key, function_key
from megacompile.plan.equal_layers import equal_layers
from tests import whole
from tests.whole import Config, Kernel, Rounding, Whole


@dataclass
class Changeable:
    value: int = 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: (1, (2.0, None)),
        lambda: float("nan"),
        lambda: Rounding.HALVES,
        lambda: Kernel(False),
        lambda: Config(dtype=torch.bfloat16),
    ],
)
def test_equal_constants_are_equal(make: Callable[[], Any]) -> None:
    assert constant_key(make()) == constant_key(make())
    assert hash(constant_key(make())) == hash(constant_key(make()))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ((True,), Kernel(True)),
        (Rounding.HALVES, Rounding.QUARTERS),
        (Config(Rounding.HALVES), Config(Rounding.QUARTERS)),
    ],
)
def test_other_constants_are_not(one: Any, other: Any) -> None:
    assert constant_key(one) != constant_key(other)


@pytest.mark.parametrize("value", [Changeable(), [1], torch.ones(2), (1, Changeable()), object()])
def test_what_can_change_is_no_constant(value: Any) -> None:
    with pytest.raises(TypeError, match="is no constant"):
        constant_key(value)


def around(value: Any, default: int = 0) -> Callable[[], Any]:
    def function(given: int = default) -> Any:
        return value, given

    return function


def empty() -> types.FunctionType:
    """A function whose cell is empty."""
    function = around(1)
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(function.__code__, {}, closure=(types.CellType(),))


def test_functions_around_the_same_are_equal() -> None:
    shared, other = [1], [1]
    assert function_key(around(shared)) == function_key(around(shared))
    assert hash(function_key(around(shared))) == hash(function_key(around(shared)))
    assert function_key(around(shared)) != function_key(around(other)), "they may be changed"
    one, another = around(shared), lambda: shared
    assert function_key(one) != function_key(another)


def test_what_is_no_closure_is_itself() -> None:
    hidden = empty()
    for function in (torch.relu, around, functools.partial(around, 1), "relu", hidden):
        assert function_key(function) is function


def test_defaults_that_are_other_objects_make_another_function() -> None:
    shared = [1]
    assert function_key(around(shared, 1000)) != function_key(around(shared, 2000))


def model(layers: int = 4) -> whole.Model:
    torch.manual_seed(0)
    return whole.Model(layers)


def templates(made: nn.Module) -> int:
    """How many templates the layers of a model have, with its first layer and its head."""
    made = megacompile(made, lowering="eager")
    made(torch.ones(2, 4)).backward()
    return len({id(stage.template) for stage in schedules(made)[-1].stages})


def test_layers_share_a_function_that_is_left_whole() -> None:
    assert templates(model()) == 3


def test_layers_with_another_configuration_do_not() -> None:
    made = model()
    made.layers[2] = Whole(config=Config(Rounding.HALVES))
    assert templates(made) == 4


def test_training_is_equal_in_every_bit() -> None:
    plain, streamed = model(), megacompile(model(), lowering="eager")
    for made in (plain, streamed):
        made(torch.linspace(-1, 1, 8).view(2, 4)).backward()
    for one, other in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_plan_takes_equal_configurations_for_equal() -> None:
    made = model()
    assert [len(group) for group in equal_layers(made)] == [4]
    made.layers[2] = Whole(config=replace(Config(), rounding=Rounding.HALVES))
    assert equal_layers(made) == []
