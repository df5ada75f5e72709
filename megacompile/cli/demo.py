"""Train a small GPT on the source of this package, and see what runs.

It prints the losses, the schedule as a table of steps by streams, and a trace of one step.
"""

from __future__ import annotations

import argparse

from megacompile.cli import outputs
from megacompile.errors import OptionError

NAME = "demo"
HELP = "train a small model, and see its schedule and its trace"

TRACED = 3  # the step that is traced: what is compiled, is by then


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--steps", type=int, default=30, help=f"{TRACED} or more; default: 30")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32; default: 128")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 128 bytes; default: 8")
    parser.add_argument("--device", help="cuda:0, cpu; default: the GPU if there is one")
    parser.add_argument("--code", action="store_true", help="print the schedule's Python too")
    outputs.add_save(parser)
    parser.add_argument("--json", action="store_true", help="print losses and totals as JSON")


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be run, before torch is imported."""
    for name, least in (("steps", TRACED), ("layers", 1), ("width", 32), ("batch", 1)):
        value = getattr(args, name)
        if value < least:
            raise OptionError(f"--{name} {value}: needed {least} or more")
    if args.width % 32:
        raise OptionError(f"--width {args.width}: needed a multiple of 32")
    outputs.check(args.save)
