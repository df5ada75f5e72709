"""Take back, in a forward, the device memory that the step before it left to copies.

    before: 0F 1F 2F 3F          after: 0F 1F 2F DRAIN 3F

New parameters and states, and gradients that the update took on the device, are on their way to the
host while the forward begins: the backward or the update before it deferred their frees (see
`free`). The compute stream waits for the copies as late as the memory allows.
"""

from __future__ import annotations

from torch import fx

from megacompile.ir import ops
from megacompile.passes.schedule.offload_grad import last_item


def insert_drain(graph: fx.Graph, *, late: bool = False, behind: int = 0) -> None:
    """After the middle one of a forward's stages, or ahead of the last; nowhere without any.

    Args:
        late: ahead of the last.
        behind: not before this one, counted from the first.
    """
    computes = ops.nodes_of(graph, ops.forward)
    if not computes:
        return
    position = max(len(computes) - 2, 0) if late else len(computes) // 2
    with graph.inserting_after(last_item(computes[max(position, behind)])):
        ops.call(graph, ops.drain, name="drained")
