"""The machine that a model's schedules share (device, streams, slots, buckets, updaters), and the
base class of ops, which issue their work on a stream after its waits."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, cast

import torch

from megacompile import compat, progress
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.ir.stream import Stream
from megacompile.log import CodeCounts
from megacompile.options import Lowering, Options
from megacompile.runtime.device.background import Background, WeakIdSet, nothing
from megacompile.runtime.device.buffers import HostBudget
from megacompile.runtime.device.pool import BufferPool, SavedDisk
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.device.replay import CudaGraphs, Replay
from megacompile.runtime.device.streams import DeviceSlots, Handle, Streams
from megacompile.runtime.disk import Disk, Request
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.parameter_gradients import Gradients
from megacompile.runtime.params.pending import Fill, InFlight
from megacompile.runtime.params.proxies import StreamedParameter
from megacompile.runtime.updates.in_backward import InBackward
from megacompile.runtime.updates.on_device import DeviceUpdates
from megacompile.runtime.updates.staging import Staging
from megacompile.runtime.updates.update import BucketUpdate
from megacompile.runtime.updates.workers import Workers
from megacompile.views.metrics import Meter
from megacompile.views.recorder import Recording, Tracer


class Deferred(NamedTuple):
    """Device memory that a copy to the host may still read."""

    value: Any
    copied: torch.cuda.Event
    owner: torch.cuda.Stream  # the memory's stream in the caching allocator
    forget: Callable[[], None]  # called when it is freed


class Machine:
    """The state that all schedules of one model share. Without buckets at first; all ranks that
    share the model create it together."""

    def __init__(self, options: Options) -> None:
        self.device = device = options.device
        on_gpu = device.type == "cuda"
        self.ranks = Ranks.that_share(options.mesh, device)  # the processes that share the model
        self.seed: Callable[[], int] = torch.initial_seed  # of stochastic rounding
        if self.ranks is not None:
            first: int = self.ranks.all_gather_object(torch.initial_seed())[0]
            self.seed = functools.partial(int, first)  # replicas of the same rows round alike
        # memory and threads
        self.host_budget = HostBudget(options.host_memory)  # allocates all host buffers
        self.disk = None  # the disk with the states of streamed buckets, if any
        self.staging = None  # staging memory of data on a disk
        self.activations = BufferPool(device, self.host_budget)  # offloaded saved tensors
        self.saved_disk = None  # the disk for these tensors
        if options.disk is not None:
            self.disk = Disk(options.disk, limit_bytes=options.disk_memory)
            self.saved_disk = SavedDisk(self.disk, self.activations)
            self.staging = Staging(self.disk, device, self.host_budget)
        self.host_updates = Workers(device)
        self.copies = Background("megacompile-offload")  # results of device updates to the host
        # the device
        self.streams, self.slots = Streams(device), DeviceSlots(device)
        self.graphs = CudaGraphs(device) if on_gpu else None  # captures code, if the device can
        self.replays: weakref.WeakSet[Replay] = weakref.WeakSet()
        self.alive: list[tuple[Any, Handle]] = []  # values, and the copies that read them
        self.deferred: list[Deferred] = []  # until a drain, or their copies' end
        # parameters, gradients and updates
        self.buckets: dict[int, HostBucket] = {}  # by key
        exact = options.lowering is Lowering.EAGER
        self.gradients = Gradients(self.streams, exact=exact, ranks=self.ranks)
        self.device_update = DeviceUpdates(self.streams)  # for optimizer.step() on the device
        self.in_backward: InBackward | None = None  # for updates in the backward
        # calls and steps
        self.running = threading.RLock()  # one schedule at a time
        self.pending: WeakIdSet[Any] = WeakIdSet()  # pending backwards
        self.links: WeakIdSet[Any] = WeakIdSet()  # in autograd graphs of eager code
        self.run: Any = None  # the `GradientRun` of the current backward
        self.accumulating = False  # inside `megacompile.accumulate()`
        self.order: list[int] = []  # bucket keys, as the last forward read them
        # the executors whose backwards ran since the last step, newest first; after a step, those
        # that it used, until the next backward
        self.trained: list[weakref.ref[Any]] = []
        self.stepped = False  # True from a step to the next backward
        self.steps = 0  # number of optimizer steps started on its parameters
        self.assigned = 0  # number of in-place updates of inputs by schedules so far
        # what the user sees
        self.tracer: Tracer | None = None  # while a trace of the model is on
        self.meter: Meter | None = None  # from the first `metrics()` of the model
        self.detect_anomaly = options.detect_anomaly  # True: NaN or inf in a gradient is an error
        self.code = CodeCounts()  # of the schedules' stages
        self.progress = options.progress

    @property
    def more_backwards(self) -> bool:
        """True if the training loop has announced another backward before the step.
        `Accelerator.accumulate()` sets Accelerate's `GradientState`, one per process, and so do the
        loops of Trainer and its subclasses. If it is wrongly True, `optimizer.step()` updates from
        gradients on the host, which costs time and memory; with replicas, whose sum was deferred to
        the missing backward, it raises. It must never be wrongly False."""
        state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
        return self.accumulating or (state is not None and not state().sync_gradients)

    def place(self, proxy: StreamedParameter) -> tuple[Bucket, int]:
        """The bucket of the parameter that a proxy stands for, and its index there."""
        key, index = self.gradients.places[id(proxy.param)]
        return self.buckets[key].whole, index

    def await_parameters(self) -> None:
        """Wait until all parameters are in their buckets; their old memory is free then."""
        coming = [b for b in self.buckets.values() if isinstance(b.pending.in_flight, Fill)]
        for bucket in coming:
            progress.now("moving parameters to the host")
            bucket.pending.wait()
        if coming and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def may_move(self, keys: Collection[int]) -> bool:
        """True if buckets may move: no backward is pending, neither of a captured graph nor of
        eager code that used their parameters and would write gradients to the old device."""
        if self.pending:
            return False
        moving = {id(param) for key in keys for param in self.buckets[key].params}
        return not any(id(link.param) in moving for link in self.links)

    def note_backward(self, executor: Any) -> None:
        """Record that an executor's backward has run: its update is part of the next step."""
        others = [] if self.stepped else [r for r in self.trained if r() not in (None, executor)]
        self.stepped, self.trained = False, [weakref.ref(executor), *others]

    def give_up(self, error: BaseException) -> None:
        """End the updates and the leases of a run that has failed."""
        if self.in_backward is not None:
            self.in_backward.failed(error)
        if self.staging is not None:
            self.staging.give_up()

    def forget_graphs(self) -> None:
        """Free the memory of all captured graphs; code that runs often is captured again."""
        for replay in list(self.replays):
            replay.forget()

    def give_back(self) -> None:
        """Free all device memory outside of buckets: slots, and the sources of finished copies. The
        next call allocates what it needs. Host memory stays, because page-locking is slow."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.device_update.wait_for_copies()
        while self.deferred:
            self.deferred.pop().forget()
        self.alive.clear()
        self.forget_graphs()
        self.slots.forget()

    def defer_free(
        self, value: Any, copied: torch.cuda.Event, forget: Callable[[], None] = lambda: None
    ) -> None:
        """Keep memory of the current stream until a copy from it is done; then `forget` is called.
        If no forward drains it, a later `defer_free` frees it."""
        taken, self.deferred = self.deferred, []
        for entry in taken:
            if entry.copied.query():
                entry.forget()
            else:
                self.deferred.append(entry)
        owner = torch.cuda.current_stream(self.device)
        self.deferred.append(Deferred(value, copied, owner, forget))

    def exchanged(self) -> bool:
        """True if a parameter's data is now another parameter's old memory, as after `p.data,
        q.data = ...`. Adopting one would overwrite the other."""
        buckets = self.buckets.values()
        replaced = [compat.local(b.params[i]) for b in buckets for i in b.replaced()]
        homes = self.homes() if replaced else ()
        return any(param.untyped_storage().data_ptr() in homes for param in replaced)

    def homes(self) -> set[int]:
        """The addresses of all parameters in the buckets: each has storage of its own."""
        return {home for b in self.buckets.values() for home in b.homes if home}  # 0: no elements


Group = dict[int, torch.Tensor]  # parameter's index in its bucket -> gradient


class OpGroup:
    """A group of ops of one graph of a schedule, bound to a machine."""

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self.machine = machine
        self.gradient_params = schedule.gradient_params
        self.captures = schedule.plan.cuda_graphs
        self.replays: dict[Code, Replay] = {}
        self.recording: Recording | None = None  # of the current run
        self.in_step = False  # True for the graph of `optimizer.step()`
        self.parts: Mapping[int, BucketUpdate] = {}  # of the current step, by bucket key
        self.resident_parts = 0  # number of `parts` on resident buckets
        # tensors, their new values, and whether to bump the version counter
        self.to_write: list[tuple[Handle, Handle, bool]] = []
        self.residents: list[tuple[BucketUpdate, Any]] = []  # updates so far, and their `after`
        # of a machine without them, no schedule has ops that use them
        self._ranks = cast(Ranks, machine.ranks)
        self._staging = cast(Staging, machine.staging)
        self._in_backward = cast(InBackward, machine.in_backward)

    def _issue(self, stream: Stream, waits: Any, work: Callable[[], Any]) -> Handle:
        if self.recording is not None:
            work = self.recording.timed(work)
        if self.to_write:
            self.write_assigned()
        return self.machine.streams.issue(stream, handles(waits), work)

    def _note(self, request: Request) -> None:
        """Record the times of a read or a write in a trace."""
        if self.recording is not None:
            note, lane = self.recording.noted_later(), request.way.value
            request.when_done(lambda: note(lane, request.began_s, request.ended_s))

    def _issue_many(self, waits: Any, work: Callable[[], Sequence[Any]]) -> tuple[Handle, ...]:
        whole = self._issue(Stream.COMPUTE, waits, work)
        return tuple(map(Handle, whole.value, repeat(Stream.COMPUTE), repeat(whole.event)))

    def write_assigned(self) -> None:
        """Write the collected new values in a few launches."""
        assigned, self.to_write = self.to_write, []
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for tensor, new, counted in assigned:
            target = tensor.value
            targets, values = by_dtype.setdefault(target.dtype, ([], []))
            targets.append(target if counted else target.data)
            values.append(new.value)
        for targets, values in by_dtype.values():
            compat.FOREACH_COPY(targets, values)

    def wait(self, *handles: Handle) -> None:
        self._issue(Stream.COMPUTE, handles, nothing)

    def defer_free(self, value: Handle, *, after: tuple[Handle, ...] = ()) -> None:
        for handle in after:
            if handle.event is None:  # the CPU, or a thread that holds its tensors
                continue
            work, buffers = handle.value, value.value
            if isinstance(work, InFlight) and isinstance(buffers, dict):  # else gradients or norms
                if work.may_lend:
                    work.fresh.update({i: buffer.streamed for i, buffer in buffers.items()})
                self.machine.defer_free(buffers, handle.event, work.fresh.clear)
            else:
                self.machine.defer_free(buffers, handle.event)

    def drain(self) -> Handle:
        machine = self.machine
        deferred, machine.deferred = machine.deferred, []
        machine.device_update.wait_for_copies()
        copies = tuple(Handle(None, Stream.D2H, entry.copied) for entry in deferred)
        taken = tuple(handle for _, handle in machine.alive)  # prefetches of new weights

        def drop() -> None:
            for entry in deferred:  # `owner` reuses the memory; it may not be the current stream
                entry.owner.wait_event(entry.copied)
                entry.forget()
            deferred.clear()
            machine.alive.clear()

        return self._issue(Stream.COMPUTE, (*copies, *taken), drop)

    def free(self, value: Handle, *, after: tuple[Any, ...] = ()) -> None:
        raise AssertionError("free is printed as del")


def handles(values: Any) -> list[Handle]:
    """The handles in nested tuples."""
    found: list[Handle] = []
    rest = list(values)
    for value in rest:  # it grows
        if isinstance(value, Handle):
            found.append(value)
        elif value and isinstance(value, tuple):
            rest += value
    return found
