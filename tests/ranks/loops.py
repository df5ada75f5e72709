"""Loops over a model that ranks share, and over the plain one: both are `Loop`s.

A rank trains on its own rows, the plain model on those of all ranks at once: the mean of the
ranks' losses is the loss of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from megacompile import megacompile
from tests.ranks.here import Check, Here, Values, contents, differing, whole
from tests.ranks.modes import LR
from tests.ranks.nets import WORDS, Words

STEPS = 3
EXACT = 1e-11  # of float64: the mean of all rows at once is another sum
ROWS = 8  # of all ranks together


class Loop:
    """A model that is trained, in one of `ranks` or as the plain one of all.

    Args:
        mesh: of the ranks that share the model; None: the plain one.
        ranks: how many there are.
    """

    def __init__(self, net: type[nn.Module], mesh: Any, ranks: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = net().double()
        self.ranks = ranks
        self.mesh = mesh
        if mesh is not None:
            megacompile(self.model, mesh=mesh, device="cpu", **options)
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=LR)
        self.seen: list[float] = []  # losses, norms: what a loop notes

    def batch(self, step: int, number: int = 0) -> Tensor:
        """Rows: all, or those of this rank."""
        generator = torch.Generator().manual_seed(1000 * step + number)
        words = torch.randint(0, WORDS, (ROWS, 5), generator=generator)
        return words if self.mesh is None else words.chunk(self.ranks)[dist.get_rank()]

    def note(self, value: Tensor, *, of_rank: bool = False) -> None:
        """Remember a number; of a rank's own, the mean."""
        value = whole(value).double().clone()
        if of_rank and self.mesh is not None:
            dist.all_reduce(value)
            value /= self.ranks
        self.seen.append(value.item())

    def train(self, step: int, number: int = 0) -> None:
        """A loss and its backward."""
        loss = self.model(self.batch(step, number))
        loss.backward()
        self.note(loss.detach(), of_rank=True)

    def update(self) -> None:
        """The usual step."""
        self.note(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def record(self) -> Values:
        """What became of it: a collective."""
        seen = torch.tensor(self.seen, dtype=torch.float64)
        return {"seen": seen} | contents(self.model, self.optimizer)


def hooks(loop: Loop) -> None:
    """Hooks on parameters see gradients that are means over ranks, and change them."""
    weight, bias = loop.model.head.weight, loop.model.layers[1][0].bias
    weight.register_hook(lambda gradient: gradient * 2)

    def clamp(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-0.01, 0.01)

    bias.register_post_accumulate_grad_hook(clamp)
    for step in range(STEPS):
        loop.train(step)
        loop.update()


def penalty(loop: Loop) -> None:
    """A parameter is used outside of the model, in the loss."""
    for step in range(STEPS):
        squares = loop.model.head.weight.square().sum()
        squares = squares.full_tensor() if loop.mesh is not None else squares
        loss = loop.model(loop.batch(step)) + 0.1 * squares
        loss.backward()
        loop.note(loss.detach(), of_rank=True)
        loop.update()


def penalty_apart(loop: Loop) -> None:
    """The same as a backward of its own, before and behind the model's."""
    for step in range(STEPS):
        if step % 2:
            (0.1 * loop.model.head.weight.square().sum()).backward()
        loop.train(step)
        if not step % 2:
            (0.1 * loop.model.head.weight.square().sum()).backward()
        loop.update()


def twice(loop: Loop) -> None:
    """Two backwards before a step, and gradients that are zeroed in place."""
    for step in range(STEPS):
        loop.train(step, 0)
        loop.train(step, 1)
        loop.note(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5))
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)


def calls(loop: Loop) -> None:
    """Two calls of the model in one loss."""
    for step in range(STEPS):
        loss = loop.model(loop.batch(step, 0)) + loop.model(loop.batch(step, 1))
        loss.backward()
        loop.note(loss.detach(), of_rank=True)
        loop.update()


def looks(loop: Loop) -> None:
    """Somebody reads parameters, gradients and states right behind the step."""
    for step in range(STEPS):
        loop.train(step)
        loop.note(loop.model.embed.weight.grad.norm())
        loop.optimizer.step()
        for param in loop.model.parameters():
            loop.note(param.detach().square().sum())
            loop.note(param.grad.abs().max())
            state = loop.optimizer.state[param]
            loop.note(state["exp_avg_sq"].sum())
        loop.optimizer.zero_grad()
        loop.train(step, 1)
        loop.optimizer.step()
        if loop.mesh is not None:
            for param in loop.model.parameters():
                rows = param.full_tensor().chunk(loop.ranks)
                assert param.to_local().equal(rows[dist.get_rank()])
        loop.optimizer.zero_grad()


