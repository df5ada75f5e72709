"""The work on a bucket, the offer to the next step and the copies of its parameters: all guarded.

A tensor that work is in flight for, that an offer was made from or that is copied has a guard,
which asks here before the tensor is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.ir.ops import Part
from megacompile.ir.stream import Stream
from megacompile.runtime.device import forks
from megacompile.runtime.device.background import Completion
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.params.guards import (
    Guard,
    GuardState,
    guard,
    guard_of,
    opened,
    release,
    release_from,
    state_of,
)
from megacompile.runtime.params.work import InFlight, Left, Torn


class Offer(Protocol):
    """Something that is right only as long as the bucket is not changed: then it is dropped."""

    def drop(self) -> None:
        """It is not taken."""


class MemoryGuard(Guard):
    """The guard of tensors in the memory of a bucket: parameters, states, gradients.

    Args:
        state: WATCHED, OFFERED or IN_FLIGHT.
        copy: of the bucket's parameters.
        work: on the bucket, and its offer; None where parameters are only watched.
    """

    __slots__ = ("copy", "work")

    def __init__(self, state: GuardState, copy: StreamedCopy, work: Pending | None = None) -> None:
        super().__init__(state)
        self.copy = copy
        self.work = work

    def open(self, tensor: torch.Tensor) -> None:
        """Wait for the work, or withdraw the offer; copies of a parameter may be stale from now."""
        if self.work is not None:
            if self.state is GuardState.IN_FLIGHT:
                self.work.wait()
            else:
                self.work.withdraw()
        if guard_of(tensor) is self or state_of(tensor) is not GuardState.IN_FLIGHT:
            release(tensor)  # else another thread has started new work
        self.copy.forget(tensor)

    @staticmethod
    def serve(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Marks a tensor that is overwritten as whole again, where it is torn. The guard stays: a
        save asks if the others are whole."""
        who = guard_of(args[0]) if function in compat.OVERWRITING else None
        if not isinstance(who, MemoryGuard) or who.state is not GuardState.IN_FLIGHT:
            return NotImplemented
        if who.work is None or not who.work.is_torn():
            return NotImplemented
        for other in args[1:]:
            opened(other)
        who.copy.forget(args[0])
        result = function(*args, **kwargs)
        who.work.overwritten(args[0])
        return result


class Pending(Completion):
    """The work and the offer of one bucket, which has it for good.

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
        super().__init__()
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
        self._guarded: list[tuple[MemoryGuard, list[torch.Tensor]]] = []  # until it is done
        self._offer_guarded: list[torch.Tensor] = []  # until the offer is taken
        forks.tell(self)

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
        by, tensors = MemoryGuard(GuardState.IN_FLIGHT, self.copy, self), list(states)
        tensors += [self.params[i] for i in updated]
        self._guarded.append((by, tensors))
        guard(tensors, by)

    def last_write(self, part: Part) -> Handle:
        """The last write that a token of this bucket stands for (`megacompile.ir.tokens`)."""
        if part is Part.GRADIENTS:
            return Handle(None, Stream.D2H, self.gradients_copied)
        work = self.in_flight
        if work is None:
            return Handle(None, Stream.HOST)
        end = work.last_write(part)
        event = work.event if end is None else end.event
        if event is not None:
            return Handle(work, Stream.D2H, event)
        return Handle(work, Stream.HOST, host=end or self)

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
            over = False
            try:
                work.wait()
                over = True
            except OptimizerError as error:
                owners = list(self.owners())
                self.tear(str(error), {i: Left.of(self.params[i], owners) for i in self._updated})
                raise
            finally:
                if over or work.done():  # else Ctrl-C: it goes on, as guards do
                    self._ended(work)
        if self.torn is not None and not self.restoring:
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

    def _release(self, guarded: Sequence[tuple[MemoryGuard, list[torch.Tensor]]]) -> None:
        for by, tensors in guarded:
            release_from(by, tensors)
        self.copy.watch()

    # What is offered to the next step.

    def offer(self, what: Offer, params: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Keep something for the next step, unless these are touched before."""
        self.withdraw()
        self.offered = what
        self._offer_guarded = [self.params[i] for i in params] + list(states)
        guard(self._offer_guarded, MemoryGuard(GuardState.OFFERED, self.copy, self))

    def take_offer(self) -> Offer | None:
        """The offer, for the step that uses it (or `drop`s it)."""
        offer, self.offered = self.offered, None
        for tensor in self._offer_guarded:
            if state_of(tensor) is GuardState.OFFERED:
                release(tensor)
        self._offer_guarded = []
        if offer is not None:
            self.copy.watch()
        return offer

    def withdraw(self) -> None:
        """Withdraws the offer, which is no longer right."""
        if self.offered is None and not self._offer_guarded:
            return
        offer = self.take_offer()
        if offer is not None:
            offer.drop()


