"""StreamedParameter: stands in for a host parameter while the model runs.

It says that it is on the compute device, but holds only a reference to the host tensor. Under
Dynamo it is an ordinary graph input. In eager code (a graph break, a skipped frame) any operation
on it fetches a copy for its own duration: slow, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megacompile import compat


class StreamedParameter(torch.Tensor):
    """A traceable wrapper: shape, strides and dtype of `host`, on `device`."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> StreamedParameter:
        self: StreamedParameter = compat.wrapper(cls, host, device)
        self.host = host
        self._is_param = True  # isinstance(self, nn.Parameter)
        return self

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        del host, device

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["host"], self.device

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], device: torch.device, size: Any, stride: Any
    ) -> StreamedParameter:
        del size, stride
        return StreamedParameter(inner["host"], device)

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        fetched: dict[int, tuple[StreamedParameter, torch.Tensor]] = {}

        def fetch(value: Any) -> Any:
            if not isinstance(value, StreamedParameter):
                return value
            if id(value) not in fetched:
                fetched[id(value)] = (value, value.host.to(value.device, copy=True))
            return fetched[id(value)][1]

        args, kwargs = compat.tree_map(fetch, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func._schema.is_mutable:  # in-place on a parameter: the host tensor is the parameter
            for proxy, copy in fetched.values():
                proxy.host.copy_(copy)
            back = {id(copy): proxy for proxy, copy in fetched.values()}
            result = compat.tree_map(lambda value: back.get(id(value), value), result)
        return result


class Proxies:
    """The proxies of a model's parameters, and the swap."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        receive: Callable[[nn.Parameter, torch.Tensor], None],
    ) -> None:
        """`receive(parameter, gradient)` gets the gradients that eager code produces."""
        self.sites: list[tuple[dict[str, Any], str, nn.Parameter, StreamedParameter]] = []
        made: dict[int, StreamedParameter] = {}
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is None:
                    continue
                if id(param) not in made:
                    made[id(param)] = _make(param, device, receive)
                self.sites.append((module._parameters, name, param, made[id(param)]))

    def fits(self, model: nn.Module) -> bool:
        """Are the model's parameters the very same objects as when the proxies were made?"""
        now = (
            id(param)
            for module in model.modules()
            for param in module._parameters.values()
            if param is not None
        )
        then = [id(param) for _, _, param, _ in self.sites]
        return list(now) == then

    def pairs(self) -> Sequence[tuple[nn.Parameter, StreamedParameter]]:
        return [(param, proxy) for _, _, param, proxy in self.sites]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """For its duration, the model's parameters are the proxies."""
        for holder, name, param, proxy in self.sites:
            if proxy.requires_grad != param.requires_grad:
                proxy.requires_grad_(param.requires_grad)
            holder[name] = proxy
        try:
            yield
        finally:
            for holder, name, param, proxy in self.sites:
                if holder.get(name) is proxy:  # else the forward itself replaced it
                    holder[name] = param


def _make(
    param: nn.Parameter,
    device: torch.device,
    receive: Callable[[nn.Parameter, torch.Tensor], None],
) -> StreamedParameter:
    proxy = StreamedParameter(param.detach(), device)
    proxy.requires_grad_(param.requires_grad)

    def hand_over(accumulated: torch.Tensor) -> None:
        gradient = accumulated.grad
        if gradient is not None:
            accumulated.grad = None
            receive(param, gradient)

    if param.is_floating_point() or param.is_complex():
        keep = proxy.requires_grad
        proxy.requires_grad_(True)
        proxy.register_post_accumulate_grad_hook(hand_over)  # type: ignore[no-untyped-call]
        proxy.requires_grad_(keep)
    return proxy
