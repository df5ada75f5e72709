"""Use the channels_last layout for a stage's convolutions, for Inductor.

    before: conv(x, w) relu conv               after: conv(clone(x), w) relu conv clone

cuDNN convolutions work on channels_last tensors and copy others. Inductor chooses this layout
within a compiled graph, but saved tensors are graph outputs. So the joint graph itself gets other
strides, as if the model's input had them: each operator receives its predecessor's layout, and the
stage's results keep their strides.
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
# Operators that accept any strides and whose result follows them.
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


class _LayoutIsFixed(Exception):
    """Raised if a value cannot have the requested strides."""


def lay_channels_last(joint: fx.GraphModule) -> fx.GraphModule:
    """The joint graph, without symbols, with values between convolutions in channels_last layout;
    the same graph if Inductor would not change it either. Its results keep their strides."""
    convolutions = joint.graph.find_nodes(op="call_function", target=aten.convolution.default)
    if not convolutions or not compat.prefers_channels_last(joint):
        return joint
    try:
        return _Layout(joint).made()
    except _LayoutIsFixed:
        return joint


class _Layout:
    """Rebuilds the graph operator by operator, on fake tensors."""

    def __init__(self, joint: fx.GraphModule) -> None:
        self.joint = joint
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.other: set[fx.Node] = set()  # values that may have another layout than before
        self.copies: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}

    def made(self) -> fx.GraphModule:
        for node in self.joint.graph.nodes:
            if node.op == "output":
                results = fx.map_arg(node.args[0], functools.partial(self._as_it_was, user=node))
                self.graph.output(results).meta.update(node.meta)
            elif node.op == "call_function":
                self.env[node] = self._called(node)
            else:
                self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
        return compat.graph_module(self.joint, self.graph)

    def _called(self, node: fx.Node) -> fx.Node:
        tags = getattr(node.target, "tags", ())
        follows = node.target in _FOLLOWS or torch.Tag.pointwise in tags
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
        """Recompute the value of a node whose inputs have another layout."""
        try:
            new.meta["val"] = computed(new)
        except NotComputedError as error:
            raise _LayoutIsFixed from error
        self.other.add(new)

    def _as_it_was(self, source: fx.Node, user: fx.Node) -> fx.Node:
        """A value with its original strides."""
        new, old = self.env[source], source.meta.get("val")
        if not isinstance(old, torch.Tensor) or _same_layout(new.meta["val"], old):
            return new
        strides = [*map(int, old.stride())]
        order = tuple(sorted(range(old.ndim), key=lambda d: (-strides[d], d)))
        made = self._with_strides(new, order, user)
        if not _same_layout(made.meta["val"], old):  # it had gaps or overlapping elements
            raise _LayoutIsFixed
        return made

    def _with_strides(self, new: fx.Node, order: tuple[int, ...], user: fx.Node) -> fx.Node:
        """A copy of a value with its dimensions in this memory order, created once; the value
        itself if it has that order."""
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
        """A new node in the same part of the graph (forward or backward) as the node that it is
        created for."""
        made = self.graph.call_function(target, (given, *args), kwargs)
        made.meta.update({key: value for key, value in user.meta.items() if key != "val"})
        self._follow(made)
        return made


def _same_layout(value: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two values of one shape have equal strides, but for dimensions of size 1: their
    strides mean nothing, and each operator chooses its own."""
    pairs = zip(value.shape, value.stride(), other.stride(), strict=True)
    return all(size == 1 or ours == theirs for size, ours, theirs in pairs)


_LAST = (0, 2, 3, 1)  # the order of an image's dimensions
