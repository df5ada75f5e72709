"""Optimizer states that go along with their parameters: into another bucket, or out of all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.runtime.optim.blockwise import BlockwiseTensor, to_plain
from megacompile.runtime.optim.registry import rule_of
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.guards import release
from megacompile.runtime.params.state_memory import State


def move_states(old: HostBucket, new: HostBucket) -> None:
    """Moves the states of a bucket to another one, which has the same parameters elsewhere.

    8-bit states keep their codes: nothing is rounded again.
    """
    made: dict[int, State] = {}  # by the id of what it is made from: optimizers may share states
    for owner in old.states.owners():
        assert isinstance(owner, Optimizer)
        for name, states in old.states.of(owner).items():
            wide = {i: s.dtype for i, s in states.items() if isinstance(s, torch.Tensor)}
            new.states.make(owner, name, wide, pin=new.pin)
            new.states.make_codes(owner, name, sorted(states.keys() - wide.keys()), pin=new.pin)
            there = new.states.of(owner)[name]
            for i, state in states.items():
                there[i] = made.setdefault(id(state), there[i])
                for target, source in zip(_parts(there[i]), _parts(state), strict=True):
                    target.copy_(source)
                _show(owner.state.get(old.params[i], {}), name, state, there[i], new)


def _show(state: dict[str, Any], name: str, old: State, new: State, bucket: HostBucket) -> None:
    """Replaces what the user sees as a state by the new one, if it was the old one."""
    shown = state.get(name)
    mine = compat.local(shown)
    if isinstance(mine, BlockwiseTensor):
        if isinstance(old, tuple) and isinstance(new, tuple) and mine.codes is old[0]:
            moved = BlockwiseTensor(mine, *new, signed=mine.signed, settle=bucket.pending.wait)
            assert isinstance(shown, torch.Tensor)
            state[name] = compat.like(shown, moved)
    elif isinstance(shown, torch.Tensor) and isinstance(old, torch.Tensor):
        if mine.data_ptr() == old.data_ptr() and isinstance(new, torch.Tensor):
            state[name] = compat.like(shown, new.detach())


def _parts(state: State) -> tuple[torch.Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def state_bytes(bucket: HostBucket) -> int:
    """The memory of all states of a bucket."""
    return sum(
        part.nbytes
        for owner in bucket.states.owners()
        for states in bucket.states.of(owner).values()
        for state in states.values()
        for part in _parts(state)
    )


def free_states(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Turns the states of parameters that are in no bucket any more into those of torch.optim.

    They go where their parameter is, by the rules of `Optimizer.load_state_dict`: states that a
    rule of ours made (in 8 bits, or of another dtype) get the parameter's dtype.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    by_rule = rule_of(optimizer) is not None
    for param in params:
        state = optimizer.state.get(param)
        if not state or id(param) not in groups:
            continue
        group = groups[id(param)]
        for name, value in state.items():
            if isinstance(compat.local(value), BlockwiseTensor):
                state[name] = to_plain(value).to(param.device, param.dtype)
            elif not isinstance(value, torch.Tensor):
                continue
            elif name == "step":
                if group.get("capturable") or group.get("fused"):
                    state[name] = value.to(param.device)
            elif value.shape == param.shape:  # it may be in a bucket
                release(value)
                cast = by_rule and value.is_floating_point() and param.is_floating_point()
                dtype = param.dtype if cast else value.dtype
                state[name] = value.detach().to(param.device, dtype, copy=True)
            else:
                state[name] = value.to(param.device)
