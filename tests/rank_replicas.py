"""Micro-batches of ranks that replicate what others shard: 2 x 2 of them.

A backward that another one follows sums over the ranks that shard alone. The last one sums over
replicas, once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import megacompile as package
from megacompile import accumulate, megacompile
from megacompile.runtime.params.unsummed import unsummed
from tests.rank_modes import LR, whole

WIDTH = 5
RANKS = 4
ROWS = 4  # of all ranks together
Marks = Callable[[], AbstractContextManager[None]]  # of a micro-batch that is not the last
Found = dict[str, Any]


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
    """A model that 2 x 2 ranks share, or the plain one (`mesh` None) with the rows of all."""

    def __init__(self, mesh: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.mesh = mesh
        self.model: Any = Net().double()
        if mesh is not None:
            megacompile(self.model, mesh=mesh, device=mesh.device_type, **options)
        self.params: dict[str, nn.Parameter] = dict(self.model.named_parameters())

    def not_last(self) -> AbstractContextManager[None]:
        """Around the backward of a micro-batch that is not the last."""
        return nullcontext() if self.mesh is None else accumulate(self.model)

    def loss(self, number: int, **options: Any) -> Tensor:
        """Of a micro-batch."""
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        if self.mesh is not None:
            rows = rows.chunk(RANKS)[dist.get_rank()].to(self.mesh.device_type)
        loss: Tensor = self.model(rows, **options)
        return loss

    def squares(self) -> Tensor:
        """A penalty on a parameter, outside of the model."""
        squares = self.params["layers.0.weight"].square().sum()
        return squares.full_tensor() if self.mesh is not None else squares  # type: ignore[attr-defined]

    def gradients(self) -> dict[str, Tensor]:
        """All of them, whole: a collective."""
        return {n: whole(p.grad).clone() for n, p in self.params.items() if p.grad is not None}

    def waiting(self) -> int:
        """How many gradients wait for their sum over replicas."""
        return sum(unsummed(param.grad) for param in self.params.values())


# What a loop may do: each gives all gradients, and how many lacked their sum behind each backward.


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
    param = loop.params["layers.1.weight"]
    seen: list[Tensor] = []

    def keep(gradient: Tensor) -> None:
        seen.append(whole(gradient).clone())

    handle = param.register_hook(keep)
    with loop.not_last():
        loop.loss(0).backward()
    found = [loop.waiting()]
    loop.loss(1).backward()
    handle.remove()
    loop.seen = seen  # type: ignore[attr-defined]
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
    loop.seen = [whole(asked).clone()]  # type: ignore[attr-defined]
    loop.loss(3).backward()
    return [*found, loop.waiting()]


def zeroes(loop: Loop) -> list[int]:
    """Gradients are zeroed, in place too, before there was a last backward."""
    optimizer = torch.optim.SGD(loop.params.values())
    found = []
    for to_none in (True, False):
        with loop.not_last():
            loop.loss(0).backward()
        found.append(loop.waiting())
        optimizer.zero_grad(set_to_none=to_none)
        found.append(loop.waiting())
    loop.loss(1).backward()
    return [*found, loop.waiting()]


LOOPS: dict[str, Callable[[Loop], list[int]]] = {
    each.__name__: each
    for each in (
        every,
        another_graph,
        hook,
        hook_at_last,
        penalty,
        penalty_at_last,
        calls,
        asks,
        zeroes,
    )
}
OPTIONS: dict[str, dict[str, Any]] = {"streamed": {}, "resident": {"resident": "all"}}
RESIDENT = ("every", "penalty_at_last")  # the others are of streamed buckets alone


def kinds(name: str) -> dict[str, dict[str, Any]]:
    """What a loop is tried with."""
    return OPTIONS if name in RESIDENT else {"streamed": {}}


def looped(name: str, mesh: Any, **options: Any) -> Found:
    """A loop, from its start to its gradients."""
    loop = Loop(mesh, **options)
    counts = LOOPS[name](loop)
    return {"counts": counts, "gradients": loop.gradients(), "seen": getattr(loop, "seen", [])}


def refusals(mesh: Any, **options: Any) -> Found:
    """What says that a gradient is not summed yet, and what goes on behind that."""
    loop = Loop(mesh, **options)
    params, weight = list(loop.params.values()), loop.params["layers.0.weight"]
    optimizer = torch.optim.AdamW(params, lr=LR)
    before = [whole(param).clone() for param in params]
    with loop.not_last():
        loop.loss(0).backward()
    uses: dict[str, Callable[[], object]] = {
        "step": optimizer.step,
        "clip": lambda: clip_grad_norm_(params, 1.0),
        "norm": lambda: weight.grad.norm(),  # type: ignore[union-attr]
        "part": lambda: weight.grad.to_local(),  # type: ignore[union-attr]
        "multiply": lambda: weight.grad.mul_(0.5),  # type: ignore[union-attr]
        "print": lambda: repr(weight.grad),
        "penalty": lambda: weight.square().sum().backward(),
        "unmegacompile": lambda: package.unmegacompile(loop.model),
    }
    found: Found = {name: said_by(use) for name, use in uses.items()}
    found["shape"] = tuple(weight.grad.shape)  # type: ignore[union-attr]
    now = [whole(param) for param in params]
    found["updated"] = not all(map(torch.equal, before, now)) or len(optimizer.state) > 0
    loop.loss(1).backward()
    found["gradients"] = loop.gradients()
    optimizer.step()
    found["params"] = [whole(param).clone() for param in params]
    return found


def said_by(use: Callable[[], object]) -> str:
    """The error that something raises."""
    try:
        use()
    except package.MegacompileError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def announced(mesh: Any) -> Found:
    """A loop of Accelerate says which micro-batch is the last, and then a step comes all the same:
    with `optimizer=` too."""
    state = _state()
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    megacompile(model, mesh=mesh, device=mesh.device_type, optimizer=optimizer)
    x = torch.ones(2, WIDTH, dtype=torch.float64, device=mesh.device_type)
    state.sync_gradients = False
    model(x).backward()
    found: Found = {"step": said_by(optimizer.step)}
    state.sync_gradients = True
    model(x).backward()
    optimizer.step()
    found["updated"] = len(optimizer.state)
    return found


def _state() -> Any:
    """As `accelerate.state.GradientState` is, one for the process."""
    import sys
    from types import ModuleType

    class GradientState:
        sync_gradients = True

    module: Any = ModuleType("accelerate.state")
    module.GradientState = lambda: GradientState
    sys.modules["accelerate.state"] = module
    return GradientState


def traced(mesh: Any, *, in_backward: bool) -> list[str]:
    """The collectives of a step of two micro-batches that sum gradients, as they ran."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    options: Any = {"optimizer": optimizer} if in_backward else {}
    megacompile(model, mesh=mesh, device=mesh.device_type, **options)
    x = torch.ones(2, WIDTH, device=mesh.device_type)
    labels: list[str] = []
    for _ in range(2):
        with package.trace(model) as trace:
            with accumulate(model):
                model(x).sum().backward()
            model(x).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        labels = [span.op.name for span in trace.spans if "REDUCE" in span.op.name]
    return labels


def run(mesh: Any) -> Found:
    """All of it, in a rank."""
    found: Found = {
        f"{name}, {kind}": looped(name, mesh, **options)
        for name in LOOPS
        for kind, options in kinds(name).items()
    }
    found["refusals"] = {kind: refusals(mesh, **options) for kind, options in OPTIONS.items()}
    found["traced"] = {each: traced(mesh, in_backward=each) for each in (False, True)}
    found["announced"] = announced(mesh)
    return found
