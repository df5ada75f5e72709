"""Ranks whose rates and whose work are not the same, and what `explain` says of them."""

from __future__ import annotations

import functools
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import megacompile as package
from megacompile.cost import ranks, rates
from megacompile.cost.hardware import H200, Hardware
from megacompile.errors import TraceError

FAST = H200.replace(matmul32_tflop_s=1e-2, launch_s=0.0, copy_s=0.0, sustained=1.0)
RATES = (FAST, FAST.replace(matmul32_tflop_s=8e-3, h2d_gb_s=30.0, host_memory_gb_s=100.0))
LAYERS = 3
STEPS = 4
MICRO = 2  # batches of the step of the last trace
LATE_S = 1.0  # rank 1 begins its last trace later than rank 0
WIDTH, ROWS, MORE = 256, 64, 256  # rank 1 has so many times the rows


class Net(nn.Module):
    """Some layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        result: Tensor = x.square().mean()
        return result


def run(mesh: Any, folder: Path) -> dict[str, Any]:
    """One rank."""
    rank = dist.get_rank()
    platform.node = lambda: f"host{rank}"
    os.environ["XDG_CACHE_HOME"] = str(folder / f"rates of {rank}")
    found: dict[str, Any] = {"unknown": _explained(*_model(mesh, ROWS))}
    found |= _exchanged(mesh)
    if rank == 0:
        _keep(RATES[0])
    model, data, optimizer = _model(mesh, ROWS)
    found["one has rates"] = _explained(model, data, optimizer)
    _keep(RATES[rank])
    model, data, optimizer = _model(mesh, ROWS * (MORE if rank else 1))
    found["rates"] = _explained(model, data, optimizer)
    found["given"] = package.explain(model, hardware=H200, changes=False).to_dict()
    with package.trace(model) as trace:
        found["on"] = _refused(trace)
        for _ in range(STEPS):
            _step(model, data, optimizer)
    found["alone"] = package.explain(model, changes=False).to_dict()
    found["told"] = [asdict(each) for each in trace.compare_ranks()["Net"]]
    found["text"] = str(package.explain(model, changes=False))
    found["traced"] = package.explain(model, changes=False).to_dict()
    time.sleep(LATE_S if rank else 0.0)
    with package.trace(model) as saved:
        for _ in range(MICRO - 1):
            model(data).backward()
        _step(model, data, optimizer)
    saved.save(str(folder / "trace.json"))
    found["saved"] = len(saved.rank_steps["Net"])
    with package.trace(model) as nothing:
        pass
    found["nothing"] = nothing.compare_ranks()
    plain = package.megacompile(Net(), device="cpu", progress=False)
    with package.trace(plain) as nobody:
        pass
    found["no ranks"] = _refused(nobody)
    return found


def _exchanged(mesh: Any) -> dict[str, Any]:
    """What ranks measure together where they have GPUs; GB/s."""
    replicas = init_device_mesh("cpu", (mesh.size(), 1))
    cpu = torch.device("cpu")
    with mock.patch.object(ranks, "_BYTES", 2**22):
        gather_gb_s, start_s = ranks._interconnect(mesh, cpu, functools.partial(ranks.told, mesh))
        told = functools.partial(ranks.told, replicas)
        return {"gather": (gather_gb_s, start_s), "sum": ranks._network(replicas, cpu, told)}


def _keep(hardware: Hardware) -> None:
    path = rates._file(torch.device("cpu"))
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(hardware)))


def _model(mesh: Any, rows: int) -> tuple[nn.Module, Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = package.megacompile(Net(), mesh=mesh, device="cpu", progress=False)
    return model, torch.randn(rows, WIDTH), torch.optim.AdamW(model.parameters())


def _step(model: nn.Module, data: Tensor, optimizer: torch.optim.Optimizer) -> None:
    model(data).backward()
    optimizer.step()
    optimizer.zero_grad()


def _explained(model: nn.Module, data: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    _step(model, data, optimizer)
    return package.explain(model, changes=False).to_dict()


def _refused(trace: package.Trace) -> str:
    try:
        trace.compare_ranks()
    except TraceError as error:
        return str(error)
    return ""
