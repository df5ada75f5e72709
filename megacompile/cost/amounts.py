"""The amount of work of each op of a schedule on a machine: seconds of a compute, bytes of other
ops.

Setup time counts as the bytes that could have been copied in that time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import fx

from megacompile.cost.hardware import Hardware
from megacompile.cost.ops import copies_of, node_s
from megacompile.cost.optimizer import UpdateCost
from megacompile.cost.queues import COMPUTE, HOST
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, largest_shard
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code


class Amounts:
    """The amounts of one graph of a schedule.

    Args:
        name: of the graph.
        fused: elementwise operations are fused (lowering "inductor").
        sizes: the cost of a bucket's update in `optimizer.step()`, by the bucket's key.
    """

    def __init__(
        self,
        schedule: Schedule,
        name: str,
        hardware: Hardware,
        *,
        fused: bool,
        sizes: Mapping[int, UpdateCost],
    ) -> None:
        self.schedule, self.name = schedule, name
        self.hardware, self.fused = hardware, fused
        self.sizes = sizes
        self.trained = schedule.gradient_params if schedule.backward is not None else {}
        self._seconds: dict[tuple[int, Code], float] = {}

    def whole(self, node: fx.Node, queue: int) -> float:
        """Seconds of a compute, bytes of other ops."""
        op = ops.effects(node)
        if self.name == "update" and op.is_update:
            return self._update(ops.arguments(node)[0], queue)
        if op.stored is not None:
            return op.stored(node)
        if op.gathered is not None:
            return self._of_replicas(node) if op.of_replicas else self._exchanged(node)
        if queue != COMPUTE:
            return self._copy(self._moved_bytes(node), copies_of(node))
        if op.code is None:
            return node_s(node, self.hardware, fused=self.fused)
        key = id(ops.arguments(node)[0].template), ops.code_of(node)
        if key not in self._seconds:
            self._seconds[key] = node_s(node, self.hardware, fused=self.fused)
        return self._seconds[key]

    def halves(self, node: fx.Node) -> list[float]:
        """Bytes of the copies of new parameters and of states, in this order."""
        bucket: Bucket = ops.arguments(node)[0]
        params = self._param_bytes(bucket)
        if self.name == "update":
            update = self.sizes.get(bucket.key)
            whole = 0.0 if update is None else (update.size_bytes - update.grad_bytes) / 2
            return [min(params, whole), max(0.0, whole - params)]
        count, whole = len(bucket.params), ops.copied_bytes(node)
        return [self._copy(params, count), self._copy(whole - params, 2 * count)]

    def _update(self, bucket: Bucket, queue: int) -> float:
        """Amount of an update, from the bytes that the optimizer reads and writes on its device."""
        update, hardware = self.sizes.get(bucket.key), self.hardware
        if update is None:
            return 0.0
        if queue != HOST:
            return update.size_bytes / (hardware.memory_gb_s * 1e9)
        return max(update.size_bytes, update.arithmetic_s * hardware.update_gb_s * 1e9)

    def _moved_bytes(self, node: fx.Node) -> int:
        """Bytes that a copy has to move, without those that the device already has or keeps."""
        op, size, subject = ops.effects(node), ops.copied_bytes(node), ops.arguments(node)[0]
        if not isinstance(subject, Bucket):
            return size
        plan = self.schedule.plan
        if Part.WEIGHTS in op.reads and subject.key in plan.device_update | plan.resident:
            return 0  # the device has them already
        if Part.GRADIENTS in (*op.reads, *op.writes) and subject.key in plan.resident:
            return 0
        if Part.STATES in op.reads and not ops.arguments(node)[2]:  # masters
            return size - self._param_bytes(subject)  # parameters are on the device already
        return size

    def _copy(self, size_bytes: float, copies: int) -> float:
        """Bytes of copies, plus the equivalent of their setup time."""
        return size_bytes + copies * self.hardware.copy_s * self.hardware.h2d_gb_s * 1e9

    def _exchanged(self, node: fx.Node) -> float:
        """Bytes that a rank receives in a collective, plus the equivalent of its setup time."""
        op = ops.effects(node)
        ranks: int = ops.arguments(node)[0].ranks
        assert op.gathered is not None
        rate, start_s = self.hardware.interconnect_gb_s * 1e9, self.hardware.collective_s
        start = start_s * rate if rate != math.inf else 0.0
        return op.gathered(node) * (ranks - 1) / ranks + start

    def _of_replicas(self, node: fx.Node) -> float:
        """Bytes that a rank receives in a sum of its shard over replicas, which is a reduce-scatter
        and an all-gather, plus the equivalent of its setup time."""
        op, hardware = ops.effects(node), self.hardware
        bucket: Bucket = ops.arguments(node)[0]
        assert op.gathered is not None
        received = 2 * (bucket.replicas - 1) / bucket.replicas * op.gathered(node) / bucket.ranks
        return received + hardware.collective_s * hardware.replicas_gb_s * 1e9

    def _param_bytes(self, bucket: Bucket) -> int:
        mine = largest_shard(bucket)
        return sum(mine.params[i].size_bytes for i in self.trained.get(bucket.key, ()))
