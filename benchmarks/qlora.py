"""QLoRA of a 72 B base in 4 bits: streamed under a cap, against everything resident.

    python -m benchmarks.qlora --out results.md
    python -m benchmarks.qlora --case streamed --steps 2
    python -m benchmarks.qlora --tiny --device cpu     # whether it runs: seconds, no figures

Qwen2.5-72B's shape, NF4 with nested statistics (bitsandbytes), LoRA r=16 on all linear layers
(PEFT), bf16, 8x2048 tokens, AdamW. Cases:

    eager       plain, on the device, with gradient checkpointing
    compiled    the same, each layer under torch.compile
    resident    megacompile(resident="all"): all parameters on the device, in what they leave of
                it as many layers kept as fit; the host memory of the streamed case
    streamed    megacompile, this process has 24 GiB of device memory; host_memory="42GiB", which
                with Python's own objects stays below 45 GiB

Left to itself, a plan for all of the device streams what it has time to stream. It has saved
tensors in that memory, and on a large host more than 100 GiB of them there: not resident.

Each case runs in a process of its own with a time limit, and prints as it goes. Time is that of all
timed steps together, from idle to idle, over their number. Host memory is the process's resident
set after the last step less what it was before the model was there; its peak is the kernel's.

The floor of the streamed step: every packed byte goes over PCIe twice (forward, backward) while the
device does three products for each parameter and token (forward, recomputation, gradients of the
inputs): weights have no gradients.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks import child
from benchmarks.models import Loss
from benchmarks.nf4 import Shape, qwen2_nf4, with_lora
from benchmarks.process_memory import status_bytes
from benchmarks.report import publish

CASES = ("resident", "streamed", "compiled", "eager")
TINY = Shape(layers=3, hidden=256, intermediate=512, heads=4, kv_heads=2, vocabulary=1024)
PCIE_GB_S, MATMUL_TFLOP_S = 50.0, 700.0  # what an H200 reaches


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    args = _arguments(argv)
    if args.inside:
        child.tell(measure(args.inside, args))
        return []
    shape = _shape(args)
    for line in floor(shape, args.batch * args.length):
        print(line, flush=True)
    rows = []
    for case in args.case or CASES:
        inside = [*(sys.argv[1:] if argv is None else argv), "--inside", case]
        rows.append({"case": case, **child.run(case, "benchmarks.qlora", inside, args.limit)})
        print(rows[-1], flush=True)
    _compare(rows)
    publish("QLoRA, streamed and resident", rows, args.out)
    return rows


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, default=[])
    parser.add_argument("--inside", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help="default: 80; with --tiny 3")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--warm", type=int, default=2, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=2, help="that are timed")
    parser.add_argument("--cap", type=float, default=24.0, help="GiB of device memory if streamed")
    parser.add_argument("--host", type=float, default=42.0, help="GiB of buffers on the host")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each case")
    parser.add_argument("--tiny", action="store_true", help="small layers, 2x64 tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lowering", help="of megacompile; default: its own")
    parser.add_argument("--explain", action="store_true", help="print what explain() says")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    if args.tiny:
        args.batch, args.length = 2, 64
    return args


def _shape(args: argparse.Namespace) -> Shape:
    if args.tiny:
        return TINY if args.layers is None else replace(TINY, layers=args.layers)
    return Shape() if args.layers is None else Shape(layers=args.layers)


def floor(shape: Shape, tokens: int) -> list[str]:
    """The floor of every schedule, in words."""
    nested_bytes = 0.5 + 1 / 64 + 4 / 64 / 256  # of a parameter: packed, its scale, that one's
    packed = shape.linear_parameters * nested_bytes
    streamed = packed + 2 * 2 * shape.head_parameters  # the head and the embedding, bf16
    copies = (2 * packed + 2 * 2 * 2 * shape.head_parameters) / PCIE_GB_S / 1e9
    flops = 6 * tokens * (shape.linear_parameters + shape.head_parameters)
    return [
        f"base: {shape.linear_parameters / 1e9:.1f} B parameters, {packed / 2**30:.1f} GiB packed; "
        f"with head and embedding {streamed / 2**30:.1f} GiB",
        f"floor of the streamed step: copies {copies:.2f} s at {PCIE_GB_S:g} GB/s, "
        f"products {flops / MATMUL_TFLOP_S / 1e12:.2f} s at {MATMUL_TFLOP_S:g} TFLOP/s",
    ]


def measure(case: str, args: argparse.Namespace) -> dict[str, object]:
    """One case, in this process."""
    on_gpu = args.device == "cuda"
    before = _resident_bytes()
    if case == "streamed" and on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.cap * 2**30 / total))
    start = time.perf_counter()
    shape = _shape(args)
    plain = case in ("eager", "compiled")
    inner: Any = qwen2_nf4(shape, device=args.device if plain else "cpu")
    adapted = with_lora(inner)
    if plain:  # what megacompile computes again is its plan's to say
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    inner.disable_input_require_grads()  # a hook for reentrant checkpoints, which breaks the graph
    model: nn.Module = Loss(adapted)
    _say("built", start)
    model = _prepared(model, inner, case, args)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocabulary, (args.batch, args.length), generator=generator)
    ids = ids.to(args.device)
    losses = []

    def step() -> None:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    for k in range(args.warm):
        start = time.perf_counter()
        step()
        _idle(adapters, on_gpu)
        _say(f"step {k} (warm), loss {losses[-1].item():.5f}", start)
    gc.collect()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(args.steps):
        step()
    _idle(adapters, on_gpu)
    seconds = (time.perf_counter() - start) / args.steps
    row = _figures(args, seconds, before)
    if args.explain and not plain:
        from megacompile import explain

        print(explain(model, changes=False))
    return {**row, "losses": [round(loss.item(), 5) for loss in losses]}


def _prepared(model: nn.Module, inner: Any, case: str, args: argparse.Namespace) -> nn.Module:
    if case == "compiled":
        for layer in inner.model.layers:
            layer.compile()
    if case in ("eager", "compiled"):
        return model.to(args.device)
    from megacompile import megacompile

    options: dict[str, Any] = {} if args.lowering is None else {"lowering": args.lowering}
    if args.device == "cuda":
        options["host_memory"] = f"{args.host:g}GiB"
    if case == "resident":
        options["resident"] = "all"
    start = time.perf_counter()
    made = megacompile(model, device=args.device, progress=False, **options)
    _say("megacompiled", start)
    return made


def _figures(args: argparse.Namespace, seconds: float, before: int) -> dict[str, object]:
    tokens = args.batch * args.length
    row: dict[str, object] = {"s/step": f"{seconds:.3f}", "tokens/s": f"{tokens / seconds:.0f}"}
    if args.device == "cuda":
        row["device GiB, peak"] = f"{torch.cuda.max_memory_reserved() / 2**30:.1f}"
    row["host GiB"] = f"{(_resident_bytes() - before) / 2**30:.1f}"
    row["host GiB, peak"] = f"{(status_bytes('VmHWM') - before) / 2**30:.1f}"
    return row


def _compare(rows: list[dict[str, object]]) -> None:
    """Add what share of the fastest resident case's throughput each one has."""
    speeds = {str(row["case"]): float(str(row["tokens/s"])) for row in rows if "tokens/s" in row}
    best = max((speed for case, speed in speeds.items() if case != "streamed"), default=None)
    for row in rows:
        if best is not None and str(row["case"]) in speeds:
            row["of the fastest resident"] = f"{speeds[str(row['case'])] / best:.0%}"


def _idle(adapters: Sequence[torch.Tensor], on_gpu: bool) -> None:
    """Wait for the updates that run in the background, by a look at each parameter."""
    for param in adapters:
        param.flatten()[:1].tolist()
    if on_gpu:
        torch.cuda.synchronize()


def _say(what: str, start: float) -> None:
    print(f"{what}: {time.perf_counter() - start:.1f} s", flush=True)


def _resident_bytes() -> int:
    """Memory of this process in RAM, page-locked and shared mappings included."""
    return status_bytes("VmRSS")


if __name__ == "__main__":
    main()
