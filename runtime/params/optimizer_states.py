"""The states of optimizers that are known (`optim.registry`) in the flat memory of the buckets.

`optimizer.state[p]` has views of it under the stock names. The buffers of a bucket belong to one
optimizer each (`StateMemory`), so two optimizers over the same parameters have states of
their own, as in torch.optim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.options import Options
from megacompile.runtime.optim.blockwise import BlockwiseTensor, to_plain
from megacompile.runtime.optim.registry import KNOWN, RULES, known, listed, rule_of
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.guards import opened, release
from megacompile.runtime.params.state_memory import State


class Trained(NamedTuple):
    """A parameter that a step updates."""

    param: nn.Parameter
    at: int  # its index in its bucket
    group: dict[str, Any]  # of the optimizer that it is in
    state: dict[str, Any]  # `optimizer.state[param]`, or what that is to become


def unsupported_reason(optimizer: Optimizer, found: Iterable[Trained]) -> str:
    """The reason why an optimizer's own step must update these, which have gradients; "" if we
    can."""
    kind = known(type(optimizer))
    if kind is None:
        full = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        return (
            f"{full} has no update of ours ({listed(KNOWN)} of torch.optim and lion_pytorch have)"
        )
    if why := kind.unsupported_reason(optimizer):
        return why
    if rule_of(optimizer) is None and any(compat.is_sharded(each.param) for each in found):
        return "it computes with whole parameters, of which each rank has a part"
    if getattr(optimizer, "grad_scale", None) is not None or (
        getattr(optimizer, "found_inf", None) is not None
    ):
        return "a GradScaler hands its scale to the fused step"
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
    """True if an optimizer holds another one, which makes its step (SAM, Lookahead)."""
    return any(isinstance(value, Optimizer) for value in vars(optimizer).values())


def ignored_options(optimizer: Optimizer, options: Options) -> str:
    """The options that an optimizer without a rule of ours ignores, as a sentence; "" if none."""
    asked = {
        "state_dtype": options.state_dtype is not None,
        "stochastic_rounding": options.stochastic_rounding,
    }
    names = " and ".join(name for name, value in asked.items() if value)
    if not names or rule_of(optimizer) is not None:
        return ""
    return f"{type(optimizer).__name__} ignores {names} ({listed(RULES)} do not)"


def names_like(param: torch.Tensor, state: dict[str, Any]) -> list[str]:
    """The states that have an element for each of the parameter's."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step" and value.shape == param.shape
    ]


def make_buffers(
    optimizer: Optimizer,
    bucket: HostBucket,
    wanted: Iterable[tuple[Trained, str, torch.dtype | str]],
    *,
    pin: bool,
) -> bool:
    """Memory for states that have an element for each of the parameter's.

    Args:
        optimizer: whose they are.
        bucket: where they shall be.
        wanted: parameters, a name of a state of each, and its dtype, or "int8".
        pin: page-lock them.

    Returns:
        Are there some in 8 bits?
    """
    named: dict[str, dict[int, torch.dtype | str]] = {}
    others = bucket.states.owners() not in ([], [optimizer])
    for trained, name, dtype in wanted:
        named.setdefault(name, {})[trained.at] = dtype
        given = trained.state.get(name) if others else None
        if given is not None and not isinstance(compat.local(given), BlockwiseTensor):
            bucket.states.share(optimizer, name, trained.at, compat.local(given))
    codes = False
    for name, dtypes in named.items():
        wide = {i: dtype for i, dtype in dtypes.items() if isinstance(dtype, torch.dtype)}
        narrow = sorted(dtypes.keys() - wide.keys())
        if wide:
            bucket.states.make(optimizer, name, wide, pin=pin)
        if narrow:
            bucket.states.make_codes(optimizer, name, narrow, pin=pin)
            codes = True
    return codes


def adopt(
    optimizer: Optimizer, bucket: HostBucket, i: int, state: dict[str, Any], names: Iterable[str]
) -> None:
    """Gives `state` views of the buffers; what was there (a loaded checkpoint) is copied."""
    buffers = bucket.states.of(optimizer)
    for name in names:
        given, buffer = state.get(name), buffers[name][i]
        if type(given) is type(buffer) is torch.Tensor and given.data_ptr() == buffer.data_ptr():
            if given.numel():
                continue
        if isinstance(buffer, tuple):
            mine = compat.local(given)
            if not (isinstance(mine, BlockwiseTensor) and mine.codes is buffer[0]):
                rule = rule_of(optimizer)
                view = BlockwiseTensor(
                    bucket.values[i],
                    *buffer,
                    signed=rule is None or rule.signed(name),
                    settle=bucket.pending.wait,
                )
                bucket.pending.withdraw()
                if given is None:
                    view.clear()
                else:
                    view.store(_part_of(given, bucket.params[i]).float())
                state[name] = compat.like(bucket.params[i], view)
        elif given is None or not _lies_in(given, buffer):
            bucket.pending.withdraw()
            if given is None:
                bucket.states.clear(optimizer, name, i)
            else:
                opened(given)
                bucket.states.filled(optimizer, name, i)
                buffer.copy_(_part_of(given, bucket.params[i]))
            state[name] = compat.like(bucket.params[i], _shown(given, buffer))


