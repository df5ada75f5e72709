"""DistributedDataParallel with a megacompiled model: supported and refused combinations.

DDP reduces gradients in hooks on AccumulateGrad nodes, which it looks up when it is constructed. If
a parameter's data moves to another device, the parameter gets a new node: the hooks on the old one
never run again, and torch does not report it. Megatron and Apex register Python hooks on such nodes
too. So

    DDP, or hooks, before the parameters move    refused: in megacompile() or, if it cannot be
                                                 detected there, at the first call within the DDP
    DDP(megacompile(model))                      works; buckets stay where they are from then on
    parameters where DDP cannot reduce them      refused when the DDP is constructed
    a model that ranks share (mesh=)             works: the DDP passes through, because gradients
                                                 are averaged already (`pass_through`)
    nn.DataParallel, around or inside            refused if there is a GPU: threads would call
                                                 copies of the module that are not streamed

Accelerate, and therefore Trainer, wraps a model in a DDP unless the model is marked as prepared.
Without torchrun, Trainer creates a DataParallel if it sees several GPUs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from megacompile import compat, notices
from megacompile.errors import ModelError
from megacompile.options import Options
from megacompile.runtime.device.background import WeakIdSet
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.model import loops
from megacompile.runtime.model.pass_through import (
    PassThrough,
    group_of,
    refuse_other_wraps,
    sends_buffers,
)
from megacompile.runtime.model.sharding import divide_loaded
from megacompile.runtime.params.accumulators import Accumulator

_BACKENDS = 'init_process_group("cpu:gloo,cuda:nccl")'
_PREPARED = "_is_accelerate_prepared"  # the attribute by which Accelerate marks prepared models
_WRAP = "model = DistributedDataParallel(megacompile(model))"
_COPIES = (
    "which calls copies of the module, one on each GPU, and copies are not streamed; leave it "
    "out: use one GPU (CUDA_VISIBLE_DEVICES=0), or start a process for each GPU (torchrun, with "
    "mesh= or a DistributedDataParallel)"
)


class DataParallel:
    """A megacompiled model's view of the DistributedDataParallel around or inside it.

    Raises:
        ModelError: the model contains a DistributedDataParallel although its backward updates or
            ranks share it, or it contains a `torch.nn.DataParallel` over GPUs.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model = model
        self.device = options.device
        self.updates = updates = options.optimizer is not None
        self.planned = options.plans and options.resident is None
        self._checked: weakref.ref[DistributedDataParallel] | None = None
        if any(isinstance(m, nn.DataParallel) and m.device_ids for m in model.modules()):
            raise ModelError(
                f"megacompile(): {type(model).__name__} has a DataParallel in it, {_COPIES}"
            )
        if updates and _inside(model):
            raise ModelError(_updates_refused("megacompile()", type(model).__name__))
        self.mesh = options.mesh
        self.shared = self.mesh is not None
        if self.shared:
            if _inside(model):
                raise ModelError(_shared_refused(type(model).__name__))
            setattr(model, _PREPARED, True)
            self._loading = model.register_load_state_dict_pre_hook(divide_loaded)
            loops.attend(_shared_in)
        _LIVE.add(self)
        compat.check_data_parallel(DistributedDataParallel, _check_wrap)
        compat.check_data_parallel(nn.DataParallel, _check_copies)

    def around(self, ddp: DistributedDataParallel) -> str:
        """Check a DDP at a call within it; returns the reason why buckets stay where they are.

        Raises:
            ModelError: the DDP would not reduce the model's gradients.
        """
        why = "a DistributedDataParallel is around"
        if self._checked is None or self._checked() is not ddp:
            held = {id(param) for param in compat.ddp_parameters(ddp)}
            params = {n: p for n, p in self.model.named_parameters() if id(p) in held}
            if self.updates and any(param.requires_grad for param in params.values()):
                raise ModelError(_updates_refused("forward", type(self.model).__name__))
            refuse_other_device(type(self.model).__name__, params, ddp.device_type)
            self._checked = weakref.ref(ddp)
            if self.planned and any(p.device != self.device for p in params.values()):
                self.say(why)
        return why

    @property
    def around_last(self) -> bool:
        """True if the DistributedDataParallel around the last call still exists."""
        return self._checked is not None and self._checked() is not None

    def end(self) -> None:
        """Undo the changes to the model, which becomes a plain one again."""
        _LIVE.discard(self)
        if self.shared:
            vars(self.model).pop(_PREPARED, None)
            self._loading.remove()

    def forget(self) -> None:
        """Check again at the next call, because parameters may have moved."""
        self._checked = None

    @torch.inference_mode(False)  # parameters have no AccumulateGrad nodes in inference mode
    def holds(self, moving: Collection[nn.Parameter]) -> str:
        """The reason why these parameters must stay on their device; "" if they may move."""
        if _inside(self.model):
            return "the model has a DistributedDataParallel in it"
        name = _hooked(self.model, {id(param) for param in moving})
        return f"a hook is registered on the AccumulateGrad node of {name!r}" if name else ""

    def say(self, why: str) -> None:
        """Warn once that buckets stay on their device."""
        notices.warn_once(
            "parameters that stay",
            f"megacompile: every parameter stays on its device, because {why}, and a move would "
            'lose its hooks; for layers on the GPU, pass resident="all" or resident="8GiB" to '
            "megacompile() before that (shown once)",
            of=self,
        )

    def is_among(self, modules: Collection[int]) -> bool:
        """True if the model is megacompiled and its id is among these ids of modules."""
        return id(self.model) in modules and compat.compiled_call(self.model) is not None

    def check_wrap(self, module: nn.Module, given: Mapping[str, Any]) -> None:
        """Raise if a DDP around `module`, which contains this model, could not reduce.

        Args:
            module: the wrapped module.
            given: the arguments of DistributedDataParallel.
        """
        name = type(self.model).__name__
        trained = [param for param in self.model.parameters() if param.requires_grad]
        if self.updates and trained:
            raise ModelError(_updates_refused("DistributedDataParallel()", name))
        ids = given.get("device_ids") or given.get("output_device")
        refuse_unreduced(
            name,
            computes_on=self.device.type,
            lies_on={param.device.type for param in trained},
            others_on={param.device.type for param in module.parameters()},
            device_ids=ids,
            reduces_on=None if given.get("device_mesh") else devices_of(given.get("process_group")),
        )


