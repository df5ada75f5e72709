"""The front door, third part: a model that returns its memory, is called without capture,
and becomes a plain one again.

`released()`, `restoring()`, `eager()`, `full_parameters()`, `unmegacompile()`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import OptionError
from megacompile.runtime.model.full_parameters import full_parameters as iterate
from megacompile.runtime.model.full_parameters import (
    hugging_face_names,
    refuse_packed,
    refuse_unknown,
    refuse_unmerged,
)
from megacompile.runtime.model.restore import restore
from megacompile.runtime.model.streamed import StreamedModel, streamed_around, streamed_model

M = TypeVar("M", bound=nn.Module)


@contextlib.contextmanager
def released(model: nn.Module) -> Iterator[None]:
    """Lend the device's memory to other code for the time of a `with` block.

    Slots, workspaces and the allocator's cache are freed. Layers that live on the device go to the
    host, with their gradients and optimizer states, and come back at the end, also when an
    exception passes. Everything that is not on the device stays as it is, so parameters may be read
    inside, and saved. Nothing is captured, planned or compiled again. The model's buffers stay on
    the device. Blocks may be nested.

    Inside, a call of the model and `optimizer.step()` are errors.

    Raises:
        ModelError: the model is not megacompiled, is in use, or a forward waits for its backward.
        HostMemoryError: what lives on the device does not fit on the host.
        DeviceMemoryError: at the end, the memory is not there any more. The model is whole then,
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
def restoring(model: nn.Module) -> Iterator[None]:
    """Load a checkpoint over a partially made update, by a loader that reads first.

    Reads of half updated parameters and optimizer states raise, so that they are not saved. A
    loader that asks for `state_dict()` to load into it, as torch.distributed.checkpoint's does, may
    read them inside of this block. A call of the model and `optimizer.step()` are errors there
    until all of it was loaded. Where nothing has failed the block does nothing.

    Args:
        model: a megacompiled model. The states of all optimizers over it are meant too.

    Raises:
        ModelError: the model is not megacompiled, or is in use.
        OptimizerError: at the end, the model or an optimizer was not loaded.

    Example::

        with restoring(model):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.distributed.checkpoint.load(state, checkpoint_id=folder)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    """
    streamed = streamed_model(model, "restoring")
    streamed.refuse_in_use("restoring()")
    pending = [bucket.pending for bucket in streamed.machine.buckets.values()]
    try:
        for each in pending:
            each.begin_restoring()
        yield
    finally:
        for each in pending:
            each.end_restoring()
    for each in pending:
        each.check()


@contextlib.contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Call the model as plain PyTorch code for the time of a `with` block.

    For loops whose calls all differ, such as one that samples with a cache of its own: nothing is
    captured, planned or compiled for them. Each use of a parameter copies it to the device, so a
    call takes about as long as that of a plain model whose weights are copied there each time. What
    was captured before stays as it is, and calls after the block are captured again.

    It holds for calls of the model and of modules in it, also those that `generate()` or another
    method makes. It holds in this thread: calls in others are captured meanwhile. Blocks may be
    nested. Gradients are those of the plain model. Where ranks share the model (`mesh=`), all of
    them enter it: they gather each parameter at each use.

    Args:
        model: a megacompiled model, or a module in one, which stands for all of it.

    Raises:
        ModelError: the model is not in a megacompiled one, or this is the middle of its forward.

    Example::

        with torch.inference_mode(), eager(model):
            for _ in range(256):
                token = model(token, cache=cache)[:, -1:].argmax(-1)
    """
    with _model_of_block(model).eager.block():
        yield


@compat.opaque
def _model_of_block(model: nn.Module) -> StreamedModel:
    streamed = streamed_around(compat.without_torch_compile(model), "eager")
    streamed.refuse_in_call("eager()")
    return streamed


def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter on the device, under its name in a Hugging Face checkpoint, for a weight sync.

    One bucket is copied while the one before it is used, so two of them are on the device at a
    time. They come in the order of the buckets. A tied parameter comes once, under its first name,
    as `named_parameters()` has it and as `load_weights` of vLLM and the trainers of TRL expect it.
    Names are those of the model that is given, which may be a module inside of a megacompiled one:
    where a wrapper adds a prefix, give what it wraps. The names of PEFT are turned into those of
    the base model, and the adapter's own parameters are left out. Where a checkpoint has other
    tensors than the model has parameters (experts that transformers keeps as one), the names are
    those of the parameters, as in TRL. Where ranks share the model (`mesh=`), every rank goes
    through all of them, and each gets them whole.

    It may be used inside of `released`, and while an update runs. Do not train meanwhile.

    Args:
        model: a megacompiled model, or a module in one.

    Yields:
        (name, tensor): of the parameter's shape, in the dtype that the model computes in
        (`compute_dtype`, else the parameter's). A tensor that you keep is not written to; of a
        layer that lives on the device it is the parameter itself: do not write to it.

    Raises:
        ModelError: the model is not in a megacompiled one, a parameter is quantized, or an adapter
            is not merged.

    Example::

        llm_model.load_weights(full_parameters(model))
    """
    inner = compat.without_torch_compile(model)
    streamed = streamed_around(inner, "full_parameters")
    refuse_unmerged(inner)
    refuse_packed(inner)
    names = hugging_face_names(inner)
    refuse_unknown(streamed, names)
    return iterate(streamed, names)


def unmegacompile(model: M, *, device: torch.device | str | int = "cpu") -> M:
    """Make a megacompiled model a plain one again, in place.

    Parameters, gradients, optimizer states and buffers get ordinary memory on `device`. The
    parameters are the same objects, and optimizers go on with them: states are what torch.optim has
    (of the parameter's dtype, none in 8 bits). Everything that `megacompile()` put around the model
    is gone, and it may be megacompiled again, with other options. A loss from before cannot be
    differentiated any more.

    The states of an optimizer that has not stepped yet stay where they are.

    Where ranks share the model (`mesh=`), all of them call it, and each gets all of the model:
    parameters are other objects, under the same names, as after `megacompile()`; optimizers that
    have the old ones, stepped or not, get the new ones, with whole states. Buffers stay those of
    the rank. An interrupt in the middle is the end of all ranks.

    Args:
        model: a megacompiled model. The host needs memory for one bucket more while it runs.
        device: where everything goes.

    Returns:
        The model.

    Raises:
        ModelError: the model is not megacompiled, is in use, or a hook holds its parameters where
            they are, or would be lost.
        OptionError: no such device; or an optimizer has states that ranks cannot gather.
        DeviceMemoryError: it does not fit there. Nothing has changed then.
        HostMemoryError: the same, of ranks that share it.
        RankError: another rank does something else, or has stopped.

    Example::

        model = unmegacompile(model, device="cuda")
        model.generate(**inputs)
    """
    streamed = streamed_model(model, "unmegacompile")
    restore(streamed, _device(device))
    return model


def _device(value: torch.device | str | int) -> torch.device:
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"unmegacompile(): got device={value!r}: {error}") from None
    if device.type == "meta":
        raise OptionError("unmegacompile(): got device='meta', which would lose the parameters")
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device
