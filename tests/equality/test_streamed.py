"""A streamed model's call: what it adopts, moves and swaps, and what a copy of it is."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

from megacompile import megacompile
from megacompile.errors import BackwardError, ModelError
from tests.equality.nets import in_a_row
from tests.inside import buckets, streamed
from tests.zoo import (
    WIDTH,
    Stack,
    assert_same,
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


# --- buckets


def test_a_call_that_finds_nothing_changed_moves_nothing() -> None:
    _, model = twins(batchnorm()[0])
    step(model, batch())
    before = (
        places(model),
        list(buckets(model).values()),
        streamed(model).buckets.proxies,
        list(model.buffers()),
    )
    step(model, batch())
    assert places(model) == before[0]
    assert streamed(model).buckets.proxies is before[2]
    assert all(a is b for a, b in zip(buckets(model).values(), before[1], strict=True))
    assert all(a is b for a, b in zip(model.buffers(), before[3], strict=True))


EXCHANGES: dict[str, Callable[[Any], None]] = {
    "two layers": lambda m: exchange(m.layers[0].up.weight, m.layers[2].up.weight),
    "within a layer": lambda m: exchange(m.layers[1].norm.weight, m.layers[1].down.bias),
    "transposed with itself": lambda m: setattr(m.head.weight, "data", m.head.weight.data.t()),
}


def exchange(p: Tensor, q: Tensor) -> None:
    p.data, q.data = q.data, p.data


def test_parameters_that_exchange_their_data() -> None:
    """To adopt the one in its place would overwrite the other."""
    torch.manual_seed(0)
    plain, model = twins(Stack())
    for each in (plain, model):
        each.layers[1].norm.weight.data.mul_(3)
        step(each, batch())
    for kind, change in EXCHANGES.items():
        for each in (plain, model):
            each.zero_grad()
            change(each)
        assert equal(step(plain, batch()), step(model, batch())), kind
        assert differences(plain, model) == [], kind
        addresses = {v.data_ptr() for bucket in buckets(model).values() for v in bucket.values}
        assert all(address in addresses for address in places(model).values()), kind


def test_data_that_two_parameters_share_is_refused() -> None:
    """A change of one would change the other, which two places in buckets cannot do."""
    _, model = twins(stack()[0])
    step(model, batch())
    for shared in (model.embed.weight.data, model.layers[0].up.weight.data[8:24]):
        model.head.weight.data = shared
        with pytest.raises(ModelError, match=r"head.weight"):
            step(model, batch())
        model.head.weight.data = model.head.weight.data.clone()
        step(model, batch())


# --- other tensors in the memory of parameters


def loads_and_assigns(model: Any) -> Any:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return state


def puts_into_a_flat_buffer(model: Any) -> Any:
    params = [model.embed.weight, model.head.weight]
    flat = torch.cat([param.detach().flatten() for param in params])
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.data = part.view_as(param)
    return flat


def assigns_another_dtype(model: Any) -> Any:
    state = {name: value.double() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return state


ALIASES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "assigned": (loads_and_assigns, 22),
    "a flat buffer": (puts_into_a_flat_buffer, 2),
    "assigned, another dtype": (assigns_another_dtype, 22),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_aliases_that_are_cut_are_told_of_once(kind: str) -> None:
    """In a call, or in a step."""
    alias, count = ALIASES[kind]
    _, model = twins(stack()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, batch())
    with pytest.warns(UserWarning, match=rf"embed.weight .*\({count} parameters") as said:
        for k in range(2):
            keep = alias(model)
            dtype = model.embed.weight.dtype
            if kind == "a flat buffer" and not k:
                optimizer.step()
            step(model, {key: value.to(dtype) for key, value in batch().items()})
    assert len([w for w in said if "embed.weight" in str(w.message)]) == 1
    del keep


MADE_BEFORE: dict[str, Callable[[Any], Any]] = {
    ".data": lambda model: [p.data for p in model.parameters()],
    "views": lambda model: [p.detach()[:1] for p in model.parameters()],
    "numpy": lambda model: [p.detach().numpy() for p in model.parameters()],
}


def test_other_names_that_were_made_before_are_told_of() -> None:
    """A view that is an attribute is named."""
    for make in MADE_BEFORE.values():
        model: Any = stack()[0]
        others = make(model)
        with pytest.warns(UserWarning, match=r"Stack.embed.weight .*\(22 parameters"):
            megacompile(model, device="cpu", progress=False)
        del others
    model = stack()[0]
    model.layers[1].flat = model.layers[1].up.weight.detach().view(-1)
    with pytest.warns(UserWarning, match=r"Stack.layers.1.flat"):
        megacompile(model, device="cpu", progress=False)


def trained_before(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(**batch())
    loss.backward()
    optimizer.step()
    return optimizer, model(**batch())  # whose autograd graph has saved views of the weights


SILENT: dict[str, Callable[[Any], Any]] = {
    "an optimizer and a graph": trained_before,
    "assigned": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "tied": lambda model: setattr(model.layers[0].up, "weight", model.layers[1].up.weight),
    "an average": lambda model: torch.optim.swa_utils.AveragedModel(model),
    "a spectral norm": lambda model: torch.nn.utils.spectral_norm(model.layers[0].up),
}


@pytest.mark.filterwarnings("error:megacompile")
def test_what_is_no_other_name_is_not_told_of() -> None:
    for make in SILENT.values():
        model: Any = stack()[0]
        held = make(model)
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
        loss: Tensor = (hidden * taken.sum()).square().sum()
        return loss

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
    _, model = twins(keeps(VIEWS[kind], keep=True))
    with pytest.warns(UserWarning, match="first.weight") as said:
        trains(model, model.parameters())
    assert len([w for w in said if "first.weight" in str(w.message)]) == 1


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.filterwarnings("error:megacompile")
def test_a_view_that_is_gone_or_frozen_is_not(kind: str) -> None:
    plain, model = twins(keeps(VIEWS[kind], keep=False))
    for each in (plain, model):
        trains(each, each.parameters())
    assert_same(plain, model)
    frozen = keeps(VIEWS[kind], keep=True)
    frozen.first.weight.requires_grad_(False)
    _, model = twins(frozen)
    trains(model, [model.first.bias])


def test_data_that_nobody_else_holds_is_taken_over_in_silence(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Also parameters that have only one another in their memory, and a new layout."""
    model: Any = stack()[0]
    puts_into_a_flat_buffer(model)
    _, model = twins(model)
    step(model, batch())
    loads_and_assigns(model)
    step(model, batch())
    model.head.weight.data = torch.ones(16, 16)
    model.layers.append(nn.Linear(16, 16))
    step(model, batch())
    model.double()
    step(model, {k: v.double() for k, v in batch().items()})
    assert [w for w in recwarn if "embed.weight" in str(w.message)] == []


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


