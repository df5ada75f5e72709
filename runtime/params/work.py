"""Background work on a bucket, and the torn state after a failure.

A failed update leaves parameters and states half updated, and a checkpoint of them would look
valid. So every use of the bucket raises until all values of the update have been overwritten and
the optimizers' states replaced. The guards of its tensors stay, and permit only complete overwrites
(`pending.MemoryGuard`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.ir.ops import Part
from megacompile.runtime.device.background import Completion
from megacompile.runtime.params.guards import unguarded


class InFlight(Completion):
    """Started work on a bucket's host memory, until its `Pending` sees it complete.

    Args:
        event: recorded after the copies of new values from the device.
        future: the thread work that computes or copies new values.
        weights: the completion of the last write of parameters, if separate.
        states: the same for states.
        fresh: new parameters that are also on the device, flat: index -> (numel,).
    """

    def __init__(
        self,
        event: torch.cuda.Event | None = None,
        future: Future[None] | None = None,
        *,
        weights: Completion | None = None,
        states: Completion | None = None,
        fresh: dict[int, torch.Tensor] | None = None,
    ) -> None:
        self.event = event
        self.future = future
        self.weights = weights
        self.states = states
        self.fresh: dict[int, torch.Tensor] = {} if fresh is None else fresh

    def then(
        self, *, weights: Completion | None = None, states: Completion | None = None
    ) -> InFlight:
        """This work, followed by writes of its results to a disk."""
        weights, states = weights or self.weights, states or self.states
        return InFlight(self.event, self.future, weights=weights, states=states, fresh=self.fresh)

    def last_write(self, part: Part) -> Completion | None:
        """The completion of the last write of a part; None: of all parts."""
        if self.weights is self.states:  # no such write
            return None
        return (self.weights if part is Part.WEIGHTS else self.states) or Completion(
            self.event, self.future
        )

    def done(self) -> bool:
        """True if all of it has ended, successfully or not."""
        weights, states = self.weights, self.states
        if not super().done() or not (weights is None or weights.done()):
            return False
        return states is None or states.done()

    def wait(self) -> None:
        """Wait until all of it has ended; raises the first error.

        Raises:
            OptimizerError: its values are half updated.
        """
        if self.weights is self.states:
            super().wait()
            return
        errors = []
        for wait in (super().wait, *(end.wait for end in (self.weights, self.states) if end)):
            try:
                wait()
            except OptimizerError as error:  # dependent writes fail too
                errors.append(error)
        if errors:
            raise errors[0]


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """A parameter and its states after an update."""

    param: nn.Parameter
    version: int
    home: int  # its address
    states: tuple[tuple[weakref.ref[Optimizer], dict[str, Any]], ...]
    values: dict[int, tuple[torch.Tensor, int]]  # by id: a state, its version
    overwritten: set[int] = field(default_factory=set)  # ids of the states overwritten since

    @staticmethod
    def of(param: nn.Parameter, optimizers: Iterable[Optimizer]) -> Left:
        """Record its current state, with its states in these optimizers."""
        with unguarded():
            states = [(weakref.ref(o), o.state[param]) for o in optimizers if o.state.get(param)]
            home = compat.local(param).data_ptr()
            held = [v for _, s in states for v in s.values() if isinstance(v, torch.Tensor)]
            values = {id(value): (value, compat.version(value)) for value in held}
            return Left(param, compat.version(param), home, tuple(states), values)

    def restored(self) -> bool:
        """True if it was overwritten since, and all its states, including the counter, were
        overwritten or replaced, as by `load_state_dict()`."""
        with unguarded():
            home = compat.local(self.param).data_ptr()
            written = (compat.version(self.param), home) != (self.version, self.home)
            owners = [(owner(), state) for owner, state in self.states]
            return written and all(
                owner is None
                or owner.state.get(self.param) is not state
                or all(self._is_new(name, value) for name, value in state.items())
                for owner, state in owners
            )

    def _is_new(self, name: str, value: object) -> bool:
        """True if a state's entry differs from those that the update left."""
        if not isinstance(value, torch.Tensor):
            return False  # numbers cannot be told apart
        if id(value) not in self.values or id(value) in self.overwritten:
            return True
        return name == "step" and compat.version(value) != self.values[id(value)][1]

    def visible(self) -> Iterator[torch.Tensor]:
        """The user-visible states, without the counter."""
        for _, state in self.states:
            yield from (v for k, v in state.items() if k != "step" and isinstance(v, torch.Tensor))


@dataclass(frozen=True, slots=True, eq=False)
class Torn:
    """The half-updated part of a bucket.

    Args:
        why: the failure.
        left: parameter index -> its state after the failure.
    """

    why: str
    left: dict[int, Left]

    def restored(self) -> bool:
        """True if all of it has been overwritten."""
        return all(left.restored() for left in self.left.values())

    def refuse(self) -> None:
        """
        Raises:
            OptimizerError: always.
        """
        raise OptimizerError(
            "parameters and optimizer states are half updated, so they cannot be used or saved: "
            "load a checkpoint into the model and the optimizer (load_state_dict() of both), "
            "within megacompile.restoring(model) if the loader reads them first "
            f"(torch.distributed.checkpoint). What failed: {self.why}"
        )
