"""Lay the images of a stage's convolutions out with their channels last, for Inductor.

    before: conv(x, w) relu conv               after: conv(clone(x), w) relu conv clone

Convolutions of cuDNN work on channels that lie together, and copy what does not. Inductor lays them
out so within a graph that it compiles; what a forward saves for its backward is the end of one. So
the joint graph itself is given other strides, as if the model's own input had them: each operator
takes what the one before gives, and what the stage returns is as it was.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.passes.edit import NotComputedError, computed

aten = torch.ops.aten

_IMAGES: dict[Any, tuple[int, ...]] = {  # operator -> its arguments that are images
    aten.convolution.default: (0,),
    aten.convolution_backward.default: (0, 1),
}
# Those that give what they are asked for whatever the strides, and whose result follows them.
_FOLLOWS = frozenset(
    {
        *_IMAGES,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.sum.dim_IntList,
        aten.mean.dim,
        aten.amax.default,
        aten.var_mean.correction,
        aten.permute.default,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.cat.default,
        aten.constant_pad_nd.default,
        *compat.POOLS,
    }
)


class _StaysAsItIs(Exception):
    """A value cannot have the strides that it is wanted with."""


def lay_channels_last(joint: fx.GraphModule) -> fx.GraphModule:
    """The joint graph, with what lies between convolutions laid out for them; the graph itself
    where Inductor would leave it too, or where it has no convolution.

    Its results have the strides that they had.

    Args:
        joint: of ATen operators, without symbols; left as it is.
    """
    convolutions = joint.graph.find_nodes(op="call_function", target=aten.convolution.default)
    if not convolutions or not compat.prefers_channels_last(joint):
        return joint
    try:
        return _Layout(joint).made()
    except _StaysAsItIs:
        return joint


class _Layout:
    """Makes the graph again, operator by operator, with values that have no data."""

    def __init__(self, joint: fx.GraphModule) -> None:
        self.joint = joint
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.other: set[fx.Node] = set()  # that may be laid out otherwise than they were
        self.copies: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}

    def made(self) -> fx.GraphModule:
        for node in self.joint.graph.nodes:
            if node.op == "output":
                as_it_was = functools.partial(self._as_it_was, user=node)
                self.graph.output(fx.map_arg(node.args[0], as_it_was)).meta.update(node.meta)
            elif node.op == "call_function":
                self.env[node] = self._called(node)
            else:
                self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
        return compat.graph_module(self.joint, self.graph)

    def _called(self, node: fx.Node) -> fx.Node:
        follows = node.target in _FOLLOWS or compat.is_pointwise(node.target)
        follows = follows and not compat.is_random(node)
        images = _IMAGES.get(node.target, ())

        def given(source: fx.Node) -> fx.Node:
            return self.env[source] if follows else self._as_it_was(source, node)

        new = self.graph.node_copy(node, given)
        for k in images:
            source = new.args[k]
            if isinstance(source, fx.Node) and source.meta["val"].ndim == 4:
                with self.graph.inserting_before(new):
                    new.update_arg(k, self._with_strides(source, _LAST, node))
        if not self.other.isdisjoint(new.all_input_nodes):
            self._follow(new)
        return new

    def _follow(self, new: fx.Node) -> None:
        """Find the value of a node again, whose inputs are laid out otherwise than they were."""
        try:
            new.meta["val"] = computed(new)
        except NotComputedError as error:
            raise _StaysAsItIs from error
        self.other.add(new)

    def _as_it_was(self, source: fx.Node, user: fx.Node) -> fx.Node:
        """A value with the strides that it had."""
        new, old = self.env[source], source.meta.get("val")
        if not isinstance(old, torch.Tensor) or new.meta["val"].stride() == old.stride():
            return new
        strides = [*map(int, old.stride())]
        order = tuple(sorted(range(old.ndim), key=lambda d: (-strides[d], d)))
        made = self._with_strides(new, order, user)
        if made.meta["val"].stride() != old.stride():  # it had gaps, or elements in one place
            raise _StaysAsItIs
        return made

    def _with_strides(self, new: fx.Node, order: tuple[int, ...], user: fx.Node) -> fx.Node:
        """A copy of a value with its dimensions in this order in memory, made once; itself where
        they are."""
        value = new.meta["val"]
        if value.permute(order).is_contiguous():
            return new
        if (new, order) not in self.copies:
            back = tuple(order.index(d) for d in range(len(order)))
            made = self._call(user, aten.permute.default, new, order)
            made = self._call(user, aten.clone.default, made, memory_format=torch.contiguous_format)
            self.copies[new, order] = self._call(user, aten.permute.default, made, back)
        return self.copies[new, order]

    def _call(
        self, user: fx.Node, target: Any, given: fx.Node, *args: Any, **kwargs: Any
    ) -> fx.Node:
        """A node of ours, of the same part of the graph as the one that it is made for."""
        made = self.graph.call_function(target, (given, *args), kwargs)
        made.meta.update({key: value for key, value in user.meta.items() if key != "val"})
        self._follow(made)
        return made


_LAST = (0, 2, 3, 1)  # the order of an image's dimensions
