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
from dataclasses import dataclass

import torch

from megacompile.runtime.device.background import Background, fulfil
from megacompile.runtime.device.buffers import trim_heap
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


class Fill(InFlight):
    """The way of a bucket's parameters to its memory.

    Args:
        params: as the user has them.
        values: their places in the bucket.
        settle: gives the memory its pages, and locks them for `device`.
        device: that computes.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        values: Sequence[torch.Tensor],
        settle: Callable[[], None],
        device: torch.device,
    ) -> None:
        self._future: Future[None] = Future()
        super().__init__(future=self._future)
        self.params = params
        self.values = values
        self.settle = settle
        self.device = device
        self._claims: list[object] = []  # the first one's turn it is
        self._sources = [param.detach() for param in params]  # given up when all is copied
        devices = {s.device for s in self._sources if s.device.type == "cuda"}
        # what is still computing them
        self._computed = [torch.cuda.current_stream(d).record_event() for d in devices]

    def begin(self, thread: Background) -> None:
        """Gives it to a thread."""
        thread.submit(self._if_nobody_has)

    def wait(self) -> None:
        """Raises what went wrong; then the parameters are where they were."""
        self._if_nobody_has()
        super().wait()

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
        """It has failed: the parameters are where they were, unless all is copied."""
        with unguarded():
            for param, source in zip(self.params, self._sources, strict=False):
                param.data = source
        self._sources.clear()
