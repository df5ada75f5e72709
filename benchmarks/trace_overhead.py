"""The cost of tracing: training steps of a Qwen2 model with a trace off and on, in turns.

    python -m benchmarks.trace_overhead --layers 12 --blocks 4 --steps 3 \\
        --device-update 0 --save docs/step.json

Everything is streamed and recomputed unless told otherwise: that has the most ops. Blocks of steps
alternate between off and on, so that a machine that warms up or slows down does so for both; a row
gives the median over the blocks of the mean step, from idle to idle, and the spread of the blocks.
What "on" costs is the median of the differences of neighbouring blocks; a difference that is
smaller than the spread of "off" is not a measured one.

"hook alone" is what stays in an op while no trace is on: the wrapper and the tests of the runtime
itself, around an op that does nothing, less that op; times the ops of a step. It is a bound on what
a step can lose, as if the GPU waited for each call; it is too small to be seen in a step.

`--save` writes three steps, with the prediction for this machine. What `optimizer.step()` does on
the device is no op of a schedule and not in a trace; `--device-update 0` leaves every update to the
host.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import megacompile
from benchmarks.models import Loss, parameters, qwen2
from benchmarks.report import publish
from megacompile.cost.rates import load
from megacompile.runtime.ops.executor import recorded
from megacompile.views.timeline import HOST

_SAVED_STEPS = 3  # the first from idle, the second as in training, the third for its prefetches


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, help="default: that of Qwen2.5-7B")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--resident", default="0", help="'all', 'auto' or a size; default: 0")
    parser.add_argument("--activations", default="recompute", help="default: recompute")
    parser.add_argument("--device-update", type=float, help="the share updated on the device")
    parser.add_argument("--steps", type=int, default=3, help="in a block")
    parser.add_argument("--blocks", type=int, default=4, help="of each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save", action="append", default=[], help="a step: .json")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    for path in args.save:  # before minutes of work
        if not Path(path).absolute().parent.is_dir():
            parser.error(f"--save {path}: there is no such folder")
    vocabulary = 1024 if args.width else 152064
    sizes = {"width": args.width, "vocabulary": vocabulary} if args.width else {}
    model: nn.Module = Loss(qwen2(args.layers, device=args.device, **sizes))
    count = parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model = megacompile.megacompile(
        model,
        device=args.device,
        progress=False,
        state_dtype=torch.float32,
        resident=int(args.resident) if args.resident.isdigit() else args.resident,
        activations=args.activations,
        device_update=args.device_update,
    )
    ids = torch.randint(vocabulary, (args.batch, args.length), device=args.device)
    for _ in range(3):
        _step(model, optimizer, ids)
    rows = _rows(model, optimizer, ids, args)
    if args.save:
        _save(model, optimizer, ids, args.save)
    title = f"Tracing {args.layers} layers ({count / 1e9:.2f} B), {args.batch}x{args.length} tokens"
    kept = f"resident={args.resident}, activations={args.activations}"
    publish(f"{title}, {kept}", rows, args.out)
    return rows


def _rows(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, args: argparse.Namespace
) -> list[dict[str, object]]:
    off, on, read, table = [], [], [], ""
    spans = ops = 0
    for block in range(args.blocks):
        off.append(_block(model, optimizer, ids, args.steps))
        with megacompile.trace(model) as t:
            on.append(_block(model, optimizer, ids, args.steps))
        start = time.perf_counter()
        spans = len(t.spans)
        read.append(time.perf_counter() - start)
        ops = sum(span.op.lane != HOST for span in t.spans)
        table = t.table()
        print(f"block {block}: {off[-1]:.4f} s off, {on[-1]:.4f} s on", flush=True)
    print(table)
    base = statistics.median(off)
    more = statistics.median(b - a for a, b in zip(off, on, strict=True))
    hook = _hook_s() * ops / args.steps
    return [
        {"trace": "off", "s a step": f"{base:.4f}", "blocks": _spread(off)},
        {
            "trace": "on",
            "s a step": f"{statistics.median(on):.4f}",
            "blocks": _spread(on),
            "more": f"{more / base:+.2%}",
            "spans a step": spans // args.steps,
            "ms to read": f"{statistics.median(read) * 1e3:.1f}",
        },
        {"trace": "hook alone", "s a step": f"{hook:.7f}", "more": f"{hook / base:+.5%}"},
    ]


def _spread(times: Sequence[float]) -> str:
    return f"{min(times):.4f} .. {max(times):.4f}"


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(ids).backward()
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


def _save(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, paths: Sequence[str]
) -> None:
    """A few steps, measured and predicted."""
    with megacompile.trace(model, hardware=load(ids.device)) as t:
        for _ in range(_SAVED_STEPS):
            _step(model, optimizer, ids)
    for path in paths:
        t.save(path)
        print(f"{path}: {Path(path).stat().st_size / 1e3:.0f} KB", flush=True)


class _Bound:
    recording = None


def _hook_s(repeats: int = 20_000, rounds: int = 7) -> float:
    """Seconds that an op takes more for what is there while no trace is on.

    The runtime's own wrapper, and behind it the test that issuing an op makes.
    """
    bound: Any = _Bound()

    def plain(bucket: object, slot: object, *, after: object = ()) -> None:
        del bucket, slot, after

    def tested(bucket: object, slot: object, *, after: object = ()) -> None:
        del bucket, slot, after
        if bound.recording is not None:
            raise AssertionError

    def seconds(op: Callable[..., None]) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            op(bound, bound, after=bound)
        return (time.perf_counter() - start) / repeats

    bound.tested = tested
    op: Any = SimpleNamespace(name="tested", issues=True)
    hooked = recorded(bound, op)
    return statistics.median(seconds(hooked) - seconds(plain) for _ in range(rounds))


if __name__ == "__main__":
    main()
