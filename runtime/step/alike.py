"""A step over buckets that live on the device that is like the one before it.

To prepare a step asks some twenty questions of each parameter, its gradient and its states. Where
all of them have the answers of the step before, only the gradients are new, and the numbers of the
groups. `Alike.again` finds that out: it compares what the questions are about with what the step
before had, a list at a time. Where anything differs, the step is prepared as if it were the first.

Nothing here holds a tensor of a bucket: a count of the users of its memory finds none here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile.runtime.optim.kernels.bucket import update_known
from megacompile.runtime.optim.kernels.table import KnownParams, Signature, describe, known
from megacompile.runtime.optim.registry import rule_of
from megacompile.runtime.optim.rule import Group, OptimizerRule
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.gradient_guards import lazy_of
from megacompile.runtime.params.guards import GuardedTensor, GuardState, guard_of
from megacompile.runtime.params.optimizer_states import Trained, for_update, unsupported_reason
from megacompile.runtime.updates.part import BucketPart
from megacompile.runtime.updates.refusals import check_options
from megacompile.runtime.updates.update import BucketUpdate, ParamUpdate, UpdateBackend

_ADDRESS, _STRIDE = torch.Tensor.data_ptr, torch.Tensor.stride
_DTYPE, _LAYOUT, _SHAPE = attrgetter("dtype"), attrgetter("layout"), attrgetter("shape")
_ON_CPU = attrgetter("is_cpu")
_PLAIN = frozenset((torch.Tensor,))
_GRADIENTS = frozenset((torch.Tensor, GuardedTensor))  # what they may be
_ALIGNED = 16  # bytes, of an address that the kernel reads whole vectors at


class _Slice(NamedTuple):
    """The parameters of one bucket, among those of the step."""

    bucket: ref[HostBucket]
    key: int
    indices: tuple[int, ...]
    first: int

    @property
    def all(self) -> slice:
        return slice(self.first, self.first + len(self.indices))


@dataclass(eq=False, slots=True)
class AlikeStep:
    """The new values of a step; see `Alike`."""

    like: Alike
    params: list[nn.Parameter]
    gradients: list[Any]
    factors: list[torch.Tensor] | None  # of the gradients
    hypers: list[tuple[float, ...]]
    states: list[dict[str, Any]]  # of the optimizer, or empty

    def parts(self, optimizer: Optimizer) -> list[BucketPart]:
        """Its parts, as `StepParts` makes them."""
        return [self._part(optimizer, at) for at in self.like.slices]

    def _part(self, optimizer: Optimizer, at: _Slice) -> BucketPart:
        bucket = at.bucket()
        assert bucket is not None and bucket.resident is not None
        update = BucketUpdate(bucket, UpdateBackend.RESIDENT, type(optimizer), bucket.resident)
        if bucket.resident.type == "cuda":
            update.alike = self
        else:
            update.steps = self._steps(optimizer, bucket, at)
        groups = self.like.groups[at.all]
        trained = zip(self.params[at.all], at.indices, groups, self.states[at.all], strict=True)
        each = [Trained._make(of_param) for of_param in trained]
        return BucketPart(update, update.backend, each, [], [], aliased=False, first=[], left=None)

    def _steps(self, optimizer: Optimizer, bucket: HostBucket, at: _Slice) -> list[ParamUpdate]:
        """The updates of a bucket, where no kernel takes the addresses."""
        return [
            ParamUpdate(
                index=i,
                grad=self.gradients[k].detach(),
                scale=1.0,
                group={},
                states=for_update(optimizer, bucket, i, self.states[k], self.like.names[k]),
                rule=self.like.rule,
                hyper=self.hypers[k],
                factor=None if self.factors is None else self.factors[k],
            )
            for k, i in enumerate(at.indices, at.first)
        ]

    def __call__(self, updates: Iterable[BucketUpdate]) -> None:
        """Make the updates of some of its buckets by their addresses, in one launch."""
        keys = tuple([update.bucket.layout.key for update in updates])
        like = self.like
        update_known(like.rule, like.known(keys), self.gradients, self.factors, self.hypers)


class Alike:
    """The facts about a step whose buckets all live on the device.

    Args:
        rule: of its optimizer.
        optimizer: whose step it was.
        parts: of that step, before it has begun.
        described: of each parameter, its signature and its row of the kernel's table.
    """

    def __init__(
        self,
        rule: OptimizerRule,
        optimizer: Optimizer,
        parts: Sequence[BucketPart],
        described: Sequence[tuple[Signature, list[int]]],
    ) -> None:
        self.rule = rule
        self.slices: list[_Slice] = []
        for part in parts:
            bucket, indices = part.update.bucket, tuple([each.at for each in part.trained])
            first = self.slices[-1].all.stop if self.slices else 0
            self.slices.append(_Slice(ref(bucket), bucket.layout.key, indices, first))
        trained = [each for part in parts for each in part.trained]
        self.groups = [each.group for each in trained]
        self.names = [rule.state_names(each.group) for each in trained]
        self._options = [(g, [id(p) for p in g["params"]]) for g in optimizer.param_groups]
        ids = {id(each.param) for each in trained}
        self._idle = {key for _, keys in self._options for key in keys} - ids
        self._homes = [each.param.data_ptr() for each in trained]
        self._looks = _looks([each.param.grad for each in trained])
        self._states = self._looks_of_states([each.state for each in trained])
        self._described = described
        self._known: dict[tuple[int, ...], list[KnownParams]] = {}

    @staticmethod
    def of(optimizer: Optimizer, parts: Sequence[BucketPart]) -> Alike | None:
        """The facts about a step that was prepared; None where the next one is prepared from
        nothing."""
        rule = rule_of(optimizer)
        if rule is None or not parts:
            return None
        described = []
        for part in parts:
            if (
                part.update.backend is not UpdateBackend.RESIDENT
                or part.update.bucket.whole.ranks > 1
            ):
                return None
            each = part.update.for_kernel()
            if len(each) < len(part.trained):  # one has no element
                return None
            for k, (of, update) in enumerate(each):
                like = update.param.stride() == part.update.steps[k].grad.stride()
                if of is not rule or update.seed is not None or not like:
                    return None
                described.append(describe(k, rule, update))
        found = Alike(rule, optimizer, parts, described)
        states = [each.state for part in parts for each in part.trained]
        return None if found._states is None or found._hypers(states) is None else found

    def again(
        self, where: str, optimizer: Optimizer, buckets: Mapping[int, HostBucket]
    ) -> AlikeStep | None:
        """The step that begins, which has not changed anything; None where it is another one.

        Args:
            where: what was called.
            optimizer: whose step it is.
            buckets: that there are, by key.

        Raises:
            OptimizerError: an option of a group is none to go on from.
        """
        if not self._has_groups(optimizer) or not self._has_buckets(buckets):
            return None
        params: list[Any] = []
        for at in self.slices:
            of_bucket = buckets[at.key].params
            params += [of_bucket[i] for i in at.indices]
        gradients = [param.grad for param in params]
        states = [optimizer.state.get(param) or {} for param in params]
        if (
            not _GRADIENTS.issuperset(map(type, gradients))
            or _looks(gradients) != self._looks
            or list(map(_ADDRESS, params)) != self._homes
            or self._looks_of_states(states) != self._states
        ):
            return None
        firsts = {id(group): k for k, group in reversed(list(enumerate(self.groups)))}
        some = [Trained(params[k], 0, self.groups[k], states[k]) for k in firsts.values()]
        if unsupported_reason(optimizer, some):
            return None
        check_options(where, optimizer, [each.group for each in some])
        names = {id(each.group): self.rule.state_names(each.group) for each in some}
        if any(names[key] != self.names[k] for key, k in firsts.items()):
            return None
        hypers, factors = self._hypers(states), _factors(gradients)
        if hypers is None or factors is None or not self._are_aligned(gradients):
            return None
        return AlikeStep(self, params, gradients, factors or None, hypers, states)

    def _has_groups(self, optimizer: Optimizer) -> bool:
        now = optimizer.param_groups
        if len(now) != len(self._options):
            return False
        for group, (before, ids) in zip(now, self._options, strict=True):
            if group is not before or list(map(id, group["params"])) != ids:
                return False
        idle = self._idle
        others = (p for group in now for p in group["params"] if id(p) in idle) if idle else ()
        return all(param.grad is None for param in others)

    def _has_buckets(self, buckets: Mapping[int, HostBucket]) -> bool:
        for at in self.slices:
            bucket = buckets.get(at.key)
            if bucket is None or at.bucket() is not bucket or bucket.resident is None:
                return False
        return True

    def _looks_of_states(self, states: Sequence[Mapping[str, Any]]) -> object:
        """Addresses and descriptions of states; None where one is missing, or no plain tensor."""
        each = zip(states, self.names, strict=True)
        tensors: list[Any] = [state.get(name) for state, names in each for name in names]
        if not _PLAIN.issuperset(map(type, tensors)):
            return None
        return tuple([list(map(look, tensors)) for look in (_ADDRESS, _DTYPE, _SHAPE)])

    def _hypers(self, states: Sequence[Mapping[str, Any]]) -> list[tuple[float, ...]] | None:
        """The scalars of each parameter; None where its counter is none that is quickly read."""
        counters: list[Any] = [state.get("step") for state in states]
        counts = [0.0] * len(counters)
        if self.rule.counts:
            if not _PLAIN.issuperset(map(type, counters)) or not all(map(_ON_CPU, counters)):
                return None
            if len(set(zip(map(_DTYPE, counters), map(_SHAPE, counters), strict=True))) > 1:
                return None
            if counters[0].dim():
                return None
            counts = torch.stack(counters).tolist()
        elif any(counter is not None for counter in counters):
            return None
        of_rule = Groups(self.rule)
        each = zip(self.groups, counts, strict=True)
        return [of_rule.hyper(group, n + 1, first=False, scale=1.0) for group, n in each]

    def _are_aligned(self, gradients: Sequence[torch.Tensor]) -> bool:
        """True if they are as much aligned as those that the rows were made for."""
        if not any(signature.aligned for signature, _ in self._described):
            return True
        return functools.reduce(operator.or_, map(_ADDRESS, gradients), 0) % _ALIGNED == 0

    def known(self, keys: tuple[int, ...]) -> list[KnownParams]:
        """The rows of some buckets."""
        if keys not in self._known:
            slices = {at.key: at for at in self.slices}
            numbers = [k for key in keys for k in range(len(self.groups))[slices[key].all]]
            self._known[keys] = known({k: self._described[k] for k in numbers})
        return self._known[keys]


def _looks(gradients: Sequence[Any]) -> object:
    if not {torch.strided}.issuperset(map(_LAYOUT, gradients)):
        return None
    return list(map(_DTYPE, gradients)), list(map(_STRIDE, gradients))


def _factors(gradients: Sequence[Any]) -> list[torch.Tensor] | None:
    """The factors of the gradients; empty, or as many as there are gradients. None where only some
    have one, or another object guards one."""
    found = []
    for gradient in gradients:
        if guard_of(gradient) is None:
            continue
        who = lazy_of(gradient)
        if who is None or who.state is not GuardState.FOLDED:
            return None
        if who.factor is not None:
            who.check(gradient)
            found.append(who.factor)
    return found if len(found) in (0, len(gradients)) else None


# The scalars of parameter groups for a step by rule: found out once for each, not for each of
# their parameters.


class Groups:
    """The parameter groups of an optimizer, whose options are not changed meanwhile."""

    def __init__(self, rule: OptimizerRule) -> None:
        self.rule = rule
        self._names: dict[int, tuple[str, ...]] = {}
        self._hyper: dict[tuple[int, float, bool, float], tuple[float, ...]] = {}

    def names(self, group: Group) -> tuple[str, ...]:
        """The states of a parameter of a group."""
        if id(group) not in self._names:
            self._names[id(group)] = self.rule.state_names(group)
        return self._names[id(group)]

    def hyper(self, group: Group, step: float, *, first: bool, scale: float) -> tuple[float, ...]:
        """The numbers of a step (see `OptimizerRule.hyper`)."""
        key = (id(group), step, first, scale)
        if key not in self._hyper:
            made = self.rule.hyper(group, step=step, first=first, scale=scale)
            self._hyper[key] = made
        return self._hyper[key]
