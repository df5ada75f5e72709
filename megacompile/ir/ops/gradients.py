"""Ops on the gradients of a bucket."""

from __future__ import annotations

from typing import Any

from torch import fx

from megacompile.ir.buckets import Bucket
from megacompile.ir.ops.op import (
    Part,
    Show,
    Takes,
    Value,
    by_subject,
    of_arguments,
    of_value,
    op,
    tensors_of_arguments,
    unbound,
    value_bytes,
)
from megacompile.ir.stream import Stream


@op(Stream.COMPUTE, by_subject, gives=Value.GRADIENT_BUFFER, owns=True, show=Show.QUIET)
def alloc_grad(bucket: Bucket) -> Any:
    """Allocate device memory for a bucket's accumulated gradients."""
    unbound(alloc_grad)


@op(
    Stream.H2D,
    by_subject,
    gives=Value.GRADIENTS_SO_FAR,
    takes=(Takes(1, Value.GRADIENT_BUFFER, ends=True),),
    owns=True,
    fills=1,
    reads=(Part.GRADIENTS,),
    copied=of_value(),
    copies=tensors_of_arguments,
)
def fetch_grad(bucket: Bucket, buffer: Any, *, after: tuple[Any, ...] = ()) -> Any:
    """Fetch the gradients that earlier backwards left on the host."""
    unbound(fetch_grad)


@op(
    Stream.COMPUTE,
    by_subject,
    gives=Value.GRADIENTS,
    takes=(Takes(1, Value.GRADIENTS_SO_FAR), Takes(2, Value.GRADIENTS, ends=True)),
    owns=True,
    fills=1,
    show=Show.STEP,
    traffic=of_value(times=3),
)
def add_grad(bucket: Bucket, so_far: Any, gradients: Any) -> Any:
    """Compute `so_far + gradients`, like autograd's accumulation into `p.grad`."""
    unbound(add_grad)


def _norm_traffic(node: fx.Node) -> int:
    """The gradients are read once for each kind of norm."""
    largest = len(node.args) < 3 or bool(node.args[2])
    return value_bytes(node.args[1]) * (2 if largest else 1)


@op(
    Stream.COMPUTE,
    by_subject,
    gives=Value.NORMS,
    takes=(Takes(1, Value.GRADIENTS),),
    owns=True,
    traffic=_norm_traffic,
)
def norm_grad(bucket: Bucket, gradients: Any, largest: bool = True) -> Any:
    """Compute the L2 norm of each gradient and, if requested, its largest absolute value.

    Float32, (2, gradients); (1, gradients) without the largest values.
    """
    unbound(norm_grad)


@op(
    Stream.COMPUTE,
    by_subject,
    gives=Value.DONE,
    takes=(Takes(1, Value.GRADIENTS, ends=True),),
    keeps=1,
    writes=(Part.GRADIENTS,),
)
def keep_grad(bucket: Bucket, gradients: Any) -> Any:
    """Store gradients in a resident bucket, without a copy.

    If the bucket has gradients from earlier micro-batches, they are copied to their places.
    """
    unbound(keep_grad)


@op(
    Stream.D2H,
    by_subject,
    gives=Value.DONE,
    takes=(
        Takes(1, Value.GRADIENTS, ends=True),
        Takes(2, Value.NORMS, optional=True, like=1),
    ),
    writes=(Part.GRADIENTS,),
    copied=of_arguments,
    copies=tensors_of_arguments,
)
def offload_grad(
    bucket: Bucket, gradients: Any, norms: Any = None, *, after: tuple[Any, ...] = ()
) -> Any:
    """Copy gradients and their norms to the bucket's gradient buffer.

    An update may follow, so `after` names readers of the bucket that run after its gradients.
    """
    unbound(offload_grad)
