"""Predicted against measured: the cost model and the simulation on a machine without a GPU.

    python -m benchmarks.predict
    python -m benchmarks.predict --layers 28 --batch 32 --gpu 4090 --host-gib 128

Without `--layers`, every configuration of Qwen2.5-7B's width whose measured time stands in
benchmarks/results/h200-*.md is predicted for the H200 and held against it; the last two are one
decoder layer alone. With it, one step is predicted for any of the known GPUs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.models import parameters, qwen2
from benchmarks.report import publish
from megacompile.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.cost import compute_s
from megacompile.hardware import H200, Hardware, known
from megacompile.ir import Code
from megacompile.memory import host_memory
from megacompile.optimizer_cost import OptimizerCost
from megacompile.simulate import Timeline, simulate


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a configuration, and where."""

    system: str
    layers: int
    batch: int
    time_s: float
    peak_gib: float
    host_bytes: float | None = None  # a parameter
    optimizer: str | None = None  # "exact", "backward"
    state_dtype: Any = torch.float32


MEASURED = (  # h200-forward-backward.md, h200-train-step.md
    Measured("forward and backward", 12, 16, 0.7099, 15.1),
    Measured("forward and backward", 28, 16, 1.4889, 16.8),
    Measured("exact", 12, 16, 1.302, 15.1, 12.01, "exact"),
    Measured("exact", 12, 64, 2.965, 47.9, 13.12, "exact"),
    Measured("in the backward", 12, 16, 0.993, 29.6, 10.01, "backward"),
    Measured("in the backward, 8-bit", 12, 16, 0.795, 20.9, 4.10, "backward", "int8"),
)
LAYER_USEFUL_FLOPS = 6 * 233_057_792 * 16 * 1024  # 6NT of one layer
LAYERS = (  # one layer alone, TFLOP/s by 6NT: everything kept, everything recomputed
    ("one layer, kept", 623.0, (Code.FORWARD_SAVING, Code.BACKWARD)),
    ("one layer, recomputed", 508.0, (Code.FORWARD, Code.RECOMPUTE, Code.BACKWARD)),
)


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="predict this depth alone")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--host-gib", type=float)
    parser.add_argument("--show", action="store_true", help="print each timeline's sums too")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    if args.layers:
        hardware = known(args.gpu)
        if args.host_gib:
            hardware = hardware.replace(host_bytes=int(args.host_gib * 2**30))
        asked = Measured("exact", args.layers, args.batch, 0.0, 0.0, None, "exact")
        rows = [_row(asked, hardware, show=args.show)]
    else:
        rows = [_row(measured, H200, show=args.show) for measured in MEASURED]
        rows += _layers()
    fitted = "sustained and attention_share: fitted to an H200's times"
    title = f"Predicted for {known(args.gpu).name} ({fitted})"
    publish(title, rows, args.out)
    return rows


def _row(measured: Measured, hardware: Hardware, *, show: bool) -> dict[str, object]:
    timeline, program, optimizer, count = _predict(measured, hardware)
    start = time.perf_counter()
    schedule = program.schedule()
    built_s = time.perf_counter() - start
    start = time.perf_counter()
    simulate(schedule, hardware, optimizer=optimizer, steps=3)
    simulated_s = time.perf_counter() - start
    host = sum(host_memory(schedule, optimizer).values()) / count
    peak = timeline.memory.peak
    if show:
        print(f"{measured.system}, {measured.layers} layers\n{timeline}\n{peak}\n", flush=True)
    row: dict[str, object] = {
        "system": measured.system,
        "layers": measured.layers,
        "tokens": f"{measured.batch}x1024",
        "predicted s": f"{timeline.step_s:.3f}",
        "measured s": f"{measured.time_s:.3f}" if measured.time_s else "",
        "error": _error(timeline.step_s, measured.time_s),
        "bound by": timeline.bound.value,
        "peak GiB": f"{peak.total_bytes / 2**30:.1f}",
        "measured GiB": f"{measured.peak_gib:.1f}" if measured.peak_gib else "",
        "error of it": _error(peak.total_bytes / 2**30, measured.peak_gib),
        "host bytes/parameter": f"{host:.2f}",
        "measured of it": measured.host_bytes or "",
        "error of that": _error(host, measured.host_bytes or 0.0),
        "schedule s": f"{built_s:.1f}",
        "simulation s": f"{simulated_s:.3f}",
    }
    return row


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else ""


def _predict(
    measured: Measured, hardware: Hardware
) -> tuple[Timeline, AbstractProgram, OptimizerCost | None, int]:
    model = qwen2(measured.layers, device="meta")
    given: dict[str, Any] = {"state_dtype": measured.state_dtype}
    if measured.optimizer == "backward":
        given["optimizer"] = torch.optim.AdamW(model.parameters())
    options = abstract_options(**given)
    ids = torch.empty(measured.batch, 1024, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids}
    (program,) = abstract_programs(model, (), inputs, options=options)
    optimizer = None if measured.optimizer is None else OptimizerCost.of(options)
    steps = 1 if optimizer is None else 3
    timeline = simulate(program.schedule(), hardware, optimizer=optimizer, steps=steps)
    return timeline, program, optimizer, parameters(model)


def _layers() -> list[dict[str, object]]:
    """One decoder layer, 16x1024 tokens."""
    model = qwen2(3, device="meta")
    ids = torch.empty(16, 1024, dtype=torch.int64, device="meta")
    (program,) = abstract_programs(model, (), {"input_ids": ids, "labels": ids})
    template = program.schedule().stages[2].traced
    rows: list[dict[str, object]] = []
    for name, rate, codes in LAYERS:
        measured = LAYER_USEFUL_FLOPS / (rate * 1e12)
        predicted = sum(compute_s(template, code, H200) for code in codes)
        rows.append(
            {
                "system": name,
                "layers": 1,
                "tokens": "16x1024",
                "predicted s": f"{predicted:.4f}",
                "measured s": f"{measured:.4f}",
                "error": _error(predicted, measured),
            }
        )
    return rows


if __name__ == "__main__":
    main()
