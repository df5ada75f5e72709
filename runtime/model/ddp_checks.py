"""DistributedDataParallel with a megacompiled model: supported and refused combinations.

DDP, Megatron and Apex reduce gradients in hooks on AccumulateGrad nodes. A parameter whose data
moves to another device gets a new node, and the hooks on the old one never run again. So

    DDP, or hooks, before the parameters move    refused: in megacompile() or, if it cannot be
                                                 detected there, at the first call within the DDP
    DDP(megacompile(model))                      works; buckets stay where they are from then on
    parameters where DDP cannot reduce them      refused when the DDP is constructed
    a model that ranks share (mesh=)             works: the DDP only calls it (`PassThrough`)
    nn.DataParallel, around or inside            refused if there is a GPU: threads would call
                                                 copies of the module that are not streamed
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from megacompile import compat, notices
from megacompile.errors import ModelError
from megacompile.option_values import torchrun_count
from megacompile.options import Options
from megacompile.runtime.device.ranks import Ranks, global_ranks
from megacompile.runtime.model import loops
from megacompile.runtime.model.sharding import divide_loaded
from megacompile.runtime.params.parameter_gradients import Accumulators

_BACKENDS = 'init_process_group("cpu:gloo,cuda:nccl")'
_PREPARED = "_is_accelerate_prepared"  # Accelerate (Trainer) wraps other models in a DDP
_WRAP = f"model = DistributedDataParallel(megacompile(model)), after {_BACKENDS}"
_COPIES = (
    "which calls copies of the module, one on each GPU, and copies are not streamed; leave it "
    "out: use one GPU (CUDA_VISIBLE_DEVICES=0), or start a process for each GPU (torchrun, with "
    "mesh= or a DistributedDataParallel)"
)


class DdpChecks:
    """The checks of one megacompiled model, for the DistributedDataParallel around or inside it.
    Raises a ModelError if one is inside although its backward updates or ranks share it, or a
    `torch.nn.DataParallel` over GPUs."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model, self.options, self.mesh = model, options, options.mesh
        self.name = name = type(model).__name__
        self.updates = options.optimizer is not None
        self.checked: weakref.ref[DistributedDataParallel] | None = None  # around the last call
        if any(isinstance(m, nn.DataParallel) and m.device_ids for m in model.modules()):
            raise ModelError(f"megacompile(): {name} has a DataParallel in it, {_COPIES}")
        inside = _inside(model)
        if self.updates and inside:
            raise ModelError(_updates_refused("megacompile()", name))
        if self.mesh is not None:
            if inside:
                raise ModelError(
                    f"megacompile(): {name} has a DistributedDataParallel in it, but ranks that "
                    "share it (mesh=) average gradients themselves; leave DistributedDataParallel "
                    "out"
                )
            setattr(model, _PREPARED, True)
            model.register_load_state_dict_pre_hook(divide_loaded)
            loops.attend()
        compat.check_data_parallel(DistributedDataParallel, _check_wrap)
        compat.check_data_parallel(nn.DataParallel, _check_copies)

    def around(self, ddp: DistributedDataParallel) -> str:
        """Check a DDP at a call within it; returns the reason why buckets stay where they are.
        Raises a ModelError if the DDP would not reduce the model's gradients."""
        why = "a DistributedDataParallel is around"
        if self.checked is None or self.checked() is not ddp:
            held = {id(param) for param in compat.ddp_parameters(ddp)}
            params = {n: p for n, p in self.model.named_parameters() if id(p) in held}
            for name, param in params.items():
                if self.updates and param.requires_grad:
                    raise ModelError(_updates_refused("forward", self.name))
                if param.requires_grad and param.device.type != ddp.device_type:
                    raise ModelError(
                        f"{self.name}: its DistributedDataParallel was built when parameter "
                        f"{name!r} was on {ddp.device_type}; now it is on {param.device.type}, and "
                        "its gradient would not be reduced; make the DistributedDataParallel after "
                        f"megacompile(): {_WRAP}"
                    )
            self.checked = weakref.ref(ddp)
            is_planned = self.options.plans and self.options.resident is None
            if is_planned and any(p.device != self.options.device for p in params.values()):
                self.say(why)
        return why

    def warn_if_alone(self) -> None:
        """Warn if several processes train, and nothing sums the gradients of this model."""
        count, is_first = torchrun_count("WORLD_SIZE"), not torchrun_count("RANK")
        around = self.checked is not None and self.checked() is not None
        alone = self.mesh is None and not around and count > 1
        if alone and is_first and not _inside(self.model):
            notices.warn_once(
                "alone",
                f"megacompile: each of {count} processes trains its own copy of {self.name}: "
                "nothing sums their gradients. Wrap it, DistributedDataParallel("
                "megacompile(model)), or let the processes share it, megacompile(model, "
                "mesh=...). If your loop sums gradients itself, ignore this (shown once)",
                of=self,
            )

    @torch.inference_mode(False)  # parameters have no AccumulateGrad nodes in inference mode
    def holds(self, moving: Collection[nn.Parameter]) -> str:
        """The reason why these parameters must stay on their device; "" if they may move."""
        if moving and self.checked is not None and self.checked() is not None:
            return "a DistributedDataParallel is around the model"
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

    def check_wrap(self, module: nn.Module, given: Mapping[str, Any]) -> None:
        """Raise if a DDP with these arguments around `module`, which contains this model, would not
        accept parameters in host memory, or could not reduce them."""
        trained = [param for param in self.model.parameters() if param.requires_grad]
        if self.updates and trained:
            raise ModelError(_updates_refused("DistributedDataParallel()", self.name))
        on_host = any(param.device.type == "cpu" for param in trained)
        if self.options.device.type == "cpu" or not on_host:
            return  # they are where plain parameters would be
        on = {param.device.type for param in module.parameters()}
        device_ids, reduces_on = given.get("device_ids") or given.get("output_device"), {"cpu"}
        if not given.get("device_mesh") and dist.is_initialized():
            config = str(dist.get_backend_config(given.get("process_group")))
            reduces_on = {part.partition(":")[0] for part in config.split(",")}
        if on != {"cpu"} or device_ids or "cpu" not in reduces_on:
            raise ModelError(
                f"DistributedDataParallel(): {self.name} is megacompiled and its parameters are on "
                f"the host; got device_ids {device_ids}, parameters on {sorted(on)}, and a process "
                f"group that reduces on {sorted(reduces_on)}; needed no device_ids, and the host "
                f"alone: megacompile the outermost module, and write {_BACKENDS} and "
                "DistributedDataParallel(model)"
            )


