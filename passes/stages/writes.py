"""Find the model inputs that a stage's backward changes in place.

A hook in the forward (`h.register_hook`) may write a buffer, and so may the backward of an
`autograd.Function`: the largest gradient, from which the next step takes a scale. Such code is a
part of the backward graph. It reads and writes the current memory, not the forward's value, so a
stage takes such an input twice: its forward computations read the forward's value, its backward
computations read the memory (`Stage.live`).

    before: hook(g): amax.copy_(g.abs().amax())
    after:  (..., amax now) -> (gradients, amax new), and `assign` in the backward graph

Writes are known only after a backward is traced. This pass traces it for all outputs that can have
a gradient, so that every variant of the schedule agrees; and only if the captured graph has code
whose backward is not torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir import ops
from megacompile.ir.capture import Ambient
from megacompile.ir.schedule import Schedule
from megacompile.ir.signature import able_tangents, inputs
from megacompile.ir.stages import ArgRef, Stage
from megacompile.ir.values import underlying_inputs
from megacompile.options import Lowering
from megacompile.passes.edit import with_stages
from megacompile.passes.stages.templates import (
    TemplateCache,
    cannot_write,
    trace_templates,
)


def has_own_backwards(schedule: Schedule) -> bool:
    """True if any stage has a node whose backward may be user code."""
    nodes = (node for stage in schedule.stages for node in stage.module.graph.nodes)
    return any(node.op == "call_function" and not compat.is_torchs(node.target) for node in nodes)


def find_writes(
    schedule: Schedule, *, ambient: Ambient, cache: TemplateCache, lowering: Lowering
) -> Schedule:
    """The stages, with `live`, and `Schedule.written`.

    Raises:
        UnsupportedGraphError: a backward writes a tensor that is not a model input.
    """
    traced = trace_templates(
        replace(schedule, tangents=able_tangents(schedule)),
        ambient=ambient,
        cache=cache,
        lowering=lowering,
        finds_writes=True,
    )
    underlying = underlying_inputs(schedule)
    written: set[str] = set()
    for stage, args in _with_args(traced):
        for primal in stage.traced.written:
            name = underlying.get(args[primal])
            if name is None:
                raise UnsupportedGraphError(cannot_write(stage, "a tensor from another layer"))
            written.add(name)
    if not written:
        return schedule
    stages = tuple(
        replace(stage, live=tuple(i for i, arg in args.items() if underlying.get(arg) in written))
        for stage, args in _with_args(schedule)
    )
    new = with_stages(schedule, stages)
    for node in new.forward.find_nodes(op="placeholder"):
        if node.name in written:
            node.meta["written"] = True
    return replace(new, written=tuple(n for n in inputs(new.forward) if n in written))


def _with_args(schedule: Schedule) -> Iterator[tuple[Stage, dict[int, str]]]:
    """Each stage, with primal -> name of its forward's argument."""
    calls = ops.calls_by_stage(schedule.forward, ops.forward)
    for stage in schedule.stages:
        given = ops.arguments(calls[stage.index])[2]
        refs = enumerate(stage.primals)
        yield stage, {i: given[ref.index].name for i, ref in refs if isinstance(ref, ArgRef)}
