"""Loops over a model that ranks share, and over the plain one: both are `Loop`s.

A rank trains on its own rows, the plain model on those of all ranks at once: the mean of the
ranks' losses is the loss of all rows. Each step of a loop does something else; a step is over when
its gradients were clipped and used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

from megacompile import megacompile
from tests.ranks.here import Check, Here, Values, contents, differing, whole
from tests.ranks.modes import LR, WORDS, Words

EXACT = 1e-11  # of float64: the mean of all rows at once is another sum
DTYPES = ("float", "c10::BFloat16")  # as the profiler calls them
ROWS = 8  # of all ranks together


class Loop:
    """A model that is trained, in one of `ranks` that share it, or as the plain one of all."""

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

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.note(loss.detach(), of_rank=True)

    def train(self, step: int, number: int = 0) -> None:
        self.backward(self.model(self.batch(step, number)))

    def update(self, *, to_none: bool = True) -> None:
        self.note(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)

    def squares(self) -> Tensor:
        """A penalty on a parameter that is used outside of the model."""
        squares = self.model.head.weight.square().sum()
        return squares.full_tensor() if self.mesh is not None else squares

    def record(self) -> Values:
        """What became of it: a collective."""
        seen = torch.tensor(self.seen, dtype=torch.float64)
        return {"seen": seen} | contents(self.model, self.optimizer)


def gradients(loop: Loop) -> Iterator[None]:
    """Whoever has a part in gradients beside one backward of the model."""
    model = loop.model
    loop.backward(model(loop.batch(0)) + 0.1 * loop.squares())
    yield
    (0.1 * model.head.weight.square().sum()).backward()  # of its own, before the model's
    loop.train(1)
    yield
    loop.train(2)
    (0.1 * model.head.weight.square().sum()).backward()
    yield
    loop.backward(model(loop.batch(3, 0)) + model(loop.batch(3, 1)))
    yield
    loop.train(4, 0)
    loop.train(4, 1)
    yield
    params = [model.head.weight, model.embed.weight]
    loss = model(loop.batch(5))
    for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
        loop.note(gradient.norm())
        param.grad = gradient
    yield
    x = loop.batch(6)  # modules of the model, called by the loop itself
    hidden = model.embed(x)
    hidden = hidden + model.layers[1](hidden)
    loop.backward(functional.cross_entropy(model.head(hidden).flatten(0, 1), x.flatten()))
    yield

    def closure() -> float:
        loop.optimizer.zero_grad()
        loop.train(7)
        return loop.seen[-1]

    loop.optimizer.step(closure)
    yield


def hooks(loop: Loop) -> Iterator[None]:
    """Hooks on parameters see gradients that are means over ranks, and change them."""
    weight, bias = loop.model.head.weight, loop.model.layers[1][0].bias
    weight.register_hook(lambda gradient: gradient * 2)

    def clamp(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-0.01, 0.01)

    bias.register_post_accumulate_grad_hook(clamp)
    for step in range(2):
        loop.train(step)
        yield


def tensors(loop: Loop) -> Iterator[None]:
    """Whoever reads, sets and freezes parameters, gradients and states."""
    model = loop.model
    loop.train(0)
    loop.note(model.embed.weight.grad.norm())
    loop.optimizer.step()
    for param in model.parameters():
        loop.note(param.detach().square().sum())
        loop.note(param.grad.abs().max())
        loop.note(loop.optimizer.state[param]["exp_avg_sq"].sum())
        if loop.mesh is not None:
            rows = param.full_tensor().chunk(loop.ranks)
            assert param.to_local().equal(rows[dist.get_rank()])
    loop.optimizer.zero_grad()
    loop.train(1)
    weight = model.head.weight
    weight.grad = weight.grad * 0.5
    model.head.bias.grad = None
    yield
    smaller = nn.Parameter(weight.detach() * 0.9)
    smaller.grad = weight.grad
    torch.utils.swap_tensors(weight, smaller)  # a DTensor does not take `p.data = ...`
    del smaller
    with torch.no_grad():
        model.embed.weight.mul_(0.95)
        model.layers[0][0].bias.data.add_(0.01)
    loop.train(2)
    yield
    with torch.no_grad():
        loop.note(model(loop.batch(3, 1)), of_rank=True)
    with torch.inference_mode():
        loop.note(model(loop.batch(3, 2)), of_rank=True)
    for step, layers, bias in ((4, False, True), (5, True, False), (6, True, True)):
        model.layers[0].requires_grad_(layers)
        model.head.bias.requires_grad_(bias)
        loop.train(step)
        yield


class Broken(Words):
    """Code that is not captured uses a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        torch._dynamo.graph_break()
        bias = self.get_parameter("layers.0.0.bias")
        return loss + 0.1 * self.head.weight.square().mean() + bias[:4].sum()


LOOPS: dict[str, tuple[Callable[[Loop], Iterator[None]], type[nn.Module]]] = {
    "gradients": (gradients, Words),
    "hooks": (hooks, Words),
    "tensors": (tensors, Words),
    "gradients, breaks": (gradients, Broken),
    "tensors, breaks": (tensors, Broken),
}


def run(name: str, here: Here | None, ranks: int, **options: Any) -> Values:
    """A loop, from its start to what became of it; without ranks the plain one."""
    body, net = LOOPS[name]
    loop = Loop(net, None if here is None else here.mesh, ranks, **options)
    for k, _ in enumerate(body(loop)):
        loop.update(to_none=k % 2 == 0)
    return loop.record()


def check(name: str, **options: Any) -> Check:

    def as_plain(here: Here) -> None:
        plain = run(name, None, here.count)
        torch.compiler.reset()
        wrong = differing(run(name, here, here.count, **options), plain, EXACT)
        assert not wrong, "\n".join(wrong)

    return as_plain


def averages_in_grad_dtype(here: Here) -> None:
    """Half of the bytes go between ranks."""
    model = megacompile(nn.Linear(4, 4), mesh=here.mesh, device="cpu", grad_dtype=torch.bfloat16)
    loss = model(torch.ones(2, 4)).sum()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        loss.backward()
    path = here.folder / f"collectives-{here.rank}.json"
    recorded.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    sent = [e["args"]["Input type"] for e in events if "c10d::" in e.get("name", "")]
    assert sent and {"c10::BFloat16"} == {t for types in sent for t in types if t in DTYPES}, sent


TWO: dict[str, Check] = {
    **{name: check(name) for name in LOOPS if "breaks" not in name},
    "averages in grad_dtype": averages_in_grad_dtype,
}
MORE: dict[str, Check] = {
    **{name: check(name) for name in LOOPS if name not in TWO},
    **{f"compiled, {name}": check(name, lowering="inductor") for name in LOOPS},
}
