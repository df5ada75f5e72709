"""A model that ranks share becomes whole in each of them: `sharding`, backwards.

    nn.Parameter that is a DTensor, Shard(0)   ->   nn.Parameter of shape (n, ...), in every rank

Parameters are other objects afterwards, under the same names. Optimizers that have the old ones get
the new ones, with whole states. A bucket is gathered when the one before it has gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.cost.ranks import ranks_of_host
from megacompile.errors import HostMemoryError, ModelError, OptionError
from megacompile.host_memory import available_bytes
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.model.sharding import Sites, into_groups, optimizers_over, sites_of
from megacompile.runtime.optim.states import to_plain
from megacompile.runtime.params.accumulators import Accumulator
from megacompile.runtime.params.guards import release
from megacompile.runtime.params.state_moves import free_states
from megacompile.text import format_bytes


class Gathering:
    """The tensors that become whole.

    Args:
        model: its parameters, and where modules have them.
        ranks: that share it; all of them do the same.
        device: where everything goes.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, device: torch.device) -> None:
        self.device = device
        self._model = model
        self._ranks = ranks
        self._sites: dict[int, Sites] = {id(param): sites for param, sites in sites_of(model)}
        self.optimizers = optimizers_over(model)

    def take(
        self,
        params: Sequence[nn.Parameter],
        gradient_of: Callable[[nn.Parameter], torch.Tensor | None],
    ) -> None:
        """Makes parameters whole, with their gradients and states."""
        made: list[nn.Parameter] = []
        for param in params:
            gradient = gradient_of(param)
            release(param)
            new = nn.Parameter(self._whole(param), requires_grad=param.requires_grad)
            if gradient is not None:
                new.grad = self._whole(gradient).to(new.dtype)
            param.grad = None
            for holder, name in self._sites.get(id(param), ()):
                holder[name] = new
            made.append(new)
        replaced = {id(old): new for old, new in zip(params, made, strict=True)}
        for optimizer in self.optimizers:
            for old in [p for p in optimizer.state if id(p) in replaced]:
                states = optimizer.state.pop(old)
                optimizer.state[replaced[id(old)]] = {
                    name: self._whole(to_plain(value)) if compat.is_sharded(value) else value
                    for name, value in states.items()
                }
            into_groups(optimizer, replaced)
            free_states(optimizer, made)

    def take_rest(self) -> None:
        """The same of parameters that came since the last call, and are in no bucket."""
        rest = [param for param in self._model.parameters() if compat.is_sharded(param)]
        self.take(rest, lambda param: param.grad)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of a DTensor, in memory of its own: a collective."""
        return self._ranks.all_of(tensor).to(self.device, copy=True)


def refuse_ungathered(
    model: nn.Module, ranks: Ranks, part_bytes: int, device: torch.device
) -> None:
    """Raise where a model that ranks share cannot be whole in each of them.

    Args:
        part_bytes: of this rank's parameters, gradients and states.
        device: where they go.

    Raises:
        ModelError: a parameter has hooks.
        OptionError: an optimizer has states of which it is not known how they are divided.
        HostMemoryError: there is too little of it for all ranks of this host.
    """
    name = type(model).__name__
    for param_name, param in model.named_parameters():
        hooks = compat.gradient_hooks(param) or compat.post_accumulate_hooks(param)
        if hooks or (param.requires_grad and Accumulator(param).hooked_node):
            raise ModelError(
                f"unmegacompile(): parameter {name}.{param_name} has hooks, which would be lost "
                "when it is no DTensor any more; remove them, and register them afterwards"
            )
    for optimizer in optimizers_over(model):
        _refuse_states(optimizer, model)
    here = ranks_of_host(ranks.mesh)
    more, there = part_bytes * (ranks.count - 1), available_bytes() // here
    if device.type == "cpu" and more > there:
        raise HostMemoryError(
            f"unmegacompile(): {name} needs {format_bytes(more)} more of host memory in each rank "
            "for whole parameters, gradients and optimizer states, and "
            f"{format_bytes(there)} are free for each of the {here} ranks of this host; save it "
            "with megacompile.save(), which gathers one parameter at a time, and load that"
        )


def _refuse_states(optimizer: Optimizer, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        for key, state in optimizer.state.get(param, {}).items():
            if not isinstance(state, torch.Tensor) or compat.is_sharded(state):
                continue
            if state.dim() and state.shape != param.shape:
                raise OptionError(
                    f"unmegacompile(): {type(optimizer).__name__} has a state {key!r} of shape "
                    f"{tuple(state.shape)} for parameter {name!r} of shape {tuple(param.shape)}, "
                    "and nobody knows how ranks (mesh=) divide it; needed a DTensor, or the "
                    "parameter's shape: optimizer.state.clear(), and a new optimizer after it"
                )
