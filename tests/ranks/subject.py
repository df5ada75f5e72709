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

from megacompile import compat
from megacompile.ir.buckets import shard_shape
from megacompile.ir.stream import Stream
from tests import adversary, disks, loops, nets
from tests.loops import Loop, Result
from tests.nets import Choice, Net
from tests.ranks.interconnect import Interconnect, Mesh, total
from tests.subject import Counts, InOrder, differences, kept, make_optimizer, streamed

APART = 10  # numbers of micro-batches between those of one rank and the next
RANKS = (2, 3, 4)


@dataclass(frozen=True)
class Shared:
    """What ranks that share a model do."""

    net: Net
    choices: tuple[Choice, ...]  # of each rank; plans may differ in what no collective depends on
    loop: Loop = Loop()
    clip: float = 0.0  # the largest norm of all gradients; 0: any

    @property
    def count(self) -> int:
        """The number of ranks."""
        return len(self.choices)

    @property
    def choice(self) -> Choice:
        """Of the first rank."""
        return self.choices[0]


@st.composite
def shared(draw: st.DrawFn) -> Shared:
    """Any `Shared`."""
    net = draw(nets.nets(aliases=True, lengths=True, numbers=True))
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
    # numbers make gradients large, and what they are rounded by
    able = not choice.in_backward and not net.numbers
    loop = Loop(twice=able and draw(st.integers(0, 3)) == 3)
    clip = draw(st.sampled_from((0.0, 0.0, 0.1)))
    return Shared(net, tuple(choices), loop, 0.0 if choice.in_backward else clip)


class Rank:
    """One rank: its model, plain or megacompiled, and what it trains with."""

    def __init__(
        self, case: Shared, rank: int, interconnect: Interconnect, *, rounds: bool, plain: bool
    ) -> None:
        self.case, self.rank, self.interconnect = case, rank, interconnect
        self.model: Any = nets.build(case.net)
        self.optimizer = make_optimizer(self.model, case.choice, rounds)
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
        """The loop of this rank."""
        case = self.case
        optimizer = Clipped(self) if case.clip and self.optimizer is not None else self.optimizer
        first = self.rank * APART
        seen = loops.run(
            self.model, case.net, case.choices[self.rank], case.loop, optimizer, first=first
        )
        if not self.plain:
            for stream in Stream:  # nobody leaves before its collectives are done
                self.device.synchronize(stream)
        return seen

    def reset(self) -> None:
        """Load a checkpoint of the start."""
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                compat.local(value).copy_(compat.local(self.start[name]))
        self.model.zero_grad()
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def rows(self, value: Tensor, rank: int) -> Tensor:
        """What a rank has of a whole tensor."""
        shape = tuple(value.shape)
        first = min(-(-shape[0] // self.case.count) * rank, shape[0])
        return value.narrow(0, first, shard_shape(shape, rank, self.case.count)[0])

    def _mean(self, name: str, gradient: Tensor) -> Tensor:
        given = self.interconnect.exchange(self.rank, f"the mean of {name}", gradient.clone())
        return total(given).div_(self.case.count)


class Clipped:
    """An optimizer that clips gradients first, by the norm of all of them, of all ranks."""

    def __init__(self, owner: Rank) -> None:
        self.owner = owner

    def step(self) -> None:
        """Clip, and step."""
        owner = self.owner
        params = [p for p in owner.model.parameters() if p.grad is not None]
        if owner.plain:
            ranks = range(owner.case.count)
            squares = [_squares(owner.rows(p.grad, rank) for p in params) for rank in ranks]
        else:
            mine = _squares(p.grad.to_local() for p in params)
            squares = owner.interconnect.exchange(owner.rank, "squares", mine)
        factor = min(1.0, owner.case.clip / float(total(squares).sqrt()))
        for param in params:
            param.grad.mul_(factor)
        owner.optimizer.step()

    def zero_grad(self) -> None:
        """As the optimizer does."""
        self.owner.optimizer.zero_grad()


def _squares(values: Any) -> Tensor:
    return torch.stack([torch.zeros(()), *(value.square().sum() for value in values)]).sum()


class RankSubject:
    """A case of ranks: the plain ones, and the megacompiled ones on adversarial devices."""

    def __init__(self, case: Shared, counts: Counts) -> None:
        self.case, self.counts = case, counts
        self.net, self.choice, self.loop = case.net, case.choice, case.loop
        self.interconnect = Interconnect(case.count)
        self.ranks = self._made(plain=True)
        self.wanted = self._run(0)
        torch.compiler.reset()
        self.ranks = self._made(plain=False)
        self.rtol = 0.0

    def _made(self, *, plain: bool) -> list[Rank]:
        numbers = range(self.case.count)
        return [
            Rank(self.case, rank, self.interconnect, rounds=self.rounds, plain=plain)
            for rank in numbers
        ]

    @property
    def rounds(self) -> bool:
        """Is it equal to the plain ranks but for rounding?

        Of two calls, ranks average each; the plain ones their sum.
        """
        return self.choice.in_backward or self.loop.twice

    @property
    def executed(self) -> int:
        """Ops of all ranks."""
        return sum(rank.device.executed for rank in self.ranks)

    @property
    def poisoned(self) -> int:
        """How often memory was poisoned."""
        return sum(rank.device.memory.poisoned for rank in self.ranks)

    def wrong(self, policy: Callable[[int], adversary.Policy], seed: int) -> list[str]:
        """What one interleaving gives that is not as it should be.

        Args:
            policy: of each rank.
            seed: of who comes first to the collectives.
        """
        got = self._train(policy, seed)
        pairs = zip(self.wanted, got, strict=True)
        return [
            f"rank {rank}: {name}"
            for rank, (wanted, ours) in enumerate(pairs)
            for name in differences(*self._parts(rank, wanted, ours), rtol=self.rtol)
        ]

    def random(self, seed: int) -> list[str]:
        """A random interleaving."""
        rng = random.Random(seed)
        seeds = [rng.randrange(2**30) for _ in self.ranks]
        return self.wrong(lambda rank: adversary.Random(seeds[rank]), seed)

    def to_program_order(self) -> list[str]:
        """Compare with these ranks in program order from now on; gives how the plain ones differ.

        For what rounds differently: the update in the backward, and some sums.
        """
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
        divided = {name for name, value in ours.items() if compat.is_sharded(value)}
        of_rank = {
            name: self.ranks[rank].rows(value, rank)
            if name in divided and not compat.is_sharded(value)
            else compat.local(value)
            for name, value in wanted.items()
        }
        return of_rank, {name: compat.local(value) for name, value in ours.items()}
