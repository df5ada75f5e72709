"""Forward and backward of a Qwen2 model: streamed against resident, time, memory, gradients.

The resident model has every parameter on the GPU, each layer compiled, and activation
checkpointing on each layer; the streamed one is the same model after `megacompile(model)` with
`resident=0` and `activations="recompute"`. Both run the same tokens in one process.

    python -m benchmarks.forward_backward --layers 12 28 --out results.md
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from benchmarks.models import parameters, qwen2, tokens
from benchmarks.report import publish
from megacompile import compat, megacompile, schedules
from megacompile.cost.rates import load
from megacompile.cost.simulate import simulate


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 28])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resident-up-to", type=int, default=12, metavar="LAYERS")
    parser.add_argument("--lookahead", type=int, default=2)
    parser.add_argument("--trace", help="write a chrome trace of a streamed step here")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    rows = []
    for layers in args.layers:
        rows += _measure(layers, args)
    publish(f"Forward and backward, {args.batch}x{args.length} tokens, bf16", rows, args.out)
    return rows


def _measure(layers: int, args: argparse.Namespace) -> list[dict[str, object]]:
    model = qwen2(layers)
    count = parameters(model)
    ids = tokens(args.batch, args.length)
    rows: list[dict[str, object]] = []
    expected: dict[str, torch.Tensor] = {}
    resident_s = 0.0
    if layers <= args.resident_up_to:
        _resident(model)
        resident_s, peak, loss = _time(model, ids, args.steps)
        rows.append(_row("resident, checkpointed", layers, count, ids, resident_s, peak))
        rows[-1] |= {"loss": f"{loss:.4f}"}
        expected = _gradients(model)
        _plain(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        _step(model, ids)
        rows[-1]["gradient error"] = f"{_worst(expected, _gradients(model))} (to not compiled)"
        _plain(model)
    gc.collect()
    torch.cuda.empty_cache()

    start = time.perf_counter()
    megacompile(model, lookahead=args.lookahead, progress=True, resident=0, activations="recompute")
    moved_s = time.perf_counter() - start
    gc.collect()
    torch.cuda.empty_cache()
    _step(model, ids)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - start
    streamed_s, peak, loss = _time(model, ids, args.steps)
    row = _row("streamed, recomputed", layers, count, ids, streamed_s, peak)
    row |= {"loss": f"{loss:.4f}", "first step s": f"{first_s:.1f} (pinning {moved_s:.1f})"}
    row["templates"] = str(len(schedules(model)[0].templates))
    predicted = simulate(schedules(model)[0], load("cuda"))
    row["predicted s"] = f"{predicted.total_s:.4f} ({predicted.total_s / streamed_s - 1:+.0%})"
    if expected:
        row["of resident"] = f"{streamed_s / resident_s:.3f}x"
        row["gradient error"] = f"{_worst(expected, _gradients(model))} (to resident)"
    rows.append(row)
    if args.trace:
        _trace(model, ids, args.trace)
        print(schedules(model)[0].table())
    return rows


def _resident(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile()


def _plain(model: nn.Module) -> None:
    """Undo `_resident`."""
    model.gradient_checkpointing_disable()  # type: ignore[operator]
    for layer in model.model.layers:  # type: ignore[union-attr]
        compat.set_compiled_call(layer, None)
    model.zero_grad(set_to_none=True)
    torch.compiler.reset()


def _step(model: nn.Module, ids: torch.Tensor) -> float:
    model.zero_grad(set_to_none=True)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss)


def _time(model: nn.Module, ids: torch.Tensor, steps: int) -> tuple[float, int, float]:
    """Median seconds of a step after two more to warm up, peak bytes on the GPU, the loss."""
    loss = [_step(model, ids) for _ in range(2)][-1]
    torch.cuda.reset_peak_memory_stats()
    times = [_seconds(lambda: _step(model, ids)) for _ in range(steps)]
    print("seconds:", " ".join(f"{t:.4f}" for t in times), flush=True)
    return statistics.median(times), torch.cuda.max_memory_allocated(), loss


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _row(
    name: str, layers: int, count: int, ids: torch.Tensor, seconds: float, peak_bytes: int
) -> dict[str, object]:
    rate = 6 * count * ids.numel() / seconds / 1e12
    return {
        "model": f"{layers} layers, {count / 1e9:.2f} B",
        "system": name,
        "s": f"{seconds:.4f}",
        "TFLOP/s (6NT)": f"{rate:.0f}",
        "peak GPU GiB": f"{peak_bytes / 2**30:.1f}",
    }


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}


def _worst(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str:
    """Relative L2 errors of the parameters' gradients: the median and the largest."""
    assert expected.keys() == found.keys()
    errors = []
    for name, reference in expected.items():
        want, got = reference.cuda().float(), found[name].cuda().float()
        errors.append((float((got - want).norm() / want.norm()), name))
    worst, name = max(errors)
    return f"median {statistics.median(e for e, _ in errors):.1e}, worst {worst:.1e} {name}"


def _trace(model: nn.Module, ids: torch.Tensor, path: str) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        _step(model, ids)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=25))


if __name__ == "__main__":
    main()
