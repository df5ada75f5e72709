"""Work on a bucket that goes on in the background, and what it leaves if it fails.

A failed update leaves parameters and states half updated, and a checkpoint of them would be taken
for a whole one. So whatever uses the bucket raises, until all that the update was about has been
written again, and the optimizers have other states of it. The guards of its tensors stay, and let
through only what overwrites all of one (`pending.MemoryGuard`).
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
    """Work on a bucket's host memory that has been started, until its `Pending` finds it over.

    Args:
        event: after what brings new values from the device.
        future: of what makes new values, or brings them.
        weights: the end of the last write of parameters, where that is another.
        states: the same of states.
        fresh: new parameters that are on the device too, flat: index -> (numel,).
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
        """This work, and after it writes of what it makes."""
        weights, states = weights or self.weights, states or self.states
        return InFlight(self.event, self.future, weights=weights, states=states, fresh=self.fresh)

    def last_write(self, part: Part) -> Completion | None:
        """The end of the last write of a part; None: the end of all."""
        if self.weights is self.states:  # there is none
            return None
        return (self.weights if part is Part.WEIGHTS else self.states) or Completion(
            self.event, self.future
        )

    def done(self) -> bool:
        """True if all of it is over, well or not."""
        weights, states = self.weights, self.states
        if not super().done() or not (weights is None or weights.done()):
            return False
        return states is None or states.done()

    def wait(self) -> None:
        """Wait until all of it is over, and raise the first error.

        Raises:
            OptimizerError: the values that it was about are half updated.
        """
        if self.weights is self.states:
            super().wait()
            return
        errors = []
        for wait in (super().wait, *(end.wait for end in (self.weights, self.states) if end)):
            try:
                wait()
            except OptimizerError as error:  # the writes of what failed do so too
                errors.append(error)
        if errors:
            raise errors[0]


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """A parameter and its states, as an update has left them."""

    param: nn.Parameter
    version: int
    home: int  # where its memory begins
    states: tuple[tuple[weakref.ref[Optimizer], dict[str, Any]], ...]
    values: dict[int, tuple[torch.Tensor, int]]  # what these hold: by id, with its version
    overwritten: set[int] = field(default_factory=set)  # ids of those of them, since

    @staticmethod
    def of(param: nn.Parameter, optimizers: Iterable[Optimizer]) -> Left:
        """As it is now, with its states in these optimizers."""
        with unguarded():
            states = [(weakref.ref(o), o.state[param]) for o in optimizers if o.state.get(param)]
            home = compat.local(param).data_ptr()
            held = [v for _, s in states for v in s.values() if isinstance(v, torch.Tensor)]
            values = {id(value): (value, compat.version(value)) for value in held}
            return Left(param, compat.version(param), home, tuple(states), values)

    def restored(self) -> bool:
        """True if it was written since, and its states were replaced, as `load_state_dict()` does,
        or overwritten, the counter too."""
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
        """True if an entry of a state is none of what the update has left."""
        if not isinstance(value, torch.Tensor):
            return False  # a number looks like any other
        if id(value) not in self.values or id(value) in self.overwritten:
            return True
        return name == "step" and compat.version(value) != self.values[id(value)][1]

    def visible(self) -> Iterator[torch.Tensor]:
        """The states that the user can see, but for the counter."""
        for _, state in self.states:
            yield from (v for k, v in state.items() if k != "step" and isinstance(v, torch.Tensor))


@dataclass(frozen=True, slots=True, eq=False)
class Torn:
    """The partially updated part of a bucket.

    Args:
        why: what failed.
        left: by the parameter's index.
    """

    why: str
    left: dict[int, Left]

    def restored(self) -> bool:
        """True if all of it is whole again."""
        return all(left.restored() for left in self.left.values())

    def refuse(self) -> None:
        """
        Raises:
            OptimizerError: always.
        """
        raise OptimizerError(
            "parameters and optimizer states are half updated, and a checkpoint of them would be "
            "taken for a whole one: load one into the model and into the optimizer "
            "(load_state_dict() of both; said until then), within "
            "megacompile.restoring(model) where a loader reads them first, as that of "
            f"torch.distributed.checkpoint does. What failed: {self.why}"
        )
