"""The optimizer's update in the backward: `megacompile(model, optimizer=...)`.

After the backward of each stage, the bucket's optimizer states are on the device: fetched or
resident. The update consumes the gradients there, so they never reach the host. `optimizer.step()`
only commits: it counts the step. The hyperparameters are read from the optimizer when `backward()`
is called.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.ir.buckets import ParamId
from megacompile.runtime.optim.registry import known
from megacompile.runtime.params.gradient_guards import is_taken
from megacompile.runtime.params.guards import is_shared
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.optimizer_states import (
    drop_empty,
    reserve,
    visible,
    visible_on_disk,
)
from megacompile.runtime.params.work import Left
from megacompile.runtime.updates.device_buffers import (
    Sources,
    UpdateBuffers,
    WriteBack,
    buffers_in_place,
    fetch,
    make_buffers,
    update,
    write_back,
)
from megacompile.runtime.updates.parameter import ParamUpdate
from megacompile.runtime.updates.refusals import check_backward
from megacompile.runtime.updates.staging import Staging

PrepareSteps = Callable[[Optimizer, HostBucket, Iterable[int]], dict[int, ParamUpdate]]
"""Prepares the updates of some of a bucket's parameters, by index."""


class InBackward:
    """Implements the `*_state` and `update` ops.

    Args:
        optimizer: the optimizer that updates.
        prepare: see `StepParts.in_backward`.
        micro_steps: tells if another backward comes before the step.
        staging: buffers for data on a disk.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        prepare: PrepareSteps,
        micro_steps: MicroSteps,
        staging: Staging | None,
    ) -> None:
        self.optimizer = optimizer
        self.prepare = prepare
        self.staging = staging
        self._micro_steps = micro_steps
        self.uncommitted: set[ParamId] = set()  # updated, before step() was called
        self.committed: set[ParamId] = set()  # by the last step(), until the next backward
        self.running: dict[int, dict[int, ParamUpdate]] = {}  # updates of the current backward
        self._options: list[dict[str, Any]] = []  # the groups' options when it began
        self.reserved: list[nn.Parameter] = []  # parameters that had no states when it began
        self._ended = True  # True if the last backward finished without an error
        self._backward = -1  # its id
        self._error = ""  # its error, if known
        self._buckets: Mapping[int, HostBucket] = {}  # its buckets
        self._made: dict[ParamId, Left] = {}  # updated parameters, as the update left them
        self._shown: list[HostBucket] = []  # in flight, with unguarded aliases
        compat.notice_scaled_losses()

    @property
    def accumulating(self) -> bool:
        """True if another backward comes before the step; then this one updates nothing."""
        return self._micro_steps.more

    def begin(self, buckets: Mapping[int, HostBucket], wanted: Mapping[int, Sequence[int]]) -> None:
        """Read the hyperparameters for the backward of one schedule."""
        backward, self._backward = self._backward, compat.backward_id()
        if backward != self._backward:
            self._give_up_failed()
            if self._is_restored(buckets):  # a checkpoint was loaded instead of step()
                self.uncommitted = set()
        places = {(key, i) for key, params in wanted.items() for i in params}
        again = sorted(places & self.uncommitted)
        if compat.loss_is_scaled():
            raise OptimizerError(
                "the loss of this backward was scaled by a GradScaler, but megacompile(model, "
                "optimizer=...) updates in the backward, before the gradients can be unscaled "
                "(nothing was updated): leave out optimizer=, or the GradScaler, which bfloat16 "
                "does not need"
            )
        if again:
            key, i = again[0]
            raise OptimizerError(
                f"parameter {buckets[key].layout.params[i].name!r} was updated in a backward "
                "already, and gets another gradient before optimizer.step(): call step() after "
                "each backward, put all micro-batches but the last into "
                "`with megacompile.accumulate(model):`, or, if two captured graphs use one "
                "parameter because of a graph break, leave out optimizer="
            )
        if not self.uncommitted:
            check_backward(self.optimizer, buckets)
            self._options = [_options(group) for group in self.optimizer.param_groups]
            self._made, self.committed = {}, set()
        self._ended, self._error, self._buckets = False, "", buckets
        compat.when_backward_ends(self._end())
        self.reserved += reserve(
            self.optimizer, [p for host in buckets.values() for p in host.params]
        )
        for key, params in wanted.items():
            buckets[key].pending.wait()
            self.running[key] = self.prepare(self.optimizer, buckets[key], params)
        self.uncommitted |= places

    def _end(self) -> Callable[[], None]:
        """A callback for the end of the backward; autograd drops it if the backward fails."""

        def end() -> None:
            self._ended = True
            while self._shown:
                self._shown.pop().pending.wait()

        dropped = weakref.finalize(end, _dropped, weakref.ref(self), self._backward)
        dropped.atexit = False
        return end

    def dropped(self, backward: int) -> None:
        """Handle a failed backward; called when its end callback is freed."""
        if backward == self._backward:
            self._give_up_failed()

    def failed(self, error: BaseException) -> None:
        """Record the error of a run, if a backward is running."""
        if not self._ended:
            self._error = f" with {type(error).__name__}: {error}"

    def _give_up_failed(self) -> None:
        """Mark values updated by a failed backward as torn until they are loaded."""
        if self._ended:
            return
        changed, self._made, self.uncommitted, self._ended = self._made, {}, set(), True
        self._drop_reserved()
        self._shown.clear()
        torn: dict[int, dict[int, Left]] = {}
        for (key, i), left in changed.items():
            if not _is_gone(left, key, i, self._buckets) and not left.restored():
                torn.setdefault(key, {})[i] = left
        names = ", ".join(repr(self._buckets[key].layout.name) for key in sorted(torn))
        for key, of_bucket in torn.items():
            self._buckets[key].pending.tear(
                "the last backward failed after it had updated some parameters but not others"
                f"{self._error} (it updated those of {names})",
                of_bucket,
            )

    def _is_restored(self, buckets: Mapping[int, HostBucket]) -> bool:
        """True if all updated values have since been overwritten, and the optimizer's states
        loaded."""
        return all(
            _is_gone(left, key, i, buckets) or left.restored()
            for (key, i), left in self._made.items()
        )

    def refuse(
        self,
        optimizer: Optimizer,
        place_of: Callable[[nn.Parameter], ParamId | None],
        buckets: Mapping[int, HostBucket],
    ) -> None:
        """Refuse the step of another optimizer over parameters that the backward has updated.

        Unknown classes are allowed: they may wrap this optimizer and call its step. If they read a
        consumed gradient, that raises an error.

        Raises:
            OptimizerError: names such a parameter.
        """
        stock = known(type(optimizer)) is not None
        for group in optimizer.param_groups:
            for param in group["params"]:
                gone = stock and is_taken(param.grad)
                place = place_of(param) if gone or param.grad is None else None
                if place is None or not (gone or place in self.committed):
                    continue
                mine, its = type(self.optimizer).__name__, type(optimizer).__name__
                raise OptimizerError(
                    f"{its}.step(): parameter {buckets[place[0]].layout.params[place[1]].name!r} "
                    f"was updated in the backward, by the {mine} of megacompile(model, "
                    f"optimizer=...), which consumed its gradient (this {its} updated nothing); "
                    f"leave it out of this {its}, or leave out optimizer= of megacompile(): then "
                    "several optimizers may share parameters"
                )

    def commit(self) -> list[ParamId]:
        """Commit at `optimizer.step()`; returns the updated parameters."""
        now = [_options(group) for group in self.optimizer.param_groups]
        if self.uncommitted and now != self._options:
            raise OptimizerError(
                "optimizer.step(): a parameter group was changed between backward() and step() "
                f"({_difference(self._options, now)}), but the backward has already run the "
                "update; change it after step(), as lr schedulers do"
            )
        done, self.uncommitted = sorted(self.uncommitted), set()
        self.committed = set(done)
        self._drop_reserved()
        return done

    def _drop_reserved(self) -> None:
        reserved, self.reserved = self.reserved, []
        drop_empty(self.optimizer, reserved)

    # The ops.

    def alloc(self, host: HostBucket, device: torch.device, *, masters: bool) -> UpdateBuffers:
        """Allocate device memory for the states of the updated parameters."""
        sources = {i: step.in_order() for i, step in self.running[host.layout.key].items()}
        return make_buffers(host, sources, device, masters=masters)

    def fetch(self, host: HostBucket, buffers: UpdateBuffers, *, masters: bool) -> UpdateBuffers:
        """Copy states and masters to the device."""
        fetch(host, buffers, self._sources(host), masters=masters)
        return buffers

    def offload(
        self, host: HostBucket, buffers: UpdateBuffers, queue: torch.cuda.Stream | None
    ) -> WriteBack | None:
        """Copy new parameters and states to the host."""
        lease = None if self.staging is None else self.staging.take(host, buffers)
        shown = self._visible(host, buffers)
        if any(map(host.aliased, buffers)) or any(map(is_shared, map(compat.local, shown))):
            self._shown.append(host)
        try:
            return write_back(
                host,
                buffers,
                self._sources(host),
                shown,
                queue,
                None if lease is None else lease.tensor,
            )
        finally:
            self._note_made(host, buffers)

    def update_in_place(self, host: HostBucket, gradients: Mapping[int, torch.Tensor]) -> None:
        """Update a resident bucket."""
        steps = self.running[host.layout.key]
        buffers = buffers_in_place(host, self._sources(host))
        try:
            with torch.no_grad():
                update(host, buffers, steps, gradients, None)
            host.note_changes(steps)
        finally:
            self._note_made(host, steps)

    def _note_made(self, host: HostBucket, updated: Iterable[int]) -> None:
        """Record the state in which the update left a bucket's parameters."""
        key = host.layout.key
        self._made |= {(key, i): Left.of(host.params[i], [self.optimizer]) for i in updated}

    def _sources(self, host: HostBucket) -> Sources:
        """The states of the updated parameters, in host memory."""
        lease = None if self.staging is None else self.staging.states.of(host)
        return {
            i: step.in_order() if lease is None else lease.states(step.in_order())
            for i, step in self.running[host.layout.key].items()
        }

    def visible(self, host: HostBucket) -> list[torch.Tensor]:
        """The user-visible states of the updated parameters."""
        return self._visible(host, self.running[host.layout.key])

    def _visible(self, host: HostBucket, buffers: Iterable[int]) -> list[torch.Tensor]:
        """The user-visible states."""
        states = (self.optimizer.state[host.params[i]] for i in buffers)
        return visible_on_disk(host) or [v for state in states for v in visible(state)]


