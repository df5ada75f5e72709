"""The optimizer's update in the backward: `megacompile(model, optimizer=...)`.

After the backward of each stage, the bucket's optimizer states are on the device: fetched or
resident. The update consumes the gradients there, so they never reach the host. `optimizer.step()`
only commits: it counts the step. The hyperparameters are read from the optimizer when `backward()`
is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.ir.buckets import ParamId
from megacompile.runtime.optim.rule import map_state
from megacompile.runtime.params.guards import any_shared
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.optimizer_states import (
    drop_empty,
    reserve,
    visible,
    visible_on_disk,
)
from megacompile.runtime.params.pending import InFlight, Left
from megacompile.runtime.updates.bucket_update import update_bucket
from megacompile.runtime.updates.on_device import Sources, UpdateBuffers, write_back
from megacompile.runtime.updates.refusals import check_backward
from megacompile.runtime.updates.staging import Staging
from megacompile.runtime.updates.update import ParamUpdate, flat, update_of


class InBackward:
    """The updates of backwards, for the `*_state` and `update` ops."""

    def __init__(
        self,
        optimizer: Optimizer,
        prepare: Callable[[Optimizer, HostBucket, Iterable[int]], dict[int, ParamUpdate]],
        staging: Staging | None,
    ) -> None:
        self.optimizer = optimizer
        self.prepare = prepare  # see `StepParts.in_backward`
        self.staging = staging
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
        self._shown: list[HostBucket] = []  # buckets in flight that have unguarded aliases
        compat.notice_scaled_losses()

    def begin(self, buckets: Mapping[int, HostBucket], wanted: Mapping[int, Sequence[int]]) -> None:
        """Read the hyperparameters for the backward of one schedule."""
        backward, self._backward = self._backward, compat.backward_id()
        if backward != self._backward:
            self._give_up_failed()
            if next(self._changed(), None) is None:  # a checkpoint was loaded instead of step()
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
        updates, backward = weakref.ref(self), self._backward

        def end() -> None:
            self._ended = True
            while self._shown:
                self._shown.pop().pending.wait()

        def dropped() -> None:
            alive = updates()
            if alive is not None and alive._backward == backward:
                alive._give_up_failed()

        weakref.finalize(end, dropped).atexit = False
        return end

    def failed(self, error: BaseException) -> None:
        """Record the error of a run, if a backward is running."""
        if not self._ended:
            self._error = f" with {type(error).__name__}: {error}"

    def _give_up_failed(self) -> None:
        """Mark values updated by a failed backward as torn until they are loaded."""
        if self._ended:
            return
        self.uncommitted, self._ended = set(), True
        self._drop_reserved()
        self._shown.clear()
        torn: dict[int, dict[int, Left]] = {}
        for (key, i), left in self._changed():
            torn.setdefault(key, {})[i] = left
        self._made = {}
        names = ", ".join(repr(self._buckets[key].layout.name) for key in sorted(torn))
        for key, of_bucket in torn.items():
            self._buckets[key].pending.tear(
                "the last backward failed after it had updated some parameters but not others"
                f"{self._error} (it updated those of {names})",
                of_bucket,
            )

    def _changed(self) -> Iterator[tuple[ParamId, Left]]:
        """The updated parameters that are still in their buckets and were not loaded since."""
        for (key, i), left in self._made.items():
            host = self._buckets.get(key)
            if host is not None and host.params[i] is left.param and not left.restored():
                yield (key, i), left

    def commit(self) -> list[ParamId]:
        """Commit the updates, in `optimizer.step()`; returns the updated parameters."""
        now = [_options(group) for group in self.optimizer.param_groups]
        if self.uncommitted and now != self._options:
            raise OptimizerError(
                "optimizer.step(): a parameter group was changed between backward() and step(), "
                "but the backward has already run the update; change it after step(), as lr "
                "schedulers do"
            )
        done, self.uncommitted = sorted(self.uncommitted), set()
        self.committed = set(done)
        self._drop_reserved()
        return done

    def _drop_reserved(self) -> None:
        reserved, self.reserved = self.reserved, []
        drop_empty(self.optimizer, reserved)

    # The ops.

    def sources(self, host: HostBucket, trained: Sequence[int] = ()) -> Sources:
        """The states of the updated parameters, in host memory."""
        lease = None if self.staging is None else self.staging.states.of(host)
        found = {i: step.in_order() for i, step in self.running[host.layout.key].items()}
        if lease is None:
            return found
        return {
            i: tuple([map_state(lease.tensor, s) for s in states]) for i, states in found.items()
        }

    def offload(
        self, host: HostBucket, buffers: UpdateBuffers, queue: torch.cuda.Stream | None
    ) -> InFlight | None:
        lease = None if self.staging is None else self.staging.take(host)
        shown = self.visible(host)
        if any(map(host.aliased, buffers)) or any_shared(shown):
            self._shown.append(host)
        place = None if lease is None else lease.tensor
        try:
            return write_back(host, buffers, self.sources(host), shown, queue, place)
        finally:
            self._note_made(host, buffers)

    def update_in_place(self, host: HostBucket, gradients: Mapping[int, torch.Tensor]) -> None:
        steps = self.running[host.layout.key]
        try:
            with torch.no_grad():
                updates = [update_of(host, step, gradients[i], flat) for i, step in steps.items()]
                for rule in {step.rule for step in steps.values() if step.rule is not None}:
                    update_bucket(rule, [u for u in updates if u.param.numel()])
            host.note_changes(steps)
        finally:
            self._note_made(host, steps)

    def _note_made(self, host: HostBucket, updated: Iterable[int]) -> None:
        """Record the state in which the update left a bucket's parameters."""
        key = host.layout.key
        self._made |= {(key, i): Left.of(host.params[i], [self.optimizer]) for i in updated}

    def visible(self, host: HostBucket) -> list[torch.Tensor]:
        states = (self.optimizer.state[host.params[i]] for i in self.running[host.layout.key])
        return visible_on_disk(host) or [v for state in states for v in visible(state)]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A comparable copy of a group's options."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for key, value in group.items()
        if key != "params"
    }
