"""Updates of resident layers next to a forward of others: the share that is hidden.

A forward of some Qwen2 layers runs on a stream of high priority, and the AdamW update of as many
others on one of low priority, of equal priority, and behind it. What is hidden is the share of the
shorter of the two that does not show in the time of both (docs/decisions/0040).

    python -m benchmarks.updates_beside --layers 8 --batch 16
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.models import qwen2, tokens
from benchmarks.report import publish
from megacompile.runtime.optim.rule import Update
from megacompile.runtime.optim.rules import ADAM
from megacompile.runtime.updates.bucket_update import update_bucket

Work = Callable[[], Any]
HIGH, LOW = -1, 0  # priorities of CUDA streams


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="that compute, and that are updated")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU: streams of the CPU do not run beside one another")
    body: Any = qwen2(args.layers).model
    compiled: Any = torch.compile(body)
    ids = tokens(args.batch, args.length)
    updates = _updates(body.layers)

    def forward() -> None:
        compiled(input_ids=ids, use_cache=False)

    def update() -> None:
        for each in updates:
            update_bucket(ADAM, each)

    def both() -> None:
        update()
        forward()

    forward_ms, update_ms = (_time(work, args.steps) for work in (forward, update))
    rows: list[dict[str, object]] = [
        {"work": "the forward alone", "ms": f"{forward_ms:.2f}"},
        {"work": "the updates alone", "ms": f"{update_ms:.2f}"},
        _row("the updates, then the forward", _time(both, args.steps), forward_ms, update_ms),
    ]
    for name, priority in (("of low priority", LOW), ("of equal priority", HIGH)):
        beside = _beside(forward, update, torch.cuda.Stream(priority=priority))
        time_ms = _time(beside, args.steps)
        rows.append(_row(f"the updates on a stream {name}", time_ms, forward_ms, update_ms))
    publish(
        f"Updates beside a forward: {args.layers} layers each, {args.batch}x{args.length} tokens",
        rows,
        args.out,
    )
    return rows


def _updates(layers: nn.ModuleList) -> list[list[Update]]:
    """Updates of as many layers as these, with float32 moments and parameters and gradients of
    their own."""
    found = []
    for layer in layers:
        params = [torch.zeros_like(p).view(-1) for p in layer.parameters()]
        group = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups[0]
        hyper = ADAM.hyper(group, step=3)
        found.append([Update(p, torch.ones_like(p), _moments(p), hyper) for p in params])
    return found


def _moments(param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    first = torch.zeros_like(param, dtype=torch.float32)
    return first, torch.zeros_like(first), None


def _beside(forward: Work, update: Work, stream: torch.cuda.Stream) -> Work:
    def run() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            update()
        forward()
        torch.cuda.current_stream().wait_stream(stream)

    return run


def _time(work: Work, steps: int) -> float:
    """The median of some runs on a stream of high priority, milliseconds."""
    times: list[float] = []
    with torch.cuda.stream(torch.cuda.Stream(priority=HIGH)):
        for _ in range(2):
            work()
        for _ in range(steps):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _row(work: str, time_ms: float, forward_ms: float, update_ms: float) -> dict[str, object]:
    hidden = (forward_ms + update_ms - time_ms) / min(forward_ms, update_ms)
    return {"work": work, "ms": f"{time_ms:.2f}", "hidden": f"{hidden:.0%}"}


if __name__ == "__main__":
    main()