def refuse_moves(
    model: nn.Module,
    goes_to: Callable[[nn.Parameter], str],
) -> None:
    """Raise if megacompile() would move a parameter whose AccumulateGrad node has a hook.

    Args:
        model: the model to megacompile.
        goes_to: returns the type of the device to which a parameter will move.

    Raises:
        ModelError: with what to write instead.
    """
    moving = {id(p): p for p in model.parameters() if p.device.type != goes_to(p)}
    if not moving:
        return
    name, (first, *_) = type(model).__name__, moving.values()
    moves = f"moves parameters from {first.device.type} to {goes_to(first)}"
    for ddp in _inside(model):
        if any(id(param) in moving for param in compat.ddp_parameters(ddp)):
            raise ModelError(
                f"megacompile(): {name} has a DistributedDataParallel in it, and megacompile() "
                f"{moves}, where it would not reduce their gradients; make the "
                f"DistributedDataParallel after megacompile(): {_WRAP}, after {_BACKENDS}"
            )
    hooked = _hooked(model, moving.keys())
    if hooked:
        raise ModelError(
            f"megacompile(): a hook is registered on the AccumulateGrad node of {name}.{hooked}, "
            f"and megacompile() {moves}, so the hook would never be called; register hooks on "
            "nodes after megacompile()"
        )


def refuse_other_device(name: str, params: Mapping[str, nn.Parameter], made_for: str) -> None:
    """Raise if parameters are not on the device type that their DDP was constructed for.

    Raises:
        ModelError: with what to write instead.
    """
    for param_name, param in params.items():
        if param.requires_grad and param.device.type != made_for:
            raise ModelError(
                f"{name}: its DistributedDataParallel was built when parameter {param_name!r} was "
                f"on {made_for}; now it is on {param.device.type}, and its gradient would not be "
                f"reduced; make the DistributedDataParallel after megacompile(): {_WRAP}, after "
                f"{_BACKENDS}"
            )


