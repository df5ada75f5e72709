"""A streamed model's call: what it adopts, moves and swaps, and what a copy of it is."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops import while_loop
from torch.overrides import TorchFunctionMode

from megacompile import megacompile, schedules
from megacompile.errors import ModelError
from tests import inside
from tests.equality.nets import Applies, assert_alike, in_a_row, said, trained
from tests.inside import buckets
from tests.training import losses_of
from tests.zoo import (
    WIDTH,
    assert_same,
    assert_steps_same,
    batch,
    batchnorm,
    differences,
    equal,
    stack,
    step,
    twins,
)


def places(model: Any) -> dict[str, int]:
    return {name: param.data_ptr() for name, param in model.named_parameters()}


@contextmanager
def told_of(name: str, count: int) -> Iterator[None]:
    """Within, so many warnings have this in them."""
    with said(name) as found:
        yield
    assert len(found) == count, found


def test_a_call_that_finds_nothing_changed_moves_nothing() -> None:
    """Nor does one that fails. A buffer in two places stays one."""
    model = batchnorm()[0]
    model.layers[1][1].running_mean = model.layers[0][1].running_mean
    _, model = twins(model)
    step(model, batch())
    params, there = dict(model.named_parameters()), places(model)
    homes, buffers = list(buckets(model).values()), list(model.buffers())
    proxies = inside.streamed(model).buckets.proxies
    step(model, batch())
    for wrong in (torch.ones(2, 3), "text"):
        with pytest.raises(Exception, match=".+"):
            model(wrong)
    assert all(param is params[name] for name, param in model.named_parameters())
    assert places(model) == there and inside.streamed(model).buckets.proxies is proxies
    assert all(a is b for a, b in zip(buckets(model).values(), homes, strict=True))
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))


def test_data_that_two_parameters_share_is_refused() -> None:
    """A change of one would change the other, which two places in buckets cannot do."""
    _, model = twins(stack()[0])
    step(model, batch())
    for shared in (model.embed.weight.data, model.layers[0].up.weight.data[8:24]):
        model.head.weight.data = shared
        with pytest.raises(ModelError):
            step(model, batch())
        model.head.weight.data = model.head.weight.data.clone()
        step(model, batch())


def test_a_new_layout_lets_the_old_one_go() -> None:
    """Not until the next step, and not with what the user replaced: twice the model would be."""
    _, model = twins(stack()[0])
    step(model, batch())
    old = [weakref.ref(bucket) for bucket in buckets(model).values()]
    model.zero_grad()
    model.head = nn.Linear(16, 16)
    step(model, batch())
    gc.collect()
    assert [bucket() for bucket in old] == [None] * len(old)


def test_a_new_graph_finds_the_new_node_of_a_parameter() -> None:
    """Another graph had asked for the node of this one parameter, which has a hook."""

    def forward(m: Any, x: Tensor, early: bool) -> Tensor:
        branch = m.middle if early else m.last
        return branch(m.first(x)).sum()

    x = torch.ones(2, WIDTH)
    both = twins(in_a_row(forward, count=3, width=WIDTH))
    for model in both:
        param = model.first.weight
        param.register_hook(lambda gradient: gradient * 2)
        for _ in range(2):
            model(x, True).backward()
        before = param.data
        param.data = before.double()
        param.data = before
        model(x, False).backward()
    want, got = ([p.grad for p in model.parameters()] for model in both)
    assert all(map(equal, want, got))


def loads_and_assigns(model: Any) -> Any:
    state = {name: value.double() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return state


def puts_into_a_flat_buffer(model: Any) -> Any:
    params = [model.embed.weight, model.head.weight]
    flat = torch.cat([param.detach().flatten() for param in params])
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.data = part.view_as(param)
    return flat


def keeps_and_ties(model: Any) -> Any:
    """A new layout moves the parameters that are left as they are, too."""
    state = model.state_dict()
    model.layers[2].up.weight = model.layers[0].up.weight
    return state


@pytest.mark.parametrize("alias", [loads_and_assigns, puts_into_a_flat_buffer, keeps_and_ties])
def test_aliases_that_are_cut_are_told_of_once(alias: Callable[[Any], Any]) -> None:
    """In a call, or in a step."""
    _, model = twins(stack()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, batch())
    with told_of("embed.weight", 1):
        for k in range(2):
            keep = alias(model)
            dtype = model.embed.weight.dtype
            if alias is puts_into_a_flat_buffer and not k:
                optimizer.step()
            step(model, {key: value.to(dtype) for key, value in batch().items()})
    del keep


def trained_before(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(**batch())
    loss.backward()
    optimizer.step()
    return optimizer, model(**batch())  # whose autograd graph has saved views of the weights


def a_view_as_an_attribute(model: Any) -> None:
    model.layers[1].flat = model.layers[1].up.weight.detach().view(-1)


MADE_BEFORE: dict[str, tuple[str, Callable[[Any], Any]]] = {  # what is told of
    ".data": ("Stack.embed.weight", lambda model: [p.data for p in model.parameters()]),
    "views": ("Stack.embed.weight", lambda model: [p.detach()[:1] for p in model.parameters()]),
    "numpy": ("Stack.embed.weight", lambda model: [p.detach().numpy() for p in model.parameters()]),
    "an attribute": ("Stack.layers.1.up.weight", a_view_as_an_attribute),
    "an optimizer and a graph": ("", trained_before),
    "assigned": (
        "",
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    ),
    "tied": ("", lambda model: setattr(model.layers[0].up, "weight", model.layers[1].up.weight)),
    "an average": ("", lambda model: torch.optim.swa_utils.AveragedModel(model)),
    "a spectral norm": ("", lambda model: torch.nn.utils.spectral_norm(model.layers[0].up)),
}


@pytest.mark.parametrize("kind", MADE_BEFORE)
def test_other_names_that_were_made_before_are_told_of(kind: str) -> None:
    name, make = MADE_BEFORE[kind]
    model = stack()[0]
    held = make(model)
    with told_of(name or "megacompile", int(bool(name))):
        megacompile(model, device="cpu", progress=False)
    del held


def keeps(view: Callable[[Tensor], Tensor], *, keep: bool) -> Any:
    """Keeps, or hands to code behind a graph break, a view of a weight."""

    def forward(m: Any, x: Tensor) -> Tensor:
        taken = view(m.first.weight)
        if keep:
            m.kept = taken
        hidden = m.first(x)
        torch._dynamo.graph_break()
        return (hidden * taken.sum()).square().sum()

    return in_a_row(forward, count=1)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda weight: weight.detach().t(),
    "view": lambda weight: weight.view(-1),
}


def trains(model: nn.Module, params: Iterable[nn.Parameter]) -> None:
    losses_of(model, torch.optim.SGD(params, lr=0.1), [{"x": torch.ones(2, 4)}] * 2)


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_that_the_forward_keeps_is_told_of(kind: str) -> None:
    """One that is gone, or of a frozen parameter, is not."""
    _, model = twins(keeps(VIEWS[kind], keep=True))
    with told_of("first.weight", 1):
        trains(model, model.parameters())
    plain, model = twins(keeps(VIEWS[kind], keep=False))
    frozen = keeps(VIEWS[kind], keep=True)
    frozen.first.weight.requires_grad_(False)
    with told_of("first.weight", 0):
        for each in (plain, model):
            trains(each, each.parameters())
        _, frozen = twins(frozen)
        trains(frozen, [frozen.first.bias])
    assert_same(plain, model)


def test_data_that_nobody_else_holds_is_taken_over_in_silence() -> None:
    """Also parameters that have only one another in their memory, and a new layout."""
    with told_of("embed.weight", 0):
        model: Any = stack()[0]
        puts_into_a_flat_buffer(model)
        _, model = twins(model)
        step(model, batch())
        model.head.weight.data = torch.ones(16, 16)
        model.layers.append(nn.Linear(16, 16))
        step(model, batch())
        loads_and_assigns(model)
        step(model, {k: v.double() for k, v in batch().items()})


def halve(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 0.5


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.filterwarnings("ignore:megacompile. .* eager mode")
def test_data_that_the_forward_assigns(captured: bool) -> None:
    """Also in code that is not captured."""
    assign = halve if captured else torch._dynamo.disable(halve)

    def forward(m: Any, x: Tensor) -> Tensor:
        assign(m.first)
        return m.last(m.first(x)).square().mean()

    plain, model = twins(in_a_row(forward, width=WIDTH))
    for _ in range(2):
        assert_steps_same(plain, model, {"x": batch()["x"]})


@pytest.mark.filterwarnings("ignore:megacompile")
def test_another_graph_takes_the_slots_that_a_forward_has_left() -> None:
    def forward(m: Any, x: Tensor, turned: bool) -> Tensor:
        for layer in list(m.layers)[:: -1 if turned else 1]:
            x = layer(x)
        return x.sum()

    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = Applies(forward, layers=nn.ModuleList(layers))
    plain, streamed = twins(model, lookahead=3, resident=0)
    x = torch.randn(3, WIDTH)
    for trains, turned in [(True, False), (False, True)] * 2:
        with torch.set_grad_enabled(trains):
            want, found = plain(x, turned), streamed(x, turned)
        assert equal(want, found)
        if trains:
            found.backward()
            streamed.zero_grad()


def test_a_while_loop_has_the_plain_numbers() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        first = m.first(x)
        (y,) = while_loop(lambda y: y.abs().max() > 0.01, lambda y: (y * 0.5,), (first.detach(),))
        return m.last(first + y).square().mean()

    assert_steps_same(*twins(in_a_row(forward, width=WIDTH)), {"x": batch()["x"]})


def test_a_move_touches_no_parameter_that_stays() -> None:
    """Setting `data` would wait for values that are still on their way to the host."""
    model = megacompile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), device="cpu")
    model(torch.randn(3, WIDTH)).sum().backward()
    held = [(p, p.data_ptr(), p.grad) for p in model.parameters()]
    calls: list[Any] = []

    class Record(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(args[:1] and args[0] is p for p, _, _ in held) and "set" in func.__name__:
                calls.append(func)
            return func(*args, **(kwargs or {}))

    with Record():
        model.to("meta")
    assert calls == []
    assert all((p.data_ptr(), p.grad) == (at, grad) for p, at, grad in held)
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    model.to(torch.float64)  # a dtype changes
    assert {p.dtype for p in model.parameters()} == {torch.float64}


class NestedState(nn.Linear):
    """Its class says itself what its state is."""

    def __getstate__(self) -> dict[str, Any]:
        return {"attributes": dict(self.__dict__)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["attributes"])


class First(nn.LSTM):
    """What it computes, without its state."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: First(WIDTH, WIDTH, num_layers=2),
    "nested state": lambda: NestedState(WIDTH, WIDTH),
    "fx": lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
}


def within(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Linear(WIDTH, WIDTH))


def through_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: list[Callable[[nn.Module], Any]] = [
    copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_file
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")
@pytest.mark.parametrize("name", LAYERS)
def test_a_copy_is_a_plain_module(name: str) -> None:
    """They are equal, and have nothing of ours."""
    torch.manual_seed(0)
    models = twins(within(LAYERS[name]()))
    x = torch.randn(3, 2, WIDTH)
    assert_alike(models, trained(x))
    for way in WAYS:
        copies = [way(each) for each in models]
        for each in copies:
            each.zero_grad()
            with torch.no_grad():
                for param in each.parameters():
                    param.mul_(2)
        assert_alike(copies, trained(x))
        assert differences(*models) == [], "its parameters are its own"
        assert not any(inside.is_streamed(module) for module in copies[1].modules())
        again = copy.deepcopy(copies[1])
        for each in (copies[1], again):
            each.forward = types.MethodType(lambda self, x: x + 1, each)
            assert equal(each(x), x + 1), "and so are its methods"
            each.to("meta")
            assert {param.device.type for param in each.parameters()} == {"meta"}
    with pytest.raises(ValueError, match="Sequential"):
        schedules(copy.copy(models[1]))
