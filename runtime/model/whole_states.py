"""Whole state dicts of a model that ranks share.

A loop that wraps its model in a DistributedDataParallel assumes that each rank has the whole model:
its first rank saves `state_dict()`. With DTensors it would save only its own rows, and a model that
loads them would silently take them for whole tensors.

    make_whole   in every rank from then on: each call gathers, and all ranks must call it
    Saving       for a block, in the rank that writes: all ranks gather when it begins
    Shapes       for a block, shapes only: nothing is gathered
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megacompile import compat
from megacompile.errors import HostMemoryError
from megacompile.host_memory import available_bytes
from megacompile.runtime.device.ranks import ranks_of
from megacompile.runtime.optim.blockwise import to_plain
from megacompile.text import format_bytes


def make_whole(module: nn.Module) -> None:
    """Make `state_dict()` of a module, and of its optimizers that step from now on, gather shared
    tensors into host memory. From then on all ranks must call it together."""
    if module in _MODULES:
        return
    _MODULES[module] = module.register_state_dict_post_hook(_of_module)
    if not _LISTENING:
        _LISTENING.append(register_optimizer_step_pre_hook(_before_step))


def _of_module(
    module: nn.Module, found: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    del local_metadata
    if is_saved(module):
        return
    for name, value in found.items():
        if name.startswith(prefix) and not isinstance(value, nn.Parameter):  # `keep_vars`
            found[name] = whole_on_host(value)


def _of_optimizer(optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    if any(optimizer in each.optimizers for each in _SAVING):
        return found
    gathered: dict[str, Any] = compat.tree_map(whole_on_host, found)
    return gathered


def whole_on_host(value: Any) -> Any:
    """The full tensor of a DTensor, in host memory; any other value unchanged. All ranks call
    this."""
    if not compat.is_sharded(value):
        return value
    mine = to_plain(value.detach())  # its guard has waited for work in flight
    return ranks_of(mine).all_of(mine).cpu()


@compat.opaque
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    if optimizer in _OPTIMIZERS or not compat.takes_hooks(optimizer):
        return
    ours = {id(param) for module in list(_MODULES) for param in module.parameters()}
    if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
        _OPTIMIZERS[optimizer] = optimizer.register_state_dict_post_hook(_of_optimizer)


class Saving:
    """A block in which one rank saves: its state dicts are whole, the other ranks' are unchanged.

    All ranks enter it, gather one tensor at a time, and leave it together: an error in one rank
    raises in all. Nested blocks do nothing.

    Args:
        modules: modules that ranks share.
        optimizers: optimizers, of these modules or others.
        writes: True if this rank saves; the others keep nothing.

    Raises:
        HostMemoryError: on entry, if the writing rank has too little memory for all tensors.
        RankError: another rank makes a different call or has stopped.
    """

    def __init__(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], *, writes: bool
    ) -> None:
        nested = bool(_SAVING)
        self.modules = [] if nested else list(modules)
        self.optimizers = [] if nested else list(optimizers)
        self.gathers = nested  # or an outer block is active
        self._writes = writes
        self._states: dict[Optimizer, dict[str, Any]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Saving:
        shared = next(filter(compat.is_sharded, self._tensors()), None)
        if shared is None:
            return self
        self.gathers = True
        ranks = ranks_of(shared)
        with self._stack as stack:
            with ranks.together(self._what):  # before any rank gathers
                self._check_memory()
            stack.enter_context(ranks.together(self._what))
            for module in self.modules:
                whole = self._gather_module(module)
                replace = functools.partial(_put, whole if self._writes else {})
                stack.callback(module.register_state_dict_post_hook(replace).remove)
            for optimizer in self.optimizers:
                self._gather_states(optimizer)
                hook = optimizer.register_state_dict_post_hook(self._replace_states)
                stack.callback(hook.remove)
            _SAVING.append(self)
            stack.callback(_SAVING.remove, self)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)

    @property
    def _what(self) -> str:
        named = self.modules or self.optimizers
        return f"saving {', '.join(type(each).__name__ for each in named)} in one rank"

    def _tensors(self) -> Iterator[torch.Tensor]:
        """The tensors to save, each once."""
        for module in self.modules:
            yield from module.parameters()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _check_memory(self) -> None:
        needed = sum(t.numel() * t.itemsize for t in self._tensors() if compat.is_sharded(t))
        available = available_bytes()
        if self._writes and needed > available:
            raise HostMemoryError(
                f"{self._what}: it needs {format_bytes(needed)} more of host memory for whole "
                f"tensors, and {format_bytes(available)} is free; save with "
                "megacompile.save(model, folder) in all ranks, which gathers one tensor at a time "
                "(with Trainer from a TrainerCallback, and save_strategy='no'), or with "
                "torch.distributed.checkpoint"
            )

    def _gather_module(self, module: nn.Module) -> dict[str, torch.Tensor]:
        made: dict[int, torch.Tensor] = {}
        kept: dict[str, torch.Tensor] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if not compat.is_sharded(value):
                continue
            if id(value) not in made:
                whole = whole_on_host(value)
                made[id(value)] = whole if self._writes else torch.empty(0)
                del whole
            kept[name] = made[id(value)]  # tied tensors stay tied
        return kept

    def _gather_states(self, optimizer: Optimizer) -> None:
        def gather(value: Any) -> Any:
            whole = whole_on_host(value)
            return whole if self._writes else None

        self._states[optimizer] = compat.tree_map(gather, optimizer.state_dict())

    def _replace_states(self, optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        return self._states[optimizer] if self._writes else found


class Shapes:
    """A block in which the modules' state dicts have full shapes, in untouched memory: each tensor
    has its own memory, and tied tensors share theirs."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._stack = ExitStack()
        for module in modules:
            shared = {
                name: value
                for name, value in module.state_dict(keep_vars=True).items()
                if compat.is_sharded(value)
            }
            each = {id(v): torch.empty(v.shape, dtype=v.dtype) for v in shared.values()}
            made = {name: each[id(value)] for name, value in shared.items()}
            replace = functools.partial(_put, made)
            self._stack.callback(module.register_state_dict_post_hook(replace).remove)

    def __enter__(self) -> None:
        self._stack.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)


def _put(
    values: Mapping[str, torch.Tensor],
    module: nn.Module,
    found: dict[str, Any],
    prefix: str,
    local_metadata: Any,
) -> None:
    """A state dict hook that inserts these values, unless the caller asks for parameters
    (`keep_vars`)."""
    del module, local_metadata
    for name, value in values.items():
        if not isinstance(found.get(prefix + name), nn.Parameter):  # `keep_vars`
            found[prefix + name] = value


def is_saved(module: nn.Module) -> bool:
    """True inside of a block of `Saving`."""
    return any(module in saving.modules for saving in _SAVING)


_MODULES: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_OPTIMIZERS: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
_LISTENING: list[Any] = []  # hooks on the steps of all optimizers
_SAVING: list[Saving] = []  # the active block
