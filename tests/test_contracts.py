"""The contracts of a streamed model: whatever the loop does, it is what the plain model does.

Each test does the same to a megacompiled model and to a plain copy of it, in the same process, and
compares every bit.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from train_lm import GPT

from megacompile import megacompile, schedules
from tests import zoo
from tests.zoo import WIDTH, Block, Inputs, Stack, batch, differences, equal, step, twins


def stacks(**options: Any) -> tuple[Any, Any, Inputs]:
    model, inputs = zoo.stack()
    return *twins(model, **options), inputs


def assert_same(plain: nn.Module, streamed: nn.Module) -> None:
    """Parameters, gradients and buffers: the same bits, and None where plain has None."""
    assert differences(plain, streamed) == []


def assert_steps_same(plain: nn.Module, streamed: nn.Module, inputs: Inputs) -> None:
    """A forward and backward of both gives the same loss and gradients."""
    assert equal(step(plain, inputs), step(streamed, inputs))
    assert_same(plain, streamed)


# --- models


@pytest.mark.parametrize("name", zoo.ZOO)
def test_two_backwards_accumulate(name: str) -> None:
    model, inputs = zoo.ZOO[name]()
    plain, streamed = twins(model)
    for seed in range(2):
        assert equal(step(plain, inputs, seed=seed), step(streamed, inputs, seed=seed))
        assert_same(plain, streamed)


def test_frozen_parameters_get_no_gradient() -> None:
    _, streamed = twins(zoo.frozen()[0])
    step(streamed, batch())
    given = {name: p.grad is not None for name, p in streamed.named_parameters()}
    assert given == {name: p.requires_grad for name, p in streamed.named_parameters()}


def test_unused_parameters_keep_none() -> None:
    _, streamed = twins(zoo.unused()[0])
    step(streamed, batch())
    without = [name for name, p in streamed.named_parameters() if p.grad is None]
    assert without == ["layers.1.extra", "spare.weight", "spare.bias"]


def test_unused_parameter_keeps_the_gradient_it_has() -> None:
    plain, streamed = twins(zoo.unused()[0])
    for model in (plain, streamed):
        model.spare.weight.grad = torch.full((2, 2), 3.0)
    assert_steps_same(plain, streamed, batch())


@pytest.mark.parametrize("change", [(False, True), (True, False), (True, False, True)])
def test_parameters_frozen_and_thawed_between_steps(change: tuple[bool, ...]) -> None:
    plain, streamed, inputs = stacks()
    for requires in change:
        for model in (plain, streamed):
            model.layers[1].requires_grad_(requires)
        assert_steps_same(plain, streamed, inputs)


def test_everything_frozen_but_the_input() -> None:
    plain, streamed, inputs = stacks()
    grads = []
    for model in (plain, streamed):
        model.requires_grad_(False)
        x = inputs["x"].clone().requires_grad_()
        model(x, inputs["y"]).backward()
        grads.append(x.grad)
    assert equal(*grads)
    assert_same(plain, streamed)


def test_tied_parameters_stay_tied() -> None:
    plain, streamed = twins(zoo.tied()[0])
    for model in (plain, streamed):
        step(model, batch())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert streamed.head.weight is streamed.embed.weight
    assert len(list(streamed.parameters())) == len(list(plain.parameters()))
    assert_same(plain, streamed)


def test_dropout_masks_are_the_same_in_the_recompute() -> None:
    """Gradients of a dropped entry are zero exactly where its output is."""
    layers = [nn.Linear(64, 64) for _ in range(3)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.eye(64))
            layer.bias.zero_()
    _, streamed = twins(nn.Sequential(*(nn.Sequential(m, nn.Dropout(0.5)) for m in layers)))
    x = torch.ones(8, 64, requires_grad=True)
    out = streamed(x)
    out.sum().backward()
    assert equal(x.grad, out.detach())  # 8 where all three masks kept it, else 0
    assert 0 < int((out != 0).sum()) < out.numel()


def test_dropout_leaves_the_generator_where_plain_leaves_it() -> None:
    plain, streamed = twins(zoo.dropout()[0])
    after = []
    for model in (plain, streamed):
        step(model, batch())
        after.append(torch.rand(4))
    assert equal(*after)


# --- the loop


@dataclass(frozen=True)
class Loop:
    """One way to write a training loop."""

    accumulate: int = 1
    clip: float | None = None
    clip_value: float | None = None
    schedule: bool = False
    set_to_none: bool = True
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def run(self, model: nn.Module, steps: int = 4) -> list[Tensor]:
        """What the loop sees: losses, gradient norms, learning rates."""
        optimizer = self.optimizer(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        seen = []
        for i in range(steps):
            for micro in range(self.accumulate):
                seen.append(step(model, batch(10 * i + micro), seed=i))
            if self.clip is not None:
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), self.clip))
            if self.clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), self.clip_value)
            optimizer.step()
            if self.schedule:
                scheduler.step()
                seen.append(torch.tensor(scheduler.get_last_lr()))
            optimizer.zero_grad(set_to_none=self.set_to_none)
        return seen


LOOPS = {
    "plain": Loop(),
    "accumulate": Loop(accumulate=3),
    "clip": Loop(clip=0.05),
    "clip value": Loop(clip_value=0.01),
    "clip, not reached": Loop(clip=1e6),
    "schedule": Loop(schedule=True),
    "zero in place": Loop(set_to_none=False),
    "everything": Loop(accumulate=2, clip=0.05, schedule=True, set_to_none=False),
    "sgd with momentum": Loop(optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    "adam, not foreach": Loop(optimizer=lambda p, lr: torch.optim.Adam(p, lr, foreach=False)),
    "adamw, fused": Loop(optimizer=lambda p, lr: torch.optim.AdamW(p, lr, fused=True)),
    "adafactor": Loop(optimizer=torch.optim.Adafactor),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_loops(loop: Loop) -> None:
    plain, streamed = twins(zoo.dropout()[0])
    for mine, theirs in zip(loop.run(plain), loop.run(streamed), strict=True):
        assert equal(mine, theirs)
    assert_same(plain, streamed)


@pytest.mark.parametrize("name", ["tied", "unused", "frozen", "shared", "batchnorm", "graph_break"])
def test_loop_with_everything(name: str) -> None:
    plain, streamed = twins(zoo.ZOO[name]()[0])
    LOOPS["everything"].run(plain, steps=2)
    LOOPS["everything"].run(streamed, steps=2)
    assert_same(plain, streamed)


def test_lbfgs_with_a_closure() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            return step(model, inputs)

        optimizer.step(closure)
    assert_same(plain, streamed)


def test_grad_scaler() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(2):
            scaler.scale(model(**inputs)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(plain, streamed)


def test_data_loader_with_a_short_last_batch() -> None:
    data = TensorDataset(batch(1, size=10)["x"], batch(2, size=10)["x"])
    plain, streamed, _ = stacks()
    for model in (plain, streamed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for x, y in DataLoader(data, batch_size=4):
                step(model, {"x": x, "y": y})
                optimizer.step()
                optimizer.zero_grad()
    assert_same(plain, streamed)


def test_lengths_that_vary() -> None:
    torch.manual_seed(0)
    plain, streamed = twins(GPT(layers=2, width=WIDTH, heads=2, context=8))
    for size, length in [(2, 8), (2, 5), (3, 8), (1, 1), (3, 5), (2, 8)]:
        tokens = torch.randint(256, (size, length), generator=torch.Generator().manual_seed(length))
        for model in (plain, streamed):
            _, loss = model(tokens, tokens)
            loss.backward()
        assert_same(plain, streamed)


def test_optimizer_state_goes_from_streamed_to_plain_and_back() -> None:
    plain, streamed, inputs = stacks()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, streamed)]
    for model, optimizer in zip((plain, streamed), optimizers, strict=True):
        step(model, inputs)
        optimizer.step()
    states = [optimizer.state_dict() for optimizer in optimizers]
    for model, optimizer, state in zip((plain, streamed), optimizers, states[::-1], strict=True):
        optimizer.load_state_dict(state)
        step(model, inputs)
        optimizer.step()
    assert_same(plain, streamed)


# --- gradients


def test_zeroed_in_place_gradients_are_the_same_tensors() -> None:
    _, streamed, inputs = stacks()
    step(streamed, inputs)
    before = [p.grad for p in streamed.parameters()]
    streamed.zero_grad(set_to_none=False)
    step(streamed, inputs)
    assert all(p.grad is g for p, g in zip(streamed.parameters(), before, strict=True))


def test_gradients_of_some_set_to_none() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        step(model, inputs)
        model.layers[1].zero_grad()
        model.layers[0].up.weight.grad = None
    assert_steps_same(plain, streamed, inputs)


def test_gradient_given_by_the_user_is_accumulated_into() -> None:
    plain, streamed, inputs = stacks()
    given = []
    for model in (plain, streamed):
        given.append(torch.full((WIDTH, WIDTH), 0.5))
        model.head.weight.grad = given[-1]
    assert_steps_same(plain, streamed, inputs)
    assert streamed.head.weight.grad is given[1]
    assert_steps_same(plain, streamed, inputs)


@pytest.mark.parametrize("keep", ["tensor", "view", "detached", "dict"])
def test_gradient_held_over_zero_grad_is_not_overwritten(keep: str) -> None:
    _, streamed, inputs = stacks()
    step(streamed, inputs)
    grad = streamed.layers[0].up.weight.grad
    held: Any = {"tensor": grad, "view": grad[3:], "detached": grad.detach(), "dict": {"g": grad}}
    held = held[keep]
    tensor = held["g"] if keep == "dict" else held
    before = tensor.clone()
    del grad
    streamed.zero_grad()
    step(streamed, batch(7))
    step(streamed, batch(8))
    assert equal(tensor, before)


def test_gradient_swapped_out_and_in_again() -> None:
    """What a loop does that compares the gradients of two losses."""
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        step(model, inputs)
        first = [p.grad for p in model.parameters()]
        model.zero_grad()
        step(model, batch(5))
        for p, g in zip(model.parameters(), first, strict=True):
            assert p.grad is not None and g is not None
            p.grad.sub_(g)
            p.grad, g = g, p.grad
    assert_same(plain, streamed)
    assert_steps_same(plain, streamed, inputs)


def test_post_accumulate_hooks_run_once_a_backward() -> None:
    plain, streamed, inputs = stacks()
    calls: dict[str, list[Tensor]] = {"plain": [], "streamed": []}
    for name, model in (("plain", plain), ("streamed", streamed)):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, seen=calls[name]: seen.append(p.grad.sum())
            )
        step(model, inputs)
        step(model, inputs)
    assert len(calls["streamed"]) == 2 * len(list(streamed.parameters()))
    assert sorted(map(float, calls["plain"])) == sorted(map(float, calls["streamed"]))


def test_optimizer_in_post_accumulate_hooks() -> None:
    """PyTorch's recipe for a backward that steps and frees each gradient."""
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}

        def update(p: Tensor, optimizers: Any = optimizers) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        step(model, inputs)
        step(model, inputs)
    assert all(p.grad is None for p in streamed.parameters())
    assert_same(plain, streamed)


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_register_hook_on_parameters(when: str) -> None:
    """Hooks change what is accumulated, in place or not; one of them only looks."""
    seen: list[Tensor] = []
    models = twins(zoo.stack()[0]) if when != "before" else (zoo.stack()[0], zoo.stack()[0])
    for model in models:
        if when == "after":
            step(model, batch())
        loss = model(**batch()) if when == "between" else None
        layer = model.layers[1]
        handles = [
            layer.up.weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001)),
            layer.down.bias.register_hook(lambda gradient: gradient.mul_(2)),
            layer.norm.bias.register_hook(lambda gradient: seen.append(gradient.sum())),
        ]
        if when == "before" and model is models[1]:
            megacompile(model, device="cpu")
        step(model, batch()) if loss is None else loss.backward()
        step(model, batch())
        for handle in handles:
            handle.remove()
        step(model, batch())
    assert_same(*models)
    assert len(seen) == 4 and equal(torch.stack(seen[:2]), torch.stack(seen[2:]))


