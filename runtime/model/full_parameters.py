"""The parameters of a model on the device, bucket by bucket, for an inference engine next to it.

While the caller uses one bucket, the next one is copied: two buckets are on the device at a time.

[Note: memory that others hold] Each bucket gets a new allocation, and no buffer is reused. A tensor
that the caller keeps is never overwritten; the allocator reuses a dropped tensor's memory on the
compute stream, so the copy of the next bucket waits for the compute stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import ModelError
from megacompile.ir.stream import Stream
from megacompile.packed import packed_parameters
from megacompile.runtime.model.streamed import StreamedModel
from megacompile.runtime.params.guards import unguarded
from megacompile.runtime.params.host_bucket import HostBucket

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "modules_to_save.default.")


def hugging_face_names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter in the model's checkpoint, by its id; tied parameters share one
    name.

    As in TRL: without the prefixes of PEFT and checkpoint wrappers, and without PEFT's own
    parameters.
    """
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


def check(streamed: StreamedModel, model: nn.Module, names: Mapping[int, str]) -> None:
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


def full_parameters(
    streamed: StreamedModel, names: Mapping[int, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters with these names (by parameter id), bucket by bucket, on the device."""
    wanted = [
        (bucket, found)
        for bucket in streamed.machine.buckets.values()
        if (found := {i: names[id(p)] for i, p in enumerate(bucket.params) if id(p) in names})
    ]
    streamed.updates.check()  # before the first yield
    ahead: _Copy | None = None
    try:
        for k, (bucket, found) in enumerate(wanted):
            current = ahead or _Copy(streamed, bucket, found)
            ahead = _Copy(streamed, *wanted[k + 1]) if k + 1 < len(wanted) else None
            yield from current.taken()
    finally:
        if ahead is not None:  # the caller has stopped: the memory must outlive the copy
            ahead.wait()


class _Copy:
    """A bucket's parameters on their way to the device."""

    def __init__(self, streamed: StreamedModel, bucket: HostBucket, names: dict[int, str]) -> None:
        self.device = streamed.options.device
        self.names = names
        self.done: torch.cuda.Event | None = None
        with streamed.buckets.alone, unguarded(), compat.on_host(), torch.no_grad():
            bucket.pending.wait()
            bucket.pending.refresh()
            self.tensors = self._copied(bucket, streamed.machine.streams.copies(Stream.H2D))

    def _copied(
        self, bucket: HostBucket, queue: torch.cuda.Stream | None
    ) -> dict[int, torch.Tensor]:
        if compat.is_sharded(bucket.params[0]):
            parts = {i: bucket.streamed[i].to(self.device) for i in self.names}
            return {i: compat.whole(bucket.params[i], part) for i, part in parts.items()}
        if bucket.resident is not None:
            return {i: bucket.streamed[i].detach() for i in self.names}
        copies = {i: torch.empty_like(bucket.streamed[i], device=self.device) for i in self.names}
        if queue is not None:
            queue.wait_stream(torch.cuda.current_stream(self.device))  # see the note
        with nullcontext() if queue is None else torch.cuda.stream(queue):
            for i, tensor in copies.items():
                tensor.copy_(bucket.streamed[i], non_blocking=True)
            self.done = None if queue is None else queue.record_event()
        return copies

    def wait(self) -> None:
        """Make the compute stream wait for the copy."""
        if self.done is not None:
            torch.cuda.current_stream(self.device).wait_event(self.done)

    def taken(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors after their copy, without keeping references."""
        self.wait()
        while self.tensors:
            i = next(iter(self.tensors))
            yield self.names[i], self.tensors.pop(i)
