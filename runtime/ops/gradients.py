"""Implements the ops on a bucket's gradients."""

from __future__ import annotations

from typing import Any

import torch

from megacompile import compat
from megacompile.ir.buckets import Bucket
from megacompile.ir.stream import Stream
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.group import Group, OpGroup


class GradientOps(OpGroup):
    """`megacompile.ir.ops.bucket_ops` on a machine."""

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

    def fetch_grad(self, bucket: Bucket, buffer: Handle, *, after: tuple[Any, ...] = ()) -> Handle:
        run = self.machine.current_run()
        sources = {i: run.so_far(bucket.key, i) for i in self.gradient_params[bucket.key]}

        def copy() -> tuple[int, Group]:
            key, group = buffer.value
            for i, tensor in group.items():
                source = sources[i]
                if source is None:
                    tensor.zero_()
                else:
                    tensor.copy_(source, non_blocking=True)
            return key, group

        return self._issue(Stream.H2D, (buffer, after), copy)

    def add_grad(self, bucket: Bucket, so_far: Handle, gradients: Handle) -> Handle:
        def add() -> tuple[int, Group]:
            key, total = so_far.value
            _, new = gradients.value
            for i, gradient in new.items():
                total[i].add_(gradient)
            return key, total

        return self._issue(Stream.COMPUTE, (so_far, gradients), add)

    def norm_grad(self, bucket: Bucket, gradients: Handle, largest: bool = True) -> Handle:
        kinds = (2, torch.inf) if largest else (2,)

        def norms() -> torch.Tensor:
            _, group = gradients.value
            tensors = [group[i] for i in self.gradient_params[bucket.key]]
            # a rank may have no rows of a parameter, and an empty tensor has no maximum
            tensors = [each if each.numel() else each.new_zeros(1) for each in tensors]
            orders = (compat.FOREACH_NORM(tensors, k, torch.float32) for k in kinds)
            return torch.stack([torch.stack(found) for found in orders])

        handle = self._issue(Stream.COMPUTE, (gradients,), norms)
        self.machine.streams.mark(handle)  # readers wait
        return handle

    def keep_grad(self, bucket: Bucket, gradients: Handle) -> Handle:
        run = self.machine.current_run()

        def keep() -> None:
            run.keep(*gradients.value)

        handle = self._issue(Stream.COMPUTE, (gradients,), keep)
        self.machine.streams.mark(handle)  # a later graph may fetch and accumulate them
        self.machine.buckets[bucket.key].pending.gradients_copied = handle.event
        return handle

    def offload_grad(
        self,
        bucket: Bucket,
        gradients: Handle,
        norms: Handle | None = None,
        *,
        after: tuple[Any, ...] = (),
    ) -> Handle:
        run, queue = self.machine.current_run(), self.machine.streams.copies(Stream.D2H)
        indices = self.gradient_params[bucket.key]
        memory = run.destinations(bucket.key, indices)

        def copy() -> None:
            key, group = gradients.value
            # first, so that clip_grad_norm_ waits only for them
            if norms is not None and len(memory) == len(indices):
                run.norms(key, indices).fill(norms.value, queue)
            for i, there in memory.items():
                there.copy_(group[i], non_blocking=True)

        waits = (gradients, after) if norms is None else (gradients, norms, after)
        handle = self._issue(Stream.D2H, waits, copy)
        self.machine.buckets[bucket.key].pending.gradients_copied = handle.event
        if memory:
            run.copied(bucket.key, handle.event)
        return handle