def test_register_hook_and_post_accumulate_hook() -> None:
    calls: list[Tensor] = []
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        bias = model.head.bias
        bias.register_hook(lambda gradient: gradient * 3)
        bias.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
        step(model, inputs)
        step(model, inputs)
    assert_same(plain, streamed)
    assert len(calls) == 4 and equal(torch.stack(calls[:2]), torch.stack(calls[2:]))


def test_backward_of_a_weighted_loss() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        model(**inputs).backward(torch.tensor(0.25))
    assert_same(plain, streamed)


@pytest.mark.parametrize("wanted", ["input", "parameters", "some", "both"])
@pytest.mark.parametrize("before", [False, True], ids=["no gradients", "gradients"])
def test_autograd_grad(wanted: str, before: bool) -> None:
    """It gives gradients and leaves `p.grad` alone."""
    plain, streamed, inputs = stacks()
    found = []
    for model in (plain, streamed):
        if before:
            step(model, inputs)
        x = inputs["x"].clone().requires_grad_()
        params = list(model.parameters())
        of = {"input": [x], "parameters": params, "some": params[3:5], "both": [x, *params]}[wanted]
        found.append(torch.autograd.grad(model(x, inputs["y"]), of))
        assert x.grad is None
    assert all(map(equal, *found))
    assert_same(plain, streamed)
    assert_steps_same(plain, streamed, inputs)


