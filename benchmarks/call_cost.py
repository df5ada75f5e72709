"""Milliseconds of a call of a small model, and of a training step: megacompiled and plain.

    python -m benchmarks.call_cost [--stages 2 8] [--calls 200]

On the CPU with `lowering="eager"`, where the same kernels run: the difference is what a call costs
in Python. Give OMP_NUM_THREADS=1 for figures that repeat.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import megacompile

WIDTH, ROWS, WARM_UP = 32, 16, 8


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args()
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
