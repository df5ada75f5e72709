"""The parts of a program: each is a few lines that a user could have written.

A part is made of source text. `p0` stands for its own name in it, which is a member of the model.
Its text depends on nothing but its kind and its seed: a program without another part has the same.
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass

BREAKS = {  # what ends a captured graph
    "print": 'print(end="")',
    "graph_break": "torch._dynamo.graph_break()",
    "untraced call": "untraced()",
}


@dataclass(frozen=True)
class Part:
    """Lines of a program, by the place they belong to."""

    features: tuple[str, ...] = ()  # what was drawn
    top: str = ""  # of the module
    init: str = "self.p0 = P0()"  # in the model's `__init__`
    call: str = "x = self.p0(x, k, t)"  # in its `forward`
    inputs: str = ""  # another argument of the call
    methods: str = ""  # of the model's class
    prepare: str = ""  # before `megacompile()`; fills `kept`
    setup: str = ""  # after it
    ahead: str = ""  # of each forward, where `x` and `t` are made
    between: str = ""  # a forward and its backward, in the second step
    behind: str = ""  # each backward
    stepped: str = ""  # after each step of the optimizer
    end: str = ""
    rounds: bool = False  # may a gradient be summed in another order than in the plain program?


def module(init: str, forward: str, *, before: str = "", more: str = "") -> str:
    """The class of a part, after the lines that it needs."""
    init, forward, more = (textwrap.dedent(text).strip("\n") for text in (init, forward, more))
    lines = [
        textwrap.dedent(before).strip("\n") + "\n\n" if before else "",
        "class P0(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        textwrap.indent(init, " " * 8),
        "",
        "    def forward(self, x, k, t):",
        textwrap.indent(forward, " " * 8),
        "\n" + textwrap.indent(more, " " * 4) if more else "",
    ]
    return "\n".join(lines).strip("\n")


def drawn_break(rng: random.Random, none: int = 2) -> tuple[str, str]:
    """A name and a line; of `none` + 3 draws `none` have none."""
    return rng.choice([*BREAKS.items(), *[("", "pass")] * none])
