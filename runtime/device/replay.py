"""Code that is captured once and replayed: CUDA graphs (docs/decisions/0057-cuda-graphs.md).

The first few calls run the code eagerly, which tunes its kernels and shows which inputs stay at one
address. The next call is captured.

[Note: memory of a graph] A replay reads and writes the addresses of its capture.

    inputs    that stay in place (parameters, results of another graph) are read there; all others
              are copied into the graph's memory first
    results   stay in the graph's memory until the next replay. If the caller still holds one of
              them, the next call runs eagerly, in other memory. Results that leave the schedule
              are copied
    scratch   is shared by graphs, so one graph may overwrite the results of another. Results that a
              forward leaves for its backward are therefore in memory of their own

Integers among the inputs are dynamic sizes; a call with others than the capture's runs eagerly.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from megacompile import compat, log

Code = Callable[[list[Any]], Sequence[torch.Tensor | None]]
# Calls with unchanged inputs before a capture. A backward's are unchanged once its forward is
# captured.
_WARM_UP = 3
_MOST = 4  # captures of one piece of code; if its inputs keep moving, more would not pay off
_PATIENCE = 64  # consecutive calls without a replay after which a graph is freed
# Graphs whose capture failed, kept alive: the allocator of page-locked memory believes that their
# pools are still recording and queries them (torch 2.11 to 2.15; Python cannot end the recording).
_FAILED: list[torch.cuda.CUDAGraph] = []


class CudaGraphs:
    """The CUDA graphs of one model on a device. Only one runs at a time. Graphs whose results are
    read at once share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._sharing: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()  # graphs in the pool
        self._last: torch.cuda.Stream | None = None  # the stream of the last launch

    def capture(
        self, code: Code, inputs: list[torch.Tensor], *, leaves: bool
    ) -> tuple[Callable[[], None], list[torch.Tensor | None]]:
        """Capture the kernels that `code` launches for these inputs. Returns a function that
        replays them, and the results, which are undefined until it is called. With `leaves`, they
        are still read after other graphs have been launched. Raises RuntimeError: the code does
        something that cannot be captured, such as waiting for the device."""
        if self._side is None:  # the default stream cannot be captured
            self._side = torch.cuda.Stream(self._device)
        pool = self._pool
        if leaves or not self._sharing:  # a pool whose graphs were freed may be freed too
            pool = torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        self._side.wait_stream(current)
        collects = gc.isenabled()
        with torch.cuda.stream(self._side):
            try:
                gc.disable()  # finalizers may make CUDA calls that invalidate the capture
                # "thread_local", because other threads keep issuing copies
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                results = list(code(inputs))
                graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # reports the failed capture once more
                    graph.capture_end()
                compat.end_allocation(self._device, pool)
                compat.end_random_capture()
                _FAILED.append(graph)
                if pool is self._pool:
                    self._sharing = weakref.WeakSet()  # the next capture has another pool
                raise
            finally:
                if collects:
                    gc.enable()
        current.wait_stream(self._side)

        def replay() -> None:
            graph.replay()

        if not leaves:
            self._sharing.add(replay)
            self._pool = pool
        return replay, results

    def follow(self) -> None:
        """Order the caller's next launches after those of earlier graphs, on any stream."""
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream


