"""`module.to(...)` and the like within a forward: parameters are converted as plain ones are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.errors import ModelError
from tests.zoo import WIDTH, Stack, assert_same, assert_steps_same, batch, step, twins

pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")

Convert = Callable[[nn.Module], nn.Module]


class Router(nn.Module):
    """Converts a layer in its forward, as the router of Switch Transformers does."""

    def __init__(self, convert: Convert) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.layer.register_buffer("scale", torch.ones(()))
        self.convert = convert

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.convert(self.layer)
        assert isinstance(self.layer.scale, Tensor)
        result: Tensor = self.layer(x) * self.layer.scale
        return result


class EagerRouter(Router):
    """The same where Dynamo captures nothing."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class EagerConversion(Router):
    """Only the conversion is not captured."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _converted(self) -> nn.Module:
        return self.convert(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self._converted()
        result: Tensor = self.layer(x)
        return result


ROUTERS = [Router, EagerRouter, EagerConversion]
SAME: dict[str, Convert] = {
    "float": lambda layer: layer.float(),
    "to": lambda layer: layer.to("cpu", torch.float32),
}


def routed(router: type[Router], convert: Convert, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return twins(Stack(block=lambda: router(convert)), **options)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("convert", SAME.values(), ids=SAME)
def test_to_what_it_is_already(router: type[Router], convert: Convert) -> None:
    plain, streamed = routed(router, convert)
    params = list(streamed.parameters())
    for _ in range(2):  # gradients add up
        assert_steps_same(plain, streamed, batch())
    for model in (plain, streamed):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_steps_same(plain, streamed, batch())
    assert all(a is b for a, b in zip(params, streamed.parameters(), strict=True))
    assert all(type(p) is nn.Parameter for p in copy.deepcopy(streamed).parameters())


def test_a_frozen_layer() -> None:
    plain, streamed = routed(EagerConversion, SAME["float"])
    for model in (plain, streamed):
        model.layers[1].requires_grad_(False)
    assert_steps_same(plain, streamed, batch())


@pytest.mark.parametrize("router", ROUTERS)
def test_another_dtype_is_refused_and_changes_nothing(router: type[Router]) -> None:
    plain, streamed = routed(router, lambda layer: layer.double())
    with pytest.raises(ModelError, match="float32 got data .*float64 .* between calls"):
        streamed(**batch())
    assert_same(plain, streamed)


@pytest.mark.parametrize("router", [EagerRouter, EagerConversion])
def test_where_torch_exchanges_parameters(router: type[Router]) -> None:
    """`torch.__future__` has an option by which `to` exchanges any parameter."""
    plain, streamed = routed(router, SAME["float"])
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert_steps_same(plain, streamed, batch())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("router", [EagerRouter, EagerConversion])
def test_values_that_a_conversion_changes_reach_the_host(router: type[Router]) -> None:
    def halved(layer: nn.Module) -> nn.Module:
        result: nn.Module = layer._apply(lambda t: t / 2)
        return result

    plain, streamed = routed(router, halved)
    with torch.no_grad():
        assert torch.equal(plain(**batch()), streamed(**batch()))
    assert_same(plain, streamed)
    assert torch.equal(step(plain, batch()), step(streamed, batch()))
