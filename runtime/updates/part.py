"""One bucket's part of an `optimizer.step()`, from when it is prepared until it has begun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megacompile.ir import ops
from megacompile.runtime.params.optimizer_states import Trained
from megacompile.runtime.updates.on_device import DeviceUpdate
from megacompile.runtime.updates.update import BucketUpdate, ParamUpdate, UpdatePath


@dataclass(eq=False, slots=True)
class BucketPart:
    """The part of a step that is about one bucket."""

    update: BucketUpdate
    way: UpdatePath  # how it is made of what is on the host
    trained: list[Trained]
    states: list[torch.Tensor]  # those of its states that the user can see
    visible: list[torch.Tensor]  # the same, all that lie on a disk, gradients without a guard
    aliased: bool  # its memory has a name that cannot be guarded
    first: list[ParamUpdate]  # whose states torch.optim's own first step will make
    left: DeviceUpdate | None  # what the backward left on the device for it

    @property
    def op(self) -> Callable[..., Any]:
        """The op of an update graph that carries it out."""
        if self.left is not None:
            return ops.update
        resident = self.update.way is UpdatePath.RESIDENT
        return ops.update_resident if resident else ops.update_host

    @property
    def steps(self) -> dict[int, ParamUpdate]:
        """By the parameter's index."""
        return {step.index: step for step in self.update.steps}

    def drop(self) -> None:
        """Drops what the backward left for it."""
        if self.left is not None:
            self.left.drop()
            self.left, self.update.way = None, self.way
