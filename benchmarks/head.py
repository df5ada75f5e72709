"""A language model's head and loss, forward and backward: whole against in chunks.

    logits = x W^T;  loss = cross_entropy(logits.float(), targets);  d loss / d x,  d loss / d W

Peak memory is that above x, W and the targets, the gradients included; TFLOP/s are those of the
three matrix products, 6 tokens width vocabulary. The errors are relative to float64, in the L2 norm
over the first `--exact` rows of each gradient (tokens of dx, words of dW).

    python -m benchmarks.head --out results.md
    python -m benchmarks.head --device cpu --dtype float32 --tokens 255 --width 32 --vocabulary 500
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import publish
from megacompile.ir.head import linear_cross_entropy
from megacompile.passes.capture.chunk import CHUNK_BYTES, rows_of_a_chunk
from megacompile.runtime.ops.head import bind_operators

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--chunk-mib", type=float, nargs="+", default=[256, CHUNK_BYTES / 2**20, 4096]
    )
    parser.add_argument("--exact", type=int, default=64, metavar="ROWS", help="0: no errors")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    bind_operators()
    inputs = _inputs(args)
    exact = _exact(*inputs, rows=args.exact) if args.exact else None
    rows = [_measure(name, loss, inputs, exact, args) for name, loss in _systems(args).items()]
    sizes = f"{args.tokens} tokens x {args.width} x {args.vocabulary} words, {args.dtype}"
    publish(f"Head and loss, forward and backward, {sizes}", rows, args.out)
    return rows


def _inputs(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    x = torch.randn(args.tokens, args.width, **options)
    weight = torch.empty(args.vocabulary, args.width, **options).normal_(0, 0.02)
    target = torch.randint(0, args.vocabulary, (args.tokens,), device=args.device)
    target[::10] = -100
    return x.requires_grad_(), weight.requires_grad_(), target


def _plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def _systems(args: argparse.Namespace) -> dict[str, Loss]:
    """By name: what computes the loss."""
    found: dict[str, Loss] = {"whole": _plain}
    if args.device == "cuda":
        found["whole, compiled"] = torch.compile(_plain)
    row_bytes = args.vocabulary * getattr(torch, args.dtype).itemsize
    for mib in args.chunk_mib:
        rows = rows_of_a_chunk(args.tokens, row_bytes, int(mib * 2**20))
        found[f"in chunks of {rows} ({rows * row_bytes / 2**20:.4g} MiB)"] = _chunked(rows)
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        found["torch's own, in chunks"] = _torch
    return found


def _chunked(rows: int) -> Loss:
    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(
            x,
            weight,
            None,
            target,
            None,
            ignore_index=-100,
            label_smoothing=0.0,
            mean=True,
            chunk_rows=rows,
            dtype=torch.float32,
        )

    return loss


def _torch(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    loss: Tensor = F.linear_cross_entropy(x, weight, target, options=options)
    return loss


def _exact(x: Tensor, weight: Tensor, target: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """The first rows of both gradients in float64, from slices of the logits.

    dz = (softmax(z) - onehot) / count,   dx = dz W,   dW = dz^T x
    """
    x64, count = x.detach()[:rows].double(), (target != -100).sum()
    d_weight = torch.zeros(rows, x.shape[1], dtype=torch.float64, device=x.device)
    d_x = torch.zeros_like(x64)
    step = max(1, 2**27 // weight.shape[0])  # tokens at a time: 1 GiB of float64 logits
    wide = weight.detach().double()
    for start in range(0, x.shape[0], step):
        part, wanted = x.detach()[start : start + step].double(), target[start : start + step]
        dz = (part @ wide.t()).softmax(1)
        valid = wanted != -100
        dz[torch.arange(len(part), device=x.device), wanted.where(valid, 0)] -= 1
        dz *= (valid / count)[:, None]
        d_weight += dz[:, :rows].t() @ part
        if start < rows:
            stop = min(rows, start + len(part))
            d_x[start:stop] = dz[: stop - start] @ wide
    return d_x, d_weight


def _measure(
    name: str,
    loss: Loss,
    inputs: tuple[Tensor, Tensor, Tensor],
    exact: tuple[Tensor, Tensor] | None,
    args: argparse.Namespace,
) -> dict[str, object]:
    row: dict[str, object] = {"head": name}
    on_gpu = args.device == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    try:
        value, gradients = _step(loss, inputs)  # compiles, and picks the kernels
        row["loss"] = f"{float(value.detach()):.5f}"
        if exact:
            for label, got, want in zip(("dx", "dW"), gradients, exact, strict=True):
                error = (got[: len(want)].double() - want).norm() / want.norm()
                row[f"error of {label}"] = f"{float(error):.2e}"
        del value, gradients
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = [_seconds(loss, inputs, on_gpu) for _ in range(args.steps)]
    except torch.OutOfMemoryError:
        return row | {"s": "out of memory"}
    seconds = statistics.median(times)
    flops = 6 * args.tokens * args.width * args.vocabulary
    row |= {"s": f"{seconds:.4f}", "TFLOP/s": f"{flops / seconds / 1e12:.3g}"}
    if on_gpu:
        peak = torch.cuda.max_memory_allocated() - before
        row["peak GiB above the inputs"] = f"{peak / 2**30:.2f}"
    return row


def _step(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    value = loss(*inputs)
    return value, torch.autograd.grad(value, inputs[:2])


def _seconds(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    _step(loss, inputs)
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
