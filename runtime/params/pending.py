"""Work in flight on a bucket, its offer to the next step, its torn state after a failure, and
copies of its parameters: the tensors of each have a guard, which calls this module before a use.

A failed update leaves parameters and states half updated. So every use of the bucket raises until
its parameters have been overwritten and their states replaced by a checkpoint's. The guards stay,
and permit only complete overwrites.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

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
from megacompile.runtime.params.work import InFlight, Left


class MemoryGuard(Guard):
    """The guard of tensors in the memory of a bucket: parameters, states, gradients."""

    __slots__ = ("copy", "work")

    def __init__(
        self,
        state: GuardState,  # WATCHED, OFFERED or IN_FLIGHT
        copy: StreamedCopy,
        work: Pending | None = None,  # and the offer; None if parameters are only watched
    ) -> None:
        self.state = state
        self.copy = copy
        self.work = work

    def open(self, tensor: torch.Tensor) -> None:
        """Wait for the work or withdraw the offer; copies of a parameter may be stale then."""
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
        """Overwrite a torn tensor. The guard stays: a save checks the other tensors."""
        who = guard_of(args[0]) if function in compat.OVERWRITING else None
        if not isinstance(who, MemoryGuard) or who.state is not GuardState.IN_FLIGHT:
            return NotImplemented
        if who.work is None or not who.work.is_torn():
            return NotImplemented
        for other in args[1:]:
            opened(other)
        who.copy.forget(args[0])
        return function(*args, **kwargs)


_Guarded = tuple[MemoryGuard, list[torch.Tensor]]


class Pending(Completion):
    """The work and the offer of one bucket. Owned by the bucket."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        copy: StreamedCopy,  # watched while nothing else guards the parameters
        owners: Callable[[], Iterable[Any]] = tuple,  # the optimizers with states for the bucket
    ) -> None:
        super().__init__()
        self.params = params
        self.copy = copy
        self.owners = owners
        self.left: dict[int, Left] = {}  # by index: torn by a failed update and not loaded since
        self._why = ""  # what failed
        self._restoring = False  # True while a loader may read torn values
        self.in_flight: InFlight | None = None
        # from the backward to optimizer.step(), until the bucket changes, which drops it
        self.offered: Any = None
        self.gradients_copied: torch.cuda.Event | None = None  # after the last copy to the host
        self._updated: list[int] = []  # the parameters of the work in flight
        self._guarded: list[_Guarded] = []  # guarded until it is done
        self._offer_guarded: list[_Guarded] = []  # guarded until the offer is taken
        at_fork(self)

    def start(self, work: InFlight, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Record work on some parameters and states; users of these wait for it."""
        assert self.in_flight is None, "a bucket serves one piece of work at a time"
        self.copy.changed()
        self.in_flight = work
        self._guarded, self._updated = [], []
        self._guard(updated, states)

    def go_on(self, work: InFlight, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Record work that continues, and includes, the work in flight."""
        if self.in_flight is None:
            self.start(work, updated, states)
        else:
            self.in_flight = work
            self._guard(updated, states)

    def _guard(self, updated: Iterable[int], states: Iterable[torch.Tensor]) -> None:
        """Make users of these tensors wait for the work in flight."""
        by, tensors = MemoryGuard(GuardState.IN_FLIGHT, self.copy, self), list(states)
        for i in updated:
            self._updated.append(i)
            tensors.append(self.params[i])
        self._guarded.append((by, tensors))
        guard(tensors, by)

    def last_write(self, part: Part) -> Handle:
        """The last write represented by a token of this bucket (`megacompile.ir.edges`)."""
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
        return self.in_flight is None or self.in_flight.done()

    def before_fork(self) -> None:
        """Wait for the work in flight before a fork: in the child it would stay half done."""
        self.is_torn()

    def after_fork(self, *, in_child: bool) -> None:
        """Drop, in the child, work that another thread has started meanwhile."""
        if in_child and self.in_flight is not None:
            self._ended(self.in_flight)

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
        if self.left and not self._restoring:
            self.check()

    def settle(self) -> None:
        """Wait for the work in flight, and withdraw the offer: the bucket's memory may change."""
        self.wait()
        self.withdraw()

    def _ended(self, work: InFlight) -> None:
        """Record that the work is complete. Another thread may have done so already and started new
        work: no call separates these lines, so no thread switch can occur between them."""
        if self.in_flight is not work:
            return
        self.in_flight = None
        guarded = self._guarded
        if not self.left:
            self._guarded, self._updated = [], []
        work.fresh.clear()
        if not self.left:
            self._release(guarded)

    def _release(self, guarded: Iterable[_Guarded]) -> None:
        for by, tensors in guarded:
            release_from(by, tensors)
        self.copy.watch()

    def tear(self, why: str, left: Mapping[int, Left]) -> None:
        """Record a failed update of these parameters, by index: they are torn until loaded."""
        self._why = self._why if self.left else why
        self.left = {**self.left, **left}
        self._guard_left(left)

    def _guard_left(self, left: Mapping[int, Left]) -> None:
        self._guard(left, [state for each in left.values() for state in each.visible()])

    def _restored(self) -> bool:
        return all(left.restored() for left in self.left.values())

    def check(self) -> None:
        """Raise if an earlier update failed and its values were not loaded since. Does not wait.

        Raises:
            OptimizerError: it failed.
        """
        if not self.left:
            return
        if not self._restored():
            raise OptimizerError(
                "parameters and optimizer states are half updated, so they cannot be used or "
                "saved: load a checkpoint into the model and the optimizer (load_state_dict() of "
                "both), within megacompile.restoring(model) if the loader reads them first "
                f"(torch.distributed.checkpoint). What failed: {self._why}"
            )
        self.left = {}
        if self.in_flight is None:
            guarded, self._guarded, self._updated = self._guarded, [], []
            self._release(guarded)

    def begin_restoring(self) -> None:
        """Allow reads of torn values until `end_restoring`."""
        self._restoring = self.is_torn()

    def end_restoring(self) -> None:
        """Guard values that were not restored again."""
        self._restoring = False
        if not self._restored():
            self._guard_left(self.left)

    def is_torn(self) -> bool:
        """True if the bucket is half updated; waits for work in flight."""
        with suppress(OptimizerError):
            self.wait()
        return bool(self.left)

    def let_go(self, others: set[int]) -> None:
        """Forget torn parameters that are not among these ids."""
        self.left = {i: left for i, left in self.left.items() if id(left.param) in others}

    def offer(self, what: Any, params: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Offer something to the next step, unless these tensors are used before."""
        self.withdraw()
        self.offered = what
        tensors = [self.params[i] for i in params] + list(states)
        by = MemoryGuard(GuardState.OFFERED, self.copy, self)
        self._offer_guarded = [(by, tensors)]
        guard(tensors, by)

    def take_offer(self) -> Any:
        """The offer, for the step that uses it (or `drop`s it)."""
        offer, self.offered = self.offered, None
        if self._offer_guarded:
            guarded, self._offer_guarded = self._offer_guarded, []
            self._release(guarded)
        return offer

    def withdraw(self) -> None:
        """Withdraw an invalid offer."""
        if self.offered is not None or self._offer_guarded:
            offer = self.take_offer()
            if offer is not None:
                offer.drop()


class StreamedCopy:
    """The copies that must stay in sync with the parameters of one bucket (`HostBucket`, the owner,
    which is referenced weakly: guards do not keep its memory alive): the copy in another dtype
    (`compute_dtype`), which is streamed instead, and copies that stay in device slots between two
    forwards. The user may change a parameter at any time, so parameters without another guard are
    watched. Without copies, all methods do nothing."""

    def __init__(self, of: Any) -> None:
        self._reference = weakref.ref(of)
        self._fresh: dict[int, int] = {}  # parameter -> its version at the time of the copy
        self._indices = {id(param): i for i, param in enumerate(of.params)}
        self._watched = MemoryGuard(GuardState.WATCHED, self)
        self._changes = 0  # number of possible changes
        self._marked = False  # True if a copy is on the device

    def _state(self) -> object:
        of = self._reference()
        return self._changes, () if of is None else tuple(compat.versions(of.params))

    def mark(self) -> Callable[[], bool] | None:
        """A test whether the parameters are still in their current state; None if a change could go
        unnoticed."""
        of = self._reference()
        self._marked = True
        self.watch()
        if of is None or any(guard_of(p) is None or of.aliased(i) for i, p in enumerate(of.params)):
            return None
        before = self._state()
        return lambda: self._state() == before

    def changed(self) -> None:
        self._changes += 1

    def refresh(self) -> None:
        """Update the copy with the user's changes."""
        of = self._reference()
        if of is None or of.streamed is of.values:
            return
        idle = of.pending.in_flight is None
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
        if of is None or not (self._marked or of.streamed is not of.values):
            return
        for i, param in enumerate(of.params):
            copied = self._marked or of.streamed[i] is not of.values[i]
            if copied and guard_of(param) is None:
                guard([param], self._watched)
