"""DistributedDataParallel around, inside of and before a megacompiled model, next to a plain one's.

Where ranks share the model, one around it passes through.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from megacompile import megacompile
from megacompile.errors import ModelError
from tests import inside
from tests.ranks.here import Check, Here, contents, differing, gradients, named, same_in_all

STEPS = 3


class Net(nn.Module):
    """Some layers; with `breaks`, two captured graphs, and code that is never captured."""

    breaks = False

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        x = torch.relu(self.layers[0](x))
        if self.breaks:
            torch._dynamo.graph_break()
            x = uncaptured(x, self.head.weight)
        for layer in self.layers[1:]:
            x = torch.relu(layer(x))
        return self.head(self.norm(x))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncaptured(x: Tensor, weight: Tensor) -> Tensor:
    return x + nn.functional.linear(x, weight).mean()


class Broken(Net):
    breaks = True


class Wide(Net):
    """Its gradients take several of DDP's buckets."""

    def __init__(self) -> None:
        super().__init__(512)


class Sometimes(Net):
    """One layer is never used, and another only on one rank, in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return super().forward(self.other(x) if other else x)


class Normed(Net):
    """Has buffers, which DDP sends from the first rank to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        return super().forward(self.first(x))


class UsersLine(Net):
    """A line of the user runs before the captured graph: buckets move behind that call."""

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))


def around(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(megacompile(model), **options)


def before(model: nn.Module, **options: Any) -> nn.Module:
    wrapped = DistributedDataParallel(model, **options)
    megacompile(model)
    return wrapped


def within(model: nn.Module, **options: Any) -> nn.Module:
    return megacompile(DistributedDataParallel(model, **options))


def twins(kind: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = kind()
    return plain, copy.deepcopy(plain)


def loss_of(model: nn.Module, k: int, rank: int) -> Tensor:
    return model(inputs(100 * k + rank), rank == k % 2).square().mean()


def same(plain: nn.Module, ours: nn.Module, near: float = 0.0) -> None:
    """Parameters, buffers and gradients."""
    states = [m.state_dict() | gradients(m) for m in (plain, ours)]
    wrong = differing(states[1], states[0], near)
    assert not wrong, "\n".join(wrong)


def trains(
    wrap: Callable[..., nn.Module],
    kind: type[Net],
    *,
    no_sync: bool = False,
    hooked: bool = False,
    **options: Any,
) -> Check:
    """Clipped AdamW steps are those of plain DDP; `hooked`: with communication hooks."""

    def as_plain(here: Here) -> None:
        plain, ours = twins(kind)
        wraps: list[Any] = [DistributedDataParallel(plain, **options), wrap(ours, **options)]
        optimizers: list[Optimizer] = []
        for wrapped in wraps:
            if hooked:
                wrapped.register_comm_hook(None, fp16_compress_hook)
                optimizers.append(ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, lr=0.01))
            else:
                optimizers.append(AdamW(wrapped.parameters(), lr=0.01))
        for k in range(STEPS):
            for wrapped, optimizer in zip(wraps, optimizers, strict=True):
                optimizer.zero_grad()
                if no_sync and k % 2:
                    with wrapped.no_sync():
                        loss_of(wrapped, k + 50, here.rank).backward()
                loss_of(wrapped, k, here.rank).backward()
            same(plain, ours)
            for wrapped, optimizer in zip(wraps, optimizers, strict=True):
                nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
                optimizer.step()
            same(plain, ours)
        same_in_all(here, dict(ours.named_parameters()))
        assert kind is not Wide or len(inside.graphs(ours)) == 1, "split at DDP's buckets"

    return as_plain


def passes_through(here: Here) -> None:
    """Around a model that ranks share, with buffers, `no_sync()` and evaluation in between."""
    plain, ours = twins(Normed)
    megacompile(ours, mesh=here.mesh, device="cpu")
    options: Any = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    pairs = []
    for model in (plain, ours):
        wrapped = DistributedDataParallel(model, **options)
        pairs.append((wrapped, AdamW(model.parameters(), lr=0.01)))
    for k in range(2 * STEPS):
        losses = []
        for wrapped, optimizer in pairs:
            with nullcontext() if k % 2 else wrapped.no_sync():
                loss = loss_of(wrapped, k, here.rank)
                loss.backward()
            if k % 2:
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    loss = loss + 100.0 * loss_of(wrapped.eval(), k, here.rank)
                wrapped.train()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0.0)
    assert {type(value) for value in pairs[1][0].state_dict().values()} == {Tensor}
    wrong = differing(contents(ours, pairs[1][1]), contents(plain, pairs[0][1]), 1e-4)
    assert not [name for name in wrong if "/" not in name], wrong
    assert len(set(here.all_say(losses[0].item()))) == 2, "rows of its own"


