"""A captured graph, its inputs, and the state in which it was captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from megacompile.ir.buckets import Bucket
from megacompile.ir.tensors import TensorMeta


@dataclass(frozen=True, slots=True)
class ParamInput:
    """A captured graph's input that is a streamed parameter."""

    bucket: Bucket
    param: int  # index into bucket.params
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A captured graph's input that is a tensor: data, an activation, a buffer, a constant."""

    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class ConstantInput:
    """A captured graph's input that is a Python number: a dynamic size, a flag."""

    value: int | float | bool


GraphInput = ParamInput | TensorInput | ConstantInput


@dataclass(frozen=True, slots=True)
class Ambient:
    """The thread's state in which a graph was captured, and must be traced."""

    grad_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]  # (device type, enabled, dtype)
    default_dtype: torch.dtype

    @staticmethod
    def current(device: torch.device) -> Ambient:
        """The state of this thread, as far as it concerns work on `device`."""
        kinds = sorted({"cpu", device.type})
        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        )
        return Ambient(torch.is_grad_enabled(), autocast, torch.get_default_dtype())

    @contextlib.contextmanager
    def apply(self, *, autocast: bool = True) -> Iterator[None]:
        """Put this thread into that state (with `autocast=False`: autocast off)."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for kind, enabled, dtype in self.autocast:
                on = enabled and autocast
                stack.enter_context(
                    torch.autocast(kind, dtype if on else None, enabled=on, cache_enabled=False)
                )
            yield


@dataclass(frozen=True, slots=True)
class Overlap:
    """Inputs of a captured graph that share memory, as views of one base of `numel` elements."""

    members: tuple[tuple[int, int], ...]  # (position among the inputs, offset in the base)
    numel: int
    hindrance: str = ""  # why they cannot be views of one base


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured torch-level graph with one kind of input bound to each placeholder."""

    name: str
    module: fx.GraphModule = field(repr=False)
    inputs: tuple[GraphInput, ...]
    device: torch.device
    ambient: Ambient
    overlaps: tuple[Overlap, ...] = ()  # between inputs of which the graph changes one in place


@dataclass(frozen=True, slots=True)
class Variant:
    """What one schedule of a captured graph is built for."""

    tangents: tuple[int, ...]  # the outputs that get a gradient
    keep_last: bool  # False: saved tensors are computed again; the forward's are for other outputs
    accumulate: bool = False  # add to gradients that are on the host already
    reuse: bool = (
        False  # the backward, or a forward without one, takes what a forward left in slots
    )
    update: bool = False  # the optimizer's, in the backward
