"""The option `mesh`: the ranks that share a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megacompile.errors import OptionError, OptionTypeError


@dataclass(frozen=True, slots=True)
class PlannedMesh:
    """Ranks that a model is only planned for, without a process of theirs."""

    ranks: int  # that shard
    replicas: int = 1

    @property
    def ndim(self) -> int:
        """As of a DeviceMesh: with replicas, these are its first dimension."""
        return 1 if self.replicas == 1 else 2

    def size(self, dim: int) -> int:
        """Number of ranks of a dimension."""
        return self.ranks if dim == self.ndim - 1 else self.replicas

    def get_local_rank(self, dim: int = 0) -> int:
        """The first one's place: its part is the largest."""
        del dim
        return 0


def is_first(mesh: object) -> bool:
    """True if this process is the first rank of a mesh, or the only process."""
    if not isinstance(mesh, DeviceMesh):
        return True
    return bool(mesh.get_rank() == int(mesh.mesh.flatten()[0]))


def check_alike(said: Sequence[Mapping[str, str]]) -> None:
    """Raise where ranks have options that differ.

    Args:
        said: `Options.of_all_ranks` of each rank.

    Raises:
        OptionError: in all of them.
    """
    for rank, options in enumerate(said):
        for name, value in options.items():
            if value != said[0][name]:
                raise OptionError(
                    f"megacompile(): option {name!r} is {said[0][name]} in rank 0 and {value} in "
                    f"rank {rank}; ranks that share a model need the same"
                )


_MADE = 'init_device_mesh("{kind}", (world_size,)), after torch.distributed.init_process_group()'


def checked(mesh: Any, device: torch.device) -> DeviceMesh | None:
    """A mesh whose last dimension shards, and whose first one, of two, replicates.

    Raises:
        OptionError: it has more dimensions, or is of other devices.
        OptionTypeError: it is no mesh.
    """
    if mesh is None:
        return None
    made = _MADE.format(kind=device.type)
    if not isinstance(mesh, DeviceMesh):
        raise OptionTypeError(
            f"megacompile(): option 'mesh' got {mesh!r} ({type(mesh).__name__}); needed a "
            f"DeviceMesh: {made}"
        )
    if not 1 <= mesh.ndim <= 2:
        raise OptionError(
            f"megacompile(): got a mesh of {mesh.ndim} dimensions; needed one, which shards, or "
            "two: ranks of the first replicate, ranks of the second shard"
        )
    if mesh.ndim == 2 and mesh.size(1) == 1 < mesh.size(0):
        raise OptionError(
            f"megacompile(): got a mesh of {mesh.size(0)} x 1 ranks, each of which would have the "
            "whole model; needed a second dimension of 2 or more, which shards; or leave out "
            "mesh=, and use DistributedDataParallel(megacompile(model))"
        )
    if mesh.device_type != device.type:
        raise OptionError(
            f"megacompile(): got a mesh of {mesh.device_type!r} devices with device="
            f"{str(device)!r}; needed {made}"
        )
    if mesh.get_coordinate() is None:
        raise OptionError(
            f"megacompile(): rank {dist.get_rank()} is not in the mesh {mesh}; call megacompile() "
            "in the ranks that are"
        )
    return mesh
