"""What Dynamo cannot trace runs, or raises, as in the plain model."""

from __future__ import annotations

import copy
import logging
import traceback
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megacompile import compat, megacompile
from megacompile.runtime.model.attempts import Attempts
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
    """Dynamo cannot trace what is behind its layers."""

    def __init__(self, act: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.last = nn.Linear(4, 4)
        self.act = act
        self.calls: list[float] = []

    def forward(self, x: Tensor, number: float) -> Tensor:
        x = self.layers(x)
        self.calls.append(number)
        return self.act(self.last(x), number)


class BehindBreak(Untraced):
    """The same behind a graph break."""

    def forward(self, x: Tensor, number: float) -> Tensor:
        x = self.layers(x)
        torch._dynamo.graph_break()
        self.calls.append(number)
        return self.act(self.last(x), number)


class BehindSkippedFrame(Untraced):
    """The same in a function that code calls which runs in eager mode."""

    def forward(self, x: Tensor, number: float) -> Tensor:
        for _ in range(1):
            torch._dynamo.graph_break()
            x = self.layers(x)
            self.calls.append(number)
            x = self.ending(x, number)
        return x

    def ending(self, x: Tensor, number: float) -> Tensor:
        return self.act(self.last(x), number)


def no_gradient_at_first(x: Tensor, number: float) -> Tensor:
    with torch.set_grad_enabled(number > 1):
        return x * 2


UNTRACED: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "no fake tensors": (lambda x, _: real_only(x.detach()) + x, (1.0, 2.0)),
    "a negative float": (lambda x, number: x + number**2, (-0.5, -0.25, -0.1)),
    "a mode": (no_gradient_at_first, (1, 2, 3)),
    "a condition as an index": (lambda x, number: x + (1.0, 0.5)[number > 2], (1, 3, 2)),
}


@pytest.mark.parametrize("kind", [Untraced, BehindBreak, BehindSkippedFrame])
@pytest.mark.parametrize("case", UNTRACED)
def test_what_dynamo_cannot_trace_runs_as_it_is(case: str, kind: type[Untraced]) -> None:
    """It is said once, and equals the plain model in every bit; no line runs twice."""
    act, numbers = UNTRACED[case]
    plain = kind(act)
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
    said = [str(w.message) for w in caught if "could not trace" in str(w.message)]
    if not said and case == "a condition as an index":
        pytest.skip("this torch traces it")
    (text,) = said
    if kind is not BehindSkippedFrame:  # of which more is not captured
        assert sum("runs in eager mode" in str(w.message) for w in caught) == 1
    assert f"(slower, same numbers; said once): Dynamo could not trace {__file__}:" in text
    assert text.endswith("; TORCH_LOGS=+dynamo says more")


def test_a_wrong_shape_behind_a_graph_break() -> None:
    """It is raised at the user's line each time, no line runs twice, and a right one is captured
    afterwards."""
    calls = []

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, cut: int) -> Tensor:
            y = self.a(x)
            torch._dynamo.graph_break()
            calls.append(1)
            result: Tensor = self.b(y[:, cut:])
            return result

    plain = Broken()
    model = megacompile(copy.deepcopy(plain), device="cpu", lowering="eager")
    x = torch.ones(2, 4)
    for _ in range(2):
        found = []
        for each in (model, plain):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
                each(x, 1)
            frames = traceback.extract_tb(caught.value.__traceback__)
            found.append([at.line for at in frames if at.filename == __file__][-1])
        assert found == ["result: Tensor = self.b(y[:, cut:])"] * 2
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert torch.equal(model(x, 0), plain(x, 0))
    assert not [w for w in warned if "runs in eager mode" in str(w.message)]
    assert len(calls) == 6
    assert [graph.name for graph in inside.streamed(model).graphs] == ["Broken", "Broken.1"]


def test_fewer_calls_are_traced_in_vain() -> None:
    """The first three, then every second, fourth, ... one; a trace that succeeds begins anew."""
    attempts = Attempts()
    for _ in range(2):
        tried = []
        for call in range(1, 40):
            if attempts.is_due():
                tried.append(call)
                attempts.failed("")
        assert tried == [1, 2, 3, 5, 9, 17, 33]
        attempts.traced()
    assert attempts.is_due() and attempts.is_due()


def test_what_is_not_tried_runs_as_it_is() -> None:
    act, _ = UNTRACED["no fake tensors"]
    plain = Untraced(act)
    model = megacompile(copy.deepcopy(plain), device="cpu", lowering="eager")
    traces = mock.Mock(side_effect=compat.untraced_by)
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(compat, "untraced_by", traces),
    ):
        warnings.simplefilter("always")
        for _ in range(6):
            found = []
            for each in (model, plain):
                torch.manual_seed(2)
                found.append(each(torch.ones(2, 4), 1.0))
                found[-1].square().sum().backward()
            assert torch.equal(*found)
    assert traces.call_count == 4
    assert len([w for w in caught if "runs in eager mode" in str(w.message)]) == 1
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None and torch.equal(own.grad, other.grad)


def test_it_is_not_said_to_run_in_eager_mode() -> None:
    model = megacompile(Net(), device="cpu", lowering="eager")
    fails(model, torch.randn(2, 3, 5))
    assert not inside.streamed(model).buckets.notice.used
