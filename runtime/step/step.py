"""`optimizer.step()` of a stock optimizer over streamed parameters.

Hooks on the optimizer (see `hooks`) do the update of our parameters beside its own step, with its
own `param_groups` and `state`. `Updates.prepare_step` finds out what is to be done, bucket by
bucket, and refuses what cannot be; only `PreparedStep.start` changes parameters and states. It runs
the updates of the schedules whose backwards ran (`schedule.update`), each for the buckets that the
step has a part for, and is over at once: threads update bucket after bucket, in the order in which
the next forward reads them, and a prefetch waits for its bucket alone. Whoever looks at a
parameter, a gradient or a state before its bucket is done waits for that bucket (see `guards`).

What no update of those schedules makes (the first step of a bucket that the device will update
later, a gradient that the user has put there) is made by a graph of its own, `rest`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile import compat, log
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.options import Lowering, Options
from megacompile.runtime.ops.executor import Executor
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.optim.blockwise import quantizes
from megacompile.runtime.optim.registry import rule_of
from megacompile.runtime.optim.states import is_shared
from megacompile.runtime.optim.stochastic import seed_of
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.guards import guard_of
from megacompile.runtime.params.lazy import lazy_of
from megacompile.runtime.params.optimizer_states import (
    Trained,
    adopt,
    count_up,
    drop_empty,
    for_update,
    make_buffers,
    move_loaded,
    names_like,
    new_counter,
    not_heeded,
    stands_back,
    visible,
)
from megacompile.runtime.step import hooks
from megacompile.runtime.updates.on_device import DeviceUpdate
from megacompile.runtime.updates.part import BucketPart
from megacompile.runtime.updates.refusals import check, rehearse
from megacompile.runtime.updates.update import BucketUpdate, Step, UpdatePath

_RESTS = 16  # graphs for what no schedule's update makes; those made longest ago go
_RULES = (UpdatePath.COMPILED, UpdatePath.TORCH, UpdatePath.BACKWARD, UpdatePath.RESIDENT)


@dataclass(eq=False, slots=True)
class PreparedStep:
    """One model's part of an `optimizer.step()`."""

    updates: Updates
    optimizer: Optimizer
    parts: list[BucketPart]
    gradients: list[tuple[nn.Parameter, torch.Tensor]]  # of the parameters that it updates

    def start(self) -> None:
        """Count the step, and make the update or start it in the background."""
        self.updates.start(self.optimizer, self.parts)

    def drop(self) -> None:
        """It will not be done."""
        for part in self.parts:
            part.drop()


