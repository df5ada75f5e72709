"""The parts of an `optimizer.step()`, bucket by bucket: the update and its backend.

This module changes no parameter or state value; it only allocates state memory and copies loaded
states into it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.ir.schedule import Schedule
from megacompile.ir.values import left_on_host
from megacompile.options import Lowering, Options
from megacompile.runtime.device.buffers import Wanted
from megacompile.runtime.device.pool import stored_bytes
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.optim.blockwise import quantizes
from megacompile.runtime.optim.rule import Group, OptimizerRule, Update
from megacompile.runtime.optim.rules import ADAM, USUAL, rule_of
from megacompile.runtime.optim.twin import seed_of
from megacompile.runtime.params import optimizer_states
from megacompile.runtime.params.gradient_guards import lazy_of
from megacompile.runtime.params.guards import any_shared, guard_of
from megacompile.runtime.params.host_bucket import HostBucket, StateDtype
from megacompile.runtime.params.optimizer_states import Trained
from megacompile.runtime.step import hooks
from megacompile.runtime.updates.compiled import compiled
from megacompile.runtime.updates.on_device import UpdateOffer
from megacompile.runtime.updates.update import BucketUpdate, ParamUpdate, UpdateBackend, UpdatePlace

_Gradient = tuple[torch.Tensor, float, bool]  # with its factor, and `ParamUpdate.intact`


class StepParts:
    """Builds the parts of one model's steps, and prepares for the first ones."""

    def __init__(self, machine: Machine, options: Options) -> None:
        self.machine = machine
        self.options = options
        self.cuda = machine.device.type == "cuda"
        self.helps = self.cuda and options.device_helps  # the device helps with host updates
        self.backends: dict[str, str] = {}  # by bucket name, from the last step
        self.prepared: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # have stepped
        self._compiled = False
        self._allocated: set[int] = set()  # bucket keys

    def part(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: list[Trained],
        # of the groups seen so far in the step, for torch.optim's own step, by group id, with True
        # if one is a tensor
        options: dict[int, tuple[dict[str, Any], bool]],
    ) -> BucketUpdate:
        """The part of a step for some parameters of a bucket."""
        rule, place = rule_of(optimizer), UpdatePlace.HOST
        if rule is None:
            backend = UpdateBackend.STOCK_ON_DEVICE if self.cuda else UpdateBackend.STOCK
        elif bucket.resident is not None:
            backend, place = UpdateBackend.KERNEL, UpdatePlace.RESIDENT
        elif self.compiles:
            backend = UpdateBackend.COMPILED
        else:
            plain = self.are_plain(trained)
            backend = UpdateBackend.STOCK if plain else UpdateBackend.TORCH
        kind, indices = type(optimizer), list(map(attrgetter("at"), trained))
        update = BucketUpdate(bucket, backend, place, kind, self.machine.device, indices)
        self._find_steps(update, optimizer, trained, rule if backend.by_rule else None)
        for step, each in zip(update.steps, trained, strict=True) if not backend.by_rule else ():
            key = id(each.group)
            if key not in options:
                group = each.group.copy()
                del group["params"]
                options[key] = group, any(map(isinstance, group.values(), repeat(torch.Tensor)))
            step.group, has_tensors = options[key]
            if has_tensors:  # such as the lr: the step waits then
                update.aliased = True  # see the float64 comment in for_update
        offer = bucket.pending.take_offer()
        assert offer is None or isinstance(offer, UpdateOffer)
        # updates of residents precede all later work on the stream
        if place is UpdatePlace.HOST:
            self._look_at(update, trained)
        update.first = update.first_steps()
        if update.first and rule is not None and bucket.disk is None:
            # the memory of the states that it makes: if that is short, nothing has changed yet
            dtypes: dict[str, dict[int, StateDtype]] = {}
            for step in update.first:
                for name in rule.state_names(step.group):
                    value = bucket.values[step.index]
                    dtypes.setdefault(name, {})[step.index] = value.dtype
            bucket.states.make(optimizer, dtypes, pin=self.cuda)
        if offer is not None:
            by_rule = place is UpdatePlace.HOST and backend.by_rule
            if by_rule and not update.aliased and offer.fits(update.steps):
                update.place, update.left = UpdatePlace.DEVICE, offer
            else:
                offer.drop()
        return update

    def _find_steps(
        self,
        update: BucketUpdate,
        optimizer: Optimizer,
        trained: Sequence[Trained],
        rule: OptimizerRule | None,
    ) -> None:
        bucket, grads = update.bucket, update.bucket.grads
        found: list[_Gradient] = []
        for each in trained:
            gradient, scale, intact = each.param.grad, 1.0, False
            assert gradient is not None
            ours, theirs = grads.get(each.at), compat.local(gradient)
            if ours is None or ours.data_ptr() != theirs.data_ptr():
                ours = theirs.detach()
            who = None if type(gradient) is torch.Tensor else lazy_of(gradient)
            if who is not None:
                who.check(gradient)
                scale = who.scale
                intact = ours is grads.get(each.at) and who.version == compat.version(gradient)
            found.append((ours, scale, intact))
        pin = (
            update.backend is UpdateBackend.STOCK_ON_DEVICE
            or self.machine.in_backward is not None
            or bucket.layout.key in self.machine.device_update.keys
        )
        update.steps = self._steps(optimizer, bucket, trained, found, rule, pin=pin)

    @staticmethod
    def _look_at(update: BucketUpdate, trained: Iterable[Trained]) -> None:
        """Record the tensors to guard during an update, and aliases of its memory."""
        bucket, gradients = update.bucket, list[torch.Tensor]()
        for each in trained:
            update.states += optimizer_states.visible(each.state)
            gradient = each.param.grad
            assert gradient is not None
            gradients.append(gradient)
            if guard_of(gradient) is None:
                update.visible.append(gradient)
        update.visible += update.states
        # a gradient's two references: the bucket's and p.grad (for a user's gradient, the step's)
        tensors = update.states + gradients
        if bucket.disk is not None:
            known = set(map(id, update.states))
            written = optimizer_states.visible_on_disk(bucket)
            others = [state for state in written if id(state) not in known]
            update.visible += others
            tensors += others
        if any(map(bucket.aliased, update.indices)) or any_shared(tensors):
            update.aliased = True

    @functools.cached_property
    def compiles(self) -> bool:
        """True if the host's updates are compiled."""
        return self.options.lowering is not Lowering.EAGER and compat.has_cpp_compiler()

    def state_dtype(self, param: torch.Tensor) -> StateDtype:
        """The dtype of a parameter's states, or "int8"."""
        wanted = self.options.state_dtype or param.dtype
        return torch.float32 if wanted == "int8" and not quantizes(param.numel()) else wanted

    def _steps(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: Sequence[Trained],
        gradients: Iterable[_Gradient],
        rule: OptimizerRule | None,  # updates them; None: torch.optim's own step does
        *,
        pin: bool,  # page-lock new states, on CUDA
    ) -> list[ParamUpdate]:
        """The steps of parameters, whose states move to the bucket."""
        groups = {id(each.group): each.group for each in trained} if rule else {}
        of_group = {key: rule.state_names(group) for key, group in groups.items()} if rule else {}
        names, wanted = list[Sequence[str]](), dict[str, dict[int, StateDtype]]()
        for each in trained:
            if rule is None:
                names.append(optimizer_states.names_like(each.param, each.state))
                dtype = None  # each state keeps its own
            else:
                names.append(of_group[id(each.group)])
                dtype = self.state_dtype(each.param)
            for name in names[-1]:
                wanted.setdefault(name, {})[each.at] = dtype or each.state[name].dtype
        bucket.states.make(optimizer, wanted, pin=pin and self.cuda)
        steps = []
        buffers = bucket.states.of(optimizer)
        hypers: dict[tuple[int, float, bool, float], tuple[float, ...]] = {}
        for each, own, (gradient, scale, intact) in zip(trained, names, gradients, strict=True):
            i, state, group = each.at, each.state, each.group
            first = rule is not None and any(state.get(name) is None for name in own)
            rounded = rule is not None and self.rounds(each.param)
            if rule is not None and (rounded or rule.counts) and "step" not in state:
                state["step"] = optimizer_states.new_counter()  # also for the seeds
            optimizer_states.adopt(optimizer, bucket, i, state, own)
            states = optimizer_states.for_update(buffers, i, state, own if rule else None)
            step = ParamUpdate(i, gradient, scale, group={}, states=states, intact=intact)
            steps.append(step)
            if rule is None:
                continue
            count = float(state.get("step", 0)) + 1
            key = (id(group), count, first, scale)
            if key not in hypers:
                hypers[key] = rule.hyper(group, step=count, first=first, scale=scale)
            step.rule, step.hyper = rule, hypers[key]
            if rounded:
                ranks, place = self.machine.ranks, (bucket.layout.key << 20) + i
                shard = 0 if ranks is None else ranks.rank
                step.seed = seed_of(self.machine.seed(), place, int(count), shard)
        return steps

    def in_backward(
        self, optimizer: Optimizer, bucket: HostBucket, indices: Iterable[int]
    ) -> dict[int, ParamUpdate]:
        """The rule-based steps of some parameters, by index, for an update in the backward."""
        self.backends[bucket.layout.name] = UpdatePlace.BACKWARD.label
        rule = rule_of(optimizer)
        assert rule is not None, "an update in the backward is by rule"
        by_param = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        params = [(bucket.params[i], i) for i in indices]
        trained = [Trained(p, i, by_param[id(p)], optimizer.state[p]) for p, i in params]
        gradients = [(torch.empty(0), 1.0, False)] * len(trained)
        steps = self._steps(optimizer, bucket, trained, gradients, rule, pin=True)
        return {step.index: step for step in steps}

    def are_plain(self, trained: Iterable[Trained]) -> bool:
        """True if parameters, their gradients and states have one dtype, as in torch.optim."""
        options = self.options
        own = options.state_dtype is not None or options.stochastic_rounding
        for param, *_ in trained:
            if param.grad is None or param.grad.dtype != param.dtype:
                return False
            if own and (self.rounds(param) or self.state_dtype(param) != param.dtype):
                return False
        return True

    def rounds(self, param: nn.Parameter) -> bool:
        return self.options.stochastic_rounding and param.dtype == torch.bfloat16

    # Code and memory of the first steps, prepared in the background.

    def precompile(self, resident: frozenset[int]) -> None:
        """Start compiling the code of host updates, before the first backward, but for the future
        resident buckets, by key. Assumes AdamW until an optimizer exists."""
        if self._compiled or not self.compiles or self.machine.in_backward is not None:
            return
        self._compiled = True
        optimizers = self._optimizers()
        found = [(rule_of(each), group) for each in optimizers for group in each.param_groups]
        if not optimizers:
            buckets = self.machine.buckets.values()
            trained = [p for bucket in buckets for p in bucket.params if p.requires_grad]
            found = [(ADAM, {**USUAL, "params": trained})]
        for rule, group in found:
            if rule is None or not all(o.fits(group.get(o.name)) for o in rule.options):
                continue  # the step will refuse it
            for param in group["params"]:
                place = self.machine.gradients.places.get(id(param))
                if place is not None and place[0] not in resident and param.numel() > 1:
                    compiled(rule, self._like(rule, group, param, *place))

    def _like(
        self, rule: OptimizerRule, group: Group, param: nn.Parameter, key: int, index: int
    ) -> Update:
        """An empty update like that of a parameter."""
        bucket, dtype = self.machine.buckets[key], self.state_dtype(param)
        empty = functools.partial(torch.empty, 0)
        codes = (empty(dtype=torch.uint8), empty(dtype=torch.float32))
        state = empty(dtype=dtype) if isinstance(dtype, torch.dtype) else codes
        names = rule.state_names(group)
        return Update(
            param=empty(dtype=param.dtype),
            grad=empty(dtype=bucket.grad_dtype or param.dtype),
            states=tuple(state if m.name in names else None for m in rule.moments),
            hyper=rule.hyper(group),
            copy=empty(dtype=bucket.streamed[index].dtype) if bucket.has_copy else None,
            seed=0 if self.rounds(param) else None,
        )

    def preallocate(self, schedule: Schedule) -> None:
        """Start allocating page-locked memory for a schedule's first step, once the buckets are in
        place: for offloaded saved tensors, gradients, and states of existing optimizers."""
        wanted = self.machine.activations.wanted(map(stored_bytes, left_on_host(schedule)))
        keys = [b.key for b in schedule.buckets if b.key not in self._allocated]
        self._allocated.update(keys)
        buckets = [self.machine.buckets[key] for key in keys]
        buckets = [bucket for bucket in buckets if bucket.pin and bucket.resident is None]
        if self.machine.in_backward is None:
            sizes = [b.bytes_like(b.grad_dtypes()) for b in reversed(buckets) if not b.grads]
            wanted += [Wanted(size_bytes, pin=True) for size_bytes in sizes if size_bytes]
            optimizers = self._optimizers() if buckets else []
        else:
            optimizers = [self.machine.in_backward.optimizer]
        for optimizer in optimizers:
            if optimizer not in self.prepared:
                wanted += self._of_states(optimizer, buckets, schedule)
        if wanted:
            self.machine.host_budget.preallocate(
                wanted, "saved tensors, gradients and optimizer states", self.machine.device
            )

    def _optimizers(self) -> list[Optimizer]:
        return hooks.constructed(lambda param: id(param) in self.machine.gradients.places)

    def _of_states(
        self, optimizer: Optimizer, buckets: Iterable[HostBucket], schedule: Schedule
    ) -> list[Wanted]:
        """The state memory that an optimizer's first step will allocate, bucket by bucket."""
        rule, in_backward = rule_of(optimizer), self.machine.in_backward is not None
        if rule is None or not (self.compiles or in_backward):
            return []
        by_key: dict[int, dict[str, dict[int, StateDtype]]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                key, i = self.machine.gradients.places.get(id(param), (-1, -1))
                if i in schedule.gradient_params.get(key, ()) and not optimizer.state.get(param):
                    named = by_key.setdefault(key, {})
                    for name in rule.state_names(group):
                        named.setdefault(name, {})[i] = self.state_dtype(param)
        wanted = []
        for bucket in buckets:
            key = bucket.layout.key
            pin = self.cuda and (in_backward or key in schedule.plan.device_update)
            for dtypes in by_key.get(key, {}).values() if bucket.disk is None else ():
                sizes = bucket.states.sizes(dtypes)
                wanted += [Wanted(size_bytes, pin, lock=self.helps) for size_bytes in sizes]
        return wanted
