"""Parameters come to their bucket in the background, while the model is captured.

    before: touch, page-lock, copy; touch, page-lock, copy; ... then capture
    after:  capture, and next to it, bucket by bucket: touch, page-lock, copy

A bucket has its memory at once, whose pages the system has not given yet, and the parameters are
views of it. Until their values are there, a user of a parameter waits for its bucket, as for an
update (`pending`): a capture looks at no values. The plan waits for all of them
(`Machine.await_parameters`), because it is about the memory that is free.

[Note: whose turn] The thread does it, or a waiter that finds that it has not begun: so none
is forgotten, wherever Ctrl-C comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from megacompile.runtime.device import touch
from megacompile.runtime.device.background import Background, fulfil
from megacompile.runtime.params.guards import unguarded
from megacompile.runtime.params.work import InFlight


@dataclass(frozen=True, slots=True)
class Filling:
    """The thread that fills buckets.

    Args:
        device: that computes.
    """

    device: torch.device
    thread: Background


@dataclass(eq=False, slots=True)
class Fill(InFlight):
    """The way of a bucket's parameters to its memory.

    Args:
        params: as the user has them.
        values: their places in the bucket.
        settle: gives the memory its pages, and locks them for `device`.
        device: that computes.
    """

    params: Sequence[torch.nn.Parameter]
    values: Sequence[torch.Tensor]
    settle: Callable[[], None]
    device: torch.device
    fresh: dict[int, torch.Tensor] = field(default_factory=dict)
    _sources: list[torch.Tensor] = field(init=False)  # given up when all is copied
    _behind: list[torch.cuda.Event] = field(init=False)  # what is still computing them
    _future: Future[None] = field(default_factory=Future)
    _claims: list[object] = field(default_factory=list)  # the first one's turn it is

    def __post_init__(self) -> None:
        self._sources = [param.detach() for param in self.params]
        devices = {s.device for s in self._sources if s.device.type == "cuda"}
        self._behind = [torch.cuda.current_stream(d).record_event() for d in devices]

    def begin(self, thread: Background) -> None:
        """Gives it to a thread."""
        thread.submit(self._if_nobody_has)

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Raises what went wrong; then the parameters are where they were."""
        self._if_nobody_has()
        self._future.result()

    def _if_nobody_has(self) -> None:
        if self._claims:
            return
        mine = object()
        try:
            self._claims.append(mine)
            if self._claims[0] is mine:
                fulfil(self._future, self._fill)
        except BaseException as error:  # Ctrl-C, before or after `_fill`
            if self._claims[:1] == [mine] and not self._future.done():
                self._give_back()
                self._future.set_exception(error)
            raise

    @torch.no_grad()
    def _fill(self) -> None:
        on_gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
            try:
                self.settle()
                for event in self._behind:
                    event.synchronize()
                for value, source in zip(self.values, self._sources, strict=True):
                    value.copy_(source)
            except BaseException:
                self._give_back()
                raise
        on_host = any(source.device.type == "cpu" for source in self._sources)
        self._sources.clear()
        if on_host:
            touch.give_back()

    def _give_back(self) -> None:
        """It has failed: the parameters are where they were, unless all is copied."""
        with unguarded():
            for param, source in zip(self.params, self._sources, strict=False):
                param.data = source
        self._sources.clear()
