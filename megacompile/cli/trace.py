"""Run a training script and trace one step of its megacompiled models.

The trace has the time of every op, on every stream. It begins with the update of the step before,
which the step's forward overlaps, and ends with the step's backward. The script ends there, unless
you give --go-on.

    python -m megacompile trace --save step.json train.py --batch 16

A saved trace can be read again, also on another machine. Its last whole step is printed or drawn:

    python -m megacompile trace --save step.png step.json
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from megacompile.cli import outputs
from megacompile.errors import OptionError

NAME = "trace"
HELP = "when every op of a script's training step runs"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "python -m megacompile trace [options] SCRIPT [arguments of the script]"
    parser.add_argument(
        "--step",
        type=int,
        default=3,
        metavar="N",
        help="which call of optimizer.step() the traced step leads to; default: 3, after what is "
        "compiled in the first two",
    )
    outputs.add_save(parser)
    parser.add_argument("--json", action="store_true", help="print the totals as JSON")
    parser.add_argument("--go-on", action="store_true", help="let the script run to its end")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        help="a Python file, or with -m a module; or a .json that --save wrote",
    )
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be run, before torch is imported."""
    if args.step < 1:
        raise OptionError(f"--step {args.step}: needed 1 or more")
    if args.module:
        _check_module(args.script)
    elif not Path(args.script).is_file():
        raise OptionError(f"there is no file {args.script!r} (for a module's name, give -m)")
    outputs.check(args.save)


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