def refuse_moves(model: nn.Module, on_device: Collection[int], device: str) -> None:
    """Raise a ModelError if megacompile() would move a parameter whose AccumulateGrad node has a
    hook. Those with the ids `on_device` go to a device of type `device`, others to the host."""
    name, moving, moves = type(model).__name__, set[int](), ""
    for param in model.parameters():
        place = device if id(param) in on_device else "cpu"
        if param.device.type != place:
            moving.add(id(param))
            moves = moves or f"moves parameters from {param.device.type} to {place}"
    for ddp in _inside(model):
        if any(id(param) in moving for param in compat.ddp_parameters(ddp)):
            raise ModelError(
                f"megacompile(): {name} has a DistributedDataParallel in it, and megacompile() "
                f"{moves}, where it would not reduce their gradients; make the "
                f"DistributedDataParallel after megacompile(): {_WRAP}"
            )
    if hooked := _hooked(model, moving):
        raise ModelError(
            f"megacompile(): a hook is registered on the AccumulateGrad node of {name}.{hooked}, "
            f"and megacompile() {moves}, so the hook would never be called; register hooks on "
            "nodes after megacompile()"
        )


def _check_wrap(ddp: DistributedDataParallel, given: Mapping[str, Any]) -> bool:
    """Check the megacompiled models in a DDP before its construction. Returns True if this has
    constructed it, as a `PassThrough`. Raises a ModelError if such a wrapper would have to do more
    than call a model that ranks share."""
    inside: list[DdpChecks] = [each.buckets.ddp for each in loops.streamed_in(given["module"])]
    shared = [(each, each.mesh) for each in inside if isinstance(each.mesh, DeviceMesh)]
    if not shared:
        for each in inside:
            each.check_wrap(given["module"], given)
        return False
    params = {id(param) for each, _ in shared for param in each.model.parameters()}
    device_mesh, group = given.get("device_mesh"), given.get("process_group") or dist.group.WORLD
    group = group if device_mesh is None else device_mesh.get_group()
    reduces = sorted(dist.get_process_group_ranks(group))
    got = [] if type(ddp) is DistributedDataParallel else [type(ddp).__name__]
    got += [f"{option}=" for option in _OTHERWISE if given.get(option) is not None]
    got += [
        f"parameter {name!r} outside of it"
        for name, param in given["module"].named_parameters()
        if param.requires_grad and id(param) not in params
    ]
    got += [
        f"ranks {reduces} instead of {sorted(global_ranks(mesh))}"
        for _, mesh in shared
        if sorted(global_ranks(mesh)) != reduces
    ]
    if got:
        raise ModelError(
            f"DistributedDataParallel(): ranks share {', '.join(each.name for each, _ in shared)} "
            f"(mesh=), so gradients are already averaged, and it only calls the module; got "
            f"{got[0]}; needed DistributedDataParallel itself, without {' and '.join(_OTHERWISE)}, "
            "around the module that has all trained parameters, with the ranks of the mesh; or "
            "leave it out"
        )
    ddp.__class__ = PassThrough
    assert isinstance(ddp, PassThrough)
    first, mesh = shared[0]
    ddp.become(given["module"], group, given, Ranks.of(mesh, first.options.device))  # of all meshes
    return True


