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


def test_parameters_lie_in_the_buckets_of_their_units() -> None:
    _, model = twins(stack()[0])
    names = [[place.name for place in bucket.layout.params] for bucket in buckets(model).values()]
    assert sorted(name for each in names for name in each) == sorted(places(model))
    assert "layers.1" in buckets(model)
    for bucket in buckets(model).values():
        start = bucket.flat.data_ptr()
        for place, param in zip(bucket.layout.params, bucket.params, strict=True):
            assert param is model.get_parameter(place.name)
            assert param.data_ptr() == start + place.offset_bytes


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


def test_replaced_data_goes_to_its_place() -> None:
    plain, model = twins(stack()[0])
    before = places(model)
    for each in (plain, model):
        each.layers[1].up.weight.data = torch.ones(32, 16)
        each.head.bias.data = torch.ones(16)
    assert equal(step(plain, batch()), step(model, batch()))
    assert places(model) == before


EXCHANGES: dict[str, Callable[[Any], None]] = {
    "two layers": lambda m: exchange(m.layers[0].up.weight, m.layers[2].up.weight),
    "within a layer": lambda m: exchange(m.layers[1].norm.weight, m.layers[1].down.bias),
    "transposed with itself": lambda m: setattr(m.head.weight, "data", m.head.weight.data.t()),
}


def exchange(p: Tensor, q: Tensor) -> None:
    p.data, q.data = q.data, p.data


@pytest.mark.parametrize("kind", EXCHANGES)
def test_parameters_that_exchange_their_data(kind: str) -> None:
    """To adopt the one in its place would overwrite the other."""
    torch.manual_seed(0)
    plain, model = twins(Stack())
    with torch.no_grad():
        for each in (plain, model):
            each.layers[1].norm.weight.mul_(3)
    for each in (plain, model):
        step(each, batch())
        each.zero_grad()
        EXCHANGES[kind](each)
    assert equal(step(plain, batch()), step(model, batch()))
    assert differences(plain, model) == []
    addresses = {v.data_ptr() for bucket in buckets(model).values() for v in bucket.values}
    assert all(address in addresses for address in places(model).values())


SHARED: dict[str, Callable[[Any], Tensor]] = {
    "all of it": lambda m: m.embed.weight.data,
    "a part": lambda m: m.layers[0].up.weight.data[8:24],
}


@pytest.mark.parametrize("kind", SHARED)
def test_data_that_two_parameters_share_is_refused(kind: str) -> None:
    """A change of one would change the other, which two places in buckets cannot do."""
    _, model = twins(stack()[0])
    step(model, batch())
    model.head.weight.data = SHARED[kind](model)
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


def test_a_flat_buffer_made_before_is_told_of() -> None:
    model: Any = stack()[0]
    flat = puts_into_a_flat_buffer(model)
    with pytest.warns(UserWarning, match=r"Stack.embed.weight .*\(2 parameters"):
        twins(model)
    del flat


MADE_BEFORE: dict[str, Callable[[Any], Any]] = {
    "a state dict": lambda model: model.state_dict(),
    "detached": lambda model: [p.detach() for p in model.parameters()],
    ".data": lambda model: [p.data for p in model.parameters()],
    "views": lambda model: [p.detach()[:1] for p in model.parameters()],
    "numpy": lambda model: [p.detach().numpy() for p in model.parameters()],
}


@pytest.mark.parametrize("kind", MADE_BEFORE)
def test_other_names_that_were_made_before_are_told_of(kind: str) -> None:
    model: Any = stack()[0]
    others = MADE_BEFORE[kind](model)
    with pytest.warns(UserWarning, match=r"Stack.embed.weight .*\(22 parameters"):
        megacompile(model, device="cpu", progress=False)
    del others


def test_an_attribute_that_is_a_view_is_named() -> None:
    model: Any = stack()[0]
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
    "loaded": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "assigned": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "tied": lambda model: setattr(model.layers[0].up, "weight", model.layers[1].up.weight),
    "an average": lambda model: torch.optim.swa_utils.AveragedModel(model),
    "a spectral norm": lambda model: torch.nn.utils.spectral_norm(model.layers[0].up),
}


@pytest.mark.parametrize("kind", SILENT)
@pytest.mark.filterwarnings("error:megacompile")
def test_what_is_no_other_name_is_not_told_of(kind: str) -> None:
    model: Any = stack()[0]
    held = SILENT[kind](model)
    megacompile(model, device="cpu", progress=False)
    del held


