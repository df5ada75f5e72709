"""Training loops that save a model that ranks share in one rank: transformers' Trainer, Accelerate,
and loops that wrap their model in a DistributedDataParallel.

The first rank of such a loop saves `state_dict()`. With DTensors it would save only its own rows.

    make_whole   in every rank from then on: each call gathers, and all ranks must call it
    saving       for a block, in the rank that writes: all ranks gather when it begins
    shapes       for a block, shapes only: nothing is gathered

All ranks call these methods, around which `take_over` puts such a block once their module has been
imported:

    Trainer        save_model, _save_optimizer_and_scheduler
    Accelerator    save_state, get_state_dict, called by save_model and others

`Accelerator.load_state` finds tied tensors by their memory, and DTensors have no storage.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megacompile import compat
from megacompile.errors import HostMemoryError
from megacompile.host_memory import available_bytes
from megacompile.runtime.device.ranks import ranks_of, whole_of
from megacompile.runtime.optim.blockwise import to_plain
from megacompile.text import format_bytes


def make_whole(module: nn.Module) -> None:
    """Make `state_dict()` of a module, and of its optimizers that step from now on, gather shared
    tensors into host memory. From then on all ranks must call it together."""

    def gather(module: nn.Module, found: dict[str, Any], prefix: str, _: object) -> None:
        for name, value in found.items() if not is_saved(module) else ():
            if name.startswith(prefix) and not isinstance(value, nn.Parameter):  # `keep_vars`
                found[name] = whole_on_host(value)

    if module not in _MODULES:
        _MODULES[module] = module.register_state_dict_post_hook(gather)


def _of_optimizer(optimizer: Optimizer, found: dict[str, Any]) -> Any:
    is_saving = any(optimizer in optimizers for _, optimizers in _SAVING)
    return found if is_saving else compat.tree_map(whole_on_host, found)


def whole_on_host(value: Any) -> Any:
    """The full tensor of a DTensor, in host memory, a collective; any other value unchanged."""
    if not compat.is_sharded(value):
        return value
    return whole_of(to_plain(value.detach())).cpu()  # its guard has waited for work in flight


@compat.opaque
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    take_over()
    if optimizer in _OPTIMIZERS or not compat.takes_hooks(optimizer):
        return
    ours = {id(param) for module in list(_MODULES) for param in module.parameters()}
    if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
        _OPTIMIZERS[optimizer] = optimizer.register_state_dict_post_hook(_of_optimizer)


@contextmanager
def saving(given: Sequence[Any], *, writes: bool) -> Iterator[bool]:
    """A block in which one rank saves these models and optimizers (`writes`): its state dicts are
    whole, the other ranks' are unchanged.

    All ranks enter it, gather one tensor at a time, and leave it together: an error in one rank
    raises in all (RankError), such as too little memory for all tensors in the rank that writes
    (HostMemoryError). Nested blocks do nothing. Yields True if tensors were gathered.
    """
    modules = [shared for each in given for shared in _shared_in(each)]
    others = (each for each in given if not isinstance(each, nn.Module))
    every = (getattr(each, "optimizer", each) for each in others)  # in Accelerate's wrapper
    optimizers = [each for each in every if isinstance(each, Optimizer)]
    values: list[Any] = [param for module in modules for param in module.parameters()]
    for optimizer in optimizers:
        values += [value for state in optimizer.state.values() for value in state.values()]
    shared = [value for value in values if compat.is_sharded(value)]
    if _SAVING or not shared:
        yield bool(_SAVING)
        return
    names = ", ".join(type(each).__name__ for each in modules or optimizers)
    what, ranks = f"saving {names} in one rank", ranks_of(shared[0])
    with ExitStack() as stack:
        with ranks.together(what):  # before any rank gathers
            needed, available = sum(t.numel() * t.itemsize for t in shared), available_bytes()
            if writes and needed > available:
                raise HostMemoryError(
                    f"{what}: it needs {format_bytes(needed)} more of host memory for whole "
                    f"tensors, and {format_bytes(available)} is free; save with "
                    "megacompile.save(model, folder) in all ranks, which gathers one tensor at a "
                    "time (with Trainer from a TrainerCallback, and save_strategy='no'), or with "
                    "torch.distributed.checkpoint"
                )
        del values, shared
        stack.enter_context(ranks.together(what))
        for module in modules:
            stack.callback(_show(module, functools.partial(_gather, writes)))
        for optimizer in optimizers:
            states = compat.tree_map(functools.partial(_gather, writes), optimizer.state_dict())
            if writes:
                hook = optimizer.register_state_dict_post_hook(lambda *_, found=states: found)
                stack.callback(hook.remove)
        _SAVING.append((modules, optimizers))
        stack.callback(_SAVING.clear)
        yield True


def _show(module: nn.Module, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Show the result of `make` for each shared tensor in state dicts, until the function that this
    returns is called; None shows the tensor itself. Tied tensors stay tied."""
    every = module.state_dict(keep_vars=True).items()
    shared = {name: value for name, value in every if compat.is_sharded(value)}
    made = {key: make(value) for key, value in {id(v): v for v in shared.values()}.items()}

    def put(_: nn.Module, found: dict[str, Any], prefix: str, *__: Any) -> None:
        for name, value in shared.items():
            shown = made[id(value)]
            if shown is not None and not isinstance(found.get(prefix + name), nn.Parameter):
                found[prefix + name] = shown  # but with `keep_vars`

    remove: Callable[[], None] = module.register_state_dict_post_hook(put).remove
    return remove