def test_autograd_grad_of_unused_parameters_is_none() -> None:
    plain, streamed = twins(zoo.unused()[0])
    found = [
        torch.autograd.grad(model(**batch()), list(model.parameters()), allow_unused=True)
        for model in (plain, streamed)
    ]
    assert all(map(equal, *found))
    assert any(g is None for g in found[1])


@pytest.mark.parametrize("wanted", ["input", "parameters", "some"])
def test_backward_for_some_inputs(wanted: str) -> None:
    plain, streamed, inputs = stacks()
    grads = []
    for model in (plain, streamed):
        for _ in range(2):
            x = inputs["x"].clone().requires_grad_()
            params = list(model.parameters())
            of = {"input": [x], "parameters": params, "some": params[3:5]}[wanted]
            model(x, inputs["y"]).backward(inputs=of)
        grads.append(x.grad)
    assert equal(*grads)
    assert_same(plain, streamed)
    assert_steps_same(plain, streamed, inputs)


# --- inputs and outputs


class Output(NamedTuple):
    prediction: Tensor
    hidden: Tensor


@dataclass
class Record:
    prediction: Tensor
    hidden: Tensor


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda p, h: (p, h),
    "list": lambda p, h: [p, h],
    "dict": lambda p, h: {"prediction": p, "hidden": h},
    "namedtuple": Output,
    "dataclass": Record,
    "nested": lambda p, h: {"a": (p, [h, None, 3, "text"]), "b": {"c": p}},
    "same twice": lambda p, h: (h, h, p),
}