def _dropped(updates: weakref.ref[InBackward], backward: int) -> None:
    """Finalizer of a backward's end callback."""
    alive = updates()
    if alive is not None:
        alive.dropped(backward)


def _is_gone(left: Left, key: int, i: int, buckets: Mapping[int, HostBucket]) -> bool:
    """True if its bucket no longer has this parameter."""
    return key not in buckets or buckets[key].params[i] is not left.param


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A comparable copy of a group's options."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for key, value in group.items()
        if key != "params"
    }


def _difference(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> str:
    changes = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for old, new in zip(before, now, strict=False)
        for key in new
        if old.get(key) != new.get(key)
    ]
    return ", ".join(changes) or "groups were added"


# Micro-batches before the last: no step follows their backward. Only the training loop knows them.
# `megacompile.accumulate(model)` marks them for one model. Loops that count micro-batches keep the
# count in their own state, which the sources below read. If a source wrongly reports another
# backward, `optimizer.step()` updates from gradients on the host, which costs time and memory; with
# replicas, whose sum was deferred to the missing backward, it raises. So a source may err on this
# side, but never on the other.


class MicroSteps:
    """Detects the backwards of one model that belong to micro-batches before the last."""

    def __init__(self) -> None:
        self.marked = False  # inside megacompile.accumulate()

    @property
    def more(self) -> bool:
        """True if another backward comes before the step."""
        return self.marked or more_to_come()


def more_to_come() -> bool:
    """True if a training loop reports another backward before its next step."""
    return any(source() for source in SOURCES)


def _accelerate() -> bool:
    """Accelerate's `GradientState`, one per process.

    `Accelerator.accumulate()` sets it, and so do the loops of Trainer and its subclasses.
    """
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state is not None and not state().sync_gradients


SOURCES: tuple[Callable[[], bool], ...] = (_accelerate,)