def _gather(keeps: bool, value: Any) -> Any:
    whole = whole_on_host(value)
    return whole if keeps else None


@contextmanager
def shapes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A block in which the modules' state dicts have full shapes, in untouched memory: each tensor
    has its own memory, and tied tensors share theirs."""
    with ExitStack() as stack:
        for module in modules:
            stack.callback(_show(module, lambda v: torch.empty(v.shape, dtype=v.dtype)))
        yield


def is_saved(module: nn.Module) -> bool:
    """True inside of a block of `saving`."""
    return any(module in modules for modules, _ in _SAVING)


_MODULES: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_OPTIMIZERS: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
_SAVING: list[tuple[Sequence[nn.Module], Sequence[Optimizer]]] = []  # of the active block


Method = Callable[..., Any]
_ATTENDED: list[Any] = []  # the hook on optimizers' steps, once ranks share a model


def attend() -> None:
    """Make loops save models that ranks share. Checks for newly imported loops when a model is
    moved (Trainer and Accelerate do it first) and at the step of any optimizer."""
    if not _ATTENDED:
        _ATTENDED.append(register_optimizer_step_pre_hook(_before_step))
    take_over()


def take_over() -> None:
    """Wrap the methods of imported loops, once, if ranks share a model."""
    if not _ATTENDED:
        return
    for (module, kind, name), ours in _METHODS.items():
        imported = sys.modules.get(module)
        holder = getattr(imported, kind, None) if kind else imported
        if hasattr(holder, name):
            compat.replace(holder, name, ours)


def streamed_in(module: object) -> list[Any]:
    """The `StreamedModel`s of a module and of those in it."""
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return [call for call in map(compat.compiled_call, modules) if hasattr(call, "buckets")]


def _shared_in(model: object) -> list[nn.Module]:
    """The megacompiled modules in a model that ranks share."""
    return [each.model for each in streamed_in(model) if each.options.mesh is not None]


def _trainer(kind: str, stock: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    with saving([getattr(trainer, kind)], writes=trainer.args.should_save):
        return stock(trainer, *args, **kwargs)


def _accelerate_state(stock: Method, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    given = [*accelerator._models, *accelerator._optimizers]
    with saving(given, writes=_writes(accelerator)):
        return stock(accelerator, *args, **kwargs)


def _accelerate_state_dict(
    stock: Method, accelerator: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return an empty dict in ranks that write nothing, like FSDP2."""
    writes = _writes(accelerator)
    with saving([model], writes=writes) as gathers:
        state_dict = stock(accelerator, model, *args, **kwargs)
    return state_dict if writes or not gathers else {}


def _writes(accelerator: Any) -> bool:
    """True if Accelerate writes files in this rank."""
    project = accelerator.project_configuration
    if project.save_on_each_node:
        return bool(accelerator.is_local_main_process)
    return bool(accelerator.is_main_process)


def _load_model(stock: Method, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with shapes(_shared_in(model)):
        return stock(model, *args, **kwargs)


_METHODS: dict[tuple[str, str, str], Method] = {  # module, class or "", name
    ("transformers.trainer", "Trainer", "save_model"): functools.partial(_trainer, "model"),
    ("transformers.trainer", "Trainer", "_save_optimizer_and_scheduler"): functools.partial(
        _trainer, "optimizer"
    ),
    ("accelerate.accelerator", "Accelerator", "save_state"): _accelerate_state,
    ("accelerate.accelerator", "Accelerator", "get_state_dict"): _accelerate_state_dict,
    ("accelerate.checkpointing", "", "load_model"): _load_model,
}