class Several(nn.Module):
    """Gives its prediction and its middle in a form of choice."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.stack = Stack()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        hidden = self.stack.layers[0](self.stack.embed(x))
        return self.form(self.stack.head(self.stack.layers[1](hidden)), hidden)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in an output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Record):
        return [value.prediction, value.hidden]
    if isinstance(value, dict):
        return tensors(list(value.values()))
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("form", OUTPUTS)
def test_outputs(form: str) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Several(OUTPUTS[form]))
    for chosen in (slice(None), slice(0, 1), slice(1, 2)):  # which outputs get a gradient
        results = [model(batch()["x"]) for model in (plain, streamed)]
        assert type(results[0]) is type(results[1])
        for mine, theirs in zip(*map(tensors, results), strict=True):
            assert equal(mine, theirs)
        for result in results:
            torch.stack([t.square().sum() for t in tensors(result)[chosen]]).sum().backward()
        assert_same(plain, streamed)


def test_hf_output_by_attribute_key_and_position() -> None:
    model, inputs = zoo.qwen2()
    plain, streamed = twins(model)
    with torch.no_grad():
        mine, theirs = plain(**inputs), streamed(**inputs)
    assert type(theirs) is type(mine)
    assert list(theirs) == list(mine) == ["loss", "logits"]
    assert equal(theirs.logits, mine.logits) and equal(theirs["loss"], mine[0])


def test_keyword_positional_and_missing_inputs() -> None:
    plain, streamed, inputs = stacks()
    x, y = inputs["x"], inputs["y"]
    for call in (
        lambda m: m(x, y),
        lambda m: m(x, y=y),
        lambda m: m(y=y, x=x),
        lambda m: F.mse_loss(m(x), y),  # the loss outside of the model
    ):
        assert equal(call(plain).detach(), call(streamed).detach())
        call(plain).backward()
        call(streamed).backward()
        assert_same(plain, streamed)


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "not a leaf"])
def test_inputs_that_require_grad(leaf: bool) -> None:
    plain, streamed, inputs = stacks()
    grads = []
    for model in (plain, streamed):
        x = inputs["x"].clone().requires_grad_()
        for _ in range(2):
            model(x if leaf else x.tanh(), inputs["y"]).backward()
        grads.append(x.grad)
    assert equal(*grads)
    assert_same(plain, streamed)


def test_input_that_is_also_an_output() -> None:
    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, self.layer(x), x[1:]

    plain, streamed = twins(Through())
    grads = []
    for model in (plain, streamed):
        x = batch()["x"].requires_grad_()
        same, out, part = model(x)
        assert equal(same, x) and equal(part, x[1:])
        (out.square().sum() + part.square().sum()).backward()
        model(x)[0].sum().backward()
        grads.append(x.grad)
    assert equal(*grads)
    assert_same(plain, streamed)


def test_nested_inputs() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, data: dict[str, Any], *, scale: float, add: Tensor | None) -> Tensor:
            first, rest = data["pair"]
            out: Tensor = self.layer(first) * scale + rest["y"]
            return (out if add is None else out + add).square().mean()

    plain, streamed = twins(Nested())
    data = {"pair": (batch()["x"], {"y": batch()["y"]})}
    for scale, add in ((2.0, None), (0.5, None), (0.5, torch.ones(WIDTH))):
        for model in (plain, streamed):
            model(data, scale=scale, add=add).backward()
        assert_same(plain, streamed)


@pytest.mark.gpu
def test_inputs_on_the_host_are_moved() -> None:
    model, inputs = zoo.stack()
    plain = copy.deepcopy(model).cuda()
    streamed = megacompile(model, device="cuda", lowering="eager")
    loss = streamed(inputs["x"], y=inputs["y"])
    assert loss.device == torch.device("cuda", torch.cuda.current_device())
    loss.backward()
    step(plain, {key: value.cuda() for key, value in inputs.items()})
    assert_same(plain.cpu(), streamed)


# --- calls


def test_two_forwards_before_one_backward() -> None:
    plain, streamed, _ = stacks()
    for model in (plain, streamed):
        (model(**batch(1)) + 2 * model(**batch(2))).backward()
    assert_same(plain, streamed)


def test_forwards_of_several_and_backwards_in_another_order() -> None:
    plain, streamed = twins(zoo.dropout()[0])
    for model in (plain, streamed):
        torch.manual_seed(0)
        losses = [model(**batch(i)) for i in range(3)]
        for i in (1, 0, 2):
            losses[i].backward()
    assert_same(plain, streamed)


def test_two_losses_one_after_the_other() -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Several(OUTPUTS["tuple"]))
    for _ in range(2):
        for model in (plain, streamed):
            prediction, hidden = model(batch()["x"])
            prediction.square().mean().backward(retain_graph=True)
            hidden.square().mean().backward()
        assert_same(plain, streamed)


def test_backward_twice_with_retain_graph() -> None:
    plain, streamed = twins(zoo.dropout()[0])
    for model in (plain, streamed):
        torch.manual_seed(0)
        loss = model(**batch())
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(plain, streamed)


def test_a_forward_whose_backward_never_comes() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        model(**inputs)
    assert_steps_same(plain, streamed, inputs)


def test_detached_between_two_calls() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        hidden = model(inputs["x"]).detach()
        model(hidden, inputs["y"]).backward()
    assert_same(plain, streamed)


def test_called_on_its_own_output() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        model(model(inputs["x"]), inputs["y"]).backward()
    assert_same(plain, streamed)


def test_two_models_in_one_loss() -> None:
    """A GAN's generator and discriminator, or a student and its teacher."""
    first, second = twins(zoo.stack()[0]), twins(zoo.dropout()[0])
    for one, other in zip(first, second, strict=True):
        torch.manual_seed(0)
        other(one(batch()["x"]), batch()["y"]).backward()
    assert_same(*first)
    assert_same(*second)


