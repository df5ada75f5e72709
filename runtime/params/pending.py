"""Work in flight on a bucket, its offer to the next step, its torn state after a failure, and
copies of its parameters: the tensors of each have a guard, which calls this module before a use.

A failed update leaves parameters and states half updated. So every use of the bucket raises until
its parameters have been overwritten and their states replaced by a checkpoint's. The guards stay,
and permit only complete overwrites.

A new bucket maps its memory without physical pages, and the parameters are views of it. A thread
touches, page-locks and fills it while the model is captured (`Fill`), which reads no values. Users
of a parameter wait for its bucket, and the plan for all buckets, because it counts free memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.ir.ops import Part
from megacompile.ir.stream import Stream
from megacompile.runtime.device.background import Completion, at_fork, fulfil
from megacompile.runtime.device.buffers import trim_heap
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.params.guards import (
    GuardState,
    MemoryGuard,
    guard,
    guard_of,
    release_from,
    unguarded,
)

_Guarded = tuple[MemoryGuard, list[torch.Tensor]]
_FILLED, _FAILED = 1, 2  # how a `Fill` ended
_POLL_S = 0.01  # between two looks at a parent's copy


class InFlight(Completion):
    """Started work on a bucket's host memory, until its `Pending` sees it complete."""

    def __init__(
        self,
        event: torch.cuda.Event | None = None,  # after the copies of new values from the device
        future: Future[None] | None = None,  # of a thread that computes or copies new values
        *,
        weights: Completion | None = None,  # the last write of parameters, if separate
        states: Completion | None = None,  # the same for states
        # new parameters that are also on the device, flat: index -> (numel,)
        fresh: dict[int, torch.Tensor] | None = None,
    ) -> None:
        self.event, self.future, self.weights, self.states = event, future, weights, states
        self.may_lend = False  # True if new parameters on the device may become `fresh`
        self.fresh: dict[int, torch.Tensor] = {} if fresh is None else fresh

    def then(
        self, *, weights: Completion | None = None, states: Completion | None = None
    ) -> InFlight:
        weights, states = weights or self.weights, states or self.states
        return InFlight(self.event, self.future, weights=weights, states=states, fresh=self.fresh)

    def last_write(self, part: Part) -> Completion | None:
        """The completion of the last write of a part; None: of all parts."""
        if self.weights is self.states:  # no such write
            return None
        own = self.weights if part is Part.WEIGHTS else self.states
        return own or Completion(self.event, self.future)

    def done(self) -> bool:
        """True if all of it has ended, successfully or not."""
        weights, states = self.weights, self.states
        if not super().done() or not (weights is None or weights.done()):
            return False
        return states is None or states.done()

    def wait(self) -> None:
        """Wait until all of it has ended; raises the first error. Raises OptimizerError: its values
        are half updated."""
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


class Left(NamedTuple):
    """A parameter and its states after an update."""

    param: nn.Parameter
    version: int
    home: int  # its address
    states: tuple[tuple[weakref.ref[Optimizer], dict[str, Any]], ...]

    @staticmethod
    def of(param: nn.Parameter, optimizers: Iterable[Any]) -> Left:
        """Record its current state, with its states in these optimizers."""
        with unguarded():
            states = [(weakref.ref(o), o.state[param]) for o in optimizers if o.state.get(param)]
            home = compat.local(param).data_ptr()
            return Left(param, compat.version(param), home, tuple(states))

    def restored(self) -> bool:
        """True if it was overwritten since, and its states replaced, as by `load_state_dict()`."""
        with unguarded():
            home = compat.local(self.param).data_ptr()
            owners = [(owner(), state) for owner, state in self.states]
            return (compat.version(self.param), home) != (self.version, self.home) and all(
                owner is None or owner.state.get(self.param) is not state for owner, state in owners
            )


