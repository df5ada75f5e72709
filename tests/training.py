"""A model that trains with stock optimizers: what tests of `step()` share.

`net` has parameters of every kind: some are frozen, some get no gradient. `train` takes steps of
two clipped micro-batches.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tests import zoo
from tests.zoo import WIDTH, Inputs, batch, step

STEPS = 10
NAME = "layers.1.up.weight"  # a parameter of `net` to look at
BUCKET = "layers.1"  # where it lies


def net() -> Any:
    """An embedding, three layers and a head; one parameter is frozen, some get no gradient."""
    model, _ = zoo.mixed()
    model.embed = nn.Embedding(8, WIDTH)
    return model


def data(seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randint(8, (4,), generator=generator),
        "y": torch.randn(4, WIDTH, generator=generator),
    }


def groups(model: nn.Module, **of_vectors: Any) -> list[dict[str, Any]]:
    """Two parameter groups: matrices, and vectors, which may have options of their own."""
    found: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for param in model.parameters():
        found[param.dim() > 1].append(param)
    vectors = {"params": found[0], "weight_decay": 0.0, **of_vectors}
    chosen: list[dict[str, Any]] = [{"params": found[1]}, vectors]
    return [group for group in chosen if group["params"]]


def adamw(model: nn.Module, **options: Any) -> list[Optimizer]:
    return [AdamW(groups(model), **{"lr": 1e-2, "weight_decay": 0.1, **options})]


def backward(model: nn.Module, step: int, micro: int) -> None:
    loss: Tensor = model(**data(2 * step + micro)) / 2
    loss.backward()


def gradients(model: nn.Module, step: int) -> Tensor:
    """Two micro-batches, clipped; every other step the clipping changes something."""
    for micro in range(2):
        backward(model, step, micro)
    largest = 1e-2 if step % 2 else 1e3
    norm: Tensor = nn.utils.clip_grad_norm_(model.parameters(), largest)
    assert (float(norm) > largest) == bool(step % 2)
    return norm


def train(
    model: nn.Module, optimizers: list[Optimizer], steps: int = STEPS, *, start: int = 0
) -> list[Tensor]:
    """Gives the gradient norms; the gradients of the last step stay."""
    norms = []
    for i in range(start, start + steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        norms.append(gradients(model, i))
        for optimizer in optimizers:
            optimizer.step()
    return norms


def take_steps(model: nn.Module, optimizer: Any, steps: int, *, start: int = 0) -> None:
    """Steps on `zoo.batch(i)`, seeded with i; the gradients of the last one stay."""
    for i in range(start, start + steps):
        model.zero_grad()
        step(model, batch(i), seed=i)
        optimizer.step()


def losses_of(
    model: nn.Module, optimizer: Any, given: Iterable[Inputs], *, clip: float = 0.0
) -> list[float]:
    """Those of a step on each of these inputs; with `clip`, the largest norm of gradients."""
    losses = []
    for inputs in given:
        loss = zoo.loss_of(model(**inputs))
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def move(source: Iterable[Any], target: Iterable[Any]) -> None:
    """Let a model and its optimizers go on from others, through a file."""
    for mine, theirs in zip(source, target, strict=True):
        theirs.load_state_dict(through_file(mine.state_dict()))


class Lion(Optimizer):
    """It is known by the module and the name of its class, without the package."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        self.first_lr = lr
        self.decoupled_wd = decoupled_weight_decay
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            if self.decoupled_wd:
                decay /= self.first_lr
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1.0 - lr * decay)
                p.add_(m.clone().mul_(beta1).add(p.grad, alpha=1.0 - beta1).sign_(), alpha=-lr)
                m.mul_(beta2).add_(p.grad, alpha=1.0 - beta2)
        return loss


Lion.__module__ = "lion_pytorch.lion_pytorch"
