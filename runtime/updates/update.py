"""The update of one bucket in one `optimizer.step()`: its tensors and its backend.

A backend is the code of an update:

    STOCK            torch.optim's own step on the bucket's tensors; bitwise the plain loop
    STOCK_ON_DEVICE  the same on device copies, one parameter at a time, such as Muon's products
    COMPILED         the rule's twin (`optim.twin`), compiled by Inductor to C++: also one pass
    TORCH            the rule's twin in eager mode: until COMPILED is ready (see `compiled`), and
                     without a C++ compiler if dtypes differ, which torch.optim does not support
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from megacompile.cost.optimizer import LEAST_HELPED
from megacompile.ir import ops
from megacompile.runtime.optim.rule import OptimizerRule, Update, map_state
from megacompile.runtime.optim.rules import known
from megacompile.runtime.optim.twin import apply, update_bucket
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.updates.compiled import compiled, kind_of
from megacompile.runtime.updates.on_device import UpdateOffer
from megacompile.runtime.updates.parameter import (
    ParamUpdate,
    flat,
    run_stock,
    run_stock_on_device,
    update_of,
)


class UpdateBackend(enum.Enum):
    """The code of an update; see the module's docstring."""

    STOCK = "torch.optim", False
    STOCK_ON_DEVICE = "torch.optim on the device", False
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
    runs: list[Update] = field(default_factory=list)
    """Flat updates, each of one or several parameters; set by `prepare`, until the update runs."""
    foreign: bool = False  # True if a gradient is not in the bucket; set by `prepare`
    on_device: bool = False  # True if the device may update the host memory
    states: list[torch.Tensor] = field(default_factory=list)  # the user-visible states
    visible: list[torch.Tensor] = field(default_factory=list)
    """The user-visible states, all states on a disk, and unguarded gradients."""
    aliased: bool = False  # True if its memory has an alias that cannot be guarded
    first: list[ParamUpdate] = field(default_factory=list)
    """The steps whose states torch.optim's own first step will create."""
    left: UpdateOffer | None = None  # the offer that the backward left on the device
    _values: dict[int, torch.Tensor] = field(default_factory=dict)  # for parameters from a disk

    @property
    def rule(self) -> OptimizerRule:
        """The rule of the optimizer; not of an update by its own code."""
        rule = self.steps[0].rule
        assert rule is not None
        return rule

    @property
    def op(self) -> Callable[..., Any]:
        """The op of an update graph that runs it."""
        return _OPS[self.place]

    @property
    def said(self) -> str:
        """The user-visible name of the backend, or of the place if it is the device."""
        return self.backend.said if self.place is UpdatePlace.HOST else self.place.value

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
                for update in self._take_runs():
                    if self.backend is UpdateBackend.COMPILED and _has_code(update):
                        compiled(self.rule)(update)
                    else:
                        apply(self.rule, update)
                return
            bucket = self.bucket
            values = {
                s.index: self._values.get(s.index, bucket.values[s.index]) for s in self.steps
            }
            if self.backend is UpdateBackend.STOCK_ON_DEVICE:
                for step in self.steps:
                    run_stock_on_device(self.kind, step, values[step.index], self.device)
            else:
                run_stock(self.kind, self.steps, values)
            for step in self.steps if bucket.has_copy else ():
                bucket.streamed[step.index].copy_(bucket.values[step.index])

    def prepare(self, done: dict[object, bool]) -> None:
        """Find the runs and their code, in the thread that calls `optimizer.step()`.

        Until code is compiled, the eager twin runs. `done` caches which kinds of updates have code
        in this step, so that it does not change within the step.
        """
        if self.place is UpdatePlace.HOST and self.backend.by_rule:
            self.runs = self._runs()
        for update in self.runs if self.backend is UpdateBackend.COMPILED else ():
            if _has_code(update):
                kind = (self.rule, kind_of(update))
                if kind not in done:
                    done[kind] = compiled(self.rule).ready(update)
                if not done[kind]:
                    self.backend = UpdateBackend.TORCH

    def stage(self, staged: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Redirect the update to copies of parameters and states, such as those read from a
        disk."""
        for step in self.steps:
            step.states = {name: map_state(staged, state) for name, state in step.states.items()}
        self._values = {s.index: staged(self.bucket.values[s.index]) for s in self.steps}
        self.runs = [update.map(lambda _, tensor: staged(tensor)) for update in self.runs]

    def suits_chunks(self) -> bool:
        """True if the device can update it in chunks and the transfer pays off. Valid after
        preparation.

        All tensors must be in the bucket's page-locked memory, not on a disk. Stochastic rounding
        is excluded, because it depends on the position in the whole parameter.
        """
        return (
            not self.foreign
            and all(update.seed is None for update in self.runs)
            and self.bucket.disk is None
            and sum(update.param.numel() for update in self.runs) >= LEAST_HELPED
        )

    def by_chunks(self, make: Callable[[OptimizerRule, Iterable[Update]], None]) -> None:
        """Run the update on the device by `Chunks.update`."""
        make(self.rule, self._take_runs())

    def _take_runs(self) -> list[Update]:
        runs, self.runs = self.runs, []  # drop views of gradients after the update
        return runs

    def for_kernel(self) -> list[Update]:
        """The kernel inputs for a resident bucket, without empty parameters."""
        updates = [update_of(self.bucket, step, step.grad, _dense) for step in self.steps]
        return [update for update in updates if update.param.numel()]

    def _runs(self) -> list[Update]:
        """The updates. Adjacent ones with equal hyperparameters are merged, because a call costs
        more than the update of a small parameter."""
        bucket, last = self.bucket, -2
        runs: list[tuple[Update, int]] = []  # the first of the merged ones, and their elements
        for step in self.steps:
            update, i = update_of(bucket, step, step.grad, flat), step.index
            numel = update.param.numel()
            ours = not numel or step.grad is bucket.grads.get(i) or bucket.holds(step.grad)
            self.foreign = self.foreign or not ours
            adjacent = runs and ours and i == last + 1  # every parameter between has a gradient
            last = i if ours else -2
            if reach := _reach(*runs[-1], update) if adjacent else 0:
                runs[-1] = (runs[-1][0], reach)
            elif numel:
                runs.append((update, numel))
        return [
            update if update.param.numel() == numel else _spanned(bucket, update, numel)
            for update, numel in runs
        ]


def update_residents(updates: Sequence[BucketUpdate]) -> None:
    """Update the resident buckets of one step with one kernel launch per signature, because a
    launch takes the host longer than a layer's update takes the device."""
    if updates[0].together is not None:
        updates[0].together(updates)
        return
    with torch.no_grad():
        update_bucket(updates[0].rule, [u for each in updates for u in each.for_kernel()])


def _has_code(update: Update) -> bool:
    """False for a single element, which would need separate code."""
    return update.param.numel() > 1


def _reach(first: Update, numel: int, second: Update) -> int:
    """The number of elements of an update and its neighbours, together `numel`, and the next one,
    with the padding between them, whose values nothing else reads; 0 if they cannot be merged."""
    elements = (second.param.data_ptr() - first.param.data_ptr()) // first.param.itemsize
    if (
        tuple(first.hyper) != tuple(second.hyper)
        or first.seed is not None
        or any(isinstance(state, tuple) for state in (*first.states, *second.states))
        or elements < numel
        or not second.param.numel()
    ):
        return 0
    pairs = zip(
        (first.param, first.grad, first.copy, *first.states),
        (second.param, second.grad, second.copy, *second.states),
        strict=True,
    )
    for a, b in pairs:
        if a is None and b is None:
            continue
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.dtype != b.dtype:
            return 0
        if b.data_ptr() - a.data_ptr() != elements * a.itemsize:
            return 0
    return elements + second.param.numel()


def _spanned(bucket: HostBucket, first: Update, numel: int) -> Update:
    return first.map(lambda _, tensor: bucket.span(tensor, numel))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order. Returns a contiguous tensor itself: that is faster
    than a view."""
    return tensor if tensor.is_contiguous() else flat(tensor)
