"""Background work on a bucket, such as the copy of its first values, and what an update left.

A new bucket maps its memory without physical pages, and the parameters are views of it. A thread
touches, page-locks and fills it while the model is captured (`Fill`), which reads no values. Users
of a parameter wait for its bucket, and the plan for all buckets, because it counts free memory.

[Note: whose turn] The thread does the copy, or a waiter that finds it not started: so no bucket is
forgotten, wherever Ctrl-C arrives.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.ir.ops import Part
from megacompile.runtime.device.background import Completion, fulfil
from megacompile.runtime.device.buffers import trim_heap
from megacompile.runtime.params.guards import unguarded


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
        super().__init__(event, future)
        self.weights = weights
        self.states = states
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


class Left(NamedTuple):
    """A parameter and its states after an update."""

    param: nn.Parameter
    version: int
    home: int  # its address
    states: tuple[tuple[weakref.ref[Optimizer], dict[str, Any]], ...]

    @staticmethod
    def of(param: nn.Parameter, optimizers: Iterable[Optimizer]) -> Left:
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

    def visible(self) -> Iterator[torch.Tensor]:
        for _, state in self.states:
            yield from (v for k, v in state.items() if k != "step" and isinstance(v, torch.Tensor))


class Fill(InFlight):
    """The copy of a bucket's parameters into its memory."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],  # the user's
        values: Sequence[torch.Tensor],  # their views in the bucket
        settle: Callable[[], None],  # allocates the memory's pages and locks them for `device`
        device: torch.device,  # that computes
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

    def wait(self) -> None:
        """Raise the error of a failed copy; the parameters are then in their old memory."""
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
            except BaseException:
                self._give_back()
                raise
        on_host = any(source.device.type == "cpu" for source in self._sources)
        self._sources.clear()
        if on_host:
            trim_heap()

    def _give_back(self) -> None:
        """Undo a failed copy: unless all is copied, the parameters get their old memory."""
        with unguarded():
            for param, source in zip(self.params, self._sources, strict=False):
                param.data = source
        self._sources.clear()
