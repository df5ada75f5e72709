"""Measure the bandwidths and rates of this machine. It takes seconds.

The rates are kept in a file. Predictions are made from them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from megacompile.cost.hardware import Hardware
from megacompile.cost.probe import measure
from megacompile.cost.rates import load
from megacompile.options import Options

NAME = "hardware"
HELP = "bandwidths and rates of this machine"

_UNITS = {"_gb_s": "GB/s", "_tflop_s": "TFLOP/s", "_s": "s"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--device", help="cuda:0, cpu; default: the GPU if there is one")
    parser.add_argument("--again", action="store_true", help="measure even if that is on file")
    parser.add_argument("--json", action="store_true", help="print JSON")


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
