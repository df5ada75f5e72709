"""The parts of an `optimizer.step()`, bucket by bucket: what is to be done, and by which backend.

Nothing here changes a parameter or a state; only memory for states is made, and states that were
loaded are taken into it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.ir.schedule import Schedule
from megacompile.options import Lowering, Options
from megacompile.progress import line
from megacompile.runtime.device.buffers import Wanted
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.optim.blockwise import is_shared, quantizes
from megacompile.runtime.optim.registry import rule_of
from megacompile.runtime.optim.rule import Group, OptimizerRule, Update
from megacompile.runtime.optim.stochastic import seed_of
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.gradient_guards import GradientGuard, lazy_of
from megacompile.runtime.params.guards import GuardState, guard_of
from megacompile.runtime.params.optimizer_states import (
    Trained,
    adopt,
    for_update,
    make_buffers,
    names_like,
    new_counter,
    visible,
    visible_on_disk,
)
from megacompile.runtime.step import hooks
from megacompile.runtime.step.alike import Groups
from megacompile.runtime.updates.cpp import kind_of
from megacompile.runtime.updates.on_device import DeviceUpdate
from megacompile.runtime.updates.part import BucketPart
from megacompile.runtime.updates.update import BucketUpdate, ParamUpdate, UpdateBackend

_RULES = (
    UpdateBackend.COMPILED,
    UpdateBackend.TORCH,
    UpdateBackend.BACKWARD,
    UpdateBackend.RESIDENT,
)


class StepParts:
    """Makes the parts of one model's steps."""

    def __init__(self, machine: Machine, options: Options) -> None:
        self.machine = machine
        self.options = options

    def part(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: list[Trained],
        options: dict[int, dict[str, Any]],
    ) -> BucketPart:
        """The part of a step that is over some parameters of a bucket.

        Args:
            options: of the groups that the step has met, as torch.optim's own step takes them, by
                the group's id.
        """
        with self._waits(optimizer, bucket, trained):
            update = self._update(optimizer, bucket, trained, options)
        offer = bucket.pending.take_offer()
        assert offer is None or isinstance(offer, DeviceUpdate)
        part = BucketPart(
            update, update.backend, trained, [], [], aliased=False, first=[], left=None
        )
        # an update of residents is over for all that follows on the stream
        if update.backend is not UpdateBackend.RESIDENT:
            self._look_at(part)
        if update.makes_states():
            part.first = update.new()
            self._make_first(optimizer, bucket, trained, part.first)
        if offer is not None:
            by_rule = update.backend in (UpdateBackend.COMPILED, UpdateBackend.TORCH)
            if by_rule and not part.aliased and offer.fits(update.steps):
                update.backend, part.left = UpdateBackend.ON_DEVICE, offer
            else:
                offer.drop()
        return part

    def _make_first(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: Iterable[Trained],
        first: Iterable[ParamUpdate],
    ) -> None:
        """Make the host memory that the states of an optimizer's own first step will be moved to,
        as far as its rule says which: where there is too little, nothing has changed yet."""
        rule, new = rule_of(optimizer), {step.index for step in first}
        if rule is None or bucket.disk is not None:
            return
        of_new = [each for each in trained if each.at in new]
        for name in {name: None for each in of_new for name in rule.state_names(each.group)}:
            dtypes = {e.at: e.param.dtype for e in of_new if name in rule.state_names(e.group)}
            bucket.states.make(optimizer, name, dtypes, pin=self.cuda)

    @staticmethod
    def _look_at(part: BucketPart) -> None:
        """Find out who can see that an update is in flight, and who has another name for it."""
        update = part.update
        bucket = update.bucket
        for each in part.trained:
            mine = visible(each.state)
            part.states += mine
            part.visible += mine
            gradient = each.param.grad
            assert gradient is not None
            if guard_of(gradient) is None:
                part.visible.append(gradient)
            # a gradient's two names: ours, and p.grad (of one of the user's, what the step reads)
            parts = map(compat.local, (*mine, gradient))
            if bucket.aliased(each.at) or any(map(is_shared, parts)):
                part.aliased = True
        if written := visible_on_disk(bucket):
            known = {id(state) for state in part.states}
            others = [state for state in written if id(state) not in known]
            part.visible += others
            part.aliased = part.aliased or any(map(is_shared, map(compat.local, others)))
        if update.backend is UpdateBackend.STOCK and any(
            map(_has_tensors, {id(step.group): step.group for step in update.steps}.values())
        ):
            part.aliased = True  # see float64 in for_update

    def _update(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: Sequence[Trained],
        options: dict[int, dict[str, Any]],
    ) -> BucketUpdate:
        backend = self._backend(optimizer, bucket, trained)
        pin = backend is UpdateBackend.STOCK_ON_DEVICE or self.machine.in_backward is not None
        pin = pin or bucket.layout.key in self.machine.device_update.keys
        rule = rule_of(optimizer) if backend in _RULES else None
        groups = None if rule is None else Groups(rule)
        self._make_buffers(optimizer, bucket, trained, groups, pin=pin and self.cuda)
        update = BucketUpdate(bucket, backend, type(optimizer), self.machine.device)
        for each in trained:
            gradient = each.param.grad
            assert gradient is not None
            who = lazy_of(gradient)
            if who is not None:
                who.check(gradient)
            ours, theirs = bucket.grads.get(each.at), compat.local(gradient)
            foreign = ours is None or ours.data_ptr() != theirs.data_ptr()
            taken = theirs.detach() if foreign or ours is None else ours
            scale = 1.0 if who is None else who.scale
            step = self._step(optimizer, bucket, each, taken, scale, groups)
            if groups is None:
                step.group = _options(each.group, options)
            step.factor = _factor(who, gradient, backend)
            step.intact = (
                not foreign and who is not None and who.version == compat.version(gradient)
            )
            update.steps.append(step)
        return update

    def foreseen(
        self, rule: OptimizerRule, groups: Iterable[Group], resident: Collection[int]
    ) -> list[Update]:
        """The kinds of updates that the steps of an optimizer will have on the host, in C++.

        Args:
            rule: its rule.
            groups: its parameter groups.
            resident: keys of the buckets that will live on the device.
        """
        found: dict[object, Update] = {}
        for group in groups:
            if not all(each.fits(group.get(each.name)) for each in rule.options):
                continue  # the step refuses it
            for param in group["params"]:
                place = self.machine.gradients.place(param)
                if place is not None and place[0] not in resident and param.numel() > 1:
                    update = self._kind(rule, group, param, *place)
                    found[kind_of(update)] = update
        return list(found.values())

    def states_ahead(
        self, optimizer: Optimizer, buckets: Iterable[HostBucket], schedule: Schedule
    ) -> list[Wanted]:
        """The memory of states that an optimizer's first step after a schedule will make, bucket
        by bucket."""
        rule, in_backward = rule_of(optimizer), self.machine.in_backward is not None
        if rule is None or not (self.compiles or in_backward):
            return []
        by_key: dict[int, dict[str, dict[int, torch.dtype | str]]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                place = self.machine.gradients.place(param)
                if place is None or optimizer.state.get(param):
                    continue
                if place[1] in schedule.gradient_params.get(place[0], ()):
                    for name in rule.state_names(group):
                        named = by_key.setdefault(place[0], {})
                        named.setdefault(name, {})[place[1]] = self._state_dtype(param)
        wanted = []
        for bucket in buckets:
            key = bucket.layout.key
            pin = self.cuda and (in_backward or key in schedule.plan.device_update)
            for dtypes in by_key.get(key, {}).values() if bucket.disk is None else ():
                wide = {i: dtype for i, dtype in dtypes.items() if isinstance(dtype, torch.dtype)}
                narrow = sorted(dtypes.keys() - wide.keys())
                sizes = [bucket.bytes_like(wide)] if wide else []
                sizes += [bucket.states.codes_bytes(narrow)] if narrow else []
                wanted += [Wanted(size_bytes, pin, lock=self.helps) for size_bytes in sizes]
        return wanted

    def _kind(
        self, rule: OptimizerRule, group: Group, param: nn.Parameter, key: int, index: int
    ) -> Update:
        """An update of no elements, like those of a parameter."""

        def empty(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(0, dtype=dtype)

        bucket, dtype = self.machine.buckets[key], self._state_dtype(param)
        codes = (empty(torch.uint8), empty(torch.float32))
        state = empty(dtype) if isinstance(dtype, torch.dtype) else codes
        names = rule.state_names(group)
        return Update(
            param=empty(param.dtype),
            grad=empty(bucket.grad_dtype or param.dtype),
            states=tuple(state if m.name in names else None for m in rule.moments),
            hyper=rule.hyper(group),
            copy=empty(bucket.streamed[index].dtype) if bucket.has_copy else None,
            seed=0 if self._rounds(param) else None,
        )

    @property
    def compiles(self) -> bool:
        """True if updates on the host are compiled to C++."""
        return self.options.lowering is not Lowering.EAGER and compat.has_cpp_compiler()

    @property
    def cuda(self) -> bool:
        """True if the device is a GPU."""
        return self.machine.device.type == "cuda"

    @property
    def helps(self) -> bool:
        """True if the device helps with the updates of host memory."""
        return self.cuda and self.options.device_helps

    def _backend(
        self, optimizer: Optimizer, bucket: HostBucket, trained: Sequence[Trained]
    ) -> UpdateBackend:
        if rule_of(optimizer) is None:
            return UpdateBackend.STOCK_ON_DEVICE if self.cuda else UpdateBackend.STOCK
        if bucket.resident is not None:
            return UpdateBackend.RESIDENT
        plain = all(self.is_plain(each.param) for each in trained)
        if self.options.lowering is Lowering.EAGER:
            return UpdateBackend.STOCK if plain else UpdateBackend.TORCH
        if compat.has_cpp_compiler():
            return UpdateBackend.COMPILED
        return UpdateBackend.FUSED if plain else UpdateBackend.TORCH

    def _state_dtype(self, param: torch.Tensor) -> torch.dtype | str:
        wanted = self.options.state_dtype
        if wanted is None:
            return param.dtype
        if wanted == "int8" and not quantizes(param.numel()):
            return torch.float32
        return wanted

    def _make_buffers(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: Iterable[Trained],
        groups: Groups | None,
        *,
        pin: bool,
    ) -> None:
        wanted: list[tuple[Trained, str, torch.dtype | str]] = []
        for each in trained:
            if groups is not None:
                dtype = self._state_dtype(each.param)
                wanted += [(each, n, dtype) for n in groups.names(each.group)]
            else:
                names = names_like(each.param, each.state)
                wanted += [(each, name, each.state[name].dtype) for name in names]
        if make_buffers(optimizer, bucket, wanted, pin=pin):
            hooks.convert_state_dicts(optimizer)

    def _step(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: Trained,
        gradient: torch.Tensor,
        scale: float,
        groups: Groups | None,
    ) -> ParamUpdate:
        """The step of one parameter.

        Args:
            groups: of its rule; None: torch.optim's own step makes it.
        """
        param, i, group, state = trained
        rule = None if groups is None else groups.rule
        names = names_like(param, state) if groups is None else groups.names(group)
        first = any(state.get(name) is None for name in names)
        rounded = rule is not None and self._rounds(param)
        if rule is not None and (rounded or rule.counts) and "step" not in state:
            state["step"] = new_counter()  # without `counts` too: the seeds need it
        adopt(optimizer, bucket, i, state, names)
        step = ParamUpdate(
            index=i,
            grad=gradient,
            scale=scale,
            group={},
            states=for_update(optimizer, bucket, i, state, names if rule else None),
        )
        if groups is not None:
            count = float(state.get("step", 0)) + 1
            step.rule = rule
            step.hyper = groups.hyper(group, count, first=first, scale=scale)
            if rounded:
                ranks, place = self.machine.ranks, (bucket.layout.key << 20) + i
                shard = 0 if ranks is None else ranks.rank
                step.seed = seed_of(self.machine.seed(), place, int(count), shard)
        return step

    def in_backward(
        self, optimizer: Optimizer, bucket: HostBucket, indices: Iterable[int]
    ) -> dict[int, ParamUpdate]:
        """The steps of some parameters by rule, for an update in the backward."""
        rule = rule_of(optimizer)
        assert rule is not None, "an update in the backward is by rule"
        by_param = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        params = [(bucket.params[i], i) for i in indices]
        trained = [Trained(p, i, by_param[id(p)], optimizer.state[p]) for p, i in params]
        groups, none = Groups(rule), torch.empty(0)
        with self._waits(optimizer, bucket, trained):
            self._make_buffers(optimizer, bucket, trained, groups, pin=self.cuda)
            steps = [self._step(optimizer, bucket, each, none, 1.0, groups) for each in trained]
        return {step.index: step for step in steps}

    def _waits(
        self, optimizer: Optimizer, bucket: HostBucket, trained: Iterable[Trained]
    ) -> AbstractContextManager[None]:
        """Says that states move which were loaded, or whose bucket has moved."""
        if optimizer in bucket.states.owners() or not any(each.state for each in trained):
            return nullcontext()
        where = "host" if bucket.disk is None else "disk"
        where = where if bucket.resident is None else "device"
        return line(f"moving optimizer states to the {where}", self.options.progress)

    def is_plain(self, param: nn.Parameter) -> bool:
        """True if a parameter, its gradient and its states are of one dtype, as torch.optim has
        them."""
        assert param.grad is not None
        return not self._rounds(param) and param.grad.dtype == param.dtype == self._state_dtype(
            param
        )

    def _rounds(self, param: nn.Parameter) -> bool:
        """True if a parameter is rounded at random."""
        return self.options.stochastic_rounding and param.dtype == torch.bfloat16


def _factor(
    who: GradientGuard | None, gradient: torch.Tensor, backend: UpdateBackend
) -> torch.Tensor | None:
    """The factor that an update multiplies a gradient by. Where it cannot, that is done here."""
    if who is None or who.state is not GuardState.FOLDED:
        return None
    if backend is not UpdateBackend.RESIDENT:
        who.open(gradient)
    return who.factor


def _has_tensors(options: dict[str, Any]) -> bool:
    """True if an option is a tensor, such as a tensor lr."""
    return any(issubclass(kind, torch.Tensor) for kind in set(map(type, options.values())))


def _options(group: dict[str, Any], known: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A group's options, as they are when its first step is prepared."""
    if id(group) not in known:
        known[id(group)] = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
    return known[id(group)]