def _shown(given: Any, buffer: torch.Tensor) -> torch.Tensor:
    """The tensor that the user sees of a buffer. A tensor that was loaded goes on being the state,
    because `load_state_dict(found)` leaves it in `found` too; its own memory is free."""
    kept = (
        type(given) is torch.Tensor
        and (given.dtype, given.device, given.shape) == (buffer.dtype, buffer.device, buffer.shape)
        and not given.requires_grad
        and not given.is_inference()
    )
    if not kept:
        return buffer.detach()
    given.data = buffer
    return given  # type: ignore[no-any-return]


def _lies_in(given: torch.Tensor, buffer: torch.Tensor) -> bool:
    return buffer.numel() > 0 and compat.local(given).data_ptr() == buffer.data_ptr()


def _part_of(given: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """This rank's part of a state that was loaded: also of one that is whole."""
    plain: torch.Tensor = to_plain(given)
    if compat.is_sharded(param) and not compat.is_sharded(plain):
        plain = compat.distributed(plain, param)
    mine: torch.Tensor = compat.local(plain)
    return mine


def for_update(
    optimizer: Optimizer,
    bucket: HostBucket,
    i: int,
    state: dict[str, Any],
    names: Iterable[str] | None = None,
) -> dict[str, Any]:
    """A state as the update takes it: our own views, which are not guarded.

    Args:
        optimizer: whose it is.
        bucket: of the parameter.
        i: the parameter's index.
        state: `optimizer.state` of it.
        names: the states that a rule takes; others may be left from options before. None: all that
            the optimizer's own step takes, its counter too.
    """
    buffers = bucket.states.of(optimizer)
    found: dict[str, Any] = {}
    for name, value in state.items():
        if names is not None and name not in names:
            continue
        buffer = buffers.get(name, {}).get(i)
        if buffer is not None and type(value) is torch.Tensor:
            found[name] = buffer
            continue
        mine = compat.local(value)
        if isinstance(mine, BlockwiseTensor) and not isinstance(buffer, tuple):
            found[name] = mine.plain()
        elif buffer is not None:
            found[name] = buffer
        else:
            found[name] = mine.detach() if isinstance(mine, torch.Tensor) else mine
    if names is None and isinstance(state.get("step"), torch.Tensor):
        # float64: torch.optim computes with it as a tensor, not as a number, while any thread
        # compiles (torch.compiler.is_compiling() is of the process), and must round alike
        found["step"] = state["step"].to(torch.float64, copy=True)
    return found


def visible(state: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a state that an update writes to."""
    plain = torch.Tensor
    return [
        value
        for name, value in state.items()
        if name != "step" and (type(value) is plain or type(compat.local(value)) is plain)
    ]


def visible_on_disk(bucket: HostBucket) -> list[torch.Tensor]:
    """The visible states of a bucket whose states are on a disk, of every optimizer.

    A step reads and writes all of them, also those that it does not change: what a user would write
    meanwhile to a state of another optimizer, or of a parameter without a gradient, would be lost.
    """
    if bucket.disk is None or not bucket.states.on_disk():
        return []
    states = (
        owner.state[param]
        for owner in bucket.states.owners()
        if isinstance(owner, Optimizer)
        for param in bucket.params
        if param in owner.state
    )
    return [each for state in states for each in visible(state)]


def move_loaded(optimizer: Optimizer, param: nn.Parameter) -> None:
    """Moves states that were loaded before a parameter moved to where it is."""
    if param not in optimizer.state:
        return
    state = optimizer.state[param]
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim():
            state[name] = value.to(param.device)


def new_counter() -> torch.Tensor:
    """The "step" of an optimizer that counts, and has made none."""
    double = torch.get_default_dtype() == torch.float64
    return torch.tensor(0.0, dtype=torch.float64 if double else torch.float32)


def count_up(states: Iterable[dict[str, Any]]) -> None:
    """Count a step in an optimizer's own counters."""
    counting = [state for state in states if "step" in state]
    add_one([state["step"] for state in counting if isinstance(state["step"], torch.Tensor)])
    for state in counting:
        if not isinstance(state["step"], torch.Tensor):
            state["step"] += 1


def add_one(counters: list[torch.Tensor]) -> None:
    """Count a step in counters."""
    if counters:
        one = torch.ones((), dtype=counters[0].dtype)  # a number would be made a tensor for each
        compat.FOREACH_ADD(counters, one, alpha=1)


def reserve(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Orders first states as torch.optim does, by the parameter groups: `state_dict()` shows it.

    Args:
        optimizer: it steps.
        params: those that it may update.

    Returns:
        Parameters whose states are empty now; `drop_empty` takes those away that stay so.
    """
    kind, of = known(type(optimizer)), {id(param) for param in params}
    new: list[nn.Parameter] = []
    for group in optimizer.param_groups if kind is not None and of else ():
        if kind is not None and kind.has_states(group):
            new += [p for p in group["params"] if id(p) in of and p not in optimizer.state]
    for param in new:
        optimizer.state[param] = {}
    return new


def drop_empty(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
    """Removes the entries of `state_dict()` where torch.optim keeps no state."""
    for param in params:
        if param in optimizer.state and not optimizer.state[param]:
            del optimizer.state[param]


# States that go along with their parameters: into another bucket, or out of all.


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
