"""Strides as the kernels give them, for tensors that have no data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megacompile.compat.symbols import UntraceableSymbols, expression_of, symbols_now

_CANNOT_RUN = (RuntimeError, IndexError, ValueError, ArithmeticError, TypeError)


@contextmanager
def real_strides() -> Iterator[None]:  # torch 2.11 to 2.15
    """Run each operator on zeros too, at the hints' sizes, for the strides it returns.

    A few kernels give other strides than their fake kernels say. What cannot run on zeros keeps
    what the fake kernel says. To be entered inside of `SymbolicFakes`.
    """
    fakes = symbols_now()
    assert fakes is not None
    fakes.mode.settle = _settled
    try:
        yield
    finally:
        fakes.mode.settle = None


def _settled(func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    """The results of an operator, with the strides that its kernel returns."""
    if not _makes_tensors(func):
        return found
    flat, spec = tree_flatten(found)
    if not any(isinstance(value, FakeTensor) and value.dim() > 1 for value in flat):
        return found
    real = _run(func, args, kwargs)
    if real is None or len(real) != len(flat):
        return found
    fakes = symbols_now()
    assert fakes is not None
    with fakes.mode:
        settled = [_with_strides(f, r) for f, r in zip(flat, real, strict=True)]
    return tree_unflatten(settled, spec)


def _makes_tensors(func: Any) -> bool:
    """True if an operator's results are memory of their own, and it changes nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return all(result.alias_info is None for result in schema.returns)


def _run(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    with _disable_current_modes(), torch.no_grad():
        try:
            zeros = tree_map(_zeros, (args, kwargs))
            flat: list[Any] = tree_flatten(func(*zeros[0], **zeros[1]))[0]
        except torch.OutOfMemoryError:
            raise
        except _CANNOT_RUN:
            return None
    return flat


def _zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape, stride = ([expression_of(n)[0] for n in s] for s in (value.shape, value.stride()))
        empty = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        return empty.zero_()
    return expression_of(value)[0]


def _with_strides(fake: Any, real: Any) -> Any:
    """The fake result, or one in the order of the real one's strides where these are others."""
    if not isinstance(fake, FakeTensor) or not isinstance(real, torch.Tensor):
        return fake
    shape = tuple(expression_of(n)[0] for n in fake.shape)
    stride = tuple(expression_of(n)[0] for n in fake.stride())
    if (shape, stride) == (tuple(real.shape), real.stride()) or 0 in shape:
        return fake
    order = sorted(range(real.dim()), key=lambda d: (real.stride(d), real.shape[d]))
    if shape != tuple(real.shape) or _dense(real.shape, order) != real.stride():
        raise UntraceableSymbols(f"a kernel gives strides {real.stride()} for {list(real.shape)}")
    return torch.empty_strided(
        fake.shape, _dense(fake.shape, order), dtype=fake.dtype, device=fake.device
    )


def _dense(shape: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Strides of a tensor without gaps, whose dimension `order[0]` is the innermost."""
    found: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in order:
        found[dim] = step
        step = step * shape[dim]
    return tuple(found)
