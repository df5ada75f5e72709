"""Fast path for a step over resident buckets that is like the previous one.

Preparing a step makes about twenty checks per parameter, gradient and state. If nothing changed
since the previous step, only the gradients and the groups' numbers are new. `Alike.again` detects
this: it compares the inputs of these checks with the previous step's, a list at a time, without a
Python call per parameter. If anything differs, the step is prepared from scratch. The kernel's
tables are reused too.

This module holds no reference to a bucket's tensors, so it does not affect counts of storage users.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from megacompile.runtime.optim.kernels.table import Signature, Table, describe, tables_of
from megacompile.runtime.optim.registry import rule_of
from megacompile.runtime.optim.rule import OptimizerRule, Update
from megacompile.runtime.optim.twin import apply, update_again
from megacompile.runtime.params.gradient_guards import lazy_of
from megacompile.runtime.params.guards import GuardedTensor, GuardState, guard_of
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.optimizer_states import Trained, unsupported_reason
from megacompile.runtime.updates.refusals import check_options
from megacompile.runtime.updates.update import BucketUpdate, UpdateBackend, UpdatePlace

_ADDRESS, _STRIDE = torch.Tensor.data_ptr, torch.Tensor.stride
_DTYPE, _LAYOUT, _SHAPE = attrgetter("dtype"), attrgetter("layout"), attrgetter("shape")
_ON_CPU = attrgetter("is_cpu")
_PLAIN = frozenset((torch.Tensor,))
_GRADIENTS = frozenset((torch.Tensor, GuardedTensor))  # the allowed classes
_ALIGNED = 16  # bytes: the kernel's vector loads need this alignment


class _Slice(NamedTuple):
    """The parameters of one bucket within the step."""

    bucket: ref[HostBucket]
    key: int
    indices: tuple[int, ...]
    first: int

    @property
    def all(self) -> slice:
        return slice(self.first, self.first + len(self.indices))


@dataclass(eq=False, slots=True)
class AlikeStep:
    """The new values of a repeated step; see `Alike`."""

    like: Alike
    optimizer: Optimizer
    params: list[nn.Parameter]
    gradients: list[Any]
    addresses: list[int]  # of the gradients
    factors: list[torch.Tensor]  # factors of the gradients, or none
    counters: list[torch.Tensor]  # of the optimizer, or none
    hypers: list[tuple[float, ...]]

    def parts(self) -> list[BucketUpdate]:
        """Its parts, as `StepParts` builds them."""
        return [self._part(at) for at in self.like.slices]

    def _part(self, at: _Slice) -> BucketUpdate:
        bucket, kind = at.bucket(), type(self.optimizer)
        assert bucket is not None and bucket.resident is not None
        part = BucketUpdate(
            bucket, UpdateBackend.KERNEL, UpdatePlace.RESIDENT, kind, bucket.resident, at.indices
        )
        part.together = self.update
        return part

    def update(self, parts: Sequence[BucketUpdate]) -> None:
        """Update some of its buckets in one launch."""
        like, device = self.like, parts[0].device
        if device.type == "cuda":
            tables = like.tables(tuple([part.bucket.layout.key for part in parts]))
            factors = list(map(_ADDRESS, self.factors)) or None
            update_again(like.rule, tables, self.addresses, factors, self.hypers, device)
            return
        with torch.no_grad():  # no kernel uses the addresses
            for part in parts:
                for update in self._updates(part):
                    apply(like.rule, update)

    def _updates(self, part: BucketUpdate) -> list[Update]:
        """The updates of a bucket's parameters as tensors."""
        bucket, like = part.bucket, self.like
        (at,) = [each for each in like.slices if each.key == bucket.layout.key]
        states = bucket.states.of(self.optimizer)
        return [
            Update(
                param=bucket.values[i],
                grad=self.gradients[k].detach(),
                states=tuple(
                    [states[m.name][i] if m.name in like.names[k] else None for m in like.moments]
                ),
                hyper=self.hypers[k],
                copy=bucket.streamed[i] if bucket.has_copy else None,
                factor=self.factors[k] if self.factors else None,
            )
            for k, i in enumerate(at.indices, at.first)
        ]


