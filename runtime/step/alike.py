"""Fast path for a step over resident buckets that is like the previous one.

Preparing a step makes about twenty checks per parameter, gradient and state. `Alike.again` compares
their inputs with the previous step's, a list at a time. If only the gradients and the groups'
numbers are new, the kernel's tables are reused. No reference to a bucket's tensors is kept, which
would affect counts of storage users.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.optim import Optimizer

from megacompile.runtime.optim.rule import OptimizerRule, Table, Update, describe, tables_of
from megacompile.runtime.optim.rules import rule_of
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.optimizer_states import Trained, unsupported_reason
from megacompile.runtime.step.hooks import PreparedStep
from megacompile.runtime.updates.bucket_update import KERNELS
from megacompile.runtime.updates.refusals import check_options
from megacompile.runtime.updates.update import (
    BucketUpdate,
    UpdateBackend,
    UpdatePlace,
    update_in_torch,
)

_ADDRESS, _STRIDE = torch.Tensor.data_ptr, torch.Tensor.stride
_DTYPE, _LAYOUT, _SHAPE = attrgetter("dtype"), attrgetter("layout"), attrgetter("shape")
_ON_CPU = attrgetter("is_cpu")
_PLAIN, _STRIDED = frozenset((torch.Tensor,)), frozenset((torch.strided,))
_ALIGNED = 16  # bytes: the kernel's vector loads need this alignment


class _Slice(NamedTuple):
    """The parameters of one bucket within the step."""

    bucket: ref[HostBucket]
    indices: Sequence[int]
    first: int  # number of parameters before


class Alike:
    """The facts about a step whose buckets are all resident."""

    def __init__(
        self,
        rule: OptimizerRule,
        optimizer: Optimizer,
        parts: Sequence[BucketUpdate],  # of the step, before it starts
        trained: Sequence[Trained],
        updates: Sequence[Update],  # for the kernel
    ) -> None:
        self.rule = rule
        self.slices: dict[int, _Slice] = {}  # by bucket key
        first = 0
        for part in parts:
            self.slices[part.bucket.layout.key] = _Slice(ref(part.bucket), part.indices, first)
            first += len(part.indices)
        params, _, groups, states = zip(*trained, strict=True)
        self.names = list(map(rule.state_names, groups))
        self._groups = list(optimizer.param_groups)
        self._group_ids = list(map(id, groups))
        self._firsts = {id(g): (k, g) for k, g in reversed(list(enumerate(groups)))}
        # signatures, and rows of the kernel's table
        self._described = [describe(rule, update) for update in updates]
        self._are_aligned = any(signature.aligned for signature, _ in self._described)
        self._tables: dict[tuple[int, ...], list[Table]] = {}
        self.facts = self._facts(params, [each.grad for each in params], states)

    @staticmethod
    def of(
        optimizer: Optimizer, parts: Sequence[BucketUpdate], trained: Sequence[Trained]
    ) -> Alike | None:
        """The facts about a prepared step of residents; None if no step can repeat it."""
        rule = rule_of(optimizer)
        if rule is None or any(part.bucket.whole.ranks > 1 for part in parts):
            return None
        updates = [update for part in parts for update in part.for_kernel()]
        steps = [step for part in parts for step in part.steps]
        if len(updates) < len(steps):  # one is empty
            return None
        for update, step in zip(updates, steps, strict=True):
            if update.seed is not None or update.param.stride() != step.grad.stride():
                return None
        found = Alike(rule, optimizer, parts, trained, updates)
        scalars = found._scalars([each.state for each in trained])
        return None if found.facts is None or scalars is None else found

    def again(
        self, where: str, optimizer: Optimizer, buckets: Mapping[int, HostBucket]
    ) -> PreparedStep | None:
        """The prepared step if it repeats the previous one, without changing anything; otherwise
        None. Raises OptimizerError: a group has an invalid option (in `where`)."""
        if list(map(id, optimizer.param_groups)) != list(map(id, self._groups)):
            return None
        params: list[Any] = []
        for key, at in self.slices.items():
            bucket = buckets.get(key)
            if bucket is None or at.bucket() is not bucket or bucket.resident is None:
                return None
            params += map(bucket.params.__getitem__, at.indices)
        gradients = [param.grad for param in params]
        states = [state or {} for state in map(optimizer.state.get, params)]
        plain = _PLAIN.issuperset(map(type, gradients))
        if not plain or self._facts(params, gradients, states) != self.facts:
            return None
        some = [Trained(params[k], 0, group, states[k]) for k, group in self._firsts.values()]
        if unsupported_reason(optimizer, some):
            return None
        check_options(where, optimizer, [each.group for each in some])
        if any(self.rule.state_names(g) != self.names[k] for k, g in self._firsts.values()):
            return None
        addresses, scalars = list(map(_ADDRESS, gradients)), self._scalars(states)
        unaligned = self._are_aligned and functools.reduce(operator.or_, addresses) % _ALIGNED
        if unaligned or scalars is None:
            return None
        counters, hypers = scalars
        update = functools.partial(self._update, optimizer, gradients, addresses, hypers)
        parts, backend, place = [], UpdateBackend.KERNEL, UpdatePlace.RESIDENT
        for key, at in self.slices.items():
            bucket, kind = buckets[key], type(optimizer)
            assert bucket.resident is not None
            part = BucketUpdate(bucket, backend, place, kind, bucket.resident, at.indices)
            part.together = update
            parts.append(part)
        return PreparedStep(optimizer, parts, params, gradients, counters=counters)

    def _update(
        self,
        optimizer: Optimizer,
        gradients: Sequence[torch.Tensor],
        addresses: Sequence[int],  # of the gradients
        hypers: Sequence[tuple[float, ...]],
        parts: Sequence[BucketUpdate],
    ) -> None:
        """Update some buckets of a step in one launch."""
        device, keys = parts[0].device, tuple([part.bucket.layout.key for part in parts])
        if device.type == "cuda":
            if keys not in self._tables:
                each = [(at.first, len(at.indices)) for at in map(self.slices.__getitem__, keys)]
                numbers = [k for first, count in each for k in range(first, first + count)]
                self._tables[keys] = tables_of({k: self._described[k] for k in numbers})
            tables = self._tables[keys]
            for table in tables:
                table.renew(addresses)
            launches = [table.launch(hypers, device=device) for table in tables]
            if KERNELS.ready(self.rule, launches, device):
                from megacompile.runtime.optim.kernels import run

                run(self.rule, launches, device)
                return
        update_in_torch(self.rule, self._updates(optimizer, gradients, hypers, parts), parts)

    def _updates(
        self,
        optimizer: Optimizer,
        gradients: Sequence[torch.Tensor],
        hypers: Sequence[tuple[float, ...]],
        parts: Sequence[BucketUpdate],
    ) -> Iterator[Update]:
        """The updates of some buckets' parameters, for the twin."""
        moments = [moment.name for moment in self.rule.moments]
        for part in parts:
            bucket, first = part.bucket, self.slices[part.bucket.layout.key].first
            states = bucket.states.of(optimizer)
            for k, i in enumerate(part.indices, first):
                mine = [states[name][i] if name in self.names[k] else None for name in moments]
                yield Update(
                    param=bucket.values[i],
                    grad=gradients[k].detach(),
                    states=tuple(mine),
                    hyper=hypers[k],
                    copy=bucket.streamed[i] if bucket.has_copy else None,
                )

    def _facts(
        self, params: Sequence[Any], gradients: Sequence[Any], states: Sequence[Mapping[str, Any]]
    ) -> object:
        """Everything that equal steps have in common; None if a state is no plain tensor, or a
        gradient is sparse."""
        each = zip(states, self.names, strict=True)
        tensors: list[Any] = [state.get(name) for state, names in each for name in names]
        if not _PLAIN.issuperset(map(type, tensors)):
            return None
        if not _STRIDED.issuperset(map(_LAYOUT, gradients)):
            return None
        members = [group["params"] for group in self._groups]
        return (
            [list(map(id, group)) for group in members],
            [[param.grad is None for param in group] for group in members],
            list(map(_ADDRESS, params)),
            [list(map(look, gradients)) for look in (_DTYPE, _STRIDE)],
            [list(map(look, tensors)) for look in (_ADDRESS, _DTYPE, _SHAPE)],
        )

    def _scalars(
        self, states: Sequence[Mapping[str, Any]]
    ) -> tuple[list[torch.Tensor], list[tuple[float, ...]]] | None:
        """The optimizer's counters, if its rule has them, and the scalars of each parameter,
        computed once per group and step count. None if a counter cannot be read quickly."""
        counters: list[Any] = [state.get("step") for state in states]
        counts = [0.0] * len(counters)
        if not self.rule.counts:
            if any(each is not None for each in counters):
                return None
            counters = []
        elif not _PLAIN.issuperset(map(type, counters)) or not all(map(_ON_CPU, counters)):
            return None
        elif len(set(map(_DTYPE, counters))) > 1 or any(map(torch.Tensor.dim, counters)):
            return None
        else:
            counts = torch.stack(counters).tolist()
        kinds, made = list(zip(self._group_ids, counts, strict=True)), {}
        for key, count in set(kinds):
            group = self._firsts[key][1]
            made[key, count] = self.rule.hyper(group, step=count + 1, first=False)
        return counters, list(map(made.__getitem__, kinds))
