"""The command line: `python -m megacompile COMMAND`.

A command is two modules here. `NAME.py` has `NAME`, `HELP`, `arguments(parser)` and `check(args)`;
its docstring is what `--help` shows. It imports no torch, so that help and mistakes are answered at
once. `run_NAME.py` has `run(args) -> int`. A user's fault is one line on stderr and exit code 2,
what a library says of it in full.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from megacompile.cli import demo, hardware, plan, trace
from megacompile.errors import MegacompileError

COMMANDS: tuple[ModuleType, ...] = (demo, plan, trace, hardware)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("python -m ")
        self.exit(2, f"{command}: {message} (--help lists what there is)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or 2 after one line on stderr."""
    parser = _Parser(
        prog="python -m megacompile",
        usage="python -m megacompile COMMAND [options]",
        description="Train models that do not fit on the GPU, and see how.",
        epilog="python -m megacompile COMMAND --help tells more of each.",
    )
    commands = parser.add_subparsers(
        title="commands",
        dest="command",
        metavar="COMMAND",
        required=True,
        prog="python -m megacompile",
    )
    for module in COMMANDS:
        command = commands.add_parser(
            module.NAME, help=module.HELP, description=(module.__doc__ or "").strip()
        )
        module.arguments(command)
    args = parser.parse_args(argv)
    module = next(module for module in COMMANDS if args.command == module.NAME)
    try:
        module.check(args)
        work = importlib.import_module(f"{__name__}.run_{module.NAME}")
        return int(work.run(args))
    except (MegacompileError, OSError) as error:
        print(f"megacompile {module.NAME}: {error}", file=sys.stderr)
        return 2
