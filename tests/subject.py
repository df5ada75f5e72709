"""A model with a plan, or ranks that share one: the plain run, and the megacompiled one on an
adversarial device."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

from megacompile import accumulate, megacompile
from megacompile.ir.buckets import shard_shape
from megacompile.ir.plan import SavedPart, Tier
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.passes.schedule.make_plan import make_plan
from megacompile.plan import pipeline
from megacompile.runtime.model.streamed import streamed_model
from tests import adversary, disks, inside, nets
from tests.nets import Choice, Net
from tests.ranks.interconnect import Interconnect, Mesh, local, total
from tests.zoo import equal

Result = dict[str, Tensor]


APART = 10  # numbers of micro-batches between those of one rank and the next
RANKS = (2, 3, 4)


@dataclass(frozen=True)
class Case:
    """A model, and its plan or those of ranks, which differ in what no collective depends on."""

    net: Net
    choices: tuple[Choice, ...]

    @property
    def count(self) -> int:
        return len(self.choices)


@st.composite
def alone(draw: st.DrawFn) -> Case:
    return Case(draw(nets.nets(lengths=True, numbers=True)), (draw(nets.choices()),))


@st.composite
def shared(draw: st.DrawFn) -> Case:
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
    return Case(net, tuple(choices))


_NETS: dict[str, Callable[[Net], object]] = {  # what is counted of models
    "layers called again": lambda net: len(net.calls) > len(net.kinds),
    "skips over stages": lambda net: net.skips,
    "tied matrices": lambda net: net.tied,
    "a frozen layer": lambda net: net.frozen,
    "changes in place": lambda net: net.changed or "in place" in net.kinds,
    "buffers": lambda net: {"batch norm", "fixed"} & set(net.kinds),
    "random numbers": lambda net: "dropout" in net.kinds,
    "two inputs": lambda net: net.second >= 0,
    "several outputs": lambda net: net.outputs,
    "lengths that change": lambda net: len(set(net.rows)) > 1,
    "numbers that change": lambda net: net.numbers,
}


@dataclass
class Counts:
    cases: int = 0
    mismatches: int = 0
    plans: set[tuple[Net, Choice]] = dataclasses.field(default_factory=set)
    found: list[str] = dataclasses.field(default_factory=list)  # the mismatches
    more: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def drawn(self, subject: Subject, cases: int) -> None:
        net, choice = subject.net, subject.choice
        self.plans.add((net, choice))
        names = [name for name, has in _NETS.items() if has(net)]
        names += ["updates in the backward"] * choice.in_backward
        names += ["updates in the backward from a disk"] * (choice.in_backward and choice.disk)
        names += ["buckets that live on the device"] * (choice.resident > 0)
        names += ["rounding: equal in every bit to program order"] * subject.rounds
        self.more.update(dict.fromkeys(names, cases))

    def __str__(self) -> str:
        models = len({net for net, _ in self.plans})
        lines = [f"{self.cases} (model, plan, interleaving) cases, {self.mismatches} mismatches"]
        lines += [f"  {models} distinct models, {len(self.plans)} distinct (model, plan) pairs"]
        return "\n".join(lines + [f"  {n} {name}" for name, n in sorted(self.more.items())])


@contextlib.contextmanager
def kept(choose: Callable[[], Choice], counts: Counts) -> Iterator[None]:
    """Keep the saved tensors of the stages whose bit is set in what `choose` gives, all or half of
    them, there or on the host; run others again; let states leave as late as chosen."""

    def chosen(schedule: Schedule, choice: Any, *, saves: bool, **options: Any) -> Schedule:
        drawn = choose()
        choice = dataclasses.replace(choice, state_delay=drawn.state_delay)
        planned = make_plan(schedule, choice, saves=saves, **options)
        if schedule.backward is None:
            return planned
        every = [stage.index for stage in schedule.stages]
        able = [s.index for s in schedule.stages if s.traced.has_backward]

        def some(stages: Iterable[int], bits: int) -> set[int]:
            return {i for i in stages if bits >> (i % 8) & 1}

        def saved(i: int) -> SavedPart:
            if i in halves:
                return SavedPart.HALF
            return SavedPart.ALL if i in kept else SavedPart.INPUTS

        rerun, kept = some(every, drawn.rerun), set(planned.plan.keep)
        on_host = some(able, drawn.on_host) - kept
        halves = on_host if saves else set()
        if drawn.keep >= 0 and saves:
            kept = some(able, drawn.keep)
            counts.more["stages kept by a random choice"] += len(kept)
            halves = on_host | some(kept, drawn.halves)
        kept |= on_host if saves else set()
        rows = tuple(
            row._replace(
                saved=saved(i),
                tier=Tier.HOST if i in on_host and row.tier is Tier.DEVICE else row.tier,
                rerun=i in rerun,
            )
            for i, row in enumerate(planned.plan.stages)
        )
        gaps = [b - a for a, b in itertools.pairwise(sorted(on_host))]
        delay = max(gaps, default=2 if on_host else 1)
        plan = dataclasses.replace(planned.plan, stages=rows, saved_delay=delay)
        return dataclasses.replace(planned, plan=plan)

    with mock.patch.object(pipeline, "make_plan", chosen):
        yield


def make_optimizer(model: Any, choice: Choice) -> Any:
    params = [p for p in model.parameters() if p.requires_grad]
    # A small eps, or a large step, would blow other rounding up where the gradient is all rounding
    # (a bias before a BatchNorm).
    if choice.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=0.01, eps=0.1 if choice.in_backward else 1e-8)
    if choice.optimizer == "sgd":
        return torch.optim.SGD(params, lr=0.01 if choice.in_backward else 0.1, momentum=0.9)
    return None


def train(model: Any, net: Net, choice: Choice, optimizer: Any, *, first: int = 0) -> Result:
    """Two steps, or the backwards alone, from micro-batch `first` on; gives all that is seen."""
    seen: Result = {}
    for step in range(2 if optimizer is not None else 1):
        start = first + step * choice.backwards
        for which in range(start, start + choice.backwards):
            marked = choice.in_backward and which + 1 < start + choice.backwards
            streamed = marked and inside.is_streamed(model)
            torch.manual_seed(which)
            inputs = nets.data(net, which)
            loss, values = model(**inputs, **nets.numbers(net, which))
            total = loss
            for value in values if net.in_loss else []:
                total = total + value.square().sum()
            with accumulate(model) if streamed else contextlib.nullcontext():
                total.backward()
            seen |= {f"{which}.out{i}": v.detach().clone() for i, v in enumerate([loss, *values])}
            seen |= {f"{which}.{key}": value.detach().clone() for key, value in inputs.items()}
            if (gradient := inputs["x"].grad) is not None:
                seen[f"{which}.x.grad"] = gradient.clone()
            seen[f"{which}.rng"] = torch.get_rng_state()
        for name, param in model.named_parameters():
            if param.grad is not None and not choice.in_backward:
                seen[f"{step}.{name}.grad"] = param.grad.detach().clone()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    seen |= {name: param.detach().clone() for name, param in model.named_parameters()}
    return seen | {name: buffer.clone() for name, buffer in model.named_buffers()}


def differences(wanted: Result, got: Result, *, rtol: float = 0.0) -> list[str]:
    found = sorted(wanted.keys() ^ got.keys())
    for name in wanted.keys() & got.keys():
        a, b = wanted[name], got[name]
        if rtol and a.dtype.is_floating_point and a.shape == b.shape:
            # a sum may be small where its terms, which are as large as others of the tensor, cancel
            size = max(1.0, float(a.abs().max())) if a.numel() else 1.0
            same = torch.allclose(a, b, rtol=rtol, atol=rtol * size)
        else:
            same = equal(a, b)
        found += [] if same else [name]
    return sorted(found)


def _store(model: Any, bits: int) -> None:
    """Let the states of these buckets lie on the disk, as a plan would, and others on the host."""
    buckets = streamed_model(model, "tests").buckets
    keys = {key for i, key in enumerate(buckets.machine.buckets) if bits >> i & 1}
    now = buckets.plans.placement
    there = buckets.machine.buckets.keys() - now.places.resident
    places = now.places.changed(there, states=Tier.HOST).changed(there & keys, states=Tier.DISK)
    buckets._move(dataclasses.replace(now, places=places))


def streamed(model: Any, choice: Choice, optimizer: Any, mesh: Any = None) -> adversary.Adversary:
    """Megacompile a model as chosen, and put it on an adversarial device."""
    # with gradients or states no more than half of the buckets fit there
    some = str(sum(param.nbytes for param in model.parameters()))
    megacompile(
        model,
        device="cpu",
        lowering="eager",
        lookahead=choice.lookahead,
        slots=choice.lookahead + 1 + choice.more_slots,
        optimizer=optimizer if choice.in_backward else None,
        disk=tempfile.gettempdir() if choice.disk else None,
        disk_weights=choice.disk_weights,
        activations="offload" if choice.offload else "auto",
        disk_saved=choice.disk_saved,
        resident=(0, some, "all")[choice.resident],
        mesh=mesh,
    )
    if choice.disk and choice.stored >= 0:
        _store(model, choice.stored)
    return adversary.attach(model)


class Rank:
    """One rank: its model, plain or megacompiled, and what it trains with."""

    def __init__(self, case: Case, rank: int, interconnect: Interconnect, *, plain: bool) -> None:
        self.case, self.rank, self.interconnect = case, rank, interconnect
        self.choice = case.choices[rank]
        self.model: Any = nets.build(case.net)
        self.optimizer = make_optimizer(self.model, self.choice)
        self.plain = plain
        shared = case.count > 1
        if not plain:
            mesh = Mesh(rank, interconnect) if shared else None
            self.device = streamed(self.model, self.choice, self.optimizer, mesh)
            self.start = {k: v.clone() for k, v in self.model.state_dict().items()}
        elif shared:
            for name, param in self.model.named_parameters():
                if param.requires_grad:
                    param.register_hook(functools.partial(self._mean, name))

    def train(self) -> Result:
        first = self.rank * APART
        seen = train(self.model, self.case.net, self.choice, self.optimizer, first=first)
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

    def has(self, value: Tensor) -> Tensor:
        """The rows that this rank has of a whole tensor."""
        shape = tuple(value.shape)
        first = min(-(-shape[0] // self.case.count) * self.rank, shape[0])
        return value.narrow(0, first, shard_shape(shape, self.rank, self.case.count)[0])

    def _mean(self, name: str, gradient: Tensor) -> Tensor:
        given = self.interconnect.exchange(self.rank, f"the mean of {name}", gradient.clone())
        return total(given).div_(self.case.count)


class Subject:
    """A case: the plain model, and the megacompiled one on an adversarial device.

    Ranks have one each. The plain ones average each gradient when their backward makes it, before
    it is added to `p.grad`.
    """

    def __init__(self, case: Case, counts: Counts) -> None:
        self.case, self.counts = case, counts
        self.net, self.choice = case.net, case.choices[0]
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
        """Is it equal to the plain model but for rounding?"""
        return self.choice.in_backward

    @property
    def model(self) -> Any:
        return self.ranks[0].model

    @property
    def poisoned(self) -> int:
        return sum(rank.device.memory.poisoned for rank in self.ranks)

    def wrong(self, *policies: adversary.Policy) -> list[str]:
        """What one interleaving gives that is not as it should be."""
        return [
            f"rank {rank.rank}: {name}"
            for rank, wanted, ours in zip(
                self.ranks, self.wanted, self._train(policies), strict=True
            )
            for name in differences(*_parts(rank, wanted, ours), rtol=self.rtol)
        ]

    def random(self, seed: int) -> list[str]:
        return self.wrong(*(adversary.Random(seed + rank) for rank in range(self.case.count)))

    def in_order(self) -> list[str]:
        return self.wrong(*[InOrder()] * self.case.count)

    def to_program_order(self) -> list[str]:
        """Compare with program order from now on; gives how the plain model differs."""
        self.rtol = 1e-5
        found = self.in_order()
        self.wanted = self._train([InOrder()] * self.case.count)
        self.rtol = 0.0
        return found

    def _train(self, policies: Sequence[adversary.Policy]) -> list[Result]:
        def choice() -> Choice:
            return self.case.choices[self.interconnect.current]

        for rank, policy in zip(self.ranks, policies, strict=True):
            rank.device.policy = policy
        seed = policies[0].disk
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


def _parts(rank: Rank, wanted: Result, ours: Result) -> tuple[Result, Result]:
    """Both as this rank has them."""
    divided = {name for name, value in ours.items() if isinstance(value, DTensor)}
    of_rank = {
        name: rank.has(value)
        if name in divided and not isinstance(value, DTensor)
        else local(value)
        for name, value in wanted.items()
    }
    return of_rank, {name: local(value) for name, value in ours.items()}


class InOrder(adversary.Policy):
    """Every op runs as soon as it is issued."""

    def after_issue(self) -> int:
        return 2**16


def plain_refuses(net: Net, choice: Choice) -> bool:
    """Does autograd refuse the plain model? (A value it needs was changed in place.)"""
    try:
        model = nets.build(net)
        train(model, net, dataclasses.replace(choice, in_backward=False), None)
    except RuntimeError:
        return True
    return False
