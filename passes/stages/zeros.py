"""Run stages on zeros to find real strides, which fake kernels may report wrongly.

[Note: fake strides] Some operators return other strides than their fake kernels (attention's
backward, a functionalized BatchNorm, a sum of tensors in several memory orders), and strides select
the next operators' kernels and thus the rounding. Code that must be bitwise equal to the plain
model needs the real strides. So each stage runs once on zeros, in forward order, with the strides
of the previous stages' results, and is traced with them too (`templates`). If this raises, the fake
kernels' strides are used.

Zeros are not the user's data. Code that could use an invalid index must not run on them:

    gather(x, 1, index)             index is 0: there is an element 0
    gather(x, 1, sum(mask) - 1)     is -1 on zeros

On the CPU this raises. On CUDA it makes the device unusable for the process, so it must not be
tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.capture import Ambient, graph_key
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, Stage
from megacompile.ir.tensors import TensorMeta, is_dense
from megacompile.passes.edit import with_stages

_INDICES = ("index", "indices", "target")  # their names in ATen's schemas
_CHANCES = ("bernoulli", "bernoulli_", "multinomial", "_assert_async")  # check an input's values
_SAME_VALUES = {"t", "view", "transpose", "permute", "expand", "reshape", "unsqueeze", "squeeze"}
_SAME_VALUES |= {"slice", "select", "alias", "detach", "_unsafe_view", "_to_copy", "clone"}
_SAME_VALUES |= {"constant_pad_nd"}  # pads with a loss's ignore_index

Strides = tuple[tuple[int, ...], ...]


def settle_strides(schedule: Schedule, *, ambient: Ambient) -> Schedule:
    """The stages with corrected metas where the fake kernels were wrong; only on the CPU."""
    new = schedule.copy()
    calls = ops.calls_by_stage(new.forward, ops.forward)
    settled: dict[fx.Node, TensorMeta] = {}
    known: dict[Hashable, Strides | None] = {}
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
            known[key] = _strides(stage, ambient)
        outputs = _with(stage.outputs, known[key])
        for k, item in ops.items(call):
            if k < len(outputs) and outputs[k] is not stage.outputs[k]:
                settled[item] = item.meta["value"] = outputs[k]
        call.meta["value"] = (*outputs, *call.meta["value"][len(outputs) :])
        stages.append(replace(stage, outputs=outputs))
    return with_stages(new, tuple(stages)) if settled else schedule


def _strides(stage: Stage, ambient: Ambient) -> Strides | None:
    """The strides of a stage's outputs; None if unknown."""
    for meta in (*stage.metas, *stage.outputs):  # only for CPU tensors of known size
        if meta.device.type != "cpu" or not isinstance(meta, TensorMeta) or meta.symbolic:
            return None
    try:
        with ambient.apply(), real_tensors(stage):
            inputs = [meta.zeros() for meta in stage.metas]
            for i in stage.mutated:
                inputs[i] = inputs[i].clone()
            outputs = stage.module(*inputs)
            return tuple(output.stride() for output in outputs)
    except (RuntimeError, IndexError, ValueError, ArithmeticError, *compat.UNTRACEABLE):
        return None  # zeros are not the user's data


def _with(metas: tuple[TensorMeta, ...], strides: Strides | None) -> tuple[TensorMeta, ...]:
    if strides is None:
        return metas
    return tuple(
        replace(meta, stride=stride) if stride != meta.stride and is_dense(meta, stride) else meta
        for meta, stride in zip(metas, strides, strict=True)
    )


@contextlib.contextmanager
def real_tensors(stage: Stage) -> Iterator[None]:
    """A context with real tensors, which restores the random generators afterwards."""
    devices = sorted({m.device for m in stage.metas if m.device.type == "cuda"}, key=str)
    with torch.random.fork_rng(devices):
        yield


def computes_indices(graph: fx.Graph) -> bool:
    """True if an ATen graph uses an index or a probability computed from its inputs."""
    given = set(graph.find_nodes(op="placeholder"))
    computed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if any(source in computed for source in _checked(node)):
            return True
        sources = node.all_input_nodes
        if any(source in computed for source in sources):
            computed.add(node)
        elif any(source in given for source in sources):
            (given if compat.operator_name(node.target) in _SAME_VALUES else computed).add(node)
    return False


def _checked(node: fx.Node) -> Iterator[Any]:
    """The arguments whose values an operator checks."""
    if compat.operator_name(node.target) in _CHANCES:
        yield from node.all_input_nodes[:1]
    for name, value in compat.arguments_of(node):
        if name in _INDICES:
            yield from value if isinstance(value, (list, tuple)) else (value,)
