"""Does `explain` name what bounds a step? Four situations that are staged so that it is known.

    python -m benchmarks.bottlenecks --predict      what explain will say of an H200; no GPU
    python -m benchmarks.bottlenecks --out results.md

Each situation trains for a few steps in this process. "explain" is what `explain(model).bound` says
(predicted, with the rates measured on this machine); "traced" is the stream that real steps waited
for most, by the critical path over what a trace recorded (`megacompile.views.critical_path`), and
how busy each stream was. The host's lane is where `optimizer.step()` updates; it is limited by host
memory, so both "host update" and "host memory bandwidth" are the host.

    tiny batch                 1x256 tokens against 3.89 B parameters of which only the norms are
                               trained: weights come twice a step, and nothing else does
    huge batch                 64x1024 tokens, all parameters trained
    activations offloaded      a stack of wide residual blocks at a short sequence, resident, whose
                               stages' inputs wait on the host
    host update                4x1024 tokens, all parameters updated by the CPU

The third is another model, because a layer of Qwen2.5-7B's width computes five times as long as
its input takes to the host, at any length. What goes to the host in the forward comes back in the
backward, so d2h can lead only where the backward's fetches hide behind its computes, which are
three times the forward's: half of the blocks are sized for that, and the others are so thin that
nothing hides. With every parameter trained on a tiny batch the CPU's update takes longest, not h2d;
that is what "host update" is about, and why "tiny batch" freezes the matrices.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import megacompile
from benchmarks.models import Loss, qwen2
from benchmarks.report import publish
from megacompile.cost.hardware import Hardware
from megacompile.cost.rates import known
from megacompile.ir.plan import Placement, Places
from megacompile.plan.abstract import abstract_options, abstract_programs
from megacompile.plan.explanation import shares_text
from megacompile.plan.scenario import Scenario

HOST = ("host update", "host memory bandwidth")  # of explain's words; the trace's is "host"
_CLEAR = 0.4  # of the step: a bound that is smaller is none


@dataclass(frozen=True)
class Staged:
    """One situation: what is staged, of which model, on what input."""

    name: str
    bound: str  # a stream, or "host"
    model: Callable[[str], nn.Module]  # on a device
    inputs: Callable[[str], Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))), with an inner width that may be small."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        inner = nn.functional.gelu(self.up(self.norm(x)), approximate="tanh")
        result: Tensor = x + self.down(inner)
        return result


class Blocks(nn.Module):
    """Blocks one behind the other; gives the mean square of what comes out."""

    def __init__(self, width: int, inner: Sequence[int]) -> None:
        super().__init__()
        self.first = nn.Linear(_FEATURES, width, bias=False)
        self.layers = nn.ModuleList(Block(width, size) for size in inner)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, features) to a number."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


_FEATURES = 64
_WIDTH, _INNER = 4096, (*[1024] * 12, *[2816] * 12)


def _qwen(device: str) -> nn.Module:
    return Loss(qwen2(12, device=device))


def _norms_alone(device: str) -> nn.Module:
    model = _qwen(device)
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    return model


def _blocks(device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return Blocks(_WIDTH, _INNER).to(torch.bfloat16)


def _ids(batch: int, length: int) -> Callable[[str], Tensor]:
    return lambda device: torch.randint(152064, (batch, length), device=device)


def _features(batch: int, length: int) -> Callable[[str], Tensor]:
    shape = (batch, length, _FEATURES)
    return lambda device: torch.randn(shape, device=device, dtype=torch.bfloat16)


_STREAMED = {"resident": 0, "activations": "recompute", "state_dtype": torch.float32}
_BY_THE_CPU = {**_STREAMED, "device_update": 0}
_OFFLOADED = {"resident": "all", "activations": "offload"}
SITUATIONS = (
    Staged("tiny batch", "h2d", _norms_alone, _ids(1, 256), _BY_THE_CPU),
    Staged("huge batch", "compute", _qwen, _ids(64, 1024), _STREAMED),
    Staged("activations offloaded", "d2h", _blocks, _features(32, 512), _OFFLOADED),
    Staged("host update", "host", _qwen, _ids(4, 1024), _BY_THE_CPU),
)


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predict", action="store_true", help="for --gpu, without a GPU")
    parser.add_argument("--gpu", default="h200", help="of --predict")
    parser.add_argument("--device", default="cuda", help="that is not --predict's")
    parser.add_argument("--only", action="append", choices=[s.name for s in SITUATIONS])
    parser.add_argument("--steps", type=int, default=3, help="that are traced; 2 or more")
    parser.add_argument("--show", action="store_true", help="print all of explain")
    parser.add_argument("--save", help="write each trace to PREFIX-<situation>.json")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"--steps: got {args.steps}; needed at least 2")
    rows: list[dict[str, object]] = []
    for staged in SITUATIONS:
        if args.only and staged.name not in args.only:
            continue
        if args.predict:
            rows.append(_predict(staged, known(args.gpu)))
        else:
            rows.append(_tried(staged, args))
        print(rows[-1], flush=True)
    where = f"predicted for {known(args.gpu).name}" if args.predict else "predicted and traced"
    publish(f"What bounds a step, {where}", rows, args.out)
    return rows


def _predict(staged: Staged, hardware: Hardware) -> dict[str, object]:
    """Predict what explain will say, from the shapes alone."""
    options = abstract_options(**staged.options)
    programs = abstract_programs(
        staged.model("meta"), (staged.inputs("meta"),), options=options, hardware=hardware
    )
    if options.resident:  # there are no buckets that a model would have placed
        for program in programs:
            there = frozenset(bucket.key for bucket in program.stages.buckets)
            program.plans.placement = Placement(Places.of(there))
    now = Scenario(
        tuple(program.schedule() for program in programs),
        hardware,
        programs[0].compiler.setting.cost(),
        device_bytes=hardware.device_bytes,
    )
    timeline = now.timeline()
    busy = {lane.value: timeline.busy_s(lane) / now.step_s for lane in timeline.critical_s}
    row = _said(staged, now.bounds(), now.step_s)
    peak = f"{now.device.peak.total_bytes / 2**30:.1f}"
    return {**row, "busy": _shares(busy), "peak GPU GiB": peak}


def _said(staged: Staged, bounds: Mapping[str, float], step_s: float) -> dict[str, object]:
    bound = next(iter(bounds))
    share = bounds[bound]
    if bound in HOST:
        share = sum(bounds[name] for name in HOST)
    right = _word(bound) == staged.bound and share >= _CLEAR
    return {
        "situation": staged.name,
        "staged": staged.bound,
        "explain": bound,
        "right": "yes" if right else "NO",
        "its time depends on": _shares(bounds),
        "predicted s": f"{step_s:.4f}",
    }


def _word(bound: str | None) -> str | None:
    return "host" if bound in HOST else bound


def _shares(shares: Mapping[str, float]) -> str:
    """Those of 2 % or more."""
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.02)


def _tried(staged: Staged, args: argparse.Namespace) -> dict[str, object]:
    """A row; an error becomes one too, so that the situations behind it are still tried."""
    start = time.perf_counter()
    try:
        row = _measure(staged, args)
    except Exception as error:
        said = str(error).splitlines() or [""]
        row = {"situation": staged.name, "staged": staged.bound}
        row["right"] = f"failed: {type(error).__name__}: {said[0]}"
    torch.compiler.reset()
    gc.collect()  # the host memory of a model goes with it, before the next one wants as much
    torch.cuda.empty_cache()
    return {**row, "s in all": f"{time.perf_counter() - start:.0f}"}


def _measure(staged: Staged, args: argparse.Namespace) -> dict[str, object]:
    device = args.device
    model = staged.model(device)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    model = megacompile.megacompile(model, device=device, progress=False, **staged.options)
    gc.collect()
    torch.cuda.empty_cache()
    inputs = staged.inputs(device)
    for _ in range(3):  # compile; make the states; once as it will be
        _step(model, optimizer, inputs)
    with megacompile.trace(model) as trace:
        for _ in range(args.steps):
            _step(model, optimizer, inputs)
    found = megacompile.explain(model, trace=trace, changes=False)
    if args.show:
        print(found, flush=True)
    if args.save:
        trace.save(f"{args.save}-{staged.name.replace(' ', '-')}.json")
    row = _said(staged, found.bounds, found.step_s)
    assert found.traced_step_s is not None
    right = _word(found.traced_bound) == staged.bound
    busy = {row.stream: (row.traced_s or 0.0) / found.traced_step_s for row in found.streams}
    return {
        **row,
        "traced": found.traced_bound,
        "so it was": "yes" if right else "NO",
        "critical path of the traced steps": shares_text(found.traced_waits),
        "traced s": f"{found.traced_step_s:.4f}",
        "off by": f"{found.step_s / found.traced_step_s - 1:+.0%}",
        "busiest": max(busy, key=busy.__getitem__),
        "traced busy": _shares(busy),
    }


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    model(inputs).backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
