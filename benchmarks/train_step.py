"""A whole training step of a Qwen2 model: forward, backward, clipping, AdamW, everything streamed.

    python -m benchmarks.train_step --layers 12 --run exact --run backward --out results.md

Each `--run` is one of RUNS, in a process of its own. Host memory is measured: the process's
resident set after the last step, less what it was before the model was there, when a small model
had been trained in the same way. The default work is that of the peers: 3.89 B parameters, 16x1024
random tokens, bf16, AdamW with float32 moments, gradients clipped to norm 1. The time is that of
all steps together, from idle to idle, over their number.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models import parameters, qwen2, tokens
from benchmarks.report import publish
from megacompile import megacompile

STREAMED: dict[str, Any] = {"resident": 0, "activations": "recompute"}
RUNS: dict[str, dict[str, Any]] = {  # name -> options of megacompile(), and "dtype", "backward"
    "planned": {"state_dtype": torch.float32},
    "exact": {**STREAMED, "state_dtype": torch.float32},
    "exact, 8-bit moments": {**STREAMED, "state_dtype": "int8"},
    "exact, fp32 masters": {
        **STREAMED,
        "compute_dtype": torch.bfloat16,
        "grad_dtype": torch.bfloat16,
        "dtype": torch.float32,
    },
    "in the backward": {**STREAMED, "state_dtype": torch.float32, "backward": True},
    "in the backward, 8-bit moments": {**STREAMED, "state_dtype": "int8", "backward": True},
}


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="append", choices=RUNS, help="default: all of them")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches that a batch is cut in")
    parser.add_argument("--clip", type=float, default=1.0, help="0: none (never in the backward)")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lookahead", type=int, default=2)
    parser.add_argument("--trace", help="write a chrome trace of a step here")
    parser.add_argument("--out", help="write the table here")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in the process of a run
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(_measure(args.one, args)))
        return []
    rows = [_in_process(name, sys.argv[1:] if argv is None else argv) for name in args.run or RUNS]
    publish(f"A training step, {args.batch}x{args.length} tokens", rows, args.out)
    return rows


def _in_process(name: str, argv: Sequence[str]) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.train_step", *argv, "--one", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return {"system": f"megacompile, {name}", "s": f"failed ({done.returncode})"}
    row: dict[str, object] = json.loads(lines[-1])
    return row


class _Training:
    """A model in training; `step` is what a user's loop does."""

    def __init__(self, model: nn.Module, run: dict[str, Any], args: argparse.Namespace) -> None:
        options = {k: v for k, v in run.items() if k not in ("dtype", "backward")}
        self.in_backward = bool(run.get("backward"))
        self.args = args
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        if self.in_backward:
            options["optimizer"] = self.optimizer
        self.model = megacompile(model, lookahead=args.lookahead, progress=False, **options)
        self.parts: dict[str, list[float]] = {}

    def step(self, ids: torch.Tensor, *, idle_before_clip: bool = False) -> torch.Tensor:
        """One optimizer step; gives the mean loss, on the device."""
        losses = []
        pieces = ids.chunk(self.args.micro)
        for k, piece in enumerate(pieces):
            with self._timed("forward"):
                loss: torch.Tensor = self.model(input_ids=piece, labels=piece).loss / len(pieces)
            accumulates = self.in_backward and k + 1 < len(pieces)
            with self._timed("backward"), self._accumulating(accumulates):
                loss.backward()
            losses.append(loss.detach())
        if idle_before_clip:
            torch.cuda.synchronize()
        if self.args.clip and not self.in_backward:
            with self._timed("clip"):
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        with self._timed("step"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.stack(losses).sum()

    def _accumulating(self, on: bool) -> contextlib.AbstractContextManager[Any]:
        if not on:
            return contextlib.nullcontext()
        from megacompile import accumulate

        return accumulate(self.model)

    @contextlib.contextmanager
    def _timed(self, part: str) -> Any:
        start = time.perf_counter()
        yield
        self.parts.setdefault(part, []).append(time.perf_counter() - start)


def _measure(name: str, args: argparse.Namespace) -> dict[str, object]:
    run = RUNS[name]
    dtype = run.get("dtype", torch.bfloat16)
    _warm_up(run, args, dtype)
    gc.collect()
    torch.cuda.empty_cache()
    before = _resident_bytes()
    model = qwen2(args.layers, dtype=dtype)
    count = parameters(model)
    ids = tokens(args.batch, args.length)
    start = time.perf_counter()
    training = _Training(model, run, args)
    torch.cuda.empty_cache()
    training.step(ids)
    training.step(ids).item()
    first_s = time.perf_counter() - start
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training.parts.clear()
    losses = []
    start = time.perf_counter()
    for _ in range(args.steps):
        losses.append(training.step(ids))
    last = losses[-1].item()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / args.steps
    held = _resident_bytes() - before
    parts = {k: f"{statistics.median(v) * 1e3:.0f}" for k, v in training.parts.items()}
    if "clip" in parts:  # alone: in the loop it waits for the backward
        training.parts.clear()
        training.step(ids, idle_before_clip=True)
        parts["clip"] = f"{training.parts['clip'][0] * 1e3:.0f}"
    print(f"{seconds:.4f} s a step; ms on the host's clock: {parts}", flush=True)
    if args.trace:
        _trace(training, ids, args.trace)
    return {
        "system": f"megacompile, {name}",
        "model": f"{args.layers} layers, {count / 1e9:.2f} B",
        "tokens": f"{args.batch}x{args.length}" + (f" in {args.micro}" if args.micro > 1 else ""),
        "s": f"{seconds:.3f}",
        "TFLOP/s (6NT)": f"{6 * count * ids.numel() / seconds / 1e12:.0f}",
        "clip ms": parts.get("clip", ""),
        "peak GPU GiB": f"{torch.cuda.max_memory_allocated() / 2**30:.1f}",
        "host bytes/parameter": f"{held / count:.2f}",
        "two first steps s": f"{first_s:.1f}",
        "losses": f"{losses[0].item():.4f} .. {last:.4f}",
    }


def _warm_up(run: dict[str, Any], args: argparse.Namespace, dtype: torch.dtype) -> None:
    """Train a small model, so that what is measured is not the loading of compilers."""
    model = qwen2(2, dtype=dtype, width=256, vocabulary=1024)
    training = _Training(model, run, args)
    for _ in range(2):
        training.step(tokens(4, 256, 1024)).item()


def _resident_bytes() -> int:
    """Memory of this process in RAM, page-locked and shared mappings included."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) * 1024


def _trace(training: _Training, ids: torch.Tensor, path: str) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        training.step(ids).item()
        training.step(ids).item()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)


if __name__ == "__main__":
    main()
