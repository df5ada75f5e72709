"""Ranks that are simulated in this process, and what they exchange.

A sum over ranks begins with rank 0, so that it is equal in every bit wherever it is made.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megacompile.ir.buckets import Bucket
from megacompile.ir.edges import Collectives
from tests import inside

T = TypeVar("T")


class CollectiveError(AssertionError):
    """Ranks are in collectives that do not fit, or one waits for what another never issues."""


class Interconnect:
    """`count` ranks, and what they exchange."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.met = 0  # collectives that were carried out
        self.current = 0  # the rank that runs
        self._turns = threading.Condition()
        self._random = random.Random()
        self._running: set[int] = set()
        self._arrived: dict[int, tuple[object, Any]] = {}  # by rank: the collective, what it gives
        self._given: list[Any] = []  # in the collective that all have come to
        self._error: BaseException | None = None

    def run(self, bodies: Sequence[Callable[[], T]], seed: int) -> list[T]:
        """Run what each rank does, until all are done; raises the first rank's error."""
        if self.count == 1:
            return [bodies[0]()]
        self._random.seed(seed)
        self._running, self._error = set(range(self.count)), None
        self._arrived.clear()
        self.current = self._random.randrange(self.count)
        results: dict[int, T] = {}

        def live(rank: int) -> None:
            try:
                with self._turns:
                    self._await_turn(rank)
                results[rank] = bodies[rank]()
            except BaseException as error:
                self._error = self._error or error
            with self._turns:
                self._running.discard(rank)
                self._pass_on()

        threads = [threading.Thread(target=live, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return [results[rank] for rank in range(self.count)]

    def exchange(self, rank: int, what: object, value: Any) -> list[Any]:
        """What each rank gives in a collective, by rank; `what` must be the same in all."""
        with self._turns:
            self._arrived[rank] = what, value
            if len(self._arrived) == self.count and self._error is None:
                self._compare()
                self._given = [self._arrived[each][1] for each in range(self.count)]
                self._arrived.clear()
                self.met += 1
            state = torch.get_rng_state()
            self._pass_on()
            self._await_turn(rank)
            torch.set_rng_state(state)
            return self._given

    def _compare(self) -> None:
        first, _ = self._arrived[0]
        for rank, (what, _) in sorted(self._arrived.items()):
            if what != first:
                self._fail(f"rank 0 is in {first}, rank {rank} in {what}")

    def _pass_on(self) -> None:
        """Another rank may run."""
        able = sorted(self._running - self._arrived.keys())
        if able:
            self.current = self._random.choice(able)
        elif self._arrived and self._error is None:
            waiting = {rank: what for rank, (what, _) in sorted(self._arrived.items())}
            self._error = CollectiveError(f"wait for ranks that have ended: {waiting}")
        self._turns.notify_all()

    def _await_turn(self, rank: int) -> None:
        while self.current != rank and self._error is None:
            self._turns.wait()
        if self._error is not None:
            raise CollectiveError(f"rank {rank} is left alone")

    def _fail(self, message: str) -> None:
        self._error = CollectiveError(message)
        self._turns.notify_all()
        raise self._error


class Mesh(DeviceMesh):
    """The ranks of an interconnect, as one of them sees them; torch has no process group."""

    def __init__(self, rank: int, interconnect: Interconnect, *, replicas: int = 1) -> None:
        # of another name in each rank: DTensor keeps results by equal meshes
        names: Any = (f"as rank {rank} sees them",)
        numbers = torch.arange(interconnect.count)
        if replicas > 1:
            names, numbers = ("replicas", *names), numbers.view(replicas, -1)
        super().__init__("cpu", numbers, mesh_dim_names=names, _init_backend=False, _rank=rank)
        self.place, self.interconnect, self.replicas = rank, interconnect, replicas

    def get_rank(self) -> int:
        return self.place

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return self.place % (self.interconnect.count // self.replicas)

    def ranks_on(self, device: torch.device) -> SimulatedRanks:
        """What the runtime takes for the ranks of this mesh."""
        agreement: Any = Agreement()
        agreement.ranks = tuple(range(self.interconnect.count))
        groups = (weakref.ref(self.interconnect),) * self.ndim
        rank, count = self.get_local_rank(), self.interconnect.count // self.replicas
        return SimulatedRanks(self, device, rank, count, self.replicas, groups, agreement)


class Agreement:
    """Stands in for the runtime's: that no two collectives differ is seen where they meet."""

    steps = 0

    def run(self, graph: Collectives) -> Any:
        """For its duration a rank runs a graph."""
        return nullcontext()

    def collective(self) -> Any:
        """For its duration a rank is in a collective."""
        return nullcontext()

    def check(self) -> None:
        """Nothing."""


class SimulatedRanks(inside.SimulatedRanks):
    """The runtime's `Ranks`, whose collectives go over an interconnect."""

    def gather(self, bucket: Bucket, whole: Tensor) -> None:
        """The real one; ranks must be in that of the same bucket."""
        self.group.exchange(self.mesh.get_rank(), f"a gather of {bucket.name}", None)
        super().gather(bucket, whole)

    def all_gather_object(self, value: Any) -> list[Any]:
        """All say the same: models are made one after the other, before ranks run."""
        return [value] * self.count

    def together(self, what: str) -> Any:
        """For its duration, nothing: what one raises, the test sees."""
        return nullcontext()

    def _issue(self, collective: Any, *args: Any, **options: Any) -> None:
        into, given = args[0], args[-1]
        op = options.get("op")
        what = collective.__name__, tuple(into.shape), tuple(given.shape), given.dtype, op
        values = self.group.exchange(self.mesh.get_rank(), what, given.clone())
        first = self.mesh.get_rank() - self.rank
        mine = values[first : first + self.count]
        if op is None:
            into.copy_(torch.cat(mine))
        elif collective is dist.all_reduce:
            into.copy_(total(values[self.rank :: self.count]))
        else:
            assert "reduce_scatter" in collective.__name__ and op is dist.ReduceOp.SUM, what
            into.copy_(total(mine).chunk(self.count)[self.rank])


def local(value: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def total(values: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, the first rank's first."""
    result = values[0].clone()
    for value in values[1:]:
        result += value
    return result
