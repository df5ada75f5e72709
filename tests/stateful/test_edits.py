"""What the user does with a streamed model between calls: edits, modules, copies, hooks.

The same is done to a megacompiled model and to a plain one, and every bit is compared. Writes,
checkpoints and gradients of a model that stays as it is are drawn in `test_training.py`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import ModelError, megacompile, schedules, unmegacompile
from tests import inside, zoo
from tests.draws import drawn
from tests.zoo import (
    WIDTH,
    Block,
    assert_same,
    assert_steps_same,
    batch,
    equal,
    stacks,
    step,
    twins,
)

# --- one model after all of these edits, one after the other


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.layers[0].up.weight.mul_(0.5)
        model.layers[1].down.bias[2] = 7
        nn.init.ones_(model.head.bias)
    model.embed.weight.data.add_(0.25)


def strides(model: Any) -> None:
    weight = model.layers[1].up.weight
    weight.data = (weight.detach() * 2).t().contiguous().t()


def part_of_a_larger_tensor(model: Any) -> None:
    weight = model.layers[1].up.weight
    weight.data = torch.cat([weight.detach(), weight.detach()])[: len(weight)]


def a_new_parameter(model: Any) -> None:
    model.layers[1].up.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))


def other_modules(model: Any) -> None:
    model.layers.append(Block())
    del model.layers[0]
    model.head = nn.Linear(WIDTH, WIDTH, bias=False)


def forward_hook(model: Any) -> None:
    model.handle = model.layers[1].register_forward_hook(lambda m, args, out: out * 2)


def hooks_of_the_model(model: Any) -> None:
    model.register_forward_pre_hook(
        lambda m, args, kwargs: (args, {**kwargs, "x": kwargs["x"] + 1}), with_kwargs=True
    )
    model.register_forward_hook(lambda m, args, out: out * 3)


def another_dtype(model: Any) -> None:
    model.double()


EDITS: list[Callable[[Any], None]] = [
    in_place,
    strides,
    part_of_a_larger_tensor,
    a_new_parameter,
    forward_hook,
    other_modules,
    hooks_of_the_model,
    another_dtype,
]


@pytest.mark.parametrize("resident", drawn([0], ["all"]))
def test_edits_are_seen(resident: Any) -> None:
    plain, streamed, inputs = stacks(resident=resident)
    assert_steps_same(plain, streamed, inputs)
    for edit in EDITS:
        for model in (plain, streamed):
            torch.manual_seed(3)
            edit(model)
            model.zero_grad()
        if edit is another_dtype:
            inputs = {k: v.double() for k, v in inputs.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert equal(step(plain, inputs), step(streamed, inputs)), edit.__name__
        assert zoo.differences(plain, streamed) == [], edit.__name__
        with torch.no_grad():  # and edited in place after
            for model in (plain, streamed):
                model.layers[1].down.weight.mul_(0.5)
    assert_steps_same(plain, streamed, inputs)
    # a forward that fails leaves the model whole
    with pytest.raises(RuntimeError):
        streamed(x=torch.randn(4, WIDTH + 1).double())
    assert all(type(p) is nn.Parameter for p in streamed.parameters())
    assert_steps_same(plain, streamed, inputs)


# --- checkpoints and copies


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


def test_copies_and_files(tmp_path: Path) -> None:
    """Each is a plain model that works, with parameters of its own."""
    plain, streamed = twins(zoo.tied()[0])
    for model in (plain, streamed):
        step(model, batch())
    copies = copy.deepcopy(plain), copy.deepcopy(streamed)
    with pytest.raises(ModelError):
        schedules(copies[1])
    assert_steps_same(*copies, batch())
    assert_same(plain, streamed)
    paths = [tmp_path / "0.pt", tmp_path / "1.pt"]
    for model, path in zip((plain, streamed), paths, strict=True):
        torch.save(model, path)
    sizes = [path.stat().st_size for path in paths]
    assert sizes[1] <= sizes[0] + 1024  # bytes: not the whole bucket for each parameter
    loaded = torch.load(paths[1], weights_only=False)
    again = megacompile(copy.deepcopy(streamed), device="cpu", lowering="eager")
    for other in (plain, loaded, again):
        other.zero_grad()
        step(other, batch(2))
    assert_same(plain, loaded)
    assert_same(plain, again)


# --- data that is exchanged

OPTIONS: dict[str, dict[str, Any]] = {
    "all streamed": {"resident": 0, "activations": "recompute"},
    "masters": {"compute_dtype": torch.bfloat16},
    "resident": {"resident": "all", "gpu_memory": "1GiB"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.filterwarnings("ignore:megacompile")
def test_data_that_is_exchanged_there_and_back(options: str) -> None:
    model = megacompile(zoo.stack()[0], device="cpu", lowering="eager", **OPTIONS[options])
    x = batch()["x"]
    first = model(x)
    first.sum().backward()
    others = [torch.zeros_like(p) for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]

    def exchange() -> None:
        for p, other in zip(model.parameters(), others, strict=True):
            p.data, other.data = other.data, p.data

    exchange()
    with torch.no_grad():
        assert not model(x).any(), "these are the others"
    exchange()
    assert all(map(torch.equal, model.parameters(), before))
    assert not any(other.any() for other in others)
    assert torch.equal(model(x), first)
    # no memory is made for new values alone
    buckets = list(inside.machine(model).buckets.values())
    for p in model.parameters():
        p.data = torch.ones_like(p)
    model(x)
    if options == "all streamed":
        assert list(inside.machine(model).buckets.values()) == buckets
    assert all((p == 1).all() for p in model.parameters())


def to_backup(model: Any, backup: list[Tensor]) -> None:
    """SAM: up the gradient, and back before the step, which has the gradient from there."""
    backup[:] = [p.data.clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * p.grad)
    model.zero_grad()
    model(batch(8)["x"]).square().sum().backward()
    for p, before in zip(model.parameters(), backup, strict=True):
        p.data = before


def to_average(model: Any, backup: list[Tensor]) -> None:
    """LocalSGD: the average over the processes, which one variable holds."""
    backup[:] = [p.data * 0.5 for p in model.parameters()]
    for p, average in zip(model.parameters(), backup, strict=True):
        p.data = average


def test_data_that_is_set_in_each_step_is_no_flat_buffer(recwarn: pytest.WarningsRecorder) -> None:
    plain, streamed, _ = stacks()
    for model in (plain, streamed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        backup: list[Tensor] = []
        for i in range(6):
            model(batch(i)["x"]).square().sum().backward()
            (to_backup if i < 3 else to_average)(model, backup)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, streamed)
    assert [w for w in recwarn if "megacompile" in str(w.message)] == []


def test_masters_follow_a_parameter_that_has_another_name() -> None:
    _, streamed = twins(nn.Sequential(nn.Linear(8, 8)), compute_dtype=torch.bfloat16)
    x = torch.rand(4, 8)
    alias = streamed[0].weight.data
    with torch.no_grad():
        before = streamed(x)
        alias.mul_(0.0)
        del alias
        assert not torch.equal(before, streamed(x))


# --- the model itself


def test_the_same_object_with_the_same_parameters_goes_on() -> None:
    """Optimizers and gradients from before too."""
    model, _ = zoo.tied()
    plain = copy.deepcopy(model)
    both = [(each, torch.optim.AdamW(each.parameters(), lr=0.01)) for each in (plain, model)]
    params = dict(model.named_parameters(remove_duplicate=False))
    for each, _ in both:
        step(each, batch())
    megacompile(model, device="cpu", lowering="eager")
    for each, optimizer in both:
        for seed in (1, 2):
            step(each, batch(seed))
            optimizer.step()
    assert_same(plain, model)
    now = dict(model.named_parameters(remove_duplicate=False))
    assert list(now) == list(params) and all(now[name] is params[name] for name in params)
    assert {type(param) for param in now.values()} == {nn.Parameter}


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


def test_frozen_between_forward_and_backward() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        loss = model(**inputs)
        model.layers[1].requires_grad_(False)
        loss.backward()
        assert model.layers[1].up.weight.grad is None
    assert_same(plain, streamed)
