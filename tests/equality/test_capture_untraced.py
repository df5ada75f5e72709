"""Code that Dynamo cannot capture, or captures anew: slower, never wrong, and said once."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megacompile import schedules
from tests import inside
from tests.equality.nets import Applies, in_a_row
from tests.quantized import Int8
from tests.zoo import WIDTH, Stack, assert_same, assert_steps_same, batch, equal, step, twins


@contextmanager
def said() -> Iterator[list[str]]:
    """What megacompile warns of meanwhile."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if str(w.message).startswith("megacompile")]


# --- graph breaks


Middle = Callable[[Any, Tensor], Tensor]


def breaks(middle: Middle) -> Any:
    """A stack with something in the middle that Dynamo cannot capture, plain and streamed."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        hidden = middle(m, m.stack.layers[0](m.stack.embed(x)))
        return F.mse_loss(m.stack.head(m.stack.layers[1](hidden)), y)

    torch.manual_seed(0)
    scale = nn.Parameter(torch.full((WIDTH,), 1.5))
    return twins(Applies(forward, stack=Stack(layers=2), scale=scale))


def read_in_eager(module: Any, h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    scaled: Tensor = h * module.scale * float(module.scale.detach().mean())
    return scaled


def layer_in_eager(module: Any, h: Tensor) -> Tensor:
    result: Tensor = module.stack.layers[0](h) * module.scale
    return result


MIDDLES: dict[str, tuple[Middle, bool]] = {  # is it said
    "branch on a value": (lambda module, h: h + 1 if h.sum() > 0 else h - 1, False),
    "parameter in eager code": (read_in_eager, False),
    "layer in eager code": (torch._dynamo.disable(layer_in_eager), True),
    "numpy": (lambda module, h: h + torch.from_numpy(h.detach().numpy() * 0.5), False),
}


@pytest.mark.parametrize("middle", MIDDLES)
def test_graph_breaks(middle: str) -> None:
    function, is_said = MIDDLES[middle]
    plain, streamed = breaks(function)
    with said() as texts:
        for _ in range(2):
            assert_steps_same(plain, streamed, batch())
    assert len(texts) == is_said


# --- what cannot be traced


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
        result: Tensor = self.linear(x)
        return result


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
def test_a_wrong_shape_is_the_plain_models_error(
    breaks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first call, and in a later one; no line runs twice, and the calls between them are
    right, and captured."""
    plain, model = twins(Net(breaks=breaks))
    wrong, right = torch.randn(2, 3, 5), torch.randn(2, 3, 4)
    with said() as texts, caplog.at_level(logging.DEBUG, "torch._subclasses"):
        for x in (wrong, right, wrong, right):
            if x is wrong:
                assert failure(model, x) == failure(plain, x)
                assert failure(plain, x)[1] == ["result: Tensor = self.linear(x)"]
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
    assert "failed while attempting" not in caplog.text
    assert model.calls == plain.calls == 4 and texts == []
    assert inside.programs(model)


@torch.library.custom_op("megacompile_tests::real_only", mutates_args=())
def real_only(x: Tensor) -> Tensor:
    return x.clone()


@real_only.register_fake
def _(x: Tensor) -> Tensor:
    raise RuntimeError("no fake tensors here")


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
    "no fake tensors": (lambda x, _: real_only(x.detach()) + x, (1.0, 2.0)),
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
    optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
    with said() as texts:
        for number in (*numbers, *numbers):
            found = []
            for each, optimizer in zip(models, optimizers, strict=True):
                torch.manual_seed(2)
                found.append(each(torch.ones(2, 4), number))
                if found[-1].requires_grad:
                    found[-1].square().sum().backward()
                    optimizer.step()
            assert equal(*(value.detach() for value in found))
    assert_same(plain, model)
    assert model.calls == plain.calls == [*numbers, *numbers]
    untraced = [text for text in texts if "could not trace" in text]
    if not untraced and case == "a condition as an index":
        pytest.skip("this torch traces it")
    assert len(untraced) == 1
    assert where == "in a skipped frame" or len(texts) == 1


