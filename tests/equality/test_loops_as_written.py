"""A training loop as people write it: whatever it does, it does to the plain model too.

The same model serves all cases of a table: its values are put back. It is captured once for each
test. Every loss, gradient, parameter and buffer is compared in every bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megacompile import megacompile
from tests import zoo
from tests.zoo import WIDTH, assert_same, batch, equal, step, twins

Loop = Callable[[Any, list[Tensor]], None]  # what a loop sees goes into the list


class Both:
    """A plain model and a streamed one, which begin each loop with the same values."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.start = copy.deepcopy(model.state_dict())
        self.plain, self.streamed = twins(model, **options)

    def run(self, loop: Loop, name: str = "") -> None:
        seen: list[list[Tensor]] = [[], []]
        for model, values in zip((self.plain, self.streamed), seen, strict=True):
            model.load_state_dict(self.start)
            model.zero_grad()
            model.requires_grad_(True)
            torch.manual_seed(0)
            loop(model, values)
        assert len(seen[0]) == len(seen[1]), name
        for mine, theirs in zip(*seen, strict=True):
            assert equal(mine, theirs), name
        assert_same(self.plain, self.streamed)


# --- optimizers, clipping, accumulation


def training(
    *,
    accumulate: int = 1,
    clip: float | None = None,
    clip_value: float | None = None,
    schedule: bool = False,
    set_to_none: bool = True,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
) -> Loop:
    def loop(model: nn.Module, seen: list[Tensor]) -> None:
        stepper = optimizer(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(stepper, total_iters=3)
        for i in range(3):
            for micro in range(accumulate):
                seen.append(step(model, batch(10 * i + micro), seed=i))
            if clip is not None:
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            if clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), clip_value)
            stepper.step()
            if schedule:
                scheduler.step()
                seen.append(torch.tensor(scheduler.get_last_lr()))
            stepper.zero_grad(set_to_none=set_to_none)

    return loop


def lbfgs(model: Any, seen: list[Tensor]) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        return step(model, batch())

    seen.append(torch.as_tensor(optimizer.step(closure)))


def grad_scaler(model: Any, seen: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        scaler.scale(model(**batch())).backward()
        scaler.unscale_(optimizer)
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def states_moved(model: Any, seen: list[Tensor]) -> None:
    """Into another optimizer, which goes on."""
    first = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, batch())
    first.step()
    second = torch.optim.AdamW(model.parameters(), lr=0.01)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    step(model, batch(1))
    second.step()


