"""A model with a plan: the plain run, and the megacompiled one on an adversarial device."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

from megacompile import accumulate, megacompile
from megacompile.ir.plan import SavedPart, Tier
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.make_plan import make_plan
from megacompile.plan import pipeline
from megacompile.runtime.model.streamed import streamed_model
from tests import adversary, disks, inside, nets
from tests.nets import Choice, Net
from tests.zoo import equal

Result = dict[str, Tensor]


class Drawn(Protocol):
    """What is counted of a subject."""

    net: Net
    choice: Choice

    @property
    def rounds(self) -> bool:
        """Is it equal to the plain model but for rounding?"""


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


@dataclasses.dataclass
class Counts:
    cases: int = 0
    mismatches: int = 0
    plans: set[tuple[Net, Choice]] = dataclasses.field(default_factory=set)
    found: list[str] = dataclasses.field(default_factory=list)  # the mismatches
    more: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def drawn(self, subject: Drawn, cases: int) -> None:
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


def _param_bytes(model: torch.nn.Module) -> int:
    """Of all parameters; with gradients or states no more than half of the buckets fit there."""
    return sum(param.nbytes for param in model.parameters())


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
        resident=(0, f"{_param_bytes(model)}", "all")[choice.resident],
        mesh=mesh,
    )
    if choice.disk and choice.stored >= 0:
        _store(model, choice.stored)
    return adversary.attach(model)


class Subject:
    """A model with a plan: the plain run, and the megacompiled one on an adversarial device."""

    def __init__(self, net: Net, choice: Choice, counts: Counts) -> None:
        self.net, self.choice, self.counts = net, choice, counts
        plain = nets.build(net)
        self.wanted = train(plain, net, choice, make_optimizer(plain, choice))
        torch.compiler.reset()
        self.model: Any = nets.build(net)
        self.optimizer = make_optimizer(self.model, choice)
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.device = streamed(self.model, choice, self.optimizer)
        self.rtol = 0.0

    @property
    def rounds(self) -> bool:
        return self.choice.in_backward

    def wrong(self, policy: adversary.Policy) -> list[str]:
        """What one interleaving gives that is not as it should be."""
        self.device.policy = policy
        rng = random.Random(policy.disk)
        with adversary.adversarial(), kept(lambda: self.choice, self.counts), ExitStack() as stack:
            if self.choice.disk:
                stack.enter_context(disks.harsh(rng))
                stack.enter_context(disks.few_buffers(rng))
            got = self._train()
        return differences(self.wanted, got, rtol=self.rtol)

    def to_program_order(self) -> list[str]:
        """Compare with this model in program order from now on; gives how the plain one differs."""
        self.rtol = 1e-5
        found = self.wrong(InOrder())
        with adversary.adversarial(), kept(lambda: self.choice, self.counts):
            self.wanted = self._train()
        self.rtol = 0.0
        return found

    def _train(self) -> Result:
        self.model.load_state_dict(self.start)
        self.model.zero_grad()
        if self.optimizer is not None:
            self.optimizer.state.clear()
        return train(self.model, self.net, self.choice, self.optimizer)


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
