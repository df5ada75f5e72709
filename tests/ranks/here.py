"""Where a check runs: in each rank of `torchrun`, whose ranks share models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from megacompile.errors import MegacompileError
from tests.zoo import equal

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Here:
    """This rank, the mesh of all of them, and a folder that they share."""

    mesh: DeviceMesh
    folder: Path

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def count(self) -> int:
        return dist.get_world_size()

    @property
    def device(self) -> str:
        return self.mesh.device_type

    @property
    def pairs(self) -> Here:
        """The same ranks as 2 x 2: replicas of what two share."""
        return self.meshed(2, 2)

    def meshed(self, *sizes: int) -> Here:
        return Here(init_device_mesh(self.device, sizes), self.folder)

    def all_say(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found


Check = Callable[[Here], None]


def named(*checks: Check) -> dict[str, Check]:
    """Checks by the names of their functions."""
    return {each.__name__.replace("_", " "): each for each in checks}


def error_of(call: Callable[[], object], of: type[Exception] = MegacompileError) -> str:
    """The error that a call ends with, as its class and its text; "" where it ends with none."""
    try:
        call()
    except of as error:
        return f"{type(error).__name__}: {error}"
    return ""


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that ranks may share, on the host: a collective then."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()


def contents(model: nn.Module, optimizer: Optimizer) -> Values:
    """Parameters, buffers and states, whole and plain: a collective."""
    found = {name: whole(value) for name, value in model.state_dict().items()}
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    for i, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[f"{order[i]}/{key}"] = whole(value)
    return found


def gradients(model: nn.Module) -> Values:
    """All that there are, whole: a collective."""
    found = {name: param.grad for name, param in model.named_parameters()}
    return {f"{name}.grad": whole(g) for name, g in found.items() if g is not None}


def differing(ours: Values, theirs: Values, near: float = 0.0) -> list[str]:
    """The names of tensors that differ in any bit, or by more than `near` of a tensor's norm."""
    found = [f"only in one: {name}" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if a.shape != b.shape:
            found.append(f"{name}: {tuple(a.shape)} and {tuple(b.shape)}")
        elif not equal(a, b):
            apart = float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
            found += [] if apart <= near else [f"{name}: relative {apart:.2g}"]
    return found


def same_in_all(here: Here, values: Values) -> None:
    first: list[Any] = [values]
    dist.broadcast_object_list(first, 0)
    assert not differing(values, first[0]), "ranks differ"
