"""What the ops of `megacompile.ir.ops` do, bound to the machine that they do it on.

Each is a method of the op's name, and issues its work on the op's stream, behind what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megacompile import compat
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, Code, ParamRef, SavedRef, Stage
from megacompile.ir.stream import Stream
from megacompile.ir.tensors import TensorMeta
from megacompile.runtime.device.random import random_state, set_random_state
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops import anomaly
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.updates.device_buffers import Landing, UpdateBuffers
from megacompile.runtime.updates.flight import Flight
from megacompile.runtime.updates.in_backward import Deferred, InBackward
from megacompile.runtime.updates.update import flat
from megacompile.tracing.recorder import Recording

Group = dict[int, torch.Tensor]  # parameter's index in its bucket -> gradient


def _handles(values: Any) -> Iterator[Handle]:
    for value in values:
        if isinstance(value, Handle):
            yield value
        elif isinstance(value, tuple):
            yield from _handles(value)


class BoundOps:
    """The ops of one graph of a schedule, on a machine."""

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self.machine = machine
        self.gradient_params = schedule.gradient_params
        self.recording: Recording | None = None  # of the run that is on

    def _issue(
        self, stream: Stream, waits: Any, work: Callable[[], Any], host: HostBucket | None = None
    ) -> Handle:
        if self.recording is not None:
            work = self.recording.timed(work)
        return self.machine.streams.issue(stream, _handles(waits), work, host)

    def _issue_many(self, waits: Any, work: Callable[[], Sequence[Any]]) -> tuple[Handle, ...]:
        whole = self._issue(Stream.COMPUTE, waits, work)
        return tuple(Handle(value, Stream.COMPUTE, whole.event) for value in whole.value)

    def begin(self) -> Handle:
        return self._issue(Stream.COMPUTE, (), lambda: None)

    def wait(self, *handles: Handle) -> None:
        self._issue(Stream.COMPUTE, handles, lambda: None)

    def prefetch(self, bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Handle:
        machine = self.machine
        host = machine.buckets[bucket.key]
        landing = _landing(host)

        def copy() -> Any:
            machine.slots.flat(slot, bucket).copy_(host.flat, non_blocking=True)
            return machine.slots.weights(slot, bucket)

        fresh = host.in_flight.fresh if isinstance(host.in_flight, (Flight, Landing)) else {}
        if len(fresh) == len(host.values):  # they are still on the device

            def move() -> Any:
                weights = machine.slots.weights(slot, bucket)
                for i, new in fresh.items():
                    flat(weights[i]).copy_(new, non_blocking=True)
                return weights

            moved = self._issue(Stream.H2D, (after,), move)
            machine.alive.append((fresh, moved))
            return moved
        if landing is not None:  # the device waits for the copies there, not the host
            there = Handle(None, Stream.D2H, landing.params)
            return self._issue(Stream.H2D, (after, (there,)), copy)
        return self._issue(Stream.H2D, (after,), copy, host)

    def reuse(self, bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Handle:
        slots = self.machine.slots
        return self._issue(Stream.COMPUTE, (after,), lambda: slots.weights(slot, bucket))

    def resident(self, bucket: Bucket) -> Handle:
        host = self.machine.buckets[bucket.key]
        return self._issue(Stream.COMPUTE, (), lambda: host.streamed)

    def save_rng(self, stage: Stage) -> Handle:
        del stage
        return self._issue(Stream.COMPUTE, (), lambda: random_state(self.machine.device))

    def snapshot(self, tensor: Handle) -> Handle:
        return self._issue(Stream.COMPUTE, (tensor,), lambda: tensor.value.clone())

    def assign(self, tensor: Handle, value: Handle, *, after: tuple[Any, ...] = ()) -> Handle:
        waits = (tensor, value, after)
        return self._issue(Stream.COMPUTE, waits, lambda: tensor.value.copy_(value.value))

    def forward(self, stage: Stage, weights: Any, args: Any, saving: bool) -> tuple[Handle, ...]:
        code = stage.traced.code[Code.FORWARD_SAVING if saving else Code.FORWARD]
        count = len(stage.outputs) + len(stage.mutated)

        def run() -> Sequence[Any]:
            results = code(_primals(stage, weights, args))
            return results if saving else results[:count]

        return self._issue_many((weights, args), run)

    def recompute(self, stage: Stage, weights: Any, args: Any, rng: Any) -> tuple[Handle, ...]:
        template = stage.traced
        code = template.code[Code.RECOMPUTE]
        skip = len(stage.outputs) + len(stage.mutated) if template.random else 0

        def run() -> Sequence[Any]:
            primals = _primals(stage, weights, args)
            primals = [primals[i] for i in template.recompute_primals]
            if rng is None:
                return code(primals)
            now = random_state(self.machine.device)
            set_random_state(self.machine.device, rng.value)
            try:
                return code(primals)[skip:]
            finally:
                set_random_state(self.machine.device, now)

        return self._issue_many((weights, args), run)

    def backward(
        self,
        stage: Stage,
        weights: Any,
        args: Any,
        saved: Any,
        tangents: Any,
        partial_gradients: Any,
    ) -> tuple[Handle, ...]:
        template = stage.traced
        arg_partial_gradients = [
            i for i in template.partial_gradients if isinstance(stage.primals[i], ArgRef)
        ]

        def run() -> Sequence[Any]:
            groups: dict[int, Group] = dict(
                handle.value for handle in partial_gradients[len(arg_partial_gradients) :]
            )
            primals = _primals(stage, weights, args)
            inputs = [
                saved[item.index].value if isinstance(item, SavedRef) else primals[item]
                for item in template.backward_inputs
            ]
            flows = [tangent.value for tangent in tangents]
            flowing = iter(partial_gradients[: len(arg_partial_gradients)])
            for i in template.partial_gradients:
                ref = stage.primals[i]
                if isinstance(ref, ArgRef):
                    flows.append(next(flowing).value)
                else:
                    flows.append(groups[stage.buckets[ref.bucket].key][ref.param])
            inputs += map(_conform, flows, template.tangent_metas)
            looks = anomaly.wanted(self.machine.detect_anomaly)
            given = list(inputs) if looks else ()
            found = template.code[Code.BACKWARD](inputs)
            if looks:
                anomaly.check(stage, given, found, inf=self.machine.detect_anomaly)
            return self._sort(stage, found, groups)

        return self._issue_many((weights, args, saved, tangents, partial_gradients), run)

    @staticmethod
    def _sort(stage: Stage, found: Sequence[Any], groups: dict[int, Group]) -> list[Any]:
        """Gradients of args, then one group a bucket: (key, {parameter: gradient})."""
        of_args: list[Any] = []
        for primal, gradient in zip(stage.traced.gradients, found, strict=True):
            ref = stage.primals[primal]
            if isinstance(ref, ArgRef):
                of_args.append(gradient)
            else:
                groups.setdefault(stage.buckets[ref.bucket].key, {})
        merged = {bucket.key: dict(groups[bucket.key]) for bucket in stage.gradient_buckets}
        for primal, gradient in zip(stage.traced.gradients, found, strict=True):
            ref = stage.primals[primal]
            if isinstance(ref, ParamRef):
                merged[stage.buckets[ref.bucket].key][ref.param] = gradient
        return [*of_args, *merged.items()]

    # What waits on the host between a forward and its backward.

    def offload_saved(self, stage: Stage, value: Handle) -> Handle:
        del stage
        pool, queue = self.machine.activations, self.machine.streams.copies(Stream.D2H)
        return self._issue(Stream.D2H, (value,), lambda: pool.store(value.value, queue))

    def alloc_saved(self, stage: Stage, on_host: Handle) -> Handle:
        del stage
        return self._issue(Stream.COMPUTE, (), lambda: on_host.value.empty())

    def fetch_saved(self, stage: Stage, on_host: Handle, buffer: Handle) -> Handle:
        del stage
        copy, queue = on_host.value, self.machine.streams.copies(Stream.H2D)
        offloaded = Handle(None, Stream.D2H, copy.ready)  # in the forward, which is another graph
        return self._issue(
            Stream.H2D, (buffer, offloaded), lambda: copy.copy_to(buffer.value, queue)
        )

    def alloc_grad(self, bucket: Bucket) -> Handle:
        device = self.machine.device

        def allocate() -> tuple[int, Group]:
            host = self.machine.buckets[bucket.key]
            buffer = {
                i: torch.empty_like(host.values[i], dtype=host.grad_dtype, device=device)
                for i in self.gradient_params[bucket.key]
            }
            return bucket.key, buffer

        return self._issue(Stream.COMPUTE, (), allocate)

    def fetch_grad(self, bucket: Bucket, buffer: Handle) -> Handle:
        run = self.machine.gradients.running()

        def copy() -> tuple[int, Group]:
            key, group = buffer.value
            for i, tensor in group.items():
                source = run.so_far(key, i)
                if source is None:
                    tensor.zero_()
                else:
                    tensor.copy_(source, non_blocking=True)
            return key, group

        return self._issue(Stream.H2D, (buffer,), copy)

    def add_grad(self, bucket: Bucket, so_far: Handle, gradients: Handle) -> Handle:
        def add() -> tuple[int, Group]:
            key, total = so_far.value
            _, new = gradients.value
            for i, gradient in new.items():
                total[i].add_(gradient)
            return key, total

        return self._issue(Stream.COMPUTE, (so_far, gradients), add)

    def norm_grad(self, bucket: Bucket, gradients: Handle) -> Handle:
        def norms() -> torch.Tensor:
            _, group = gradients.value
            tensors = [group[i] for i in self.gradient_params[bucket.key]]
            orders = (compat.FOREACH_NORM(tensors, k, torch.float32) for k in (2, torch.inf))
            return torch.stack([torch.stack(found) for found in orders])

        return self._issue(Stream.COMPUTE, (gradients,), norms)

    def offload_grad(
        self, bucket: Bucket, gradients: Handle, norms: Handle | None = None
    ) -> Handle:
        run, queue = self.machine.gradients.running(), self.machine.streams.copies(Stream.D2H)

        def copy() -> None:
            key, group = gradients.value
            again = run.drops_any(key, group)
            if norms is not None and not again:  # first: clip_grad_norm_ waits for them alone
                buffer = run.norms_buffer(key, self.gradient_params[key])
                buffer.copy_(norms.value, non_blocking=True)
                run.norms_copied(key, queue)
            for i, gradient in group.items():
                if not run.drops(key, i):
                    run.buffer(key, i).copy_(gradient, non_blocking=True)

        waits = (gradients,) if norms is None else (gradients, norms)
        handle = self._issue(Stream.D2H, waits, copy)
        if not run.drops_all(bucket.key, self.gradient_params[bucket.key]):
            run.copied(bucket.key, handle.event)
        return handle

    # The optimizer's ops.

    @property
    def _updates(self) -> InBackward:
        updates = self.machine.in_backward
        assert updates is not None, "a schedule with updates, and no optimizer"
        return updates

    def alloc_state(self, bucket: Bucket, masters: bool) -> Handle:
        machine, trained = self.machine, self.gradient_params[bucket.key]
        host = machine.buckets[bucket.key]

        def allocate() -> UpdateBuffers:
            if machine.in_backward is None:
                return machine.device_update.alloc(host, trained, masters=masters)
            return machine.in_backward.alloc(host, machine.device, masters=masters)

        return self._issue(Stream.COMPUTE, (), allocate)

    def fetch_state(self, bucket: Bucket, buffer: Handle, masters: bool) -> Handle:
        host = self.machine.buckets[bucket.key]
        landing = _landing(host)
        waits = (buffer,) if landing is None else (buffer, Handle(None, Stream.D2H, landing.states))
        source = self.machine.in_backward or self.machine.device_update
        return self._issue(
            Stream.H2D, waits, lambda: source.fetch(host, buffer.value, masters=masters)
        )

    def device_update(self, bucket: Bucket, gradients: Handle, state: Handle) -> Handle:
        machine = self.machine
        host, trained = machine.buckets[bucket.key], self.gradient_params[bucket.key]
        run = machine.gradients.running()

        def keep() -> None:
            if all(run.is_final(bucket.key, i) for i in trained):
                machine.device_update.keep(host, gradients.value[1], state.value)

        return self._issue(Stream.COMPUTE, (gradients, state), keep)

    def update(
        self, bucket: Bucket, weights: Handle | None, gradients: Handle, state: Handle
    ) -> Handle:
        host = self.machine.buckets[bucket.key]

        def step() -> Any:
            _, group = gradients.value
            given = None if weights is None else weights.value
            return self._updates.update(host, given, group, state.value)

        waits = (gradients, state) if weights is None else (weights, gradients, state)
        return self._issue(Stream.COMPUTE, waits, step)

    def offload_state(self, bucket: Bucket, updated: Handle) -> Handle:
        host = self.machine.buckets[bucket.key]
        cuda = self.machine.device.type == "cuda"

        def copy() -> Landing | None:
            queue = torch.cuda.current_stream(self.machine.device) if cuda else None
            return self._updates.offload(host, updated.value, queue)

        return self._issue(Stream.D2H, (updated,), copy)

    def defer_free(self, value: Handle, *, after: tuple[Handle, ...] = ()) -> None:
        for handle in after:
            if handle.event is not None:  # there is none on the CPU
                owner = torch.cuda.current_stream(self.machine.device)
                if (landing := handle.value) is not None:
                    landing.stays(value.value)
                deferred = Deferred(value.value, handle.event, owner, landing)
                self._updates.defer_free([deferred])

    def drain(self) -> Handle:
        machine = self.machine
        deferred = [] if machine.in_backward is None else machine.in_backward.take_deferred()
        machine.device_update.land()
        copies = tuple(Handle(None, Stream.D2H, entry.copied) for entry in deferred)
        taken = tuple(handle for _, handle in machine.alive)  # prefetches out of it

        def drop() -> None:
            for entry in deferred:  # its owner uses it next: the user may have changed streams
                entry.owner.wait_event(entry.copied)
                if entry.landing is not None:
                    entry.landing.fresh.clear()
            deferred.clear()
            machine.alive.clear()

        return self._issue(Stream.COMPUTE, (*copies, *taken), drop)

    def free(self, value: Handle, *, after: tuple[Any, ...] = ()) -> None:
        raise AssertionError("free is printed as del")


def _landing(host: HostBucket) -> Landing | None:
    """New parameters and states that are on their way from the device to a bucket."""
    return host.in_flight if isinstance(host.in_flight, Landing) else None


def _conform(gradient: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A gradient as the backward was traced for it; those of the user may have other strides."""
    if gradient.stride() == meta.stride and gradient.dtype == meta.dtype:
        return gradient
    return meta.empty().copy_(gradient)


def _primals(stage: Stage, weights: Any, args: Any) -> list[Any]:
    """The stage's inputs in order; None for those that the op was not given."""
    found: list[Any] = []
    for ref in stage.primals:
        if isinstance(ref, ParamRef):
            handle = weights[ref.bucket]
            value = None if handle is None else handle.value[ref.param]
        else:
            handle = args[ref.index]
            value = None if handle is None else handle.value
        found.append(value)
    return found
