"""The parameters of a model elsewhere.

    released           device memory is lent to other code: residents move to the host and back
    full_parameters    whole on the device, for an inference engine next to it
    restore            for good: the model becomes a plain one again

`released` moves resident buckets back to the same placement, so schedules stay valid. Per-call
memory (slots, workspaces, activations) is freed, and the next call allocates it again.

`restore` frees each bucket once its parameters have their own memory, so peak memory is one bucket
more. An interrupt in between leaves a megacompiled model: its next call takes over the parameters
that have left.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megacompile import compat, notices
from megacompile.errors import DeviceMemoryError, ModelError
from megacompile.ir.plan import Tier
from megacompile.packed import packed_parameters
from megacompile.runtime.model.methods import restore_methods
from megacompile.runtime.model.model_buckets import ModelBuckets, buffers_to, show_again
from megacompile.runtime.model.program import first_line
from megacompile.runtime.params import optimizer_states
from megacompile.runtime.params.guards import release, unguarded
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.parameter_gradients import is_there, open_lazy
from megacompile.runtime.params.swap import Undos, undone
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
        HostMemoryError if the resident buckets do not fit on the host: then nothing is lost, and
        the next call takes back what has moved."""
        with self.buckets.alone:
            if not self.depth:
                if self.away:  # the last attempt failed
                    self._take()
                self._check_pending()
                self.depth = 1
                try:
                    self._give()
                except BaseException:
                    self.depth = 0  # the next call takes it back
                    raise
            else:
                self.depth += 1

    def end(self, *, failed: bool) -> None:
        """Take the memory back at the end of a block; if it `failed` and memory is short, the next
        call does."""
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
        buckets = self.buckets.machine.buckets
        residents = {key: b for key, b in buckets.items() if b.resident is not None}
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
        """Move the buckets back. Raises DeviceMemoryError if memory is short."""
        ran_out = ""
        try:
            self._move(sorted(self.away), resident=True)
        except torch.OutOfMemoryError as error:
            ran_out = first_line(error)  # not the error: its frames hold memory
        if ran_out:
            missing = [self.buckets.machine.buckets[key] for key in self.away]
            size = sum(b.layout.size_bytes + optimizer_states.state_bytes(b) for b in missing)
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
                        optimizer_states.move_states(old, new)
                        for optimizer in optimizers:  # states outside of buckets
                            for param in new.params:
                                optimizer_states.move_loaded(optimizer, param)
                    if resident:
                        self.away.discard(key)
            finally:
                buckets.moved()


def _clear_queue() -> None:
    """Drop the graph that a backward which failed inside another one (a reentrant checkpoint) has
    left in torch's queue of this thread until the next backward."""
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.ones((), device="cpu", requires_grad=True)
        (one * 1).backward()


_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "modules_to_save.default.")


def hugging_face_names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter in the model's checkpoint, by its id. As in TRL: without the
    prefixes of PEFT and checkpoint wrappers, and without PEFT's own parameters."""
    prefix = getattr(model, "prefix", None)  # of a PeftModel: "lora_"
    adapter = prefix if isinstance(prefix, str) and hasattr(model, "peft_config") else None
    names = {}
    for name, param in model.named_parameters():
        if adapter is not None:
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if adapter in name or "original_module" in name:
                continue
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        names[id(param)] = name
    return names


def check(streamed: Any, model: nn.Module, names: Mapping[int, str]) -> None:
    """Raise a ModelError if a checkpoint does not have a model's weights: adapters of PEFT are
    active but not merged, or parameters are packed (its names are those of unpacked weights); or if
    one of them is in no bucket yet."""
    for name, module in model.named_modules():
        beside = hasattr(module, "base_layer") and getattr(module, "active_adapters", None)
        off = getattr(module, "merged", True) or getattr(module, "disable_adapters", False)
        if beside and not off:
            raise ModelError(
                f"full_parameters(): the adapter of {name!r} is not merged, and its weight is that "
                "of the base model; call model.merge_adapter() first, and model.unmerge_adapter() "
                "afterwards"
            )
    layers = {id(module): name for name, module in model.named_modules()}
    for module, name, param in packed_parameters(model):
        raise ModelError(
            f"full_parameters(): parameter {name!r} of layer {layers[id(module)]!r} is a quantized "
            f"{type(param).__name__}; needed unquantized weights; send only the adapters "
            "(peft.get_peft_model_state_dict), to an engine with the same base"
        )
    known = {id(p) for bucket in streamed.machine.buckets.values() for p in bucket.params}
    for key, name in names.items():
        if key not in known:
            raise ModelError(
                f"full_parameters(): parameter {name!r} was added since the last call, and is in "
                "no bucket yet; call the model once first"
            )


