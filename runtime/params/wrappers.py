"""Parameters that are wrapper subclasses (torchao): what stands in for them, and on which device.

Such a parameter has no memory. The tensors that it is made of are in a bucket, and during a call a
wrapper over their proxies is in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from megacompile.errors import ModelError
from megacompile.packed import is_wrapper, on_device, packed_parameters, taken_apart
from megacompile.runtime.params.proxies import StreamedParameter


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper is made of; empty for any other tensor."""
    return taken_apart(tensor)[1] if is_wrapper(tensor) else []


def stand_in(
    param: torch.Tensor,
    device: torch.device,
    proxy_of: Callable[[torch.Tensor], StreamedParameter],
) -> torch.Tensor:
    """A wrapper like `param` over the proxies of its parts, on the compute device.

    Raises:
        ModelError: it requires grad.
    """
    if param.requires_grad:
        raise ModelError(
            f"a parameter of shape {tuple(param.shape)} is a {type(param).__name__} that requires "
            "grad since megacompile(); needed a frozen one, as its packed data have no gradients; "
            "use requires_grad_(False), and train adapters (LoRA) beside it"
        )
    wrapping, parts = taken_apart(param)
    made = on_device(wrapping, device)(*map(proxy_of, parts))
    made._is_param = True  # isinstance(made, nn.Parameter)
    return made


def follow_parts(model: nn.Module) -> None:
    """Makes each wrapper say that it is where its parts are.

    Raises:
        ModelError: other code holds it, so that torch cannot exchange it.
    """
    for name, param in _wrappers(model):
        wrapping, parts = taken_apart(param)
        device = parts[0].device
        if param.device == device:
            continue
        there = nn.Parameter(on_device(wrapping, device)(*parts), requires_grad=False)
        try:
            torch.utils.swap_tensors(param, there)
        except RuntimeError as error:
            raise ModelError(
                f"parameter {name} ({type(param).__name__}) cannot move from {param.device} to "
                f"{device}: {error}; needed a parameter that nothing else refers to; drop other "
                "references to it, or move the model there before"
            ) from error


def _wrappers(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for _, name, param in packed_parameters(model):
        if is_wrapper(param):
            yield name, param