class Replay:
    """Runs one piece of code, from a CUDA graph where possible; see [Note: memory of a graph]."""

    def __init__(
        self,
        graphs: CudaGraphs,
        replays: weakref.WeakSet[Replay],  # all of the model; this one is added
        most: int,  # the number of replays that may have a graph at the same time
        *,
        in_place: Collection[int],  # positions of the inputs that stay at one address
        given_away: Collection[int],  # positions of the results that leave the schedule
        leaves: bool,  # results are still read after other code has run
    ) -> None:
        self._graphs, self._replays, self._most = graphs, replays, most
        replays.add(self)
        self._in_place = frozenset(in_place)
        self._given_away = frozenset(given_away)
        self._leaves = leaves
        self._left = 0  # captures that are still allowed
        self._code: Code | None = None
        self._forget()

    def forget(self) -> None:
        """Free the graph and its memory. The code may be captured again later."""
        if self._replay is not None:
            self._left += 1
            self._forget()

    def _forget(self) -> None:
        self._calls = 0  # consecutive calls with the same addresses and sizes
        self._others = 0  # consecutive calls that were not replayed
        self._places: list[int] = []  # addresses of inputs in the last call, or in the capture
        self._sizes: list[Any] = []  # dynamic sizes, likewise
        self._replay: Callable[[], None] | None = None
        self._copied: list[int] = []  # positions of inputs copied to the graph's memory
        self._copies: list[torch.Tensor] = []
        self._results: list[torch.Tensor | None] = []
        self._storages: list[torch.UntypedStorage] = []  # of results and copies
        self._uses: list[int] = []  # their reference counts while no caller holds a result

    def __call__(self, code: Code, inputs: list[Any]) -> Sequence[torch.Tensor | None]:
        """The results of `code` for these inputs: tensors and integer sizes."""
        if code is not self._code:  # the previous code may have been uncompiled
            self._forget()
            self._code, self._left = code, _MOST
        if not self._left:
            return code(inputs)
        places = [inputs[i].data_ptr() for i in self._in_place]
        sizes = [x for x in inputs if not isinstance(x, torch.Tensor)]
        if self._replay is None:
            same = places == self._places and sizes == self._sizes
            self._calls = self._calls + 1 if same else 1
            self._places, self._sizes = places, sizes
            return self._captured(inputs) if self._calls > _WARM_UP else code(inputs)
        if (
            places != self._places
            or sizes != self._sizes
            or compat.storage_uses(self._storages) != self._uses
        ):
            self._others += 1
            if self._others == _PATIENCE:
                self._forget()
            return code(inputs)
        self._others = 0
        self._graphs.follow()  # earlier graphs may still read the copies
        if self._copied:
            compat.FOREACH_COPY(self._copies, [inputs[i] for i in self._copied])
        self._replay()
        return self._handed()

    def _handed(self) -> list[torch.Tensor | None]:
        away = self._given_away
        return [
            r if r is None else _copy(r) if k in away else r.detach()
            for k, r in enumerate(self._results)
        ]

    def _captured(self, inputs: list[Any]) -> Sequence[torch.Tensor | None]:
        """Capture and replay; if the code cannot be captured, run it eagerly from now on."""
        assert self._code is not None
        self._left -= 1
        try:
            replay = self._capture(self._code, inputs)
        except Exception as error:  # an error of the code itself is raised again below
            log.logger("compile").info("a stage is not captured as a CUDA graph: %s", error)
            self._forget()
            self._left = 0
            return self._code(inputs)
        self._graphs.follow()
        replay()
        return self._handed()

    def _capture(self, code: Code, inputs: list[Any]) -> Callable[[], None]:
        """Capture the code, with copies of the inputs that do not stay in place. Raises
        RuntimeError: the code cannot be captured, or memory is short; ValueError: its inputs or
        results are not on one device, an input is expanded, results that leave the schedule share
        memory, or the limit of graphs is reached."""
        tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
        if captured(self._replays) >= self._most:
            raise ValueError(f"the device holds no more than {self._most} graphs")
        devices = {x.device for x in tensors.values()}
        if len(devices) != 1:
            raise ValueError("its inputs are not all on one device")
        copied = {i: x for i, x in tensors.items() if i not in self._in_place}
        if any(map(_is_expanded, copied.values())):
            raise ValueError("an input is expanded, so nothing can be copied into it")
        copies = {i: _copy(x) for i, x in copied.items()}
        given = [copies.get(i, x) for i, x in enumerate(inputs)]
        replay, results = self._graphs.capture(code, given, leaves=self._leaves)
        if any(r is not None and r.device not in devices for r in results):
            raise ValueError("its results are not all on the device")
        theirs = {_memory(x) for x in tensors.values()}
        leaving = (results[k] for k in self._given_away)
        away = [_memory(r) for r in leaving if r is not None]
        if len({*away}) < len(away) or not theirs.isdisjoint(away):
            raise ValueError("its outputs share memory")
        made = [x for x in (*copies.values(), *results) if x is not None]
        own = {_memory(x): x for x in made if _memory(x) not in theirs}
        self._results = results
        self._copied, self._copies = list(copies), list(copies.values())
        self._storages = [x.untyped_storage() for x in own.values()]
        self._uses = compat.storage_uses(self._storages)
        self._replay = replay  # last: Ctrl-C may come anywhere
        return replay


def captured(replays: Collection[Replay]) -> int:
    """The number of replays that hold a captured graph."""
    return sum(each._replay is not None for each in replays)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, because compiled code checks them. `clone` changes the strides
    of a tensor with gaps or overlapping elements."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
