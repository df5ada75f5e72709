"""The update of one bucket in one `optimizer.step()`: its tensors, its backend (the code) and its
place (docs/decisions/0055-backend-and-place.md).

Host updates are bound by host memory bandwidth: AdamW with bf16 parameters and gradients and
float32 moments reads 12 bytes per parameter and writes 10.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from megacompile import compat
from megacompile.cost.optimizer import LEAST_HELPED
from megacompile.errors import OptimizerError
from megacompile.ir import ops
from megacompile.runtime.device.background import fulfil
from megacompile.runtime.optim.rule import OptimizerRule, State, Update, map_state
from megacompile.runtime.optim.rules import known
from megacompile.runtime.optim.twin import apply
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.updates.bucket_update import launched
from megacompile.runtime.updates.compiled import compiled


@dataclass(eq=False, slots=True)
class ParamUpdate:
    """The update of one parameter, recorded when `optimizer.step()` is called."""

    index: int  # in its bucket
    grad: torch.Tensor
    scale: float  # of the gradient
    group: dict[str, Any]  # the parameter group's options at that time, for torch.optim's own step
    states: dict[str, Any]  # name -> tensor, or (codes, absmax)
    rule: OptimizerRule | None = None
    hyper: Sequence[float] = ()
    seed: int | None = None
    intact: bool = False  # the gradient is unchanged since the backward, except for the scale

    def in_order(self) -> tuple[State | None, ...]:
        """The states in the rule's order."""
        assert self.rule is not None
        return tuple(self.states.get(moment.name) for moment in self.rule.moments)


def run_stock(
    kind: type[Optimizer], steps: Sequence[ParamUpdate], params: dict[int, torch.Tensor]
) -> None:
    """One step of an optimizer of `kind` on `params`; new states are stored in `step.states`."""
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


def run_stock_on_device(
    kind: type[Optimizer],
    step: ParamUpdate,
    param: torch.Tensor,  # on the host
    device: torch.device,
) -> None:
    """One step of an optimizer of `kind` on copies of a parameter and its states on a device."""

    def moved(name: str, value: Any) -> Any:
        if name == "step" or not isinstance(value, torch.Tensor):
            return value
        return value.to(device, non_blocking=True)

    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        on_device = moved("", param)
        states = {name: moved(name, value) for name, value in step.states.items()}
        copy = replace(step, grad=moved("", step.grad), states=states)
        run_stock(kind, [copy], {step.index: on_device})
        param.copy_(on_device, non_blocking=True)
        for name, value in copy.states.items():
            on_host = step.states.get(name)
            if isinstance(on_host, torch.Tensor):
                on_host.copy_(value, non_blocking=True)
            else:  # created by the first step
                step.states[name] = value.cpu() if isinstance(value, torch.Tensor) else value
        if stream is not None:
            stream.synchronize()


