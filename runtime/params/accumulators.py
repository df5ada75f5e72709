"""The leaves of autograd's graph: the AccumulateGrad nodes of parameters, and other nodes that lead
to them.

A captured graph returns a gradient to autograd without waiting for its copy to the host, and may
add it on the device to the current `p.grad`. Both are correct only if nothing reads the gradient
before `backward()` returns. This module finds possible readers: hooks on the parameter or its node,
and other users of the parameter in the same backward (a penalty, a tied head outside of the model).
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
    """The AccumulateGrad node of one parameter; `Gradients` keeps it until the buckets change."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self.node = compat.accumulator_of(param)
        self._before, self._behind = compat.hooks_of(self.node)

    @property
    def hooks(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """The Python hooks on the node; the dicts are live."""
        return self._before, self._behind

    @property
    def hooked_node(self) -> bool:
        """True if a Python hook is registered on the node; a new node would lack it."""
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
        """True, inside a backward, if it accumulates here; see `compat.accumulates_into`."""
        return compat.accumulates_into(self.node)


class Accumulators:
    """The AccumulateGrad nodes of several parameters, queried together because every step queries
    each."""

    def __init__(self, ends: Sequence[Accumulator]) -> None:
        self.params = [end.param for end in ends]
        self.ids = frozenset(map(id, self.params))
        self.nodes: list[object] = [end.node for end in ends]
        self._hooks = [hooks for end in ends for hooks in end.hooks]

    @property
    def hooked(self) -> bool:
        """True if a hook of any kind will see one of their gradients."""
        with unguarded():
            return any(self._hooks) or compat.any_hooked(self.params)

    @property
    def all_run(self) -> bool:
        """True, inside a backward, if it accumulates into all of them, as far as each is known."""
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

    others: frozenset[int]  # with users other than captured graphs
    several: frozenset[int]  # used by several captured graphs, or by one that ran twice
    nodes: frozenset[object]  # the backward's number


def users_of(call: compat.BackwardCall, graph: type, gate: type, link: type) -> Users:
    """The users of parameters in a backward.

    Args:
        call: the backward.
        graph: the autograd function class of captured graphs.
        gate: the function class of their gates. A gate's first edge leads to the next gate, the
            others lead to parameters, each once.
        link: the function class that connects a proxy to its parameter, `ctx.param`. An edge to it
            counts as an edge to the parameter, except from captured graphs, whose gates have one
            too. An edge from a graph to a parameter belongs to a tensor input of the call.
    """
    end, joins = compat.ACCUMULATOR, compat.node_class(link)
    of_graph, of_gate = compat.node_class(graph), compat.node_class(gate)
    todo: list[Any] = [compat.root_node(root) for root in call.roots]
    others = {id(node.variable) for node in todo if type(node) is end}
    gates = list[Sequence[Any]]()  # edges to parameters
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
