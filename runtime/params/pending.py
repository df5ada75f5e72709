"""The work on a bucket, and what is offered to the next step; both are guarded.

A tensor that work is in flight for, or that an offer was made from, has a guard, which asks here
before the tensor is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.ir.ops import Part
from megacompile.ir.stream import Stream
from megacompile.runtime.device import forks
from megacompile.runtime.device.streams import Completion, Handle
from megacompile.runtime.params.guards import (
    Offered,
    Wait,
    guard,
    guard_of,
    release,
    release_from,
    unguarded,
)
from megacompile.runtime.params.streamed_copy import StreamedCopy


class InFlight(Completion, Protocol):
    """Work on a bucket's host memory that has been started."""

    @property
    def fresh(self) -> dict[int, torch.Tensor]:
        """New parameters that are on the device too, flat: index -> (numel,). Until it is over."""

    def event(self, part: Part) -> torch.cuda.Event | None:
        """The event that a stream waits for before it touches a part; None: wait on the host."""

    def ahead(self, part: Part) -> Completion | None:
        """The work that is done with a part before all is over; None: there is none."""


class Offer(Protocol):
    """Something that is right only as long as the bucket is not changed."""

    def drop(self) -> None:
        """It is not taken."""


class Pending:
    """The work and the offer of one bucket.

    Args:
        params: the bucket's.
        copy: of them that is streamed, which is watched when nothing else guards them.
        owners: returns the optimizers that have states of it.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        copy: StreamedCopy,
        owners: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self.params = params
        self.copy = copy
        self.owners = owners
        self.torn: Torn | None = None  # by an update that failed, and not loaded since
        self.restoring = False  # may what is torn be read, by who loads it?
        self.in_flight: InFlight | None = None
        self.offered: Offer | None = None  # to optimizer.step(), by the backward
        self.gradients_copied: torch.cuda.Event | None = None  # after the last copy to the host
        self._failed = False  # and a user is to be told
        self._updated: list[int] = []  # the parameters that what is in flight is about
        self._guarded: list[tuple[torch.Tensor, Wait]] = []  # until what is in flight is done
        self._offer_guarded: list[torch.Tensor] = []  # until the offer is taken
        forks.tell(self)

    def forget(self, index: int) -> None:
        """A parameter may have been written to: its streamed copy may be stale."""
        self.copy.forget(index)

    def start(self, work: InFlight, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Note work on some parameters and states; users of these wait for it."""
        assert self.in_flight is None, "a bucket serves one piece of work at a time"
        self._failed = False
        self.copy.changed()
        self.in_flight = work
        self._guarded, self._updated = [], []
        self._guard(updated, states)

    def _guard(self, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Makes users of these wait for what is in flight."""
        self._updated += updated
        each: list[tuple[torch.Tensor, Wait]] = [(self.params[i], Wait(self, i)) for i in updated]
        each += [(state, Wait(self, None)) for state in states]
        self._guarded += each
        for tensor, by in each:
            guard(tensor, by)

    def last_write(self, part: Part) -> Handle:
        """The last write that a token of this bucket stands for (`megacompile.ir.tokens`)."""
        if part is Part.GRADIENTS:
            return Handle(None, Stream.D2H, self.gradients_copied)
        work = self.in_flight
        if work is None:
            return Handle(None, Stream.HOST)
        event = work.event(part)
        if event is None:
            ahead = work.ahead(part)
            return Handle(work, Stream.HOST, host=self if ahead is None else ahead)
        return Handle(work, Stream.D2H, event)

    def done(self) -> bool:
        """True if nothing is in flight."""
        return self.in_flight is None or self.in_flight.done()

    def go_on(self, work: InFlight, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Note work that goes on where what is in flight ends, and has it in it."""
        if self.in_flight is None:
            self.start(work, updated, states)
            return
        self.in_flight = work
        self._guard(updated, states)

    def start_copies(
        self, work: InFlight, updated: Sequence[int], states: Sequence[torch.Tensor]
    ) -> None:
        """Note copies from the device to this bucket's memory, after what was there before."""
        self.wait()
        self.start(work, updated, states)

    def before_fork(self) -> None:
        """Waits for what is in flight: it would be half done in the child, for ever."""
        self.finish()

    def after_fork(self, *, in_child: bool) -> None:
        """Ends, in the child, what another thread has started meanwhile."""
        if in_child and self.in_flight is not None and not self._failed:
            self._ended(self.in_flight)

    def finish(self) -> None:
        """Wait for what is in flight; if it failed, the next user of the bucket is told."""
        work = self.in_flight
        if work is None:
            return
        try:
            work.wait()
        except OptimizerError:
            self._failed = True
            return
        with suppress(OptimizerError):  # of an update before
            self.wait()

    def wait(self) -> None:
        """Wait for what is in flight on this bucket.

        Raises:
            OptimizerError: it failed, or an update before has, and was not loaded since.
        """
        work = self.in_flight
        if work is not None:
            try:
                work.wait()
            except OptimizerError as error:
                owners = list(self.owners())
                self.tear(str(error), {i: Left.of(self.params[i], owners) for i in self._updated})
                raise
            finally:
                if work.done():  # else Ctrl-C: it goes on, as guards do
                    self._ended(work)
        if not self.restoring:
            self.check()

    def tear(self, why: str, left: Mapping[int, Left]) -> None:
        """An update has failed that was about these, by index: they are torn until they are loaded.

        Args:
            why: what failed.
        """
        before = self.torn or Torn(why, {})
        self.torn = Torn(before.why, {**before.left, **left})
        self._guard(list(left), [state for each in left.values() for state in each.visible()])

    def check(self) -> None:
        """Raise if an update before has failed, and was not loaded since. It waits for nothing."""
        if self.torn is None:
            return
        if not self.torn.restored():
            self.torn.refuse()
        self.torn = None
        if self.in_flight is None:
            guarded, self._guarded, self._updated = self._guarded, [], []
            self._release(guarded)

    def overwritten(self, tensor: torch.Tensor) -> None:
        """All of a parameter or a state that is torn has other values."""
        for left in () if self.torn is None else self.torn.left.values():
            left.overwritten.add(id(tensor))

    def begin_restoring(self) -> None:
        """Allows reads of what is torn until `end_restoring`."""
        self.restoring = self.is_torn()

    def end_restoring(self) -> None:
        """Guards again what is not restored."""
        self.restoring = False
        if self.torn is not None and not self.torn.restored():
            left = self.torn.left
            self._guard(list(left), [s for each in left.values() for s in each.visible()])

    def is_torn(self) -> bool:
        """Is it half updated? What is in flight is waited for."""
        with suppress(OptimizerError):
            self.wait()
        return self.torn is not None

    def let_go(self, others: set[int]) -> None:
        """Forgets what is torn where its parameter is not among these, by their ids."""
        if self.torn is not None:
            kept = {i: left for i, left in self.torn.left.items() if id(left.param) in others}
            self.torn = Torn(self.torn.why, kept)

    def _ended(self, work: InFlight) -> None:
        """It is over. Another thread that used the bucket may have said so before, and started the
        next: no call comes between these lines, in which the system could switch to it."""
        if self.in_flight is not work:
            return
        self.in_flight = None
        guarded = self._guarded
        if self.torn is None:
            self._guarded, self._updated = [], []
        work.fresh.clear()
        if self.torn is None:
            self._release(guarded)

    def _release(self, guarded: Sequence[tuple[torch.Tensor, Wait]]) -> None:
        release_from(guarded)
        self.copy.watch()

    # What is offered to the next step.

    def offer(self, what: Offer, params: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Keep something for the next step, unless these are touched before."""
        self.withdraw()
        self.offered = what
        self._offer_guarded = [self.params[i] for i in params] + list(states)
        for i in params:
            guard(self.params[i], Offered(self, i))
        for state in states:
            guard(state, Offered(self, None))

    def take_offer(self) -> Offer | None:
        """The offer, for the step that uses it (or `drop`s it)."""
        offer, self.offered = self.offered, None
        for tensor in self._offer_guarded:
            if isinstance(guard_of(tensor), Offered):
                release(tensor)
        self._offer_guarded = []
        if offer is not None:
            self.copy.watch()
        return offer

    def withdraw(self) -> None:
        """Withdraws the offer, which is no longer right."""
        offer = self.take_offer()
        if offer is not None:
            offer.drop()


# Partially updated parameters after a failed step, until they are loaded again.
#
# A checkpoint of it would be taken for a whole one. So whatever uses the bucket raises, until all
# that the update was about has been written again, and the optimizers have other states of it. The
# guards of its tensors stay, and let through only what overwrites all of one (`bucket_guards`).


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
