"""Code that Dynamo cannot capture, or captures anew: slower, never wrong, and said once."""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import inside
from tests.equality import nets
from tests.equality.nets import Applies, assert_alike, trained
from tests.quantized import Int8
from tests.zoo import WIDTH, assert_same, equal, twins


@contextmanager
def said() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if str(w.message).startswith("megacompile")]


class Net(nn.Module):
    """Its product has the wrong width where the input has, maybe behind a graph break."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(4, 4)
        self.breaks = breaks
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.breaks:
            self.calls += 1
        x = self.drop(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
            self.calls += 1
        return self.linear(x)


def failure(model: nn.Module, x: Tensor) -> tuple[str, list[str]]:
    """What is raised, and the lines of this file that it came through."""
    torch.manual_seed(1)
    with pytest.raises(RuntimeError) as caught:
        model(x)
    assert type(caught.value) is RuntimeError
    frames = traceback.extract_tb(caught.value.__traceback__)
    lines = [str(at.line) for at in frames if at.filename == __file__]
    return str(caught.value), lines[-1:]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_wrong_shape_is_the_plain_models_error(breaks: bool) -> None:
    """In the first call and later; no line runs twice, calls in between are captured."""
    plain, model = twins(Net(breaks=breaks))
    wrong, right = torch.randn(2, 3, 5), torch.randn(2, 3, 4)
    with said() as texts:
        for x in (wrong, right, wrong, right):
            if x is wrong:
                assert failure(model, x) == failure(plain, x)
                assert failure(plain, x)[1] == ["return self.linear(x)"]
                plain.calls -= 1
                plain.norm.load_state_dict(model.norm.state_dict())  # of one call more
                continue
            found = []
            for each in (model, plain):
                torch.manual_seed(2)
                found.append(each(x))
                found[-1].sum().backward()
            assert equal(*(value.detach() for value in found))
            assert_same(plain, model)
    assert model.calls == plain.calls == 4 and texts == []
    assert inside.programs(model)


class Untraced(nn.Module):
    """Dynamo cannot trace what is behind its layers, a graph break, or in a function that code
    calls which runs in eager mode."""

    def __init__(self, act: Callable[[Tensor, float], Tensor], where: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.last = nn.Linear(4, 4)
        self.act = act
        self.where = where
        self.calls: list[float] = []

    def forward(self, x: Tensor, number: float) -> Tensor:
        if self.where == "in a skipped frame":
            for _ in range(1):
                torch._dynamo.graph_break()
                x = self.layers(x)
                x = self.ending(x, number)
            return x
        x = self.layers(x)
        if self.where == "behind a break":
            torch._dynamo.graph_break()
        self.calls.append(number)
        return self.act(self.last(x), number)

    def ending(self, x: Tensor, number: float) -> Tensor:
        self.calls.append(number)
        return self.act(self.last(x), number)


def no_gradient_at_first(x: Tensor, number: float) -> Tensor:
    with torch.set_grad_enabled(number > 1):
        return x * 2


WHERE = ("first", "behind a break", "in a skipped frame")
UNTRACED: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "no fake tensors": (lambda x, _: nets.real_only(x.detach()) + x, (1.0, 2.0)),
    "a negative float": (lambda x, number: x + number**2, (-0.5, -0.25, -0.1)),
    "a mode": (no_gradient_at_first, (1, 2, 3)),
    "a condition as an index": (lambda x, number: x + (1.0, 0.5)[number > 2], (1, 3, 2)),
}


@pytest.mark.parametrize(
    ("case", "where"),
    [
        *(("no fake tensors", where) for where in WHERE),
        ("a negative float", "behind a break"),
        ("a mode", "first"),
        ("a condition as an index", "first"),
    ],
)
def test_what_dynamo_cannot_trace_runs_as_it_is(case: str, where: str) -> None:
    """It is said once, and equals the plain model in every bit; no line runs twice."""
    act, numbers = UNTRACED[case]
    models = plain, model = twins(Untraced(act, where))
    optimizers = {m: torch.optim.AdamW(m.parameters()) for m in (plain, model)}

    def use(m: Any, number: float) -> Any:
        output = trained(torch.ones(2, 4), number)(m)
        if output.requires_grad:
            optimizers[m].step()
        return output

    with said() as texts:
        for number in (*numbers, *numbers):
            assert_alike(models, functools.partial(use, number=number))
    assert model.calls == plain.calls == [*numbers, *numbers]
    untraced = [text for text in texts if "could not trace" in text]
    if not untraced and case == "a condition as an index":
        pytest.skip("this torch traces it")
    assert len(untraced) == 1
    assert where == "in a skipped frame" or len(texts) == 1


def doubled(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight, self.bias) * 2


PATCHES: dict[str, tuple[int, str, Any]] = {  # of the model's class or the layer's
    "forward": (0, "forward", lambda self, x: self.last(self.first(x)) - 1),
    "another method": (0, "middle", lambda self, x: self.last(x) * 2),
    "forward of a layer": (1, "forward", doubled),
    "call": (1, "__call__", doubled),
}


def test_a_method_that_is_patched_after_a_call_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undone, what was captured before is right again. What a class counts is no method. A part
    that is called by itself has the methods of its class, too."""

    class Layer(nn.Linear):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Layer(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.middle(self.first(x))

        def middle(self, x: Tensor) -> Tensor:
            return self.last(x.tanh())

    plain, streamed = models = twins(Model())
    x = torch.randn(2, WIDTH)

    def graphs() -> int:
        return len(inside.graphs(streamed))

    assert_alike(models, trained(x))
    before = plain(x).detach()
    for which, attribute, patch in PATCHES.values():
        with monkeypatch.context() as patches:
            patches.setattr((Model, Layer)[which], attribute, patch)
            assert_alike(models, trained(x))
            assert not equal(plain(x).detach(), before)
            assert equal(plain.first(x).detach(), streamed.first(x).detach())
            count = graphs()
        assert equal(streamed(x).detach(), before)
        assert graphs() == count, "it was captured before"
    for k in range(3):
        Model.calls = k  # type: ignore[attr-defined]
        assert_alike(models, trained(x))
    assert graphs() == count


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


ONES = torch.ones(4, 6)
KINDS: dict[str, Any] = {
    "tensor": ONES,
    "rows": torch.ones(3, 6),
    "dtype": ONES.double(),
    "strides": torch.ones(6, 4).t(),
    "requires grad": ONES.clone().requires_grad_(),
    "int": 3,
    "float": 3.0,
    "bool": True,
    "zero": 0.0,
    "nan": float("nan"),
    "parameter": nn.Parameter(ONES.clone(), requires_grad=False),
}
STATES: dict[str, Callable[[], Any]] = {
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another autocast": lambda: torch.autocast("cpu", torch.float16),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "cuDNN": lambda: torch.backends.cudnn.flags(enabled=False),
    "deterministic": deterministic,
}


def called(model: Any, x: Any) -> Any:
    return model(x)


def test_each_kind_of_call_has_a_program_and_keeps_it() -> None:
    """Of inputs, and of states of the thread and the process."""
    plain, model = twins(
        Applies(lambda m, x: m.weight * x, weight=nn.Parameter(torch.ones(6))), dynamic=False
    )
    calls: list[tuple[str, Callable[[], Any], Any]] = [
        (name, nullcontext, value) for name, value in KINDS.items()
    ]
    calls += [(name, state, ONES) for name, state in STATES.items()]
    counts = []
    for name, state, value in (*calls, *calls):
        with state():
            assert_alike((plain, model), functools.partial(called, x=value), name=name)
        counts.append(len(inside.programs(model)))
    assert counts == [*range(1, len(calls) + 1)] + [len(calls)] * len(calls)


def test_how_a_packed_parameter_is_put_together_is_part_of_the_key() -> None:
    """The same parts, read as another dtype, are another weight; so is another layer of the same
    code, and one that is frozen."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    for layer, dtype in zip(layers, (torch.float32, torch.bfloat16), strict=True):
        weight = Int8.of(layers[0].weight.detach())
        packed = Int8(weight.data8, weight.scale, dtype, weight.device)
        layer.weight = nn.Parameter(packed, requires_grad=False)

    def forward(m: Any, x: Tensor, i: int) -> Tensor:
        weight = m.layers[i].weight
        y = F.linear(x.to(weight.dtype), weight)
        torch._dynamo.graph_break()
        return m.others[i](y.float())

    others = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    models = twins(Applies(forward, layers=nn.ModuleList(layers), others=others))
    for is_trained in (True, False):
        for model in models:
            model.others[1].requires_grad_(is_trained)
        for i in (0, 1, 0):
            assert_alike(models, trained(torch.ones(2, 4), i))
