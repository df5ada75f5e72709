"""Ops of buckets: their weights, gradients and updates, collectives of ranks, and disks.

With ranks, each has a part of every bucket: its rows of each parameter.

The ops of `optimizer.step()` do nothing for a bucket that the step does not update (it belongs to
another optimizer or has no gradient).

A bucket in `plan.on_disk` has its states on a disk. Between `read_state` and the end of
`write_state` they are in a page-locked host buffer, which all ops on these states use.

A bucket in `plan.weights_on_disk` also has its parameters there. Each prefetch copies from a
separate buffer, filled by its `read_weights` and free after the copy. A host update changes the
trained parameters in the buffer filled by `read_trained`. A device update writes the new parameters
to a buffer too. In both cases the buffer is free at the end of `write_weights`.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.ops.op import (
    Part,
    Show,
    Takes,
    Value,
    by_slot,
    named,
    of_bucket,
    op,
    params,
    short,
    tensors_of_arguments,
    value_bytes,
)
from megacompile.ir.stream import Stream


@op(Stream.H2D, by_slot, gives=Value.WEIGHTS, reads=(Part.WEIGHTS,), slot=1, moves=of_bucket)
def prefetch(bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Any:
    """Copy a bucket into a slot; `after` names its last update and the last reader of the slot."""


@op(Stream.COMPUTE, by_slot, gives=Value.WEIGHTS, slot=1)
def reuse(bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Any:
    """Use the weights that a forward left in a slot: a backward's own forward, or the last one."""


@op(Stream.COMPUTE, gives=Value.WEIGHTS, lends=Part.WEIGHTS, show=Show.QUIET)
def resident(bucket: Bucket) -> Any:
    """Use the weights of a resident bucket."""


