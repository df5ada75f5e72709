"""The faults, by the folders of the product: a text file for each.

Each changes what a user or a neighbouring module can notice: wrong numbers, a crash, a hang, a
leak, too much memory, a wrong report or plan. Left out is code that runs on a GPU alone.

A file of the product, and its faults:

    == runtime/model/captured.py
    key-overlaps: A program for separate inputs runs on overlapping ones.
    - return (ambient, self._overlaps(args), *map(self._key, whole))
    + return (ambient, *map(self._key, whole))

A text that nothing replaces is whole lines, which go; a lone `+` is an empty text. `@` is the place
of the probe (`Fault.near`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.faults.fault import Fault


def parsed(text: str) -> Iterator[Fault]:
    for section in text.split("\n== ")[1:]:
        path, _, blocks = section.strip("\n").partition("\n")
        for block in blocks.strip("\n").split("\n\n"):
            title, *lines = block.split("\n")
            name, _, wrong = title.partition(": ")
            old, new, near = (
                "\n".join(line[2:] for line in lines if line[0] == mark) for mark in "-+@"
            )
            if not any(line.startswith("+") for line in lines):
                old += "\n"
            yield Fault(name, path, old, new, wrong, near)


FAULTS = tuple(
    fault
    for path in sorted(Path(__file__).parent.glob("*.txt"))
    for fault in parsed(path.read_text())
)
