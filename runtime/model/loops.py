"""Training loops that save a shared model in one rank: transformers' Trainer and Accelerate.

All ranks call the methods below; the stock methods then write only the first rank's `state_dict()`.
So all ranks gather first, one tensor at a time, and the writing rank's state dicts are whole until
the method returns:

    Trainer        save_model, _save_optimizer_and_scheduler
    Accelerator    save_state, get_state_dict, called by save_model and others

`Accelerator.load_state` finds tied tensors by their memory, and DTensors have no storage. Nothing
is imported: a class is patched once its module has been imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megacompile import compat
from megacompile.runtime.model.whole_states import Saving, Shapes

Method = Callable[..., Any]
_SHARED: list[Callable[[nn.Module], list[nn.Module]]] = []  # finds the shared modules in a model


def attend(shared_in: Callable[[nn.Module], list[nn.Module]]) -> None:
    """Makes loops save shared models. Checks for newly imported loops when a model is moved and at
    the step of any optimizer. (Trainer and Accelerate first move a model.)

    Args:
        shared_in: returns the modules in a model that ranks share.
    """
    if not _SHARED:
        _SHARED.append(shared_in)
        register_optimizer_step_pre_hook(_before_step)
    take_over()


@compat.opaque
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del optimizer, args, kwargs
    take_over()


def take_over() -> None:
    """Wrap the methods of imported loops, once, if ranks share a model."""
    if not _SHARED:
        return
    for (module, kind, name), ours in _METHODS.items():
        imported = sys.modules.get(module)
        holder = getattr(imported, kind, None) if kind else imported
        stock = getattr(holder, name, None)
        if stock is not None and (module, kind, name) not in _TAKEN:
            _TAKEN.add((module, kind, name))
            setattr(holder, name, _around(stock, ours))


def _around(stock: Method, ours: Method) -> Method:
    """A method that calls ours with the bound stock method as its first argument."""

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(functools.partial(stock, self), self, *args, **kwargs)

    return method


def _saving(models: list[Any], optimizers: list[Any], *, writes: bool) -> Saving:
    shared = [s for m in models if isinstance(m, nn.Module) for s in _SHARED[0](m)]
    stock = [getattr(each, "optimizer", each) for each in optimizers]  # in Accelerate's wrapper
    return Saving(shared, [o for o in stock if isinstance(o, Optimizer)], writes=writes)


def _trainer_model(stock: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    with _saving([trainer.model], [], writes=trainer.args.should_save):
        return stock(*args, **kwargs)


def _trainer_optimizer(stock: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    with _saving([], [trainer.optimizer], writes=trainer.args.should_save):
        return stock(*args, **kwargs)


def _accelerate_state(stock: Method, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    models, optimizers = accelerator._models, accelerator._optimizers
    with _saving(models, optimizers, writes=_writes(accelerator)):
        return stock(*args, **kwargs)


def _accelerate_state_dict(
    stock: Method, accelerator: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return an empty dict in ranks that write nothing, like FSDP2."""
    writes = _writes(accelerator)
    with _saving([model], [], writes=writes) as saving:
        state_dict = stock(model, *args, **kwargs)
    return state_dict if writes or not saving.gathers else {}


def _writes(accelerator: Any) -> bool:
    """True if Accelerate writes files in this rank."""
    project = accelerator.project_configuration
    if project.save_on_each_node:
        return bool(accelerator.is_local_main_process)
    return bool(accelerator.is_main_process)


def _load_model(stock: Method, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with Shapes(_SHARED[0](model)):
        return stock(*args, **kwargs)


_METHODS: dict[tuple[str, str, str], Method] = {  # module, class or "", name
    ("transformers.trainer", "Trainer", "save_model"): _trainer_model,
    ("transformers.trainer", "Trainer", "_save_optimizer_and_scheduler"): _trainer_optimizer,
    ("accelerate.accelerator", "Accelerator", "save_state"): _accelerate_state,
    ("accelerate.accelerator", "Accelerator", "get_state_dict"): _accelerate_state_dict,
    ("accelerate.checkpointing", "", "load_model"): _load_model,
}
_TAKEN: set[tuple[str, str, str]] = set()
