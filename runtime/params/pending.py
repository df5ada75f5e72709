"""Work in flight on a bucket, its offer to the next step, and copies of its parameters: all
guarded.

A tensor with work in flight, with an offer derived from it, or with a copy has a guard, which calls
this module before the tensor is used.
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
from megacompile.runtime.device.background import Completion, at_fork
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
    """Something that is valid only while the bucket is unchanged; a change drops it."""

    def drop(self) -> None:
        """Drop the offer."""


class MemoryGuard(Guard):
    """The guard of tensors in the memory of a bucket: parameters, states, gradients.

    Args:
        state: WATCHED, OFFERED or IN_FLIGHT.
        copy: the copies of the bucket's parameters.
        work: the bucket's work and offer; None if parameters are only watched.
    """

    __slots__ = ("copy", "work")

    def __init__(self, state: GuardState, copy: StreamedCopy, work: Pending | None = None) -> None:
        super().__init__(state)
        self.copy = copy
        self.work = work

    def open(self, tensor: torch.Tensor) -> None:
        """Wait for the work or withdraw the offer, and mark copies of a parameter as possibly
        stale."""
        if self.work is not None:
            if self.state is GuardState.IN_FLIGHT:
                self.work.wait()
            else:
                self.work.withdraw()
        if guard_of(tensor) is self or state_of(tensor) is not GuardState.IN_FLIGHT:
            release(tensor)  # otherwise another thread has started new work
        self.copy.forget(tensor)

    @staticmethod
    def serve(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Mark a torn tensor as whole after it is overwritten. The guard stays: a save checks the
        other tensors."""
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
    """The work and the offer of one bucket. Owned by the bucket.

    Args:
        params: the bucket's parameters.
        copy: their streamed copy, watched while nothing else guards the parameters.
        owners: returns the optimizers with states for the bucket.
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
        self.torn: Torn | None = None  # torn by a failed update and not loaded since
        self.restoring = False  # True while a loader may read torn values
        self.in_flight: InFlight | None = None
        self.offered: Offer | None = None  # from the backward to optimizer.step()
        self.gradients_copied: torch.cuda.Event | None = None  # after the last copy to the host
        self._failed = False  # and the next user must be told
        self._updated: list[int] = []  # the parameters of the work in flight
        self._guarded: list[tuple[MemoryGuard, list[torch.Tensor]]] = []  # guarded until it is done
        self._offer_guarded: list[torch.Tensor] = []  # guarded until the offer is taken
        at_fork(self)

    def start(self, work: InFlight, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Record work on some parameters and states; users of these wait for it."""
        assert self.in_flight is None, "a bucket serves one piece of work at a time"
        self._failed = False
        self.copy.changed()
        self.in_flight = work
        self._guarded, self._updated = [], []
        self._guard(updated, states)

    def _guard(self, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Make users of these tensors wait for the work in flight."""
        self._updated += updated
        by, tensors = MemoryGuard(GuardState.IN_FLIGHT, self.copy, self), list(states)
        tensors += [self.params[i] for i in updated]
        self._guarded.append((by, tensors))
        guard(tensors, by)

    def last_write(self, part: Part) -> Handle:
        """The last write represented by a token of this bucket (`megacompile.ir.tokens`)."""
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
        """Record work that continues, and includes, the work in flight."""
        if self.in_flight is None:
            self.start(work, updated, states)
            return
        self.in_flight = work
        self._guard(updated, states)

    def before_fork(self) -> None:
        """Wait for the work in flight before a fork: in the child it would stay half done."""
        self.finish()

    def after_fork(self, *, in_child: bool) -> None:
        """Drop, in the child, work that another thread has started meanwhile."""
        if in_child and self.in_flight is not None and not self._failed:
            self._ended(self.in_flight)

    def finish(self) -> None:
        """Wait for the work in flight; if it failed, the next user of the bucket gets the error."""
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
        """Wait for the work in flight on this bucket.

        Raises:
            OptimizerError: it failed, or an earlier update failed and its values were not loaded
                since.
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
                if over or work.done():  # otherwise Ctrl-C: the work continues, and so do guards
                    self._ended(work)
        if self.torn is not None and not self.restoring:
            self.check()

    def settle(self) -> None:
        """Wait for the work in flight, and withdraw the offer: the bucket's memory may change."""
        self.wait()
        self.withdraw()

    def tear(self, why: str, left: Mapping[int, Left]) -> None:
        """Record a failed update of these parameters, by index: they are torn until loaded.

        Args:
            why: the failure.
        """
        before = self.torn or Torn(why, {})
        self.torn = Torn(before.why, {**before.left, **left})
        self._guard(list(left), [state for each in left.values() for state in each.visible()])

    def check(self) -> None:
        """Raise if an earlier update failed and its values were not loaded since. Does not wait."""
        if self.torn is None:
            return
        if not self.torn.restored():
            self.torn.refuse()
        self.torn = None
        if self.in_flight is None:
            guarded, self._guarded, self._updated = self._guarded, [], []
            self._release(guarded)

    def overwritten(self, tensor: torch.Tensor) -> None:
        """Record that a torn parameter or state was completely overwritten."""
        for left in () if self.torn is None else self.torn.left.values():
            left.overwritten.add(id(tensor))

    def begin_restoring(self) -> None:
        """Allow reads of torn values until `end_restoring`."""
        self.restoring = self.is_torn()

    def end_restoring(self) -> None:
        """Guard values that were not restored again."""
        self.restoring = False
        if self.torn is not None and not self.torn.restored():
            left = self.torn.left
            self._guard(list(left), [s for each in left.values() for s in each.visible()])

    def is_torn(self) -> bool:
        """True if the bucket is half updated; waits for work in flight."""
        with suppress(OptimizerError):
            self.wait()
        return self.torn is not None

    def let_go(self, others: set[int]) -> None:
        """Forget torn parameters that are not among these ids."""
        if self.torn is not None:
            kept = {i: left for i, left in self.torn.left.items() if id(left.param) in others}
            self.torn = Torn(self.torn.why, kept)

    def _ended(self, work: InFlight) -> None:
        """Record that the work is complete. Another thread may have done so already and started new
        work: no call separates these lines, so no thread switch can occur between them."""
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

    # The offer to the next step.

    def offer(self, what: Offer, params: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Offer something to the next step, unless these tensors are used before."""
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
        """Withdraw an invalid offer."""
        if self.offered is None and not self._offer_guarded:
            return
        offer = self.take_offer()
        if offer is not None:
            offer.drop()


# Copies that must stay in sync with the parameters: the copy in another dtype (`compute_dtype`),
# which is streamed instead, and copies that stay in device slots between two forwards. The user may
# change a parameter at any time: parameters without another guard are watched.


@dataclass(frozen=True, slots=True)
class CopyMark:
    """The state of a bucket's parameters when a forward left them in a slot for the next
    forward."""

    copy: StreamedCopy
    changes: int
    versions: tuple[int, ...]

    def holds(self) -> bool:
        """True if the parameters are still in that state."""
        return self.copy.is_as_at(self)


@dataclass(eq=False)
class Copied:
    """The parameters of a bucket and their streamed tensors. Owned by the bucket.

    Args:
        values: their views in the bucket; an entry of the list may be replaced.
        streamed: the same list, or a list of copies in another dtype.
    """

    params: Sequence[torch.nn.Parameter]
    values: list[torch.Tensor]
    streamed: list[torch.Tensor]

    def __post_init__(self) -> None:
        self.has_copy = self.streamed is not self.values  # in another dtype

    def aliased(self, index: int) -> bool:
        """True if a parameter's memory has an alias."""
        own = OWN_USERS - compat.is_sharded(self.params[index])  # its local tensor is the bucket's
        return compat.storage_users(self.values[index]) > own


OWN_USERS = 3  # users of a parameter's memory: the bucket, the parameter, its proxy


class StreamedCopy:
    """The copies of one bucket's parameters; without copies, all methods do nothing.

    Owned by the bucket. References the bucket's memory weakly, so that remaining guards do not keep
    it alive.
    """

    def __init__(self, of: Copied) -> None:
        self._reference = weakref.ref(of)
        self._fresh: dict[int, int] = {}  # parameter -> its version at the time of the copy
        self._indices = {id(param): i for i, param in enumerate(of.params)}
        self._watched = MemoryGuard(GuardState.WATCHED, self)
        self._changes = 0  # number of possible changes
        self._marked = False  # True if a copy is on the device

    def mark(self) -> CopyMark | None:
        """The parameters' current state; None if a change could go unnoticed."""
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
        """Record a write to the parameters."""
        self._changes += 1

    def is_as_at(self, mark: CopyMark) -> bool:
        """True if the parameters are unchanged since then."""
        return self._changes == mark.changes and self._versions() == mark.versions

    def refresh(self, *, idle: bool) -> None:
        """Update the copy with the user's changes.

        Args:
            idle: True if the bucket has no work in flight.
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
                    self.forget(param)  # a write through an alias would go unnoticed
                else:
                    self.mark_fresh([i])
        self.watch()

    def take_back(self, index: int) -> None:
        """Update a master from its copy, which eager code wrote to."""
        of = self._reference()
        if of is not None and of.streamed[index] is not of.values[index]:
            of.values[index].copy_(of.streamed[index])
        self.changed()

    def mark_fresh(self, indices: Sequence[int]) -> None:
        """Record that the copies of some parameters are up to date."""
        of = self._reference()
        if of is not None:
            versions = compat.versions([of.params[i] for i in indices])
            self._fresh.update(zip(indices, versions, strict=True))

    def forget(self, tensor: torch.Tensor) -> None:
        """Record that the user has accessed a tensor: a parameter's copy may be stale."""
        index = self._indices.get(id(tensor))
        if index is not None:
            self._fresh.pop(index, None)
            self.changed()

    def watch(self) -> None:
        """Watch for changes that do not bump the version: those through `p.data`."""
        of = self._reference()
        if of is None or not (of.has_copy or self._marked):
            return
        for i, param in enumerate(of.params):
            copied = self._marked or of.streamed[i] is not of.values[i]
            if copied and guard_of(param) is None:
                guard([param], self._watched)