@op(
    Stream.H2D,
    by_slot,
    gives=Value.SHARD,
    reads=(Part.WEIGHTS,),
    slot=1,
    moves=lambda node: int(node.args[0].shard_bytes),
    copies=params,
)
def prefetch_shard(bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Any:
    """Copy this rank's part of a bucket to its places in a slot; `after` as for `prefetch`."""


@op(
    Stream.COMM,
    by_slot,
    gives=Value.WEIGHTS,
    takes=(Takes(2, Value.SHARD, ends=True),),
    slot=1,
    moves=of_bucket,
)
def all_gather(bucket: Bucket, slot: Slot, shard: Any) -> Any:
    """Gather the other ranks' parts into a slot."""


_GRADIENTS = Takes(1, Value.GRADIENTS, ends=True)
_NORMS = Takes(2, Value.NORMS, optional=True, like=1)


@op(Stream.COMPUTE, gives=Value.GRADIENT_BUFFER, owns=True, show=Show.QUIET)
def alloc_grad(bucket: Bucket) -> Any:
    """Allocate device memory for a bucket's accumulated gradients."""


@op(
    Stream.H2D,
    gives=Value.GRADIENTS_SO_FAR,
    takes=(Takes(1, Value.GRADIENT_BUFFER, ends=True),),
    owns=True,
    fills=1,
    reads=(Part.GRADIENTS,),
    copies=tensors_of_arguments,
)
def fetch_grad(bucket: Bucket, buffer: Any, *, after: tuple[Any, ...] = ()) -> Any:
    """Fetch the gradients that earlier backwards left on the host."""


@op(
    Stream.COMPUTE,
    gives=Value.GRADIENTS,
    takes=(Takes(1, Value.GRADIENTS_SO_FAR), Takes(2, Value.GRADIENTS, ends=True)),
    owns=True,
    fills=1,
    show=Show.STEP,
    moves=lambda node: 3 * value_bytes(node),
)
def add_grad(bucket: Bucket, so_far: Any, gradients: Any) -> Any:
    """Compute `so_far + gradients`, like autograd's accumulation into `p.grad`."""


@op(
    Stream.COMPUTE,
    gives=Value.NORMS,
    takes=(Takes(1, Value.GRADIENTS),),
    owns=True,
    moves=lambda node: (1 if node.args[2:] == (False,) else 2) * value_bytes(node.args[1]),
)
def norm_grad(bucket: Bucket, gradients: Any, largest: bool = True) -> Any:
    """Compute the L2 norm of each gradient and, if requested, its largest absolute value. Float32,
    (2, gradients); (1, gradients) without the largest values."""


@op(Stream.COMPUTE, gives=Value.DONE, takes=(_GRADIENTS,), keeps=1, writes=(Part.GRADIENTS,))
def keep_grad(bucket: Bucket, gradients: Any) -> Any:
    """Store gradients in a resident bucket, without a copy. If the bucket has gradients from
    earlier micro-batches, they are copied to their places."""


@op(
    Stream.D2H,
    gives=Value.DONE,
    takes=(_GRADIENTS, _NORMS),
    writes=(Part.GRADIENTS,),
    copies=tensors_of_arguments,
)
def offload_grad(
    bucket: Bucket, gradients: Any, norms: Any = None, *, after: tuple[Any, ...] = ()
) -> Any:
    """Copy gradients and their norms to the bucket's gradient buffer. The bucket may be updated as
    soon as the copy is done, so `after` names a reader of its weights that runs after its gradients
    are ready."""


@op(Stream.COMPUTE, gives=Value.GRADIENT_BUFFER, owns=True, show=Show.QUIET)
def alloc_shard(bucket: Bucket) -> Any:
    """Allocate device memory for this rank's part of a bucket's gradients."""


@op(
    Stream.COMM,
    gives=Value.GRADIENTS,
    takes=(_GRADIENTS, Takes(2, Value.GRADIENT_BUFFER, ends=True)),
    owns=True,
    fills=2,
    moves=lambda node: value_bytes(node.args[1]),
)
def reduce_scatter(bucket: Bucket, gradients: Any, buffer: Any) -> Any:
    """Average gradients over the shard ranks; each rank receives its part."""


def scattered(node: fx.Node) -> fx.Node | None:
    """The whole gradients that a `reduce_scatter` reduced to this part."""
    seen = set()  # stops at cycles of values
    while node not in seen and node.target in (all_reduce, add_grad):
        seen.add(node)
        source = node.args[2 if node.target is add_grad else 1]
        if not isinstance(source, fx.Node):
            return None
        node = source
    found = node.args[1] if node.target is reduce_scatter else None
    return found if isinstance(found, fx.Node) else None


@op(
    Stream.COMM,
    gives=Value.GRADIENTS,
    takes=(_GRADIENTS,),
    owns=True,
    fills=1,
    moves=lambda node: value_bytes(scattered(node)),
    of_replicas=True,
)
def all_reduce(bucket: Bucket, gradients: Any) -> Any:
    """Average a part's gradients over replicas (the ranks with the same rows), in place."""


# Updates in place: in host memory, or resident on the device.

_CHANGED = (Part.WEIGHTS, Part.STATES)  # parameters first: they are needed next
_UPDATE: dict[str, Any] = {
    "gives": Value.DONE,
    "writes": _CHANGED,
    "is_update": True,
    "show": Show.STEP,
}


@op(Stream.HOST, short("UPDATE"), reads=(Part.GRADIENTS, *_CHANGED), **_UPDATE)
def update_host(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Run the optimizer's step on a bucket in host memory, in a host thread."""


@op(Stream.COMPUTE, short("UPDATE"), reads=(Part.GRADIENTS, *_CHANGED), **_UPDATE)
def update_resident(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Run the optimizer's step on a resident bucket."""


@op(
    Stream.COMPUTE,
    short("UPDATE"),
    takes=(_GRADIENTS, _NORMS),
    reads=_CHANGED,
    moves=lambda node: 2 * value_bytes(node) + value_bytes(node.args[1]),
    **_UPDATE,
)
def update_in_place(
    bucket: Bucket, gradients: Any, norms: Any = None, *, after: tuple[Any, ...] = ()
) -> Any:
    """Run the optimizer's step in the backward on a resident bucket. It consumes the backward's
    gradients; parameters and states change in place. The gradient norms stay on the device until
    requested."""


@op(Stream.DEVICE, named, waits=False, helps=True)
def help_host(updates: tuple[Any, ...]) -> Any:
    """Start device help: the device runs, in chunks, updates that the host has not started. The
    device takes them in order. For both workers, the value of `update_host` marks completion."""


# Updates on the device, of streamed buckets.


@op(Stream.COMPUTE, gives=Value.STATE_BUFFER, owns=True, show=Show.QUIET)
def alloc_state(bucket: Bucket, masters: bool) -> Any:
    """Allocate device memory for a bucket's optimizer states; with `masters`, for its parameters
    too. Parameters are fetched if the streamed copy has another dtype, or if no slot holds the
    weights. Otherwise the update allocates the new ones."""


@op(
    Stream.H2D,
    gives=Value.STATES,
    takes=(Takes(1, Value.STATE_BUFFER, ends=True),),
    owns=True,
    fills=1,
    reads=(Part.STATES,),
    copies=lambda node: 2 * params(node),
)
def fetch_state(bucket: Bucket, buffer: Any, masters: bool, *, after: tuple[Any, ...] = ()) -> Any:
    """Fetch the optimizer states after the last update; with `masters`, the parameters too."""


@op(
    Stream.COMPUTE,
    gives=Value.UPDATED,
    takes=(
        Takes(1, Value.WEIGHTS, optional=True),
        Takes(2, Value.GRADIENTS, ends=True),
        Takes(3, Value.STATES),
    ),
    owns=True,
    fills=3,
    is_update=True,
    show=Show.STEP,
    moves=lambda node: 2 * value_bytes(node) + value_bytes(node.args[2]),
)
def update(bucket: Bucket, weights: Any, gradients: Any, state: Any) -> Any:
    """Run the optimizer's step on a bucket: writes new states to their buffer, and new parameters
    to the buffer or a new one."""


@op(
    Stream.D2H,
    gives=Value.DONE,
    takes=(Takes(1, Value.UPDATED, ends=True), _NORMS),
    writes=_CHANGED,
    copies=tensors_of_arguments,
)
def offload_state(bucket: Bucket, updated: Any, norms: Any = None) -> Any:
    """Copy new parameters and states to their places in host memory. The gradient norms of an
    update in the backward are copied first."""


@op(Stream.READ, gives=Value.DONE, reads=(Part.STATES,))
def read_state(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Read a bucket's optimizer states into a buffer, once one is free."""


@op(Stream.WRITE, gives=Value.DONE, writes=(Part.STATES,))
def write_state(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Write a bucket's new optimizer states to the disk; then their buffer is free."""


@op(Stream.READ, gives=Value.DONE, reads=(Part.WEIGHTS,), moves=of_bucket)
def read_weights(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Read a bucket's parameters into a free buffer, for the one prefetch that names this op."""


@op(Stream.READ, gives=Value.DONE, reads=(Part.WEIGHTS,))
def read_trained(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Read the parameters that a host update changes into a free buffer."""


@op(Stream.WRITE, gives=Value.DONE, writes=(Part.WEIGHTS,))
def write_weights(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Write a bucket's new parameters to the disk; then their buffer is free."""
