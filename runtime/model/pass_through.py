"""A DistributedDataParallel around a model that ranks share: it only calls the module.

    gradients    are averaged over ranks already
    buffers      are the first rank's at construction, and before each forward as in any DDP
    no_sync()    each backward averages its gradients before adding them: the same sum, up to
    rounding
    state dicts  are whole in every rank (`whole_states`): the loop's first rank saves them

So a loop that wraps its model (Lightning's `strategy="ddp"`) runs unchanged. torch's reducer is not
created: it would treat the ranks' different rows as copies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from megacompile import compat
from megacompile.errors import ModelError
from megacompile.runtime.device.ranks import Ranks, global_ranks
from megacompile.runtime.model.whole_states import make_whole

_OTHERWISE = ("mixed_precision", "delay_all_reduce_named_params")  # options that change numbers


class PassThrough(DistributedDataParallel):
    """The class that `become` gives to such a DistributedDataParallel at construction."""

    def become(self, module: nn.Module, group: Any, ranks: Ranks, *, buffers: bool) -> None:
        """Wrap a module.

        Args:
            module: the wrapped module.
            group: the process group passed to it.
            ranks: the ranks that share the model.
            buffers: send the first rank's buffers to the others.
        """
        nn.Module.__init__(self)
        self.module = module
        self.process_group = group
        self.ranks = ranks
        self.device_ids = None
        self.reducer: Any = _Nothing()
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.find_unused_parameters = False
        self.static_graph = False
        self.broadcast_buffers = buffers
        make_whole(module)
        frozen = (each for each in module.parameters() if not compat.is_sharded(each))
        what = f"values that ranks do not share in {type(module).__name__}"
        ranks.send_first([*frozen, *module.buffers()], what)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the module, which moves its inputs to the device itself."""
        self._send_buffers()
        found = self.module(*args, **kwargs)
        synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = synced  # same attribute as DistributedDataParallel
        return found

    def _send_buffers(self) -> None:
        if self.broadcast_buffers and self.require_forward_param_sync:
            what = f"buffers of {type(self.module).__name__}"
            self.ranks.send_first(self.module.buffers(), what)

    def register_comm_hook(self, state: object, hook: Any) -> NoReturn:
        """Raise: no gradients pass through a hook."""
        raise _refused("register_comm_hook()", "no gradients pass through it")

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: each rank has rows of every layer, so either all ranks compute or none."""
        raise _refused("join()", "a rank without inputs would stop the others")

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Do nothing; Lightning calls it at the end."""
        return {}


class _Nothing:
    """Stand-in for the reducer, which Lightning's manual optimization prepares for a backward."""

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        del outputs


def refuse_other_wraps(
    kind: type, names: str, given: Mapping[str, Any], shared: Collection[int], mesh: DeviceMesh
) -> None:
    """Raise if a DistributedDataParallel around a shared model would have to do more than call it.

    Args:
        kind: the class being constructed.
        names: names of the models that ranks share.
        given: the arguments of DistributedDataParallel.
        shared: the ids of their parameters.
        mesh: the mesh of the ranks.

    Raises:
        ModelError: with what to write instead.
    """
    where = f"DistributedDataParallel(): ranks share {names} (mesh=)"
    if kind is not DistributedDataParallel:
        raise ModelError(f"{where}, so gradients are already averaged; leave {kind.__name__} out")
    for option in _OTHERWISE:
        if given.get(option) is not None:
            raise ModelError(
                f"{where}, so gradients are already averaged, and {option}= has no effect; "
                "leave DistributedDataParallel out, or the option"
            )
    module = given["module"]
    for name, param in module.named_parameters():
        if param.requires_grad and id(param) not in shared:
            raise ModelError(
                f"{where}, but not parameter {name!r} of {type(module).__name__}, whose gradient "
                "would have to be reduced; megacompile the outermost module with mesh="
            )
    here, there = sorted(dist.get_process_group_ranks(group_of(given))), sorted(global_ranks(mesh))
    if here != there:
        raise ModelError(
            f"{where}, which are {there}, but its process group has the ranks {here}; needed the "
            "same: leave DistributedDataParallel out, and pass megacompile() a mesh of all ranks "
            "(of two dimensions: the first replicates, the second shards)"
        )


def group_of(given: Mapping[str, Any]) -> Any:
    """The process group of a DistributedDataParallel with these arguments."""
    mesh = given.get("device_mesh")
    if mesh is not None:
        return mesh.get_group()
    return given.get("process_group") or dist.group.WORLD


def sends_buffers(given: Mapping[str, Any]) -> bool:
    """True if a DistributedDataParallel with these arguments would broadcast buffers."""
    newer = given.get("forward_sync_buffers")  # torch 2.13 renamed it
    older = given.get("broadcast_buffers")
    return next((bool(each) for each in (newer, older) if each is not None), True)


def _refused(what: str, why: str) -> ModelError:
    return ModelError(
        f"DistributedDataParallel.{what}: ranks share the model in it (mesh=), and {why}; leave "
        "it out"
    )
