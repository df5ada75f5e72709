"""Measure the bandwidths and rates of this machine. It takes seconds.

The rates are kept in a file. Predictions are made from them.
"""

from __future__ import annotations

import argparse

NAME = "hardware"
HELP = "bandwidths and rates of this machine"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--device", help="cuda:0, cpu; default: the GPU if there is one")
    parser.add_argument("--disk", metavar="PATH", help="the rates of the disk of this folder too")
    parser.add_argument(
        "--again", action="store_true", help="measure, and keep it, even if that is on file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def check(args: argparse.Namespace) -> None:
    """Nothing is wrong that the parser does not see."""
    del args
