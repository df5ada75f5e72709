"""Declares the commands of the command line: their help, options and checks.

Nothing here imports torch, so that `--help` and errors appear at once. The work of a command is
`run(args)` in the module of its name. The options of `plan` are in `plan_arguments`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from megacompile.cli import plan_arguments
from megacompile.errors import OptionError

TRACED = 3  # the step that `demo` traces, after everything is compiled
_SAVED = (".json", ".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Command:
    """The parts of a command that need no torch."""

    name: str  # its `run` is in the module `{name}_command`
    help: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    check: Callable[[argparse.Namespace], None] = lambda args: None  # raises OptionError


# --- demo


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=30, help=f"{TRACED} or more; default: 30")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32; default: 128")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 128 bytes; default: 8")
    parser.add_argument("--device", help="cuda:0, cpu; default: the GPU if there is one")
    parser.add_argument("--code", action="store_true", help="print the schedule's Python too")
    _add_save(parser)
    parser.add_argument("--json", action="store_true", help="print losses and totals as JSON")


def _check_demo(args: argparse.Namespace) -> None:
    for name, least in (("steps", TRACED), ("layers", 1), ("width", 32), ("batch", 1)):
        value = getattr(args, name)
        if value < least:
            raise OptionError(f"--{name} {value}: needed {least} or more")
    if args.width % 32:
        raise OptionError(f"--width {args.width}: needed a multiple of 32")
    _check_save(args.save)


# --- trace


def _trace_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "python -m megacompile trace [options] SCRIPT [arguments of the script]"
    parser.add_argument(
        "--step",
        type=int,
        default=3,
        metavar="N",
        help="trace the step that ends with the N-th call of optimizer.step(); default: 3, "
        "because the first two compile",
    )
    _add_save(parser)
    parser.add_argument("--json", action="store_true", help="print the totals as JSON")
    parser.add_argument("--go-on", action="store_true", help="run the script to its end")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        help="a Python file, a module (with -m), or a .json file that --save wrote",
    )
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )


def _check_trace(args: argparse.Namespace) -> None:
    if args.step < 1:
        raise OptionError(f"--step {args.step}: needed 1 or more")
    if args.module:
        _check_module(args.script)
    elif not Path(args.script).is_file():
        raise OptionError(f"no such file: {args.script!r} (for a module, use -m)")
    _check_save(args.save)


def _check_module(name: str) -> None:
    """Check that `python -m` can run a module. Imports the packages that contain it."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = _spec(name)
        if found is not None and found.submodule_search_locations is not None:  # a package
            found = _spec(f"{name}.__main__")
    finally:
        sys.path.pop(0)
    if found is None:
        raise OptionError(
            f"-m {name}: no such module that can be run (a package needs a __main__.py); run the "
            "command where `import` finds it, or pass a file without -m"
        )


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError) as error:  # ValueError: "a..b", ""
        if isinstance(error, ModuleNotFoundError) and not f"{name}.".startswith(f"{error.name}."):
            raise  # a containing package fails to import something else
        return None


# --- output files


def _add_save(parser: argparse.ArgumentParser) -> None:
    """Add the option `--save`."""
    parser.add_argument(
        "--save",
        metavar="FILE",
        action="append",
        type=Path,
        default=[],
        help="write the trace: .json for ui.perfetto.dev and chrome://tracing, .png, .svg or .pdf "
        "for a picture (needs matplotlib); may be given several times",
    )


def _check_save(paths: list[Path]) -> None:
    """Check before anything runs that each file can be written.

    Raises:
        OptionError: an unknown suffix, or a missing folder.
    """
    for path in paths:
        if path.suffix not in _SAVED:
            known = ", ".join(_SAVED)
            raise OptionError(f"--save {path}: got the suffix {path.suffix!r}; needed {known}")
        if not path.parent.is_dir():
            raise OptionError(f"--save {path}: no such folder: {str(path.parent)!r}")


def print_json(value: Any) -> None:
    """Print JSON on stdout."""
    print(json.dumps(value, indent=2))


# --- hardware


def _hardware_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cuda:0, cpu; default: the GPU if there is one")
    parser.add_argument("--disk", metavar="PATH", help="also measure the disk of this folder")
    parser.add_argument("--again", action="store_true", help="measure even if rates are cached")
    parser.add_argument("--json", action="store_true", help="print JSON")


COMMANDS = (
    Command(
        "demo",
        "train a small model and show its schedule and trace",
        """Train a small GPT on the source of this package and show what runs.

Prints the losses, the schedule as a table of steps by streams, and a trace of one step.""",
        _demo_options,
        _check_demo,
    ),
    Command(
        "plan",
        "find out if a model fits on a machine and how fast it trains",
        plan_arguments.DESCRIPTION,
        plan_arguments.add_options,
        plan_arguments.check,
    ),
    Command(
        "trace",
        "trace a training step of a script",
        """Run a training script and trace one step of its megacompiled models.

The trace has the times of all ops on all streams. It begins with the update of the previous step,
which overlaps the step's forward, and ends with the step's backward. The script ends there unless
you give --go-on.

    python -m megacompile trace --save step.json train.py --batch 16

A saved trace can be read later, also on another machine. Its last whole step is printed or plotted:

    python -m megacompile trace --save step.png step.json""",
        _trace_options,
        _check_trace,
    ),
    Command(
        "hardware",
        "measure the rates of this machine",
        """Measure the bandwidths and rates of this machine in a few seconds.

The rates are cached in a file, and predictions use them.""",
        _hardware_options,
    ),
)
