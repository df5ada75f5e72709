"""What the user does with a streamed model between calls: edits, modules, copies, hooks.

The same is done to a megacompiled model and to a plain one, and every bit is compared. Writes,
checkpoints and gradients of a model that stays as it is are drawn in `test_training.py`.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile, schedules, unmegacompile
from tests import inside, zoo
from tests.draws import drawn
from tests.zoo import (
    WIDTH,
    Block,
    Stack,
    assert_same,
    assert_steps_same,
    batch,
    equal,
    stacks,
    step,
    twins,
)

# --- one model after all of these edits, one after the other


class Adapter(nn.Module):
    """What PEFT puts around a frozen layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(base.in_features, 2))
        self.b = nn.Parameter(torch.zeros(2, base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + x @ self.a @ self.b
        return result


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


def adapters(model: Any) -> None:
    for layer in model.layers:
        layer.up = Adapter(layer.up)


def forward_hook(model: Any) -> None:
    model.handle = model.layers[1].register_forward_hook(lambda m, args, out: out * 2)


def no_forward_hook(model: Any) -> None:
    model.handle.remove()


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
    adapters,
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


def test_buffers_and_checkpoints() -> None:
    """Buffers that the user replaces; state_dict() with a prefix; load_state_dict(assign=True)."""
    plain, streamed = twins(zoo.batchnorm()[0])
    assert_steps_same(plain, streamed, batch())
    mine, theirs = plain.state_dict(), streamed.state_dict()
    assert list(mine) == list(theirs)
    assert all(equal(mine[key], theirs[key]) for key in mine)
    assert list(streamed.state_dict(prefix="a.")) == [f"a.{key}" for key in mine]
    torch.manual_seed(9)
    other = Stack(block=lambda: copy.deepcopy(plain.layers[0])).state_dict()
    for assign in (False, True):
        for model in (plain, streamed):
            model.zero_grad()
            values = {k: v.clone() for k, v in other.items()}
            result = model.load_state_dict(values, assign=assign)
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
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    copies = copy.deepcopy(plain), copy.deepcopy(streamed)
    with pytest.raises(ValueError, match="not megacompiled"):
        schedules(copies[1])
    assert_steps_same(*copies, batch())
    assert_same(plain, streamed)
    assert_steps_same(plain, streamed, batch())
    paths = [tmp_path / "0.pt", tmp_path / "1.pt"]
    for what in ("model", "state_dict"):
        for model, path in zip((plain, streamed), paths, strict=True):
            torch.save(model if what == "model" else model.state_dict(), path)
        sizes = [path.stat().st_size for path in paths]
        assert sizes[1] <= sizes[0] + 1024  # bytes: not the whole bucket for each parameter
    fresh, _ = zoo.tied()
    fresh.load_state_dict(torch.load(paths[1], weights_only=True))
    for model in (plain, streamed):
        model.zero_grad()
    loaded = pickle.loads(pickle.dumps(streamed))
    again = megacompile(copy.deepcopy(streamed), device="cpu", lowering="eager")
    step(plain, batch(2))
    for other in (fresh, loaded, again):
        step(other, batch(2))
        assert_same(plain, other)
    with torch.no_grad():
        again.head.weight.mul_(2)
    plain.load_state_dict(again.state_dict())
    assert_steps_same(plain, again, batch(2))


@pytest.mark.thorough
def test_save_pretrained(tmp_path: Path) -> None:
    model, inputs = zoo.hf_gpt2(), zoo.tokens()
    plain, streamed = twins(model)
    step(streamed, inputs)
    streamed.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).train()
    assert_steps_same(plain, loaded, inputs)


def test_an_average_of_the_model() -> None:
    """`torch.optim.swa_utils`; and weights that are exchanged for it while it is evaluated."""
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model, inputs)
            optimizer.step()
            average.update_parameters(model)
        with torch.no_grad():
            for p, q in zip(model.parameters(), average.parameters(), strict=True):
                p.copy_(q)
    assert_steps_same(plain, streamed, inputs)


OPTIONS: dict[str, dict[str, Any]] = {
    "all streamed": {"resident": 0, "activations": "recompute"},
    "masters": {"compute_dtype": torch.bfloat16},
    "resident": {"resident": "all", "gpu_memory": "1GiB"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.filterwarnings("ignore:megacompile")
def test_data_that_is_exchanged_there_and_back(options: str) -> None:
    model = zoo.stack()[0]
    megacompile(model, device="cpu", lowering="eager", **OPTIONS[options])
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
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
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


@pytest.mark.parametrize("change", [to_backup, to_average])
def test_data_that_is_set_in_each_step_is_no_flat_buffer(
    change: Callable[[Any, list[Tensor]], None], recwarn: pytest.WarningsRecorder
) -> None:
    plain, streamed, _ = stacks()
    for model in (plain, streamed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        backup: list[Tensor] = []
        for i in range(4):
            model(batch(i)["x"]).square().sum().backward()
            change(model, backup)
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
    streamed = megacompile(model, device="cpu", lowering="eager")
    assert streamed is model and type(streamed) is Stack
    now = dict(streamed.named_parameters(remove_duplicate=False))
    assert list(now) == list(params)
    assert all(now[name] is params[name] and type(now[name]) is nn.Parameter for name in params)
    for each, optimizer in both:
        step(each, batch())
        optimizer.step()
        step(each, batch(2))
        optimizer.step()
    assert all(p is params[name] for name, p in streamed.named_parameters())
    assert_same(plain, streamed)


@pytest.mark.parametrize("first", ["torch.compile", "megacompile"])
def test_torch_compile_of_the_module(first: str) -> None:
    """What it gave goes on as if it had been made of the megacompiled model."""
    plain, inputs = zoo.dropout()
    model, _ = zoo.dropout()
    compiled: Any = torch.compile  # typed as if it gave a function
    if first == "torch.compile":
        around = compiled(model, backend="eager")
        assert megacompile(around, device="cpu", lowering="eager") is model
        assert megacompile(around, device="cpu", lowering="eager") is model
    else:
        around = compiled(megacompile(model, device="cpu", lowering="eager"), backend="eager")
    assert equal(step(plain, inputs), step(around, inputs))
    assert_same(plain, model)
    assert len(schedules(model)) == 1
    assert unmegacompile(model) is model


def test_strides_are_kept() -> None:
    """Of channels_last, and of transposed weights."""
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 8))
    model = model.to(memory_format=torch.channels_last)
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    before = [p.stride() for p in model.parameters()]
    plain, streamed = twins(model)
    for m in (plain, streamed):
        m(torch.ones(2, 3, 4, 4)).square().sum().backward()
    assert [p.stride() for p in streamed.parameters()] == before
    assert_same(plain, streamed)


@pytest.mark.filterwarnings("ignore:megacompile")
def test_full_backward_hooks_on_a_module() -> None:
    plain, streamed, inputs = stacks()
    seen: list[Tensor] = []
    for model in (plain, streamed):
        model.layers[1].register_full_backward_hook(
            lambda m, grads_in, grads_out: seen.append(grads_out[0])
        )
        step(model, inputs)
    assert len(seen) == 2 and equal(*seen)
    assert_same(plain, streamed)


def test_frozen_between_forward_and_backward() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        loss = model(**inputs)
        model.layers[1].requires_grad_(False)
        loss.backward()
        assert model.layers[1].up.weight.grad is None
    assert_same(plain, streamed)
