"""The parts of an `optimizer.step()`, bucket by bucket: the update and its backend.

This module changes no parameter or state value; it only allocates state memory and copies loaded
states into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.options import Lowering, Options
from megacompile.progress import line
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.optim.blockwise import quantizes
from megacompile.runtime.optim.registry import rule_of
from megacompile.runtime.optim.rule import Group, OptimizerRule
from megacompile.runtime.optim.twin import seed_of
from megacompile.runtime.params.gradient_guards import GradientGuard, lazy_of
from megacompile.runtime.params.guards import GuardState, guard_of, is_shared
from megacompile.runtime.params.host_bucket import HostBucket
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
from megacompile.runtime.updates.on_device import UpdateOffer
from megacompile.runtime.updates.parameter import ParamUpdate
from megacompile.runtime.updates.update import BucketUpdate, UpdateBackend, UpdatePlace


class StepParts:
    """Builds the parts of one model's steps."""

    def __init__(self, machine: Machine, options: Options) -> None:
        self.machine = machine
        self.options = options
        self.cuda = machine.device.type == "cuda"
        self.helps = self.cuda and options.device_helps  # the device helps with host updates
        self.backends: dict[str, str] = {}  # by bucket name, from the last step

    def part(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: list[Trained],
        options: dict[int, dict[str, Any]],
    ) -> BucketUpdate:
        """The part of a step for some parameters of a bucket.

        Args:
            options: the options of the groups seen so far in the step, as torch.optim's own step
                needs them, by group id.
        """
        with self._waits(optimizer, bucket, trained):
            update = self._update(optimizer, bucket, trained, options)
        offer = bucket.pending.take_offer()
        assert offer is None or isinstance(offer, UpdateOffer)
        # updates of residents precede all later work on the stream
        if update.place is UpdatePlace.HOST:
            self._look_at(update, trained)
        update.first = update.first_steps()
        if update.first:
            self._make_first(optimizer, bucket, trained, update.first)
        if offer is not None:
            by_rule = update.place is UpdatePlace.HOST and update.backend.by_rule
            if by_rule and not update.aliased and offer.fits(update.steps):
                update.place, update.left = UpdatePlace.DEVICE, offer
            else:
                offer.drop()
        return update

    def _make_first(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: Iterable[Trained],
        first: Iterable[ParamUpdate],
    ) -> None:
        """Allocate host memory for the states of an optimizer's own first step, if its rule knows
        them: if memory is short, nothing has changed yet."""
        rule, new = rule_of(optimizer), {step.index for step in first}
        if rule is None or bucket.disk is not None:
            return
        of_new = [each for each in trained if each.at in new]
        for name in {name: None for each in of_new for name in rule.state_names(each.group)}:
            dtypes = {e.at: e.param.dtype for e in of_new if name in rule.state_names(e.group)}
            bucket.states.make(optimizer, name, dtypes, pin=self.cuda)

    @staticmethod
    def _look_at(update: BucketUpdate, trained: Iterable[Trained]) -> None:
        """Record the tensors to guard during an update, and aliases of its memory."""
        bucket = update.bucket
        for each in trained:
            mine = visible(each.state)
            update.states += mine
            update.visible += mine
            gradient = each.param.grad
            assert gradient is not None
            if guard_of(gradient) is None:
                update.visible.append(gradient)
            # a gradient's two references: the bucket's and p.grad (for a user's gradient, the
            # step's)
            parts = map(compat.local, (*mine, gradient))
            if bucket.aliased(each.at) or any(map(is_shared, parts)):
                update.aliased = True
        if bucket.disk is not None and (written := visible_on_disk(bucket)):
            known = {id(state) for state in update.states}
            others = [state for state in written if id(state) not in known]
            update.visible += others
            update.aliased = update.aliased or any(map(is_shared, map(compat.local, others)))
        if update.backend is UpdateBackend.STOCK and any(
            map(_has_tensors, {id(step.group): step.group for step in update.steps}.values())
        ):
            update.aliased = True  # see the float64 comment in for_update

    def _update(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: Sequence[Trained],
        options: dict[int, dict[str, Any]],
    ) -> BucketUpdate:
        backend, place = self._backend(optimizer, bucket, trained)
        pin = backend is UpdateBackend.STOCK_ON_DEVICE or self.machine.in_backward is not None
        pin = pin or bucket.layout.key in self.machine.device_update.keys
        rule = rule_of(optimizer) if backend.by_rule else None
        groups = None if rule is None else Groups(rule)
        states = [_states_of(each, groups) for each in trained]
        self._make_buffers(optimizer, bucket, trained, states, groups, pin=pin and self.cuda)
        kind, indices = type(optimizer), [each.at for each in trained]
        update = BucketUpdate(bucket, backend, place, kind, self.machine.device, indices)
        for each, names in zip(trained, states, strict=True):
            gradient = each.param.grad
            assert gradient is not None
            who = lazy_of(gradient)
            if who is not None:
                who.check(gradient)
            ours, theirs = bucket.grads.get(each.at), compat.local(gradient)
            foreign = ours is None or ours.data_ptr() != theirs.data_ptr()
            taken = theirs.detach() if foreign or ours is None else ours
            scale = 1.0 if who is None else who.scale
            step = self._step(optimizer, bucket, each, names, taken, scale, groups)
            if groups is None:
                step.group = _options(each.group, options)
            if who is not None:
                step.factor = _factor(who, gradient, place)
                step.intact = not foreign and who.version == compat.version(gradient)
            update.steps.append(step)
        return update

    @property
    def compiles(self) -> bool:
        """True if host updates are compiled to C++."""
        return self.options.lowering is not Lowering.EAGER and compat.has_cpp_compiler()

    def _backend(
        self, optimizer: Optimizer, bucket: HostBucket, trained: Sequence[Trained]
    ) -> tuple[UpdateBackend, UpdatePlace]:
        if rule_of(optimizer) is None:
            return (
                UpdateBackend.STOCK_ON_DEVICE if self.cuda else UpdateBackend.STOCK,
                UpdatePlace.HOST,
            )
        if bucket.resident is not None:
            return UpdateBackend.KERNEL, UpdatePlace.RESIDENT
        if self.compiles:
            return UpdateBackend.COMPILED, UpdatePlace.HOST
        plain = all(self.is_plain(each.param) for each in trained)
        return UpdateBackend.STOCK if plain else UpdateBackend.TORCH, UpdatePlace.HOST

    def state_dtype(self, param: torch.Tensor) -> torch.dtype | str:
        """The dtype of a parameter's states, or "int8"."""
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
        states: Iterable[Sequence[str]],
        groups: Groups | None,
        *,
        pin: bool,
    ) -> None:
        wanted: list[tuple[Trained, str, torch.dtype | str]] = []
        for each, names in zip(trained, states, strict=True):
            dtype = None if groups is None else self.state_dtype(each.param)
            wanted += [(each, name, dtype or each.state[name].dtype) for name in names]
        if make_buffers(optimizer, bucket, wanted, pin=pin):
            hooks.convert_state_dicts(optimizer)

    def _step(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: Trained,
        names: Sequence[str],
        gradient: torch.Tensor,
        scale: float,
        groups: Groups | None,
    ) -> ParamUpdate:
        """The step of one parameter.

        Args:
            names: its elementwise states.
            groups: the groups' scalars for its rule; None: torch.optim's own step updates it.
        """
        param, i, group, state = trained
        rule = None if groups is None else groups.rule
        first = rule is not None and any(state.get(name) is None for name in names)
        rounded = rule is not None and self.rounds(param)
        if rule is not None and (rounded or rule.counts) and "step" not in state:
            state["step"] = new_counter()  # even without `counts`, because the seeds need it
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
        """The rule-based steps of some parameters, by index, for an update in the backward."""
        self.backends[bucket.layout.name] = UpdatePlace.BACKWARD.value
        rule = rule_of(optimizer)
        assert rule is not None, "an update in the backward is by rule"
        by_param = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        params = [(bucket.params[i], i) for i in indices]
        trained = [Trained(p, i, by_param[id(p)], optimizer.state[p]) for p, i in params]
        groups, none = Groups(rule), torch.empty(0)
        states = [groups.names(each.group) for each in trained]
        with self._waits(optimizer, bucket, trained):
            self._make_buffers(optimizer, bucket, trained, states, groups, pin=self.cuda)
            steps = [
                self._step(optimizer, bucket, each, names, none, 1.0, groups)
                for each, names in zip(trained, states, strict=True)
            ]
        return {step.index: step for step in steps}

    def _waits(
        self, optimizer: Optimizer, bucket: HostBucket, trained: Iterable[Trained]
    ) -> AbstractContextManager[None]:
        """Log that loaded states, or states of a moved bucket, move."""
        if optimizer in bucket.states.owners() or not any(each.state for each in trained):
            return nullcontext()
        where = "host" if bucket.disk is None else "disk"
        where = where if bucket.resident is None else "device"
        return line(f"moving optimizer states to the {where}", self.options.progress)

    def is_plain(self, param: nn.Parameter) -> bool:
        """True if a parameter, its gradient and its states have one dtype, as in torch.optim."""
        assert param.grad is not None
        return not self.rounds(param) and param.grad.dtype == param.dtype == self.state_dtype(param)

    def rounds(self, param: nn.Parameter) -> bool:
        """True if a parameter is rounded stochastically."""
        return self.options.stochastic_rounding and param.dtype == torch.bfloat16