class Pending(Completion):
    """The work and the offer of one bucket, which owns it, and the copies that must stay in sync
    with its parameters: the copy in another dtype (`compute_dtype`), which is streamed instead, and
    copies that stay in device slots between two forwards. The user may change a parameter at any
    time, so with copies, parameters without another guard are watched."""

    def __init__(self, of: Any) -> None:  # a `HostBucket`; guards do not keep its memory alive
        super().__init__()
        self.params: Sequence[nn.Parameter] = of.params
        self._bucket = weakref.ref(of)
        self.left: dict[int, Left] = {}  # by index: torn by a failed update and not loaded since
        self._why = ""  # what failed
        self.in_flight: InFlight | None = None
        # from the backward to optimizer.step(), until the bucket changes, which drops it
        self.offered: Any = None
        self.gradients_copied: torch.cuda.Event | None = None  # after the last copy to the host
        self._updated: list[int] = []  # the parameters of the work in flight
        self._guarded: list[_Guarded] = []  # guarded until it is done
        self._offer_guarded: list[_Guarded] = []  # guarded until the offer is taken
        self._fresh: dict[int, int] = {}  # parameter -> its version at the time of the copy
        self._indices = {id(param): i for i, param in enumerate(self.params)}
        self._watch = MemoryGuard(GuardState.WATCHED, self)
        self._watches = of.has_copy  # copies exist
        self._marked = False  # True if copies may be in device slots
        self._changes = 0  # number of possible changes
        at_fork(self)

    def start(self, work: InFlight, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Record work on some parameters and states; users of these wait for it. It includes the
        work in flight, if there is any."""
        if self.in_flight is None:
            self._changes += 1
            self._guarded, self._updated = [], []
        self.in_flight = work
        self._guard(updated, states)

    def _guard(self, updated: Iterable[int], states: Iterable[torch.Tensor]) -> None:
        """Make users of these tensors wait for the work in flight."""
        by, tensors = MemoryGuard(GuardState.IN_FLIGHT, self), list(states)
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
        """Wait for the work in flight before a fork: in the child it would stay half done. A copy
        of new parameters (`Fill`) may go on, if the child will see it."""
        if isinstance(self.in_flight, Fill) and self.in_flight.is_shared:
            return
        with contextlib.suppress(RuntimeError):  # a lost copy, which each use reports
            self.is_torn()

    def after_fork(self, *, in_child: bool) -> None:
        """Drop, in the child, work that another thread has started meanwhile: it would never end
        there, and a use of the bucket, or another fork, would wait for it."""
        work = self.in_flight
        if not in_child or work is None:
            return
        if isinstance(work, Fill) and work.is_shared:
            self.in_flight = work.of_parent()
        elif not isinstance(work, _Parents):
            self._ended(work)

    def wait(self) -> None:
        """Wait for the work in flight on this bucket. Raises OptimizerError: it failed, or an
        earlier update failed and its values were not loaded since."""
        work = self.in_flight
        if work is not None:
            over = False
            try:
                work.wait()
                over = True
            except OptimizerError as error:
                bucket = self._bucket()
                owners = [] if bucket is None else bucket.states.owners()
                self.tear(str(error), {i: Left.of(self.params[i], owners) for i in self._updated})
                raise
            finally:
                if over or work.done():  # else Ctrl-C: work continues, guards stay
                    self._ended(work)
        if self.left:
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
        if self._watches:
            self.watch()

    def tear(self, why: str, left: Mapping[int, Left]) -> None:
        """Record a failed update of these parameters, by index: they are torn until loaded."""
        self._why = self._why if self.left else why
        self.left = {**self.left, **left}
        states = [state for each in left.values() for _, state in each.states]
        named = [item for state in states for item in state.items() if item[0] != "step"]
        self._guard(left, [value for _, value in named if isinstance(value, torch.Tensor)])

    def check(self) -> None:
        """Raise OptimizerError if an earlier update failed and its values were not loaded since.
        Does not wait."""
        if not all(left.restored() for left in self.left.values()):
            raise OptimizerError(
                "parameters and optimizer states are half updated, so they cannot be used or "
                "saved: load a checkpoint into the model and the optimizer (load_state_dict() of "
                f"both). What failed: {self._why}"
            )
        self.left = {}
        if self.in_flight is None:
            guarded, self._guarded, self._updated = self._guarded, [], []
            self._release(guarded)

    def is_torn(self) -> bool:
        """True if the bucket is half updated; waits for work in flight."""
        with contextlib.suppress(OptimizerError):
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
        by = MemoryGuard(GuardState.OFFERED, self)
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

    # Copies of the parameters.

    def mark(self) -> Callable[[], bool] | None:
        """Returns a function that is true while the parameters, now in device slots, are unchanged;
        None if a change could go unnoticed."""
        of = self._bucket()
        self._marked = self._watches = True
        self.watch()
        is_aliased = of is None or any(map(of.aliased, range(len(self.params))))
        if is_aliased or any(guard_of(param) is None for param in self.params):
            return None
        before = self._changes, list(map(compat.version, self.params))
        return lambda: (self._changes, list(map(compat.version, self.params))) == before

    def refresh(self) -> None:
        """Update the streamed copy with the user's changes."""
        of = self._bucket()
        if of is None or not of.has_copy:
            return
        idle = self.in_flight is None
        for i, param in enumerate(self.params):
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
        """Record that eager code has written to a streamed parameter."""
        of = self._bucket()
        if of is not None and of.streamed[index] is not of.values[index]:
            of.values[index].copy_(of.streamed[index])
        self._changes += 1

    def mark_fresh(self, indices: Sequence[int]) -> None:
        """Record that the streamed copies of some parameters are up to date."""
        versions = [compat.version(self.params[i]) for i in indices]
        self._fresh.update(zip(indices, versions, strict=True))

    def forget(self, tensor: torch.Tensor) -> None:
        """Record that the user has accessed a tensor: a parameter's copy may be stale."""
        index = self._indices.get(id(tensor))
        if index is not None:
            self._fresh.pop(index, None)
            self._changes += 1

    def watch(self) -> None:
        """Watch for changes that do not bump the version: those through `p.data`."""
        of = self._bucket()
        for i, param in enumerate(self.params):
            copied = of is not None and (self._marked or of.streamed[i] is not of.values[i])
            if copied and guard_of(param) is None:
                guard([param], self._watch)


class _Parents(InFlight):
    """A parent's `Fill`, as its child sees it; `ended` is in shared memory. A copy that is lost
    never completes."""

    def __init__(self, ended: mmap.mmap, parent: int) -> None:
        super().__init__()
        self._ended, self._parent = ended, parent

    def done(self) -> bool:
        return self._ended[0] == _FILLED

    def wait(self) -> None:
        while not self._ended[0] and os.getppid() == self._parent:
            time.sleep(_POLL_S)
        if not self.done():
            raise RuntimeError(
                "the parent process has ended, or failed, while it moved this parameter: use "
                "parameters before the fork, or in the parent"
            )


class Fill(InFlight):
    """The copy of a bucket's parameters into its memory. A thread makes it, or the first waiter if
    no thread has started it, so no bucket is forgotten, wherever Ctrl-C arrives.

    A fork does not wait for it if processes share the bucket's memory (`is_shared`): the parent
    copies, and a child waits if it uses a parameter, as workers of a DataLoader do not.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],  # the user's
        values: Sequence[torch.Tensor],  # their views in the bucket
        settle: Callable[[], None],  # allocates the memory's pages and locks them for `device`
        device: torch.device,  # that computes
        *,
        shared: bool = False,  # True if children of a fork see writes to the bucket
    ) -> None:
        self._copied: Future[None] = Future()
        super().__init__(future=self._copied)
        self.params = params
        self.values = values
        self.settle = settle
        self.device = device
        self._claims: list[object] = []  # the first to take it does the copy
        self._sources = [param.detach() for param in params]  # dropped when everything is copied
        devices = {s.device for s in self._sources if s.device.type == "cuda"}
        # work that still computes them
        self._computed = [torch.cuda.current_stream(d).record_event() for d in devices]
        self.is_shared = shared and not devices  # a child cannot use the GPU
        self._process = os.getpid()
        self._ended = mmap.mmap(-1, 1)  # shared with children: 0, or how it ended

    def of_parent(self) -> InFlight:
        """In a child of a fork: what to wait for instead."""
        self._sources.clear()  # or this process keeps memory that its parent frees
        trim_heap()
        return _Parents(self._ended, self._process)

    def wait(self) -> None:
        """Wait for the copy, or make it. Raises the error of a failed copy; the parameters are then
        in their old memory."""
        self.run()
        super().wait()

    def run(self) -> None:
        """Copy the values, unless another thread does."""
        if self._claims:
            return
        mine = object()
        try:
            self._claims.append(mine)
            if self._claims[0] is mine:
                fulfil(self._copied, self._fill)
        except BaseException as error:  # Ctrl-C, before or after `_fill`
            if self._claims[:1] == [mine] and not self._copied.done():
                self._give_back()
                self._copied.set_exception(error)
            raise

    @torch.no_grad()
    def _fill(self) -> None:
        on_gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
            try:
                self.settle()
                for event in self._computed:
                    event.synchronize()
                for value, source in zip(self.values, self._sources, strict=True):
                    value.copy_(source)
                self._ended[0] = _FILLED
            except BaseException:
                self._give_back()
                raise
        on_host = any(source.device.type == "cpu" for source in self._sources)
        self._sources.clear()
        if on_host:
            trim_heap()

    def _give_back(self) -> None:
        """Undo a failed copy: the parameters get their old memory, unless all are copied."""
        self._ended[0] = self._ended[0] or _FAILED
        with unguarded():
            for param, source in zip(self.params, self._sources, strict=False):
                param.data = source
        self._sources.clear()
