"""What ranks need alike, what they are told where they have not, and what the first one has."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import SGD, AdamW

import megacompile as package
from megacompile import megacompile
from megacompile.errors import ModelError, OptionError, RankError
from tests import inside
from tests.ranks.here import Check, Here, Values, differing, named, whole
from tests.zoo import Tower


def shared(here: Here, model: nn.Module | None = None, **options: Any) -> Any:
    return megacompile(model or nn.Linear(4, 4), mesh=here.mesh, device="cpu", **options)


def other_options(here: Here) -> None:
    """Those that all ranks need alike are named; what each may have of its own is not."""
    others: dict[str, Any] = {"state_dtype": "int8", "lookahead": 3, "lowering": "inductor"}
    for name, value in others.items():
        with pytest.raises(OptionError, match=f"option '{name}' is .* in rank 0 and "):
            shared(here, **({name: value} if here.rank else {}))
    shared(here, progress=bool(here.rank))
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.randn(2, 16)
    with torch.no_grad():  # two forwards without a backward: buckets could stay on the device
        plain = net(x)
        shared(here, net, resident=3000 if here.rank else 10**6)
        assert net(x).equal(plain) and net(x).equal(plain)


def other_models(here: Here) -> None:
    """They are as they were then, and what all know is no reason to stop."""
    frozen, late = nn.Linear(4, 4), nn.Linear(4, 4)
    frozen.weight.requires_grad_(here.rank == 0)
    if here.rank == 1:
        late.register_buffer("late", torch.ones(3))
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4 + here.rank, affine=False))
    others: dict[str, nn.Module] = {
        "Linear": nn.Linear(4, 4 + here.rank),
        "Linear ": frozen,
        "'late'": late,
        r"'1\.running_mean'": normed,
    }
    for name, model in others.items():
        with pytest.raises(ModelError, match=name.strip()):
            shared(here, model)
        assert {type(param) for param in model.parameters()} == {nn.Parameter}
    with pytest.raises(OptionError, match="2 x 1 ranks"):
        megacompile(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2, 1)), device="cpu")
    alone = DeviceMesh("cpu", [0])
    if here.rank:
        with pytest.raises(OptionError, match="rank 1 is not in the mesh"):
            megacompile(nn.Linear(4, 4), mesh=alone, device="cpu")
    shared(here)


class Raising(nn.Linear):
    """May raise where `megacompile()` looks at it, in the middle of what ranks do together."""

    raises = False

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if self.raises:
            raise ValueError("bad memory")
        return super().named_buffers(*args, **options)


def raises_in_one(here: Here) -> None:
    """No error of megacompile's: the others, which wait for that rank, have a `RankError`."""
    error: type[Exception] = ValueError if here.rank else RankError
    model = Raising(4, 4)
    model.raises = here.rank == 1
    with pytest.raises(error, match="bad memory"):
        shared(here, model)
    shared(here)


def least_memory(here: Here) -> None:
    """Plans are made with the least that a rank may use."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    shared(here, net, gpu_memory="2MiB" if here.rank else "250KiB")
    net(torch.ones(4, 64)).sum().backward()
    (schedule,) = package.schedules(net)
    residents = here.all_say(sorted(schedule.plan.resident))
    assert residents[0] == residents[1] and 0 < len(residents[0]) < 6
    compiler: Any = inside.streamed(net).buckets.plans.compiler
    assert compiler.budget.limit_bytes == 250 * 2**10


def drawn(seed: int) -> nn.Module:
    """A model of which ranks draw other values, in some tensors of one bit alone."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1), nn.Linear(64, 64))
    nan = torch.full((3,), torch.nan)
    net.register_buffer("nan", nan)
    net.register_buffer("flags", torch.tensor([True, seed == 0]))
    net.register_buffer("turned", torch.randn(3, 2).t())
    with torch.no_grad():
        net.get_buffer("1.running_mean").normal_()
        net.get_buffer("1.running_mean")[4] = torch.nan
        large = net.get_parameter("3.weight")  # which differs in one bit of its last element
        large.copy_(torch.arange(64.0 * 64).view(64, 64))
        large.view(torch.int32)[-1, -1] += seed
        nan.view(torch.int32)[2] += seed
    return net


def values_of_the_first(here: Here) -> None:
    """All ranks get its parameters and buffers, in every bit, and load what it loads."""

    def bits(model: nn.Module) -> Values:
        found = {name: whole(value) for name, value in model.state_dict().items()}
        return {name: value.reshape(-1).view(torch.uint8) for name, value in found.items()}

    first = drawn(0)
    ours = shared(here, drawn(here.rank))  # which has seeded the rank's own numbers
    expected = bits(first)
    assert not differing(bits(ours), expected)
    assert len({*here.all_say(inside.machine(ours).seed())}) == 1
    with torch.no_grad():
        for param in ours.parameters():
            param.zero_()
    ours.load_state_dict(first.state_dict())
    assert not differing(bits(ours), expected)


def collectives_of_a_step(here: Here) -> None:
    """Clipping makes one, and the step behind it none, though a rank has no rows of a bias."""
    model = shared(here, nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)))
    optimizer = AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        with CommDebugMode() as clipping:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with CommDebugMode() as stepping:
            optimizer.step()
        optimizer.zero_grad()
    assert clipping.get_total_counts() == 1 and stepping.get_total_counts() == 0


