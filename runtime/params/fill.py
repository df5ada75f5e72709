"""Copies parameters to their buckets in the background, while the model is captured.

    before: touch, page-lock, copy; touch, page-lock, copy; ... then capture
    after:  capture, and next to it, bucket by bucket: touch, page-lock, copy

A bucket maps its memory at once, without physical pages, and the parameters are views of it. Until
the values are copied, a user of a parameter waits for its bucket, as for an update (`pending`); a
capture reads no values. The plan waits for all buckets (`Machine.await_parameters`), because it
counts free memory.

[Note: whose turn] The thread does the copy, or a waiter that finds it not started: so no bucket is
forgotten, wherever Ctrl-C arrives.
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
    """The copy of a bucket's parameters into its memory.

    Args:
        params: the user's parameters.
        values: their views in the bucket.
        settle: allocates the memory's pages and locks them for `device`.
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
        self._claims: list[object] = []  # the first to take it does the copy
        self._sources = [param.detach() for param in params]  # dropped when everything is copied
        devices = {s.device for s in self._sources if s.device.type == "cuda"}
        # work that still computes them
        self._computed = [torch.cuda.current_stream(d).record_event() for d in devices]

    def begin(self, thread: Background) -> None:
        """Enqueue it for the thread."""
        thread.submit(self._if_nobody_has)

    def wait(self) -> None:
        """Raise the error of a failed copy; the parameters are then in their old memory."""
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
        """Undo a failed copy: the parameters return to their old memory, unless everything was
        copied."""
        with unguarded():
            for param, source in zip(self.params, self._sources, strict=False):
                param.data = source
        self._sources.clear()
