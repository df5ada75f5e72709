"""A forward that asks what a parameter is gets the parameter's own answers: the plain model's bits.

Captured, and in eager code behind a graph break.
"""

from __future__ import annotations

import copy
import ctypes
import io
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import ModelError, megacompile, schedules, unmegacompile
from tests import inside, quantized
from tests.quantized import OWN, Int8, Packed, PackedLinear
from tests.zoo import assert_same, equal

in_eager = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")


class Own(nn.Parameter):
    """A class of parameters with a method and a property."""

    def scaled(self) -> Tensor:
        return self * 2

    @property
    def total(self) -> Tensor:
        return self.sum()


class Layer(nn.Module):
    """A product that is multiplied by what `ask` finds out about the weight."""

    def __init__(self, ask: Ask, breaks: bool, kind: type[nn.Parameter]) -> None:
        super().__init__()
        self.weight = kind(torch.randn(8, 8))
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.tied = self.weight
        self.weight.infshape = 3  # type: ignore[attr-defined]
        self.table = {self.weight: 3.0}
        self.ids = {id(self.weight): 3.0}
        self.ask = torch.compiler.disable(ask) if breaks else ask

    def forward(self, x: Tensor) -> Tensor:
        found = self.ask(self)
        factor = found / 100 if isinstance(found, Tensor) else float(found) / 4
        return torch.tanh(x @ self.weight.t() * factor + x @ self.frozen * 0.3)


Ask = Callable[[Any], Any]


def counts(layer: Layer) -> int:
    """Calls, in an attribute of the parameter."""
    weight: Any = layer.weight
    weight.seen = getattr(weight, "seen", 0) + 1
    return int(weight.seen)


def read(address: int) -> float:
    """A number of a frozen weight, through ctypes."""
    assert address
    return (ctypes.c_float * 4).from_address(address)[1]


