"""Micro-batches of ranks that replicate what others shard: 2 x 2 of them.

A backward that another one follows sums over the ranks that shard alone. The last one sums over
replicas, once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

import megacompile as package
from megacompile import accumulate, megacompile
from megacompile.errors import ModelError, OptimizerError
from megacompile.runtime.params.unsummed import unsummed
from tests.ranks.here import Check, Here, Values, differing, gradients, whole

WIDTH = 5
RANKS = 4
ROWS = 4  # of all ranks together
NEAR = 1e-11  # of float64


class Net(nn.Module):
    """Some layers, one of which a call may leave out, with a graph break in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, layers: int = 3) -> Tensor:
        x = x + torch.tanh(self.layers[0](x))
        x = x + torch.tanh(self.layers[1](x))
        torch._dynamo.graph_break()
        if layers > 2:
            x = x + torch.tanh(self.layers[2](x))
        return x.square().mean()


class Loop:
    """A model that 2 x 2 ranks share, or the plain one (without `here`) with the rows of all."""

    def __init__(self, here: Here | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.here = here
        self.model: Any = Net().double()
        if here is not None:
            megacompile(self.model, mesh=here.mesh, device=here.device, **options)
        self.params: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self.seen: list[Tensor] = []

    def not_last(self) -> AbstractContextManager[None]:
        """Around the backward of a micro-batch that is not the last."""
        return nullcontext() if self.here is None else accumulate(self.model)

    def loss(self, number: int, **options: Any) -> Tensor:
        """Of a micro-batch."""
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        if self.here is not None:
            rows = rows.chunk(RANKS)[self.here.rank].to(self.here.device)
        loss: Tensor = self.model(rows, **options)
        return loss

    def squares(self) -> Tensor:
        """A penalty on a parameter, outside of the model."""
        squares: Any = self.params["layers.0.weight"].square().sum()
        found: Tensor = squares if self.here is None else squares.full_tensor()
        return found

    def keep(self, gradient: Tensor) -> None:
        """As a hook: note what it sees."""
        self.seen.append(whole(gradient))

    def waiting(self) -> int:
        """How many gradients wait for their sum over replicas."""
        return sum(unsummed(param.grad) for param in self.params.values())


# What a loop may do: each gives how many gradients lacked their sum behind each backward.


def every(loop: Loop) -> list[int]:
    """Behind one that was summed, one that was not, then the last."""
    loop.loss(0).backward()
    found = [loop.waiting()]
    for number in (1, 2):
        with loop.not_last():
            loop.loss(number).backward()
        found.append(loop.waiting())
    loop.loss(3).backward()
    return [*found, loop.waiting()]


def another_graph(loop: Loop) -> list[int]:
    """The last one does not come to what the one before has used."""
    with loop.not_last():
        loop.loss(0).backward()
    found = [loop.waiting()]
    loop.loss(1, layers=2).backward()
    return [*found, loop.waiting()]


def hook(loop: Loop) -> list[int]:
    """A hook sees means over all ranks, in each of them, and a parameter of the same graph too."""
    handle = loop.params["layers.1.weight"].register_hook(loop.keep)
    with loop.not_last():
        loop.loss(0).backward()
    found = [loop.waiting()]
    loop.loss(1).backward()
    handle.remove()
    return [*found, loop.waiting()]


def hook_at_last(loop: Loop) -> list[int]:
    """What waits for its sum is added to by autograd."""
    with loop.not_last():
        loop.loss(0).backward()
    found = [loop.waiting()]
    handle = loop.params["layers.1.weight"].register_hook(lambda gradient: gradient * 1.0)
    loop.loss(1).backward()
    handle.remove()
    return [*found, loop.waiting()]


def penalty(loop: Loop) -> list[int]:
    """Parameters are used outside of the model, in both micro-batches, and before both."""
    (0.3 * loop.params["layers.2.weight"].square().sum()).backward()
    with loop.not_last():
        (loop.loss(0) + 0.1 * loop.squares()).backward()
    found = [loop.waiting()]
    (loop.loss(1) + 0.2 * loop.squares()).backward()
    return [*found, loop.waiting()]


def penalty_at_last(loop: Loop) -> list[int]:
    """The same in the last micro-batch alone."""
    with loop.not_last():
        loop.loss(0).backward()
    found = [loop.waiting()]
    (loop.loss(1) + 0.2 * loop.squares()).backward()
    return [*found, loop.waiting()]


def calls(loop: Loop) -> list[int]:
    """Two calls of the model in each loss."""
    with loop.not_last():
        (loop.loss(0) + loop.loss(1)).backward()
    found = [loop.waiting()]
    (loop.loss(2) + loop.loss(3)).backward()
    return [*found, loop.waiting()]


def asks(loop: Loop) -> list[int]:
    """Somebody asks for a gradient in between, and for that of one parameter alone."""
    with loop.not_last():
        loop.loss(0).backward()
        (asked,) = torch.autograd.grad(loop.loss(1), [loop.params["layers.0.bias"]])
        loop.loss(2).backward(inputs=[loop.params["layers.1.bias"]])
    found = [loop.waiting()]
    loop.keep(asked)
    loop.loss(3).backward()
    return [*found, loop.waiting()]


def zeroes(loop: Loop) -> list[int]:
    """Gradients are zeroed, in place too, before there was a last backward."""
    optimizer = SGD(loop.params.values())
    found = []
    for to_none in (True, False):
        with loop.not_last():
            loop.loss(0).backward()
        found.append(loop.waiting())
        optimizer.zero_grad(set_to_none=to_none)
        found.append(loop.waiting())
    loop.loss(1).backward()
    return [*found, loop.waiting()]


OPTIONS: dict[str, dict[str, Any]] = {"streamed": {}, "resident": {"resident": "all"}}
LOOPS: list[tuple[Callable[[Loop], list[int]], list[int]]] = [  # with how many of 6 lack their sum
    (every, [0, 6, 6, 0]),
    (another_graph, [6, 0]),
    (hook, [2, 0]),  # the other graph's
    (hook_at_last, [6, 0]),
    (penalty, [0, 0]),
    (penalty_at_last, [6, 0]),
    (calls, [0, 0]),
    (asks, [5, 0]),
    (zeroes, [6, 0, 6, 0, 0]),
]


def looped(body: Callable[[Loop], list[int]], expected: list[int], kind: str) -> Check:
    """A loop's gradients are those of the plain model, and summed when they are due."""

    def as_plain(here: Here) -> None:
        here = here.pairs
        plain, ours = Loop(None), Loop(here, **OPTIONS[kind])
        body(plain)
        counts = body(ours)
        compiled = here.device == "cuda" and body is calls  # both calls wait for their sum there
        assert counts == ([6, 0] if compiled else expected)
        assert not differing(found(ours), found(plain), NEAR)

    return as_plain


def found(loop: Loop) -> Values:
    return gradients(loop.model) | {f"seen {i}": seen for i, seen in enumerate(loop.seen)}


def refused(kind: str) -> Check:
    """Who needs a gradient that is not summed yet is told so, and everything goes on after that."""

    def is_refused(here: Here) -> None:
        loop, plain = Loop(here.pairs, **OPTIONS[kind]), Loop(None)
        params, weight = list(loop.params.values()), loop.params["layers.0.weight"]
        optimizer = AdamW(params, lr=0.01)
        before = [whole(param) for param in params]
        with loop.not_last():
            loop.loss(0).backward()
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
        with pytest.raises(ModelError, match="Net"):
            package.unmegacompile(loop.model)
        assert tuple(grad.shape) == (WIDTH, WIDTH) and not optimizer.state
        assert all(a.equal(whole(b)) for a, b in zip(before, params, strict=True))
        loop.loss(1).backward()
        plain.loss(0).backward()
        plain.loss(1).backward()
        assert not differing(found(loop), found(plain), NEAR)
        optimizer.step()

    return is_refused


def announced(here: Here) -> None:
    """A loop of Accelerate says which micro-batch is the last, and a step comes before that all the
    same: with `optimizer=` too."""

    class GradientState:  # as in Accelerate, one for the process
        sync_gradients = True

    module: Any = ModuleType("accelerate.state")
    module.GradientState = lambda: GradientState
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "accelerate.state", module)
        here = here.pairs
        model = Net().double()
        optimizer = AdamW(model.parameters(), lr=0.01)
        megacompile(model, mesh=here.mesh, device=here.device, optimizer=optimizer)
        x = torch.ones(2, WIDTH, dtype=torch.float64, device=here.device)
        GradientState.sync_gradients = False
        model(x).backward()
        with pytest.raises(OptimizerError, match="AdamW"):
            optimizer.step()
        GradientState.sync_gradients = True
        model(x).backward()
        optimizer.step()
        assert len(optimizer.state) == 6


