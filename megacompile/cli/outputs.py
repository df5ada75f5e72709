"""Output options that all commands which trace share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacompile.errors import OptionError

_DRAWN = (".png", ".svg", ".pdf")


def add_save(parser: argparse.ArgumentParser) -> None:
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


def check(paths: Sequence[Path]) -> None:
    """Check that each file can be written, before anything runs.

    Raises:
        OptionError: an ending that is not known, or a folder that is not there.
    """
    for path in paths:
        if path.suffix not in (".json", *_DRAWN):
            known = ", ".join((".json", *_DRAWN))
            raise OptionError(f"--save {path}: got the ending {path.suffix!r}; needed {known}")
        if not path.parent.is_dir():
            raise OptionError(f"--save {path}: there is no folder {str(path.parent)!r}")


def print_json(value: Any) -> None:
    """JSON on stdout."""
    print(json.dumps(value, indent=2))