def triple(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(3)


def hooked(layer: Any) -> int:
    """Both kinds of hooks, from the first call on."""
    if not hasattr(layer, "handles"):
        layer.handles = [
            layer.weight.register_hook(lambda gradient: gradient * 3),
            layer.weight.register_post_accumulate_grad_hook(triple),
        ]
    return 1


def thawed(layer: Layer) -> int:
    layer.frozen.requires_grad = True
    return 1 + layer.frozen.requires_grad


def thawed_and_used(layer: Layer) -> Tensor:
    layer.frozen.grad, layer.frozen.requires_grad = torch.ones(8, 8), True
    return layer.frozen.sum() * 0 + 25  # nothing is rounded


def written(layer: Layer) -> int:
    layer.frozen.detach().numpy()[0, 0] = 5.0
    return 1


def copied(layer: Layer) -> Tensor:
    other = copy.copy(layer.weight)
    assert other.requires_grad and other.is_leaf and isinstance(other, nn.Parameter)
    return other.detach().sum()


ASKS: dict[str, Ask] = {
    "class": lambda m: 1 + (m.weight.__class__ is nn.Parameter),
    "type's name": lambda m: 1 + (type(m.weight).__name__ == "Parameter"),
    "type's module": lambda m: 1 + type(m.weight).__module__.startswith("torch.nn"),
    "isinstance": lambda m: 1 + isinstance(m.weight, nn.Parameter),
    "vars": lambda m: m.weight.infshape + ("infshape" in vars(m.weight)),
    "attribute set": counts,
    "data_ptr": lambda m: read(m.frozen.data_ptr()),
    "storage": lambda m: read(m.frozen.untyped_storage().data_ptr()),
    "numpy": lambda m: float(m.frozen.numpy()[0, 1]),
    "numpy written": written,
    "a tie's pointer": lambda m: 1 + (m.weight.data_ptr() == m.tied.data_ptr()),
    "tie": lambda m: 1 + (m.weight is m.tied),
    "grad_fn": lambda m: 1 + (m.weight.grad_fn is None),
    "requires_grad": lambda m: 1 + (m.weight.requires_grad and not m.frozen.requires_grad),
    "requires_grad set": thawed,
    "requires_grad set, and used": thawed_and_used,
    "key": lambda m: m.table.get(m.weight, 7.0),
    "copy": copied,
    "version": lambda m: m.weight._version + 1,
    "hooks": hooked,
    "isinstance of its own": lambda m: 1 + isinstance(m.weight, Own),
    "class's name": lambda m: 1 + (m.weight.__class__.__name__ == "Own"),
    "method": lambda m: m.weight.scaled().detach().sum(),
    "property": lambda m: m.weight.total.detach(),
}
OF_OWN_CLASS = ("isinstance of its own", "class's name", "method", "property")
IN_CAPTURED_CODE: dict[str, Ask] = {  # `type` and `id` ask no one
    "type": lambda m: 1 + (type(m.weight) is nn.Parameter),
    "type of data": lambda m: 1 + (type(m.weight.data) is Tensor),
    "id": lambda m: m.ids.get(id(m.weight), 7.0),
}


def trained(model: nn.Module) -> dict[str, Tensor | None]:
    """Losses, gradients, and the parameters after some steps, by the question that they are of."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Tensor | None] = {}
    for step in range(3):
        losses = model(torch.randn(4, 8, generator=generator))
        losses.sum().backward()
        found |= {f"{step}.loss.{i}": loss for i, loss in enumerate(losses.detach().clone())}
        for name, p in model.named_parameters():
            found[f"{step}.{name}.grad"] = None if p.grad is None else p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: p.detach().clone() for name, p in model.named_parameters()}


class All(nn.ModuleDict):
    """Each layer alone, on one input: who is wrong is seen."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x).square().mean() for layer in self.values()])


@in_eager
@pytest.mark.parametrize("breaks", [False, True], ids=["captured", "eager code"])
def test_answers_are_the_parameters(breaks: bool) -> None:
    asks = ASKS | ({} if breaks else IN_CAPTURED_CODE)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = {
            f"asks {name}": Layer(ask, breaks, Own if name in OF_OWN_CLASS else nn.Parameter)
            for name, ask in asks.items()
        }
        models.append(All(layers))
    plain, streamed = models
    megacompile(streamed, lowering="eager")
    wanted, got = trained(plain), trained(streamed)
    assert [name for name in wanted if not equal(wanted[name], got[name])] == []
    seen = [getattr(p, "seen", None) for p in plain.parameters()]
    assert [getattr(p, "seen", None) for p in streamed.parameters()] == seen


class Held(nn.Module):
    """Keeps its parameters in containers of its own, and computes with what is in them."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.listed = [self.first.weight]
        self.nested = {"first": (self.first.weight, 3), "all": [{"b": self.last.bias}]}
        self.ask = torch.compiler.disable(self.answers) if breaks else self.answers

    def answers(self, weight: Tensor) -> list[bool]:
        nested: Any = self.nested
        return [
            self.listed[0] is weight,
            nested["first"][0] is weight,
            nested["all"][0]["b"] is self.last.bias,
            nested["all"][0]["b"] is weight,
        ]

    def forward(self, x: Tensor) -> tuple[Tensor, list[bool]]:
        found = self.ask(self.first.weight)
        nested: Any = self.nested
        x = torch.tanh(x @ self.listed[-1].t() + nested["all"][0]["b"])
        return self.last(x).square().sum(), found


@in_eager
@pytest.mark.parametrize("breaks", [False, True])
def test_containers_of_a_module_hold_what_it_holds(breaks: bool) -> None:
    torch.manual_seed(0)
    plain = Held(breaks)
    streamed = Held(breaks)
    streamed.load_state_dict(plain.state_dict())
    megacompile(streamed, device="cpu", lowering="eager", progress=False)
    for _ in range(2):
        for net in (plain, streamed):
            loss, found = net(torch.ones(2, 4))
            assert found == [True] * 3 + [False]
            loss.backward()
            first = net.first.weight
            assert net.nested["first"][0] is first
            assert all(each is first for each in net.listed)
            net.listed.append(first)  # the next call has one more
        assert_same(plain, streamed)
    with pytest.raises(RuntimeError, match="shape"):
        streamed(torch.ones(2, 5))
    assert streamed.listed[0] is streamed.nested["first"][0] is streamed.first.weight


IDS = torch.arange(16).view(2, 8)
BASE = "layers.0.first.base.weight"


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def streamed(kind: str, **options: Any) -> Any:
    return megacompile(quantized.model(OWN[kind], **options), device="cpu", lowering="eager")


@pytest.mark.parametrize("kind", OWN)
def test_training(kind: str) -> None:
    """The numbers, where the parts lie, what is copied, and what is left behind."""
    plain, model = quantized.model(OWN[kind]), quantized.model(OWN[kind])
    for made in (plain, model):
        made.layers[0].requires_grad_(False)  # comes and never goes
    weights = dict(model.named_parameters())
    megacompile(model, device="cpu", lowering="eager")
    assert same(quantized.trained(model), quantized.trained(plain))
    (schedule,) = schedules(model)
    assert [len(stage.buckets) for stage in schedule.stages] == [1] * 5
    assert set(re.findall(r"\b1[A-Z_]+", schedule.table())) == {"1PREFETCH", "1F"}
    assert set(re.findall(r"\b2[A-Z_]+", schedule.table())) >= {"2OFFLOAD_GRAD", "2UPDATE"}
    for stage in schedule.stages[2:4]:  # no weight in full is saved
        assert all(128 * 256 > torch.Size(meta.shape).numel() for meta in stage.traced.saved)
    buckets = list(inside.buckets(model).values())
    for bucket in buckets:
        for i, (place, param) in enumerate(zip(bucket.layout.params, bucket.params, strict=True)):
            assert bucket.holds(param) and bucket.values[i].data_ptr() == param.data_ptr()
            assert not place.packed or (not param.requires_grad and i not in bucket.grads)
    assert {place.packed for place in buckets[2].layout.params} == {True, False}
    assert len(buckets[2].grads) == 4
    weight, expected = model.get_parameter(BASE), plain.get_parameter(BASE)
    assert weight is weights[BASE] and type(weight) is type(expected)
    assert weight.device.type == "cpu" and vars(weight).keys() == vars(expected).keys()
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(IDS), model(IDS))
    for made in (plain, model):  # another weight is taken over
        torch.manual_seed(3)
        base = made.get_submodule("layers.1.first.base")
        base.weight = OWN[kind](nn.Linear(128, 256, bias=False)).weight
    assert same(quantized.trained(model), quantized.trained(plain))
    unmegacompile(model)
    for param in model.parameters():
        assert not any(bucket.holds(param) for bucket in buckets)
    assert same(quantized.trained(model, steps=1), quantized.trained(plain, steps=1))


@pytest.mark.parametrize("kind", OWN)
def test_in_eager_code_tied_and_in_checkpoints(kind: str) -> None:
    if kind == "state":
        expected = quantized.trained(quantized.model(OWN[kind]), steps=2)
        assert same(quantized.trained(streamed(kind, breaks=True), steps=2), expected)

    class Checkpointed(quantized.Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    plain, model = quantized.model(OWN[kind]), quantized.model(OWN[kind])
    for made in (plain, model):
        base = made.get_submodule("layers.0.first.base")
        made.get_submodule("layers.2.first").base = base
        made.__class__ = Checkpointed
    megacompile(model, device="cpu", lowering="eager")
    assert same(quantized.trained(model, steps=2), quantized.trained(plain, steps=2))
    assert len(schedules(model)[0].stages) == 5, "checkpoints are looked into"


class Asks(PackedLinear):
    """Notes whether its weight is of its own class, in a call too."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(isinstance(self.weight, Packed) and isinstance(self.weight, nn.Parameter))
        return super().forward(x)


SEEN: list[bool] = []


def test_parts_that_change() -> None:
    """They are taken over; state dicts are saved and loaded."""
    model = quantized.model(quantized.stateful)
    model.get_submodule("layers.0.first.base").__class__ = Asks
    megacompile(model, device="cpu", lowering="eager")
    before = model(IDS).item()
    assert SEEN and all(SEEN)
    state: Any = model.get_parameter(BASE).state  # type: ignore[attr-defined]
    state.scale = state.scale * 2
    assert model(IDS).item() != before
    assert any(bucket.holds(state.scale) for bucket in inside.buckets(model).values())
    state.scale = state.scale / 2
    assert model(IDS).item() == before
    model = streamed("wrapper")
    before = model(IDS).item()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        model.get_parameter(BASE).data8.zero_()
    assert model(IDS).item() != before
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False))
    assert model(IDS).item() == before


@pytest.mark.parametrize("kind", OWN)
def test_with_compute_dtype_packed_parts_keep_theirs(kind: str) -> None:
    model = quantized.model(lambda layer: OWN[kind](layer.bfloat16()))
    megacompile(model, device="cpu", lowering="eager", compute_dtype=torch.bfloat16)
    quantized.trained(model, steps=1)
    stages = schedules(model)[0].stages
    assert stages[2].template is stages[3].template, "equal layers share their code"
    for bucket in inside.buckets(model).values():
        for i, place in enumerate(bucket.layout.params):
            if place.packed:
                assert place.dtype == bucket.params[i].dtype
                assert bucket.streamed[i] is bucket.values[i]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_wrapper_moves_with_its_parts(is_held: bool) -> None:
    """On meta it is told where they are; what somebody holds cannot be told."""
    model: Any = nn.Sequential(quantized.wrapped(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4))
    weight = model[0].weight
    assert isinstance(weight, Int8)
    held = weakref.ref(weight) if is_held else None
    megacompile(model, device="cpu", lowering="eager")
    try:
        unmegacompile(model)
    except ModelError:
        assert held is not None, "it need not move"
    assert model[0].weight is weight and weight.device.type == "cpu"
