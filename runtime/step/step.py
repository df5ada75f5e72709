"""`optimizer.step()` of a stock optimizer over streamed parameters.

Hooks on the optimizer (see `hooks`) do the update of our parameters next to its own step, with its
own `param_groups` and `state`. `Updates.prepare_step` finds out what is to be done, bucket by
bucket, and refuses what cannot be; only `Updates.start` changes parameters and states (but
what a backward has updated already is counted while preparing). It runs the updates of the
schedules whose backwards ran (`schedule.update`), each for the buckets that the step has a part
for, and is over at once: threads update bucket after bucket, about in the order in which the next
forward reads them, and a prefetch waits for its bucket alone. A reader of a parameter, a
gradient or a state before its bucket is done waits for that bucket (see `guards`).

What no update of those schedules makes (the first step of a bucket that the device will update
later, a gradient that the user has put there) is made by a graph of its own, `rest`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat, log, notices
from megacompile.ir.buckets import Bucket, ParamId
from megacompile.ir.schedule import Schedule
from megacompile.options import Lowering, Options
from megacompile.progress import line
from megacompile.runtime.ops.executor import Executor
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.optim.registry import rule_of
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.gradient_guards import is_unsummed, refuse_unsummed
from megacompile.runtime.params.optimizer_states import (
    Trained,
    adopt,
    count_up,
    drop_empty,
    ignored_options,
    move_loaded,
    names_like,
    unsupported_reason,
    wraps_another,
)
from megacompile.runtime.params.work import Left
from megacompile.runtime.step import hooks
from megacompile.runtime.step.ahead import Ahead
from megacompile.runtime.step.alike import Alike
from megacompile.runtime.step.hooks import PreparedStep
from megacompile.runtime.step.parts import StepParts
from megacompile.runtime.updates.parameter import ParamUpdate
from megacompile.runtime.updates.refusals import Rehearsals, check, check_shared
from megacompile.runtime.updates.update import BucketUpdate, UpdatePlace

_RESTS = 16  # graphs for what no schedule's update makes; those made longest ago go


_ByKey = dict[int, BucketUpdate]  # parts, by the key of their bucket


class Updates:
    """The optimizer steps of one model's parameters.

    Args:
        rest: makes the schedule whose update is that of some buckets, where they are.
        before_step: called when an optimizer's step begins. It may move buckets.
    """

    def __init__(
        self,
        machine: Machine,
        options: Options,
        rest: Callable[[Sequence[Bucket]], Schedule],
        before_step: Callable[[], None],
    ) -> None:
        self.machine = machine
        self.options = options
        self.parts = StepParts(machine, options)
        self._make_rest = rest
        self._before_step = before_step
        self._rests: dict[tuple[tuple[Bucket, bool], ...], Executor] = {}
        self._rehearsals = Rehearsals()
        self._prepared: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that have stepped
        self.ahead = Ahead(machine, self.parts, self._prepared)
        self._alike: weakref.WeakKeyDictionary[Optimizer, Alike] = weakref.WeakKeyDictionary()
        hooks.tell(self)
        if options.state_dtype is not None:
            reference = weakref.ref(self)

            def ours(param: torch.Tensor) -> bool:
                updates = reference()
                return updates is not None and updates.owns(param)

            compat.keep_state_dtypes(ours)

    def owns(self, param: torch.Tensor) -> bool:
        """True if it is a parameter of this model."""
        return self.machine.gradients.place(param) is not None

    def settle(self) -> None:
        """Wait for everything that is in flight; raise what failed, and was not loaded since."""
        for bucket in self.machine.buckets.values():
            bucket.pending.wait()

    def finish(self) -> None:
        """Wait for everything that is in flight, and note what failed."""
        for bucket in self.machine.buckets.values():
            bucket.pending.is_torn()

    def check(self) -> None:
        """Raise if an update has failed, and was not loaded since. It waits for nothing."""
        for bucket in self.machine.buckets.values():
            bucket.pending.check()

    # A step: what is to be done.

    def prepare_step(self, optimizer: Optimizer) -> PreparedStep | None:
        """Prepare the update of our parameters; None where torch.optim's own step makes it all."""
        self._refuse_unsummed(optimizer)
        if any(self.owns(param) for group in optimizer.param_groups for param in group["params"]):
            self.check()
            self._before_step()  # it may move buckets, and their gradients
            self._take_over()
        updates = self.machine.in_backward
        if updates is not None and updates.optimizer is not optimizer:
            updates.refuse(optimizer, self.machine.gradients.place, self.machine.buckets)
        alike = self._prepare_alike(optimizer)
        if alike is not None:
            return alike
        found = self._to_update(optimizer)
        if not found:
            return None
        self.settle()
        keys = self._in_order(found)
        trained = [each for key in keys for each in found[key]]
        ignored = ignored_options(optimizer, self.options)
        if ignored and not wraps_another(optimizer):
            self._say(ignored)
        where = f"{type(optimizer).__name__}.step()"
        check_shared(where, optimizer, [each.param for each in trained])
        why = unsupported_reason(optimizer, trained)
        if why:
            if not wraps_another(optimizer):
                name = type(optimizer).__name__
                self._say(f"{name} keeps torch.optim's path on the host: {why}")
            return None
        check(where, optimizer, self.machine.buckets, found)
        if optimizer in self._prepared:  # a second step has all that it needs
            self.machine.host_budget.drop_preallocated()
        self._prepared.add(optimizer)
        prepared = PreparedStep(optimizer)
        try:
            ready: dict[object, bool] = {}
            rehearsals = self._rehearsals.of_step()
            options: dict[int, dict[str, Any]] = {}
            for key in keys:
                bucket = self.machine.buckets[key]
                part = self.parts.part(optimizer, bucket, found[key], options)
                prepared.parts.append(part)
                with (
                    nullcontext()
                    if self.parts.backends
                    else line("preparing the update", self._shows)
                ):
                    part.prepare(ready)
                rehearsals.rehearse(where, optimizer, part, found[key])
                if self.parts.helps and part.suits_chunks():
                    part.on_device = True
                    bucket.states.lock(optimizer)
        except BaseException:
            prepared.drop()
            raise
        prepared.params = [each.param for each in trained]
        prepared.gradients = [param.grad for param in prepared.params]
        prepared.states = [each.state for each in trained]
        alike_next = Alike.of(optimizer, prepared.parts, trained)
        if alike_next is not None:
            self._alike[optimizer] = alike_next
        return prepared

    def _prepare_alike(self, optimizer: Optimizer) -> PreparedStep | None:
        """The step, where it is like the one before."""
        before = self._alike.pop(optimizer, None)
        if before is None or self.machine.in_backward is not None:
            return None
        self.settle()
        where = f"{type(optimizer).__name__}.step()"
        step = before.again(where, optimizer, self.machine.buckets)
        if step is None:
            return None
        self._alike[optimizer] = before
        return PreparedStep(
            optimizer, step.parts(), step.params, step.gradients, counters=step.counters
        )

    def _refuse_unsummed(self, optimizer: Optimizer) -> None:
        """Raise where a gradient lacks its sum over replicas: alike in all ranks."""
        ranks = self.machine.ranks
        if ranks is None or ranks.replicas == 1:
            return
        for group in optimizer.param_groups:
            for param in group["params"]:
                place = self.machine.gradients.place(param)
                if place is not None and is_unsummed(param.grad):
                    key, i = place
                    name = self.machine.buckets[key].layout.params[i].name
                    refuse_unsummed(f"{type(optimizer).__name__}.step()", name, ranks.replicas)

    def _take_over(self) -> None:
        """Adopt data that the user has put into parameters (`p.data = ...`) since the forward."""
        for bucket in self.machine.buckets.values():
            if bucket.is_replaced():
                bucket.pending.wait()
                bucket.pending.withdraw()
                if not self.machine.exchanged():
                    bucket.adopt(moved=False)

    def _to_update(self, optimizer: Optimizer) -> dict[int, list[Trained]]:
        """The parameters that this step updates, by the key of their bucket.

        Those that the backward has updated are counted here, and have no gradient any more. Their
        states are copies of the dicts in `optimizer.state`, which stay as they are.
        """
        updates = self.machine.in_backward
        if updates is not None and updates.optimizer is optimizer:
            places = updates.commit()
            updated = [self.machine.buckets[key].params[i] for key, i in places]
            count_up(optimizer.state[param] for param in updated)
            drop_empty(optimizer, updated)
            for param in updated:
                param.grad = None
        found: dict[int, list[Trained]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                place = self.machine.gradients.place(param)
                if place is None or param.grad is None or self._is_elsewhere(param, place):
                    continue
                state = dict(optimizer.state.get(param, {}))
                found.setdefault(place[0], []).append(Trained(param, place[1], group, state))
        for key in [
            key for key, trained in found.items() if self._left_to(optimizer, key, trained)
        ]:
            for each in found.pop(key):
                move_loaded(optimizer, each.param)
        return found

    def _is_elsewhere(self, param: nn.Parameter, place: ParamId) -> bool:
        """Is a parameter not in its place? Then the optimizer's own step updates it."""
        mine = compat.local(param)
        value = self.machine.buckets[place[0]].values[place[1]]
        return bool(mine.data_ptr() != value.data_ptr())

    def _left_to(self, optimizer: Optimizer, key: int, trained: Iterable[Trained]) -> bool:
        """True if the optimizer's own step updates a bucket, which lives on the device.

        It is asked of all of it, as of a bucket on the host, so that both round alike.
        """
        if self.machine.buckets[key].resident is None:
            return False
        if rule_of(optimizer) is None:
            return True
        eager = self.options.lowering is Lowering.EAGER
        return eager and all(self.parts.is_plain(each.param) for each in trained)

    @property
    def _shows(self) -> bool | None:
        """Is there a line that says what is waited for? In the first step."""
        return False if self.parts.backends else self.options.progress

    def _say(self, text: str) -> None:
        notices.warn_once(text, f"megacompile: {text} (said once)", of=self)

    def _in_order(self, keys: Iterable[int]) -> list[int]:
        """Buckets in the order in which the forward read them."""
        rank = {key: i for i, key in enumerate(self.machine.order)}
        return sorted(keys, key=lambda key: (rank.get(key, len(rank)), key))

    # A step: doing it.

    def start(self, step: PreparedStep) -> None:
        """Count a step, and make the update that was prepared or start it in the background.

        Ctrl-C may come anywhere in it. Then each bucket's update runs to its end and its bucket
        knows of it, or it never begins. Where some have begun and others never will, all of them
        are torn, as where a step fails.
        """
        counted, optimizer, parts = False, step.optimizer, step.parts
        versions = compat.versions(step.params)
        try:
            runs = self._choose(parts)
            self.machine.reserve_staging(part.bucket.layout.key for part in parts)
            counted = True
            step.count()
            for executor, mine in runs:
                executor.update(mine)
            self._finish(optimizer, parts)
        except BaseException as error:
            for part in parts:
                part.drop()
                if part.aliased:  # its other name does not show that it is in flight
                    part.bucket.pending.finish()
            if counted and (isinstance(error, Exception) or _is_half_begun(step, versions)):
                _tear(optimizer, parts, error)
            raise
        finally:
            self.machine.stepped = True
            for part in parts:  # a thread may refer to it for longer
                part.states, part.visible = [], []

    def _choose(self, parts: Sequence[BucketUpdate]) -> list[tuple[Executor, _ByKey]]:
        """The executors of these parts, in their order: each part is the first's that can."""
        waiting = {part.bucket.layout.key: part for part in parts}
        chosen: list[tuple[Executor, _ByKey]] = []
        for executor in [reference() for reference in self.machine.trained]:
            if executor is None:
                continue
            mine = {k: part for k, part in waiting.items() if executor.updates.get(k) is part.op}
            waiting = {k: part for k, part in waiting.items() if k not in mine}
            chosen += [(executor, mine)] if mine else []
        for part in waiting.values():
            if part.left is not None:  # the schedule that left it is gone
                part.drop()
                part.prepare({})
        if waiting:  # first: these are mostly what the next forward reads first
            chosen.insert(0, (self._rest(waiting.values()), waiting))
        return chosen

    def _rest(self, parts: Iterable[BucketUpdate]) -> Executor:
        """The executor of a graph that updates these buckets, made once."""
        hosts = [part.bucket for part in parts]
        key = tuple((host.layout, host.resident is not None) for host in hosts)
        if key not in self._rests:
            buckets = [replace(host.layout, label=self._label(host, hosts)) for host in hosts]
            if len(self._rests) >= _RESTS:
                self._rests.pop(next(iter(self._rests)))
            self._rests[key] = Executor(self._make_rest(buckets), self.machine)
        return self._rests[key]

    def _label(self, host: HostBucket, among: Iterable[HostBucket]) -> str:
        """A bucket's label in some schedule, where only one of these has it."""
        labels = self.machine.labels
        key = host.layout.key
        others = (labels.get(other.layout.key) for other in among if other is not host)
        own = f"r{key}"
        label = labels.get(key, own)
        return own if label in others else label

    def _finish(self, optimizer: Optimizer, parts: Sequence[BucketUpdate]) -> None:
        for part in parts:
            name = part.bucket.layout.name
            self.parts.backends[name] = part.said
            log.logger("update").info("%s: %s", name, part.said)
            if part.place is not UpdatePlace.RESIDENT and part.backend.by_rule:
                self.machine.device_update.learn(optimizer, part.bucket, part.steps, part.states)
            if part.aliased or part.first:
                part.bucket.pending.wait()
            self._install(optimizer, part.bucket, part.first)

    def _install(
        self, optimizer: Optimizer, bucket: HostBucket, steps: Iterable[ParamUpdate]
    ) -> None:
        """Take over the states that an optimizer's own first step made."""
        for step in steps:
            param = bucket.params[step.index]
            state = optimizer.state[param]
            mine = names_like(compat.local(param), step.states)
            state.update(step.states)
            state.update({name: compat.like(param, step.states[name]) for name in mine})
            names = names_like(param, state)
            for name in names:
                dtypes = {step.index: state[name].dtype}
                bucket.states.make(optimizer, name, dtypes, pin=self.parts.cuda)
            adopt(optimizer, bucket, step.index, state, names)
            step.states.clear()  # they are copied; the states of all buckets would be there twice
            drop_empty(optimizer, [param])


def _is_half_begun(step: PreparedStep, versions: Sequence[int]) -> bool:
    """Have the updates of some buckets begun, and not those of others? That shows in the versions
    of parameters, but for an update that was called off.

    Args:
        versions: of its parameters, before it began.
    """
    begun = set()
    before = dict(zip(map(id, step.params), versions, strict=True))
    for part in step.parts:
        work = part.bucket.pending.in_flight
        future = None if work is None else work.future
        off = future is not None and future.cancelled()
        params = [part.bucket.params[i] for i in part.indices]
        changed = [compat.version(param) != before[id(param)] for param in params]
        begun.add(any(changed) and not off)
    return len(begun) > 1


def _tear(optimizer: Optimizer, parts: Iterable[BucketUpdate], error: BaseException) -> None:
    """A step has failed when it had counted, and had begun some of its updates."""
    why = f"{type(optimizer).__name__}.step() failed with {type(error).__name__}: {error}"
    for part in parts:
        pending = part.bucket.pending
        params = part.bucket.params
        pending.tear(why, {i: Left.of(params[i], [optimizer]) for i in part.indices})
