"""The states of known optimizers (`optim.rules`) in the buckets' flat memory.

`optimizer.state[p]` holds views of it under the stock names. Each optimizer has its own buffers in
a bucket (`StateMemory`), so two optimizers over the same parameters have separate states, as in
torch.optim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.options import Options
from megacompile.runtime.optim.blockwise import BlockwiseTensor, to_plain
from megacompile.runtime.optim.rule import State
from megacompile.runtime.optim.rules import KNOWN, RULES, known, listed, rule_of
from megacompile.runtime.params.guards import opened, release
from megacompile.runtime.params.host_bucket import HostBucket, StateDtypes


class Trained(NamedTuple):
    """A parameter that a step updates."""

    param: nn.Parameter
    at: int  # index in its bucket
    group: dict[str, Any]  # its group in the optimizer
    state: dict[str, Any]  # `optimizer.state[param]`, or its future value


def unsupported_reason(optimizer: Optimizer, found: Iterable[Trained]) -> str:
    """The reason why torch.optim's own step must update these parameters; "" if megacompile can."""
    kind = known(type(optimizer))
    if kind is None:
        full = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        return (
            f"{full} has no update in megacompile ({listed(KNOWN)} of torch.optim and lion_pytorch "
            "have one)"
        )
    if why := kind.unsupported_reason(optimizer):
        return why
    if rule_of(optimizer) is None and any(compat.is_sharded(each.param) for each in found):
        return "it needs whole parameters, and each rank has a part"
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        return "a GradScaler passes its scale to the fused step"
    for param, _, group, _ in found:
        assert param.grad is not None
        if group.get("differentiable") or group.get("capturable"):
            return "it is differentiable or capturable"
        if param.is_complex():
            return "a parameter is complex"
        if param.grad.layout is not torch.strided:
            return "a gradient is sparse"
    return ""


def wraps_another(optimizer: Optimizer) -> bool:
    """True if an optimizer wraps another one that makes the step (SAM, Lookahead)."""
    return any(isinstance(value, Optimizer) for value in vars(optimizer).values())


def ignored_options(optimizer: Optimizer, options: Options) -> str:
    """A sentence on the options that an optimizer without a rule ignores; "" if none."""
    names = ["state_dtype"] if options.state_dtype is not None else []
    names += ["stochastic_rounding"] if options.stochastic_rounding else []
    if not names or rule_of(optimizer) is not None:
        return ""
    return f"{type(optimizer).__name__} ignores {' and '.join(names)} ({listed(RULES)} do not)"


