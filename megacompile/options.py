"""The checked, frozen options of `megacompile()`.

An option is a parameter of `megacompile()`, with the type, default and meaning for users, and a
field here, with the internal type and the check of `option_checks` that converts the value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from megacompile import option_checks as checks
from megacompile.errors import OptionError
from megacompile.option_values import COMPUTE_DTYPES, GRAD_DTYPES, STATE_DTYPES
from megacompile.option_values import Activations as Activations
from megacompile.option_values import Head as Head
from megacompile.option_values import Lowering as Lowering
from megacompile.option_values import PlannedMesh as PlannedMesh

_T = TypeVar("_T")


def _option(
    check: Callable[[checks.Given], _T], default: Any = MISSING, *, alike: bool = False
) -> _T:
    """A field of `Options`. `check` returns its value from those declared above, or raises; without
    a default, the check of None decides. `alike`: ranks that share a model need the same value,
    because collectives or numbers depend on it. Memory and disks may differ."""
    metadata = {"check": check, "alike": alike}
    field: _T = dataclasses.field(default=default, metadata=metadata)
    return field


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The user's options after checks. `megacompile()` documents them; sizes are in bytes."""

    device: torch.device = _option(checks.device)
    gpu_memory: int | None = _option(checks.device_size, None)
    host_memory: int | None = _option(checks.host_size, None)
    disk: str | None = _option(checks.disk, None)
    optimizer: torch.optim.Optimizer | None = _option(checks.optimizer, None, alike=True)
    state_dtype: torch.dtype | str | None = _option(checks.one_of(STATE_DTYPES), None, alike=True)
    compute_dtype: torch.dtype | None = _option(checks.one_of(COMPUTE_DTYPES), None, alike=True)
    activations: Activations = _option(checks.member(Activations), Activations.AUTO)
    mesh: DeviceMesh | PlannedMesh | None = _option(checks.mesh, None)
    lowering: Lowering = _option(checks.lowering, alike=True)
    progress: bool | None = _option(checks.progress)
    resident: int | None = _option(checks.resident, None)  # None: "auto"; sys.maxsize: "all"
    disk_memory: int | None = _option(checks.disk_memory, None)  # of each rank
    disk_weights: bool | None = _option(checks.disk_weights, None)
    disk_saved: bool | None = _option(checks.disk_saved, None)
    device_update: float | None = _option(checks.device_update, None)
    grad_dtype: torch.dtype | None = _option(checks.one_of(GRAD_DTYPES), None, alike=True)
    stochastic_rounding: bool = _option(checks.flag, False, alike=True)
    head: Head = _option(checks.member(Head), Head.AUTO, alike=True)
    tiles: int | None = _option(checks.tiles, None, alike=True)  # None: "auto"
    dynamic: bool | None = _option(checks.open_flag, None, alike=True)
    lookahead: int = _option(checks.count, 2, alike=True)
    slots: int | None = _option(checks.slots, None, alike=True)
    cuda_graphs: bool = _option(checks.flag, True)
    detect_anomaly: bool = _option(checks.flag, False)

    @staticmethod
    def resolve(**given: Any) -> Options:
        """Check the user's options, passed by name to `megacompile()`, and fill in defaults. Raises
        an OptionError if a value is not accepted, or contradicts another one."""
        above: dict[str, Any] = {}
        for field in fields(Options):
            if field.name in given or field.default is MISSING:
                check = field.metadata["check"]
                above[field.name] = check(checks.Given(field.name, given.get(field.name), above))
            else:
                above[field.name] = field.default
        return Options(**above)

    @property
    def ranks(self) -> int:
        """Number of ranks that shard each parameter. With several, plans decide nothing that
        changes collectives."""
        return 1 if self.mesh is None else self.mesh.shape[-1]

    @property
    def replicas(self) -> int:
        """Number of ranks with the same shard of each parameter (HSDP)."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[:-1])

    @property
    def rank(self) -> int:
        """This process's rank among those that shard the same parameters; in a planned mesh the
        first, whose part is the largest."""
        mesh = self.mesh
        return mesh.get_local_rank(mesh.ndim - 1) if isinstance(mesh, DeviceMesh) else 0

    @property
    def least_slots(self) -> int:
        """The smallest number of slots that allows a prefetch `lookahead` stages ahead."""
        return self.lookahead + 1 if self.slots is None else self.slots

    @property
    def plans_device_update(self) -> bool:
        """True if the plan may choose device updates when `device_update` is None."""
        return (
            self.lowering is Lowering.INDUCTOR
            and self.optimizer is None
            and self.compute_dtype is None
            and not self.disk_weights
        )

    @property
    def device_helps(self) -> bool:
        """True if the GPU helps with updates on the host."""
        return (
            self.lowering is Lowering.INDUCTOR
            and self.optimizer is None
            and not self.disk_weights
            and self.device_update != 0.0
            and not self.stochastic_rounding
        )

    @property
    def may_store_weights(self) -> bool:
        """True if parameters may go to the disk when `disk_weights` is None."""
        return (
            self.disk is not None
            and self.disk_weights is None
            and self.mesh is None
            and self.compute_dtype is None
        )

    @property
    def may_merge(self) -> bool:
        """True if a plan may run several stages as one."""
        return (
            self.lowering is Lowering.INDUCTOR
            and self.activations in (Activations.AUTO, Activations.KEEP)
            and self.tiles in (None, 1)
            and self.ranks == 1
            and self.optimizer is None
            and not self.detect_anomaly
        )

    @property
    def plans(self) -> bool:
        """True if a plan is searched for: on the CPU, only with `gpu_memory`."""
        return self.device.type == "cuda" or self.gpu_memory is not None

    @property
    def updates_on_device(self) -> bool:
        """True if float32 masters may be updated on the device."""
        return self.optimizer is not None or bool(self.device_update) or self.device_helps

    @property
    def of_all_ranks(self) -> dict[str, str]:
        """The options that must be the same in all ranks, as text."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.metadata["alike"]}
        if self.optimizer is not None:
            values["optimizer"] = type(self.optimizer).__name__
        return {name: str(getattr(value, "value", value)) for name, value in values.items()}


def check_alike(of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise an OptionError, in all of them, if ranks have other options; from `of_all_ranks` of
    each."""
    for rank, options in enumerate(of_ranks):
        for name, value in options.items():
            if value != of_ranks[0][name]:
                raise OptionError(
                    f"megacompile(): option {name!r} is {of_ranks[0][name]} in rank 0 and {value} "
                    f"in rank {rank}; pass the same in all ranks"
                )
