"""The update of one bucket in one `optimizer.step()`: its tensors and its backend.

A backend is the code of an update:

    STOCK            torch.optim's own step on the bucket's tensors; bitwise the plain loop
    STOCK_ON_DEVICE  the same on device copies, one parameter at a time, such as Muon's products
    FUSED            torch.optim's fused CPU kernels: one pass over memory, no C++ compiler
    COMPILED         the rule's twin (`optim.twin`), compiled by Inductor to C++: also one pass
    TORCH            the rule's twin in eager mode: until COMPILED is ready (see `compiled`), or
                     without a C++ compiler for updates that FUSED does not support
    KERNEL           the rule's kernel, bitwise equal to its twin (`optim.kernels`)

A place is where the update runs:

    HOST      in host memory: a thread runs it after `step()` has returned; a GPU helps with the
              kernel (see `workers`)
    DEVICE    on the device, where the backward has left the kernel's inputs (see `on_device`); the
              backend is that of the host, which is the fallback
    RESIDENT  on the device, in place: one launch updates all such buckets
    BACKWARD  on the device, after the backward of its stage (see `in_backward`)

Host updates are bound by host memory bandwidth: AdamW with bf16 parameters and gradients and
float32 moments reads 12 bytes per parameter and writes 10.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from megacompile.cost.optimizer import LEAST_HELPED
from megacompile.ir import ops
from megacompile.runtime.optim.kernels.entry import update_bucket
from megacompile.runtime.optim.registry import known
from megacompile.runtime.optim.rule import OptimizerRule, Update
from megacompile.runtime.optim.twin import apply
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.updates.chunks import Chunks
from megacompile.runtime.updates.compiled import compiled
from megacompile.runtime.updates.cpp import kind_of
from megacompile.runtime.updates.on_device import DeviceUpdate
from megacompile.runtime.updates.parameter import (
    ParamUpdate,
    flat,
    laid_out_as,
    run_stock,
    run_stock_on_device,
)


class UpdateBackend(enum.Enum):
    """The code of an update; see the module's docstring."""

    STOCK = "torch.optim", False
    STOCK_ON_DEVICE = "torch.optim on the device", False
    FUSED = "torch.optim, fused", False
    COMPILED = "compiled to C++", True
    TORCH = "torch", True
    KERNEL = "kernel", True

    def __init__(self, said: str, by_rule: bool) -> None:
        self.said = said  # in `megacompile.updates()`
        self.by_rule = by_rule  # False: by the optimizer's own code


class UpdatePlace(enum.Enum):
    """The place where an update runs; see the module's docstring."""

    HOST = "on the host"
    DEVICE = "on the device"
    RESIDENT = "on the device, resident"
    BACKWARD = "in the backward"


_NOTHING = frozenset((type(None),))  # as the class of each of a parameter's states

