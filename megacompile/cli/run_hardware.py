"""The command `hardware`: measures, or reads what was measured."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from megacompile.cost.hardware import Hardware
from megacompile.cost.probe import measure
from megacompile.cost.rates import load
from megacompile.options import Options

_UNITS = {"_gb_s": "GB/s", "_tflop_s": "TFLOP/s", "_s": "s"}


def run(args: argparse.Namespace) -> int:
    """Print the rates."""
    device = Options.resolve(device=args.device).device
    found = measure(device) if args.again else load(device)
    print(json.dumps(asdict(found)) if args.json else _table(found))
    return 0


def _table(hardware: Hardware) -> str:
    rows = [hardware.name]
    for name, value in asdict(hardware).items():
        for suffix, unit in _UNITS.items():
            if name.endswith(suffix):
                rows.append(f"  {name.removesuffix(suffix):10} {value:12.6g} {unit}")
                break
    return "\n".join(rows)
