"""Other tensors in the memory of a parameter, which do not follow it into its bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from megacompile import compat, notices
from megacompile.packed import is_wrapper


class AliasNotice:
    """Says once of a model, before parameters move to buckets, that other tensors stay behind."""

    def __init__(self) -> None:
        self.said = False

    def of_parts(self, model: nn.Module, params: Iterable[nn.Parameter] | None = None) -> None:
        """Say so of those of these parameters that are parts of a larger tensor, as of a flat
        buffer. One that got another tensor of its own size (`p.data = backup`) is none: loops that
        do so in each step (SAM, LocalSGD) have done with that tensor.

        Args:
            model: that they are of.
            params: default: all of its.
        """
        params = model.parameters() if params is None else params
        self(model, [param for param in params if _is_part(param)])

    def __call__(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Say so of those of these parameters that share their memory."""
        params = [p for p in params if p.numel() and not is_wrapper(p) and not compat.is_sharded(p)]
        known = Counter(compat.storage_key(param) for param in params)
        shared = {id(p) for p in params if compat.storage_users(p) > known[compat.storage_key(p)]}
        if not shared or self.said:
            return
        self.said = True
        name = next(name for name, param in model.named_parameters() if id(param) in shared)
        notices.warn(
            f"megacompile: parameter {type(model).__name__}.{name} shares its memory with another "
            "tensor (a flat buffer; a state dict that load_state_dict(assign=True) got). It moves "
            "to a bucket now, and the other tensor does not, so neither will see changes of the "
            "other one. Write to the parameter itself, with torch.no_grad(): "
            f"model.get_parameter({name!r}).copy_(other); and read model.state_dict() anew "
            f"({len(shared)} parameters; said once)"
        )


def _is_part(param: nn.Parameter) -> bool:
    return (
        not param.is_meta
        and not is_wrapper(param)
        and not compat.is_sharded(param)
        and param.untyped_storage().nbytes() > param.numel() * param.dtype.itemsize
    )
