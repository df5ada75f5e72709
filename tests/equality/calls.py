"""Uses of a plain model and of its streamed twin, with all that can be seen of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.zoo import assert_same, equal

Use = Callable[[Any], Any]  # of a model: gives what it has seen


def leaves(value: Any) -> list[Any]:
    """What is in nested containers and dataclasses, in order."""
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return tree_leaves(value)


def assert_alike(models: Any, use: Use, *, times: int = 1, name: str = "") -> None:
    """Both show the same bits, and end with the same parameters, gradients and buffers."""
    for i in range(times):
        found = []
        for model in models:
            torch.manual_seed(i)
            seen = use(model)
            found.append([type(seen), *leaves(seen)])
        assert len(found[0]) == len(found[1]), name
        for mine, theirs in zip(*found, strict=True):
            if isinstance(mine, Tensor):
                assert equal(mine.detach(), theirs.detach()), name
            else:
                assert mine == theirs, name
        assert_same(*models)


def total(output: Any) -> Tensor:
    """A loss that gives each element in an output that requires grad another gradient."""
    sums = [torch.zeros(())]
    for each in leaves(output):
        if isinstance(each, Tensor) and each.requires_grad:
            real = torch.view_as_real(each.resolve_conj()) if each.is_complex() else each
            weights = torch.arange(1.0, real.numel() + 1).reshape(real.shape) / real.numel()
            sums.append((real * weights).tanh().sum())
    return torch.stack(sums).sum()


def trained(*inputs: Any, **named: Any) -> Use:
    """A forward and a backward of a loss of everything in the output."""

    def use(model: Any) -> Any:
        output = model(*inputs, **named)
        loss = total(output)
        if loss.requires_grad:
            loss.backward()
        return output

    return use
