"""Computes the next stage while ranks average the gradients of this one.

    before: 2B 2REDUCE_SCATTER 2NORM_GRAD 2OFFLOAD_GRAD 1RECOMPUTE 1B
    after:  2B 2REDUCE_SCATTER 1RECOMPUTE 1B 2NORM_GRAD 2OFFLOAD_GRAD

Norms and updates run on the compute stream, and would make it wait for the interconnect. A mean
over replicas comes right after that of the ranks that shard. Where sums with earlier backwards
come between the two, these are made a stage later, and what follows the second mean comes two:

    before: 2B 2REDUCE_SCATTER 2ADD_GRAD 2ALL_REDUCE 2OFFLOAD_GRAD 1B 0B
    after:  2B 2REDUCE_SCATTER 1B 2ADD_GRAD 2ALL_REDUCE 0B 2OFFLOAD_GRAD
"""

from __future__ import annotations

from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.offload_grad import last_item


def delay_reduced(schedule: Schedule) -> Schedule:
    """The schedule in which what is made of averaged gradients comes a stage later."""
    if schedule.backward is None or not ops.nodes_of(schedule.backward, ops.reduce_scatter):
        return schedule
    new = schedule.copy()
    assert new.backward is not None
    for op in (ops.reduce_scatter, ops.all_reduce):
        for mean in ops.nodes_of(new.backward, op):
            following = _next_backward(mean)
            if following is None:
                continue
            where = last_item(following)
            for node in _made_of(mean):
                if node < where and not (node.target is ops.all_reduce and node.args[1] is mean):
                    where.append(node)
                    where = node
    return new


def _next_backward(node: fx.Node) -> fx.Node | None:
    while node.op != "output":
        node = node.next
        if node.target is ops.backward:
            return node
    return None


def _made_of(mean: fx.Node) -> list[fx.Node]:
    """All that depends on a value, in program order."""
    found, todo = set(), [mean]
    while todo:
        users = [user for user in todo.pop().users if user.op != "output" and user not in found]
        found.update(users)
        todo += users
    return sorted(found)
