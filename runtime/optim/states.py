"""Optimizer states in 8 bits, as the tensors that `optimizer.state` holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megacompile import compat
from megacompile.runtime.optim.blockwise import dequantize, quantize


class BlockwiseTensor(torch.Tensor):
    """A float32 tensor whose data are 8-bit codes and a largest magnitude for each block.

    Reading returns float32 values; writing in place quantizes again. `codes` is (numel,) uint8,
    `absmax` (blocks,) float32, in the order of the parameter's memory; `settle` waits until
    nothing in the background writes to them.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    signed: bool
    settle: Callable[[], None]

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        codes: torch.Tensor,
        absmax: torch.Tensor,
        *,
        signed: bool,
        settle: Callable[[], None],
    ) -> BlockwiseTensor:
        looks = torch.empty_like(like, dtype=torch.float32, device="meta")
        self: BlockwiseTensor = compat.wrapper(cls, looks, codes.device)
        self.codes, self.absmax, self.signed, self.settle = codes, absmax, signed, settle
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"{type(self).__name__}({self.plain()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def plain(self) -> torch.Tensor:
        """The values, float32, as a tensor of their own."""
        self.settle()
        values = dequantize(self.codes, self.absmax, self.signed)
        return values.as_strided(self.shape, self.stride())

    def store(self, values: torch.Tensor) -> None:
        """Quantize new values, of this tensor's shape."""
        self.settle()
        laid_out = torch.empty_strided(
            self.shape, self.stride(), dtype=torch.float32, device=self.codes.device
        )
        flat = laid_out.copy_(values).as_strided((self.numel(),), (1,))
        for buffer, new in zip((self.codes, self.absmax), quantize(flat, self.signed), strict=True):
            buffer.copy_(new)

    def clear(self) -> None:
        """Zeros, as quantizing them returns: a billion of those would take seconds."""
        self.settle()
        code, _ = quantize(torch.zeros(1, device=self.codes.device), self.signed)
        self.codes.fill_(code.item())
        self.absmax.zero_()

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        made: dict[int, tuple[BlockwiseTensor, torch.Tensor]] = {}

        def plain(value: Any) -> Any:
            if not isinstance(value, BlockwiseTensor):
                return value
            if id(value) not in made:
                made[id(value)] = (value, value.plain())
            return made[id(value)][1]

        given, given_kwargs = compat.tree_map(plain, (args, kwargs))
        result = func(*given, **given_kwargs)
        if compat.is_mutable(func):
            for value in compat.written(func, args, kwargs):
                if isinstance(value, BlockwiseTensor):
                    value.store(made[id(value)][1])
            back = {id(values): tensor for tensor, values in made.values()}
            result = compat.tree_map(lambda value: back.get(id(value), value), result)
        return result


def to_plain(value: Any) -> Any:
    """8-bit states inside of nested containers as float32 tensors; anything else as it is."""
    return compat.tree_map(_plain, value)


def _plain(value: Any) -> Any:
    mine = compat.local(value)
    return compat.like(value, mine.plain()) if isinstance(mine, BlockwiseTensor) else value


def is_shared(state: torch.Tensor) -> bool:
    """Is a state's memory held under another name? The bucket and the optimizer do.

    The same of a gradient's: it has two names too, `p.grad` and the bucket's.
    """
    return compat.storage_users(state) > 2
