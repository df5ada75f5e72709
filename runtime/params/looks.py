"""Makes a proxy's attributes and metadata equal to its parameter's, for forwards that inspect it.

Only Python's `type(p)` cannot be overridden in eager code; `p.__class__` can. In captured code
`compat.show_classes` makes Dynamo return the parameter's class for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.runtime.params.guards import Absent


class ParameterLooks:
    """The part of `StreamedParameter` that mimics its parameter."""

    __slots__ = ()
    stands_for: type[torch.Tensor] = nn.Parameter  # the parameter's class
    __dlpack_c_exchange_api__ = Absent()  # exports the memory without calling Python

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self).stands_for

    @property
    def _leaf(self) -> Any:
        """The parameter that it mimics; None for a view or outside of a model."""
        me: Any = self
        return None if me.is_view else me.param

    @property
    def _own(self) -> Any:
        """The parameter that it mimics; itself for a view or outside of a model."""
        return self if self._leaf is None else self._leaf

    def __hash__(self) -> int:
        """The parameter's hash, because a dict may have it as a key."""
        return id(self._own)

    @property
    def is_leaf(self) -> bool:
        """The parameter's `is_leaf`, although a link connects the two: Dynamo never frees its
        objects for non-leaf inputs (seen on torch 2.13)."""
        return self._leaf is not None or bool(_IS_LEAF.__get__(self))

    @property
    def grad_fn(self) -> Any:
        """None, as for a leaf, although a link connects the two."""
        return None if self._leaf is not None else link_of(self)

    @property
    def grad_dtype(self) -> Any:
        """As for a leaf; torch would warn for a non-leaf."""
        me: Any = self
        return me.dtype if self._leaf is not None else _GRAD_DTYPE.__get__(self)

    @grad_dtype.setter
    def grad_dtype(self, value: torch.dtype | None) -> None:
        _GRAD_DTYPE.__set__(self, value)

    @property
    def _version(self) -> int:
        """The parameter's version, which counts updates."""
        me: Any = self
        return compat.version(me.root)

    @property
    def requires_grad(self) -> bool:
        return bool(is_trained(self._own))

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
            if param is not None:  # of a frozen parameter: no link forwards the gradient
                _TENSOR.register_post_accumulate_grad_hook(self, _hand_on)
        return self

    @compat.within_callers
    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Register the hook on the parameter: the proxy receives only part of its gradient."""
        return _TENSOR.register_hook(self._own, hook)

    @compat.within_callers
    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        return _TENSOR.register_post_accumulate_grad_hook(self._own, hook)

    @compat.within_callers
    def retain_grad(self) -> None:
        if self._leaf is None:
            _TENSOR.retain_grad(self)

    @compat.within_callers
    def __copy__(self) -> Any:
        """Copy it like a parameter: another parameter over the same memory."""
        me: Any = self
        data = me.detach()
        return data if me.is_view else nn.Parameter(data, me.requires_grad)

    @compat.opaque
    def memory(self) -> torch.Tensor:
        """A tensor with real memory and the parameter's values, for code that reads through a
        pointer: the parameter if the host is the device, otherwise a copy on the device that lives
        until the model's call ends; writes to it are lost."""
        me: Any = self
        me.use()
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
        """0 for torch's own code, which describes a tensor without memory."""
        if compat.is_called_by_user():
            return self.memory().data_ptr()
        return _TENSOR.data_ptr(self)

    @compat.within_callers
    def untyped_storage(self) -> Any:
        """A storage that no other tensor shares; an empty one for torch's own code."""
        if compat.is_called_by_user():
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
        """Its memory, as a tensor that torch refuses to export if it refuses the parameter."""
        memory = self.memory().detach()
        return memory.requires_grad_(bool(self.requires_grad) and not detached)


class Same(torch.Tensor):
    """The result of comparing a parameter with itself, so that dict lookups find it as a key."""

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return True


def parameter_of(tensor: Any) -> Any:
    """The parameter that a proxy mimics; any other tensor unchanged."""
    is_proxy = isinstance(tensor, ParameterLooks) and tensor._leaf is not None
    return tensor._leaf if is_proxy else tensor


def in_memory(tensor: Any) -> Any:
    """A proxy's memory; any other tensor unchanged."""
    return tensor._exported() if isinstance(tensor, ParameterLooks) else tensor


@compat.opaque
def _hand_on(proxy: torch.Tensor) -> None:
    """Add a proxy's gradient to the parameter's, after a forward enabled training of the proxy."""
    me: Any = proxy
    gradient = _GRAD.__get__(proxy)
    if gradient is None:  # captured code forwards it itself
        return
    _GRAD.__set__(proxy, None)
    gradient = gradient.to(me.param.device)
    with torch.no_grad():
        me.param.grad = gradient if me.param.grad is None else me.param.grad + gradient


_TENSOR: Any = torch.Tensor
_GRAD: Any = torch.Tensor.grad
_GRAD_DTYPE: Any = torch.Tensor.grad_dtype
_IS_LEAF: Any = torch.Tensor.is_leaf
# getters in C: the node that forwards a proxy's gradient to its parameter, None if frozen; True if
# the parameter required grad when the proxy was created
link_of: Any = _TENSOR.grad_fn.__get__
is_trained: Any = _TENSOR.requires_grad.__get__
