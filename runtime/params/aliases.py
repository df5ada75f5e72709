"""Other tensors in the memory of a parameter, which do not follow it into its bucket."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from megacompile import compat, notices
from megacompile.packed import is_wrapper

_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})


class AliasNotice:
    """Says once of a model, before parameters move to buckets, that other tensors stay behind."""

    def __init__(self) -> None:
        self.said = False

    def of_model(self, model: nn.Module) -> None:
        """Say so of the parameters of a model that is not megacompiled yet.

        An autograd graph may have a part in a parameter's storage too, and is no reason to warn. So
        where a storage has other users than parameters, Python's tensors are looked through.
        """
        shared = _shared(model.parameters())
        if shared:
            others = _others(shared, {*map(id, model.parameters()), *_computed(model)})
            self._say(model, [p for p in shared if compat.storage_key(p) in others], others)

    def of_parts(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Say so of those of these parameters that are parts of a larger tensor, as of a flat
        buffer. One that got another tensor of its own size (`p.data = backup`) is none: loops that
        do so in each step (SAM, LocalSGD) have done with that tensor.
        """
        self(model, [param for param in params if _is_part(param)])

    def of_moving(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Say so of parameters that others have names for, and whose bucket is about to move."""
        self._say(model, list(params), {})

    def __call__(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Say so of those of these parameters that share their memory."""
        self._say(model, [] if self.said else _shared(params), {})

    def _say(
        self, model: nn.Module, shared: list[nn.Parameter], others: Mapping[int, list[torch.Tensor]]
    ) -> None:
        if not shared or self.said:
            return
        self.said = True
        ids = {id(param) for param in shared}
        name, first = next((n, param) for n, param in model.named_parameters() if id(param) in ids)
        where = _where(model, others.get(compat.storage_key(first), []))
        notices.warn(
            f"megacompile: parameter {type(model).__name__}.{name} shares its memory with another "
            f"tensor ({where}). It moves to a bucket now, and the other tensor does not, so "
            "neither will see changes of the other one. Write to the parameter itself, with "
            f"torch.no_grad(): model.get_parameter({name!r}).copy_(other); and read "
            f"model.state_dict(), or make a view, anew ({len(shared)} parameters; said once)"
        )


def _shared(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those in whose memory there are other tensors than these parameters."""
    params = [param for param in params if param.numel() and _has_memory(param)]
    known = Counter(compat.storage_key(param) for param in params)
    return [p for p in params if compat.storage_users(p) > known[compat.storage_key(p)]]


def _has_memory(param: nn.Parameter) -> bool:
    return not param.is_meta and not is_wrapper(param) and not compat.is_sharded(param)


def _is_part(param: nn.Parameter) -> bool:
    needed_bytes = param.numel() * param.dtype.itemsize
    return _has_memory(param) and param.untyped_storage().nbytes() > needed_bytes


def _computed(model: nn.Module) -> Iterator[int]:
    """Ids of the attributes that `torch.nn.utils.spectral_norm` computes in each forward."""
    for module in model.modules():
        for name, _ in module.named_parameters(recurse=False):
            yield id(vars(module).get(name.removesuffix("_orig")))


def _others(params: Iterable[nn.Parameter], known: set[int]) -> dict[int, list[torch.Tensor]]:
    """Tensors of Python's in the memory of parameters, by the key of the storage.

    Args:
        known: ids of tensors that are left out.
    """
    keys = {compat.storage_key(param) for param in params}
    found: dict[int, list[torch.Tensor]] = {}
    for value in gc.get_objects():
        if type(value) in _PLAIN and id(value) not in known and _has_storage(value):
            key = compat.storage_key(value)
            if key in keys:
                found.setdefault(key, []).append(value)
    return found


def _has_storage(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_meta
    return strided and not compat.is_of_transform(tensor)


def _where(model: nn.Module, tensors: Iterable[torch.Tensor]) -> str:
    """The place of other tensors, as far as it is known."""
    ids = set(map(id, tensors))
    for path, module in model.named_modules():
        for name, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
            if id(value) in ids:
                return ".".join(filter(None, (type(model).__name__, path, name)))
    return (
        "a state_dict() or a view that was made before; a flat buffer; a state dict that "
        "load_state_dict(assign=True) got"
    )