def test_a_failed_call_leaves_the_parameters() -> None:
    _, model = twins(stack()[0])
    params = dict(model.named_parameters())
    for wrong in (torch.ones(2, 3), "text"):
        with pytest.raises(Exception, match=".+"):
            model(wrong)
        now = dict(model.named_parameters())
        assert all(now[name] is param for name, param in params.items())


# --- buffers


def test_a_buffer_in_two_places_stays_one() -> None:
    model = batchnorm()[0]
    model.layers[1][1].running_mean = model.layers[0][1].running_mean
    _, model = twins(model)
    step(model, batch())
    assert model.layers[1][1].running_mean is model.layers[0][1].running_mean


# --- to()


def test_dtypes_change_and_devices_do_not() -> None:
    """What is applied to parameters sees them; that a device is left out is said once."""
    plain, model = twins(stack()[0])
    for each in (plain, model):
        each.half()
        each.float()
    assert differences(plain, model) == []
    assert model.to("cpu") is model
    with pytest.warns(UserWarning, match="host memory") as said:
        model.to("meta", torch.float64)
        model.to("meta")
    assert len([w for w in said if "host memory" in str(w.message)]) == 1
    plain.double()
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.float64)}
    inputs = {key: value.double() for key, value in batch().items()}
    assert equal(step(plain, inputs), step(model, inputs))
    assert differences(plain, model) == []


# --- eager code


def halve(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 0.5


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.filterwarnings("ignore:megacompile. .* eager mode")
def test_data_that_the_forward_assigns(captured: bool) -> None:
    """Also in code that is not captured."""
    assign = halve if captured else torch._dynamo.disable(halve)

    def forward(m: Any, x: Tensor) -> Tensor:
        assign(m.first)
        result: Tensor = m.last(m.first(x)).square().mean()
        return result

    plain, model = twins(in_a_row(forward, width=WIDTH))
    x = batch()["x"]
    for _ in range(2):
        assert equal(step(plain, {"x": x}), step(model, {"x": x}))
    assert differences(plain, model) == []


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def change(layer: nn.Module) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5)  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:megacompile. .* eager mode")
def test_a_weight_that_the_forward_changes_too_late_is_an_error() -> None:
    """In eager code, after the layer was run and before its backward: as it is in plain code. The
    recompute would take the changed weight."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.middle(m.first(x))
        change(m.middle)
        result: Tensor = m.last(x).square().mean()
        return result

    plain, model = twins(in_a_row(forward, count=3, width=WIDTH))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(batch()["x"]).backward()
    with pytest.raises(BackwardError, match="middle.weight"):
        model(batch()["x"]).backward()


@pytest.mark.filterwarnings("ignore:megacompile. .* eager mode")
def test_a_backward_that_is_impossible_is_refused_in_the_backward() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        result: Tensor = m.last(m.first(x).exp().mul_(2)).square().mean()
        return result

    plain, model = twins(in_a_row(forward, width=WIDTH))
    losses = [each(batch()["x"]) for each in (plain, model)]
    assert equal(*losses)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_while_loop_has_the_plain_numbers() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        first = m.first(x)
        (y,) = while_loop(lambda y: y.abs().max() > 0.01, lambda y: (y * 0.5,), (first.detach(),))
        result: Tensor = m.last(first + y).square().mean()
        return result

    plain, model = twins(in_a_row(forward, width=WIDTH))
    with pytest.warns(UserWarning, match="while_loop"):
        losses = [each(batch()["x"]) for each in (plain, model)]
    assert equal(*losses)
    for loss in losses:
        loss.backward()
    assert differences(plain, model) == []