def full_parameters(streamed: Any, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters with these names (by id), bucket by bucket, on the device. A streamed
    bucket gets new memory, which is never overwritten; a resident one is not copied. What the user
    has assigned (`p.data = ...`) is not in the bucket before the next call."""
    streamed.updates.check()  # before the first yield
    device = streamed.options.device
    for bucket in streamed.machine.buckets.values():
        found: list[tuple[str, torch.Tensor]] = []
        with streamed.buckets.alone, unguarded(), compat.on_host(), torch.no_grad():
            bucket.pending.wait()
            bucket.pending.refresh()
            assigned = bucket.replaced()
            for i, (param, value) in enumerate(zip(bucket.params, bucket.streamed, strict=True)):
                if id(param) in names:
                    source = (compat.local(param) if i in assigned else value).detach()
                    if bucket.resident is None or i in assigned:
                        source = source.to(device, value.dtype, copy=True)
                    is_part = compat.is_sharded(param)
                    whole = compat.whole(param, source) if is_part else source
                    found.append((names[id(param)], whole))
                    del source, whole
                del value
        while found:  # without references to what the caller drops
            yield found.pop(0)


def restore(streamed: Any, device: torch.device) -> None:
    """Make a megacompiled model a plain one, with everything on `device`. Raises a ModelError if it
    is in use, or its parameters must not move; a DeviceMemoryError if it does not fit there
    (nothing has changed); an OptimizerError if a background update has failed."""
    model, buckets, machine = streamed.model, streamed.buckets, streamed.machine
    name = type(model).__name__
    streamed.refuse_in_use("unmegacompile()")
    if streamed.released.depth:
        streamed.released.check()
    if machine.ranks is not None:
        raise ModelError(
            f"unmegacompile(): ranks share {name} (mesh=), and each has only its rows; call "
            "megacompile.save(model, folder) in all ranks, and load that into a plain model"
        )
    with buckets.alone, unguarded(), compat.outside_inference_mode(), compat.on_host():
        _refuse(streamed, device)
        for bucket in machine.buckets.values():
            bucket.pending.settle()
        machine.give_back()
        machine.device_update.forget()
        machine.activations.forget()
        if machine.saved_disk is not None:
            machine.saved_disk.forget()
        optimizers = hooks.optimizers_of(streamed.updates)
        if streamed.options.optimizer is not None:
            optimizers.append(streamed.options.optimizer)
        buckets.proxies.put_back()
        buckets.proxies.forget()
        machine.gradients.bind({})
        for key in list(machine.buckets):
            bucket = machine.buckets[key]
            for i in range(len(bucket.params)):
                undone(functools.partial(_free, bucket, i, device))
            for optimizer in optimizers:
                optimizer_states.free_states(optimizer, bucket.params)
            del machine.buckets[key], bucket
        buckets.follow_leaves()
        buffers_to(model, device)
        hooks.leave(streamed.updates, optimizers)
        streamed.end()
        restore_methods(model)
        compat.set_compiled_call(model, None)
    compat.release_device_cache(streamed.options.device)


def _refuse(streamed: Any, device: torch.device) -> None:
    """Raise if the parameters cannot leave the buckets now."""
    name, updates = type(streamed.model).__name__, streamed.machine.in_backward
    if updates is not None and updates.uncommitted:
        raise ModelError(
            f"unmegacompile(): the backward of {name} has run an update that optimizer.step() has "
            "not counted; call optimizer.step() first"
        )
    buckets = streamed.machine.buckets.values()
    moving = [p for p in streamed.model.parameters() if p.device != device]
    if why := streamed.buckets.ddp.holds(moving) if moving else "":
        raise ModelError(
            f"unmegacompile(): {name} has parameters on {moving[0].device}, which cannot move to "
            f"{device}, because {why}, and a move would lose its hooks; pass their device "
            f"(device={str(moving[0].device)!r}), or remove its hooks first"
        )
    if device.type != "cpu":
        available = compat.free_device_bytes(device)
        needed = sum(_bytes(b) for b in buckets if b.resident != device)
        if needed > available:
            raise DeviceMemoryError(
                f"unmegacompile(): {name} needs {format_bytes(needed)} on {device} for parameters, "
                f"gradients and optimizer states, and {format_bytes(available)} is free; use the "
                "host (device='cpu')"
            )


def _bytes(bucket: HostBucket) -> int:
    """Bytes of a bucket's parameters, gradients and states."""
    gradients = [p.grad for p in bucket.params if p.grad is not None]
    states = optimizer_states.state_bytes(bucket)
    return sum(t.nbytes for t in (*bucket.values, *gradients)) + states


def _free(bucket: HostBucket, index: int, device: torch.device, undos: Undos) -> None:
    """Move a parameter and its gradient to their own memory."""
    param = bucket.params[index]
    open_lazy(param.grad)
    given = param.grad.detach() if is_there(param.grad) else None
    gradient = None if given is None else given.to(device, param.dtype, copy=True)
    release(param)
    undos.append(functools.partial(show_again, [(param, gradient)]))
    if param.data_ptr() == bucket.homes[index] or param.device != device:
        param.data = param.detach().to(device, copy=True)
    param.grad = None
    if param.requires_grad:
        param.grad_dtype = param.dtype  # this hint is for megacompile()
