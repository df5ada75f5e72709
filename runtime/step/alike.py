"""Fast path for a step over resident buckets that is like the previous one.

Preparing a step makes about twenty checks per parameter, gradient and state. `Alike.again` compares
their inputs with the previous step's, a list at a time. If only the gradients and the groups'
numbers are new, the kernel's tables are reused. No reference to a bucket's tensors is kept, which
would affect counts of storage users.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.optim import Optimizer

from megacompile.runtime.optim.rule import (
    OptimizerRule,
    Signature,
    Table,
    Update,
    describe,
    tables_of,
)
from megacompile.runtime.optim.rules import rule_of
from megacompile.runtime.optim.twin import apply
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.optimizer_states import Trained, unsupported_reason
from megacompile.runtime.step.hooks import PreparedStep
from megacompile.runtime.updates.refusals import check_options
from megacompile.runtime.updates.update import BucketUpdate, UpdateBackend, UpdatePlace

_ADDRESS, _STRIDE = torch.Tensor.data_ptr, torch.Tensor.stride
_DTYPE, _LAYOUT, _SHAPE = attrgetter("dtype"), attrgetter("layout"), attrgetter("shape")
_ON_CPU = attrgetter("is_cpu")
_PLAIN, _STRIDED = frozenset((torch.Tensor,)), frozenset((torch.strided,))
_ALIGNED = 16  # bytes: the kernel's vector loads need this alignment


class _Slice(NamedTuple):
    """The parameters of one bucket within the step."""

    bucket: ref[HostBucket]
    key: int
    indices: tuple[int, ...]
    all: slice


class Alike:
    """The facts about a step whose buckets are all resident."""

    def __init__(
        self,
        rule: OptimizerRule,
        optimizer: Optimizer,
        parts: Sequence[BucketUpdate],  # of the step, before it starts
        trained: Sequence[Trained],
        described: Sequence[tuple[Signature, list[int]]],  # signatures, rows of the kernel's table
    ) -> None:
        self.rule = rule
        self.slices: list[_Slice] = []
        for part in parts:
            first, key = self.slices[-1].all.stop if self.slices else 0, part.bucket.layout.key
            span = slice(first, first + len(part.indices))
            self.slices.append(_Slice(ref(part.bucket), key, tuple(part.indices), span))
        groups = [each.group for each in trained]
        self.names = [rule.state_names(group) for group in groups]
        self._groups = list(optimizer.param_groups)
        self._group_ids = list(map(id, groups))
        self._firsts = {id(g): (k, g) for k, g in reversed(list(enumerate(groups)))}
        self._described = described
        self._are_aligned = any(signature.aligned for signature, _ in described)
        self._tables: dict[tuple[int, ...], list[Table]] = {}
        params, states = [each.param for each in trained], [each.state for each in trained]
        self.facts = self._facts(params, [each.grad for each in params], states)

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
                described.append(describe(rule, update))
        found = Alike(rule, optimizer, parts, trained, described)
        scalars = found._scalars([each.state for each in trained])
        return None if found.facts is None or scalars is None else found

    def again(
        self, where: str, optimizer: Optimizer, buckets: Mapping[int, HostBucket]
    ) -> PreparedStep | None:
        """The prepared step if it repeats the previous one, without changing anything; otherwise
        None. Raises OptimizerError: a group has an invalid option (in `where`)."""
        groups = optimizer.param_groups
        if len(groups) != len(self._groups) or not all(map(operator.is_, groups, self._groups)):
            return None
        params: list[Any] = []
        for at in self.slices:
            bucket = buckets.get(at.key)
            if bucket is None or at.bucket() is not bucket or bucket.resident is None:
                return None
            of_bucket = bucket.params
            params += [of_bucket[i] for i in at.indices]
        gradients = [param.grad for param in params]
        states = [state or {} for state in map(optimizer.state.get, params)]
        if not _PLAIN.issuperset(map(type, gradients)):
            return None
        if self._facts(params, gradients, states) != self.facts:
            return None
        some = [Trained(params[k], 0, group, states[k]) for k, group in self._firsts.values()]
        if unsupported_reason(optimizer, some):
            return None
        check_options(where, optimizer, [each.group for each in some])
        if any(self.rule.state_names(g) != self.names[k] for k, g in self._firsts.values()):
            return None
        addresses, scalars = list(map(_ADDRESS, gradients)), self._scalars(states)
        if scalars is None:
            return None
        if self._are_aligned and functools.reduce(operator.or_, addresses) % _ALIGNED:
            return None
        counters, hypers = scalars
        update = functools.partial(self._update, optimizer, gradients, addresses, hypers)
        parts = []
        for at in self.slices:
            bucket, kind = buckets[at.key], type(optimizer)
            assert bucket.resident is not None
            backend, place = UpdateBackend.KERNEL, UpdatePlace.RESIDENT
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
        device = parts[0].device
        keys = tuple([part.bucket.layout.key for part in parts])
        slices = [at for key in keys for at in self.slices if at.key == key]
        if device.type == "cuda":
            if keys not in self._tables:
                numbers = [k for at in slices for k in range(at.all.start, at.all.stop)]
                self._tables[keys] = tables_of({k: self._described[k] for k in numbers})
            from megacompile.runtime.optim.kernels import BLOCK, run

            tables = self._tables[keys]
            for table in tables:
                table.renew(addresses)
            each = (table.launch(hypers, block=BLOCK, device=device) for table in tables)
            run(self.rule, each, device)
            return
        with torch.no_grad():  # no kernel uses the addresses
            for at in slices:
                bucket = at.bucket()
                assert bucket is not None
                states = bucket.states.of(optimizer)
                for k, i in enumerate(at.indices, at.all.start):
                    update = Update(
                        param=bucket.values[i],
                        grad=gradients[k].detach(),
                        states=tuple(
                            states[m.name][i] if m.name in self.names[k] else None
                            for m in self.rule.moments
                        ),
                        hyper=hypers[k],
                        copy=bucket.streamed[i] if bucket.has_copy else None,
                    )
                    apply(self.rule, update)

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
        if not self.rule.counts:
            counters = [each for each in counters if each is not None]
            if counters:
                return None
        elif not _PLAIN.issuperset(map(type, counters)) or not all(map(_ON_CPU, counters)):
            return None
        looks = set(zip(map(_DTYPE, counters), map(_SHAPE, counters), strict=True))
        if counters and (len(looks) > 1 or counters[0].dim()):
            return None
        counts = torch.stack(counters).tolist() if counters else itertools.repeat(0.0)
        kinds = list(zip(self._group_ids, counts, strict=False))
        hyper = self.rule.hyper
        made = {
            (key, n): hyper(self._firsts[key][1], step=n + 1, first=False) for key, n in set(kinds)
        }
        return counters, list(map(made.__getitem__, kinds))
