"""The op that a token stands for, as far as one schedule tells."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from megacompile.ir.schedule import Schedule
from megacompile.ir.tokens import Place, given

Writer = tuple[str, fx.Node]  # the name of a graph, and its op


def writers(schedule: Schedule) -> Mapping[Place, Writer]:
    """By the part of a bucket: the graph that writes it, and its last op that does.

    A part has one such graph: the backward writes gradients, and the update, or a backward that
    updates, writes weights and states. What a schedule does not write, another one may.
    """
    found: dict[Place, Writer] = {}
    for name in ("backward", "update"):
        if name in schedule.graphs:
            graph = schedule.graphs[name]
            found |= {place: (name, node) for place, node in given(graph).items()}
    return found
