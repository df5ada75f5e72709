"""What several ranks do that needs more than one of them: refusals, and how many collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from megacompile import megacompile
from megacompile.errors import MegacompileError
from megacompile.runtime.device.checksum import checksum
from megacompile.runtime.model.lookup import streamed_model


def said_by(refused: Callable[[], Any]) -> str:
    """The error that a call ends with; "" where it ends with none."""
    try:
        refused()
    except MegacompileError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run(mesh: Any) -> dict[str, Any]:
    """What this rank was told, by what was wrong."""
    rank = dist.get_rank()
    first, second = nn.Linear(4, 4), nn.Linear(4, 4 + rank)
    frozen = nn.Linear(4, 4)
    frozen.weight.requires_grad_(rank == 0)
    one_has_a_buffer, other_buffers = nn.Linear(4, 4), nn.BatchNorm1d(4 + rank, affine=False)
    if rank == 1:
        one_has_a_buffer.register_buffer("late", torch.ones(3))
    beside = nn.Sequential(nn.Linear(4, 4), other_buffers)
    others = {"state_dtype": "int8", "lookahead": 3, "lowering": "inductor"}
    return {
        "other options": {
            name: said_by(lambda: _with(mesh, {name: value} if rank else {}))  # noqa: B023
            for name, value in others.items()
        },
        "other progress": said_by(lambda: _with(mesh, {"progress": bool(rank)})),
        "other budgets": said_by(lambda: _evaluates(mesh, resident=3000 if rank else 10**6)),
        "least memory": _planned(mesh, "2MiB" if rank else "250KiB"),
        "a buffer in one": said_by(lambda: megacompile(one_has_a_buffer, mesh=mesh, device="cpu")),
        "another buffer": said_by(lambda: megacompile(beside, mesh=mesh, device="cpu")),
        "raises in one": _raises_in_one(mesh),
        "goes on": said_by(lambda: megacompile(nn.Linear(4, 4), mesh=mesh, device="cpu")),
        "another shape": said_by(lambda: megacompile(second, mesh=mesh, device="cpu")),
        "frozen in one": said_by(lambda: megacompile(frozen, mesh=mesh, device="cpu")),
        "is as it was": type(second.weight) is nn.Parameter,
        "only replicas": said_by(
            lambda: megacompile(first, mesh=init_device_mesh("cpu", (2, 1)), device="cpu")
        ),
        "not in the mesh": said_by(
            lambda: megacompile(first, mesh=DeviceMesh("cpu", [0]), device="cpu")
        ),
        "collectives": _collectives(mesh),
        "values": values(mesh),
    }


def _with(mesh: Any, options: dict[str, Any]) -> nn.Module:
    return megacompile(nn.Linear(4, 4), mesh=mesh, device="cpu", **options)


def _evaluates(mesh: Any, **options: Any) -> None:
    """Two forwards without a backward, in which buckets could stay on the device."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.randn(2, 16)
    with torch.no_grad():
        plain = net(x)
        megacompile(net, mesh=mesh, device="cpu", **options)
        assert net(x).equal(plain) and net(x).equal(plain)


def _planned(mesh: Any, gpu_memory: str) -> tuple[int, list[int]]:
    """Device memory that plans may use, and the buckets that live there by the plan of a step."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    megacompile(net, mesh=mesh, device="cpu", gpu_memory=gpu_memory)
    net(torch.ones(4, 64)).sum().backward()
    streamed = streamed_model(net, "test")
    (schedule,) = streamed.schedules()
    compiler: Any = streamed.buckets.plans.compiler
    return compiler.budget.limit_bytes, sorted(schedule.plan.resident)


def values(mesh: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters and buffers of a model that every rank has drawn for itself, those of the
    first rank's, and what there is when that was loaded, whole."""
    first = _drawn(0)
    ours = megacompile(_drawn(dist.get_rank()), mesh=mesh, device="cpu")
    found = {"expected": _whole(first), "found": _whole(ours)}
    with torch.no_grad():
        for param in ours.parameters():
            param.zero_()
    ours.load_state_dict(first.state_dict())
    return found | {"loaded": _whole(ours)}


def _drawn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1), nn.Linear(64, 64))
    nan = torch.full((3,), torch.nan)
    net.register_buffer("nan", nan)
    net.register_buffer("flags", torch.tensor([True, seed == 0]))
    with torch.no_grad():
        net.get_buffer("1.running_mean").normal_()
        net.get_buffer("1.running_mean")[4] = torch.nan
        large = net.get_parameter("3.weight")  # which differs in one bit of its last element
        large.copy_(torch.arange(64.0 * 64).view(64, 64))
        large.view(torch.int32)[-1, -1] += seed
        nan.view(torch.int32)[2] += seed
    return net


def _raises_in_one(mesh: Any) -> str:
    """No error of megacompile's, in the middle: the other one has waited in a collective."""

    def broken(tensor: torch.Tensor) -> str:
        raise ValueError("bad memory")

    used = broken if dist.get_rank() == 1 else checksum
    with mock.patch("megacompile.runtime.model.sharding.checksum", used):
        try:
            megacompile(nn.Linear(4, 4), mesh=mesh, device="cpu")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in model.state_dict().items()
    }


def _collectives(mesh: Any) -> dict[str, int]:
    """How many a clipping makes, and the step behind it, though a rank has no rows of a bias."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    megacompile(model, mesh=mesh, device="cpu", lowering="inductor")
    optimizer = torch.optim.AdamW(model.parameters())
    counts: dict[str, int] = {}
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        with CommDebugMode() as mode:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        counts["clip_grad_norm_"] = mode.get_total_counts()
        with CommDebugMode() as mode:
            optimizer.step()
        counts["step"] = mode.get_total_counts()
        optimizer.zero_grad()
    return counts
