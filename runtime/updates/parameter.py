"""The update of one parameter: its tensors, and torch.optim's own step on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from megacompile import compat
from megacompile.runtime.optim.rule import OptimizerRule, State


@dataclass(eq=False, slots=True)
class ParamUpdate:
    """The update of one parameter, recorded when `optimizer.step()` is called."""

    index: int  # in its bucket
    grad: torch.Tensor
    scale: float  # of the gradient
    group: dict[str, Any]  # the parameter group's options at that time, for torch.optim's own step
    states: dict[str, Any]  # name -> tensor, or (codes, absmax)
    rule: OptimizerRule | None = None
    hyper: Sequence[float] = ()
    seed: int | None = None
    intact: bool = False  # the gradient is unchanged since the backward, except for the scale
    factor: torch.Tensor | None = None  # 0-d, another factor of the gradient of a RESIDENT bucket

    def in_order(self) -> tuple[State | None, ...]:
        """The states in the rule's order."""
        assert self.rule is not None
        return tuple(self.states.get(moment.name) for moment in self.rule.moments)


def run_stock(
    kind: type[Optimizer], steps: Sequence[ParamUpdate], params: dict[int, torch.Tensor]
) -> None:
    """One step of an optimizer of `kind` on `params`; new states are stored in `step.states`."""
    groups = []
    for step in steps:
        param = params[step.index]
        grad = step.grad.to(param.dtype)
        param.grad = grad if step.scale == 1.0 else grad * step.scale
        groups.append({**step.group, "params": [param]})
    make: Any = kind
    shadow = make(groups)
    for step in steps:
        if step.states:
            shadow.state[params[step.index]].update(step.states)
    compat.step_without_hooks(shadow)
    for step in steps:
        params[step.index].grad = None
        step.states.update(shadow.state[params[step.index]])


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """A context that runs on a new CUDA stream and synchronises it at the end; a no-op on the
    CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
        torch.cuda.current_stream(device).synchronize()


def run_stock_on_device(
    kind: type[Optimizer],
    step: ParamUpdate,
    param: torch.Tensor,  # on the host
    device: torch.device,
) -> None:
    """One step of an optimizer of `kind` on copies of a parameter and its states on a device."""
    with _side_stream(device):
        on_device = param.to(device, non_blocking=True)
        moved = ParamUpdate(
            index=step.index,
            grad=step.grad.to(device, non_blocking=True),
            scale=step.scale,
            group=step.group,
            states={name: _moved(name, value, device) for name, value in step.states.items()},
        )
        run_stock(kind, [moved], {step.index: on_device})
        param.copy_(on_device, non_blocking=True)
        for name, value in moved.states.items():
            on_host = step.states.get(name)
            if isinstance(on_host, torch.Tensor):
                on_host.copy_(value, non_blocking=True)
            else:  # created by the first step
                step.states[name] = value.cpu() if isinstance(value, torch.Tensor) else value


def _moved(name: str, value: Any, device: torch.device) -> Any:
    if name == "step" or not isinstance(value, torch.Tensor):
        return value
    return value.to(device, non_blocking=True)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order: (numel,)."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the strides of another tensor of the same shape."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
