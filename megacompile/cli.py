"""The command line: `python -m megacompile hardware` measures the machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from megacompile.errors import OptionError
from megacompile.hardware import Hardware, load, measure
from megacompile.options import Options

_UNITS = {"_gb_s": "GB/s", "_tflop_s": "TFLOP/s", "_s": "s"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code: 0, or 2 after one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m megacompile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    hardware = commands.add_parser("hardware", help="bandwidths and rates of this machine")
    hardware.add_argument("--device", help="cuda:0, cpu; default: the GPU if there is one")
    hardware.add_argument("--again", action="store_true", help="measure even if that is on file")
    hardware.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    try:
        device = Options.resolve(device=args.device).device
    except OptionError as error:
        print(f"megacompile hardware: {error}", file=sys.stderr)
        return 2
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
