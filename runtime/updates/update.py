"""Carry out the optimizer's update of one bucket.

    STOCK            torch.optim's own step, on the bucket's tensors: bitwise the plain loop
    STOCK_ON_DEVICE  the same on copies on the device, a parameter at a time: Muon's products
    COMPILED         the rule's twin (`optim.twin`), compiled by Inductor to C++: one pass over
                     memory; on a GPU's host the device helps (see `workers`)
    FUSED            torch.optim's fused CPU kernels: one pass too, where there is no C++ compiler
    TORCH            the rule's twin as it is: what FUSED cannot do, without a C++ compiler; and
                     COMPILED until it is compiled (see `compiled`)
    ON_DEVICE        not here: by `on_device`, of what the backward left on the device
    RESIDENT         the rule's kernel, on buckets that live on the device (`update_residents`)
    BACKWARD         not here: by `in_backward` and its kernels, on the device

Host memory bandwidth is the limit of all of them: AdamW with bf16 parameters and gradients and
float32 moments reads 12 bytes a parameter and writes 10.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from megacompile import compat
from megacompile.cost.optimizer import LEAST_HELPED
from megacompile.runtime.optim.kernels.bucket import update_bucket
from megacompile.runtime.optim.registry import known
from megacompile.runtime.optim.rule import OptimizerRule, State, Update
from megacompile.runtime.optim.twin import apply
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.updates.chunks import Chunks
from megacompile.runtime.updates.compiled import compiled
from megacompile.runtime.updates.cpp import kind_of


class UpdateBackend(enum.Enum):
    """The code that carries an update out."""

    STOCK = "torch.optim"
    STOCK_ON_DEVICE = "torch.optim on the device"
    BACKWARD = "in the backward"
    ON_DEVICE = "on the device"
    RESIDENT = "on the device, resident"
    COMPILED = "compiled to C++"
    FUSED = "torch.optim, fused"
    TORCH = "torch"


OWN_CODE = (
    UpdateBackend.STOCK,
    UpdateBackend.FUSED,
    UpdateBackend.STOCK_ON_DEVICE,
)  # the optimizer's own code


@dataclass(eq=False, slots=True)
class ParamUpdate:
    """The update of one parameter: what `optimizer.step()` found when it was called."""

    index: int  # in its bucket
    grad: torch.Tensor
    scale: float  # of the gradient
    group: dict[str, Any]  # the parameter group's options, as they were, for torch.optim's own step
    states: dict[str, Any]  # name -> tensor, or (codes, absmax)
    rule: OptimizerRule | None = None
    hyper: Sequence[float] = ()
    seed: int | None = None
    intact: bool = False  # the gradient is what the backward left, but for the scale
    factor: torch.Tensor | None = None  # of the gradient too, where the update is RESIDENT

    def in_order(self) -> tuple[State | None, ...]:
        """The states in the rule's order."""
        assert self.rule is not None
        return tuple(self.states.get(moment.name) for moment in self.rule.moments)


@dataclass(frozen=True, slots=True)
class _Run:
    """Parameters next to each other that one call of a rule updates."""

    rule: OptimizerRule
    update: Update  # flat, of the first parameter until they are `joined`
    ours: bool  # the gradient is in the bucket
    numel: int  # of all, with the padding between them, which is zeros and stays so

    @property
    def several(self) -> bool:
        """Has it more than one element? One would be compiled as a kind of its own."""
        return self.numel > 1

    def reach(self, other: _Run) -> int:
        """Elements of this and the next one as one run; 0: they differ or are no neighbours."""
        mine, theirs = self.update, other.update
        if (
            (self.rule, tuple(mine.hyper)) != (other.rule, tuple(theirs.hyper))
            or not (self.ours and other.ours and other.numel)
            or mine.seed is not None
            or any(isinstance(state, tuple) for state in (*mine.states, *theirs.states))
        ):
            return 0
        distance = theirs.param.data_ptr() - mine.param.data_ptr()
        elements = distance // mine.param.itemsize
        if elements < self.numel:
            return 0
        for a, b in zip(_tensors(mine), _tensors(theirs), strict=True):
            if a is None and b is None:
                continue
            if a is None or b is None or a.dtype != b.dtype:
                return 0
            if b.data_ptr() - a.data_ptr() != elements * a.itemsize:
                return 0
        return elements + other.numel

    def joined(self, bucket: HostBucket) -> _Run:
        """With an update of all of it."""
        if self.update.param.numel() == self.numel:
            return self
        return replace(self, update=self.update.map(lambda _, t: bucket.span(t, self.numel)))


