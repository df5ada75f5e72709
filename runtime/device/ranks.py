"""The ranks that share a model, and the collectives between them.

A mesh of one dimension shards: each rank has its rows of every parameter. Of two dimensions the
last one shards and the first one replicates (HSDP): ranks with the same rows average their
gradients too.

Collectives are issued in program order by every rank, one at a time (`Stream.COMM`). Those of the
parameters of a bucket are one launch, where the backend can do that; each fills the place of its
parameter in the slot, so that nothing is copied afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megacompile import compat
from megacompile.ir.buckets import Bucket, shard_shape


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that share a model."""

    mesh: DeviceMesh
    device: torch.device
    rank: int  # its place among those that shard
    count: int  # of those
    replicas: int  # how many have the same rows

    @staticmethod
    def of(mesh: DeviceMesh, device: torch.device) -> Ranks:
        """This process on a mesh; `device` is where it computes."""
        shards = mesh.ndim - 1
        count = mesh.size(shards)
        return Ranks(mesh, device, mesh.get_local_rank(shards), count, mesh.size() // count)

    @property
    def group(self) -> Any:
        """Those that shard."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def placements(self) -> tuple[Any, ...]:
        """How parameters, gradients and states lie over the mesh, in the words of DTensor."""
        from torch.distributed.tensor import Replicate, Shard

        return (*[Replicate()] * (self.mesh.ndim - 1), Shard(0))

    def rows(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """The first row of a tensor that this rank has, and the shape of its part."""
        first = min(-(-shape[0] // self.count) * self.rank, shape[0])
        return first, shard_shape(shape, self.rank, self.count)

    def own(self, bucket: Bucket, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """This rank's rows of gathered weights, as views."""
        rows = [self.rows(param.shape) for param in bucket.params]
        return tuple(
            weight.narrow(0, first, shape[0])
            for weight, (first, shape) in zip(weights, rows, strict=True)
        )

    def gather(self, bucket: Bucket, whole: torch.Tensor) -> None:
        """Fill a bucket with the parts of all ranks, in place.

        Args:
            whole: (bucket.size_bytes,) uint8, in which this rank's part lies at its places.
        """
        group = self.group
        with compat.coalesced(group, self.device):
            for param in bucket.params:
                numel = param.shard_numel(self.count)
                if not numel:
                    continue
                size = numel * param.dtype.itemsize
                first = param.offset_bytes
                place = whole[first : first + self.count * size].view(param.dtype)
                mine = place.narrow(0, self.rank * numel, numel)
                compat.ALL_GATHER(place, mine, group=group)

    def places(self, bucket: Bucket, whole: torch.Tensor) -> list[torch.Tensor]:
        """This rank's places in a bucket that is to be gathered: (part's size,) uint8 each."""
        found = []
        for param, part in zip(bucket.params, bucket.shard(self.rank).params, strict=True):
            size = param.shard_numel(self.count) * param.dtype.itemsize
            first = param.offset_bytes + self.rank * size
            found.append(whole[first : first + part.size_bytes])
        return found

    def average(
        self,
        gradients: Mapping[int, torch.Tensor],  # (*shape,) each
        parts: Mapping[int, torch.Tensor],  # (padded numel of a part,) each, to be filled
    ) -> None:
        """The mean over ranks of each gradient; this rank gets that of its rows."""
        nccl = self.device.type == "cuda"
        op = dist.ReduceOp.AVG if nccl else dist.ReduceOp.SUM
        whole = {i: self._padded(gradient, parts[i]) for i, gradient in gradients.items()}
        with compat.coalesced(self.group, self.device):
            for i, gradient in whole.items():
                if gradient.numel():
                    compat.REDUCE_SCATTER(parts[i], gradient, op=op, group=self.group)
        if self.replicas > 1:
            for dim in range(self.mesh.ndim - 1):
                group = self.mesh.get_group(dim)
                with compat.coalesced(group, self.device):
                    for part in parts.values():
                        if part.numel():
                            dist.all_reduce(part, op=op, group=group)
        if not nccl:
            for part in parts.values():
                part.div_(self.count * self.replicas)

    def _padded(self, gradient: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """A gradient as a flat tensor of a part's dtype, of which each rank has as many elements
        as that part has."""
        flat = gradient.to(part.dtype).contiguous().view(-1)
        missing = part.numel() * self.count - flat.numel()
        return flat if not missing else torch.nn.functional.pad(flat, (0, missing))

    @property
    def is_first(self) -> bool:
        """Is this the first of all ranks?"""
        return self.mesh.get_rank() == int(self.mesh.mesh.flatten()[0])

    def told(self, value: Any) -> list[Any]:
        """What each rank of the mesh says, in their order: a collective of all of them."""
        found = [value]
        for dim in reversed(range(self.mesh.ndim)):
            group = self.mesh.get_group(dim)
            each: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(each, found, group=group)
            found = [one for several in each for one in several]
        return found

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """Some numbers of each rank: one collective."""
        given = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = torch.empty(self.count * len(values), dtype=torch.float64, device=self.device)
        compat.ALL_GATHER(found, given, group=self.group)
        rows: list[list[float]] = found.view(self.count, -1).tolist()
        return rows
