"""Ops of stages: the model's own computation, tensors saved for its backward, and memory.

A tensor offloaded to a disk uses a host buffer from its `offload_saved` to the end of its
`write_saved`, and another from its `read_saved` to the end of its `fetch_saved`.
"""

from __future__ import annotations

from typing import Any

from megacompile.ir.ops.op import Show, Takes, Value, named, op, short, value_bytes
from megacompile.ir.stages import Code, Stage
from megacompile.ir.stream import Stream


@op(Stream.COMPUTE, named, gives=Value.POINT, begins=True, issues=False, show=Show.QUIET)
def begin() -> Any:
    """Represent all work queued on the compute stream before this schedule."""


@op(Stream.COMPUTE, short("RNG"), gives=Value.RNG)
def save_rng(stage: Stage) -> Any:
    """Save the state of the random generators before a stage that draws from them."""


@op(
    Stream.COMPUTE,
    named,
    gives=Value.COPY,
    takes=(Takes(0),),
    owns=True,
    show=Show.ACTION,
    moves=lambda node: 2 * value_bytes(node),
)
def snapshot(tensor: Any) -> Any:
    """Copy a tensor before an in-place change, because the backward needs the old value."""


@op(
    Stream.COMPUTE,
    short("F"),
    gives=Value.RESULTS,
    owns=True,
    code=lambda args: Code.FORWARD_SAVING if args[3] else Code.FORWARD,
    count=lambda args: args[0].result_count + len(args[0].saved_values if args[3] else ()),
    show=Show.STEP,
)
def forward(stage: Stage, weights: tuple[Any, ...], args: tuple[Any, ...], saving: bool) -> Any:
    """Run a stage: outputs, new values of mutated inputs, and with `saving` its saved tensors."""


@op(
    Stream.COMPUTE,
    named,
    gives=Value.CHANGED,
    takes=(Takes(0), Takes(1)),
    fills=0,
    show=Show.ACTION,
    moves=lambda node: 2 * value_bytes(node),
)
def assign(tensor: Any, value: Any, counted: bool = True, *, after: tuple[Any, ...] = ()) -> Any:
    """Write a new value into an input that a stage changes in place (a BatchNorm statistic).
    `counted=False`: the tensor's version is not bumped, because the original operators do not."""


@op(
    Stream.COMPUTE,
    gives=Value.RESULTS,
    owns=True,
    code=lambda args: Code.RECOMPUTE,
    count=lambda args: len(args[0].saved_values),
    show=Show.STEP,
)
def recompute(stage: Stage, weights: tuple[Any, ...], args: tuple[Any, ...], rng: Any) -> Any:
    """Run a stage's forward again for its saved tensors, with the same random numbers."""


@op(
    Stream.COMPUTE,
    gives=Value.RESULTS,
    owns=True,
    code=lambda args: Code.FORWARD,
    count=lambda args: int(args[0].result_count),
    show=Show.STEP,
)
def rerun(stage: Stage, weights: tuple[Any, ...], args: tuple[Any, ...], rng: Any) -> Any:
    """Run a stage's forward again for its outputs, with the same random numbers."""


@op(
    Stream.COMPUTE,
    short("B"),
    gives=Value.RESULTS,
    owns=True,
    code=lambda args: Code.BACKWARD,
    count=lambda args: args[0].gradient_places.count(None) + len(args[0].gradient_buckets),
    show=Show.STEP,
)
def backward(
    stage: Stage,
    weights: tuple[Any, ...],
    args: tuple[Any, ...],
    saved: tuple[Any, ...],
    tangents: tuple[Any, ...],
    partial_gradients: tuple[Any, ...],
) -> Any:
    """Compute the gradients of a stage's inputs, then of its parameters, one group per bucket.
    `partial_gradients`: the gradients so far of inputs and parameters that later stages used too.
    They enter the stage's graph, so that sums follow autograd's order."""


_ON_HOST = Takes(1, Value.SAVED_ON_HOST)


@op(Stream.D2H, gives=Value.SAVED_ON_HOST, takes=(Takes(1),), to_backward=True)
def offload_saved(stage: Stage, value: Any, *, after: tuple[Any, ...] = ()) -> Any:
    """Copy a saved tensor of a stage to the host."""


@op(Stream.WRITE, gives=Value.SAVED_ON_DISK, takes=(_ON_HOST,), to_backward=True)
def write_saved(stage: Stage, on_host: Any) -> Any:
    """Write a host copy to a disk; then its buffer is free."""


@op(Stream.READ, gives=Value.SAVED_ON_HOST, takes=(Takes(1, Value.SAVED_ON_DISK),))
def read_saved(stage: Stage, on_disk: Any, *, after: tuple[Any, ...] = ()) -> Any:
    """Read a saved tensor, once it is on the disk, into a host buffer for its one fetch."""


@op(Stream.COMPUTE, gives=Value.SAVED_BUFFER, takes=(_ON_HOST,), owns=True, show=Show.QUIET)
def alloc_saved(stage: Stage, on_host: Any) -> Any:
    """Allocate device memory for an offloaded value."""


@op(
    Stream.H2D,
    gives=Value.SAVED,
    takes=(_ON_HOST, Takes(2, Value.SAVED_BUFFER, ends=True, like=1)),
    owns=True,
    fills=2,
)
def fetch_saved(stage: Stage, on_host: Any, buffer: Any) -> Any:
    """Copy a value back to the device once its `offload_saved` or `read_saved` is done."""


_FREED: dict[str, Any] = {"takes": (Takes(0),), "frees": 0, "issues": False, "show": Show.QUIET}


@op(Stream.COMPUTE, named, waits=False, **_FREED)
def defer_free(value: Any, *, after: tuple[Any, ...] = ()) -> None:
    """Hold a value until `after` is done or the next `drain`; no stream waits here."""


@op(Stream.COMPUTE, named, drains=True)
def drain() -> Any:
    """Free what earlier graphs passed to `defer_free`; the compute stream waits for its copies. It
    runs in a forward, half a schedule after those copies. Nothing in its graph reads that memory,
    so it names no value. Optional; without it the memory is freed later."""


@op(Stream.COMPUTE, named, **_FREED)
def free(value: Any, *, after: tuple[Any, ...] = ()) -> None:
    """Free a value's memory once `after` (readers on other streams) is done."""
