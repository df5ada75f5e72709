"""What Dynamo cannot trace runs, or raises, as in the plain model."""

from __future__ import annotations

import copy
import logging
import traceback
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megacompile import compat, megacompile
from tests import inside


class Net(nn.Module):
    """Its second product has the wrong width where the input has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.drop(self.norm(x))
        result: Tensor = self.linear(x)
        return result


def fails(model: nn.Module, x: Tensor) -> tuple[str, list[str]]:
    """What is raised, and the functions of this file that it came through."""
    torch.manual_seed(1)
    with pytest.raises(RuntimeError) as caught:
        model(x)
    assert type(caught.value) is RuntimeError
    frames = traceback.extract_tb(caught.value.__traceback__)
    return str(caught.value), [f"{at.name}: {at.line}" for at in frames if at.filename == __file__]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_wrong_shape(lowering: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the first call, and in a later one; the calls between them and afterwards are right."""
    plain = Net()
    model = megacompile(copy.deepcopy(plain), device="cpu", lowering=lowering)
    wrong, right = torch.randn(2, 3, 5), torch.randn(2, 3, 4)
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG, "torch._subclasses"):
        warnings.simplefilter("error", UserWarning)
        for x in (wrong, right, wrong, right):
            if x is wrong:
                assert fails(model, x) == fails(plain, x)
                text, lines = fails(copy.deepcopy(plain), x)
                assert "shapes cannot be multiplied" in text
                assert lines[-1] == "forward: result: Tensor = self.linear(x)"
            else:
                found = []
                for each in (model, plain):
                    torch.manual_seed(2)
                    found.append(each(x))
                    found[-1].sum().backward()
                torch.testing.assert_close(*found, rtol=0, atol=0 if lowering == "eager" else 1e-5)
    assert "failed while attempting" not in caplog.text
    assert model.calls == plain.calls == 4
    for own, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, other)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@torch.library.custom_op("megacompile_tests::real_only", mutates_args=())
def real_only(x: Tensor) -> Tensor:
    return x.clone()


@real_only.register_fake
def _(x: Tensor) -> Tensor:
    raise RuntimeError("no fake tensors here")


class Untraced(nn.Module):
    """Dynamo cannot trace what is behind its layer."""

    def __init__(self, act: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        self.act = act
        self.calls: list[float] = []

    def forward(self, x: Tensor, number: float) -> Tensor:
        self.calls.append(number)
        return self.act(self.layers(x), number)


def no_gradient_at_first(x: Tensor, number: float) -> Tensor:
    with torch.set_grad_enabled(number > 1):
        return x * 2


UNTRACED: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "no fake tensors": (lambda x, _: real_only(x.detach()) + x, (1.0, 2.0)),
    "a negative float": (lambda x, number: x + number**2, (-0.5, -0.25, -0.1)),
    "a mode": (no_gradient_at_first, (1, 2, 3)),
    "a condition as an index": (lambda x, number: x + (1.0, 0.5)[number > 2], (1, 3, 2)),
}


@pytest.mark.parametrize("case", UNTRACED)
def test_what_dynamo_cannot_trace_runs_as_it_is(case: str) -> None:
    """It is said once, and equals the plain model in every bit; no line runs twice."""
    act, numbers = UNTRACED[case]
    plain = Untraced(act)
    model = megacompile(copy.deepcopy(plain), device="cpu", lowering="eager")
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, plain)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in numbers:
            found = []
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                torch.manual_seed(2)
                found.append(each(torch.ones(2, 4), number))
                if found[-1].requires_grad:
                    found[-1].square().sum().backward()
                    optimizer.step()
            assert torch.equal(*found)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)
    assert model.calls == plain.calls == list(numbers)
    (text,) = (str(w.message) for w in caught if "runs in eager mode" in str(w.message))
    assert "(slower, same numbers; said once): Dynamo could not trace it (" in text


def test_behind_a_graph_break_no_line_runs_twice() -> None:
    """There, the error is Dynamo's: the lines before it have run."""
    calls = []

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            torch._dynamo.graph_break()
            calls.append(1)
            result: Tensor = self.b(y)
            return result

    model = megacompile(Broken(), device="cpu", lowering="eager")
    with pytest.raises(compat.CAPTURE_ERRORS, match="reduction dim"):
        model(torch.ones(2, 4))
    assert len(calls) <= 1


def test_it_is_not_said_to_run_in_eager_mode() -> None:
    model = megacompile(Net(), device="cpu", lowering="eager")
    fails(model, torch.randn(2, 3, 5))
    assert not inside.streamed(model).buckets.notice.used
