"""What the user does with a streamed model between calls: edits, modules, copies, hooks.

The same is done to a megacompiled model and to a plain one, and every bit is compared. Writes,
checkpoints and gradients of a model that stays as it is are drawn in `test_training.py`.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from megacompile import megacompile, schedules, unmegacompile
from megacompile.errors import OptimizerError
from megacompile.ir.tensors import TensorMeta
from tests import inside, zoo
from tests.equality.nets import Applies
from tests.training import take_steps
from tests.zoo import (
    WIDTH,
    Stack,
    assert_close,
    assert_same,
    assert_steps_same,
    batch,
    equal,
    stacks,
    step,
    twins,
)


def pair() -> nn.Module:
    """Two layers of one shape, which lie in one unit."""
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("a", "b")}
    return Applies(lambda model, x: x + model.b(model.a(x).relu()), **layers)


def assert_streamed(model: nn.Module, *, strict: bool = False) -> None:
    """Each parameter lies in a bucket, under its name; `strict`: and is no plain input."""
    named = [
        (place.name, id(param))
        for bucket in inside.buckets(model).values()
        for place, param in zip(bucket.layout.params, bucket.params, strict=True)
    ]
    now = {id(param) for param in model.parameters()}
    every = {(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)}
    assert len(named) == len(now) and {param for _, param in named} == now
    assert set(named) <= every
    inputs = [x for program in inside.programs(model) for x in program.capture.inputs]
    plain = [x for x in inputs if isinstance(x, TensorMeta) and x.requires_grad]
    assert inputs and not (strict and plain)


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.layers[0].a.weight.mul_(0.5)
        model.layers[1].b.bias[2] = 7
        nn.init.ones_(model.head.bias)
    model.embed.weight.data.add_(0.25)


def strides(model: Any) -> None:
    weight = model.layers[1].a.weight
    weight.data = (weight.detach() * 2).t().contiguous().t()


def part_of_a_larger_tensor(model: Any) -> None:
    weight = model.layers[1].a.weight
    weight.data = torch.cat([weight.detach(), weight.detach()])[: len(weight)]


def a_new_parameter(model: Any) -> None:
    model.layers[1].a.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


def other_modules(model: Any) -> None:
    model.layers.append(pair())
    del model.layers[0]
    model.head = nn.Linear(WIDTH, WIDTH, bias=False)


def hooks(model: Any) -> None:
    """Of a layer, and of the model."""
    model.handle = model.layers[1].register_forward_hook(lambda m, args, out: out * 2)
    model.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {**kwargs, "x": kwargs["x"] + 1}), with_kwargs=True
    )
    model.register_forward_hook(lambda m, args, out: out * 3)


def another_dtype(model: Any) -> None:
    model.double()


def assign(target: str, source: str, model: Any) -> None:
    """`model.target = model.source`."""
    path, _, name = target.rpartition(".")
    owner, _, other = source.rpartition(".")
    setattr(model.get_submodule(path), name, getattr(model.get_submodule(owner), other))


def untie(model: Any) -> None:
    layer = model.layers[0]
    layer.a.weight = nn.Parameter(layer.b.weight.detach() * 2)


class Adapter(nn.Module):
    """A frozen layer, and a low-rank term beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((base.in_features, 2), 0.1))
        self.up = nn.Parameter(torch.full((2, base.out_features), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up

    def merged(self) -> nn.Linear:
        """The layer alone, with the term in its weight."""
        with torch.no_grad():
            self.base.weight += (self.down @ self.up).t()
        return self.base.requires_grad_(True)


class Converted(nn.Linear):
    """What quantization-aware training and float8 put in a layer's place, with its parameters."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def inject(model: Any) -> None:
    for layer in model.layers:
        layer.a = Adapter(layer.a)


def merge(model: Any) -> None:
    for layer in model.layers:
        layer.a = layer.a.merged()


def convert(model: Any) -> None:
    for layer in model.layers:
        layer.a, layer.b = Converted(layer.a), Converted(layer.b)


def rename(model: Any) -> None:
    """In the same place of the same holder, which ids in a row do not tell."""
    layer = model.head
    params, layer._parameters = layer._parameters, {}
    layer.register_parameter("matrix", params["weight"])
    layer.register_parameter("shift", params["bias"])
    layer.forward = lambda x: F.linear(x, layer.matrix, layer.shift)


def exchange(model: Any) -> None:
    """Two layers change places."""
    first, last = model.layers[0], model.layers[2]
    model.layers[0], model.layers[2] = last, first


def other_holder(model: Any) -> None:
    """A module of the same class with the same parameters is in the place of each."""
    for layer in model.layers:
        for name in ("a", "b"):
            made = nn.Linear(WIDTH, WIDTH)
            made.weight, made.bias = getattr(layer, name).weight, getattr(layer, name).bias
            setattr(layer, name, made)


def as_it_is(model: Any) -> None:
    del model


TIED = [
    functools.partial(assign, "layers.1.a.weight", "layers.1.b.weight"),
    functools.partial(assign, "layers.1.a", "layers.2.b"),
    functools.partial(assign, "head.weight", "embed.weight"),
]
AGAIN = functools.partial(assign, "layers.0.a.weight", "layers.0.b.weight")
MEMORY = "memory, hooks and modules"
CHANGES: dict[str, list[Callable[[Any], object]]] = {
    MEMORY: [
        *(in_place, strides, part_of_a_larger_tensor, a_new_parameter),
        *(hooks, other_modules, another_dtype),
    ],
    # a graph that was captured before has two inputs where there is one parameter now
    "tied and untied": [*TIED, AGAIN, untie, AGAIN],
    "parametrized": [
        lambda m: parametrize.register_parametrization(
            m.layers[1].a, "weight", Applies(lambda _, w: w + w.t())
        ),
        lambda m: parametrize.remove_parametrizations(m.layers[1].a, "weight"),
    ],
    "adapters": [inject, merge],
    "renamed, and layers that change places": [rename, exchange],
    "other holders, then converted": [other_holder, convert],
}


@pytest.mark.parametrize("name", CHANGES)
def test_edits_are_seen(name: str) -> None:
    """One after the other, with optimizers from before; what is seen as well is not warned of."""
    torch.manual_seed(0)
    plain, model = twins(Stack(block=pair))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    for apply in (as_it_is, *CHANGES[name], as_it_is):
        for each in (plain, model):
            torch.manual_seed(3)
            apply(each)
            each.zero_grad()
        if apply is another_dtype:  # torch's AdamW takes no states of another one
            optimizers = [torch.optim.AdamW(each.parameters()) for each in (plain, model)]
        inputs = {k: v.to(next(plain.parameters()).dtype) for k, v in batch().items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error" if name == MEMORY else "ignore")
            assert_steps_same(plain, model, inputs)
        for optimizer in optimizers:
            optimizer.step()
        assert list(model.state_dict()) == list(plain.state_dict()), apply
        assert_same(plain, model)
        assert_streamed(model, strict=name not in (MEMORY, "tied and untied"))
    with pytest.raises(RuntimeError):  # a forward that fails leaves the model whole
        model(**{**inputs, "x": torch.randn(4, WIDTH + 1).to(inputs["x"].dtype)})
    assert_steps_same(plain, model, inputs)


def test_a_module_that_the_optimizer_of_the_backward_does_not_know() -> None:
    """It is refused until it is frozen, or added."""
    plain: Any = Stack(between=zoo._break)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    megacompile(model, device="cpu", lowering="eager", optimizer=optimizers[1])
    both = list(zip((plain, model), optimizers, strict=True))

    def steps(first: int, count: int = 1) -> None:
        for each, optimizer in both:
            take_steps(each, optimizer, count, start=first)

    steps(0)
    for each in (plain, model):
        torch.manual_seed(1)
        layers = {"inner": each.layers[1], "adapter": nn.Linear(WIDTH, WIDTH)}
        each.layers[1] = Applies(lambda m, x: m.inner(x) + m.adapter(x), **layers)
    before = [p.detach().clone() for p in model.parameters()]
    optimizers[1].zero_grad()
    with pytest.raises(OptimizerError):
        step(model, batch(2))
    assert all(map(equal, before, model.parameters()))
    for each in (plain, model):
        each.layers[1].adapter.requires_grad_(False)
    steps(1)
    for each, optimizer in both:
        each.layers[1].adapter.requires_grad_(True)
        optimizer.add_param_group({"params": list(each.layers[1].adapter.parameters())})
    steps(2, 2)
    assert_close(plain, model)


def test_buffers_and_checkpoints() -> None:
    """Buffers that the user replaces; state_dict() with a prefix; load_state_dict(assign=True)."""
    plain, streamed = twins(zoo.batchnorm()[0])
    assert_steps_same(plain, streamed, batch())
    assert list(streamed.state_dict(prefix="a.")) == [f"a.{key}" for key in plain.state_dict()]
    other = {name: value * 2 for name, value in plain.state_dict().items()}
    for model in (plain, streamed):
        model.zero_grad()
        values = {k: v.clone() for k, v in other.items()}
        result = model.load_state_dict(values, assign=True)
        assert not result.missing_keys and not result.unexpected_keys
    assert_steps_same(plain, streamed, batch())
    for model in (plain, streamed):
        norm = model.layers[0][1]
        norm.running_mean = torch.full((WIDTH,), 2.0)
        norm.running_var.fill_(3.0)
        model.eval()
    assert_steps_same(plain, streamed, batch())


def test_data_that_is_set_in_each_step_is_no_flat_buffer(recwarn: pytest.WarningsRecorder) -> None:
    """As by LocalSGD: the average over the processes, which one variable holds."""
    plain, streamed, _ = stacks()
    for model in (plain, streamed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        average: list[Tensor] = []
        for i in range(4):
            model(batch(i)["x"]).square().sum().backward()
            average[:] = [p.data * 0.5 for p in model.parameters()]
            for p, value in zip(model.parameters(), average, strict=True):
                p.data = value
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, streamed)
    assert [w for w in recwarn if "megacompile" in str(w.message)] == []


def test_masters_follow_a_parameter_that_has_another_name() -> None:
    """Also where an update has just made the copy, and where the name is gone."""
    _, streamed = twins(nn.Sequential(nn.Linear(8, 8)), compute_dtype=torch.bfloat16)
    x = torch.rand(4, 8)
    alias = streamed[0].weight.data
    streamed(x).sum().backward()
    torch.optim.SGD(streamed.parameters(), lr=0.1).step()
    with torch.no_grad():
        alias.zero_()
        before = streamed(x)
        assert torch.equal(before[0], before[1]), "the bias alone"
        alias.fill_(1.0)
        del alias
        assert not torch.equal(before, streamed(x))


@pytest.mark.parametrize("first", ["torch.compile", "megacompile"])
def test_torch_compile_of_the_module(first: str) -> None:
    """What it gave goes on as if it had been made of the megacompiled model."""
    plain, inputs = zoo.dropout()
    model, _ = zoo.dropout()
    compiled: Any = torch.compile  # typed as if it gave a function
    if first == "torch.compile":
        around = compiled(model, backend="eager")
        for _ in range(2):
            assert megacompile(around, device="cpu", lowering="eager") is model
    else:
        around = compiled(megacompile(model, device="cpu", lowering="eager"), backend="eager")
    assert equal(step(plain, inputs), step(around, inputs))
    assert_same(plain, model)
    assert len(schedules(model)) == 1
    assert unmegacompile(model) is model
