"""The commands of the command line: help, options, and the mistakes in them.

Nothing here imports torch, so that `--help` and mistakes are answered at once. The work of a
command is `run(args)` in the module of its name. The options of `plan` are in `plan_arguments`.
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

TRACED = 3  # the step of `demo` that is traced: what is compiled, is by then
_SAVED = (".json", ".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class Command:
    """One command, as far as it is known without torch."""

    name: str  # and that of the module whose `run` does the work
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
        help="which call of optimizer.step() the traced step leads to; default: 3, after what is "
        "compiled in the first two",
    )
    _add_save(parser)
    parser.add_argument("--json", action="store_true", help="print the totals as JSON")
    parser.add_argument("--go-on", action="store_true", help="let the script run to its end")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        help="a Python file, or with -m a module; or a .json that --save wrote",
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _check_trace(args: argparse.Namespace) -> None:
    if args.step < 1:
        raise OptionError(f"--step {args.step}: needed 1 or more")
    if args.module:
        _check_module(args.script)
    elif not Path(args.script).is_file():
        raise OptionError(f"there is no file {args.script!r} (for a module's name, give -m)")
    _check_save(args.save)


def _check_module(name: str) -> None:
    """Refuse what `python -m` could not run. The packages that a module is in are imported."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = _spec(name)
        if found is not None and found.submodule_search_locations is not None:  # a package
            found = _spec(f"{name}.__main__")
    finally:
        sys.path.pop(0)
    if found is None:
        raise OptionError(
            f"-m {name}: there is no module of that name that can be run (a package needs a "
            "__main__.py); run the command where `import` finds it, or give a file without -m"
        )


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError) as error:  # ValueError: "a..b", ""
        if isinstance(error, ModuleNotFoundError) and not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that it is in lacks something else
        return None


# --- what commands write


def _add_save(parser: argparse.ArgumentParser) -> None:
    """The option `--save`."""
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
    """Check that each file can be written, before anything runs.

    Raises:
        OptionError: an ending that is not known, or a folder that is not there.
    """
    for path in paths:
        if path.suffix not in _SAVED:
            known = ", ".join(_SAVED)
            raise OptionError(f"--save {path}: got the ending {path.suffix!r}; needed {known}")
        if not path.parent.is_dir():
            raise OptionError(f"--save {path}: there is no folder {str(path.parent)!r}")


def print_json(value: Any) -> None:
    """JSON on stdout."""
    print(json.dumps(value, indent=2))


# --- hardware


def _hardware_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cuda:0, cpu; default: the GPU if there is one")
    parser.add_argument("--disk", metavar="PATH", help="the rates of the disk of this folder too")
    parser.add_argument(
        "--again", action="store_true", help="measure, and keep it, even if that is on file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


COMMANDS = (
    Command(
        "demo",
        "train a small model, and see its schedule and its trace",
        """Train a small GPT on the source of this package, and see what runs.

It prints the losses, the schedule as a table of steps by streams, and a trace of one step.""",
        _demo_options,
        _check_demo,
    ),
    Command(
        "plan",
        "if a model fits on a machine, and how fast it trains",
        plan_arguments.DESCRIPTION,
        plan_arguments.add_options,
        plan_arguments.check,
    ),
    Command(
        "trace",
        "when every op of a script's training step runs",
        """Run a training script and trace one step of its megacompiled models.

The trace has the time of every op, on every stream. It begins with the update of the step before,
which the step's forward overlaps, and ends with the step's backward. The script ends there, unless
you give --go-on.

    python -m megacompile trace --save step.json train.py --batch 16

A saved trace can be read again, also on another machine. Its last whole step is printed or drawn:

    python -m megacompile trace --save step.png step.json""",
        _trace_options,
        _check_trace,
    ),
    Command(
        "hardware",
        "bandwidths and rates of this machine",
        """Measure the bandwidths and rates of this machine. It takes seconds.

The rates are kept in a file. Predictions are made from them.""",
        _hardware_options,
    ),
)