def rounds_at_random(here: Here) -> None:
    """Ranks with other rows draw other numbers, though they have one seed, the first one's. So
    replicas draw the same."""
    torch.manual_seed(here.rank)
    model = nn.Linear(64, 4, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    shared(here, model, lowering="eager", stochastic_rounding=True)
    assert {*here.all_say(inside.machine(model).seed())} == {0}
    optimizer = SGD(model.parameters(), lr=1e-3)  # of 1, whose neighbour is 1 - 2**-8
    for _ in range(2):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight: Any = model.weight
    mine = weight.to_local().detach().clone()
    each: list[torch.Tensor] = here.all_say(mine)
    assert mine.unique().numel() > 1 and not each[0].equal(each[1])
    assert here.mesh.ndim == 1 or (each[0].equal(each[2]) and each[1].equal(each[3]))


def said_once(here: Here) -> None:
    """What is about all ranks is shown and warned of by the first one alone."""
    shown = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(shown):
        warnings.simplefilter("always")
        model = shared(here, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), progress=True)
        model.compile()
        model(torch.ones(2, 4)).sum().backward()
        AdamW(model.parameters()).step()
    said = [str(each.message) for each in caught if each.category is UserWarning]
    assert len(said) == (here.rank == 0), said
    assert bool(shown.getvalue()) == (here.rank == 0)


TWO = named(
    *(other_options, other_models, raises_in_one, least_memory, values_of_the_first),
    *(collectives_of_a_step, rounds_at_random, said_once),
)
FOUR: dict[str, Check] = {
    "values of the first, 2 x 2": lambda here: values_of_the_first(here.pairs),
    "rounds at random, 2 x 2": lambda here: rounds_at_random(here.pairs),
}


LAYERS = 3
STEPS = 4
MICRO = 2  # batches of the step of the last trace
WIDTH, ROWS, MORE = 256, 64, 256  # the last rank has so many times the rows


class Loop:
    def __init__(self, here: Here) -> None:
        layers = (nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.model: Any = Tower(layers, lambda layer, x: torch.relu(layer(x)))
        package.megacompile(self.model, mesh=here.mesh, device="cpu", progress=False)
        self.data = torch.randn(ROWS * (MORE if here.rank else 1), WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, micro: int = 1) -> None:
        for _ in range(micro):
            self.model(self.data).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def explained(self) -> dict[str, Any]:
        return package.explain(self.model, changes=False).to_dict()


def slow_ranks(here: Here) -> None:
    """Who came last in traced steps."""
    loop = Loop(here)
    loop.step()
    assert loop.explained()["ranks"] == 2 and "interconnect" in loop.explained()["bounds"]
    with package.trace(loop.model) as trace:
        for _ in range(STEPS):
            loop.step()
    assert loop.explained()["last_rank"] is None, "nobody has compared the ranks"
    trace.save(str(here.folder / "steps.json"))
    told = trace.rank_steps["Tower"]
    assert [each.rank for each in told] == [0, 1]
    assert told[0].waited_s > told[1].waited_s
    last = loop.explained()["last_rank"]
    assert (last["rank"], last["lane"]) == (1, "compute")
    assert last["busy_s"] > 2 * last["others_busy_s"] and last["waited_s"] > 0
    joint_trace(here, loop)
    with package.trace(loop.model) as nothing:
        pass
    nothing.save(str(here.folder / "nothing.json"))
    assert nothing.rank_steps == {"Tower": ()}


def joint_trace(here: Here, loop: Loop) -> None:
    """One file has the processes of all ranks, on one clock."""
    path = here.folder / "trace.json"
    if here.rank:
        sum(torch.randn(300, 300) @ torch.randn(300, 300) for _ in range(100))  # it begins later
    with package.trace(loop.model) as trace:
        loop.step(MICRO)
    trace.save(str(path))
    assert len(trace.rank_steps["Tower"]) == 2
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(names) == len(set(names.values())), names
    assert {e["pid"] for e in events} == names.keys()
    collectives = []
    for rank in (0, 1):
        start = f"rank {rank}: Tower, measured"
        (pid,) = (pid for pid, name in names.items() if name.startswith(start))
        mine = [e for e in events if e["pid"] == pid]
        lanes = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        assert {"compute", "h2d", "d2h", "comm"} <= set(lanes.values())
        ops = [e for e in mine if e["ph"] == "X" and lanes[e["tid"]] == "comm"]
        collectives.append(sorted(ops, key=lambda e: e["ts"]))
    first, second = collectives
    assert [e["name"] for e in first] == [e["name"] for e in second] != []
    counts = Counter(e["name"].lstrip("0123456789").partition("@")[0] for e in first)
    # backwards take all weights from the slots; they sum gradients each: see decision 36
    assert counts == {"ALL_GATHER": LAYERS * MICRO, "REDUCE_SCATTER": LAYERS * MICRO}
    for a, b in zip(first, second, strict=True):  # over when all are in it
        assert a["ts"] <= b["ts"] + b["dur"] and b["ts"] <= a["ts"] + a["dur"], a["name"]


def trace_that_fails(here: Here) -> None:
    """The file that all ranks' traces go to cannot be written: an error in all, who may go on."""
    loop = Loop(here)
    with package.trace(loop.model) as trace:
        loop.step()
    with pytest.raises(Exception, match="trace"):
        trace.save(str(here.folder / "is not there" / "trace.json"))
    trace.save(str(here.folder / "trace of two.json"))
    assert (here.folder / "trace of two.json").exists()


EXPLAINED: dict[str, Check] = {"slow ranks": slow_ranks, "a trace that fails": trace_that_fails}
