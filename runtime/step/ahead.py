"""Prepares code and memory for the first steps in the background."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile.ir.schedule import Schedule
from megacompile.ir.values import left_on_host
from megacompile.runtime.device.buffers import Wanted
from megacompile.runtime.device.saved import stored_bytes
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.optim.adam import ADAM, USUAL
from megacompile.runtime.optim.registry import rule_of
from megacompile.runtime.optim.rule import Group, OptimizerRule, Update
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.step import hooks
from megacompile.runtime.step.parts import StepParts
from megacompile.runtime.updates.compiled import compiled, kind_of


class Ahead:
    """Prepares the code and memory of one model's first steps.

    Args:
        parts: builds the parts of its steps.
        prepared: the optimizers that have stepped and need no preparation.
    """

    def __init__(self, machine: Machine, parts: StepParts, prepared: Collection[Optimizer]) -> None:
        self.machine = machine
        self._parts, self._prepared = parts, prepared
        self._compiled = False
        self._allocated: set[int] = set()  # bucket keys

    def precompile(self, resident: frozenset[int]) -> None:
        """Start compiling the code of host updates, before the first backward.

        Assumes AdamW until an optimizer exists.

        Args:
            resident: keys of the future resident buckets.
        """
        if self._compiled or self.machine.in_backward is not None:
            return
        self._compiled = True
        if not self._parts.compiles:
            return
        found = self._optimizers()
        rules = [(rule_of(each), each.param_groups) for each in found]
        if not found:
            rules = [(ADAM, [USUAL | {"params": self._trained()}])]
        for rule, groups in rules:
            if rule is not None:
                for update in self._kinds(rule, groups, resident):
                    compiled(rule).expect(update)

    def preallocate(self, schedule: Schedule) -> None:
        """Start allocating page-locked memory for the first step of a schedule, once the buckets
        are in place: for offloaded saved tensors, gradients, and the states of the existing
        optimizers.

        Args:
            schedule: planned, but not lowered yet.
        """
        wanted = self.machine.activations.wanted(map(stored_bytes, left_on_host(schedule)))
        keys = [b.key for b in schedule.buckets if b.key not in self._allocated]
        self._allocated.update(keys)
        buckets = [self.machine.buckets[key] for key in keys]
        buckets = [bucket for bucket in buckets if bucket.pin and bucket.resident is None]
        if buckets:
            wanted += self._of_buckets(buckets, schedule)
        if wanted:
            self.machine.host_budget.preallocate(
                wanted, "saved tensors, gradients and optimizer states", self.machine.device
            )

    def _optimizers(self) -> list[Optimizer]:
        return hooks.constructed(lambda param: self.machine.gradients.place(param) is not None)

    def _trained(self) -> list[nn.Parameter]:
        buckets = self.machine.buckets.values()
        return [param for bucket in buckets for param in bucket.params if param.requires_grad]

    def _kinds(
        self, rule: OptimizerRule, groups: Iterable[Group], resident: Collection[int]
    ) -> list[Update]:
        """The kinds of C++ host updates that an optimizer's steps will need."""
        found: dict[object, Update] = {}
        for group in groups:
            if not all(each.fits(group.get(each.name)) for each in rule.options):
                continue  # the step will refuse it
            for param in group["params"]:
                place = self.machine.gradients.place(param)
                if place is not None and place[0] not in resident and param.numel() > 1:
                    update = self._kind(rule, group, param, *place)
                    found[kind_of(update)] = update
        return list(found.values())

    def _kind(
        self, rule: OptimizerRule, group: Group, param: nn.Parameter, key: int, index: int
    ) -> Update:
        """An empty update like those of a parameter."""

        def empty(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(0, dtype=dtype)

        bucket, dtype = self.machine.buckets[key], self._parts.state_dtype(param)
        codes = (empty(torch.uint8), empty(torch.float32))
        state = empty(dtype) if isinstance(dtype, torch.dtype) else codes
        names = rule.state_names(group)
        return Update(
            param=empty(param.dtype),
            grad=empty(bucket.grad_dtype or param.dtype),
            states=tuple(state if m.name in names else None for m in rule.moments),
            hyper=rule.hyper(group),
            copy=empty(bucket.streamed[index].dtype) if bucket.has_copy else None,
            seed=0 if self._parts.rounds(param) else None,
        )

    def _of_buckets(self, buckets: Sequence[HostBucket], schedule: Schedule) -> list[Wanted]:
        in_backward = self.machine.in_backward
        wanted: list[Wanted] = []
        if in_backward is None:
            sizes = [bucket.grads_bytes() for bucket in reversed(buckets) if not bucket.grads]
            wanted += [Wanted(size_bytes, pin=True) for size_bytes in sizes if size_bytes]
        found = self._optimizers() if in_backward is None else [in_backward.optimizer]
        for optimizer in found:
            if optimizer not in self._prepared:
                wanted += self._of_states(optimizer, buckets, schedule)
        return wanted

    def _of_states(
        self, optimizer: Optimizer, buckets: Iterable[HostBucket], schedule: Schedule
    ) -> list[Wanted]:
        """The state memory that an optimizer's first step after a schedule will allocate, bucket by
        bucket."""
        parts = self._parts
        rule, in_backward = rule_of(optimizer), self.machine.in_backward is not None
        if rule is None or not (parts.compiles or in_backward):
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
                        named.setdefault(name, {})[place[1]] = parts.state_dtype(param)
        wanted = []
        for bucket in buckets:
            key = bucket.layout.key
            pin = parts.cuda and (in_backward or key in schedule.plan.device_update)
            for dtypes in by_key.get(key, {}).values() if bucket.disk is None else ():
                wide = {i: dtype for i, dtype in dtypes.items() if isinstance(dtype, torch.dtype)}
                narrow = sorted(dtypes.keys() - wide.keys())
                sizes = [bucket.bytes_like(wide)] if wide else []
                sizes += [bucket.states.codes_bytes(narrow)] if narrow else []
                wanted += [Wanted(size_bytes, pin, lock=parts.helps) for size_bytes in sizes]
        return wanted
