"""Training steps on several GPUs, each with tokens of its own.

    torchrun --nproc-per-node 2 -m benchmarks.ranks --case planned --case fsdp2 --layers 28
    python -m benchmarks.ranks --case planned --layers 28

The first command shares the model among the ranks, the second is one GPU alone. TFLOP/s are those
of all ranks together. Host memory is what all processes have in RAM at the end, shared pages once.

Cases: `planned` (default options), `streamed` (no parameter stays on the GPU, everything is
recomputed), `in-backward` (8-bit moments), `fsdp2` (`fully_shard` on each layer, resident, each
layer compiled, activation checkpointing where `--checkpoint` says so), `deepspeed` (ZeRO-3 with
parameters and optimizer on the CPU, as in `benchmarks.peers`; its packages may be in `--wheels`).

`--shape` takes layers of larger models. Where no GPU holds one, the time of the first step includes
the writing of its values.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.models import (
    SHAPE_14B,
    SHAPE_32B,
    SHAPE_72B,
    SHAPE_120B,
    Loss,
    parameters,
    qwen2,
    tokens,
    unwritten_qwen2,
    write,
)
from benchmarks.peers.systems import deepspeed
from benchmarks.peers.wheels import importable
from benchmarks.process_memory import shared_bytes
from benchmarks.report import publish
from megacompile import explain, megacompile
from megacompile.cost.rank_rates import all_gather_object, use_cores
from megacompile.runtime.updates.compiled import wait_until_compiled

SHAPES: dict[str, dict[str, Any]] = {
    "7.6b": {},
    "14b": SHAPE_14B,
    "32b": SHAPE_32B,
    "72b": SHAPE_72B,
    "120b": SHAPE_120B,
}
LATE = {"72b", "120b"}  # no GPU holds them: they get their values where they are streamed from
CASES = ("planned", "streamed", "in-backward", "fsdp2", "deepspeed")


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, default=[])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--shape", choices=SHAPES, default="7.6b", help="of each layer")
    parser.add_argument("--batch", type=int, default=16, help="sequences of each rank")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--host-memory", help="of each rank, as megacompile takes it")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing, fsdp2")
    parser.add_argument("--wheels", type=Path, help="a folder of packages that are not installed")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    unpacked = tempfile.TemporaryDirectory()
    if args.wheels is not None:
        sys.path.extend(map(str, importable(args.wheels, Path(unpacked.name))))
    mesh = None
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    first = mesh is None or dist.get_rank() == 0
    rows = []
    for case in args.case or CASES:
        row = _measure(case, args, mesh)
        rows.append(row)
        if first:
            print(row, flush=True)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    if first:
        publish("Training steps on several GPUs", rows, args.out)
    unpacked.cleanup()
    if mesh is not None:
        dist.destroy_process_group()


def _measure(case: str, args: argparse.Namespace, mesh: DeviceMesh | None) -> dict[str, object]:
    ranks = 1 if mesh is None else mesh.size()
    late = args.shape in LATE and case not in ("fsdp2", "deepspeed")
    model = (unwritten_qwen2 if late else qwen2)(args.layers, **SHAPES[args.shape])
    count = parameters(model)
    torch.manual_seed(1 if mesh is None else 1 + mesh.get_rank())
    ids = tokens(args.batch, args.length)
    start = time.perf_counter()
    build = {"fsdp2": _fsdp2, "deepspeed": _deepspeed}.get(case, _ours)
    step, predicted = build(model, case, args, mesh)
    del model
    losses = [step(ids)]
    first_s = time.perf_counter() - start
    print(f"first step {first_s:.1f} s, loss {losses[0]:.4f}", flush=True)  # others may be cut off
    wait_until_compiled()  # the update's code, which the next step takes
    for _ in range(args.warm):
        losses.append(step(ids))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(args.steps):
        _barrier(mesh)
        start = time.perf_counter()
        losses.append(step(ids))
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    _barrier(mesh)
    start = time.perf_counter()
    for _ in range(args.steps):
        step(ids, look=False)
    torch.cuda.synchronize()
    _barrier(mesh)
    seconds = (time.perf_counter() - start) / args.steps
    foreseen = predicted()
    return {
        "case": case,
        "model": f"{count / 1e9:.1f} B, {args.layers} layers",
        "GPUs": ranks,
        "tokens of each": f"{args.batch}x{args.length}",
        "s": f"{seconds:.3f}",
        "predicted s": "" if foreseen is None else f"{foreseen:.3f}",
        "median s, idle between": f"{statistics.median(taken):.3f}",
        "TFLOP/s (6NT)": f"{6 * count * ids.numel() * ranks / seconds / 1e12:.0f}",
        "peak GiB": f"{torch.cuda.max_memory_allocated() / 2**30:.1f}",
        "host GiB of all": f"{_sum(shared_bytes(), mesh) / 2**30:.1f}",
        "first step s": f"{first_s:.1f}",
        "losses": f"{losses[0]:.4f} .. {losses[-1]:.4f}",
    }


Step = Callable[..., float]


def _ours(
    model: nn.Module, case: str, args: argparse.Namespace, mesh: DeviceMesh | None
) -> tuple[Step, Callable[[], float | None]]:
    options: dict[str, Any] = {"state_dtype": torch.float32, "progress": False, "mesh": mesh}
    options["host_memory"] = args.host_memory
    whole = Loss(model)
    if case == "streamed":
        options |= {"resident": 0, "activations": "recompute"}
    if case == "in-backward":
        options |= {"state_dtype": "int8"}
        options["optimizer"] = torch.optim.AdamW(whole.parameters(), lr=1e-5)
    whole = megacompile(whole, **options)
    if args.shape in LATE:
        write(whole, seed=0 if mesh is None else mesh.get_rank())
    optimizer = options.get("optimizer") or torch.optim.AdamW(whole.parameters(), lr=1e-5)
    clips = case != "in-backward"
    return _loop(whole, optimizer, clips), lambda: explain(whole, changes=False).step_s


def _fsdp2(
    model: nn.Module, case: str, args: argparse.Namespace, mesh: DeviceMesh | None
) -> tuple[Step, Callable[[], float | None]]:
    from torch.distributed.fsdp import fully_shard

    assert mesh is not None, "fsdp2 needs torchrun"
    inner: Any = model
    if args.checkpoint:
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in inner.model.layers:
        layer.compile()
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    whole = Loss(model)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-5, fused=True)
    return _loop(whole, optimizer, clips=True), lambda: None


def _deepspeed(
    model: nn.Module, case: str, args: argparse.Namespace, mesh: DeviceMesh | None
) -> tuple[Step, Callable[[], float | None]]:
    if mesh is not None:
        # torchrun leaves it one, and its Adam is on the CPU; megacompile() does so
        use_cores(mesh, functools.partial(all_gather_object, mesh))
    system = deepspeed.setup(Loss(model).to("cpu"), "cuda")

    def step(ids: torch.Tensor, *, look: bool = True) -> float:
        loss = system.step(ids)
        return float(loss.item()) if look else 0.0

    return step, lambda: None


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, clips: bool) -> Step:
    def step(ids: torch.Tensor, *, look: bool = True) -> float:
        loss = model(ids)
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item()) if look else 0.0

    return step


def _barrier(mesh: DeviceMesh | None) -> None:
    if mesh is not None:
        dist.barrier()


def _sum(value: float, mesh: DeviceMesh | None) -> float:
    if mesh is None:
        return value
    found = torch.tensor(float(value), dtype=torch.float64, device="cuda")
    dist.all_reduce(found)
    return float(found.item())


if __name__ == "__main__":
    main()
