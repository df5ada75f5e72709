"""What the user does with a streamed model between calls: edits, checkpoints, copies, hooks.

Each test does the same to a megacompiled model and to a plain copy of it, in the same process, and
compares every bit.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile, schedules, unmegacompile
from tests import zoo
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

# --- parameters that the user changes


def test_edits_in_place_are_seen() -> None:
    plain, streamed, inputs = stacks()
    step(plain, inputs)
    step(streamed, inputs)
    for model in (plain, streamed):
        with torch.no_grad():
            model.layers[0].up.weight.mul_(0.5)
            model.layers[1].down.bias[2] = 7
            nn.init.ones_(model.head.bias)
        model.embed.weight.data.add_(0.25)
    assert_steps_same(plain, streamed, inputs)


REPLACEMENTS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "new storage": lambda p: p.detach() * 2,
    "transposed strides": lambda p: (p.detach() * 2).t().contiguous().t(),
    "view of a larger tensor": lambda p: torch.cat([p.detach(), p.detach()])[: len(p)],
    "double": lambda p: p.detach().double(),
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_replaced_data_is_adopted(kind: str) -> None:
    plain, streamed, inputs = stacks()
    step(plain, inputs)
    step(streamed, inputs)
    for model in (plain, streamed):
        model.zero_grad()
        model.double() if kind == "double" else None
        weight = model.layers[1].up.weight
        weight.data = REPLACEMENTS[kind](weight)
    if kind == "double":
        inputs = {k: v.double() for k, v in inputs.items()}
    assert_steps_same(plain, streamed, inputs)
    with torch.no_grad():  # and is edited in place after
        for model in (plain, streamed):
            model.layers[1].up.weight.add_(1)
    assert_steps_same(plain, streamed, inputs)


def test_replaced_parameter_is_adopted() -> None:
    plain, streamed, inputs = stacks()
    step(plain, inputs)
    step(streamed, inputs)
    for model in (plain, streamed):
        torch.manual_seed(3)
        model.layers[1].up.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
    assert_steps_same(plain, streamed, inputs)


def test_added_and_removed_modules_are_adopted() -> None:
    plain, streamed, inputs = stacks()
    step(plain, inputs)
    step(streamed, inputs)
    for model in (plain, streamed):
        torch.manual_seed(3)
        model.layers.append(Block())
        del model.layers[0]
    assert_steps_same(plain, streamed, inputs)
    for model in (plain, streamed):
        torch.manual_seed(4)
        model.head = nn.Linear(WIDTH, WIDTH, bias=False)
    assert_steps_same(plain, streamed, inputs)


def test_adapters_put_around_frozen_layers() -> None:
    """What PEFT does: after the first step, some linear layers are wrapped."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(base.in_features, 2))
            self.b = nn.Parameter(torch.zeros(2, base.out_features))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.base(x) + x @ self.a @ self.b
            return result

    plain, streamed, inputs = stacks()
    step(plain, inputs)
    step(streamed, inputs)
    for model in (plain, streamed):
        torch.manual_seed(3)
        for layer in model.layers:
            layer.up = Adapter(layer.up)
        model.zero_grad()
    assert_steps_same(plain, streamed, inputs)


def test_buffers_that_the_user_replaces() -> None:
    plain, streamed = twins(zoo.batchnorm()[0])
    step(plain, batch())
    step(streamed, batch())
    for model in (plain, streamed):
        norm = model.layers[0][1]
        norm.running_mean = torch.full((WIDTH,), 2.0)
        norm.running_var.fill_(3.0)
        model.eval()
    assert_steps_same(plain, streamed, batch())


# --- checkpoints and copies