def _states_of(trained: Trained, groups: Groups | None) -> Sequence[str]:
    """The elementwise states of a parameter: of its rule, or those that it has."""
    if groups is None:
        return names_like(trained.param, trained.state)
    return groups.names(trained.group)


def _factor(who: GradientGuard, gradient: torch.Tensor, place: UpdatePlace) -> torch.Tensor | None:
    """The factor that an update applies to a gradient; applies it here if the update cannot."""
    if who.state is not GuardState.FOLDED:
        return None
    if place is not UpdatePlace.RESIDENT:
        who.open(gradient)
    return who.factor


def _has_tensors(options: dict[str, Any]) -> bool:
    """True if an option is a tensor, such as the lr."""
    return any(issubclass(kind, torch.Tensor) for kind in set(map(type, options.values())))


def _options(group: dict[str, Any], known: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """A group's options when its first step is prepared."""
    if id(group) not in known:
        known[id(group)] = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
    return known[id(group)]


# The scalars of parameter groups for a rule-based step: computed once per group, not per parameter.


class Groups:
    """The parameter groups of an optimizer; their options must not change meanwhile."""

    def __init__(self, rule: OptimizerRule) -> None:
        self.rule = rule
        self._names: dict[int, tuple[str, ...]] = {}
        self._hyper: dict[tuple[int, float, bool, float], tuple[float, ...]] = {}

    def names(self, group: Group) -> tuple[str, ...]:
        """The moments of a parameter in a group."""
        if id(group) not in self._names:
            self._names[id(group)] = self.rule.state_names(group)
        return self._names[id(group)]

    def hyper(self, group: Group, step: float, *, first: bool, scale: float) -> tuple[float, ...]:
        """The numbers of a step (see `OptimizerRule.hyper`)."""
        key = (id(group), step, first, scale)
        if key not in self._hyper:
            made = self.rule.hyper(group, step=step, first=first, scale=scale)
            self._hyper[key] = made
        return self._hyper[key]
