"""Detects the errors of an update during its preparation, before anything changes.

An error in the background or in a backward would leave half of the parameters updated. Possible
causes are an option of a parameter group, a loaded or assigned state, and anything else that
torch.optim's own step rejects; a rehearsal on tensors of a few elements finds the last. Values that
torch.optim's step accepts, such as a negative lr, are accepted here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.runtime.optim.rule import OwnStep, is_number
from megacompile.runtime.optim.rules import known
from megacompile.runtime.params.guards import unguarded
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.optimizer_states import Trained
from megacompile.runtime.updates.update import BucketUpdate, ParamUpdate, run_stock

_MISSING = object()
_REMEMBERED = 256  # rehearsals


def check_shared(where: str, optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Refuse an optimizer whose step is incorrect for sharded parameters. Raises OptimizerError: it
    computes with whole parameters, and its own step does not support DTensors."""
    kind = known(type(optimizer))
    # transformers' Adafactor and its copies create plain tensors, which do not mix with DTensors
    foreign = kind is None and any(c.__name__ == "Adafactor" for c in type(optimizer).__mro__)
    if not foreign and (not isinstance(kind, OwnStep) or kind.takes_dtensors):
        return
    if any(map(compat.is_sharded, params)):
        raise OptimizerError(
            f"{where} computes means over whole parameters, but each rank has only a part of them "
            "(mesh=), and its own step does not support DTensors; nothing was updated: use "
            "AdamW with state_dtype='int8', or leave out mesh="
        )


def check(
    where: str,
    optimizer: Optimizer,
    buckets: Mapping[int, HostBucket],
    found: Mapping[int, Sequence[Trained]],
) -> None:
    """Refuse options and states that the update of these parameters (by bucket key) would reject.
    Raises OptimizerError: an option of a group, or a state of a parameter, is invalid."""
    groups = {id(each.group): each.group for trained in found.values() for each in trained}
    check_options(where, optimizer, groups.values())
    for key, trained in found.items():
        for each in trained:
            if each.state:
                _check_state(where, optimizer, buckets[key].layout.params[each.at].name, each)


def check_backward(optimizer: Optimizer, buckets: Mapping[int, HostBucket]) -> None:
    """Refuse options and states that a backward's updates would reject, before the first update: in
    all buckets of the model, because other captured graphs may be part of the backward. Raises
    OptimizerError: as in `check`, or a parameter is not in the optimizer."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, list[Trained]] = {}
    for key, bucket in buckets.items():
        for i, param in enumerate(bucket.params):
            group = groups.get(id(param))
            if group is not None:
                trained = Trained(param, i, group, optimizer.state.get(param, {}))
                found.setdefault(key, []).append(trained)
            elif param.requires_grad:
                raise OptimizerError(
                    f"backward(): parameter {bucket.layout.params[i].name!r} is not in the "
                    f"{type(optimizer).__name__} of megacompile(model, optimizer=...), which "
                    "updates in the backward (nothing was updated); add it: "
                    "optimizer.add_param_group({'params': [...]}), or freeze it "
                    "(requires_grad_(False))"
                )
    where = f"backward(), with the {type(optimizer).__name__} of optimizer="
    with unguarded():
        check(where, optimizer, buckets, found)


def check_options(where: str, optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Raise if an update does not support a parameter group's options. Raises OptimizerError: names
    the group and the option."""
    kind = known(type(optimizer))
    assert kind is not None
    for group in groups:
        for option in kind.options:
            value = group.get(option.name, _MISSING)
            if option.fits(value):
                continue
            (n,) = [n for n, each in enumerate(optimizer.param_groups) if each is group]
            name = option.name
            has = (
                f"no {name}" if value is _MISSING else f"{name}={value!r} ({type(value).__name__})"
            )
            raise OptimizerError(
                f"{where}: param_groups[{n}] has {has}; needed {option.needed}; nothing was "
                f"updated: set optimizer.param_groups[{n}][{name!r}], and call it again"
            )


def _check_state(where: str, optimizer: Optimizer, name: str, trained: Trained) -> None:
    """Raise if an update cannot continue from a parameter's optimizer state, which is not empty."""
    param, _, group, state = trained
    kind = known(type(optimizer))
    assert kind is not None
    wrong = {}  # by name: what is needed
    for key, shape in kind.shapes(group, param.shape, state):
        value: Any = state.get(key)
        dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not dense or value.shape != shape or not value.is_floating_point():
            wrong[key] = f"a dense floating-point tensor of shape {tuple(shape)}"
    counted = is_number(state["step"]) if "step" in state else not kind.counts
    if not counted:
        wrong["step"] = "one number"
    for key, needed in wrong.items():
        got: Any = state.get(key, "missing")
        if isinstance(got, torch.Tensor):
            got = f"{got.dtype}, {got.layout}, of shape {tuple(got.shape)}"
        raise OptimizerError(
            f"{where}: the state {key!r} of parameter {name!r} is {got}; needed {needed}; nothing "
            "was updated: load a checkpoint of this model and optimizer, or reset the state of "
            "this parameter: del optimizer.state[param]"
        )


def rehearse(
    where: str, optimizer: Optimizer, updates: Iterable[BucketUpdate], passed: set[object]
) -> None:
    """Run torch.optim's own step on small stand-in tensors before prepared updates that use it.
    `passed` has the keys of rehearsals that succeeded, which are not repeated: the optimizer's
    class, the options, and metadata of a parameter, its gradient and its states. Raises
    OptimizerError: includes the step's error."""
    options: dict[int, object] = {}  # by id of the group
    steps = [(u, step) for u in updates if not u.backend.by_rule for step in u.steps]
    for update, step in steps:
        if id(step.group) not in options:
            group = [(name, type(value), repr(value)) for name, value in step.group.items()]
            options[id(step.group)] = tuple(group)
        value, grad = update.bucket.values[step.index], step.grad
        states = [
            (name, getattr(state, "dtype", type(state)), getattr(state, "ndim", 0))
            for name, state in step.states.items()
        ]
        looks = (value.dtype, grad.dtype, value.dim(), *states)
        known = (type(optimizer), options[id(step.group)], looks)
        if known in passed:
            continue
        mine = {n: _on_host(s) if n == "step" else _stand_in(s) for n, s in step.states.items()}
        options_of = {name: _on_host(value) for name, value in step.group.items()}
        try:
            with torch.no_grad():
                standin = ParamUpdate(0, _stand_in(grad), 1.0, options_of, mine)
                run_stock(type(optimizer), [standin], {0: _stand_in(value)})
        except Exception as error:
            name = update.bucket.layout.params[step.index].name
            raise OptimizerError(
                f"{where}: torch.optim's own step rejects parameter {name!r} with "
                f"{type(error).__name__}: {error}; nothing was updated: correct the options of its "
                "parameter group, or its state, and call it again"
            ) from error
        if len(passed) > _REMEMBERED:
            passed.clear()
        passed.add(known)


def _stand_in(tensor: Any) -> Any:
    """Zeros like a tensor, on the host, with at most two elements per dimension."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return torch.zeros([min(size, 2) for size in tensor.shape], dtype=tensor.dtype)


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