def traced(*, in_backward: bool) -> Check:
    """In a step of two micro-batches both sum over the ranks that shard, and the last over
    replicas."""

    def once(here: Here) -> None:
        here = here.pairs
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        optimizer = AdamW(model.parameters(), lr=0.01)
        options: Any = {"optimizer": optimizer} if in_backward else {}
        megacompile(model, mesh=here.mesh, device=here.device, **options)
        x = torch.ones(2, WIDTH, device=here.device)
        labels: list[str] = []
        for _ in range(2):
            with package.trace(model) as trace:
                with accumulate(model):
                    model(x).sum().backward()
                model(x).sum().backward()
                optimizer.step()
            optimizer.zero_grad()
            labels = [span.op.name for span in trace.spans if "REDUCE" in span.op.name]
        first = [f"{k}REDUCE_SCATTER" for k in (2, 1, 0)]
        last = [f"{k}{name}" for k in (2, 1, 0) for name in ("REDUCE_SCATTER", "ALL_REDUCE")]
        assert labels[:3] == first and sorted(labels[3:]) == sorted(last)

    return once


FOUR: dict[str, Check] = {
    **{f"{body.__name__}, streamed": looped(body, counts, "streamed") for body, counts in LOOPS},
    "every, resident": looped(every, LOOPS[0][1], "resident"),
    "penalty_at_last, resident": looped(penalty_at_last, [6, 0], "resident"),
    "refused, streamed": refused("streamed"),
    "refused, resident": refused("resident"),
    "announced": announced,
    "traced": traced(in_backward=False),
    "traced, in the backward": traced(in_backward=True),
}
