"""Answers of a proxy to a forward that asks what a parameter is: those of the parameter itself.

Python's `type(p)` alone cannot be answered in eager code; `p.__class__` is. In captured code
`compat.show_classes` lets Dynamo answer both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.runtime.params.guards import Absent


class ParameterLooks:
    """The part of `StreamedParameter` that answers for the parameter that it stands for."""

    __slots__ = ()
    stands_for: type[torch.Tensor] = nn.Parameter  # the class of that parameter
    __dlpack_c_exchange_api__ = Absent()  # which exports the memory without a call of Python

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self).stands_for

    @property
    def _leaf(self) -> Any:
        """The parameter that it answers for; None where it is a view, or in no model."""
        me: Any = self
        return None if me.is_view else me.param

    def __hash__(self) -> int:
        """As of the parameter: a dict may have it for a key."""
        return id(self if self._leaf is None else self._leaf)

    @property
    def is_leaf(self) -> bool:
        """As the parameter, though a link joins them.

        What Dynamo makes of inputs that are no leaves is never freed (seen on torch 2.13).
        """
        return _get(torch.Tensor.is_leaf, self) if self._leaf is None else True

    @property
    def grad_fn(self) -> Any:
        """None, as of a leaf, though a link joins them."""
        return _get(torch.Tensor.grad_fn, self) if self._leaf is None else None

    @property
    def grad_dtype(self) -> Any:
        """As of a leaf: torch would not say it of another tensor."""
        me: Any = self
        return _get(_GRAD_DTYPE, self) if self._leaf is None else me.dtype

    @grad_dtype.setter
    def grad_dtype(self, value: torch.dtype | None) -> None:
        _GRAD_DTYPE.__set__(self, value)

    @property
    def _version(self) -> int:
        """The parameter's: an update counts."""
        me: Any = self
        return compat.version(me.root)

    @property
    def requires_grad(self) -> bool:
        if self._leaf is None:
            return bool(_get(_REQUIRES_GRAD, self))
        return bool(self._leaf.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @compat.within_callers
    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Freeze or train the parameter."""
        param = self._leaf
        if param is not None:
            param.requires_grad_(requires_grad)
        if param is None or (requires_grad and not is_trained(self)):
            _TENSOR.requires_grad_(self, requires_grad)
            if param is not None:  # of a frozen one: no link hands its gradient on
                _TENSOR.register_post_accumulate_grad_hook(self, _hand_on)
        return self

    @compat.within_callers
    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """A hook on the parameter: its whole gradient does not come by here."""
        of: Any = self if self._leaf is None else self._leaf
        return _TENSOR.register_hook(of, hook)

    @compat.within_callers
    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        of: Any = self if self._leaf is None else self._leaf
        return _TENSOR.register_post_accumulate_grad_hook(of, hook)

    @compat.within_callers
    def retain_grad(self) -> None:
        if self._leaf is None:
            _TENSOR.retain_grad(self)

    @compat.within_callers
    def __copy__(self) -> Any:
        """As of a parameter: another one over the same memory."""
        me: Any = self
        data = me.detach()
        return data if me.is_view else nn.Parameter(data, me.requires_grad)

    @compat.opaque
    def memory(self) -> torch.Tensor:
        """A tensor in real memory with its values, for those who read through a pointer.

        Where the host is the device, it is the parameter. Elsewhere it is a copy on the device,
        which lives until a call of the model has ended; what is written to it is lost.
        """
        me: Any = self
        me.use()
        me.source.settle()
        if me.part is None and me.host.device == me.device:
            return me.host  # type: ignore[no-any-return]
        base = me.base
        if base is None:
            if me.copied is None:
                me.copied = me.fetched()
            return me.copied  # type: ignore[no-any-return]
        offset = me.host.storage_offset() - base.host.storage_offset()
        return torch.as_strided(base.memory(), me.shape, me.stride(), offset)

    @compat.within_callers
    def data_ptr(self) -> Any:
        """0 for torch itself, which describes a tensor without memory."""
        if compat.is_asked_by_user():
            return self.memory().data_ptr()
        return _TENSOR.data_ptr(self)

    @compat.within_callers
    def untyped_storage(self) -> Any:
        """That of a tensor which shares it with no other one; an empty one for torch itself."""
        if compat.is_asked_by_user():
            return compat.own_storage(self.memory())
        return _TENSOR.untyped_storage(self)

    @compat.within_callers
    def numpy(self, *, force: bool = False) -> Any:
        return self._exported(detached=force).numpy(force=force)

    @compat.within_callers
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._exported().__dlpack__(*args, **kwargs)

    @compat.opaque
    def _exported(self, *, detached: bool = False) -> Any:
        """Its memory, as a tensor that torch refuses to export where it refuses the parameter."""
        memory = self.memory().detach()
        return memory.requires_grad_(bool(self.requires_grad) and not detached)


class Same(torch.Tensor):
    """The result where a parameter is compared with itself. A dict that looks for it as a key takes
    it for found."""

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return True


def parameter_of(tensor: Any) -> Any:
    """The parameter that a proxy answers for; any other tensor itself."""
    is_proxy = isinstance(tensor, ParameterLooks) and tensor._leaf is not None
    return tensor._leaf if is_proxy else tensor


def link_of(proxy: Any) -> Any:
    """The node that hands a proxy's gradient to its parameter; None for a frozen one."""
    return _get(torch.Tensor.grad_fn, proxy)


def is_trained(proxy: Any) -> bool:
    """True if the parameter required grad when the proxy was made for it."""
    return bool(IS_TRAINED(proxy))


def in_memory(tensor: Any) -> Any:
    """A proxy's memory; any other tensor as it is."""
    return tensor._exported() if isinstance(tensor, ParameterLooks) else tensor


@compat.opaque
def _hand_on(proxy: torch.Tensor) -> None:
    """Add the gradient of a proxy that its forward has begun to train to the parameter's."""
    me: Any = proxy
    gradient = _GRAD.__get__(proxy)
    if gradient is None:  # of captured code, which hands it on itself
        return
    _GRAD.__set__(proxy, None)
    gradient = gradient.to(me.param.device)
    with torch.no_grad():
        me.param.grad = gradient if me.param.grad is None else me.param.grad + gradient


def _get(descriptor: Any, tensor: Any) -> Any:
    return descriptor.__get__(tensor)


_TENSOR: Any = torch.Tensor
_GRAD: Any = torch.Tensor.grad
_GRAD_DTYPE: Any = torch.Tensor.grad_dtype
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
IS_TRAINED = _REQUIRES_GRAD.__get__  # in C, for many at once