# Copies of the parameters that must follow them: that in another dtype (`compute_dtype`), which is
# streamed instead of them, and those that stay in slots on the device between two forwards. The
# user may change a parameter at any time: one without another guard is watched for that.


@dataclass(frozen=True, slots=True)
class CopyMark:
    """The parameters of a bucket when a forward left them in a slot, until the next forward."""

    copy: StreamedCopy
    changes: int
    versions: tuple[int, ...]

    def holds(self) -> bool:
        """True if they are so still."""
        return self.copy.is_as_at(self)


@dataclass(eq=False)
class Copied:
    """The parameters of a bucket, which has this, and what is streamed of them.

    Args:
        values: their memory in the bucket; an entry of the list may be replaced.
        streamed: the same list, or one with copies in another dtype.
    """

    params: Sequence[torch.nn.Parameter]
    values: list[torch.Tensor]
    streamed: list[torch.Tensor]

    def __post_init__(self) -> None:
        self.has_copy = self.streamed is not self.values  # in another dtype

    def aliased(self, index: int) -> bool:
        """True if a parameter's memory is held under another name."""
        own = OWN_USERS - compat.is_sharded(self.params[index])  # its part is the bucket's tensor
        return compat.storage_users(self.values[index]) > own


OWN_USERS = 3  # of a parameter's memory: the bucket, the parameter, its proxy


class StreamedCopy:
    """The copies of one bucket's parameters; where there are none, these do nothing.

    The bucket has this. Its memory is referred to weakly: guards that are left do not hold it.
    """

    def __init__(self, of: Copied) -> None:
        self._reference = weakref.ref(of)
        self._fresh: dict[int, int] = {}  # parameter -> its version when its copy was made
        self._indices = {id(param): i for i, param in enumerate(of.params)}
        self._watched = MemoryGuard(GuardState.WATCHED, self)
        self._changes = 0  # times that one may have changed
        self._marked = False  # is there a copy on the device?

    def mark(self) -> CopyMark | None:
        """The parameters as they are now; None where a change could go unseen."""
        of = self._reference()
        if of is None:
            return None
        self._marked = True
        self.watch()
        if any(guard_of(p) is None or of.aliased(i) for i, p in enumerate(of.params)):
            return None
        return CopyMark(self, self._changes, self._versions())

    def _versions(self) -> tuple[int, ...]:
        of = self._reference()
        return () if of is None else tuple(compat.versions(of.params))

    def changed(self) -> None:
        """The parameters are written to."""
        self._changes += 1

    def is_as_at(self, mark: CopyMark) -> bool:
        """True if the parameters are what they were then."""
        return self._changes == mark.changes and self._versions() == mark.versions

    def refresh(self, *, idle: bool) -> None:
        """Bring the copy up to date with what the user changed.

        Args:
            idle: nothing is in flight for the bucket.
        """
        of = self._reference()
        if of is None or not of.has_copy:
            return
        for i, param in enumerate(of.params):
            if of.streamed[i] is of.values[i]:
                continue
            fresh = self._fresh.get(i) == compat.version(param)
            if not fresh or (idle and of.aliased(i)):
                of.streamed[i].copy_(of.values[i])
                if of.aliased(i):
                    self.forget(param)  # a write under the other name would go unseen
                else:
                    self.mark_fresh([i])
        self.watch()

    def take_back(self, index: int) -> None:
        """Bring a master up to date with its copy, which eager code wrote to."""
        of = self._reference()
        if of is not None and of.streamed[index] is not of.values[index]:
            of.values[index].copy_(of.streamed[index])
        self.changed()

    def mark_fresh(self, indices: Sequence[int]) -> None:
        """The copies of some parameters are what the parameters are now."""
        of = self._reference()
        if of is not None and of.has_copy:
            versions = compat.versions([of.params[i] for i in indices])
            self._fresh.update(zip(indices, versions, strict=True))

    def forget(self, tensor: torch.Tensor) -> None:
        """The user has a tensor in hands: if it is a parameter, its copy may be stale."""
        index = self._indices.get(id(tensor))
        if index is not None:
            self._fresh.pop(index, None)
            self.changed()

    def watch(self) -> None:
        """Notice changes that leave no trace in the version: those through `p.data`."""
        of = self._reference()
        if of is None or not (of.has_copy or self._marked):
            return
        for i, param in enumerate(of.params):
            copied = self._marked or of.streamed[i] is not of.values[i]
            if copied and guard_of(param) is None:
                guard([param], self._watched)