def by_hand(here: Here) -> None:
    """Collectives on gradients, and on parameters whose update is in flight."""
    plain, ours = twins(Wide)
    megacompile(ours)
    for model in (plain, ours):
        optimizer = AdamW(model.parameters(), lr=0.01)
        for k in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, k, here.rank).backward()
            for param in model.parameters():
                assert param.grad is not None
                if k == 2:
                    dist.broadcast(param.grad, 1)
                else:
                    dist.all_reduce(param.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            for param in model.parameters():
                with torch.no_grad():
                    dist.broadcast(param if k % 2 else param.data, k % 2)
    same(plain, ours)


def update_in_backward(here: Here) -> None:
    """With `optimizer=` it is refused, before any parameter has changed."""

    def wrap_first(model: nn.Module, optimizer: Optimizer) -> None:
        wrapped = DistributedDataParallel(model)
        megacompile(model, optimizer=optimizer)
        loss_of(wrapped, 0, here.rank).backward()

    attempts: list[Callable[[nn.Module, Optimizer], object]] = [
        wrap_first,
        lambda model, of: DistributedDataParallel(megacompile(model, optimizer=of)),
        lambda model, of: megacompile(DistributedDataParallel(model), optimizer=of),
    ]
    for attempt in attempts:
        plain, ours = twins(Net)
        with pytest.raises(ModelError, match="optimizer="):
            attempt(ours, AdamW(ours.parameters(), lr=0.01))
        same(plain, ours)


def no_bucket_moves(here: Here) -> None:
    """The plan has none on the device, nor does one go there that was planned for it before."""
    _, ours = twins(Net)
    wrapped = DistributedDataParallel(megacompile(ours, gpu_memory="1GiB"))
    for k in range(2):
        loss_of(wrapped, k, here.rank).backward()
    assert not inside.residents(ours)
    _, later = twins(UsersLine)
    megacompile(later, gpu_memory="1GiB")
    loss_of(later, 0, here.rank).backward()
    later.zero_grad()
    says = pytest.warns(UserWarning, match="Distributed")
    with nullcontext() if here.rank else says:  # the first rank speaks for all
        loss_of(DistributedDataParallel(later), 1, here.rank).backward()
    assert not inside.residents(later)


def made_for_another_device(here: Here) -> None:
    """As DDP is that was made over parameters on a GPU, before megacompile()."""
    _, ours = twins(Net)
    wrapped: Any = before(ours)
    wrapped.device_type = "cuda"
    with pytest.raises(ModelError, match="on cuda"):
        loss_of(wrapped, 0, here.rank)


WRAPS: dict[str, Check] = {
    "around": trains(around, Broken, no_sync=True, gradient_as_bucket_view=True),
    "around, static": trains(around, Wide, static_graph=True, bucket_cap_mb=1),
    "before, unused": trains(before, Sometimes, find_unused_parameters=True),
    "around, unused": trains(around, Sometimes, find_unused_parameters=True),
    "before": trains(before, Broken, no_sync=True),
    "within": trains(within, Broken),
    "around, hooked": trains(around, Net, hooked=True),
}
TWO: dict[str, Check] = {
    **{name: WRAPS[name] for name in [*WRAPS][:3]},
    **named(passes_through, by_hand, update_in_backward, no_bucket_moves, made_for_another_device),
}
MORE: dict[str, Check] = {name: WRAPS[name] for name in [*WRAPS][3:]}
