"""What torch keeps in a module and calls it by."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import stateless

# The methods of a module that `__call__` and `to` go through: its own take their place.
CALL = "_call_impl"  # torch 2.11 to 2.15
APPLY = "_apply"  # torch 2.11 to 2.15
# Where a module keeps what its call calls instead.
COMPILED_CALL = "_compiled_call_impl"  # torch 2.11 to 2.15


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:  # torch 2.11 to 2.15
    """What a call of a module calls instead, since `module.compile()` or `megacompile()`."""
    found: Callable[..., Any] | None = module._compiled_call_impl
    return found


def set_compiled_call(
    module: torch.nn.Module, call: Callable[..., Any] | None
) -> None:  # torch 2.11 to 2.15
    """Have a call of a module call this; None: the module itself. A copied module forgets it."""
    module._compiled_call_impl = call


def frame_of(model: torch.nn.Module, name: str) -> types.FunctionType:  # torch 2.11 to 2.15
    """A function that calls a model as it is, with its hooks, for Dynamo to capture.

    Dynamo skips frames of torch.nn itself, so `nn.Sequential` needs a frame around it; and it
    counts recompilations by code object, so each model gets one, of this name.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    assert isinstance(call, types.FunctionType)
    call.__code__ = call.__code__.replace(co_name=name)
    return call


def parameters_of(
    module: torch.nn.Module,
) -> dict[str, torch.nn.Parameter | None]:  # torch 2.11 to 2.15
    """A module's own parameters, in the dict that holds them: what is put there is its parameter.

    No method of a subclass is asked, as it is where an attribute is set.
    """
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:  # torch 2.11 to 2.15
    """A module's own buffers, in the dict that holds them."""
    return module._buffers


def given_to_functional_call() -> dict[int, Any]:  # torch 2.11 to 2.15
    """What the `torch.func.functional_call`s around this call have put into modules, by its id."""
    code = stateless._functional_call.__code__
    found: dict[int, Any] = {}
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            given = frame.f_locals["parameters_and_buffers"].values()
            found |= {id(value): value for value in given}
        frame = frame.f_back
    return found


def without_torch_compile(model: torch.nn.Module) -> torch.nn.Module:  # torch 2.11 to 2.15
    """The module that `torch.compile(module)` was called with; any other as it is."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else model