_OPS: dict[UpdatePlace, Callable[..., Any]] = {
    UpdatePlace.HOST: ops.update_host,
    UpdatePlace.DEVICE: ops.update,
    UpdatePlace.RESIDENT: ops.update_resident,
}


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent parameters that one call of a rule updates."""

    rule: OptimizerRule
    update: Update  # flat; only of the first parameter until `joined`
    ours: bool  # True if the gradient is in the bucket
    numel: int  # of all parameters and the padding between them, which stays zero

    @property
    def several(self) -> bool:
        """True if it has several elements; a single element would need separate code."""
        return self.numel > 1

    def reach(self, other: _Run) -> int:
        """The number of elements of this run joined with the next; 0 if they cannot be joined."""
        first, second = self.update, other.update
        if (
            (self.rule, tuple(first.hyper)) != (other.rule, tuple(second.hyper))
            or not (self.ours and other.ours and other.numel)
            or first.seed is not None
            or any(isinstance(state, tuple) for state in (*first.states, *second.states))
        ):
            return 0
        distance = second.param.data_ptr() - first.param.data_ptr()
        elements = distance // first.param.itemsize
        if elements < self.numel:
            return 0
        for a, b in zip(_tensors(first), _tensors(second), strict=True):
            if a is None and b is None:
                continue
            if a is None or b is None or a.dtype != b.dtype:
                return 0
            if b.data_ptr() - a.data_ptr() != elements * a.itemsize:
                return 0
        return elements + other.numel

    def joined(self, bucket: HostBucket) -> _Run:
        """The run with one update of all its elements."""
        if self.update.param.numel() == self.numel:
            return self
        return replace(self, update=self.update.map(lambda _, t: bucket.span(t, self.numel)))


def _tensors(update: Update) -> tuple[Any, ...]:
    return (update.param, update.grad, update.copy, *update.states)


@dataclass(eq=False, slots=True)
class BucketUpdate:
    """The update of one bucket's parameters, from the step's preparation to its completion."""

    bucket: HostBucket
    backend: UpdateBackend
    place: UpdatePlace
    kind: type[Optimizer]
    device: torch.device
    indices: Sequence[int]  # of the parameters
    steps: list[ParamUpdate] = field(default_factory=list)  # of the parameters; none if `together`
    together: Callable[[Sequence[BucketUpdate]], None] | None = None  # updates several buckets
    runs: list[_Run] = field(default_factory=list)  # set by `prepare`, until the update runs
    on_device: bool = False  # True if the device may update the host memory
    states: list[torch.Tensor] = field(default_factory=list)  # the user-visible states
    visible: list[torch.Tensor] = field(default_factory=list)
    """The user-visible states, all states on a disk, and unguarded gradients."""
    aliased: bool = False  # True if its memory has an alias that cannot be guarded
    first: list[ParamUpdate] = field(default_factory=list)
    """The steps whose states torch.optim's own first step will create."""
    left: DeviceUpdate | None = None  # the offer that the backward left on the device
    _values: dict[int, torch.Tensor] = field(default_factory=dict)  # for parameters from a disk

    @property
    def op(self) -> Callable[..., Any]:
        """The op of an update graph that runs it."""
        return _OPS[self.place]

    @property
    def said(self) -> str:
        """The user-visible name of the backend, or of the place if it is the device."""
        return self.backend.said if self.place is UpdatePlace.HOST else self.place.value

    def take(self, left: DeviceUpdate) -> None:
        """Use the tensors that the backward left on the device."""
        self.place, self.left = UpdatePlace.DEVICE, left

    def drop(self) -> None:
        """Drop the tensors that the backward left on the device; the host updates instead."""
        if self.left is not None:
            self.left.drop()
            self.place, self.left = UpdatePlace.HOST, None

    @property
    def numel(self) -> int:
        """The number of updated elements."""
        return sum(self.bucket.layout.params[step.index].numel for step in self.steps)

    def first_steps(self) -> list[ParamUpdate]:
        """The steps of parameters without states, if torch.optim's own step will create some. Valid
        only before it runs."""
        if self.backend.by_rule:
            return []
        new = [s for s in self.steps if _NOTHING.issuperset(map(type, s.states.values()))]
        kind = known(self.kind) if new else None
        if kind is None or not any(kind.has_states(step.group) for step in new):
            return []
        return new

    def __call__(self) -> None:
        with torch.no_grad():
            if self.backend.by_rule:
                self._by_rules()
            else:
                self._stock()

    # By rule.

    def prepare(self, done: dict[object, bool]) -> None:
        """Find the runs and their code, in the thread that calls `optimizer.step()`.

        Until code is compiled, the eager twin runs. `done` caches which kinds of updates have code
        in this step, so that it does not change within the step.
        """
        if self.place is UpdatePlace.HOST and self.backend.by_rule:
            self.runs = self._runs()
        for run in self.runs if self.backend is UpdateBackend.COMPILED else ():
            kind = (run.rule, kind_of(run.update))
            if run.several and kind not in done:
                done[kind] = compiled(run.rule).ready(run.update)
            if run.several and not done[kind]:
                self.backend = UpdateBackend.TORCH

    def stage(self, staged: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Redirect the update to copies of parameters and states, such as those read from a
        disk."""
        for step in self.steps:
            step.states = {
                name: tuple(map(staged, value))
                if isinstance(value, tuple)
                else staged(value)
                if isinstance(value, torch.Tensor)
                else value
                for name, value in step.states.items()
            }

        self._values = {s.index: staged(self.bucket.values[s.index]) for s in self.steps}
        self.runs = [
            replace(run, update=run.update.map(lambda _, tensor: staged(tensor)))
            for run in self.runs
        ]

    def _value(self, index: int) -> torch.Tensor:
        """The tensor that the update changes for a parameter."""
        return self._values.get(index, self.bucket.values[index])

    def suits_chunks(self) -> bool:
        """True if the device can update it in chunks and the transfer pays off. Valid after
        preparation.

        All tensors must be in the bucket's page-locked memory, not on a disk. Stochastic rounding
        is excluded, because it depends on the position in the whole parameter.
        """
        eligible = all(run.ours and run.update.seed is None for run in self.runs)
        return (
            eligible
            and self.bucket.disk is None
            and sum(run.numel for run in self.runs) >= LEAST_HELPED
        )

    def by_chunks(self, chunks: Chunks) -> None:
        """Run the update on the device, in chunks."""
        chunks.update((run.rule, run.update) for run in self._take_runs())

    def _take_runs(self) -> list[_Run]:
        runs, self.runs = self.runs, []  # drop views of gradients after the update
        return runs

    def _by_rules(self) -> None:
        for run in self._take_runs():
            if self.backend is UpdateBackend.COMPILED and run.several:
                compiled(run.rule)(run.update)
            else:
                apply(run.rule, run.update)

    def for_kernel(self) -> list[tuple[OptimizerRule, Update]]:
        """The kernel inputs for a resident bucket."""
        inputs = []
        for step in self.steps:
            assert step.rule is not None
            update = self._of(step, _dense)
            if update.param.numel():
                inputs.append((step.rule, update))
        return inputs

    def _runs(self) -> list[_Run]:
        """The updates. Adjacent ones with equal hyperparameters are merged, because a call costs
        more than the update of a small parameter."""
        runs: list[_Run] = []
        last = -2
        for step in self.steps:
            run = self._run(step)
            adjacent = runs and step.index == last + 1  # every parameter between has a gradient
            last = step.index
            reach = runs[-1].reach(run) if adjacent else 0
            if reach:
                runs[-1] = replace(runs[-1], numel=reach)
            elif run.numel:
                runs.append(run)
        return [run.joined(self.bucket) for run in runs]

    def _run(self, step: ParamUpdate) -> _Run:
        assert step.rule is not None
        update = self._of(step, flat)
        bucket, i = self.bucket, step.index
        ours = step.grad is bucket.grads.get(i) or bucket.holds(step.grad)
        return _Run(step.rule, update, ours, update.param.numel())

    def _of(self, step: ParamUpdate, lay: Callable[[torch.Tensor], torch.Tensor]) -> Update:
        """The update of one parameter, with `lay` applied to its tensors."""
        bucket, i = self.bucket, step.index
        value = bucket.values[i]
        return Update(
            param=lay(value),
            grad=lay(laid_out_as(step.grad, value)),
            states=tuple(lay(s) if isinstance(s, torch.Tensor) else s for s in step.in_order()),
            hyper=step.hyper,
            copy=lay(bucket.streamed[i]) if bucket.has_copy else None,
            seed=step.seed,
            factor=step.factor,
        )

    # torch.optim's own step.

    def _stock(self) -> None:
        bucket = self.bucket
        if self.backend is UpdateBackend.STOCK_ON_DEVICE:
            for step in self.steps:
                run_stock_on_device(self.kind, step, self._value(step.index), self.device)
        else:
            run_stock(self.kind, self.steps, {s.index: self._value(s.index) for s in self.steps})
        for step in self.steps:
            if bucket.has_copy:
                bucket.streamed[step.index].copy_(bucket.values[step.index])


def update_residents(updates: Sequence[BucketUpdate]) -> None:
    """Update resident buckets with one kernel launch per rule and signature, because a launch takes
    the host longer than a layer's update takes the device."""
    if updates[0].together is not None:
        updates[0].together(updates)
        return
    by_rule: dict[OptimizerRule, list[Update]] = {}
    for each in updates:
        for rule, update in each.for_kernel():
            by_rule.setdefault(rule, []).append(update)
    with torch.no_grad():
        for rule, together in by_rule.items():
            update_bucket(rule, together)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order. Returns a contiguous tensor itself: that is faster
    than a view."""
    return tensor if tensor.is_contiguous() else flat(tensor)
