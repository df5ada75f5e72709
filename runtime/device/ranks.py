"""The ranks that share a model, and the collectives between them.

A one-dimensional mesh shards: each rank has its rows of every parameter. In a two-dimensional mesh
the last dimension shards and the first one replicates (HSDP): ranks with the same rows also average
their gradients.

Every rank issues collectives in program order, one at a time (`Stream.COMM`). Those of a bucket's
parameters are coalesced into one launch if the backend supports it; each writes directly to its
parameter's place in the slot. Host collectives use process groups with a short timeout: a started
one cannot be aborted and would block process exit.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megacompile import compat, errors, notices
from megacompile.cost.rank_rates import all_gather_object
from megacompile.errors import MegacompileError, RankError
from megacompile.ir.buckets import Bucket, shard_shape
from megacompile.ir.edges import Collectives
from megacompile.runtime.device.agreement import SILENT_S, Agreement, described

_STARTED_S = 60.0  # limit of a started host collective, if the user set no timeout
_ENDING_S = 15.0  # else it fails this long after that; also how long an abort may take


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
        """Create this process's view of a mesh; it computes on `device`. All ranks call this. A
        mesh without process groups returns its own `Ranks` by a method `ranks_on`."""
        if hasattr(mesh, "ranks_on"):
            own: Ranks = mesh.ranks_on(device)
            return own
        shards = mesh.ndim - 1
        count = mesh.size(shards)
        _, groups, agreement = _joint(mesh, device)
        if device.type == "cuda":  # DTensors' local tensors are on the host
            for dim in range(mesh.ndim):
                compat.serve_the_host(mesh.get_group(dim), device)
        rank, replicas = mesh.get_local_rank(shards), mesh.size() // count
        return Ranks(mesh, device, rank, count, replicas, groups, agreement)

    @staticmethod
    def that_share(mesh: object, device: torch.device) -> Ranks | None:
        """The ranks of the option `mesh`, if they run; warnings are then shown in the first one.
        All of them call this."""
        if not isinstance(mesh, DeviceMesh):
            return None
        ranks, world = Ranks.of(mesh, device), dist.group.WORLD
        notices.in_rank(
            mesh.get_rank(),
            is_first=ranks.is_first,
            is_there=lambda: dist.group.WORLD is world is not None,
        )
        return ranks

    @property
    def group(self) -> Any:
        return _alive(self.groups[-1])

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
        """All-gather a bucket in place: (bucket.size_bytes,) uint8, with this rank's parts."""
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
        whole, group = {}, self.group
        for i, gradient in gradients.items():
            flat = gradient.to(parts[i].dtype).contiguous().view(-1)
            missing = parts[i].numel() * self.count - flat.numel()
            whole[i] = flat if not missing else torch.nn.functional.pad(flat, (0, missing))
        with self.agreement.collective(), compat.coalesced(group, self.device):
            options = {"op": self._mean, "group": group}
            for i, gradient in whole.items():
                if gradient.numel():
                    self._issue(compat.REDUCE_SCATTER, parts[i], gradient, **options)
        self._divide(parts.values(), self.count)

    def average_replicas(self, parts: Sequence[torch.Tensor]) -> None:
        """All-reduce this rank's parts, (numel,) each on the device, to their mean over the ranks
        with the same rows, in place."""
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

    def _issue(self, collective: Any, *args: Any, **options: Any) -> None:
        """Issue a collective; a host collective is complete when this returns."""
        if self.device.type == "cuda":
            collective(*args, **options)
        else:
            self.agreement.wait(collective(*args, **options, async_op=True))

    @property
    def is_first(self) -> bool:
        return self.mesh.get_rank() == global_ranks(self.mesh)[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather a value from each rank of the mesh, in rank order: a collective of all ranks.
        Raises MegacompileError: another rank has raised inside the enclosing `together` block."""
        self._meet()
        said = _collectives(self.agreement.doing, ["what each rank says"])
        with self.agreement.run(said), self.agreement.collective():
            return all_gather_object(self.mesh, value)

    def _meet(self) -> None:
        """Wait for all ranks; raises an error that one of them has raised."""
        what = self.agreement.doing
        for rank, told in self.agreement.meet(what).items():
            raise _retold(told, rank, what)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Propagate an error of one rank to all, in the others' next `all_gather_object` or at the
        end of the block: with its class and text, or as a RankError if it is not megacompile's.
        `what` names the action: "save() of Net"."""
        before, self.agreement.doing = self.agreement.doing, what
        try:
            yield
            self._meet()
        except Exception as error:
            if not isinstance(error, RankError) and not hasattr(error, _KNOWN):
                with suppress(RankError):  # the ranks have stopped already
                    self.agreement.meet(what, _told(error))
                setattr(error, _KNOWN, True)
            raise
        finally:
            self.agreement.doing = before

    @torch.no_grad()
    def send_first(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        """Broadcast the first rank's values, bit by bit, into dense tensors, with the same shapes
        and dtypes in all ranks, else an error is raised. `what` names them: "buffers of Net"."""
        given = [tensor for tensor in tensors if tensor.numel()]
        ops = [f"BROADCAST of {tuple(each.shape)} of {each.dtype}" for each in given]
        with self.agreement.run(_collectives(what, ops)):
            for tensor in given:
                sent = tensor.detach().to(self.device).contiguous()
                with self.agreement.collective():
                    for group in map(_alive, self.groups):
                        whole = sent.view(-1).view(torch.uint8)
                        first = dist.get_global_rank(group, 0)
                        self._issue(dist.broadcast, whole, first, group=group)
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """Gather several numbers from each rank: one collective."""
        given = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = torch.empty(self.count * len(values), dtype=torch.float64, device=self.device)
        norms = _collectives(
            "optimizer's step or clipping", [f"norms of {len(values) // 2} gradients"]
        )
        with self.agreement.run(norms), self.agreement.collective():
            self._issue(compat.ALL_GATHER, found, given, group=self.group)
        rows: list[list[float]] = found.view(self.count, -1).tolist()
        return rows


_KNOWN = "_megacompile_known_to_ranks"  # an attribute of errors that all ranks know of


def _told(error: Exception) -> str:
    """An error for the other ranks: its class, if that is megacompile's, and its text."""
    ours = isinstance(error, MegacompileError) and hasattr(errors, type(error).__name__)
    return json.dumps([type(error).__name__, str(error)] if ours else ["", described(error)])


def _retold(told: str, rank: int, what: str) -> MegacompileError:
    """The error that the other ranks raise for one of `rank`."""
    kind, text = json.loads(told)
    if not kind:
        why = f"raised {text}, in {what}"
        message = f"rank {rank} {why}; all ranks stop there; fix the error of that rank"
        return RankError(message, by=rank, why=why)
    error: MegacompileError = getattr(errors, kind)(f"rank {rank}: {text}")
    setattr(error, _KNOWN, True)
    return error


def global_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global numbers of a mesh's ranks, in mesh order."""
    return tuple(mesh.mesh.flatten().tolist())


def ranks_of(sharded: torch.Tensor) -> Ranks:
    """The ranks that share a tensor; all of them call this."""
    mesh: Any = sharded.device_mesh  # type: ignore[attr-defined]
    return Ranks.of(mesh, torch.device(mesh.device_type))


def whole(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The full tensor of parts that are sharded like a parameter; all ranks call this."""
    with _alone(like, "ALL_GATHER"):
        return compat.whole(like, part)


def whole_of(value: Any) -> Any:
    """The full tensor of a DTensor with parts on any device; all ranks call this. Any other value
    unchanged."""
    if not compat.is_sharded(value):
        return value
    return whole(value, compat.local(value).detach().to(value.device_mesh.device_type))


def averaged(gradient: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The mean over ranks of a gradient that is sharded like its parameter; all ranks call this."""
    with _alone(param, "REDUCE_SCATTER"):
        return compat.averaged(gradient, param)


@contextmanager
def _alone(param: torch.Tensor, what: str) -> Iterator[None]:
    """A context for a collective outside of schedules, in all ranks."""
    mesh: Any = param.device_mesh  # type: ignore[attr-defined]
    _, _, agreement = _joint(mesh, torch.device(mesh.device_type))
    ops = [f"{what} of a parameter of shape {tuple(param.shape)}"]
    code = _collectives("code outside of any schedule", ops)
    with agreement.run(code), agreement.collective():
        yield


def _alive(group: weakref.ref[Any]) -> Any:
    found = group()
    if found is None:
        raise RankError(
            "the process group of ranks that share a model was destroyed while the model needs it; "
            "call torch.distributed.destroy_process_group() after the last call, step and save"
        )
    return found


def _abort_at_once(groups: Sequence[Any]) -> None:
    """Abort the collectives of several groups together. NCCL's abort of one group waits until the
    GPU is idle, so sequential aborts would hang."""
    threads = [threading.Thread(target=group.abort, daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_ENDING_S)


def _collectives(graph: str, ops: Sequence[str]) -> Collectives:
    digest = hashlib.sha256("\n".join((graph, *ops)).encode()).hexdigest()[:32]
    return Collectives(graph, tuple(ops), digest)


# The process groups and the agreement of the models on the same ranks, whose collectives have one
# common order; with the default process group. Process groups belong to torch: holding the last
# reference to a destroyed group would end its threads at some later time, which may hang.
_Joint = tuple[weakref.ref[Any], tuple[weakref.ref[Any], ...], Agreement]
_JOINT: dict[tuple[str, tuple[int, ...], tuple[int, ...]], _Joint] = {}
_MADE = itertools.count()


def _joint(mesh: DeviceMesh, device: torch.device) -> _Joint:
    ranks = global_ranks(mesh)
    key = (device.type, tuple(mesh.mesh.shape), ranks)
    known = _JOINT.get(key)
    if known is not None and known[0]() is dist.group.WORLD is not None:
        return known
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    limit_s, default = compat.group_timeout_s(groups[-1], device)
    meets = device.type != "cuda"
    if meets:
        timeout = timedelta(seconds=_STARTED_S if default else limit_s + _ENDING_S)
        numbers = [dist.get_process_group_ranks(group) for group in groups]
        groups = [
            dist.new_group(each, timeout, backend="gloo", use_local_synchronization=True)
            for each in numbers
        ]
    of_mesh = tuple(weakref.ref(group) for group in groups)
    prefix = f"megacompile/{next(_MADE)}/{'-'.join(map(str, ranks))}"
    agreement = Agreement(
        ranks,
        dist.get_rank(),
        lambda: compat.store(prefix, timeout_s=SILENT_S),
        limit_s,
        meets=meets,
        abort=lambda: _abort_at_once([group for each in of_mesh if (group := each()) is not None]),
    )
    joint = _JOINT[key] = (weakref.ref(dist.group.WORLD), of_mesh, agreement)
    return joint


_HASHED_BYTES = 2**24  # at a time, in one of `_HASHING` threads
_HASHING = 8


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> str:
    """Checksum of a dense tensor's values in logical order, with any strides, dtype and device."""

    def digest(part: torch.Tensor) -> bytes:
        memory = (ctypes.c_char * part.numel()).from_address(part.data_ptr())
        return hashlib.sha256(memory).digest()

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    parts = plain.reshape(-1).view(torch.uint8).split(_HASHED_BYTES)
    with ThreadPoolExecutor(min(_HASHING, len(parts)), "megacompile-hash") as threads:
        return hashlib.sha256(b"".join(threads.map(digest, parts))).hexdigest()
