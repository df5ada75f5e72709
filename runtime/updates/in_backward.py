"""The optimizer's update inside of the backward: `megacompile(model, optimizer=...)`.

After the backward of each stage the bucket's optimizer states are on the device: fetched, or
because the bucket lives there. The update takes the gradients there, so these never reach the host.
`optimizer.step()` only commits: it counts the step. The hyperparameters are those of the optimizer
when `backward()` is called.
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
from megacompile.runtime.optim.blockwise import is_shared
from megacompile.runtime.optim.registry import known
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.gradient_guards import is_taken
from megacompile.runtime.params.optimizer_states import (
    drop_empty,
    reserve,
    visible,
    visible_on_disk,
)
from megacompile.runtime.params.work import Left
from megacompile.runtime.updates.device_buffers import (
    Landing,
    Sources,
    UpdateBuffers,
    buffers_in_place,
    fetch,
    make_buffers,
    note_changes,
    update,
    write_back,
)
from megacompile.runtime.updates.parameter import ParamUpdate
from megacompile.runtime.updates.refusals import check_backward
from megacompile.runtime.updates.staging import Staging

PrepareSteps = Callable[[Optimizer, HostBucket, Iterable[int]], dict[int, ParamUpdate]]
"""Prepares the steps of some of a bucket's parameters, by index."""


