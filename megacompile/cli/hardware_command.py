"""The command `hardware`: measures rates, or reads the cached ones."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from megacompile import numa
from megacompile.cost.hardware import Hardware
from megacompile.cost.rates import load, load_disk
from megacompile.options import Options

_UNITS = {"_gb_s": "GB/s", "_tflop_s": "TFLOP/s", "_s": "s"}


def run(args: argparse.Namespace) -> int:
    """Print the rates."""
    device = Options.resolve(device=args.device).device
    found = load(device, again=args.again)
    if args.disk is not None:
        found = load_disk(args.disk, again=args.again).on(found)
    if args.json:
        print(json.dumps(asdict(found)))
        return 0
    print(_table(found))
    if (node := numa.node_of(device)) is not None:
        print(f"  {'NUMA node':15} {node}")
    return 0


def _table(hardware: Hardware) -> str:
    rows = [hardware.name]
    for name, value in asdict(hardware).items():
        for suffix, unit in _UNITS.items():
            if name.endswith(suffix) and value is not None:
                rows.append(f"  {name.removesuffix(suffix):15} {value:12.6g} {unit}")
                break
    return "\n".join(rows)