class Alike:
    """The facts about a step whose buckets are all resident.

    Args:
        rule: the optimizer's rule.
        optimizer: the stepping optimizer.
        parts: the step's parts, before it starts.
        trained: their parameters.
        described: each parameter's signature and row of the kernel's table.
    """

    def __init__(
        self,
        rule: OptimizerRule,
        optimizer: Optimizer,
        parts: Sequence[BucketUpdate],
        trained: Sequence[Trained],
        described: Sequence[tuple[Signature, list[int]]],
    ) -> None:
        self.rule, self.moments = rule, rule.moments
        self.slices: list[_Slice] = []
        for part in parts:
            first = self.slices[-1].all.stop if self.slices else 0
            key = part.bucket.layout.key
            self.slices.append(_Slice(ref(part.bucket), key, tuple(part.indices), first))
        groups = [each.group for each in trained]
        self.names = [rule.state_names(group) for group in groups]
        self._group_ids = list(map(id, groups))
        self._firsts = {id(g): (k, g) for k, g in reversed(list(enumerate(groups)))}
        self._options = [(g, list(map(id, g["params"]))) for g in optimizer.param_groups]
        ids = {id(each.param) for each in trained}
        self._idle = [
            (g, k)
            for g, (_, keys) in enumerate(self._options)
            for k, key in enumerate(keys)
            if key not in ids
        ]
        self._homes = [each.param.data_ptr() for each in trained]
        self._looks = _looks([each.param.grad for each in trained])
        self._states = self._looks_of_states([each.state for each in trained])
        self._described = described
        self._are_aligned = any(signature.aligned for signature, _ in described)
        self._tables: dict[tuple[int, ...], list[Table]] = {}

    @staticmethod
    def of(
        optimizer: Optimizer, parts: Sequence[BucketUpdate], trained: Sequence[Trained]
    ) -> Alike | None:
        """The facts about a prepared step of residents; None if the next step must be prepared from
        scratch."""
        rule = rule_of(optimizer)
        if rule is None or any(part.bucket.whole.ranks > 1 for part in parts):
            return None
        described = []
        for part in parts:
            each = part.for_kernel()
            if len(each) < len(part.indices):  # one is empty
                return None
            for k, update in enumerate(each):
                like = update.param.stride() == part.steps[k].grad.stride()
                if update.seed is not None or not like:
                    return None
                described.append(describe(k, rule, update))
        found = Alike(rule, optimizer, parts, trained, described)
        states = [each.state for each in trained]
        if found._states is None or found._hypers(found._counters(states)) is None:
            return None
        return found

    def again(
        self, where: str, optimizer: Optimizer, buckets: Mapping[int, HostBucket]
    ) -> AlikeStep | None:
        """The starting step if it repeats the previous one, without changing anything; otherwise
        None.

        Args:
            where: the called function, for errors.
            optimizer: the stepping optimizer.
            buckets: the current buckets, by key.

        Raises:
            OptimizerError: a group has an invalid option.
        """
        if not self._has_groups(optimizer) or not self._has_buckets(buckets):
            return None
        params: list[Any] = []
        for at in self.slices:
            of_bucket = buckets[at.key].params
            params += [of_bucket[i] for i in at.indices]
        gradients = [param.grad for param in params]
        states = [state or {} for state in map(optimizer.state.get, params)]
        if (
            not _GRADIENTS.issuperset(map(type, gradients))
            or _looks(gradients) != self._looks
            or list(map(_ADDRESS, params)) != self._homes
            or self._looks_of_states(states) != self._states
        ):
            return None
        some = [Trained(params[k], 0, group, states[k]) for k, group in self._firsts.values()]
        if unsupported_reason(optimizer, some):
            return None
        check_options(where, optimizer, [each.group for each in some])
        if any(self.rule.state_names(g) != self.names[k] for k, g in self._firsts.values()):
            return None
        addresses, factors = list(map(_ADDRESS, gradients)), _factors(gradients)
        counters = self._counters(states)
        hypers = self._hypers(counters)
        if hypers is None or counters is None or factors is None:
            return None
        if self._are_aligned and functools.reduce(operator.or_, addresses) % _ALIGNED:
            return None
        return AlikeStep(self, optimizer, params, gradients, addresses, factors, counters, hypers)

    def _has_groups(self, optimizer: Optimizer) -> bool:
        now = optimizer.param_groups
        if len(now) != len(self._options):
            return False
        for group, (before, ids) in zip(now, self._options, strict=True):
            if group is not before or list(map(id, group["params"])) != ids:
                return False
        return all(now[g]["params"][k].grad is None for g, k in self._idle)

    def _has_buckets(self, buckets: Mapping[int, HostBucket]) -> bool:
        for at in self.slices:
            bucket = buckets.get(at.key)
            if bucket is None or at.bucket() is not bucket or bucket.resident is None:
                return False
        return True

    def _looks_of_states(self, states: Sequence[Mapping[str, Any]]) -> object:
        """Addresses and descriptions of states; None if one is missing or is not a plain tensor."""
        each = zip(states, self.names, strict=True)
        tensors: list[Any] = [state.get(name) for state, names in each for name in names]
        if not _PLAIN.issuperset(map(type, tensors)):
            return None
        return tuple([list(map(look, tensors)) for look in (_ADDRESS, _DTYPE, _SHAPE)])

    def _counters(self, states: Sequence[Mapping[str, Any]]) -> list[torch.Tensor] | None:
        """The optimizer's counters, if its rule has them; None if one cannot be read quickly."""
        counters: list[Any] = [state.get("step") for state in states]
        if not self.rule.counts:
            return [] if counters.count(None) == len(counters) else None
        if not _PLAIN.issuperset(map(type, counters)) or not all(map(_ON_CPU, counters)):
            return None
        looks = set(zip(map(_DTYPE, counters), map(_SHAPE, counters), strict=True))
        return None if len(looks) > 1 or counters[0].dim() else counters

    def _hypers(self, counters: list[torch.Tensor] | None) -> list[tuple[float, ...]] | None:
        """The scalars of each parameter, computed once per group and step count."""
        if counters is None:
            return None
        counts = torch.stack(counters).tolist() if counters else itertools.repeat(0.0)
        kinds = list(zip(self._group_ids, counts, strict=False))
        hyper = self.rule.hyper
        made = {
            (key, n): hyper(self._firsts[key][1], step=n + 1, first=False) for key, n in set(kinds)
        }
        return list(map(made.__getitem__, kinds))

    def tables(self, keys: tuple[int, ...]) -> list[Table]:
        """The tables of some buckets."""
        if keys not in self._tables:
            slices = {at.key: at for at in self.slices}
            count = range(len(self._described))
            numbers = [k for key in keys for k in count[slices[key].all]]
            self._tables[keys] = tables_of({k: self._described[k] for k in numbers})
        return self._tables[keys]


def _looks(gradients: Sequence[Any]) -> object:
    if not {torch.strided}.issuperset(map(_LAYOUT, gradients)):
        return None
    return list(map(_DTYPE, gradients)), list(map(_STRIDE, gradients))


def _factors(gradients: Sequence[Any]) -> list[torch.Tensor] | None:
    """The factors of the gradients: empty, or one per gradient. None if only some have a factor, or
    one has another guard."""
    if GuardedTensor not in set(map(type, gradients)):
        return []
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
