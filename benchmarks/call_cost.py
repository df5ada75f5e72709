"""Milliseconds of a call of a small model, and of a training step: megacompiled and plain.

    python -m benchmarks.call_cost [--stages 2 8] [--calls 200]
    python -m benchmarks.call_cost --count [--stages 5]

On the CPU with `lowering="eager"`, where the same kernels run: the difference is what a call costs
in Python. Give OMP_NUM_THREADS=1 for figures that repeat.

With `--count`, the Python functions that the main thread calls in the fourth training step: how
many of this package, in how many files, and of all packages. Other work on the machine does not
change them.
"""

from __future__ import annotations

import argparse
import collections
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megacompile

WIDTH, ROWS, WARM_UP = 32, 16, 8
COUNTED = 4  # the step whose calls are counted: plans and caches are there by then
_PACKAGE = Path(megacompile.__file__).resolve().parents[1]
_FOLDERS = tuple(str(_PACKAGE / name) for name in ("megacompile", "passes", "runtime"))


def mlp(stages: int) -> nn.Sequential:
    """One linear layer and activation a stage."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages))
    )


def training_step(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def forward(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad():
            model(x)

    return run


def median_ms(run: Callable[[], object], calls: int) -> float:
    """Median over `calls`, behind a warm-up."""
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(calls):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times) * 1e3


def functions_called(run: Callable[[], object]) -> collections.Counter[tuple[str, str, int]]:
    """Calls of Python functions in this thread, by (file, qualified name, line)."""
    calls: collections.Counter[tuple[str, str, int]] = collections.Counter()

    def note(frame: Any, event: str, arg: object) -> None:
        if event == "call":
            code = frame.f_code
            calls[code.co_filename, code.co_qualname, code.co_firstlineno] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def print_counts(stages: int) -> None:
    ours = megacompile.megacompile(mlp(stages), device="cpu", lowering="eager", progress=False)
    run = training_step(ours, torch.randn(ROWS, WIDTH))
    for _ in range(COUNTED - 1):
        run()
        time.sleep(0.1)  # the host's update ends; else the step's own wait for it would be counted
    calls = functions_called(run)
    own = {k: n for k, n in calls.items() if str(Path(k[0]).resolve()).startswith(_FOLDERS)}
    print(
        f"training step, {stages} stages: {sum(own.values())} calls of {len(own)} functions in "
        f"{len({file for file, *_ in own})} files; with other packages' {calls.total()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--count", action="store_true", help="calls of functions, not times")
    args = parser.parse_args()
    if args.count:
        for stages in args.stages:
            print_counts(stages)
        return
    print(f"{'case':<24}{'ours':>10}{'plain':>10}  ms per call (median of {args.calls})")
    for stages in args.stages:
        x = torch.randn(ROWS, WIDTH)
        for name, case in (("forward", forward), ("training step", training_step)):
            plain = mlp(stages)
            ours = megacompile.megacompile(
                copy.deepcopy(plain), device="cpu", lowering="eager", progress=False
            )
            ours_ms = median_ms(case(ours, x), args.calls)
            plain_ms = median_ms(case(plain, x), args.calls)
            print(f"{name + f', {stages} stages':<24}{ours_ms:>10.3f}{plain_ms:>10.3f}")


if __name__ == "__main__":
    main()
