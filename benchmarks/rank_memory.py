"""Host memory of the ranks that share a model, on the CPU, against that of one process.

    python -m benchmarks.rank_memory --case exact
    torchrun --nproc-per-node 2 -m benchmarks.rank_memory --case exact --case in-backward

Pss counts pages that several processes map in parts, so that the sum over ranks is what the machine
has in use. What a process has before its model, behind a small one that was trained, is subtracted.
On the CPU the device's memory (slots with whole buckets, gradients, activations) is host memory
too; the plan says how much that is, and `of the host` is without it. glibc keeps memory that was
freed, in an arena for each thread; that is counted apart. The most is of RSS, read every 5 ms, with
what glibc keeps (MALLOC_MMAP_THRESHOLD_=65536 in the environment: it keeps little).

Cases: `exact` (default options on the CPU), `in-backward` (`optimizer=`).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.process_memory import shared_bytes
from benchmarks.report import publish
from megacompile import explain, megacompile

CASES = ("exact", "in-backward")
_ROWS = 8
_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, default=[])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    mesh = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = [_measure(case, args, mesh) for case in args.case or CASES]
    if mesh is None or dist.get_rank() == 0:
        publish("Host memory of ranks", rows, args.out)
    if mesh is not None:
        dist.destroy_process_group()


class Net(nn.Module):
    """Equal layers."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        result: Tensor = x.square().mean()
        return result


def _measure(case: str, args: argparse.Namespace, mesh: DeviceMesh | None) -> dict[str, object]:
    _train(case, 2, 8, args.steps, mesh, lambda: None)
    torch.compiler.reset()
    gc.collect()
    before, resident = shared_bytes(), psutil.Process().memory_info().rss
    found: dict[str, float] = {}

    def built() -> None:
        found["built"] = shared_bytes() - before

    most = _Most()
    model, optimizer = _train(case, args.layers, args.width, args.steps, mesh, built)
    found["most"] = most.stop() - resident
    gc.collect()
    untrimmed = shared_bytes()
    ctypes.CDLL(None).malloc_trim(0)  # glibc's
    found["trained"] = shared_bytes() - before
    found["kept"] = untrimmed - before - found["trained"]
    del optimizer  # until here its states were there
    explained = explain(model, changes=False)
    found["device"] = explained.device.needed_bytes
    found["planned"] = explained.host.needed_bytes
    sums = {name: _sum(value, mesh) / _MIB for name, value in found.items()}
    return {
        "case": case,
        "processes": 1 if mesh is None else mesh.size(),
        "planned MiB": f"{sums['planned']:.0f}",
        "megacompiled MiB": f"{sums['built']:.0f}",
        "trained MiB": f"{sums['trained']:.0f}",
        "of the host MiB": f"{sums['trained'] - sums['device']:.0f}",
        "kept by malloc MiB": f"{sums['kept']:.0f}",
        "most MiB": f"{sums['most']:.0f}",
    }


def _train(
    case: str,
    layers: int,
    width: int,
    steps: int,
    mesh: DeviceMesh | None,
    built: Callable[[], None],
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Net(layers, width)
    options: dict[str, Any] = {"device": "cpu", "progress": False, "mesh": mesh}
    if case == "in-backward":
        options["optimizer"] = torch.optim.AdamW(model.parameters())
    model = megacompile(model, **options)
    gc.collect()
    built()
    optimizer = options.get("optimizer") or torch.optim.AdamW(model.parameters())
    x = torch.randn(_ROWS, width)
    for _ in range(steps):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    for param in model.parameters():
        param.detach().sum()  # waits for what is in flight
    return model, optimizer


class _Most:
    """The most that this process has in RAM, from now on."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._bytes = 0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        process = psutil.Process()
        while not self._over.wait(0.005):
            self._bytes = max(self._bytes, process.memory_info().rss)

    def stop(self) -> int:
        """Bytes."""
        self._over.set()
        self._thread.join()
        return self._bytes


def _sum(value: float, mesh: DeviceMesh | None) -> float:
    """Over ranks, which all wait here: what they read next, all have."""
    if mesh is None:
        return value
    found = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(found)
    return float(found.item())


if __name__ == "__main__":
    main()