# --- methods of a model's classes that are patched after a call


class Twice(nn.Module):
    """Computes by a method of its own."""

    def __init__(self, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.first = layer(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x))

    def middle(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(x.tanh())
        return y


def doubled(self: Any, x: Tensor) -> Tensor:
    y: Tensor = F.linear(x, self.weight, self.bias) * 2
    return y


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

    class Model(Twice):
        pass

    torch.manual_seed(0)
    plain, streamed = twins(Model(Layer))
    x = torch.randn(2, WIDTH)

    def assert_equal() -> Tensor:
        outputs = [model(x) for model in (plain, streamed)]
        for y in outputs:
            y.square().mean().backward()
        assert equal(*(y.detach() for y in outputs))
        assert_same(plain, streamed)
        before: Tensor = outputs[0].detach()
        return before

    before = assert_equal()
    for which, attribute, patch in PATCHES.values():
        with monkeypatch.context() as patches:
            patches.setattr((Model, Layer)[which], attribute, patch)
            assert not equal(assert_equal(), before)
            assert equal(plain.first(x).detach(), streamed.first(x).detach())
            graphs = len(inside.streamed(streamed).graphs)
        assert equal(assert_equal(), before)
        assert len(inside.streamed(streamed).graphs) == graphs, "it was captured before"
    for k in range(3):
        Model.calls = k  # type: ignore[attr-defined]
        assert_equal()
    assert len(inside.streamed(streamed).graphs) == graphs


# --- a program for each kind of call


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


def test_each_kind_of_call_has_a_program_and_keeps_it() -> None:
    """Of inputs, and of states of the thread and the process."""
    plain, model = twins(
        Applies(lambda m, x: m.weight * x, weight=nn.Parameter(torch.ones(6))), dynamic=False
    )
    counts = []
    for _ in range(2):
        for name, value in KINDS.items():
            found = [each(value) for each in (plain, model)]
            assert equal(*(y.detach() for y in found)) and found[0].dtype == found[1].dtype, name
            counts.append(len(inside.programs(model)))
        for name, state in STATES.items():
            with state():
                found = [each(ONES) for each in (plain, model)]
            assert equal(*(y.detach() for y in found)), name
            counts.append(len(inside.programs(model)))
    assert counts == [*range(1, len(KINDS) + len(STATES) + 1)] + [counts[-1]] * (len(counts) // 2)


def clamped(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Clamps its weight in the forward: a captured graph that changes a parameter."""
    with torch.no_grad():
        m.last.weight.clamp_(-0.1, 0.1)
    return F.mse_loss(m.last(F.gelu(m.first(x))), y)


def test_what_cannot_be_scheduled_runs_in_eager_mode() -> None:
    """It is said once for a graph, and is not tried for each size."""
    plain, model = twins(in_a_row(clamped, width=WIDTH))
    with said() as texts:
        for _ in range(2):
            assert_steps_same(plain, model, batch())
    assert len(texts) == 1
    with said():
        for size in (5, 6, 7, 8):
            assert equal(step(plain, batch(size=size)), step(model, batch(size=size)))
    assert_same(plain, model)
    assert schedules(model) == []


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
        result: Tensor = m.others[i](y.float())
        return result

    others = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    plain, model = twins(Applies(forward, layers=nn.ModuleList(layers), others=others))
    for trained in (True, False):
        model.others[1].requires_grad_(trained)
        plain.others[1].requires_grad_(trained)
        for i in (0, 1, 0):
            losses = [each(torch.ones(2, 4), i).square().sum() for each in (plain, model)]
            for loss in losses:
                if loss.requires_grad:
                    loss.backward()
            assert equal(*(loss.detach() for loss in losses))
        pairs = zip(plain.others.parameters(), model.others.parameters(), strict=True)
        assert all(equal(a.grad, b.grad) for a, b in pairs)
