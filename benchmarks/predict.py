"""Predicted against measured: the cost model and the simulation on a machine without a GPU.

    python -m benchmarks.predict
    python -m benchmarks.predict --layers 28 --batch 32 --gpu 4090 --host-gib 128

Without `--layers`, the cases of `benchmarks/cases.py` that were measured are planned for the H200
of `megacompile.cost.hardware` and held against what benchmarks/results/h200-train-step.md has of
them. There the prediction is made on the GPU's machine, from its own rates; here it is made from
rates that were measured once, so that what differs between machines of a kind is in the error. With
`--layers`, one step is predicted for any of the known GPUs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import GROUPS, Case
from benchmarks.models import Loss, parameters, qwen2
from benchmarks.report import publish
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.memory import device_memory
from megacompile.cost.places import host_memory
from megacompile.cost.rates import known
from megacompile.cost.simulate import simulate
from megacompile.plan.abstract import abstract_options, abstract_programs

_RESULTS = Path(__file__).parent / "results" / "h200-train-step.md"


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
    hardware = known(args.gpu) if args.layers else H200
    if args.host_gib:
        hardware = hardware.replace(host_bytes=int(args.host_gib * 2**30))
    asked: list[tuple[Case, dict[str, Any]]] = [
        (Case("planned", layers=args.layers or 0, batch=args.batch), {})
    ]
    rows = []
    for case, measured in asked if args.layers else _measured():
        rows.append(_row(case, measured, hardware, show=args.show))
        print(rows[-1], flush=True)
    publish(f"Predicted for {hardware.name}", rows, args.out)
    return rows


def _measured() -> Iterator[tuple[Case, dict[str, Any]]]:
    """The cases, and the rows of the results that are of them."""
    lines = [line for line in _RESULTS.read_text().splitlines() if line.startswith("{")]
    rows = {_key(row): row for row in map(json.loads, lines) if "predicted s" in row}
    for case in (case for cases in GROUPS.values() for case in cases):
        cap = "" if case.cap_gib is None else f"{case.cap_gib:g}"
        key = (case.name, f"{case.layers} layers", f"{case.batch}x{case.length}", cap)
        if key in rows:
            yield case, rows[key]


def _key(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row["case"], row["model"], row["tokens"], row["cap GiB"]


def _row(
    case: Case, measured: dict[str, Any], hardware: Hardware, *, show: bool
) -> dict[str, object]:
    model = qwen2(case.layers, device="meta", dtype=case.dtype)
    count = parameters(model)
    given: dict[str, Any] = {**case.options, "state_dtype": case.state_dtype}
    if case.in_backward:
        given["optimizer"] = torch.optim.AdamW(model.parameters())
    if case.cap_gib is not None:
        hardware = hardware.replace(device_bytes=int(case.cap_gib * 2**30))
    options = abstract_options(**given)
    ids = torch.empty(case.batch, case.length, dtype=torch.int64, device="meta")
    (program,) = abstract_programs(Loss(model), (ids,), options=options, hardware=hardware)
    start = time.perf_counter()
    schedule = program.schedule()
    planned_s = time.perf_counter() - start
    optimizer = program.compiler.setting.cost()
    timeline = simulate(schedule, hardware, optimizer=optimizer, steps=3)
    peak = device_memory(schedule, optimizer=optimizer).peak
    host = sum(host_memory(schedule, optimizer).values())
    if show:
        print(f"{case.name}, {case.text}\n{timeline}", flush=True)
        for kind, size in peak.live_bytes.items():
            print(
                f"  {kind.value}: {size / 2**30:.2f} GiB at {peak.graph} {peak.label}", flush=True
            )
    found = {"s": timeline.step_s, "peak GiB": peak.total_bytes / 2**30, "host GiB": host / 2**30}
    row: dict[str, object] = {
        "case": case.name,
        "model": f"{case.layers} layers, {count / 1e9:.2f} B",
        "tokens": f"{case.batch}x{case.length}",
        "cap GiB": "" if case.cap_gib is None else f"{case.cap_gib:g}",
        "bound by": max(timeline.critical_s, key=timeline.critical_s.__getitem__).value,
        "planned in s": f"{planned_s:.1f}",
    }
    for name, value in found.items():
        row[f"predicted {name}"] = f"{value:.3f}" if name == "s" else f"{value:.1f}"
        if measured.get(name):
            row[name] = measured[name]
            row[f"error of {name}"] = _error(value, float(measured[name]))
    return row


def _error(predicted: float, measured: float) -> str:
    if not measured or (measured < 1.0 <= predicted):
        return ""
    return f"{predicted / measured - 1:+.1%}"


if __name__ == "__main__":
    main()
