"""A product of experts: what it takes, and what the cost model says, by rows of an expert.

The cost model takes it to run at the rate of a dense product. This measures how far that holds:
forward and backward of `grouped_mm`, and of one dense product with as many operations.

    python -m benchmarks.experts --out results.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional
from triton.testing import do_bench

from benchmarks.report import publish
from megacompile.cost.fusion import Kernel, KernelBound
from megacompile.cost.hardware import Hardware
from megacompile.cost.rates import load


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32768, help="tokens times experts of each")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14336)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    hardware = load("cuda")
    rows = [_row(args, experts, hardware) for experts in args.experts]
    publish(f"{args.rows} rows of {args.width} by {args.inner}, bf16", rows, args.out)
    return rows


def _row(args: argparse.Namespace, experts: int, hardware: Hardware) -> dict[str, object]:
    """One number of experts, with as many rows for each as for the others."""
    inner = min(args.inner, args.inner * 8 // experts)  # as much memory as 8 experts
    x, weight = _random(args.rows, args.width), _random(experts, args.width, inner)
    single = _random(args.width, inner)
    each = args.rows // experts
    offsets = torch.arange(each, args.rows + 1, each, device="cuda", dtype=torch.int32)
    flops = 2 * args.rows * args.width * inner
    size = 2 * (args.rows * (args.width + inner) + weight.numel())
    predicted = Kernel(KernelBound.PRODUCT, flops, size, itemsize=2).seconds(hardware)
    grouped = _times(lambda: functional.grouped_mm(x, weight, offs=offsets), x, weight)
    dense = _times(lambda: x @ single, x, single)
    return {
        "experts": experts,
        "rows of each": each,
        "predicted ms": f"{predicted * 1e3:.2f}",
        "forward ms": f"{grouped[0]:.2f} ({flops / grouped[0] / 1e9:.0f} TFLOP/s)",
        "backward ms": f"{grouped[1]:.2f} ({2 * flops / grouped[1] / 1e9:.0f} TFLOP/s)",
        "dense forward, backward ms": f"{dense[0]:.2f}, {dense[1]:.2f}",
    }


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def _times(product: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of a forward, and of its backward."""
    out = product()
    up = torch.randn_like(out)
    backward = do_bench(lambda: torch.autograd.grad(out, inputs, up, retain_graph=True))
    return float(do_bench(product)), float(backward)


if __name__ == "__main__":
    main()
