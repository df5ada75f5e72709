"""What is captured anew in each call is said, such as a counter in an attribute."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile
from tests import inside


class Counts(nn.Module):
    """What it computes depends on a whole number and on a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.calls = 0
        self.name = ""

    def forward(self, x: Tensor) -> Tensor:
        if not self.name:
            self.calls += 1
        result: Tensor = self.layers(x) * 0.9**self.calls + len(self.name)
        return result


def warned(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "captured anew" in str(w.message)]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_counter_in_an_attribute_may_be_a_symbol(lowering: str) -> None:
    """With Dynamo's option its second value is one, as it is for an argument."""
    torch.manual_seed(0)
    plain = Counts()
    model = megacompile(copy.deepcopy(plain), device="cpu", lowering=lowering)
    x = torch.randn(2, 4)

    def run() -> None:
        for _ in range(12):
            got, expected = model(x), plain(x)
            got.square().sum().backward()
            expected.square().sum().backward()
            if lowering == "eager":
                assert torch.equal(got, expected)
            else:
                torch.testing.assert_close(got, expected)

    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        assert warned(run) == []
    assert model.calls == plain.calls == 12
    assert len(inside.streamed(model).graphs) == 2
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_a_counter_is_said() -> None:
    model = megacompile(Counts(), device="cpu", lowering="eager")
    (text,) = warned(lambda: [model(torch.ones(2, 4)) for _ in range(9)])
    assert "(model.calls == 7)" in text


def test_each_call_is_another_case() -> None:
    """It is said once, with the guard that failed and the time."""
    model = megacompile(Counts(), device="cpu", lowering="eager")

    def run(first: int, calls: int) -> None:
        for i in range(first, first + calls):
            model.name = f"case {i}"
            model(torch.ones(2, 4))

    assert warned(lambda: run(0, 8)) == []  # the first one is no capture anew
    (text,) = warned(lambda: run(8, 1))
    assert text.startswith("megacompile: Counts was captured anew in 8 of its last 8 calls")
    assert "model.name == 'case 7'" in text
    assert warned(lambda: run(9, 9)) == []


def test_captures_that_are_far_between_are_not_said() -> None:
    model = megacompile(Counts(), device="cpu", lowering="eager")

    def run() -> None:
        for i in range(10):
            model.name = f"case {i}"
            for _ in range(3):
                model(torch.ones(2, 4))

    assert warned(run) == []


def test_a_module_that_is_called_by_itself() -> None:
    """The guard is that of its own captures."""
    part = Counts()
    model = megacompile(nn.Sequential(part, nn.Linear(4, 4)), device="cpu", lowering="eager")
    model(torch.ones(2, 4))

    def run() -> None:
        for i in range(9):
            part.name = f"case {i}"
            part(torch.ones(2, 4))

    (text,) = warned(run)
    assert "Sequential was captured anew" in text and "case 6" in text
