"""`optimizer.step()` of a stock optimizer over streamed parameters.

Hooks on the optimizer (see `hooks`) update the streamed parameters beside its own step, with its
own `param_groups` and `state`. `Updates.prepare_step` refuses impossible updates; only
`Updates.start` changes parameters and states. It runs the update graphs of the schedules whose
backwards ran, each for the buckets that take part, and returns at once: threads update bucket after
bucket, roughly as the next forward reads them. A prefetch, or an early reader of a parameter,
gradient or state (see `guards`), waits for its bucket. Other updates (the first step of a bucket
that the device will update, a gradient set by the user) run in a graph of their own.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
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
from megacompile.runtime.optim.rules import known, rule_of
from megacompile.runtime.params import optimizer_states
from megacompile.runtime.params.gradient_guards import is_consumed, is_taken, is_unsummed
from megacompile.runtime.params.guards import opened
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.optimizer_states import Trained, count_up, drop_empty, names_like
from megacompile.runtime.params.pending import Left
from megacompile.runtime.step import hooks
from megacompile.runtime.step.alike import Alike
from megacompile.runtime.step.hooks import PreparedStep
from megacompile.runtime.step.parts import StepParts
from megacompile.runtime.updates.refusals import check, check_shared, rehearse
from megacompile.runtime.updates.update import BucketUpdate, ParamUpdate, UpdatePlace

_GRADIENT = attrgetter("grad")
_RESTS = 16  # graphs for updates outside of schedules; the oldest are dropped

_ByKey = dict[int, BucketUpdate]  # parts by bucket key
_Ours = tuple[nn.Parameter, ParamId, dict[str, Any]]  # a parameter, its place, its group


class Updates:
    """The optimizer steps of one model's parameters."""

    def __init__(
        self,
        machine: Machine,
        options: Options,
        # builds a schedule that only updates some buckets, at their current placement
        rest: Callable[[Sequence[Bucket]], Schedule],
        before_step: Callable[[], None],  # called when an optimizer's step begins: may move buckets
    ) -> None:
        self.machine = machine
        self.options = options
        self.parts = StepParts(machine, options)
        self._make_rest = rest
        self._before_step = before_step
        self._rests: dict[tuple[tuple[Bucket, bool], ...], Executor] = {}
        self._rehearsed: set[object] = set()
        self._alike: weakref.WeakKeyDictionary[Optimizer, Alike] = weakref.WeakKeyDictionary()
        hooks.MODELS.add(self)
        if options.state_dtype is not None:
            owns = weakref.WeakMethod(self.owns)
            compat.keep_state_dtypes(lambda param: (mine := owns()) is not None and mine(param))

    def owns(self, param: torch.Tensor) -> bool:
        return id(param) in self.machine.gradients.places

    def settle(self, *, raises: bool = True) -> None:
        """Wait for all work in flight; `raises` failures whose values were not loaded since."""
        for bucket in self.machine.buckets.values():
            if raises:
                bucket.pending.wait()
            else:
                bucket.pending.is_torn()

    def check(self) -> None:
        """Raise if an update failed and its values were not loaded since. Does not wait."""
        for bucket in self.machine.buckets.values():
            if bucket.pending.left:
                bucket.pending.check()

    def prepare_step(self, optimizer: Optimizer) -> PreparedStep | None:
        """Prepare the update of streamed parameters; None if torch.optim's own step updates all."""
        places = self.machine.gradients.places
        ours = [
            (param, at, group)
            for group in optimizer.param_groups
            for param in group["params"]
            if (at := places.get(id(param))) is not None
        ]
        where = f"{type(optimizer).__name__}.step()"
        updates = self.machine.in_backward
        others = updates is not None and updates.optimizer is not optimizer
        # an optimizer of unknown class may wrap the one of the backward, and call its step
        stock = known(type(optimizer)) is not None
        for param, at, _ in ours if others or self.machine.ranks is not None else ():
            if is_unsummed(param.grad):
                opened(param.grad)  # raises, equally in all ranks
            gone = param.grad is None and updates is not None and at in updates.committed
            if others and (gone or (stock and is_taken(param.grad))):
                raise is_consumed(self.machine.buckets[at[0]].layout.params[at[1]].name)
        if ours:
            self.check()
            self._before_step()  # it may move buckets, and their gradients
        before = self._alike.pop(optimizer, None) if updates is None else None
        if before is not None:
            self.settle()
            alike = before.again(where, optimizer, self.machine.buckets)
            if alike is not None:
                self._alike[optimizer] = before
                return alike
        found = self._to_update(optimizer, ours)
        if not found:
            return None
        self.settle()
        keys = list(filter(found.__contains__, self.machine.order))  # as the forward reads them
        keys += sorted(found.keys() - set(keys))
        trained = list(chain.from_iterable(map(found.__getitem__, keys)))
        params, _, _, states = zip(*trained, strict=True)
        check_shared(where, optimizer, params)
        why = optimizer_states.unsupported_reason(optimizer, trained)
        said = [optimizer_states.ignored_options(optimizer, self.options)]
        if why:
            name = type(optimizer).__name__
            said.append(f"{name} runs unchanged on the host, which is slower: {why}")
        for text in filter(None, said):
            if not optimizer_states.wraps_another(optimizer):
                notices.warn_once(text, f"megacompile: {text} (shown once)", of=self)
        if why:
            return None
        check(where, optimizer, self.machine.buckets, found)
        if self.machine.host_budget.ahead and optimizer in self.parts.prepared:
            self.machine.host_budget.drop_preallocated()  # a second step has all its memory
        self.parts.prepared.add(optimizer)
        parts: list[BucketUpdate] = []
        # in the first step
        shown = nullcontext if self.parts.backends else partial(line, show=self.options.progress)
        try:
            ready: dict[object, bool] = {}
            options: dict[int, tuple[dict[str, Any], bool]] = {}
            for key in keys:
                bucket = self.machine.buckets[key]
                with shown("preparing the update"):
                    part = self.parts.part(optimizer, bucket, found[key], options)
                    parts.append(part)
                    part.prepare(ready)
                if self.parts.helps and part.suits_chunks():
                    part.on_device = True
                    bucket.states.lock(optimizer)
            rehearse(where, optimizer, parts, self._rehearsed)
        except BaseException:
            for part in parts:
                part.drop()
            raise
        if {UpdatePlace.RESIDENT}.issuperset(map(attrgetter("place"), parts)):
            alike_next = Alike.of(optimizer, parts, trained)
            if alike_next is not None:
                self._alike[optimizer] = alike_next
        return PreparedStep(optimizer, parts, params, list(map(_GRADIENT, params)), states)

    def _to_update(self, optimizer: Optimizer, ours: Iterable[_Ours]) -> dict[int, list[Trained]]:
        """The parameters that this step updates, by bucket key. Their states are copies of the
        dicts in `optimizer.state`, which stay unchanged. Parameters that the backward has updated
        are counted here and lose their gradient."""
        updates = self.machine.in_backward
        if updates is not None and updates.optimizer is optimizer:
            places = updates.commit()
            updated = [self.machine.buckets[key].params[i] for key, i in places]
            count_up(optimizer.state[param] for param in updated)
            drop_empty(optimizer, updated)
            for param in updated:
                param.grad = None
        found: dict[int, list[Trained]] = {}
        for param, (key, i), group in ours:
            if param.grad is None:
                continue
            value = self.machine.buckets[key].values[i]
            if compat.local(param).data_ptr() != value.data_ptr():
                continue  # it is not in place: the optimizer's own step updates it
            state = dict(optimizer.state.get(param, {}))
            found.setdefault(key, []).append(Trained(param, i, group, state))
        for key in list(found):
            # torch.optim's own step; for the whole bucket, as for a host bucket: both round alike
            if self.machine.buckets[key].resident is not None and (
                rule_of(optimizer) is None
                or (self.options.lowering is Lowering.EAGER and self.parts.are_plain(found[key]))
            ):
                for each in found.pop(key):
                    optimizer_states.move_loaded(optimizer, each.param)
        return found

    def start(self, step: PreparedStep) -> None:
        """Count a step, and run the prepared update or start it in the background.

        Ctrl-C may arrive at any point. Then each bucket's update either completes, with its bucket
        aware of it, or never starts. If only some have started, all of them are torn, as after a
        failed step.
        """
        counted, optimizer, parts = False, step.optimizer, step.parts
        versions = list(map(compat.version, step.params))
        try:
            runs = self._choose(parts)
            if self.machine.staging is not None:
                self.machine.staging.reserve(part.bucket for part in parts)
            counted = True
            count_up(step.states, step.counters)
            for param, state in zip(step.params, step.states, strict=bool(step.states)):
                if state:
                    optimizer.state[param].update(state)
            for executor, mine in runs:
                executor.update(mine)
            self._finish(optimizer, parts)
        except BaseException as error:
            for part in parts:
                part.drop()
                if part.aliased:  # its alias is not guarded while it is in flight
                    part.bucket.pending.is_torn()
            if counted and (isinstance(error, Exception) or _is_half_begun(step, versions)):
                why = (
                    f"{type(optimizer).__name__}.step() failed with {type(error).__name__}: {error}"
                )
                for part in parts:
                    params = part.bucket.params
                    left = {i: Left.of(params[i], [optimizer]) for i in part.indices}
                    part.bucket.pending.tear(why, left)
            raise
        finally:
            self.machine.stepped = True
            for part in parts:  # a thread may reference it for longer
                part.states, part.visible = [], []

    def _choose(self, parts: Sequence[BucketUpdate]) -> list[tuple[Executor, _ByKey]]:
        """The executors of these parts, in order: each part goes to the first that can run it."""
        waiting = {part.bucket.layout.key: part for part in parts}
        chosen: list[tuple[Executor, _ByKey]] = []
        for reference in self.machine.trained:
            executor = reference()
            ops = {} if executor is None else executor.updates
            mine = {k: part for k, part in waiting.items() if ops.get(k) is part.place.op}
            if executor is not None and mine:
                chosen.append((executor, mine))
                deque(map(waiting.pop, mine), maxlen=0)
        for part in waiting.values():
            if part.left is not None:  # its schedule is gone
                part.drop()
                part.prepare({})
        if waiting:  # first, because the next forward usually reads these first
            chosen.insert(0, (self._rest(waiting.values()), waiting))
        return chosen

    def _rest(self, parts: Iterable[BucketUpdate]) -> Executor:
        hosts = [part.bucket for part in parts]
        key = tuple((host.layout, host.resident is not None) for host in hosts)
        if key not in self._rests:
            if len(self._rests) >= _RESTS:
                self._rests.pop(next(iter(self._rests)))
            buckets = [replace(host.layout, label=f"r{host.layout.key}") for host in hosts]
            self._rests[key] = Executor(self._make_rest(buckets), self.machine)
        return self._rests[key]

    def _finish(self, optimizer: Optimizer, parts: Sequence[BucketUpdate]) -> None:
        for part in parts:
            name, label = part.bucket.layout.name, part.label
            self.parts.backends[name] = label
            log.logger("update").info("%s: %s", name, label)
            if part.place is not UpdatePlace.RESIDENT and part.backend.by_rule:
                self.machine.device_update.learn(optimizer, part.bucket, part.steps, part.states)
            if part.aliased or part.first:
                part.bucket.pending.wait()
            if part.first:
                self._install(optimizer, part.bucket, part.first)

    def _install(
        self, optimizer: Optimizer, bucket: HostBucket, steps: Iterable[ParamUpdate]
    ) -> None:
        """Adopt the states that an optimizer's own first step created."""
        for step in steps:
            param = bucket.params[step.index]
            state = optimizer.state[param]
            state.update(step.states)
            for name in names_like(compat.local(param), step.states):
                state[name] = compat.like(param, step.states[name])
            names = names_like(param, state)
            dtypes = {name: {step.index: state[name].dtype} for name in names}
            bucket.states.make(optimizer, dtypes, pin=self.parts.cuda)
            optimizer_states.adopt(optimizer, bucket, step.index, state, names)
            drop_empty(optimizer, [param])


def _is_half_begun(step: PreparedStep, versions: Sequence[int]) -> bool:
    """True if only some buckets' updates have started, or an update in torch was broken off. The
    parameters' versions (given: before the step) show this, except for a cancelled update."""
    begun = set()
    before = dict(zip(map(id, step.params), versions, strict=True))
    for part in step.parts:
        work = part.bucket.pending.in_flight
        off = work is not None and work.future is not None and work.future.cancelled()
        params = [part.bucket.params[i] for i in part.indices]
        changed = not off and any(compat.version(p) != before[id(p)] for p in params)
        if part.in_torch and not changed:
            return True
        begun.add(changed)
    return len(begun) > 1
