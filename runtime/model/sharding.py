"""Shards a model over ranks: its parameters become DTensors, and each rank holds its rows.

    nn.Parameter of shape (n, ...)   ->   nn.Parameter that is a DTensor, Shard(0)

As with FSDP2, parameters become new objects with the same names. Optimizers of the old parameters
get the new ones, and their states are sharded too.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.errors import ModelError, OptionError
from megacompile.packed import packed_parameters
from megacompile.runtime.device.ranks import Ranks, checksum
from megacompile.runtime.params.guards import guard_dtensors
from megacompile.runtime.step import hooks


def shard(model: nn.Module, ranks: Ranks, *, filled: bool = False) -> dict[int, nn.Parameter]:
    """Shard a model's parameters by rows; returns the new parameters, by the id of the old ones.
    Each rank has the whole model, with the same shapes. `filled`: parameters on meta get their
    values later, from a checkpoint; until then their memory is uninitialized.

    Raises a ModelError if a parameter cannot be shared, or if another rank has a different model;
    an OptionError if an optimizer has states that cannot be sharded.
    """
    guard_dtensors()
    compat.send_no_parts(compat.is_sharded)
    _check(model, meta=filled)
    ids = {id(param) for param in model.parameters()}
    # including optimizers without a step so far
    optimizers = hooks.constructed(lambda param: id(param) in ids)
    for optimizer in optimizers:
        _check_states(optimizer, model)
    _check_alike(model, ranks)
    # the first rank's values where they differ: they were initialized without a seed
    named = [*model.parameters(), *model.buffers()]
    tensors = [t for t in named if not t.is_meta and t.layout is torch.strided]
    sums = ranks.all_gather_object([checksum(tensor) for tensor in tensors])
    differ = [tensor for tensor, *each in zip(tensors, *sums, strict=True) if len(set(each)) > 1]
    ranks.send_first(differ, f"values of {type(model).__name__}")
    made: dict[int, nn.Parameter] = {}
    holders = compat.holders(compat.modules_of(model), "parameters")
    # not `model.parameters()`, which a class may limit to those that it trains
    for param in (p for holder in holders for p in holder.values() if p is not None):
        if id(param) in made:
            continue
        first, shape = ranks.rows(tuple(param.shape))
        if param.is_meta:
            part = torch.empty(shape, dtype=param.dtype)
        else:
            part = param.detach().narrow(0, first, shape[0]).contiguous()
        made[id(param)] = compat.sharded_parameter(
            part, ranks.mesh, ranks.placements, param.shape, requires_grad=param.requires_grad
        )
    for holder in holders:
        holder.update({name: made[id(p)] for name, p in holder.items() if p is not None})
    for optimizer in optimizers:
        _replace_params(optimizer, made)
    return made


def _check(model: nn.Module, *, meta: bool) -> None:
    name = type(model).__name__
    for _, packed, _ in packed_parameters(model):
        raise ModelError(
            f"megacompile(): {name} has packed parameters ({packed!r}), which cannot be divided "
            "among ranks; leave out mesh=, and use DistributedDataParallel(megacompile(model))"
        )
    for param_name, param in model.named_parameters():
        hooked = compat.gradient_hooks(param) or compat.post_accumulate_hooks(param)
        kinds = {
            "no dimension": param.dim() == 0,
            "no values (it is on meta)": param.is_meta and not meta,
            "hooks": hooked,
            "a gradient": param.grad is not None,
        }
        for got in (kind for kind, is_so in kinds.items() if is_so):
            raise ModelError(
                f"megacompile(): parameter {name}.{param_name} has {got}, and mesh= divides its "
                "rows among ranks; needed one dimension or more (param.reshape(1)), values "
                "(checkpoint=, or a model built on the CPU), no hooks (register them after "
                "megacompile()) and no gradient (optimizer.zero_grad())"
            )


def check_divided(model: nn.Module, ranks: Ranks) -> None:
    """Raise a ModelError if a parameter added to a model later is not sharded like the others."""
    for name, param in model.named_parameters():
        mesh, placements = getattr(param, "device_mesh", None), getattr(param, "placements", None)
        if mesh == ranks.mesh and placements == ranks.placements:
            continue
        got = "whole" if mesh is None else f"a DTensor of placements {placements} over {mesh}"
        raise ModelError(
            f"megacompile(): parameter {type(model).__name__}.{name} is {got}, and ranks share "
            f"this model; needed placements {ranks.placements} over its mesh: "
            "nn.Parameter(torch.distributed.tensor.distribute_tensor(param, mesh, placements)), "
            "and an optimizer that has it"
        )


def divide_loaded(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: object
) -> None:
    """Take this rank's rows of whole tensors before a module's `load_state_dict()`. No
    communication: each rank has loaded all of them."""
    for name, param in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if compat.is_sharded(param) and isinstance(value, torch.Tensor):
            if not compat.is_sharded(value) and value.shape == param.shape:
                state_dict[prefix + name] = compat.distributed(value, param)


def _replace_params(optimizer: Optimizer, made: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters of an optimizer by new ones, by the ids of the old ones, and shard their
    states."""
    for old in [param for param in optimizer.state if id(param) in made]:
        new, states = made[id(old)], optimizer.state.pop(old)
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and value.shape == old.shape:
                states[key] = compat.distributed(value, new)
        optimizer.state[new] = states
    for group in optimizer.param_groups:
        group["params"] = [made.get(id(p), p) for p in group["params"]]


def _check_states(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise if an optimizer has states that do not follow the rows of their parameter."""
    for name, param in model.named_parameters():
        for key, state in optimizer.state.get(param, {}).items():
            of_tensor = isinstance(state, torch.Tensor) and state.dim() > 0
            if of_tensor and state.shape != param.shape:
                raise OptionError(
                    f"megacompile(): {type(optimizer).__name__} has a state {key!r} of shape "
                    f"{tuple(state.shape)} for parameter {name!r} of shape {tuple(param.shape)}, "
                    "and mesh= divides states by rows; needed the parameter's shape; call "
                    "megacompile() before the first step, and load a checkpoint afterwards"
                )


def _check_alike(model: nn.Module, ranks: Ranks) -> None:
    """Raise, in every rank, if the model differs between ranks."""
    looks = [
        f"parameter {name!r} {_look(param)} requires_grad={param.requires_grad}"
        for name, param in model.named_parameters()
    ]
    looks += [f"buffer {name!r} {_look(buffer)}" for name, buffer in model.named_buffers()]
    digests = ranks.all_gather_object(hashlib.sha256("\n".join(looks).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    (a, here), *others = zip(ranks.agreement.ranks, ranks.all_gather_object(looks), strict=True)
    for b, there in others:
        for mine, theirs in itertools.zip_longest(here, there, fillvalue="nothing more"):
            if mine != theirs:
                raise ModelError(
                    f"megacompile(): {type(model).__name__} is not the same model in rank {b} as "
                    f"in rank {a}: {theirs}, where rank {a} has {mine}; needed the same parameters "
                    "and buffers in all ranks (names, shapes, dtypes, requires_grad)"
                )


def _look(tensor: torch.Tensor) -> str:
    on_meta = " on meta" if tensor.is_meta else ""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tuple(tensor.shape)} {tensor.dtype}{layout}{on_meta}"