class Keeps(nn.Module):
    """Keeps, or hands to code behind a graph break, a view of a weight."""

    def __init__(self, view: Callable[[Tensor], Tensor], *, keep: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.view, self.keep = view, keep

    def forward(self, x: Tensor) -> Tensor:
        view = self.view(self.layer.weight)
        if self.keep:
            self.kept = view
        hidden = self.layer(x)
        torch._dynamo.graph_break()
        loss: Tensor = (hidden * view.sum()).square().sum()
        return loss


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda weight: weight.detach().t(),
    "detach": lambda weight: weight.detach(),
    "row": lambda weight: weight.detach()[0],
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
    _, model = twins(Keeps(VIEWS[kind], keep=True))
    with pytest.warns(UserWarning, match="layer.weight") as said:
        trains(model, model.parameters())
    assert len([w for w in said if "layer.weight" in str(w.message)]) == 1


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.filterwarnings("error:megacompile")
def test_a_view_that_is_gone_or_frozen_is_not(kind: str) -> None:
    plain, model = twins(Keeps(VIEWS[kind], keep=False))
    for each in (plain, model):
        trains(each, each.parameters())
    assert_same(plain, model)
    frozen = Keeps(VIEWS[kind], keep=True)
    frozen.layer.weight.requires_grad_(False)
    _, model = twins(frozen)
    trains(model, [model.layer.bias])


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


def test_dtypes_change_and_devices_do_not(recwarn: pytest.WarningsRecorder) -> None:
    _, model = twins(stack()[0])
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert model.to("cpu") is model
    assert [w for w in recwarn if "host memory" in str(w.message)] == []
    with pytest.warns(UserWarning, match="host memory") as said:
        model.to("meta")
        model.to("meta")
    assert len([w for w in said if "host memory" in str(w.message)]) == 1
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_dtype_and_device_at_once() -> None:
    plain, model = twins(stack()[0])
    with pytest.warns(UserWarning, match="host memory"):
        model.to("meta", torch.float64)
    plain.double()
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.float64)}
    inputs = {key: value.double() for key, value in batch().items()}
    assert equal(step(plain, inputs), step(model, inputs))
    assert differences(plain, model) == []


def test_functions_that_are_applied_see_the_parameters() -> None:
    plain, model = twins(stack()[0])
    for each in (plain, model):
        each.half()
        each.float()
        each.share_memory()
    assert differences(plain, model) == []
    assert all(p.is_shared() for p in model.parameters())


# --- eager code


class Halved(nn.Module):
    """Assigns new data to its weight, in code that is not captured."""

    def __init__(self, assign: Callable[[nn.Linear], None]) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.assign = assign

    def forward(self, x: Tensor) -> Tensor:
        self.assign(self.first)
        result: Tensor = self.second(self.first(x)).square().mean()
        return result


def halve(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 0.5


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.filterwarnings("ignore:megacompile. .* eager mode")
def test_data_that_the_forward_assigns(captured: bool) -> None:
    torch.manual_seed(0)
    plain, model = twins(Halved(halve if captured else torch._dynamo.disable(halve)))
    x = batch()["x"]
    for _ in range(2):
        assert equal(step(plain, {"x": x}), step(model, {"x": x}))
    assert differences(plain, model) == []


class Late(nn.Module):
    """Changes a weight in eager code, after the layer was run and before its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        change(self.layers[1])
        result: Tensor = self.layers[2](x).square().mean()
        return result


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def change(layer: nn.Module) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5)  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:megacompile. .* eager mode")
def test_a_weight_that_the_forward_changes_too_late_is_an_error() -> None:
    """As it is in plain code; the recompute would take the changed weight."""
    plain, model = twins(Late())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(batch()["x"]).backward()
    with pytest.raises(BackwardError, match="layers.1.weight"):
        model(batch()["x"]).backward()


class Overwrites(nn.Module):
    """The forward is right, and no backward can be."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).exp()
        y.mul_(2)
        result: Tensor = self.last(y).square().mean()
        return result


@pytest.mark.filterwarnings("ignore:megacompile. .* eager mode")
def test_a_backward_that_is_impossible_is_refused_in_the_backward() -> None:
    plain, model = twins(Overwrites())
    losses = [each(batch()["x"]) for each in (plain, model)]
    assert equal(*losses)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Loops(nn.Module):
    """Halves what a layer gives until it is small."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        (y,) = while_loop(lambda y: y.abs().max() > 0.01, lambda y: (y * 0.5,), (first.detach(),))
        result: Tensor = self.last(first + y).square().mean()
        return result


def test_a_while_loop_has_the_plain_numbers() -> None:
    plain, model = twins(Loops())
    with pytest.warns(UserWarning, match="while_loop"):
        losses = [each(batch()["x"]) for each in (plain, model)]
    assert equal(*losses)
    for loss in losses:
        loss.backward()
    assert differences(plain, model) == []
