"""One bucket's part of an `optimizer.step()`, from when it is prepared until it has begun."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megacompile.ir import ops
from megacompile.runtime.params.optimizer_states import Trained
from megacompile.runtime.updates.on_device import DeviceUpdate
from megacompile.runtime.updates.update import BucketUpdate, ParamUpdate, UpdateBackend


@dataclass(eq=False, slots=True)
class BucketPart:
    """The part of a step that is about one bucket."""

    update: BucketUpdate
    backend: UpdateBackend  # how it is made of what is on the host
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
        resident = self.update.backend is UpdateBackend.RESIDENT
        return ops.update_resident if resident else ops.update_host

    @property
    def steps(self) -> dict[int, ParamUpdate]:
        """By the parameter's index."""
        return {step.index: step for step in self.update.steps}

    def drop(self) -> None:
        """Drops what the backward left for it."""
        if self.left is not None:
            self.left.drop()
            self.left, self.update.backend = None, self.backend


# Micro-batches: backwards that no step follows. The code that runs the loop knows.
#
# `megacompile.accumulate(model)` says so for one model. Loops that count micro-batches by
# themselves say it in places of their own, which are the sources here. A source that is wrong about
# "another one comes" costs time and host memory alone: `optimizer.step()` then makes the update of
# the gradients on the host. Where replicas share the model, the sum over them was left to that
# other one, and `optimizer.step()` refuses. So a source may guess to that side, and never to the
# other.


class MicroSteps:
    """Finds the backwards of one model that are of micro-batches, but for the last."""

    def __init__(self) -> None:
        self.marked = False  # inside of megacompile.accumulate()

    @property
    def more(self) -> bool:
        """True if another backward comes before the step."""
        return self.marked or more_to_come()


def more_to_come() -> bool:
    """True if a loop says that another backward comes before its next step."""
    return any(source() for source in SOURCES)


def _accelerate() -> bool:
    """Accelerate's `GradientState`, one for the process.

    `Accelerator.accumulate()` sets it, and so do the loops of Trainer and of what derives from it.
    """
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state is not None and not state().sync_gradients


SOURCES: tuple[Callable[[], bool], ...] = (_accelerate,)