def test_state_dict_has_the_same_keys_and_values() -> None:
    plain, streamed = twins(zoo.batchnorm()[0])
    step(plain, batch())
    step(streamed, batch())
    mine, theirs = plain.state_dict(), streamed.state_dict()
    assert list(mine) == list(theirs)
    assert all(equal(mine[key], theirs[key]) for key in mine)
    assert list(streamed.state_dict(prefix="a.")) == [f"a.{key}" for key in mine]


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_load_state_dict(assign: bool) -> None:
    plain, streamed = twins(zoo.batchnorm()[0])
    step(plain, batch())
    step(streamed, batch())
    torch.manual_seed(9)
    other = Stack(block=lambda: copy.deepcopy(plain.layers[0])).state_dict()
    for model in (plain, streamed):
        model.zero_grad()
        result = model.load_state_dict({k: v.clone() for k, v in other.items()}, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys
    assert_steps_same(plain, streamed, batch())


def test_state_dict_of_streamed_loads_in_plain() -> None:
    plain, streamed, inputs = stacks()
    with torch.no_grad():
        streamed.head.weight.mul_(2)
    plain.load_state_dict(streamed.state_dict())
    assert_steps_same(plain, streamed, inputs)


def test_deepcopy_is_a_plain_model_that_works() -> None:
    plain, streamed = twins(zoo.dropout()[0])
    for model in (plain, streamed):
        step(model, batch())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    copies = copy.deepcopy(plain), copy.deepcopy(streamed)
    with pytest.raises(ValueError, match="not megacompiled"):
        schedules(copies[1])
    assert_steps_same(*copies, batch())
    assert_same(plain, streamed)  # the copies have parameters and gradients of their own
    assert_steps_same(plain, streamed, batch())


def test_deepcopy_can_be_megacompiled() -> None:
    plain, streamed, inputs = stacks()
    step(streamed, inputs)
    again = megacompile(copy.deepcopy(streamed), device="cpu", lowering="eager")
    assert_steps_same(plain, again, inputs)
    assert_steps_same(plain, again, inputs)


@pytest.mark.parametrize("what", ["model", "state_dict"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_and_loaded_in_a_plain_model(tmp_path: Path, what: str, weights_only: bool) -> None:
    if what == "model" and weights_only:
        pytest.skip("torch.load refuses a whole model with weights_only")
    plain, streamed = twins(zoo.tied()[0])
    step(plain, batch())
    step(streamed, batch())
    paths = [tmp_path / "0.pt", tmp_path / "1.pt"]
    for model, path in zip((plain, streamed), paths, strict=True):
        torch.save(model if what == "model" else model.state_dict(), path)
    sizes = [path.stat().st_size for path in paths]
    assert sizes[1] <= sizes[0] + 1024  # bytes: not the whole bucket for each parameter
    loaded = torch.load(paths[1], weights_only=weights_only)
    if what == "state_dict":
        fresh, _ = zoo.tied()
        fresh.load_state_dict(loaded)
        loaded = fresh
    plain.zero_grad()
    assert_steps_same(plain, loaded, batch())


def test_pickled() -> None:
    plain, streamed, inputs = stacks()
    step(streamed, inputs)
    loaded = pickle.loads(pickle.dumps(streamed))
    assert_steps_same(plain, loaded, inputs)


def test_save_pretrained(tmp_path: Path) -> None:
    model, inputs = zoo.hf_gpt2(), zoo.tokens()
    plain, streamed = twins(model)
    step(streamed, inputs)
    streamed.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path).train()
    assert_steps_same(plain, loaded, inputs)


def test_swapped_weights_of_an_average() -> None:
    """`torch.optim.swa_utils`: an average of a streamed model, itself a copy."""
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


# --- the model itself


def test_same_object_same_parameters() -> None:
    model, _ = zoo.tied()
    params = dict(model.named_parameters(remove_duplicate=False))
    streamed = megacompile(model, device="cpu")
    assert streamed is model and type(streamed) is Stack
    now = dict(streamed.named_parameters(remove_duplicate=False))
    assert list(now) == list(params)
    assert all(now[name] is params[name] and type(now[name]) is nn.Parameter for name in params)
    step(streamed, batch())
    assert all(p is params[name] for name, p in streamed.named_parameters())


@pytest.mark.parametrize("first", ["torch.compile", "megacompile"])
def test_torch_compile_of_the_module(first: str) -> None:
    plain, inputs = zoo.dropout()
    model, _ = zoo.dropout()
    compiled: Any = torch.compile  # typed as if it gave a function
    if first == "torch.compile":
        streamed = megacompile(compiled(model, backend="eager"), device="cpu")
    else:
        streamed = compiled(megacompile(model, device="cpu"), backend="eager")
    assert equal(step(plain, inputs), step(streamed, inputs))
    assert_same(plain, model)


def test_what_torch_compile_gave_is_left_out() -> None:
    """It goes on as if it had been made of the megacompiled model."""
    plain, inputs = zoo.dropout()
    model, _ = zoo.dropout()
    compiled: Any = torch.compile
    around = compiled(model, backend="eager")
    streamed = megacompile(around, device="cpu")
    assert streamed is model and megacompile(around, device="cpu") is model
    assert equal(step(plain, inputs), step(around, inputs))
    assert len(schedules(streamed)) == 1
    assert unmegacompile(streamed) is model


def test_optimizer_made_before() -> None:
    model, inputs = zoo.stack()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
    streamed = megacompile(model, device="cpu")
    for m, optimizer in zip((plain, streamed), optimizers, strict=True):
        for _ in range(2):
            step(m, inputs)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, streamed)


def test_gradients_from_before_are_accumulated_into() -> None:
    plain, inputs = zoo.stack()
    model, _ = zoo.stack()
    step(plain, inputs)
    step(model, inputs)
    streamed = megacompile(model, device="cpu")
    assert_steps_same(plain, streamed, inputs)


def test_channels_last_and_transposed_weights() -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 8))
    model = model.to(memory_format=torch.channels_last)
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    strides = [p.stride() for p in model.parameters()]
    plain, streamed = twins(model)
    for m in (plain, streamed):
        m(torch.ones(2, 3, 4, 4)).square().sum().backward()
    assert [p.stride() for p in streamed.parameters()] == strides
    assert_same(plain, streamed)


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_dtype_changes(no_warnings: None) -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        model.double()
    assert streamed.head.weight.dtype == torch.float64
    assert_steps_same(plain, streamed, {k: v.double() for k, v in inputs.items()})


def test_forward_hooks() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        model.layers[0].register_forward_hook(lambda m, args, out: out * 2)
    assert_steps_same(plain, streamed, inputs)
    for model in (plain, streamed):
        model.register_forward_pre_hook(
            lambda m, args, kwargs: (args, {**kwargs, "x": kwargs["x"] + 1}), with_kwargs=True
        )
        model.register_forward_hook(lambda m, args, out: out * 3)
    assert_steps_same(plain, streamed, inputs)


def test_forward_hook_added_after_the_first_call() -> None:
    plain, streamed, inputs = stacks()
    step(plain, inputs)
    step(streamed, inputs)
    handles = []
    for model in (plain, streamed):
        layer = model.layers[1]
        handles.append(layer.register_forward_hook(lambda m, args, out: out * 2))
    assert_steps_same(plain, streamed, inputs)
    for handle in handles:
        handle.remove()
    assert_steps_same(plain, streamed, inputs)


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


def test_a_forward_that_fails_leaves_the_model_whole() -> None:
    plain, streamed, inputs = stacks()
    with pytest.raises(RuntimeError):
        streamed(torch.randn(4, WIDTH + 1))
    assert all(type(p) is nn.Parameter for p in streamed.parameters())
    assert_steps_same(plain, streamed, inputs)