def short_batch(model: Any, seen: list[Tensor]) -> None:
    rows = TensorDataset(batch(1, size=10)["x"], batch(2, size=10)["x"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(rows, batch_size=4):
        seen.append(step(model, {"x": x, "y": y}))
        optimizer.step()
        optimizer.zero_grad()


def dropped_states(model: Any, seen: list[Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for i in range(3):
        step(model, batch(i))
        optimizer.step()
        optimizer.zero_grad()
        if i == 1:
            optimizer.state.clear()


LOOPS: dict[str, Loop] = {
    "plain": training(),
    "accumulate": training(accumulate=3),
    "clip": training(clip=0.05),
    "clip value": training(clip_value=0.01),
    "clip, not reached": training(clip=1e6),
    "zero in place": training(set_to_none=False),
    "everything": training(accumulate=2, clip=0.05, schedule=True, set_to_none=False),
    "momentum": training(optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    "adam, not foreach": training(optimizer=lambda p, lr: torch.optim.Adam(p, lr, foreach=False)),
    "adamw, fused": training(optimizer=lambda p, lr: torch.optim.AdamW(p, lr, fused=True)),
    "adafactor": training(optimizer=torch.optim.Adafactor),
    "lbfgs": lbfgs,
    "grad scaler": grad_scaler,
    "states moved": states_moved,
    "short batch": short_batch,
    "states dropped": dropped_states,
}


def test_loops() -> None:
    both = Both(zoo.dropout()[0])
    for name, loop in LOOPS.items():
        both.run(loop, name)


@pytest.mark.parametrize("name", zoo.ZOO)
def test_models(name: str) -> None:
    """Two micro-batches, then the loop with everything."""
    both = Both(zoo.ZOO[name]()[0])
    both.run(training(accumulate=2, clip=0.05, schedule=True, set_to_none=False), name)
    given = {n: p.grad is not None for n, p in both.plain.named_parameters()}
    assert given == {n: p.grad is not None for n, p in both.streamed.named_parameters()}
    if name == "tied":
        assert both.streamed.head.weight is both.streamed.embed.weight


# --- gradients


def hooks_that_step(model: Any, seen: list[Tensor]) -> None:
    """PyTorch's recipe for a backward that steps and frees each gradient."""
    optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    for i in range(2):
        step(model, batch(i))
    for handle in handles:
        handle.remove()
    assert all(p.grad is None for p in model.parameters())


def post_hooks(model: Any, seen: list[Tensor]) -> None:
    """Each runs once a backward, whatever the order."""
    sums: list[float] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: sums.append(float(p.grad.sum())))
        for p in model.parameters()
    ]
    for i in range(2):
        step(model, batch(i))
        seen.append(torch.tensor(sorted(sums)))
    for handle in handles:
        handle.remove()


def hooks(model: Any, seen: list[Tensor]) -> None:
    """They change what is accumulated, in place or not; one of them only looks."""
    layer, bias = model.layers[1], model.head.bias
    loss = model(**batch())
    handles = [
        layer.up.weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001)),
        layer.down.bias.register_hook(lambda gradient: gradient.mul_(2)),
        layer.norm.bias.register_hook(lambda gradient: seen.append(gradient.sum())),
        bias.register_hook(lambda gradient: gradient * 3),
        bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
    ]
    loss.backward()
    step(model, batch(1))
    for handle in handles:
        handle.remove()
    step(model, batch(2))


def grad_of(what: str, before: bool) -> Loop:
    """`autograd.grad` gives gradients and leaves `p.grad` alone."""

    def loop(model: Any, seen: list[Tensor]) -> None:
        if before:
            step(model, batch())
        x, params = batch()["x"].requires_grad_(), list(model.parameters())
        of = {"input": [x], "parameters": params, "some": params[3:5], "both": [x, *params]}[what]
        seen += torch.autograd.grad(model(x, batch()["y"]), of)
        assert x.grad is None
        step(model, batch(1))

    return loop


def backward_for(what: str) -> Loop:
    def loop(model: Any, seen: list[Tensor]) -> None:
        for _ in range(2):
            x, params = batch()["x"].requires_grad_(), list(model.parameters())
            of = {"input": [x], "parameters": params, "some": params[3:5]}[what]
            model(x, batch()["y"]).backward(inputs=of)
            seen += [] if x.grad is None else [x.grad]
        step(model, batch(1))

    return loop


def frozen_and_thawed(model: Any, seen: list[Tensor]) -> None:
    for requires in (False, True, False, True):
        model.layers[1].requires_grad_(requires)
        seen.append(step(model, batch()))


def all_frozen(model: Any, seen: list[Tensor]) -> None:
    model.requires_grad_(False)
    x = batch()["x"].requires_grad_()
    model(x, batch()["y"]).backward()
    assert x.grad is not None
    seen.append(x.grad)
    model.requires_grad_(True)


def some_none(model: Any, seen: list[Tensor]) -> None:
    step(model, batch())
    model.layers[1].zero_grad()
    model.layers[0].up.weight.grad = None
    step(model, batch(1))


def given(model: Any, seen: list[Tensor]) -> None:
    """A gradient of the user's is accumulated into."""
    model.head.weight.grad = mine = torch.full((WIDTH, WIDTH), 0.5)
    for i in range(2):
        step(model, batch(i))
    assert model.head.weight.grad is mine


def swapped(model: Any, seen: list[Tensor]) -> None:
    """What a loop does that compares the gradients of two losses."""
    step(model, batch())
    first = [p.grad for p in model.parameters()]
    model.zero_grad()
    step(model, batch(5))
    for p, g in zip(model.parameters(), first, strict=True):
        p.grad.sub_(g)
        seen.append(p.grad.clone())
        p.grad = g
    step(model, batch(1))


def exchanged(model: Any, seen: list[Tensor]) -> None:
    """Two parameters have each other's gradients, which are added to."""
    step(model, batch())
    one, other = model.layers[0].up.weight, model.layers[1].up.weight
    one.grad, other.grad = other.grad, one.grad
    for i in range(2):
        step(model, batch(i))


def held(model: Any, seen: list[Tensor]) -> None:
    """What is held over `zero_grad` is not overwritten."""
    step(model, batch())
    grad = model.layers[0].up.weight.grad
    kept = [grad[3:], grad.detach(), {"g": model.head.weight.grad}["g"]]
    before = [tensor.clone() for tensor in kept]
    del grad
    model.zero_grad()
    for i in (7, 8):
        step(model, batch(i))
    assert all(map(equal, kept, before))


def zeroed(model: Any, seen: list[Tensor]) -> None:
    """In place, they are the same tensors."""
    step(model, batch())
    before = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=False)
    step(model, batch(1))
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))