def update_of(
    host: HostBucket,
    step: ParamUpdate,
    gradient: torch.Tensor,
    lay: Callable[[torch.Tensor], torch.Tensor],
) -> Update:
    """The update of a parameter in its bucket by its rule; `lay` flattens the tensors."""
    value = host.values[step.index]
    return Update(
        param=lay(value),
        grad=lay(laid_out_as(gradient, value)),
        states=tuple([lay(s) if isinstance(s, torch.Tensor) else s for s in step.in_order()]),
        hyper=step.hyper,
        copy=lay(host.streamed[step.index]) if host.has_copy else None,
        seed=step.seed,
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order: (numel,)."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the strides of another tensor of the same shape."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


class UpdateBackend(enum.Enum):
    """The code of an update."""

    STOCK = "torch.optim", False  # its own step on the bucket's tensors; bitwise the plain loop
    # the same on device copies, one parameter at a time, for matrix products such as Muon's
    STOCK_ON_DEVICE = "torch.optim on the device", False
    COMPILED = "compiled to C++", True  # the rule's twin (`optim.twin`), by Inductor, in one pass
    # the twin in eager mode: until COMPILED is ready (`compiled`), and without a C++ compiler if
    # dtypes differ, which torch.optim does not support
    TORCH = "torch", True
    KERNEL = "kernel", True  # the rule's kernel, bitwise equal to its twin (`optim.kernels`)

    def __init__(self, label: str, by_rule: bool) -> None:
        self.label = label  # in `megacompile.updates()`
        self.by_rule = by_rule  # False: by the optimizer's own code


class UpdatePlace(enum.Enum):
    """The place where an update runs."""

    # in a thread, after `step()` has returned; a GPU helps with the kernel (`workers`)
    HOST = "on the host", ops.update_host
    # where the backward has left the kernel's inputs (`on_device`); falls back to the host
    DEVICE = "on the device", ops.update
    RESIDENT = "on the device, resident", ops.update_resident  # one launch for all such buckets
    BACKWARD = "in the backward", None  # on the device, after its stage's (`in_backward`)

    def __init__(self, label: str, op: Callable[..., Any] | None) -> None:
        self.label = label
        self.op = op  # of an update graph


_NOTHING = frozenset((type(None),))  # the state classes of a parameter without states


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
    in_torch: bool = False  # True once torch updates a resident bucket, which Ctrl-C may interrupt
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
    left: Any = None  # the `UpdateOffer` that the backward left on the device
    _values: dict[int, torch.Tensor] = field(default_factory=dict)  # of parameters on a disk

    @property
    def rule(self) -> OptimizerRule:
        """The optimizer's rule; an update by the optimizer's own code has none."""
        rule = self.steps[0].rule
        assert rule is not None
        return rule

    @property
    def label(self) -> str:
        """The user-visible name of the backend, or of the place if it is the device."""
        return self.backend.label if self.place is UpdatePlace.HOST else self.place.label

    def drop(self) -> None:
        """Drop the tensors that the backward left on the device; the host updates instead."""
        if self.left is not None:
            self.left.drop()
            self.place, self.left = UpdatePlace.HOST, None

    @property
    def numel(self) -> int:
        return sum(self.bucket.layout.params[step.index].numel for step in self.steps)

    def first_steps(self) -> list[ParamUpdate]:
        """The steps of parameters without states, if torch.optim's own step will create some. Valid
        only before it runs."""
        if self.backend.by_rule:
            return []
        new = [s for s in self.steps if _NOTHING.issuperset(map(type, s.states.values()))]
        kind = known(self.kind) if new else None
        return new if kind and any(kind.has_states(step.group) for step in new) else []

    def __call__(self) -> None:
        with torch.no_grad():
            if self.backend.by_rule:
                for update in self._take_runs():
                    if self.backend is UpdateBackend.COMPILED and _has_code(update):
                        compiled(self.rule, update)(update)
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
        """Merge updates into runs and get their code, in the thread that calls `optimizer.step()`.
        Until code is compiled, the eager twin runs. `done` caches which kinds of updates have code
        in this step, so that it does not change within the step."""
        if self.place is UpdatePlace.HOST and self.backend.by_rule:
            self.runs = self._runs()
        for update in self.runs if self.backend is UpdateBackend.COMPILED else ():
            if _has_code(update):
                code = compiled(self.rule, update)
                if code not in done:
                    done[code] = code.ready(update)
                if not done[code]:
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
        preparation. All tensors must be in the bucket's page-locked memory, not on a disk.
        Stochastic rounding is excluded, because it depends on the position in the whole
        parameter."""
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
        runs: list[tuple[Update, int]] = []  # the first of merged updates, and their elements
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

        def spanned(update: Update, numel: int) -> Update:
            return update.map(lambda _, tensor: bucket.span(tensor, numel))

        return [u if u.param.numel() == n else spanned(u, n) for u, n in runs]


def update_residents(updates: Sequence[BucketUpdate]) -> None:
    """Update the resident buckets of one step with one kernel launch per signature, because a
    launch takes the host longer than a layer's update takes the device."""
    if updates[0].together is not None:
        updates[0].together(updates)
        return
    with torch.no_grad():
        rule, each = updates[0].rule, [u for part in updates for u in part.for_kernel()]
        if not launched(rule, each):
            update_in_torch(rule, each, updates)


def update_in_torch(
    rule: OptimizerRule, updates: Iterable[Update], parts: Sequence[BucketUpdate]
) -> None:
    """Update the parameters of resident buckets by the twin."""
    for part in parts:
        part.in_torch = True
    with torch.no_grad():
        for update in updates:
            apply(rule, update)


def _has_code(update: Update) -> bool:
    """False for a single element, which would need separate code."""
    return update.param.numel() > 1


def _reach(first: Update, numel: int, second: Update) -> int:
    """The number of elements from the start of `first` to the end of `second`, if one call can
    update both; 0 if not. `first` already has `numel` elements, with those of updates merged
    before. The padding in between is updated too, and nothing reads it."""
    elements = (second.param.data_ptr() - first.param.data_ptr()) // first.param.itemsize
    if (
        tuple(first.hyper) != tuple(second.hyper)
        or first.seed is not None
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
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.dtype != b.dtype or b.data_ptr() - a.data_ptr() != elements * a.itemsize:
                return 0
        elif a is not b:  # one of them is None, or 8-bit: blocks do not line up
            return 0
    return elements + second.param.numel()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order. Returns a contiguous tensor itself: that is faster
    than a view."""
    return tensor if tensor.is_contiguous() else flat(tensor)


# Work on threads after `optimizer.step()` has returned: host updates, and copies of device results
# to the host.

Timed = Callable[[str, Callable[[], None]], None]  # (lane, work): runs work and records its times


def untimed(lane: str, work: Callable[[], None]) -> None:
    work()


def fulfil_update(future: Future[None], name: str, work: Callable[[], None]) -> None:
    """Run `work`, which updates the bucket `name` or copies its new values to the host. The
    future's error is an `OptimizerError`."""

    def update() -> None:
        try:
            work()
        except BaseException as error:
            raise OptimizerError(
                f"optimizer.step(): the update of {name!r} failed in the background with "
                f"{type(error).__name__}: {error}; its parameters and states are half updated: "
                "load a checkpoint"
            ) from error

    fulfil(future, update)
