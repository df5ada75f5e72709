"""The ranks that share a model, and the collectives between them.

A one-dimensional mesh shards: each rank has its rows of every parameter. In a two-dimensional mesh
the last dimension shards and the first one replicates (HSDP): ranks with the same rows also average
their gradients.

Every rank issues collectives in program order, one at a time (`Stream.COMM`). The collectives of a
bucket's parameters are coalesced into one launch if the backend supports it; each writes directly
to its parameter's place in the slot, so that nothing is copied afterwards.

Host collectives use separate process groups with a short timeout: a started collective cannot be
aborted and would block process exit.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megacompile import compat
from megacompile.cost.rank_rates import all_gather_object
from megacompile.errors import RankError
from megacompile.ir.buckets import Bucket, shard_shape
from megacompile.ir.collective_order import Collectives
from megacompile.runtime.device.agreement import TALK, Agreement
from megacompile.runtime.device.rank_notes import SILENT_S, Limits, Raised, is_known, make_known

_ENDING_S = 15.0  # a host collective fails this long after the ranks' time limit


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks that share a model."""

    mesh: DeviceMesh
    device: torch.device
    rank: int  # index in the shard dimension
    count: int  # size of the shard dimension
    replicas: int  # number of ranks with the same rows
    groups: tuple[weakref.ref[Any], ...]  # process groups, by dimension of the mesh
    agreement: Agreement  # on the graphs they run

    @staticmethod
    def of(mesh: DeviceMesh, device: torch.device) -> Ranks:
        """Create this process's view of a mesh; it computes on `device`. All ranks call this.

        A mesh without process groups returns its own `Ranks` by a method `ranks_on`.
        """
        if hasattr(mesh, "ranks_on"):
            own: Ranks = mesh.ranks_on(device)
            return own
        shards = mesh.ndim - 1
        count = mesh.size(shards)
        joint = _joint(mesh, device)
        if device.type == "cuda":  # DTensors' local tensors are on the host
            for dim in range(mesh.ndim):
                compat.serve_the_host(mesh.get_group(dim), device)
        rank, replicas = mesh.get_local_rank(shards), mesh.size() // count
        return Ranks(mesh, device, rank, count, replicas, joint.groups, joint.agreement)

    @property
    def group(self) -> Any:
        """The process group of the shard dimension."""
        return _alive(self.groups[-1])

    def running(self, graph: Collectives) -> AbstractContextManager[None]:
        """A context in which all ranks run this graph."""
        return self.agreement.run(graph)

    @property
    def placements(self) -> tuple[Any, ...]:
        """The DTensor placements of parameters, gradients and states."""
        from torch.distributed.tensor import Replicate, Shard

        return (*[Replicate()] * (self.mesh.ndim - 1), Shard(0))

    def rows(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """The first row of this rank's part of a tensor, and the shape of the part."""
        first = min(-(-shape[0] // self.count) * self.rank, shape[0])
        return first, shard_shape(shape, self.rank, self.count)

    def own(self, bucket: Bucket, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """This rank's rows of gathered weights, as views."""
        rows = [self.rows(param.shape) for param in bucket.params]
        return tuple(
            weight.narrow(0, first, shape[0])
            for weight, (first, shape) in zip(weights, rows, strict=True)
        )

    def gather(self, bucket: Bucket, whole: torch.Tensor) -> None:
        """All-gather a bucket in place.

        Args:
            whole: (bucket.size_bytes,) uint8, with this rank's parts already in place.
        """
        group = self.group
        with self.agreement.collective(), compat.coalesced(group, self.device):
            for param in bucket.params:
                numel = param.shard_numel(self.count)
                if not numel:
                    continue
                size = numel * param.dtype.itemsize
                first = param.offset_bytes
                place = whole[first : first + self.count * size].view(param.dtype)
                mine = place.narrow(0, self.rank * numel, numel)
                self._issue(compat.ALL_GATHER, place, mine, group=group)

    def places(self, bucket: Bucket, whole: torch.Tensor) -> list[torch.Tensor]:
        """This rank's parts of a bucket before its all-gather: (part's size,) uint8 each."""
        rows = bucket.rows_of(self.rank)
        return [whole[at.offset_bytes : at.offset_bytes + at.size_bytes] for at in rows]

    def average(
        self,
        gradients: Mapping[int, torch.Tensor],  # (*shape,) each
        parts: Mapping[int, torch.Tensor],  # (padded numel of a part,) each, to be filled
    ) -> None:
        """Reduce-scatter: the mean of each gradient over the shard dimension, for this rank's
        rows."""
        whole = {i: self._padded(g, parts[i]) for i, g in gradients.items()}
        with self.agreement.collective(), compat.coalesced(self.group, self.device):
            for i, gradient in whole.items():
                if gradient.numel():
                    self._issue(
                        compat.REDUCE_SCATTER, parts[i], gradient, op=self._mean, group=self.group
                    )
        self._divide(parts.values(), self.count)

    def average_replicas(self, parts: Sequence[torch.Tensor]) -> None:
        """All-reduce this rank's parts to their mean over the ranks with the same rows, in place.

        Args:
            parts: (numel,) each, on the device.
        """
        with self.agreement.collective():
            for replicas in self.groups[:-1]:
                group = _alive(replicas)
                with compat.coalesced(group, self.device):
                    for part in parts:
                        if part.numel():
                            self._issue(dist.all_reduce, part, op=self._mean, group=group)
        self._divide(parts, self.replicas)

    @property
    def _mean(self) -> Any:
        """The reduction op for a mean: on the host a sum, followed by `_divide`."""
        return dist.ReduceOp.AVG if self.device.type == "cuda" else dist.ReduceOp.SUM

    def _divide(self, parts: Iterable[torch.Tensor], count: int) -> None:
        if self.device.type != "cuda":
            for part in parts:
                part.div_(count)

    @torch.no_grad()
    def average_late(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Average gradients that no schedule averages, in place: a collective of all ranks.

        Args:
            gradients: parameter name -> this rank's part, on any device.
        """
        ops = tuple(f"ALL_REDUCE of the gradient of {name!r}" for name in gradients)
        digest = hashlib.sha256("\n".join(ops).encode()).hexdigest()[:32]
        with self.running(Collectives("the end of a backward", ops, f"late-{digest}")):
            for gradient in gradients.values():
                part = gradient.detach().as_strided((gradient.numel(),), (1,))
                sent = part.to(self.device)
                self.average_replicas([sent])
                if sent.data_ptr() != part.data_ptr():
                    part.copy_(sent)

    def _issue(self, collective: Any, *args: Any, **options: Any) -> None:
        """Issue a collective; a host collective is complete when this returns."""
        if self.device.type == "cuda":
            collective(*args, **options)
        else:
            self.agreement.wait(collective(*args, **options, async_op=True))

    def _padded(self, gradient: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """A gradient as a flat tensor of a part's dtype, padded so that each rank has the part's
        number of elements."""
        flat = gradient.to(part.dtype).contiguous().view(-1)
        missing = part.numel() * self.count - flat.numel()
        return flat if not missing else torch.nn.functional.pad(flat, (0, missing))

    @property
    def is_first(self) -> bool:
        """True if this is the first of all ranks."""
        return self.mesh.get_rank() == global_ranks(self.mesh)[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather a value from each rank of the mesh, in rank order: a collective of all ranks.

        Raises:
            MegacompileError: another rank has raised inside the enclosing `together` block.
        """
        what = self.agreement.doing
        self._meet()
        return self._said(Collectives(what, ("what each rank says",), f"told-{what}"), value)

    def _meet(self) -> None:
        """Wait for all ranks; raises an error that one of them has raised."""
        what = self.agreement.doing
        for rank, said in self.agreement.meet(what).items():
            raise Raised.read(said).error(rank, what)

    def said(self, what: Collectives, value: Any) -> list[Any]:
        """Gather a value, as in `all_gather_object`. `what` names the action for ranks that arrive
        at a different one."""
        if self.agreement.doing != TALK:  # in a block of `together`
            self._meet()
        return self._said(what, value)

    def _said(self, what: Collectives, value: Any) -> list[Any]:
        with self.running(what), self.agreement.collective():
            return all_gather_object(self.mesh, value)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Propagate an error of one rank to all: in the others' next `all_gather_object`, or at the
        end of the block.

        Args:
            what: names the action: "save() of Net".

        Raises:
            MegacompileError: with another rank's error class, text and number; a RankError if the
                error is not megacompile's.
        """
        before, self.agreement.doing = self.agreement.doing, what
        try:
            with self.agreement.working():
                yield
            self._meet()
        except Exception as error:
            if not is_known(error):
                with suppress(RankError):  # the ranks have stopped already
                    self.agreement.meet(what, Raised.of(error).text())
                make_known(error)
            raise
        finally:
            self.agreement.doing = before

    @torch.no_grad()
    def send_first(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        """Broadcast the first rank's values, bit by bit.

        Args:
            tensors: dense tensors, with the same shapes and dtypes in all ranks, else an error is
                raised.
            what: names them: "buffers of Net".
        """
        given = [tensor for tensor in tensors if tensor.numel()]
        ops = tuple(f"BROADCAST of {tuple(each.shape)} of {each.dtype}" for each in given)
        digest = hashlib.sha256("\n".join((what, *ops)).encode()).hexdigest()[:32]
        with self.running(Collectives(what, ops, digest)):
            for tensor in given:
                sent = tensor.detach().to(self.device).contiguous()
                with self.agreement.collective():
                    for group in map(_alive, self.groups):
                        first = dist.get_global_rank(group, 0)
                        self._issue(
                            dist.broadcast, sent.view(-1).view(torch.uint8), first, group=group
                        )
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)

    def all_of(self, sharded: torch.Tensor) -> torch.Tensor:
        """The full tensor, with parts on any device; all ranks call this."""
        return whole(sharded, compat.local(sharded).detach().to(self.device))

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """Gather several numbers from each rank: one collective."""
        given = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = torch.empty(self.count * len(values), dtype=torch.float64, device=self.device)
        with self.running(_norms(len(values))), self.agreement.collective():
            self._issue(compat.ALL_GATHER, found, given, group=self.group)
        rows: list[list[float]] = found.view(self.count, -1).tolist()
        return rows


def global_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global numbers of a mesh's ranks, in mesh order."""
    return tuple(mesh.mesh.flatten().tolist())


def ranks_of(sharded: torch.Tensor) -> Ranks:
    """The ranks that share a tensor; all of them call this."""
    mesh = compat.mesh_of(sharded)
    return Ranks.of(mesh, torch.device(mesh.device_type))


def whole(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The full tensor of parts that are sharded like a parameter; all ranks call this."""
    with _alone(like, "ALL_GATHER"):
        return compat.whole(like, part)


def averaged(gradient: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The mean over ranks of a gradient that is sharded like its parameter; all ranks call this."""
    with _alone(param, "REDUCE_SCATTER"):
        return compat.averaged(gradient, param)


@contextmanager
def _alone(param: torch.Tensor, what: str) -> Iterator[None]:
    """A context for a collective outside of schedules, in all ranks."""
    mesh = compat.mesh_of(param)
    agreement = _joint(mesh, torch.device(mesh.device_type)).agreement
    shape = tuple(param.shape)
    ops = (f"{what} of a parameter of shape {shape}",)
    name = "code outside of any schedule"
    with agreement.run(Collectives(name, ops, f"{what}-{shape}")), agreement.collective():
        yield


def _alive(group: weakref.ref[Any]) -> Any:
    found = group()
    if found is None:
        raise RankError(
            "the process group of ranks that share a model was destroyed while the model needs it; "
            "call torch.distributed.destroy_process_group() after the last call, step and save"
        )
    return found


def abort_at_once(groups: Sequence[Any]) -> None:
    """Abort the collectives of several groups together. NCCL's abort of one group waits until the
    GPU is idle, so sequential aborts would hang."""
    threads = [
        threading.Thread(target=compat.abort, args=(group,), daemon=True) for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ENDING_S)


def _norms(count: int) -> Collectives:
    digest = f"norms-{count}"
    return Collectives(
        "optimizer's step or clipping", (f"norms of {count // 2} gradients",), digest
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Joint:
    """State shared by all models on the same ranks: their collectives have one common order.

    Process groups belong to torch: holding the last reference to a destroyed group would end its
    threads at some later time, which may hang.
    """

    world: weakref.ref[Any]  # freed with the default process group
    groups: tuple[weakref.ref[Any], ...]
    agreement: Agreement


_JOINT: dict[tuple[str, tuple[int, ...], tuple[int, ...]], _Joint] = {}
_MADE = itertools.count()


def _joint(mesh: DeviceMesh, device: torch.device) -> _Joint:
    ranks = global_ranks(mesh)
    key = (device.type, tuple(mesh.mesh.shape), ranks)
    known = _JOINT.get(key)
    if known is not None and known.world() is dist.group.WORLD is not None:
        return known
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    limits = Limits.of(groups[-1], device)
    meets = device.type != "cuda"
    if meets:
        timeout = timedelta(seconds=limits.patience_s + _ENDING_S)
        numbers = [dist.get_process_group_ranks(group) for group in groups]
        groups = [
            dist.new_group(each, timeout, backend="gloo", use_local_synchronization=True)
            for each in numbers
        ]
    of_mesh = tuple(weakref.ref(group) for group in groups)

    def abort() -> None:
        abort_at_once([group for each in of_mesh if (group := each()) is not None])

    prefix = f"megacompile/{next(_MADE)}/{'-'.join(map(str, ranks))}"
    agreement = Agreement(
        ranks,
        dist.get_rank(),
        lambda: compat.store(prefix, timeout_s=SILENT_S),
        limits,
        meets=meets,
        abort=abort,
    )
    joint = _JOINT[key] = _Joint(weakref.ref(dist.group.WORLD), of_mesh, agreement)
    return joint