def names_like(param: torch.Tensor, state: dict[str, Any]) -> list[str]:
    """The names of the states that have the parameter's shape."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step" and value.shape == param.shape
    ]


def adopt(
    optimizer: Optimizer, bucket: HostBucket, i: int, state: dict[str, Any], names: Iterable[str]
) -> None:
    """Point `state` to views of the buffers, and copy its values (a loaded checkpoint's) there."""
    buffers, param = bucket.states.of(optimizer), bucket.params[i]
    for name in names:
        given, buffer = state.get(name), buffers[name][i]
        mine = given if type(given) is torch.Tensor else compat.local(given)
        if isinstance(buffer, tuple):
            if isinstance(mine, BlockwiseTensor) and mine.codes is buffer[0]:
                continue
            rule = rule_of(optimizer)
            signed = rule is None or rule.signed(name)
            wait = bucket.pending.wait
            view = BlockwiseTensor(bucket.values[i], *buffer, signed=signed, settle=wait)
            bucket.pending.withdraw()
            if given is None:
                view.clear()
            else:
                is_8_bit = isinstance(mine, BlockwiseTensor)
                view.store(mine if is_8_bit else _part_of(given, param).float())
            state[name] = compat.like(param, view)
            continue
        if given is not None and buffer.numel() and mine.data_ptr() == buffer.data_ptr():
            continue
        bucket.pending.withdraw()
        if given is None:
            bucket.states.clear(optimizer, name, i)
        else:
            opened(given)
            bucket.states.filled(optimizer, name, i)
            buffer.copy_(_part_of(given, param))
        shown = buffer.detach()
        if (
            type(given) is torch.Tensor
            and (given.dtype, given.device, given.shape)
            == (buffer.dtype, buffer.device, buffer.shape)
            and not given.requires_grad
            and not given.is_inference()
        ):
            # keep the loaded tensor object and free its old memory: after `load_state_dict(found)`,
            # the user's `found` references it too
            given.data, shown = buffer, given
        state[name] = compat.like(param, shown)


def _part_of(given: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    plain: torch.Tensor = to_plain(given)
    if compat.is_sharded(param) and not compat.is_sharded(plain):
        plain = compat.distributed(plain, param)
    return compat.local(plain)  # type: ignore[no-any-return]


def for_update(
    buffers: Mapping[str, Mapping[int, State]],  # the optimizer's, in the parameter's bucket
    i: int,
    state: dict[str, Any],
    # the states that a rule uses; others may remain from earlier options. None: all that
    # torch.optim's own step uses, including its counter
    names: Iterable[str] | None = None,
) -> dict[str, Any]:
    """A parameter's state for an update: the bucket's own, unguarded views."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if names is not None and name not in names:
            continue
        buffer = buffers.get(name, {}).get(i)
        mine = value if type(value) is torch.Tensor else compat.local(value)
        if isinstance(mine, BlockwiseTensor) and not isinstance(buffer, tuple):
            found[name] = mine.plain()
        elif buffer is None and isinstance(mine, torch.Tensor):
            found[name] = mine.detach()
        else:
            found[name] = mine if buffer is None else buffer
    if names is None and isinstance(state.get("step"), torch.Tensor):
        # float64, to round like a number: while any thread compiles, torch.optim computes with it
        # as a tensor (torch.compiler.is_compiling() is process-wide)
        found["step"] = state["step"].to(torch.float64, copy=True)
    return found


def visible(state: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a state that an update writes."""
    plain = torch.Tensor
    return [
        value
        for name, value in state.items()
        if name != "step" and (type(value) is plain or type(compat.local(value)) is plain)
    ]


def visible_on_disk(bucket: HostBucket) -> list[torch.Tensor]:
    """The user-visible states, of every optimizer, for a bucket with states on a disk. A step reads
    and writes all of them, even unchanged ones: a concurrent user write to another optimizer's
    state, or to the state of a parameter without a gradient, would be lost."""
    if bucket.disk is None or not bucket.states.on_disk():
        return []
    owners = [owner for owner in bucket.states.owners() if isinstance(owner, Optimizer)]
    states = [owner.state[p] for owner in owners for p in bucket.params if p in owner.state]
    return [each for state in states for each in visible(state)]


def move_loaded(optimizer: Optimizer, param: nn.Parameter) -> None:
    """Move a parameter's loaded states to the device that it has moved to since."""
    if param not in optimizer.state:
        return
    state = optimizer.state[param]
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim():
            state[name] = value.to(param.device)


def new_counter() -> torch.Tensor:
    """The initial "step" counter of an optimizer that has one."""
    default = torch.get_default_dtype()
    return torch.tensor(0.0, dtype=default if default == torch.float64 else torch.float32)


def count_up(states: Iterable[dict[str, Any]], others: Iterable[torch.Tensor] = ()) -> None:
    """Add one to an optimizer's own step counters: those in `states`, and `others`."""
    counters = list(others)
    for state in states:
        count = state.get("step")
        if isinstance(count, torch.Tensor):
            counters.append(count)
        elif count is not None:
            state["step"] = count + 1
    if counters:
        one = torch.ones((), dtype=counters[0].dtype)  # a number would become a tensor for each
        compat.FOREACH_ADD(counters, one, alpha=1)


def reserve(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Order first states by parameter group, like torch.optim, because the order is visible in
    `state_dict()`; returns the parameters with empty states, for `drop_empty`."""
    kind, of = known(type(optimizer)), {id(param) for param in params}
    new = [
        param
        for group in (optimizer.param_groups if kind is not None and of else ())
        if kind is not None and kind.has_states(group)
        for param in group["params"]
        if id(param) in of and param not in optimizer.state
    ]
    for param in new:
        optimizer.state[param] = {}
    return new


def drop_empty(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
    """Remove the `state_dict()` entries for which torch.optim keeps no state."""
    for param in params:
        if param in optimizer.state and not optimizer.state[param]:
            del optimizer.state[param]


def move_states(old: HostBucket, new: HostBucket) -> None:
    """Move the states of a bucket to another bucket with the same parameters. 8-bit states keep
    their codes: nothing is quantized."""
    for owner in old.states.owners():
        assert isinstance(owner, Optimizer)
        named = old.states.of(owner)
        dtypes: StateDtypes = {
            name: {i: "int8" if isinstance(s, tuple) else s.dtype for i, s in states.items()}
            for name, states in named.items()
        }
        new.states.make(owner, dtypes, pin=new.pin)
        for i, param in enumerate(new.params):
            state = owner.state.get(param, {})
            names = [name for name in named if i in named[name] and name in state]
            adopt(owner, new, i, state, names)


def state_bytes(bucket: HostBucket) -> int:
    named = [states for o in bucket.states.owners() for states in bucket.states.of(o).values()]
    states = [state for by_index in named for state in by_index.values()]
    parts = [part for s in states for part in (s if isinstance(s, tuple) else (s,))]
    return sum(part.nbytes for part in parts)


def free_states(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Convert the states of parameters outside of all buckets to those of torch.optim. They move to
    their parameter's device, by the rules of `Optimizer.load_state_dict`: states created by a rule
    (in 8 bits, or of another dtype) get the parameter's dtype."""
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