def sets(loop: Loop) -> None:
    """The user sets gradients, exchanges a parameter's data, and writes to parameters in place."""
    for step in range(STEPS):
        loop.train(step)
        weight = loop.model.head.weight
        weight.grad = weight.grad * 0.5
        loop.model.head.bias.grad = None
        loop.update()
        smaller = nn.Parameter(weight.detach() * 0.9)
        smaller.grad = weight.grad
        torch.utils.swap_tensors(weight, smaller)  # a DTensor does not take `p.data = ...`
        del smaller
        with torch.no_grad():
            loop.model.embed.weight.mul_(0.95)
            loop.model.layers[0][0].bias.data.add_(0.01)


def evaluates(loop: Loop) -> None:
    """Losses without a graph between steps."""
    for step in range(STEPS):
        loop.train(step)
        loop.update()
        with torch.no_grad():
            loop.note(loop.model(loop.batch(step, 1)), of_rank=True)
        with torch.inference_mode():
            loop.note(loop.model(loop.batch(step, 2)), of_rank=True)


def freezes(loop: Loop) -> None:
    """Parameters are frozen and trained again."""
    for step in range(STEPS):
        loop.model.layers[0].requires_grad_(step != 1)
        loop.model.head.bias.requires_grad_(step != 2)
        loop.train(step)
        loop.update()


def closure(loop: Loop) -> None:
    """`step` calls the backward."""
    for step in range(STEPS):

        def again(step: int = step) -> float:
            loop.optimizer.zero_grad()
            loss: Tensor = loop.model(loop.batch(step))
            loss.backward()
            loop.note(loss.detach(), of_rank=True)
            return loss.item()

        loop.optimizer.step(again)


def inner(loop: Loop) -> None:
    """Modules of the model are called by the loop itself."""
    for step in range(STEPS):
        x = loop.batch(step)
        hidden = loop.model.embed(x)
        hidden = hidden + loop.model.layers[1](hidden)
        loss = functional.cross_entropy(loop.model.head(hidden).flatten(0, 1), x.flatten())
        loss.backward()
        loop.note(loss.detach(), of_rank=True)
        loop.update()


def asks(loop: Loop) -> None:
    """`torch.autograd.grad` of parameters."""
    for step in range(STEPS):
        params = [loop.model.head.weight, loop.model.embed.weight]
        loss = loop.model(loop.batch(step))
        for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
            loop.note(gradient.norm())
            param.grad = gradient
        loop.update()


class Broken(Words):
    """Code that is not captured uses a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        torch._dynamo.graph_break()
        bias = self.get_parameter("layers.0.0.bias")
        return loss + 0.1 * self.head.weight.square().mean() + bias[:4].sum()


def breaks(loop: Loop) -> None:
    """The model has a graph break."""
    twice(loop)


LOOPS: dict[str, tuple[Callable[[Loop], None], type[nn.Module]]] = {
    "hooks": (hooks, Words),
    "penalty": (penalty, Words),
    "penalty_apart": (penalty_apart, Words),
    "twice": (twice, Words),
    "calls": (calls, Words),
    "looks": (looks, Words),
    "sets": (sets, Words),
    "evaluates": (evaluates, Words),
    "freezes": (freezes, Words),
    "closure": (closure, Words),
    "inner": (inner, Words),
    "asks": (asks, Words),
    "breaks": (breaks, Broken),
}


def run(name: str, here: Here | None, ranks: int, **options: Any) -> Values:
    """A loop, from its start to what became of it; without ranks the plain one."""
    body, net = LOOPS[name]
    loop = Loop(net, None if here is None else here.mesh, ranks, **options)
    body(loop)
    return loop.record()


def check(name: str, **options: Any) -> Check:
    """Ranks do in a loop as the plain model does."""

    def as_plain(here: Here) -> None:
        plain = run(name, None, here.count)
        torch.compiler.reset()
        wrong = differing(run(name, here, here.count, **options), plain, EXACT)
        assert not wrong, "\n".join(wrong)

    return as_plain


def gathered_and_whole(name: str) -> Check:
    """Copies of whole buckets give what gathers give, in every bit."""

    def equal_in_every_bit(here: Here) -> None:
        expected = run(name, here, here.count)
        torch.compiler.reset()
        wrong = differing(run(name, here, here.count, whole_buckets=True), expected)
        assert not wrong, "\n".join(wrong)

    return equal_in_every_bit


ALWAYS = ("hooks", "penalty", "looks", "sets")
TWO: dict[str, Check] = {name: check(name) for name in ALWAYS}
MORE: dict[str, Check] = {
    **{name: check(name) for name in LOOPS if name not in ALWAYS},
    **{f"compiled, {name}": check(name, lowering="inductor") for name in LOOPS},
}
WHOLE: dict[str, Check] = {
    f"whole, {name}": gathered_and_whole(name)
    for name in ("penalty", "looks", "sets", "evaluates", "freezes", "breaks")
}
