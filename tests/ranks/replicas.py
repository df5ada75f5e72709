"""Micro-batches of ranks that replicate what others shard: 2 x 2 of them.

A backward that another one follows sums over the ranks that shard alone. The last one sums over
replicas, once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from megacompile import accumulate, megacompile
from megacompile.errors import OptimizerError
from tests.equality.nets import Applies
from tests.ranks.here import Check, Here, Values, differing, error_of, gradients, whole

WIDTH = 5
RANKS = 4
ROWS = 4  # of all ranks together
NEAR = 1e-11  # of float64


def forward(m: Any, x: Tensor, layers: int = 3) -> Tensor:
    """Some layers, one of which a call may leave out, with a graph break in between."""
    x = x + torch.tanh(m.layers[0](x))
    x = x + torch.tanh(m.layers[1](x))
    torch._dynamo.graph_break()
    if layers > 2:
        x = x + torch.tanh(m.layers[2](x))
    return x.square().mean()


class Loop:
    """A model that 2 x 2 ranks share, or the plain one (without `here`) with the rows of all."""

    def __init__(self, here: Here | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.here = here
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.model: Any = Applies(forward, layers=layers).double()
        if here is not None:
            megacompile(self.model, mesh=here.mesh, device=here.device, **options)
        self.params: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self.seen: list[Tensor] = []
        self.counts: list[int] = []

    def loss(self, number: int, layers: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        if self.here is not None:
            rows = rows.chunk(RANKS)[self.here.rank].to(self.here.device)
        return self.model(rows, layers)

    def backward(self, micro: Micro) -> None:
        """Of a micro-batch; with its hook."""
        if micro.zeroes is not None:
            SGD(self.params.values()).zero_grad(set_to_none=micro.zeroes)
            self.counts.append(self.waiting())
        if micro.before:
            (micro.before * self.params["layers.2.weight"].square().sum()).backward()
        marked = self.here is not None and not micro.last
        hooks = {"sees": self.keep, "changes": lambda gradient: gradient * 1.0}
        weight = self.params["layers.1.weight"]
        with ExitStack() as stack:
            if micro.hook:
                stack.callback(weight.register_hook(hooks[micro.hook]).remove)
            if marked:
                stack.enter_context(accumulate(self.model))
            losses = [self.loss(number, micro.layers) for number in micro.numbers]
            if micro.penalty:
                squares: Any = self.params["layers.0.weight"].square().sum()
                whole_of_them = squares if self.here is None else squares.full_tensor()
                losses.append(micro.penalty * whole_of_them)
            torch.stack(losses).sum().backward()
            if micro.asks:  # for a gradient, and for that of one parameter alone
                (asked,) = torch.autograd.grad(self.loss(7, 3), [self.params["layers.0.bias"]])
                self.keep(asked)
                self.loss(8, 3).backward(inputs=[self.params["layers.1.bias"]])
        self.counts.append(self.waiting())

    def keep(self, gradient: Tensor) -> None:
        self.seen.append(whole(gradient))

    def waiting(self) -> int:
        """How many gradients wait for their sum over replicas."""
        grads: list[Any] = [param.grad for param in self.params.values()]
        shared = [grad for grad in grads if hasattr(grad, "to_local")]
        return sum(bool(error_of(grad.to_local, OptimizerError)) for grad in shared)

    def found(self) -> Values:
        """All gradients, and what hooks saw: a collective."""
        return gradients(self.model) | {f"seen {i}": each for i, each in enumerate(self.seen)}


@dataclass(frozen=True)
class Micro:
    """A micro-batch: its rows, and what else is done with it.

    Attributes:
        numbers: of its calls of the model, which are in one loss.
        zeroes: gradients are zeroed before it, to None or in place.
        before: the factor of a penalty that has a backward of its own before it.
        hook: on a parameter, for its duration, which looks or has a part in the gradient.
        penalty: the factor of one in its loss.
    """

    numbers: tuple[int, ...]
    last: bool = False
    layers: int = 3
    zeroes: bool | None = None
    before: float = 0.0
    hook: str = ""
    penalty: float = 0.0
    asks: bool = False


LAST = Micro((1,), last=True)
# Micro-batches, and how many of 6 gradients lack their sum behind each, and behind each zeroing.
LOOPS: dict[str, tuple[list[Micro], list[int]]] = {
    "behind one that was summed": (
        [Micro((0,), last=True), Micro((1,)), Micro((2,)), Micro((3,), last=True)],
        [0, 6, 6, 0],
    ),
    "hooks see means": (  # of the other graph the sum waits
        [Micro((0,), hook="sees"), replace(LAST, hook="sees")],
        [2, 0],
    ),
    "penalties": ([Micro((0,), before=0.3, penalty=0.1), replace(LAST, penalty=0.2)], [0, 0]),
    "two calls in a loss": ([Micro((0, 1)), Micro((2, 3), last=True)], [0, 0]),
    "somebody asks in between": ([Micro((0,), asks=True), LAST], [5, 0]),
    "zeroed, and in place": (
        [Micro((0,)), Micro((2,), zeroes=True), replace(LAST, zeroes=False)],
        [6, 0, 6, 0, 0],
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {"streamed": {}, "resident": {"resident": "all"}}


def looped(name: str, kind: str) -> Check:
    """A loop's gradients are those of the plain model, and summed when they are due."""

    def as_plain(here: Here) -> None:
        plain, ours = Loop(None), Loop(here.pairs, **OPTIONS[kind])
        micros, counts = LOOPS[name]
        for micro in micros:
            plain.backward(micro)
            ours.backward(micro)
        compiled = here.device == "cuda" and name == "two calls in a loss"  # both wait there
        assert ours.counts == ([6, 0] if compiled else counts), ours.counts
        assert not differing(ours.found(), plain.found(), NEAR)

    return as_plain


