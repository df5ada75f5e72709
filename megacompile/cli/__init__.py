"""The command line: `python -m megacompile COMMAND`.

`commands` declares the commands without importing torch. A user error prints a message on stderr
and exits with code 2.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from megacompile.cli.commands import COMMANDS as COMMANDS
from megacompile.errors import MegacompileError


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("python -m ")
        self.exit(2, f"{command}: {message} (see --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or 2 after one line on stderr."""
    parser = _Parser(
        prog="python -m megacompile",
        usage="python -m megacompile COMMAND [options]",
        description="Train models that do not fit on the GPU, and inspect how.",
        epilog="See python -m megacompile COMMAND --help for each command.",
    )
    commands = parser.add_subparsers(
        title="commands",
        dest="command",
        metavar="COMMAND",
        required=True,
        prog="python -m megacompile",
    )
    for command in COMMANDS:
        command.add_options(
            commands.add_parser(command.name, help=command.help, description=command.description)
        )
    args = parser.parse_args(argv)
    command = next(command for command in COMMANDS if args.command == command.name)
    try:
        command.check(args)
        work = importlib.import_module(f"{__name__}.{command.name}_command")
        return int(work.run(args))
    except (MegacompileError, OSError) as error:
        print(f"megacompile {command.name}: {error}", file=sys.stderr)
        return 2
