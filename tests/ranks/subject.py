"""A model that simulated ranks share, and the plain one of each rank.

The plain ranks average each gradient when their backward makes it, before it is added to `p.grad`.
Both sums over ranks begin with rank 0, so all must be equal in every bit.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megacompile.ir.buckets import Bucket, shard_shape
from megacompile.ir.edges import Collectives
from megacompile.ir.stream import Stream
from tests import adversary, disks, inside, nets
from tests.nets import Choice, Net
from tests.subject import (
    Counts,
    InOrder,
    Result,
    differences,
    kept,
    make_optimizer,
    streamed,
    train,
)

APART = 10  # numbers of micro-batches between those of one rank and the next
RANKS = (2, 3, 4)


@dataclass(frozen=True)
class Shared:
    net: Net
    choices: tuple[Choice, ...]  # of each rank; plans may differ in what no collective depends on

    @property
    def count(self) -> int:
        return len(self.choices)

    @property
    def choice(self) -> Choice:
        return self.choices[0]


@st.composite
def shared(draw: st.DrawFn) -> Shared:
    net = draw(nets.nets(lengths=True, numbers=True))
    # what no plan of ranks chooses: parts of parameters on a disk, reruns
    choice = dataclasses.replace(draw(nets.choices()), disk_weights=False, rerun=0)
    bits = st.one_of(st.just(-1), st.integers(0, 255))
    choices = [choice]
    for _ in range(draw(st.sampled_from(RANKS)) - 1):
        other = dataclasses.replace(
            choice,
            keep=draw(bits),
            halves=draw(st.sampled_from((0, 0b1100110, 255))),
            on_host=draw(st.sampled_from((0, 0, 0b1010101, 255))),
            state_delay=draw(st.sampled_from((1, 2, 9))),
            stored=draw(bits),
        )
        choices.append(other)
    return Shared(net, tuple(choices))


class Rank:
    """One rank: its model, plain or megacompiled, and what it trains with."""

    def __init__(self, case: Shared, rank: int, interconnect: Interconnect, *, plain: bool) -> None:
        self.case, self.rank, self.interconnect = case, rank, interconnect
        self.model: Any = nets.build(case.net)
        self.optimizer = make_optimizer(self.model, case.choice)
        self.plain = plain
        if plain:
            for name, param in self.model.named_parameters():
                if param.requires_grad:
                    param.register_hook(functools.partial(self._mean, name))
            return
        choice = case.choices[rank]
        self.device = streamed(self.model, choice, self.optimizer, Mesh(rank, interconnect))
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}

    def train(self) -> Result:
        case, first = self.case, self.rank * APART
        choice = case.choices[self.rank]
        seen = train(self.model, case.net, choice, self.optimizer, first=first)
        if not self.plain:
            for stream in Stream:  # nobody leaves before its collectives are done
                self.device.synchronize(stream)
        return seen

    def reset(self) -> None:
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                local(value).copy_(local(self.start[name]))
        self.model.zero_grad()
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def rows(self, value: Tensor, rank: int) -> Tensor:
        shape = tuple(value.shape)
        first = min(-(-shape[0] // self.case.count) * rank, shape[0])
        return value.narrow(0, first, shard_shape(shape, rank, self.case.count)[0])

    def _mean(self, name: str, gradient: Tensor) -> Tensor:
        given = self.interconnect.exchange(self.rank, f"the mean of {name}", gradient.clone())
        return total(given).div_(self.case.count)


class RankSubject:
    """A case of ranks: the plain ones, and the megacompiled ones on adversarial devices."""

    def __init__(self, case: Shared, counts: Counts) -> None:
        self.case, self.counts = case, counts
        self.net, self.choice = case.net, case.choice
        self.interconnect = Interconnect(case.count)
        self.ranks = self._made(plain=True)
        self.wanted = self._run(0)
        torch.compiler.reset()
        self.ranks = self._made(plain=False)
        self.rtol = 0.0

    def _made(self, *, plain: bool) -> list[Rank]:
        ranks = range(self.case.count)
        return [Rank(self.case, rank, self.interconnect, plain=plain) for rank in ranks]

    @property
    def rounds(self) -> bool:
        """Is it equal to the plain ranks but for rounding?"""
        return self.choice.in_backward

    @property
    def executed(self) -> int:
        return sum(rank.device.executed for rank in self.ranks)

    @property
    def poisoned(self) -> int:
        return sum(rank.device.memory.poisoned for rank in self.ranks)

    def wrong(self, policy: Callable[[int], adversary.Policy], seed: int) -> list[str]:
        """What one interleaving gives that is not as it should be."""
        got = self._train(policy, seed)
        pairs = zip(self.wanted, got, strict=True)
        return [
            f"rank {rank}: {name}"
            for rank, (wanted, ours) in enumerate(pairs)
            for name in differences(*self._parts(rank, wanted, ours), rtol=self.rtol)
        ]

    def random(self, seed: int) -> list[str]:
        rng = random.Random(seed)
        seeds = [rng.randrange(2**30) for _ in self.ranks]
        return self.wrong(lambda rank: adversary.Random(seeds[rank]), seed)

    def to_program_order(self) -> list[str]:
        """Compare with program order from now on; gives how the plain ranks differ."""
        self.rtol = 1e-5
        found = self.wrong(lambda _: InOrder(), 0)
        self.wanted = self._train(lambda _: InOrder(), 0)
        self.rtol = 0.0
        return found

    def _train(self, policy: Callable[[int], adversary.Policy], seed: int) -> list[Result]:
        def choice() -> Choice:
            return self.case.choices[self.interconnect.current]

        for rank in self.ranks:
            rank.device.policy = policy(rank.rank)
        with adversary.adversarial(), kept(choice, self.counts), ExitStack() as stack:
            if self.choice.disk:
                rng = random.Random(seed)
                stack.enter_context(disks.harsh(rng))
                stack.enter_context(disks.few_buffers(rng))
            for rank in self.ranks:
                rank.reset()
            return self._run(seed)

    def _run(self, seed: int) -> list[Result]:
        return self.interconnect.run([rank.train for rank in self.ranks], seed)

    def _parts(self, rank: int, wanted: Result, ours: Result) -> tuple[Result, Result]:
        """Both as this rank has them."""
        divided = {name for name, value in ours.items() if isinstance(value, DTensor)}
        of_rank = {
            name: self.ranks[rank].rows(value, rank)
            if name in divided and not isinstance(value, DTensor)
            else local(value)
            for name, value in wanted.items()
        }
        return of_rank, {name: local(value) for name, value in ours.items()}


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

    def __init__(self, rank: int, interconnect: Interconnect) -> None:
        # of another name in each rank: DTensor keeps results by equal meshes
        name = (f"as rank {rank} sees them",)
        numbers = list(range(interconnect.count))
        super().__init__("cpu", numbers, mesh_dim_names=name, _init_backend=False, _rank=rank)
        self.place, self.interconnect = rank, interconnect

    def get_rank(self) -> int:
        return self.place

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        del mesh_dim
        return self.place

    def ranks_on(self, device: torch.device) -> SimulatedRanks:
        """What the runtime takes for the ranks of this mesh."""
        agreement: Any = Agreement()
        count = self.interconnect.count
        agreement.ranks = tuple(range(count))
        groups = (weakref.ref(self.interconnect),)
        return SimulatedRanks(self, device, self.place, count, 1, groups, agreement)


class Agreement:
    """Stands in for the runtime's: that no two collectives differ is seen where they meet."""

    steps = 0

    def run(self, graph: Collectives) -> Any:
        """For its duration a rank runs a graph."""
        del graph
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
        self.group.exchange(self.rank, f"a gather of {bucket.name}", None)
        super().gather(bucket, whole)

    def all_gather_object(self, value: Any) -> list[Any]:
        """All say the same: models are made one after the other, before ranks run."""
        return [value] * self.count

    def together(self, what: str) -> Any:
        """For its duration, nothing: what one raises, the test sees."""
        del what
        return nullcontext()

    def _issue(self, collective: Any, *args: Any, **options: Any) -> None:
        into, given = args
        op = options.get("op")
        what = collective.__name__, tuple(into.shape), tuple(given.shape), given.dtype, op
        values = self.group.exchange(self.rank, what, given.clone())
        if op is None:
            into.copy_(torch.cat(values))
        else:
            assert "reduce_scatter" in collective.__name__ and op is dist.ReduceOp.SUM, what
            into.copy_(total(values).chunk(self.count)[self.rank])


def local(value: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def total(values: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, the first rank's first."""
    result = values[0].clone()
    for value in values[1:]:
        result += value
    return result
