"""The contracts of a streamed model: whatever the loop does, it is what the plain model does.

Each test does the same to a megacompiled model and to a plain copy of it, in the same process, and
compares every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from train_lm import GPT

from megacompile import megacompile
from tests import zoo
from tests.zoo import (
    WIDTH,
    assert_same,
    assert_steps_same,
    batch,
    equal,
    stacks,
    step,
    twins,
)

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
    for size, length in [(2, 8), (2, 5), (1, 1), (2, 8)]:
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