def test_module_of_a_larger_plain_model() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), Stack(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(whole)
    megacompile(whole[1], device="cpu", lowering="eager")
    for model in (plain, whole):
        model(batch()["x"]).square().mean().backward()
    assert_same(plain, whole)


def test_a_layer_called_by_itself() -> None:
    """Outside of a call of the model, its modules are plain modules on host parameters."""
    plain, streamed, inputs = stacks()
    step(plain, inputs)
    step(streamed, inputs)
    for model in (plain, streamed):
        model.layers[1](inputs["x"]).sum().backward()
    assert_same(plain, streamed)


@pytest.mark.parametrize("name", ["batchnorm", "dropout"])
def test_train_and_eval_switches(name: str) -> None:
    plain, streamed = twins(zoo.ZOO[name]()[0])
    for mode in (True, False, True, False):
        plain.train(mode)
        streamed.train(mode)
        assert_steps_same(plain, streamed, batch())
        with torch.no_grad():
            torch.manual_seed(1)
            mine = plain(batch(5)["x"])
            torch.manual_seed(1)
            assert equal(mine, streamed(batch(5)["x"]))
        assert_same(plain, streamed)  # a forward in training mode moves the statistics


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_has_a_forward_only_schedule(mode: Callable[[], Any]) -> None:
    plain, streamed, inputs = stacks()
    with mode():
        assert equal(plain(**inputs), streamed(**inputs))
    (schedule,) = schedules(streamed)
    assert schedule.backward is None
    assert_steps_same(plain, streamed, inputs)  # and it trains after
    assert any(s.backward is not None for s in schedules(streamed))


def test_generate() -> None:
    model, inputs = zoo.gpt2()
    plain, streamed = twins(model.eval())
    prompt = {"input_ids": inputs["input_ids"][:1, :4]}
    wanted = dict(do_sample=False, max_new_tokens=3, pad_token_id=0)
    mine, theirs = (m.generate(**prompt, **wanted) for m in (plain, streamed))
    assert torch.equal(mine, theirs)


# --- graph breaks


class Breaks(nn.Module):
    """A stack with something in the middle that Dynamo cannot capture."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.stack = Stack()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.middle = middle

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.stack.layers[0](self.stack.embed(x))
        hidden = self.middle(self, hidden)
        return F.mse_loss(self.stack.head(self.stack.layers[1](hidden)), y)


def _print(module: Any, h: Tensor) -> Tensor:
    print("mean", float(h.mean()))
    return h


def _branch(module: Any, h: Tensor) -> Tensor:
    return h + 1 if h.sum() > 0 else h - 1


def _eager_read(module: Any, h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    scaled: Tensor = h * module.scale * float(module.scale.detach().mean())
    return scaled


def _eager_layer(module: Any, h: Tensor) -> Tensor:
    result: Tensor = module.stack.layers[2](h) * module.scale
    return result


def _item(module: Any, h: Tensor) -> Tensor:
    scale: float = module.scale.sum().item()
    return h * scale


def _numpy(module: Any, h: Tensor) -> Tensor:
    return h + torch.from_numpy(h.detach().numpy() * 0.5)


MIDDLES = {
    "graph_break()": lambda module, h: (torch._dynamo.graph_break(), h)[1],
    "print": _print,
    "branch on a value": _branch,
    "parameter in eager code": _eager_read,
    "layer in eager code": torch._dynamo.disable(_eager_layer),
    "item of a parameter": _item,
    "numpy": _numpy,
}


@pytest.mark.parametrize("middle", MIDDLES)
def test_graph_breaks(middle: str) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Breaks(MIDDLES[middle]))
    for _ in range(2):
        assert_steps_same(plain, streamed, batch())


# --- autocast


def test_autocast_outside() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**inputs)
            loss.backward()
    assert_same(plain, streamed)


def test_autocast_inside() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                prediction = self.stack(x)
                with torch.autocast("cpu", enabled=False):
                    prediction = prediction.float() @ self.stack.head.weight
            return F.mse_loss(prediction, y)

    plain, streamed = twins(Inside())
    assert_steps_same(plain, streamed, batch())


def test_autocast_on_and_off() -> None:
    plain, streamed, inputs = stacks()
    for on in (False, True, False):
        for model in (plain, streamed):
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                loss = model(**inputs)
            loss.backward()
        assert_same(plain, streamed)


def test_bfloat16_model() -> None:
    model, inputs = zoo.stack()
    plain, streamed = twins(model.bfloat16())
    assert_steps_same(plain, streamed, {k: v.bfloat16() for k, v in inputs.items()})


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


def test_data_that_two_parameters_share() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        model.layers[1].up.weight.data = model.layers[0].up.weight.data
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
    model, inputs = zoo.gpt2()
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
