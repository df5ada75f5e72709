"""Bundles the tensors that a stage of a draft saves into one value.

    before: 1F returns y1 s1_0 s1_1 ... s1_13        after: 1F returns y1 s1_0

A draft is only simulated, and most of its nodes were saved tensors: a layer saves a dozen, each
with a node for itself, for its placeholder and for its end. All of a stage are made together and
die together. So those with memory of their own are one value there, a *bundle*, of their sizes
together. Not one of them is what is in the memory of an input or an output of the stage, which may
live longer, nor what waits on the host: it is copied tensor by tensor.
"""

from __future__ import annotations

from megacompile.cost.ops import analysis_of
from megacompile.ir.stages import Code, Template

Bundles = tuple[tuple[int, ...], ...]  # places among a template's saved tensors, in order


def bundles_of(template: Template, *, fused: bool) -> Bundles:
    """The saved tensors of a template as values, those together that are one; () where each is
    one.

    Args:
        fused: elementwise operations are fused (lowering "inductor").
    """
    apart = set(range(len(template.saved)))
    for code in (Code.FORWARD_SAVING, Code.RECOMPUTE):
        apart &= _with_own_memory(template, code, fused)
    if len(apart) < 2:
        return ()
    bundle = tuple(sorted(apart))
    others = [(i,) for i in range(len(template.saved)) if i not in apart]
    return tuple(sorted([bundle, *others]))


def _with_own_memory(template: Template, code: Code, fused: bool) -> set[int]:
    """The saved tensors that share no memory with what else a piece of the template is given or
    returns."""
    returned = analysis_of(template, code, fused=fused).returned
    first = len(returned) - len(template.saved)
    places = [None if each is None else each.memory for each in returned]
    others = set(places[:first])
    return {
        i
        for i, memory in enumerate(places[first:])
        if memory is not None and memory >= 0 and memory not in others
    }
