"""From a module to the megacompiled model that it is, or that it is in."""

from __future__ import annotations

from torch import nn

from megacompile import compat
from megacompile.errors import ModelError
from megacompile.runtime.model.owners import live
from megacompile.runtime.model.streamed import StreamedModel


def streamed_model(model: nn.Module, caller: str) -> StreamedModel:
    """Finds the model behind a megacompiled model's `__call__`, also under `torch.compile`.

    Raises:
        ModelError: the model is not megacompiled.
    """
    streamed = compat.compiled_call(compat.without_torch_compile(model))
    if not isinstance(streamed, StreamedModel):
        raise ModelError(
            f"{caller}(): {type(model).__name__} is not megacompiled; "
            "call model = megacompile(model) first"
        )
    return streamed


def streamed_around(module: nn.Module, caller: str) -> StreamedModel:
    """The same for a module in a megacompiled model: who owns its parameters.

    Raises:
        ModelError: no megacompiled model does.
    """
    found = compat.compiled_call(module)
    if isinstance(found, StreamedModel):
        return found
    params = list(module.parameters())
    for owner in live():
        streamed = compat.compiled_call(owner.model)
        if isinstance(streamed, StreamedModel) and any(map(owner.owns, params)):
            return streamed
    return streamed_model(module, caller)