def weighted(model: Any, seen: list[Tensor]) -> None:
    model(**batch()).backward(torch.tensor(0.25))


def data_replaced(model: Any, seen: list[Tensor]) -> None:
    """Between a forward and its backward, which has the old memory."""
    loss = model(**batch())
    weight = model.layers[1].up.weight
    weight.data = weight.data * 2
    loss.backward()
    seen.append(step(model, batch(1)))


GRADIENTS: dict[str, Loop] = {
    "weighted": weighted,
    "some set to none": some_none,
    "given": given,
    "swapped": swapped,
    "exchanged": exchanged,
    "held": held,
    "zeroed in place": zeroed,
    "frozen and thawed": frozen_and_thawed,
    "all frozen": all_frozen,
    "hooks": hooks,
    "post hooks": post_hooks,
    "hooks that step": hooks_that_step,
    "data replaced": data_replaced,
    **{f"backward for {what}": backward_for(what) for what in ("input", "parameters", "some")},
    **{f"grad of {what}": grad_of(what, False) for what in ("input", "parameters", "some")},
    "grad of both, with gradients": grad_of("both", True),
}


def test_gradients() -> None:
    both = Both(zoo.stack()[0])
    for name, loop in GRADIENTS.items():
        both.run(loop, name)


def test_hooks_that_were_there_before() -> None:
    models = [zoo.stack()[0] for _ in range(2)]
    seen: list[Tensor] = []
    for model in models:
        model.layers[1].up.weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
        model.head.bias.register_hook(lambda gradient: seen.append(gradient.sum()))
    megacompile(models[1], device="cpu", lowering="eager")
    for model in models:
        step(model, batch())
        step(model, batch())
    assert_same(*models)
    assert len(seen) == 4 and equal(torch.stack(seen[:2]), torch.stack(seen[2:]))


def test_unused_parameters() -> None:
    """They keep None, and the gradient that they have; `autograd.grad` gives None."""

    def loop(model: Any, seen: list[Tensor]) -> None:
        step(model, batch())
        without = [name for name, p in model.named_parameters() if p.grad is None]
        assert without == ["layers.1.extra", "spare.weight", "spare.bias"]
        model.spare.weight.grad = torch.full((2, 2), 3.0)
        step(model, batch())
        found = torch.autograd.grad(model(**batch()), list(model.parameters()), allow_unused=True)
        assert any(gradient is None for gradient in found)
        seen += [gradient for gradient in found if gradient is not None]
        model.spare.weight.grad = None

    Both(zoo.unused()[0]).run(loop)


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
    after = []
    for model in twins(zoo.dropout()[0]):
        step(model, batch())
        after.append(torch.rand(4))
    assert equal(*after), "the generator is where plain leaves it"


def test_lengths_that_vary() -> None:
    from train_lm import GPT

    torch.manual_seed(0)
    plain, streamed = twins(GPT(layers=2, width=WIDTH, heads=2, context=8))
    for size, length in [(2, 8), (2, 5), (1, 1), (2, 8)]:
        tokens = torch.randint(256, (size, length), generator=torch.Generator().manual_seed(length))
        for model in (plain, streamed):
            _, loss = model(tokens, tokens)
            loss.backward()
        assert_same(plain, streamed)
