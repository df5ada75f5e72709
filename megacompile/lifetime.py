"""Public functions that lend a model's device memory, call it without capture, and make it plain
again.

`released()`, `eager()`, `full_parameters()`, `unmegacompile()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from megacompile import compat
from megacompile import option_checks as checks
from megacompile.runtime.model import restore
from megacompile.runtime.model.streamed import StreamedModel, streamed_around, streamed_model

M = TypeVar("M", bound=nn.Module)


@contextlib.contextmanager
def released(model: nn.Module) -> Iterator[None]:
    """Lend the model's device memory to other code within a `with` block.

    Slots, workspaces and the allocator's cache are freed. Resident layers move to the host, with
    their gradients and optimizer states, and return at the end, also after an exception. Parameters
    may be read and saved inside. Nothing is captured, planned or compiled again. The model's
    buffers (`register_buffer`) stay on the device. Blocks may be nested.

    Calls of the model and `optimizer.step()` raise inside.

    Raises:
        ModelError: the model is not megacompiled, is in use, or a forward waits for its backward.
        HostMemoryError: the resident layers do not fit on the host.
        DeviceMemoryError: at the end, the device has too little free memory. The model is intact,
            and its next call tries again.

    Example::

        with released(model):
            llm.wake_up()
            llm_model.load_weights(full_parameters(model))
            samples = llm.generate(prompts)
            llm.sleep()
    """
    streamed = streamed_model(model, "released")
    streamed.refuse_in_use("released()")
    streamed.released.give()
    try:
        yield
    except BaseException:
        streamed.released.end(failed=True)
        raise
    streamed.released.end(failed=False)


@contextlib.contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Call the model as plain PyTorch code, without capture, within a `with` block.

    For loops whose calls all differ in shape, such as sampling with a growing cache: nothing is
    captured, planned or compiled. Each use of a parameter copies it to the device, so a call takes
    about as long as in a plain model that copies its weights there. Earlier captures stay, and
    calls after the block are captured again.

    The block applies to calls of the model and its modules, also from `generate()` and other
    methods, in this thread only. Blocks may be nested. Gradients are those of the plain model. With
    `mesh=`, all ranks must enter the block: they gather each parameter at each use.

    Args:
        model: a megacompiled model, or a module in one: the block applies to the whole model.

    Raises:
        ModelError: the model is not part of a megacompiled one, or its forward is running.

    Example::

        with torch.inference_mode(), eager(model):
            for _ in range(256):
                token = model(token, cache=cache)[:, -1:].argmax(-1)
    """
    blocks = _model_of_block(model).captures.eager
    blocks.depth += 1
    try:
        yield
    finally:
        blocks.depth -= 1


@compat.opaque
def _model_of_block(model: nn.Module) -> StreamedModel:
    streamed = streamed_around(compat.without_torch_compile(model), "eager")
    streamed.refuse_in_use("eager()", in_backward=False)
    return streamed


def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter on the device under its Hugging Face name, for a weight sync.

    One bucket is on the device at a time. Parameters come in the order of buckets. A tied parameter
    comes once, under its first name in `named_parameters()`, as vLLM's `load_weights` and TRL
    expect. Names are relative to `model`, which may be a module inside a megacompiled model: pass
    the inner model of a wrapper that adds a prefix. PEFT's names become those of the base model,
    without the adapter's own parameters. Where a checkpoint splits a parameter (experts that
    transformers merges), the name is that of the parameter, as in TRL. With `mesh=`, all ranks must
    iterate over all parameters, and each gets whole tensors.

    Works inside `released`, and while an update runs. Do not train during the iteration.

    Args:
        model: a megacompiled model, or a module in one.

    Yields:
        (name, tensor): of the parameter's shape, in the dtype that the model computes in
        (`compute_dtype`, else the parameter's). A copy that you keep is never overwritten. For a
        resident layer the tensor is the parameter itself: do not write to it.

    Raises:
        ModelError: the model is not part of a megacompiled one, a parameter is quantized, or an
            adapter is not merged.

    Example::

        llm_model.load_weights(full_parameters(model))
    """
    inner = compat.without_torch_compile(model)
    streamed = streamed_around(inner, "full_parameters")
    names = restore.hugging_face_names(inner)
    restore.check(streamed, inner, names)
    return restore.full_parameters(streamed, names)


def unmegacompile(model: M, *, device: torch.device | str | int = "cpu") -> M:
    """Make a megacompiled model a plain one again, in place.

    Parameters, gradients, optimizer states and buffers get ordinary memory on `device`. Parameters
    stay the same objects, and optimizers keep working: their states have torch.optim's form (the
    parameter's dtype, not 8 bits). The model may be megacompiled again with other options. An
    earlier loss can no longer be differentiated.

    The states of an optimizer that has not stepped yet stay where they are.

    Args:
        model: a megacompiled model. The host needs memory for one more bucket meanwhile.
        device: the device of the plain model.

    Returns:
        The model.

    Raises:
        ModelError: the model is not megacompiled, is in use, or is shared by ranks (`mesh=`: `save`
            it instead), or a move would lose hooks on its parameters.
        OptionError: the device does not exist.
        DeviceMemoryError: the model does not fit there. Nothing was changed.

    Example::

        model = unmegacompile(model, device="cuda")
        model.generate(**inputs)
    """
    streamed = streamed_model(model, "unmegacompile")
    restore.restore(streamed, checks.device(checks.Given("device", device, {})))
    return model