class InBackward:
    """Carries the `*_state` and `update` ops out.

    Args:
        optimizer: whose step it is.
        prepare: the steps in it (`StepParts.in_backward`).
        micro_steps: knows whether another backward comes before the step.
        staging: of what is on a disk.
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
        self.uncommitted: set[ParamId] = set()  # updated, and step() was not called yet
        self.committed: set[ParamId] = set()  # by the last step(), until the next backward
        self.running: dict[int, dict[int, ParamUpdate]] = {}  # of the backward that runs now
        self._options: list[dict[str, Any]] = []  # of the groups, when it began
        self.reserved: list[nn.Parameter] = []  # whose states were empty when it began
        self._ended = True  # the last backward did, without an error
        self._backward = -1  # its id
        self._error = ""  # what it has failed with, where that is known
        self._buckets: Mapping[int, HostBucket] = {}  # its
        self._made: dict[ParamId, Left] = {}  # updated, as it was then
        self._shown: list[HostBucket] = []  # on their way, and known by names without guards
        compat.notice_scaled_losses()

    @property
    def accumulating(self) -> bool:
        """Does another backward come before the step? Then this one updates nothing."""
        return self._micro_steps.more

    def begin(self, buckets: Mapping[int, HostBucket], wanted: Mapping[int, Sequence[int]]) -> None:
        """Take the hyperparameters for the backward of one schedule."""
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
                "optimizer=...) makes the update in the backward, before anybody could unscale the "
                "gradients (nothing was updated): leave out optimizer=, or the GradScaler, which "
                "bfloat16 does not need"
            )
        if again:
            key, i = again[0]
            raise OptimizerError(
                f"parameter {buckets[key].layout.params[i].name!r} was updated in a backward "
                "already, and gets another gradient before optimizer.step(): call step() after "
                "each backward, put all micro-batches but the last into "
                "`with megacompile.accumulate(model):`, or, where a graph break lets two captured "
                "graphs use one parameter, leave out optimizer="
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
        """The call for the end of the backward; one that fails drops it."""

        def end() -> None:
            self._ended = True
            while self._shown:
                self._shown.pop().pending.wait()

        dropped = weakref.finalize(end, _dropped, weakref.ref(self), self._backward)
        dropped.atexit = False
        return end

    def dropped(self, backward: int) -> None:
        """The end of a backward was there, or will not come."""
        if backward == self._backward:
            self._give_up_failed()

    def failed(self, error: BaseException) -> None:
        """A run has failed, which may be a backward's."""
        if not self._ended:
            self._error = f" with {type(error).__name__}: {error}"

    def _give_up_failed(self) -> None:
        """Marks what a failed backward has updated as torn until it is loaded."""
        if self._ended:
            return
        made, self._made, self.uncommitted, self._ended = self._made, {}, set(), True
        self._drop_reserved()
        self._shown.clear()
        torn: dict[int, dict[int, Left]] = {}
        for (key, i), left in made.items():
            if not _is_gone(left, key, i, self._buckets) and not left.restored():
                torn.setdefault(key, {})[i] = left
        names = ", ".join(repr(self._buckets[key].layout.name) for key in sorted(torn))
        for key, of_bucket in torn.items():
            self._buckets[key].pending.tear(
                "the last backward failed after it had updated some parameters but not others"
                f"{self._error} (updated are those of {names})",
                of_bucket,
            )

    def _is_restored(self, buckets: Mapping[int, HostBucket]) -> bool:
        """True if everything that was updated was written since, and the optimizer's states
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

        One that is no stock optimizer may be a wrapper around ours, which steps inside of its own
        step; if it reads a gradient that is gone, that says so.

        Raises:
            OptimizerError: with the name of such a parameter.
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
                    f"optimizer=...), which used up its gradient (this {its} updated nothing); "
                    f"leave it out of this {its}, or leave out optimizer= of megacompile(): then "
                    "several optimizers may share parameters"
                )

    def commit(self) -> list[ParamId]:
        """`optimizer.step()` was called; returns the parameters whose step it is."""
        now = [_options(group) for group in self.optimizer.param_groups]
        if self.uncommitted and now != self._options:
            raise OptimizerError(
                "optimizer.step(): a parameter group was changed between backward() and step() "
                f"({_difference(self._options, now)}), but the update has been made in the "
                "backward; change it after step(), as lr schedulers do"
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
        """Memory on the device for the states of the parameters that are updated."""
        sources = {i: step.in_order() for i, step in self.running[host.layout.key].items()}
        return make_buffers(host, sources, device, masters=masters)

    def fetch(self, host: HostBucket, buffers: UpdateBuffers, *, masters: bool) -> UpdateBuffers:
        """States, and masters, to the device."""
        fetch(host, buffers, self._sources(host), masters=masters)
        return buffers

    def offload(
        self, host: HostBucket, buffers: UpdateBuffers, queue: torch.cuda.Stream | None
    ) -> Landing | None:
        """New parameters and states to the host."""
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
        """The step on a bucket that lives on the device."""
        steps = self.running[host.layout.key]
        buffers = buffers_in_place(host, self._sources(host))
        try:
            with torch.no_grad():
                update(host, buffers, steps, gradients, None)
            note_changes(host, steps)
        finally:
            self._note_made(host, steps)

    def _note_made(self, host: HostBucket, updated: Iterable[int]) -> None:
        """Some parameters of a bucket have been updated."""
        key = host.layout.key
        self._made |= {(key, i): Left.of(host.params[i], [self.optimizer]) for i in updated}

    def _sources(self, host: HostBucket) -> Sources:
        """The states of the parameters that are updated, in host memory."""
        lease = None if self.staging is None else self.staging.states.of(host)
        return {
            i: step.in_order() if lease is None else lease.states(step.in_order())
            for i, step in self.running[host.layout.key].items()
        }

    def visible(self, host: HostBucket) -> list[torch.Tensor]:
        """The states of the parameters that are updated which the user can see."""
        return self._visible(host, self.running[host.layout.key])

    def _visible(self, host: HostBucket, buffers: Iterable[int]) -> list[torch.Tensor]:
        """The states that the user can see."""
        states = (self.optimizer.state[host.params[i]] for i in buffers)
        return visible_on_disk(host) or [v for state in states for v in visible(state)]


def _dropped(updates: weakref.ref[InBackward], backward: int) -> None:
    """The end of a backward is not referenced any more."""
    alive = updates()
    if alive is not None:
        alive.dropped(backward)


def _is_gone(left: Left, key: int, i: int, buckets: Mapping[int, HostBucket]) -> bool:
    """True if a parameter has left its place."""
    return key not in buckets or buckets[key].params[i] is not left.param


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options as they are now, comparable."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for key, value in group.items()
        if key != "params"
    }


def _difference(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> str:
    found = [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for old, new in zip(before, now, strict=False)
        for key in new
        if old.get(key) != new.get(key)
    ]
    return ", ".join(found) or "groups were added"


# Micro-batches: backwards that no step follows. The code that runs the loop knows.
#
# `megacompile.accumulate(model)` says so for one model. Loops that count micro-batches by
# themselves say it in places of their own, which are the sources here. A source that is wrong about
# "another one comes" costs time and host memory alone: `optimizer.step()` then makes the update of
# the gradients on the host. Where replicas share the model, the sum over them was left to that
# other one, and `optimizer.step()` refuses. So a source may guess to that side, and never to the
# other.


class MicroSteps:
    """Finds the backwards of one model that are of micro-batches, but for the last."""

    def __init__(self) -> None:
        self.marked = False  # inside of megacompile.accumulate()

    @property
    def more(self) -> bool:
        """True if another backward comes before the step."""
        return self.marked or more_to_come()


def more_to_come() -> bool:
    """True if a loop says that another backward comes before its next step."""
    return any(source() for source in SOURCES)


def _accelerate() -> bool:
    """Accelerate's `GradientState`, one for the process.

    `Accelerator.accumulate()` sets it, and so do the loops of Trainer and of what derives from it.
    """
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state is not None and not state().sync_gradients


SOURCES: tuple[Callable[[], bool], ...] = (_accelerate,)
