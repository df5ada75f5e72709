"""The ends of autograd's graph: the AccumulateGrad nodes of parameters, and what else leads to
them.

A captured graph hands a gradient to autograd without waiting for its copy to the host, and may sum
it on the device with what `p.grad` holds already. Both are right only if neither is read before
`backward()` returns. Those who may look are found here: hooks on the parameter or on its node, and
other users of the parameter in the same backward (a penalty, a tied head outside of the model).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from megacompile import compat
from megacompile.runtime.params.guards import unguarded


class Accumulator:
    """The AccumulateGrad node of one parameter; `Gradients` has it until the buckets change."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self.node = compat.accumulator_of(param)
        self._before, self._behind = compat.hooks_of(self.node)

    @property
    def hooks(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """Those of Python on the node; the dicts follow what is registered."""
        return self._before, self._behind

    @property
    def hooked_node(self) -> bool:
        """True if a hook of Python is registered on the node, which a new node would not have."""
        return bool(self._before or self._behind)

    @property
    def hooked_before(self) -> bool:
        """True if a hook will see the gradient before it is accumulated."""
        return bool(self._before or compat.gradient_hooks(self.param))

    @property
    def hooked(self) -> bool:
        """True if a hook of any kind will see the gradient."""
        behind = self._behind or compat.post_accumulate_hooks(self.param)
        return bool(behind or self.hooked_before)

    @property
    def runs(self) -> bool | None:
        """Inside a backward: see `compat.accumulates_into`."""
        return compat.accumulates_into(self.node)


class Accumulators:
    """The AccumulateGrad nodes of several parameters, which are asked together: in each step, of
    each parameter."""

    def __init__(self, ends: Sequence[Accumulator]) -> None:
        self.params = [end.param for end in ends]
        self.ids = frozenset(map(id, self.params))
        self.nodes: list[object] = [end.node for end in ends]
        self._hooks = [hooks for end in ends for hooks in end.hooks]

    @property
    def hooked(self) -> bool:
        """True if a hook of any kind will see a gradient of theirs."""
        with unguarded():
            return any(self._hooks) or compat.any_hooked(self.params)

    @property
    def all_run(self) -> bool:
        """Inside a backward: true if it accumulates into all of them, as far as is known of
        each."""
        trained = all(map(_TRAINED, self.params))
        return trained and compat.accumulates_into_all(self.nodes)  # type: ignore[arg-type]

    @property
    def without_gradients(self) -> bool:
        """True if none of the parameters has a `p.grad`."""
        return _NO_GRADIENT.issuperset(map(type, map(_GRADIENT, self.params)))


_TRAINED = attrgetter("requires_grad")
_GRADIENT = attrgetter("grad")
_NO_GRADIENT = frozenset((type(None),))


@dataclass(frozen=True, slots=True)
class Users:
    """The users of parameters in one backward, by the id of the parameter."""

    others: frozenset[int]  # used by others than captured graphs
    several: frozenset[int]  # used by more than one captured graph, or by one that ran twice
    nodes: frozenset[object]  # of the backward


def users_of(call: compat.BackwardCall, graph: type, gate: type, link: type) -> Users:
    """The users of parameters in a backward.

    Args:
        call: the backward.
        graph: the autograd function of captured graphs.
        gate: that of their gates, whose first edge leads to the next gate, and the others to
            parameters, each once.
        link: the one that joins a proxy to its parameter, `ctx.param`; an edge to it counts as one
            to the parameter, but for those of captured graphs, whose gates have one too. An edge
            from a graph to a parameter is of a tensor that a call was given.
    """
    end, joins = compat.ACCUMULATOR, compat.node_class(link)
    of_graph, of_gate = compat.node_class(graph), compat.node_class(gate)
    todo: list[Any] = [compat.root_node(root) for root in call.roots]
    others = {id(node.variable) for node in todo if type(node) is end}
    gates = list[Sequence[Any]]()  # their edges to parameters
    seen: set[object] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        following = node.next_functions
        if type(node) is of_gate:
            gates.append(following[1:])
            following = following[:1]
        is_graph, is_link = type(node) is of_graph, type(node) is joins
        for after, _ in following:
            kind = type(after)
            if kind is end:
                if not is_link:
                    others.add(id(after.variable))
            elif kind is joins:
                if not is_graph:
                    others.add(id(after.param))
            elif after is not None:
                todo.append(after)
    several: frozenset[int] = frozenset()
    if len(gates) > 1:
        uses = Counter(id(after.variable) for of in gates for after, _ in of if type(after) is end)
        several = frozenset(key for key, count in uses.items() if count > 1)
    return Users(frozenset(others), several, frozenset(seen))