def refused(kind: str) -> Check:
    """Who needs a gradient that is not summed yet is told so, and everything goes on after that."""

    def is_refused(here: Here) -> None:
        loop, plain = Loop(here.pairs, **OPTIONS[kind]), Loop(None)
        params, weight = list(loop.params.values()), loop.params["layers.0.weight"]
        optimizer = AdamW(params, lr=0.01)
        before = [whole(param) for param in params]
        loop.backward(Micro((0,)))
        grad: Any = weight.grad
        uses: dict[str, Callable[[], object]] = {
            "step": optimizer.step,
            "clip": lambda: clip_grad_norm_(params, 1.0),
            "norm": lambda: grad.norm(),
            "part": lambda: grad.to_local(),
            "multiply": lambda: grad.mul_(0.5),
            "print": lambda: repr(grad),
            "penalty": lambda: weight.square().sum().backward(),
        }
        for use in uses.values():
            with pytest.raises(OptimizerError, match=r"'layers\.0\.weight'"):
                use()
        assert tuple(grad.shape) == (WIDTH, WIDTH) and not optimizer.state
        assert all(a.equal(whole(b)) for a, b in zip(before, params, strict=True))
        loop.backward(LAST)
        plain.backward(Micro((0,)))
        plain.backward(LAST)
        assert not differing(loop.found(), plain.found(), NEAR)
        optimizer.step()
        added: dict[str, dict[str, Any]] = {
            "layers.1.weight": {"hook": "changes"},
            "layers.0.weight": {"penalty": 0.2},
        }
        for name, extra in added.items():
            optimizer.zero_grad()
            loop.backward(Micro((0,)))
            with pytest.raises(OptimizerError, match=name):  # autograd would add to it
                loop.backward(replace(LAST, **extra))
        optimizer.zero_grad()
        loop.backward(Micro((0,)))
        loop.backward(replace(LAST, layers=2))
        with pytest.raises(OptimizerError, match=r"layers\.2"):  # the last did not come to it
            optimizer.step()

    return is_refused


def announced(here: Here) -> None:
    """A loop of Accelerate says which micro-batch is the last; a step comes before that."""

    class GradientState:  # as in Accelerate, one for the process
        sync_gradients = False

    module: Any = SimpleNamespace(GradientState=lambda: GradientState)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    optimizer, x = AdamW(model.parameters()), torch.ones(2, WIDTH, device=here.device)
    megacompile(model, mesh=here.pairs.mesh, device=here.device, optimizer=optimizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "accelerate.state", module)
        model(x).sum().backward()
        with pytest.raises(OptimizerError, match="summed"):
            optimizer.step()
        GradientState.sync_gradients = True
        model(x).sum().backward()
        optimizer.step()
        assert len(optimizer.state) == 6


FOUR: dict[str, Check] = {
    **{name: looped(name, "streamed") for name in LOOPS},
    "resident, behind one that was summed": looped("behind one that was summed", "resident"),
    "refused, streamed": refused("streamed"),
    "refused, resident": refused("resident"),
    "announced": announced,
}
