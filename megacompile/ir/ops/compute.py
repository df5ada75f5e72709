"""Compute ops: the model's own computation, and copies that preserve its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megacompile.ir.ops.op import (
    Show,
    Takes,
    Value,
    by_subject,
    named,
    of_value,
    op,
    short,
    unbound,
)
from megacompile.ir.stages import ArgRef, Code, Stage
from megacompile.ir.stream import Stream


def _forward_count(args: Sequence[Any]) -> int:
    stage: Stage = args[0]
    saving = args[3]
    return stage.result_count + (len(stage.saved_values) if saving else 0)


def _backward_count(args: Sequence[Any]) -> int:
    stage: Stage = args[0]
    gradients = stage.traced.gradients
    inputs = [i for i in gradients if isinstance(stage.primals[i], ArgRef)]
    return len(inputs) + len(stage.gradient_buckets) + len(stage.traced.written)


@op(Stream.COMPUTE, short("RNG"), gives=Value.RNG)
def save_rng(stage: Stage) -> Any:
    """Save the state of the random generators before a stage that draws from them."""
    unbound(save_rng)


@op(
    Stream.COMPUTE,
    named,
    gives=Value.COPY,
    takes=(Takes(0),),
    owns=True,
    show=Show.ACTION,
    traffic=of_value(times=2),
)
def snapshot(tensor: Any) -> Any:
    """Copy a tensor before an in-place change, because the backward needs the old value."""
    unbound(snapshot)


@op(
    Stream.COMPUTE,
    short("F"),
    gives=Value.RESULTS,
    owns=True,
    code=lambda args: Code.FORWARD_SAVING if args[3] else Code.FORWARD,
    count=_forward_count,
    show=Show.STEP,
)
def forward(stage: Stage, weights: tuple[Any, ...], args: tuple[Any, ...], saving: bool) -> Any:
    """Run a stage: outputs, new values of mutated inputs, and with `saving` its saved tensors."""
    unbound(forward)


@op(
    Stream.COMPUTE,
    named,
    gives=Value.CHANGED,
    takes=(Takes(0), Takes(1)),
    fills=0,
    show=Show.ACTION,
    traffic=of_value(times=2),
)
def assign(tensor: Any, value: Any, counted: bool = True, *, after: tuple[Any, ...] = ()) -> Any:
    """Write a new value into an input that a stage changes in place: its forward (a BatchNorm
    statistic) or its backward (a hook that notes the largest gradient).

    `counted=False`: the tensor's version is not bumped, like in the original operators.
    """
    unbound(assign)


@op(
    Stream.COMPUTE,
    by_subject,
    gives=Value.RESULTS,
    owns=True,
    code=lambda args: Code.RECOMPUTE,
    count=lambda args: len(args[0].saved_values),
    show=Show.STEP,
)
def recompute(stage: Stage, weights: tuple[Any, ...], args: tuple[Any, ...], rng: Any) -> Any:
    """Run a stage's forward again for its saved tensors, with the same random numbers."""
    unbound(recompute)


@op(
    Stream.COMPUTE,
    by_subject,
    gives=Value.RESULTS,
    owns=True,
    code=lambda args: Code.FORWARD,
    count=lambda args: int(args[0].result_count),
    show=Show.STEP,
)
def rerun(stage: Stage, weights: tuple[Any, ...], args: tuple[Any, ...], rng: Any) -> Any:
    """Run a stage's forward again for its outputs, with the same random numbers."""
    unbound(rerun)


@op(
    Stream.COMPUTE,
    short("B"),
    gives=Value.RESULTS,
    owns=True,
    code=lambda args: Code.BACKWARD,
    count=_backward_count,
    show=Show.STEP,
)
def backward(
    stage: Stage,
    weights: tuple[Any, ...],
    args: tuple[Any, ...],
    saved: tuple[Any, ...],
    tangents: tuple[Any, ...],
    partial_gradients: tuple[Any, ...],
    live: tuple[Any, ...] = (),
) -> Any:
    """Compute the gradients of a stage's inputs, then of its parameters, one group per bucket.

    With `live` (current values of model inputs that backwards write), it then returns their new
    values.

    `partial_gradients`: the gradients so far of inputs and parameters that later stages used too.
    They enter the stage's graph, so that sums follow autograd's order.
    """
    unbound(backward)
