"""Methods of a model's classes that are patched after a call: they are the ones that are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import inside
from tests.zoo import WIDTH, differences, equal, twins


class Twice(nn.Module):
    """Computes by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x))

    def middle(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(x.tanh())
        return y


def classes() -> tuple[type[nn.Module], type[nn.Module]]:
    """Classes that nobody else has."""

    class Layer(nn.Linear):
        pass

    class Model(Twice):
        def __init__(self) -> None:
            super().__init__()
            self.first = Layer(WIDTH, WIDTH)

    return Model, Layer


def doubled(self: Any, x: Tensor) -> Tensor:
    y: Tensor = nn.functional.linear(x, self.weight, self.bias) * 2
    return y


def other(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.last(x) * 2
    return y


PATCHES: dict[str, tuple[int, str, Any]] = {  # of the model's class or the layer's
    "forward": (0, "forward", lambda self, x: self.last(self.first(x)) - 1),
    "another method": (0, "middle", other),
    "forward of a layer": (1, "forward", doubled),
    "call": (1, "__call__", doubled),
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_method_that_is_patched_after_a_call_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    which, attribute, patch = PATCHES[name]
    kinds = classes()
    torch.manual_seed(0)
    plain, streamed = twins(kinds[0]())
    x = torch.randn(2, WIDTH)

    def assert_equal() -> Tensor:
        outputs: list[Tensor] = []
        for each in (plain, streamed):
            y = each(x)
            y.square().mean().backward()
            outputs.append(y.detach())
        assert equal(*outputs)
        assert differences(plain, streamed) == []
        return outputs[0]

    before = assert_equal()
    with monkeypatch.context() as patches:
        patches.setattr(kinds[which], attribute, patch)
        assert not equal(assert_equal(), before)
        graphs = len(inside.streamed(streamed).graphs)
    assert equal(assert_equal(), before)
    assert len(inside.streamed(streamed).graphs) == graphs, "it was captured before"


def test_a_part_that_is_called_by_itself_has_the_methods_of_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = classes()
    plain, streamed = twins(kinds[0]())
    x = torch.randn(2, WIDTH)
    assert equal(plain.first(x), streamed.first(x))
    monkeypatch.setattr(kinds[1], "forward", doubled)
    assert equal(plain.first(x), streamed.first(x))


def test_what_a_class_counts_is_no_method() -> None:
    kinds = classes()
    _, streamed = twins(kinds[0]())
    for k in range(3):
        kinds[0].calls = k  # type: ignore[attr-defined]
        streamed(torch.ones(2, WIDTH))
    assert len(inside.streamed(streamed).graphs) == 1
