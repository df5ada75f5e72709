"""Strides: of real kernels, and channels last for convolutions.

`settle_strides` runs stages on zeros, because fake kernels may report wrong strides.

[Note: fake strides] Some operators return other strides than their fake kernels (attention's
backward, a functionalized BatchNorm, a sum of tensors in several memory orders), and strides select
the next operators' kernels and thus the rounding. Code that must be bitwise equal to the plain
model needs the real strides. So each stage runs once on zeros, in forward order, with the strides
of the previous stages' results, and is traced with them too (`templates`). If this raises, the fake
kernels' strides are used.

Zeros are not the user's data: a computed index may be invalid (`sum(mask) - 1` is -1). On the CPU
this raises. On CUDA it makes the device unusable for the process, so it must not be tried.

`lay_channels_last` gives a stage's convolutions the channels_last layout, for Inductor.

    before: conv(x, w) relu conv               after: conv(clone(x), w) relu conv clone

cuDNN convolutions work on channels_last tensors and copy others. Inductor chooses this layout
within a compiled graph, but saved tensors are graph outputs. So the joint graph itself gets other
strides, as if the model's input had them: each operator receives its predecessor's layout, and the
stage's results keep their strides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir import ops
from megacompile.ir.capture import Ambient, graph_key
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, ParamRef, Stage
from megacompile.ir.tensors import TensorMeta, is_dense, short_dtype
from megacompile.passes.edit import SAME_VALUES, NotComputedError, computed, with_stages

_INDICES = ("index", "indices", "target")  # their names in ATen's schemas
_CHANCES = ("bernoulli", "bernoulli_", "multinomial", "_assert_async")  # check an input's values
_SAME_VALUES = SAME_VALUES | {"constant_pad_nd"}  # models pad targets with ignore_index


def settle_strides(schedule: Schedule, *, ambient: Ambient) -> Schedule:
    """The stages with corrected metas where the fake kernels were wrong; only on the CPU."""
    new = schedule.copy()
    calls = ops.calls_by_stage(new.forward, ops.forward)
    settled: dict[fx.Node, TensorMeta] = {}
    known: dict[Hashable, Sequence[tuple[int, ...]]] = {}
    stages = []
    for stage in new.stages:
        call = calls[stage.index]
        metas = tuple(
            settled.get(call.args[2][ref.index], meta) if isinstance(ref, ArgRef) else meta  # type: ignore[index, arg-type]
            for ref, meta in zip(stage.primals, stage.metas, strict=True)
        )
        stage = replace(stage, metas=metas)
        key = graph_key(stage.module), metas, stage.mutated
        if key not in known:
            known[key] = _strides(stage, ambient) or [meta.stride for meta in stage.outputs]
        outputs = tuple(
            replace(meta, stride=stride)
            if stride != meta.stride and is_dense(meta, stride)
            else meta
            for meta, stride in zip(stage.outputs, known[key], strict=True)
        )
        for k, item in ops.items(call):
            if k < len(outputs) and outputs[k] is not stage.outputs[k]:
                settled[item] = item.meta["value"] = outputs[k]
        call.meta["value"] = (*outputs, *call.meta["value"][len(outputs) :])
        stages.append(replace(stage, outputs=outputs))
    return with_stages(new, tuple(stages)) if settled else schedule


def _strides(stage: Stage, ambient: Ambient) -> Sequence[tuple[int, ...]] | None:
    """The strides of a stage's outputs; None if unknown."""
    for meta in (*stage.metas, *stage.outputs):  # only for CPU tensors of known size
        if meta.device.type != "cpu" or not isinstance(meta, TensorMeta) or meta.symbolic:
            return None
    try:
        with ambient.apply(), real_tensors(stage):
            inputs = [meta.zeros() for meta in stage.metas]
            for i in stage.mutated:
                inputs[i] = inputs[i].clone()
            return tuple(output.stride() for output in compat.run(stage.module, inputs))
    except (RuntimeError, IndexError, ValueError, ArithmeticError, *compat.UNTRACEABLE) as error:
        _refuse_dtypes(stage, error)
        return None  # zeros are not the user's data


