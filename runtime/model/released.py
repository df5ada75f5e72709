"""Lends a model's device memory to other code: `megacompile.released()`.

Resident buckets move to the host, with gradients and states, and later back to the same placement.
So schedules stay valid: nothing is captured, planned or compiled again. Per-call memory (slots,
workspaces, activations) is freed, and the next call allocates it again.
"""

from __future__ import annotations

import functools
import gc

import torch

from megacompile import compat, notices
from megacompile.errors import DeviceMemoryError, HostMemoryError, ModelError
from megacompile.host_memory import free_bytes
from megacompile.ir.plan import Tier
from megacompile.runtime.model.model_buckets import ModelBuckets
from megacompile.runtime.model.program import first_line
from megacompile.runtime.params.guards import unguarded
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.optimizer_states import move_loaded, move_states, state_bytes
from megacompile.runtime.params.undo import undone
from megacompile.runtime.step import hooks
from megacompile.runtime.step.step import Updates
from megacompile.text import format_bytes


class Released:
    """Frees a model's device memory and takes it back."""

    def __init__(self, buckets: ModelBuckets, updates: Updates) -> None:
        self.buckets = buckets
        self.updates = updates
        self.depth = 0  # number of active `with` blocks
        self.away: set[int] = set()  # keys of resident buckets that are not on the device
        self._name = type(buckets.model).__name__

    def check(self) -> None:
        """Ensure, at a call or a step, that the memory is back. Raises a ModelError if it is
        released, and a DeviceMemoryError if there is not enough of it to take it back."""
        if self.depth:
            raise ModelError(
                f"{self._name}: used inside of `with megacompile.released(model):`, where it has "
                "no device memory; call it, and optimizer.step(), after the block (inside, "
                "megacompile.full_parameters(model) yields its parameters)"
            )
        if self.away:
            self._take()

    def give(self) -> None:
        """Free the memory. Raises a ModelError if a forward waits for its backward, and a
        HostMemoryError if the resident buckets do not fit on the host."""
        with self.buckets.alone:
            if not self.depth:
                self._check_pending()
                self._check_host()
                self.depth = 1
                try:
                    self._give()
                except BaseException:
                    self.depth = 0  # the next call takes it back
                    raise
            else:
                self.depth += 1

    def end(self, *, failed: bool) -> None:
        """Take the memory back at the end of a block. If an exception propagates (`failed`) and
        memory is short, the next call takes it back."""
        with self.buckets.alone:
            self.depth -= 1
            if self.depth:
                return
            try:
                self._take()
            except DeviceMemoryError:
                if not failed:
                    raise

    def _check_pending(self) -> None:
        pending = self.buckets.machine.pending
        if pending:
            gc.collect()  # frees an unreferenced loss
            _clear_queue()
        if pending:
            raise ModelError(
                f"released(): a forward of {self._name} waits for its backward, whose tensors are "
                "on the device; call backward() first, delete its outputs (del loss), or evaluate "
                "under torch.no_grad()"
            )

    def _residents(self) -> dict[int, HostBucket]:
        """The buckets on the device. Their memory lives as long as the result is held."""
        buckets = self.buckets.machine.buckets
        return {key: bucket for key, bucket in buckets.items() if bucket.resident is not None}

    def _check_host(self) -> None:
        residents = self._residents().values()
        gradients = (p.grad for bucket in residents for p in bucket.params)
        values = [value for bucket in residents for value in bucket.values]
        values += [compat.local(gradient) for gradient in gradients if gradient is not None]
        needed = sum(value.nbytes for value in values) + sum(map(state_bytes, residents))
        available = free_bytes()
        if needed > available:
            raise HostMemoryError(
                f"released(): {format_bytes(needed)} of {self._name} live on the device, and "
                f"{format_bytes(available)} of host memory is available for them; free host "
                "memory, or lower resident="
            )

    def _give(self) -> None:
        """Free all of the memory. No local variable may hold a bucket: its memory would still be
        there when the cache is emptied."""
        machine = self.buckets.machine
        self._settle()
        machine.give_back()
        self._note_away()
        self._move(sorted(self.away), resident=False)
        gc.collect()
        compat.release_device_cache(machine.device)

    def _settle(self) -> None:
        for bucket in self.buckets.machine.buckets.values():
            bucket.pending.settle()

    def _note_away(self) -> None:
        residents = self._residents()
        why = self.buckets.ddp.holds([p for bucket in residents.values() for p in bucket.params])
        if not why:
            self.away |= residents.keys()
        elif residents:
            size_bytes = sum(bucket.layout.size_bytes for bucket in residents.values())
            notices.warn_once(
                "buckets that stay",
                f"megacompile: released() leaves {format_bytes(size_bytes)} of {self._name} on the "
                f"device, with their gradients and states, because {why}, and a move would lose "
                "its hooks; megacompile(model, resident=0) keeps none there (shown once)",
                of=self,
            )

    def _take(self) -> None:
        """Move the buckets back. Raises DeviceMemoryError if memory is short; the rest may follow
        later."""
        ran_out = ""
        try:
            self._move(sorted(self.away), resident=True)
        except torch.OutOfMemoryError as error:
            ran_out = first_line(error)  # not the error: its frames hold memory
        if ran_out:
            missing = [self.buckets.machine.buckets[key] for key in self.away]
            size = sum(b.layout.size_bytes + state_bytes(b) for b in missing)
            raise DeviceMemoryError(
                f"released(): {format_bytes(size)} of {self._name} live on the device, and could "
                f"not return to the device ({ran_out}); free the other engine's memory before the "
                "block ends; the next call of the model tries again"
            )

    @torch.inference_mode(False)
    def _move(self, keys: list[int], *, resident: bool) -> None:
        buckets = self.buckets
        if not keys:
            return
        away = Tier.DISK if buckets.options.disk_weights else Tier.HOST
        tier = Tier.DEVICE if resident else away
        optimizers = hooks.optimizers_of(self.updates)
        with unguarded(), compat.on_host():
            try:
                for key in keys:
                    old = buckets.machine.buckets[key]
                    undone(functools.partial(buckets.move_bucket, key, tier))
                    new = buckets.machine.buckets[key]
                    if new is not old:
                        move_states(old, new)
                        for optimizer in optimizers:  # states outside of buckets
                            for param in new.params:
                                move_loaded(optimizer, param)
                    if resident:
                        self.away.discard(key)
            finally:
                buckets.moved()


def _clear_queue() -> None:
    """Drop the graph that a failed backward has left in torch's queue of this thread.

    If a backward fails inside another one (a reentrant checkpoint), the queue holds the outer graph
    until the next backward.
    """
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.ones((), device="cpu", requires_grad=True)
        (one * 1).backward()