def _check_copies(_: nn.DataParallel[Any], given: Mapping[str, Any]) -> bool:
    """Refuse a DataParallel around a megacompiled model before its construction. Without a GPU it
    only calls its module and is allowed."""
    inside: list[DdpChecks] = [each.buckets.ddp for each in loops.streamed_in(given["module"])]
    if inside and torch.cuda.is_available():
        raise ModelError(
            f"DataParallel(): {inside[0].name} is megacompiled, but got a DataParallel around it, "
            f"{_COPIES}; Trainer makes a DataParallel if it sees several GPUs without torchrun"
        )
    return False


def _inside(model: nn.Module) -> list[DistributedDataParallel]:
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


def _hooked(model: nn.Module, ids: Collection[int]) -> str:
    """The first of these parameters (by id) with a Python hook on its node; "" if there is none."""
    for name, param in model.named_parameters():
        if id(param) in ids and param.requires_grad and any(Accumulators([param]).hooks):
            return name
    return ""


def _updates_refused(where: str, name: str) -> str:
    return (
        f"{where}: {name} is megacompiled with optimizer=, so that the backward updates and "
        "gradients never leave the device, but DistributedDataParallel would have to reduce them "
        "first; leave out optimizer= of megacompile()"
    )


_OTHERWISE = ("mixed_precision", "delay_all_reduce_named_params")  # options that change numbers


class PassThrough(DistributedDataParallel):
    """A DistributedDataParallel around a model that ranks share only calls the module; it gets this
    class at construction. So a loop that wraps its model (Lightning's `strategy="ddp"`) runs
    unchanged. torch's reducer is not created: it would treat the ranks' different rows as copies.

        gradients    are averaged over ranks already, by each backward, also in `no_sync()`
        buffers      are the first rank's at construction, and before each forward as in any DDP
        state dicts  are whole in every rank (`loops`): the loop's first rank saves them
    """

    def become(self, module: nn.Module, group: Any, given: Mapping[str, Any], ranks: Ranks) -> None:
        """Wrap a module, with the arguments of DistributedDataParallel."""
        nn.Module.__init__(self)
        self.module, self.process_group, self.ranks = module, group, ranks
        self.device_ids = None
        # Lightning's manual optimization prepares it for a backward
        self.reducer: Any = SimpleNamespace(
            _rebuild_buckets=lambda: False, prepare_for_backward=lambda outputs: None
        )
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.find_unused_parameters = self.static_graph = False
        syncs = map(given.get, ("forward_sync_buffers", "broadcast_buffers"))  # 2.13 renamed it
        self.broadcast_buffers = next((bool(each) for each in syncs if each is not None), True)
        loops.make_whole(module)
        frozen = (each for each in module.parameters() if not compat.is_sharded(each))
        what = f"values that ranks do not share in {type(module).__name__}"
        ranks.send_first([*frozen, *module.buffers()], what)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module, which moves its inputs to the device itself."""
        if self.broadcast_buffers and self.require_forward_param_sync:
            what = f"buffers of {type(self.module).__name__}"
            self.ranks.send_first(self.module.buffers(), what)
        found = self.module(*args, **kwargs)
        synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = synced  # same attribute as DistributedDataParallel
        return found

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a ModelError: gradients do not pass, and each rank has rows of every layer."""
        raise ModelError(
            "DistributedDataParallel: register_comm_hook() and join() do not work around a model "
            "that ranks share (mesh=), whose gradients and layers it does not see; leave them out"
        )

    join = register_comm_hook

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Do nothing; Lightning calls it at the end."""
        return {}