class Updates:
    """The optimizer steps of one model's parameters.

    Args:
        rest: makes the schedule whose update is that of some buckets, where they lie.
    """

    def __init__(
        self, machine: Machine, options: Options, rest: Callable[[Sequence[Bucket]], Schedule]
    ) -> None:
        self.machine = machine
        self.options = options
        self._make_rest = rest
        self._rests: dict[tuple[tuple[Bucket, bool], ...], Executor] = {}
        self._said: set[str] = set()
        self.ways: dict[str, UpdatePath] = {}  # by the bucket's name, of the last step
        hooks.tell(self)
        if options.state_dtype is not None:
            reference = weakref.ref(self)

            def ours(param: torch.Tensor) -> bool:
                updates = reference()
                return updates is not None and updates.owns(param)

            compat.keep_state_dtypes(ours)

    def owns(self, param: torch.Tensor) -> bool:
        """Is it a parameter of this model?"""
        return self.machine.gradients.place(param) is not None

    def settle(self) -> None:
        """Wait for everything that is in flight; raise what failed."""
        for bucket in self.machine.buckets.values():
            bucket.pending.settle()

    # A step: what is to be done.

    def prepare_step(self, optimizer: Optimizer) -> PreparedStep | None:
        """Prepare the update of our parameters; None where torch.optim's own step makes it all."""
        if any(self.owns(param) for group in optimizer.param_groups for param in group["params"]):
            self.machine.before_step()  # it may move buckets, and their gradients
            self._take_over()
        updates = self.machine.in_backward
        if updates is not None and updates.optimizer is not optimizer:
            updates.refuse(optimizer, self.machine.gradients.place, self.machine.buckets)
        found = self._to_update(optimizer)
        if not found:
            return None
        self.settle()
        trained = [each for of_bucket in found.values() for each in of_bucket]
        ignored = not_heeded(optimizer, self.options)
        if ignored:
            self._say(ignored)
        why = stands_back(optimizer, trained)
        if why:
            self._say(f"{type(optimizer).__name__} keeps torch.optim's path on the host: {why}")
            return None
        where = f"{type(optimizer).__name__}.step()"
        check(where, optimizer, self.machine.buckets, found)
        prepared = PreparedStep(self, optimizer, [], [])
        try:
            compiled: set[object] = set()
            rehearsed: set[object] = set()
            for key in self._in_order(found):
                part = self._part(optimizer, self.machine.buckets[key], found[key])
                prepared.parts.append(part)
                part.update.prepare(compiled)
                rehearse(where, optimizer, part.update, part.trained, rehearsed)
                if self._helps and part.update.suits_chunks():
                    part.update.on_device = True
                    part.update.bucket.states.lock(optimizer)
        except BaseException:
            prepared.drop()
            raise
        prepared.gradients = [(t.param, t.param.grad) for t in trained if t.param.grad is not None]
        return prepared

    def _take_over(self) -> None:
        """Adopt data that the user has put into parameters (`p.data = ...`) since the forward."""
        for bucket in self.machine.buckets.values():
            if bucket.replaced():
                bucket.pending.settle()
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
            for key, i in updates.commit(self.machine.buckets):
                param = self.machine.buckets[key].params[i]
                count_up(optimizer.state[param])
                drop_empty(optimizer, [param])
                param.grad = None
        found: dict[int, list[Trained]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                place = self.machine.gradients.place(param)
                if place is None or param.grad is None or self._left_to(optimizer, param, place):
                    continue
                state = dict(optimizer.state.get(param, {}))
                found.setdefault(place[0], []).append(Trained(param, place[1], group, state))
        return found

    def _left_to(self, optimizer: Optimizer, param: nn.Parameter, place: tuple[int, int]) -> bool:
        """Does the optimizer's own step update a parameter: one on the device, or not in place?"""
        bucket = self.machine.buckets[place[0]]
        if param.data_ptr() != bucket.values[place[1]].data_ptr():
            return True
        eager = self.options.lowering is Lowering.EAGER and self._is_plain(param)
        left = bucket.resident is not None and (eager or rule_of(optimizer) is None)
        if left:
            move_loaded(optimizer, param)
        return left

    def _is_plain(self, param: nn.Parameter) -> bool:
        """Are a parameter, its gradient and its states of one dtype, as torch.optim has them?"""
        assert param.grad is not None
        return not self._rounds(param) and param.grad.dtype == param.dtype == self._state_dtype(
            param
        )

    def _rounds(self, param: nn.Parameter) -> bool:
        """Is a parameter rounded at random?"""
        return self.options.stochastic_rounding and param.dtype == torch.bfloat16

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(f"megacompile: {text} (said once)", stacklevel=6)

    def _in_order(self, keys: Iterable[int]) -> list[int]:
        """Buckets in the order in which the forward read them."""
        rank = {key: i for i, key in enumerate(self.machine.order)}
        return sorted(keys, key=lambda key: (rank.get(key, len(rank)), key))

    # The part of a bucket.

    def _part(self, optimizer: Optimizer, bucket: HostBucket, trained: list[Trained]) -> BucketPart:
        update = self._update(optimizer, bucket, trained)
        offer = bucket.pending.take_offer()
        assert offer is None or isinstance(offer, DeviceUpdate)
        part = BucketPart(update, update.way, trained, [], [], aliased=False, first=[], left=None)
        for each in trained:
            mine = visible(each.state)
            part.states += mine
            part.visible += mine
            gradient = each.param.grad
            assert gradient is not None
            if guard_of(gradient) is None:
                part.visible.append(gradient)
            # a gradient's two names: ours, and p.grad (of one of the user's, what the step reads)
            if bucket.aliased(each.at) or any(map(is_shared, (*mine, gradient))):
                part.aliased = True
            if update.way is UpdatePath.STOCK and _has_tensors(each.group):
                part.aliased = True  # see float64 in for_update
        if update.makes_states():
            part.first = update.new()
        if offer is not None:
            by_rule = update.way in (UpdatePath.COMPILED, UpdatePath.TORCH)
            if by_rule and not part.aliased and offer.fits(update.steps):
                update.way, part.left = UpdatePath.ON_DEVICE, offer
            else:
                offer.drop()
        return part

    def _update(
        self, optimizer: Optimizer, bucket: HostBucket, trained: Sequence[Trained]
    ) -> BucketUpdate:
        way = self._way(optimizer, bucket, trained)
        pin = way is UpdatePath.DEVICE or self.machine.in_backward is not None
        pin = pin or bucket.layout.key in self.machine.device_update.keys
        self._make_buffers(
            optimizer, bucket, trained, by_rule=way in _RULES, pin=pin and self._cuda
        )
        update = BucketUpdate(bucket, way, type(optimizer), self.machine.device)
        for each in trained:
            gradient = each.param.grad
            assert gradient is not None
            who = lazy_of(gradient)
            if who is not None:
                who.check(gradient)
            ours = bucket.grads.get(each.at)
            foreign = ours is None or ours.data_ptr() != gradient.data_ptr()
            taken = gradient.detach() if foreign or ours is None else ours
            scale = 1.0 if who is None else who.scale
            step = self._step(optimizer, bucket, each, taken, scale, way)
            step.intact = (
                not foreign and who is not None and who.version == compat.version(gradient)
            )
            update.steps.append(step)
        return update

    @property
    def _cuda(self) -> bool:
        return self.machine.device.type == "cuda"

    @property
    def _helps(self) -> bool:
        """Does the device help with the updates of host memory?"""
        return self._cuda and self.options.device_helps

    def _way(
        self, optimizer: Optimizer, bucket: HostBucket, trained: Sequence[Trained]
    ) -> UpdatePath:
        if rule_of(optimizer) is None:
            return UpdatePath.DEVICE if self._cuda else UpdatePath.STOCK
        if bucket.resident is not None:
            return UpdatePath.RESIDENT
        plain = all(self._is_plain(each.param) for each in trained)
        if self.options.lowering is Lowering.EAGER:
            return UpdatePath.STOCK if plain else UpdatePath.TORCH
        if compat.has_cpp_compiler():
            return UpdatePath.COMPILED
        return UpdatePath.FUSED if plain else UpdatePath.TORCH

    def _state_dtype(self, param: torch.Tensor) -> torch.dtype | str:
        wanted = self.options.state_dtype
        if wanted is None:
            return param.dtype
        if wanted == "int8" and not quantizes(param.numel()):
            return torch.float32
        return wanted

    def _make_buffers(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: Iterable[Trained],
        *,
        by_rule: bool,
        pin: bool,
    ) -> None:
        wanted: list[tuple[Trained, str, torch.dtype | str]] = []
        rule = rule_of(optimizer) if by_rule else None
        for each in trained:
            if rule is not None:
                dtype = self._state_dtype(each.param)
                wanted += [(each, n, dtype) for n in rule.state_names(each.group)]
            else:
                names = names_like(each.param, each.state)
                wanted += [(each, name, each.state[name].dtype) for name in names]
        if make_buffers(optimizer, bucket, wanted, pin=pin):
            hooks.convert_state_dicts(optimizer)

    def _step(
        self,
        optimizer: Optimizer,
        bucket: HostBucket,
        trained: Trained,
        gradient: torch.Tensor,
        scale: float,
        way: UpdatePath,
    ) -> Step:
        param, i, group, state = trained
        rule = rule_of(optimizer) if way in _RULES else None
        names = names_like(param, state) if rule is None else rule.state_names(group)
        first = any(state.get(name) is None for name in names)
        adopt(optimizer, bucket, i, state, names)
        rounded = rule is not None and self._rounds(param)
        if rule is not None and (rounded or rule.counts) and "step" not in state:
            state["step"] = new_counter()  # without `counts` too: the seeds need it
        step = Step(
            index=i,
            grad=gradient,
            scale=scale,
            group={} if rule else {k: _snapshot(v) for k, v in group.items() if k != "params"},
            states=for_update(optimizer, bucket, i, state, names if rule else None),
        )
        if rule is not None:
            count = float(state.get("step", 0)) + 1
            step.rule = rule
            step.hyper = rule.hyper(group, step=count, first=first, scale=scale)
            if rounded:
                key = bucket.layout.key
                step.seed = seed_of(torch.initial_seed(), (key << 20) + i, int(count))
        return step

    def prepare(
        self, optimizer: Optimizer, bucket: HostBucket, indices: Iterable[int]
    ) -> dict[int, Step]:
        """The steps of some parameters by rule, for an update in the backward."""
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        params = [(bucket.params[i], i) for i in indices]
        trained = [Trained(p, i, groups[id(p)], optimizer.state[p]) for p, i in params]
        self._make_buffers(optimizer, bucket, trained, by_rule=True, pin=self._cuda)
        self.ways[bucket.layout.name] = UpdatePath.BACKWARD
        none = torch.empty(0)
        return {
            each.at: self._step(optimizer, bucket, each, none, 1.0, UpdatePath.BACKWARD)
            for each in trained
        }

    # A step: doing it.

    def start(self, optimizer: Optimizer, parts: Sequence[BucketPart]) -> None:
        """Make what was prepared, or start it in the background.

        Ctrl-C may come anywhere in it. Then each bucket's update runs to its end and its bucket
        knows of it, or it never begins.
        """
        try:
            self._count(optimizer, parts)
            self._run(parts)
            self._finish(optimizer, parts)
        except BaseException:
            for part in parts:
                part.drop()
                if part.aliased:  # its other name shows nobody that it is in flight
                    part.update.bucket.pending.finish()
            raise
        finally:
            self.machine.stepped = True

    @staticmethod
    def _count(optimizer: Optimizer, parts: Sequence[BucketPart]) -> None:
        for part in parts:
            for each in part.trained:
                count_up(each.state)
                if each.state:
                    optimizer.state[each.param].update(each.state)

    def _run(self, parts: Sequence[BucketPart]) -> None:
        """Run the updates that make these parts, each part by the first that can."""
        waiting = {part.update.bucket.layout.key: part for part in parts}
        chosen = []
        for executor in [reference() for reference in self.machine.trained]:
            if executor is None:
                continue
            mine = {k: part for k, part in waiting.items() if executor.updates.get(k) is part.op}
            waiting = {k: part for k, part in waiting.items() if k not in mine}
            chosen.append((executor, mine))
        for part in waiting.values():
            if part.left is not None:  # the schedule that left it is gone
                part.drop()
                part.update.prepare(set())
        if waiting:  # first: these are mostly what the next forward reads first
            self._rest(waiting.values()).update(waiting)
        for executor, mine in chosen:
            if mine:
                executor.update(mine)
        for part in parts:
            name, way = part.update.bucket.layout.name, part.update.way
            self.ways[name] = way
            log.logger("update").info("%s: %s", name, way.value)

    def _rest(self, parts: Iterable[BucketPart]) -> Executor:
        """The executor of a graph that updates these buckets, made once."""
        hosts = [part.update.bucket for part in parts]
        key = tuple((host.layout, host.resident is not None) for host in hosts)
        if key not in self._rests:
            labels = self.machine.labels
            buckets = [
                replace(host.layout, label=labels.get(host.layout.key, f"r{host.layout.key}"))
                for host in hosts
            ]
            if len(self._rests) >= _RESTS:
                self._rests.pop(next(iter(self._rests)))
            self._rests[key] = Executor(self._make_rest(buckets), self.machine)
        return self._rests[key]

    def _finish(self, optimizer: Optimizer, parts: Sequence[BucketPart]) -> None:
        for part in parts:
            update = part.update
            if update.way in (UpdatePath.COMPILED, UpdatePath.TORCH, UpdatePath.ON_DEVICE):
                self.machine.device_update.learn(
                    optimizer, update.bucket, update.steps, part.states
                )
            if part.aliased or part.first:
                update.bucket.pending.settle()
            self._install(optimizer, update.bucket, part.first)

    def _install(self, optimizer: Optimizer, bucket: HostBucket, steps: Iterable[Step]) -> None:
        """Take over the states that an optimizer's own first step made."""
        for step in steps:
            param = bucket.params[step.index]
            state = optimizer.state[param]
            state.update(step.states)
            names = names_like(param, state)
            for name in names:
                dtypes = {step.index: state[name].dtype}
                bucket.states.make(optimizer, name, dtypes, pin=self._cuda)
            adopt(optimizer, bucket, step.index, state, names)
            drop_empty(optimizer, [param])


def _has_tensors(group: dict[str, Any]) -> bool:
    """Is an option a tensor, such as a tensor lr?"""
    return any(isinstance(value, torch.Tensor) for value in group.values())


def _snapshot(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