def _refuse_dtypes(stage: Stage, error: Exception) -> None:
    """Raise UnsupportedGraphError if an operator of a stage rejects the dtypes of its inputs."""
    if re.search("dtype|scalar type|Input type", str(error)):
        refs: list[tuple[Any, Any]] = list(zip(stage.primals, stage.metas, strict=True))
        inputs = [f"input {ref.index} is {m}" for ref, m in refs if isinstance(ref, ArgRef)]
        needed = dict.fromkeys(short_dtype(m.dtype) for r, m in refs if isinstance(r, ParamRef))
        text = f"stage {stage.name!r}: {', '.join(inputs)}, its parameters {', '.join(needed)}"
        raise UnsupportedGraphError(f"{text}: {error}") from error


def real_tensors(stage: Stage) -> AbstractContextManager[None]:
    """A context with real tensors, which restores the random generators afterwards."""
    devices = sorted({m.device for m in stage.metas if m.device.type == "cuda"}, key=str)
    return torch.random.fork_rng(devices)


def computes_indices(graph: fx.Graph) -> bool:
    """True if an ATen graph uses an index or a probability computed from its inputs."""
    given = set(graph.find_nodes(op="placeholder"))
    computed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        takes_chance = compat.operator_name(node.target) in _CHANCES
        checked: list[Any] = sources[:1] if takes_chance else []
        for name, value in compat.arguments_of(node):
            if name in _INDICES:
                checked += value if isinstance(value, (list, tuple)) else (value,)
        if any(source in computed for source in checked):
            return True
        if any(source in computed for source in sources):
            computed.add(node)
        elif any(source in given for source in sources):
            (given if compat.operator_name(node.target) in _SAME_VALUES else computed).add(node)
    return False


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
    except (_LayoutIsFixed, NotComputedError):
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
                results = fx.map_arg(node.args[0], functools.partial(self._result, user=node))
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
        new.meta["val"] = computed(new)
        self.other.add(new)

    def _result(self, source: fx.Node, user: fx.Node) -> fx.Node:
        """A value with its original strides in dimensions of size 1 too: they select the layout of
        the next stage's convolutions."""
        made, old = self._as_it_was(source, user), source.meta.get("val")
        if not isinstance(old, torch.Tensor) or made.meta["val"].stride() == old.stride():
            return made
        order = _order(old)
        made = self._call(user, aten.permute.default, made, order)
        for shape in ((old.numel(),), made.meta["val"].shape):
            made = self._call(user, aten.view.default, made, list(shape))
        made = self._call(user, aten.permute.default, made, _inverse(order))
        if made.meta["val"].stride() != old.stride():
            raise _LayoutIsFixed
        return made

    def _as_it_was(self, source: fx.Node, user: fx.Node) -> fx.Node:
        """A value with its original strides, except in dimensions of size 1."""
        new, old = self.env[source], source.meta.get("val")
        if not isinstance(old, torch.Tensor) or _same_layout(new.meta["val"], old):
            return new
        made = self._with_strides(new, _order(old), user)
        if not _same_layout(made.meta["val"], old):  # it had gaps or overlapping elements
            raise _LayoutIsFixed
        return made

    def _with_strides(self, new: fx.Node, order: tuple[int, ...], user: fx.Node) -> fx.Node:
        """The value with its dimensions in this memory order; a copy, made once, if necessary."""
        value = new.meta["val"]
        if value.permute(order).is_contiguous():
            return new
        if (new, order) not in self.copies:
            made = self._call(user, aten.permute.default, new, order)
            made = self._call(user, aten.clone.default, made, memory_format=torch.contiguous_format)
            self.copies[new, order] = self._call(user, aten.permute.default, made, _inverse(order))
        return self.copies[new, order]

    def _call(
        self, user: fx.Node, target: Any, given: fx.Node, *args: Any, **kwargs: Any
    ) -> fx.Node:
        """A new node in the same part of the graph (forward or backward) as its user."""
        made = self.graph.call_function(target, (given, *args), kwargs)
        made.meta.update({key: value for key, value in user.meta.items() if key != "val"})
        self._follow(made)
        return made


def _order(value: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a value, the outermost in memory first."""
    strides = [*map(int, value.stride())]
    return tuple(sorted(range(value.ndim), key=lambda d: (-strides[d], d)))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(order.index, range(len(order))))


def _same_layout(value: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two values of one shape have equal strides, except in dimensions of size 1, where
    strides mean nothing and each operator chooses its own."""
    pairs = zip(value.shape, value.stride(), other.stride(), strict=True)
    return all(size == 1 or ours == theirs for size, ours, theirs in pairs)


_LAST = (0, 2, 3, 1)  # the order of an image's dimensions
