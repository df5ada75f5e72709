"""Give the values between stages the strides that they really have.

What is captured is known by its fake kernels, and some of those lie: of a sum of tensors in several
orders, for one, they give another stride of a dimension of one element, and so a group norm after
it takes the sum for channels last, which the real one does not. Strides choose the kernels of what
comes next (a convolution), hence the rounding. So code that is to be bitwise equal to the plain
model needs the real ones. Each stage runs once on zeros, in the order of the forward, with the
strides that those before it gave. Where that raises, it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.capture import Ambient
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, Stage
from megacompile.ir.tensors import TensorMeta, dense, is_dense
from megacompile.passes.stages.templates import graph_key, real_tensors, with_stages

Strides = tuple[tuple[int, ...], ...]


def settle_strides(schedule: Schedule, *, ambient: Ambient) -> Schedule:
    """The stages with other metas, where the fake kernels lied; on the CPU only."""
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
    """The strides of a stage's outputs; None where they cannot be known."""
    if not all(map(_is_settled_by_running, (*stage.metas, *stage.outputs))):
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


def _is_settled_by_running(meta: object) -> bool:
    """True if it is a tensor on the CPU, of known size."""
    known = getattr(meta, "symbolic", None) is None
    return isinstance(meta, TensorMeta) and meta.device.type == "cpu" and known


def _with(metas: tuple[TensorMeta, ...], strides: Strides | None) -> tuple[TensorMeta, ...]:
    if strides is None:
        return metas
    return tuple(
        replace(meta, stride=stride) if stride != meta.stride and is_dense(meta, stride) else meta
        for meta, stride in zip(metas, strides, strict=True)
    )


# Give results the strides that what takes them was traced for.


def with_strides(
    function: Callable[..., Sequence[Any]],
    metas: Sequence[TensorMeta | None],
    *,
    settled: bool = False,
) -> Callable[..., list[Any]]:
    """The function, whose results have the strides of these metas.

    Inductor keeps the order of strides alone where a result is a view of what it has padded, such
    as a matrix product whose sides are no multiples of 8. A result that was traced as a view with
    gaps is left as it is.

    Args:
        settled: it gives the same strides in each call, if sizes are no symbols: those that are
            right in the first call are not looked at again.
    """
    wanted = {k: meta for k, meta in enumerate(metas) if meta and is_dense(meta, meta.stride)}
    settled = settled and all(meta.symbolic is None for meta in wanted.values())

    def run(*inputs: Any) -> list[Any]:
        results = list(function(*inputs))
        for k, meta in list(wanted.items()):
            if results[k].stride() != meta.stride:
                results[k] = dense(results[k], meta.stride, meta.shape)
            elif settled:
                wanted.pop(k, None)  # another thread may be in it too
        return results

    return run