def _tensors(update: Update) -> tuple[Any, ...]:
    return (update.param, update.grad, update.copy, *update.states)


@dataclass(eq=False, slots=True)
class BucketUpdate:
    """The update of one bucket's parameters."""

    bucket: HostBucket
    backend: UpdateBackend
    kind: type[Optimizer]
    device: torch.device
    steps: list[ParamUpdate] = field(default_factory=list)
    runs: list[_Run] = field(default_factory=list)  # from `prepare` until the update runs
    on_device: bool = False  # may the device make it, of memory on the host?
    alike: Callable[[Sequence[BucketUpdate]], None] | None = None  # makes it, with those like it
    _values: dict[int, torch.Tensor] = field(default_factory=dict)  # of parameters from a disk

    @property
    def numel(self) -> int:
        """Elements that it updates."""
        return sum(self.bucket.layout.params[step.index].numel for step in self.steps)

    def makes_states(self) -> bool:
        """Will an optimizer's own first step make states? Ask before it runs."""
        kind = known(self.kind)
        assert kind is not None
        return self.backend in OWN_CODE and any(kind.has_states(step.group) for step in self.new())

    def new(self) -> list[ParamUpdate]:
        """The steps of parameters that have no states yet. Ask before it runs."""
        return [s for s in self.steps if all(value is None for value in s.states.values())]

    def __call__(self) -> None:
        with torch.no_grad():
            if self.backend in OWN_CODE:
                self._stock()
            else:
                self._by_rules()

    # By rule.

    def prepare(self, done: dict[object, bool]) -> None:
        """Find the runs, and the code that they need, in the thread that calls `optimizer.step()`.

        What is not compiled yet is made by torch until it is. `done` are the kinds of update that
        this step has asked for, and whether their code is there: it stays so for the whole step.
        """
        if self.backend in (UpdateBackend.COMPILED, UpdateBackend.TORCH):
            self.runs = self._runs()
        if self.backend is UpdateBackend.COMPILED:
            for run in self.runs:
                kind = (run.rule, kind_of(run.update))
                if run.several and kind not in done:
                    done[kind] = compiled(run.rule).ready(run.update)
                if run.several and not done[kind]:
                    self.backend = UpdateBackend.TORCH

    def stage(self, staged: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Work on copies of parameters and states, as those that came from a disk."""
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
        """A parameter where the update changes it."""
        return self._values.get(index, self.bucket.values[index])

    def suits_chunks(self) -> bool:
        """Can the device make it in chunks, and is it worth the way? Ask when it is prepared.

        All of it must be in page-locked memory of the bucket, and not on a disk; and rounding that
        is stochastic goes by the place in the whole parameter.
        """
        mine = all(run.ours and run.update.seed is None for run in self.runs)
        return (
            mine
            and self.bucket.disk is None
            and sum(run.numel for run in self.runs) >= LEAST_HELPED
        )

    def by_chunks(self, chunks: Chunks) -> None:
        """Makes it on the device."""
        chunks.update((run.rule, run.update) for run in self._take_runs())

    def _take_runs(self) -> list[_Run]:
        runs, self.runs = self.runs, []  # views of gradients must not outlive the update
        return runs

    def _by_rules(self) -> None:
        for run in self._take_runs():
            if self.backend is UpdateBackend.COMPILED and run.several:
                compiled(run.rule)(run.update)
            else:
                apply(run.rule, run.update)

    def for_kernel(self) -> list[tuple[OptimizerRule, Update]]:
        """The values that a kernel takes to update a bucket that lives on the device."""
        found = []
        for step in self.steps:
            assert step.rule is not None
            update = self._of(step, _dense)
            if update.param.numel():
                found.append((step.rule, update))
        return found

    def _runs(self) -> list[_Run]:
        """The updates, neighbours with the same hyperparameters as one: a call costs more than
        the update of a small parameter does."""
        runs: list[_Run] = []
        last = -2
        for step in self.steps:
            run = self._run(step)
            beside = runs and step.index == last + 1  # one without a gradient may be in between
            last = step.index
            reach = runs[-1].reach(run) if beside else 0
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
        """The update of one parameter, with its tensors as `lay` returns them."""
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
        if self.backend is not UpdateBackend.STOCK_ON_DEVICE:
            run_stock(self.kind, self.steps, {s.index: self._value(s.index) for s in self.steps})
        else:
            for step in self.steps:
                self._on_device(step)
        for step in self.steps:
            if bucket.has_copy:
                bucket.streamed[step.index].copy_(bucket.values[step.index])

    def _on_device(self, step: ParamUpdate) -> None:
        host = self._value(step.index)
        with compat.side_stream(self.device):
            there = host.to(self.device, non_blocking=True)
            moved = ParamUpdate(
                index=step.index,
                grad=step.grad.to(self.device, non_blocking=True),
                scale=step.scale,
                group=step.group,
                states={k: self._moved(k, v) for k, v in step.states.items()},
            )
            run_stock(self.kind, [moved], {step.index: there})
            host.copy_(there, non_blocking=True)
            for name, value in moved.states.items():
                mine = step.states.get(name)
                if isinstance(mine, torch.Tensor):
                    mine.copy_(value, non_blocking=True)
                else:  # the first step made it
                    step.states[name] = value.cpu() if isinstance(value, torch.Tensor) else value

    def _moved(self, name: str, value: Any) -> Any:
        if name == "step" or not isinstance(value, torch.Tensor):
            return value
        return value.to(self.device, non_blocking=True)


def update_residents(updates: Sequence[BucketUpdate]) -> None:
    """Update buckets that live on the device: one launch of a rule's kernel for all of them. To
    launch one takes the host longer than the device needs for a layer's bucket."""
    if updates[0].alike is not None:  # a step like the one before, of all of them
        updates[0].alike(updates)
        return
    by_rule: dict[OptimizerRule, list[Update]] = {}
    for each in updates:
        for rule, update in each.for_kernel():
            by_rule.setdefault(rule, []).append(update)
    with torch.no_grad():
        for rule, together in by_rule.items():
            update_bucket(rule, together)


def run_stock(
    kind: type[Optimizer], steps: Sequence[ParamUpdate], params: dict[int, torch.Tensor]
) -> None:
    """One step of an optimizer of `kind` on `params`; new states are left in `step.states`."""
    groups = []
    for step in steps:
        param = params[step.index]
        grad = step.grad.to(param.dtype)
        param.grad = grad if step.scale == 1.0 else grad * step.scale
        groups.append({**step.group, "params": [param]})
    make: Any = kind
    shadow = make(groups)
    for step in steps:
        if step.states:
            shadow.state[params[step.index]].update(step.states)
    compat.step_without_hooks(shadow)
    for step in steps:
        params[step.index].grad = None
        step.states.update(shadow.state[params[step.index]])


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of its memory: (numel,)."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same, or the tensor itself where its elements are in that order: to make another one
    takes longer than to ask."""
    return tensor if tensor.is_contiguous() else flat(tensor)


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the strides of another of its shape."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