def refuse_unreduced(
    name: str,
    *,
    computes_on: str,
    lies_on: Collection[str],
    others_on: Collection[str],
    device_ids: object,
    reduces_on: Collection[str] | None,
) -> None:
    """Raise if a DDP does not accept parameters in host memory, or could not reduce them.

    Args:
        name: name of the megacompiled model.
        computes_on: its device type.
        lies_on: the device types of its trained parameters.
        others_on: the device types of all parameters of the wrapped module.
        device_ids: the DDP's argument, if any.
        reduces_on: device types that the process group has a backend for; None: unknown.

    Raises:
        ModelError: with what to write instead.
    """
    if "cpu" not in lies_on or computes_on == "cpu":
        return  # they are where plain parameters would be
    where = f"DistributedDataParallel(): {name} is megacompiled and its parameters are on the host"
    write = f"write {_BACKENDS} and DistributedDataParallel(model)"
    if len(set(others_on)) > 1:
        raise ModelError(
            f"{where}, but others are on {', '.join(sorted(set(others_on) - {'cpu'}))}; needed "
            "one type of device: megacompile the outermost module, with resident=0 or "
            f'resident="all"; and {write}'
        )
    if device_ids:
        raise ModelError(
            f"{where}, so that it takes no device_ids or output_device, got {device_ids}; {write}: "
            "the model moves its inputs itself"
        )
    if reduces_on is not None and "cpu" not in reduces_on:
        raise ModelError(
            f"{where}, where the process group cannot reduce their gradients (it has backends for "
            f"{', '.join(sorted(reduces_on))}); {write}"
        )


def _check_wrap(ddp: DistributedDataParallel, given: Mapping[str, Any]) -> bool:
    """Check the megacompiled models in a DDP before its construction. Returns True if this has
    constructed it, as a `PassThrough`."""
    module = given["module"]
    inside = _megacompiled_in(module)
    shared = [each for each in inside if each.mesh is not None]
    meshes = {each.mesh: each.device for each in shared if isinstance(each.mesh, DeviceMesh)}
    if not shared:
        for each in inside:
            each.check_wrap(module, given)
        return False
    names = ", ".join(type(each.model).__name__ for each in shared)
    params = {id(param) for each in shared for param in each.model.parameters()}
    for mesh in meshes:
        refuse_other_wraps(type(ddp), names, given, params, mesh)
    ddp.__class__ = PassThrough
    assert isinstance(ddp, PassThrough)
    ranks = Ranks.of(*next(iter(meshes.items())))  # all meshes have the same ranks
    ddp.become(module, group_of(given), ranks, buffers=sends_buffers(given))
    return True


def _check_copies(_: nn.DataParallel[Any], given: Mapping[str, Any]) -> bool:
    """Refuse a DataParallel around a megacompiled model before its construction. Without a GPU it
    only calls its module and is allowed."""
    inside = _megacompiled_in(given["module"])
    if inside and torch.cuda.is_available():
        raise ModelError(
            f"DataParallel(): {type(inside[0].model).__name__} is megacompiled, but got a "
            f"DataParallel around it, {_COPIES}; Trainer makes a DataParallel if it sees several "
            "GPUs without torchrun"
        )
    return False


def devices_of(group: Any) -> frozenset[str] | None:
    """The device types that a process group has backends for."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    config = str(distributed.get_backend_config(group))
    return frozenset(part.partition(":")[0] for part in config.split(","))


def _shared_in(model: nn.Module) -> list[nn.Module]:
    """The megacompiled modules in a model that ranks share."""
    return [each.model for each in _megacompiled_in(model) if each.shared]


def _megacompiled_in(module: object) -> list[DataParallel]:
    modules = {id(m) for m in module.modules()} if isinstance(module, nn.Module) else set()
    return [each for each in _LIVE if each.is_among(modules)]


def _inside(model: nn.Module) -> list[DistributedDataParallel]:
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


def _hooked(model: nn.Module, among: Iterable[int]) -> str:
    """The first of these parameters (by id) with a Python hook on its node; "" if there is none."""
    ids = frozenset(among)
    for name, param in model.named_parameters():
        if id(param) in ids and param.requires_grad and Accumulator(param).hooked_node:
            return name
    return ""


def _updates_refused(where: str, name: str) -> str:
    return (
        f"{where}: {name} is megacompiled with optimizer=, so that the backward updates and "
        "gradients never leave the device, but DistributedDataParallel would have to reduce them "
        "first; leave out optimizer= of megacompile()"
    )


def _shared_refused(name: str) -> str:
    return (
        f"megacompile(): {name} has a DistributedDataParallel in it, but ranks that share it "
        "(mesh=) average gradients themselves; leave DistributedDataParallel out"
    )


_LIVE: WeakIdSet[DataParallel] = WeakIdSet()
