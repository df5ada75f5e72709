"""A streamed model's call: what it adopts, moves and swaps, and what a copy of it is."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

from megacompile import megacompile
from megacompile.errors import ModelError
from tests import inside
from tests.equality.nets import in_a_row
from tests.inside import buckets
from tests.zoo import WIDTH, assert_same, batch, batchnorm, equal, stack, step, twins


def places(model: Any) -> dict[str, int]:
    return {name: param.data_ptr() for name, param in model.named_parameters()}


def both_step(plain: Any, model: Any, inputs: Any = None) -> None:
    inputs = batch() if inputs is None else inputs
    assert equal(step(plain, inputs), step(model, inputs))
    assert_same(plain, model)


@contextmanager
def told_of(name: str, count: int) -> Iterator[None]:
    """Within, so many warnings have this in them."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    found = [str(w.message) for w in said if name in str(w.message)]
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


EXCHANGES: dict[str, Callable[[Any], None]] = {
    "two layers": lambda m: exchange(m.layers[0].up.weight, m.layers[2].up.weight),
    "within a layer": lambda m: exchange(m.layers[1].norm.weight, m.layers[1].down.bias),
    "transposed with itself": lambda m: setattr(m.head.weight, "data", m.head.weight.data.t()),
}


def exchange(p: Tensor, q: Tensor) -> None:
    p.data, q.data = q.data, p.data


def test_parameters_that_exchange_their_data() -> None:
    """To adopt the one in its place would overwrite the other."""
    plain, model = twins(stack()[0])
    for each in (plain, model):
        each.layers[1].norm.weight.data.mul_(3)
        step(each, batch())
    for kind, change in EXCHANGES.items():
        for each in (plain, model):
            each.zero_grad()
            change(each)
        both_step(plain, model)
        addresses = {v.data_ptr() for bucket in buckets(model).values() for v in bucket.values}
        assert all(address in addresses for address in places(model).values()), kind


def test_data_that_is_replaced_between_a_forward_and_its_backward() -> None:
    """The backward has the old memory. With no parameter that trains, inputs get gradients."""
    plain, model = twins(stack()[0])
    for each in (plain, model):
        loss = each(**batch())
        weight = each.layers[1].up.weight
        weight.data = weight.data * 2
        loss.backward()
    both_step(plain, model)
    inputs = [batch() for _ in range(2)]
    for each, given in zip((plain, model), inputs, strict=True):
        each.requires_grad_(False)
        given["x"].requires_grad_()
        each(**given).backward()
    assert equal(*(given["x"].grad for given in inputs))
    assert_same(plain, model)


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


def another_dtype(model: Any) -> None:
    model.double()
    model.float()


def and_the_old_data(model: Any) -> None:
    """As around an evaluation in half precision: the parameter's memory is what it was."""
    before = [param.data for param in model.parameters()]
    model.half()
    for param, data in zip(model.parameters(), before, strict=True):
        param.data = data


def set_in_place(model: Any) -> None:
    with torch.no_grad():
        model.head.weight.set_(torch.full((WIDTH, WIDTH), 0.1))


def swapped(model: Any) -> None:
    new = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))
    torch.utils.swap_tensors(model.head.weight, new)


@pytest.mark.parametrize("how", ["hook", "in the backward"])
def test_gradients_arrive_at_new_nodes(how: str) -> None:
    """With a hook each parameter has its own gate. Rounded where the backward updates."""
    seen: list[list[Tensor]] = []
    for streamed in (False, True):
        model, found = stack()[0], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if streamed:
            given = optimizer if how == "in the backward" else None
            megacompile(model, lowering="eager", device="cpu", optimizer=given)
        if how == "hook":
            model.embed.weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
        for change in (another_dtype, and_the_old_data, set_in_place, swapped, None):
            for i in range(2):
                found.append(step(model, batch(i)))
                if how == "hook":
                    found += [p.grad.clone() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            if change is another_dtype and how == "hook":
                model.head.bias.register_post_accumulate_grad_hook(
                    lambda p, found=found: found.append(p.grad.clone())
                )
            if change is not None:
                change(model)
        seen.append(found)
    want, got = seen
    if how == "in the backward":
        torch.testing.assert_close(got, want)
    else:
        assert len(got) == len(want) and all(map(torch.equal, got, want))


def test_a_new_graph_finds_the_new_node_of_a_parameter() -> None:
    """Another graph had asked for the node of this one parameter, which has a hook."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor, left: bool) -> Tensor:
            branch = self.left if left else self.right
            return branch(self.shared(x)).sum()

    x = torch.ones(2, WIDTH)
    both = twins(Branches())
    for model in both:
        param = model.shared.weight
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
    optimizer = torch.optim.SGD(params, lr=0.1)
    for _ in range(2):
        loss = model(torch.ones(2, 4))
        loss.backward()  # and the loss lives until the next one
        optimizer.step()
        optimizer.zero_grad()


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
        both_step(plain, model, {"x": batch()["x"]})


@pytest.mark.filterwarnings("ignore:megacompile")
def test_a_while_loop_has_the_plain_numbers() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        first = m.first(x)
        (y,) = while_loop(lambda y: y.abs().max() > 0.01, lambda y: (y * 0.5,), (first.detach(),))
        return m.last(first + y).square().mean()

    both_step(*twins(in_a_row(forward, width=WIDTH)), {"x": batch()["x"]})
