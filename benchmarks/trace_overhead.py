"""What tracing costs: training steps of a Qwen2 model with a trace off and on, in turns.

    python -m benchmarks.trace_overhead --layers 12 --batch 16 --length 1024

Blocks of steps alternate between off and on, so that a machine that warms up or slows down does so
for both; a row gives the median over the blocks of the mean step, from idle to idle. "hook alone"
is the cost of the test that is there while no trace is on, times the ops of a step: it is too small
to be seen in a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn

import megacompile
from benchmarks.models import parameters, qwen2
from benchmarks.report import publish


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, help="default: that of Qwen2.5-7B")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4, help="in a block")
    parser.add_argument("--blocks", type=int, default=6, help="of each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", help="write the last trace here, .json or .png")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    vocabulary = 1024 if args.width else 152064
    sizes = {"width": args.width, "vocabulary": vocabulary} if args.width else {}
    model = qwen2(args.layers, device=args.device, **sizes)
    count = parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model = megacompile.megacompile(
        model, device=args.device, progress=False, state_dtype=torch.float32
    )
    ids = torch.randint(vocabulary, (args.batch, args.length), device=args.device)
    for _ in range(3):
        _step(model, optimizer, ids)
    off, on, spans, read = [], [], 0, []
    for _ in range(args.blocks):
        off.append(_block(model, optimizer, ids, args.steps))
        with megacompile.trace(model) as t:
            on.append(_block(model, optimizer, ids, args.steps))
        start = time.perf_counter()
        spans = len(t.spans)
        read.append(time.perf_counter() - start)
    if args.save:
        (t.save if args.save.endswith(".json") else t.plot)(args.save)
    print(t.table())
    base = statistics.median(off)
    rows: list[dict[str, object]] = [
        {"trace": "off", "s a step": f"{base:.4f}", "least": f"{min(off):.4f}"},
        {
            "trace": "on",
            "s a step": f"{statistics.median(on):.4f}",
            "least": f"{min(on):.4f}",
            "more": f"{statistics.median(on) / base - 1:+.2%}",
            "spans a step": spans // args.steps,
            "ms to read": f"{statistics.median(read) * 1e3:.1f}",
        },
        {
            "trace": "hook alone",
            "s a step": f"{_hook_s() * spans / args.steps:.7f}",
            "more": f"{_hook_s() * spans / args.steps / base:+.5%}",
        },
    ]
    title = f"Tracing {args.layers} layers ({count / 1e9:.2f} B), {args.batch}x{args.length} tokens"
    publish(title, rows, args.out)
    return rows


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _block(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, steps: int
) -> float:
    """Seconds a step, from idle to idle."""
    _wait(model, ids.device)
    start = time.perf_counter()
    for _ in range(steps):
        _step(model, optimizer, ids)
    _wait(model, ids.device)
    return (time.perf_counter() - start) / steps


def _wait(model: nn.Module, device: torch.device) -> None:
    for param in model.parameters():
        param.detach().flatten()[:1].clone()  # whoever looks waits for the update
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Bound:
    recording = None


def _hook_s(repeats: int = 100_000) -> float:
    """Seconds for what an op does more while no trace is on: two tests of an attribute, a call."""
    bound = _Bound()

    def run(*args: object) -> None:
        if bound.recording is not None or bound.recording is not None:
            raise AssertionError

    start = time.perf_counter()
    for _ in range(repeats):
        run(bound, bound)
    return (time.perf_counter() - start) / repeats


if __name__ == "__main__":
    main()
