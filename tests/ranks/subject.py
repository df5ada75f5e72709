"""A model that simulated ranks share, and the plain one of each rank.

The plain ranks average each gradient when their backward makes it, before it is added to `p.grad`.
Both sums over ranks begin with rank 0, so all must be equal in every bit.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

from megacompile.ir.buckets import shard_shape
from megacompile.ir.stream import Stream
from tests import adversary, disks, nets
from tests.nets import Choice, Net
from tests.ranks.interconnect import Interconnect, Mesh, local, total
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
