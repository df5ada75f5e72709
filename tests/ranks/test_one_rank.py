"""What is refused where ranks share a model, and what such a model may do: in a group of this
process alone. And ranks that are simulated in this process, next to plain ranks."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from megacompile import (
    accumulate,
    explain,
    full_parameters,
    megacompile,
    released,
    schedules,
    trace,
)
from megacompile.cli import main
from megacompile.errors import OptimizerError
from tests import inside, prove
from tests.equality.nets import net
from tests.processes import group_of_one
from tests.ranks.interconnect import CollectiveError, Interconnect, Mesh
from tests.subject import shared as of_ranks


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with group_of_one(datetime.timedelta(seconds=20)):
        yield


@pytest.fixture
def mesh(group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def shared(mesh: DeviceMesh, **options: Any) -> Any:
    return megacompile(net(), mesh=mesh, device="cpu", **options)


def step(model: Any) -> Tensor:
    loss: Tensor = model(torch.ones(3, 4)).square().mean()
    loss.backward()
    return loss.detach()


# The model.


def test_states_from_before_are_divided(mesh: DeviceMesh) -> None:
    plain, model = net(), net()
    optimizers = [AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        step(each)
        optimizer.step()
        optimizer.zero_grad()
    megacompile(model, mesh=mesh, device="cpu")
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        step(each)
        optimizer.step()
    for (name, want), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert want.equal(got.full_tensor()), name
        assert (
            optimizers[0]
            .state[want]["exp_avg"]
            .equal(optimizers[1].state[got]["exp_avg"].full_tensor())
        )


class Adapted(nn.Sequential):
    """A model whose `parameters()` are only those that it trains."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (param for param in super().parameters(recurse) if param.requires_grad)


def test_parameters_that_a_model_does_not_list_are_divided(mesh: DeviceMesh) -> None:
    plain, model = (Adapted(*net()) for _ in range(2))
    for each in (plain, model):
        each[0].requires_grad_(False)
    megacompile(model, mesh=mesh, device="cpu")
    assert torch.equal(step(model), step(plain))
    assert all(isinstance(param, DTensor) for _, param in model.named_parameters())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor) and theirs.grad is not None
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)


def test_other_names_of_a_part_are_noticed(mesh: DeviceMesh) -> None:
    """Nobody could guard them while an update runs: the step waits for it then."""
    model = shared(mesh)
    step(model)
    (bucket, *_) = inside.buckets(model).values()
    for i, param in enumerate(bucket.params):
        assert not bucket.aliased(i)
        alias = param.detach()
        assert bucket.aliased(i)
        alias = param.to_local()  # type: ignore[attr-defined]
        assert bucket.aliased(i)
        del alias
        assert not bucket.aliased(i)


def test_memory_is_given_back_and_taken_again(mesh: DeviceMesh) -> None:
    model, plain = shared(mesh, resident="all"), net()
    optimizers = [AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(2):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step(each)
            optimizer.step()
        with released(model):
            moved = [param.full_tensor() for param in model.parameters()]
        for want, got in zip(plain.parameters(), moved, strict=True):
            assert want.equal(got)
    full = dict(full_parameters(model))
    for name, param in plain.named_parameters():
        value = full.pop(name)
        assert type(value) is Tensor and value.equal(param)
    assert schedules(model) and not full


CASES = 15
SEEN = (  # what ranks have to draw; by this seed, 15 cases have all of it
    *("updates in the backward", "buckets that live on the device", "tied matrices"),
    *("random numbers", "buffers", "lengths that change", "skips over stages"),
)


@pytest.mark.parametrize("cases", [CASES, pytest.param(60, marks=pytest.mark.thorough)])
def test_random_cases_equal_the_plain_ranks(cases: int) -> None:
    counts = prove.prove(of_ranks(), cases, seed=11, interleavings=3)
    assert counts.found == []
    assert counts.cases >= cases and counts.mismatches == 0
    assert counts.more["collectives"] > 10 * cases
    assert sum(name.endswith(" ranks") for name in counts.more) > 1
    assert cases == CASES or {*SEEN} <= {*counts.more}
    assert counts.more["times memory was poisoned"] > 0


def meet(names: str, seed: int) -> list[Any]:
    """What each of three ranks gets in two collectives; those of the second are called so."""
    interconnect = Interconnect(3)

    def body(rank: int) -> list[Any]:
        torch.manual_seed(rank)
        mine = names if rank == 1 else "ab"
        return [(interconnect.exchange(rank, n, rank), torch.rand(())) for n in mine]

    return interconnect.run([functools.partial(body, rank) for rank in range(3)], seed)


@pytest.mark.parametrize("seed", range(4))
def test_the_interconnect_meets_or_says_what_does_not_fit(seed: int) -> None:
    for rank, got in enumerate(meet("ab", seed)):
        torch.manual_seed(rank)
        assert got == [([0, 1, 2], torch.rand(())) for _ in range(2)], "their own numbers"
    for names in ("ba", "a"):
        with pytest.raises(CollectiveError):
            meet(names, seed)


@pytest.mark.parametrize("in_backward", [False, True])
def test_replicas_sum_in_the_last_micro_batch(in_backward: bool) -> None:
    """What is not summed before cannot be read; then it is the mean over all ranks."""
    ranks, given = Interconnect(4), torch.randn(4, 2, 3, 4)
    plain: Any = net()
    sum(plain(x).square().mean() / 4 for x in given.flatten(0, 1)).backward()

    def train(rank: int) -> None:
        model: Any = net()
        updates: Any = {"optimizer": AdamW(model.parameters())} if in_backward else {}
        megacompile(model, mesh=Mesh(rank, ranks, replicas=2), device="cpu", **updates)
        with trace(model) as recorded:
            with accumulate(model):
                model(given[rank, 0]).square().mean().backward()
            for param in model.parameters():
                with pytest.raises(OptimizerError):
                    param.grad.to_local()
            model(given[rank, 1]).square().mean().backward()
        sums = [span.op.name[1:] for span in recorded.spans if "REDUCE" in span.op.name]
        first, last = sums[: len(inside.buckets(model))], sums[len(inside.buckets(model)) :]
        assert {*first} == {"REDUCE_SCATTER"}
        assert sorted(last) == ["ALL_REDUCE"] * len(first) + first
        for want, got in zip(plain.parameters(), model.parameters(), strict=True):
            if not in_backward:
                torch.testing.assert_close(got.grad.to_local(), want.grad.chunk(2)[rank % 2])

    ranks.run([functools.partial(train, rank) for rank in range(4)], seed=0)


# What the states of a rank take.

NETS = {
    "8 bits, though a part is small": (64, 96),
    "one part is smaller": (1500, 3),
    "float32": (60, 60),
}


@pytest.mark.parametrize("name", NETS)
def test_plans_count_the_states_that_a_rank_has(name: str, tmp_path: Path) -> None:
    """The whole parameter decides whether states are in 8 bits, of all parts of it."""
    ranks = Interconnect(2)

    def train(rank: int) -> tuple[int, int]:
        model: Any = nn.Linear(*NETS[name], bias=False)
        mesh: Any = Mesh(rank, ranks)
        megacompile(model, mesh=mesh, device="cpu", state_dtype="int8", disk=tmp_path)
        optimizer = AdamW(model.parameters())
        model(torch.ones(2, model.in_features)).sum().backward()
        optimizer.step()
        (bucket,) = inside.buckets(model).values()
        buffers: list[Any] = [each() for each in bucket.states._owned[optimizer].buffers]
        disk = explain(model, changes=False).disk
        assert disk is not None
        return sum(map(len, buffers)), disk.kinds["optimizer states"]

    found = ranks.run([lambda: train(0), lambda: train(1)], seed=0)
    took, counted = found[0]  # the first has the largest parts
    assert took == counted


GPUS = 2
SLOW_GB_S = 1e-4
BYTES = 4  # of a gradient


@functools.cache
def planned(hosts: int, network: float | None = None) -> Any:
    """What `plan` gives for a model that two GPUs of each host share."""
    command = ["plan", "tests.configs:tower", "--batch", "2", "--seq", "16", "--json"]
    command += ["--gpus", str(GPUS), "--hosts", str(hosts)]
    shown = StringIO()
    with redirect_stdout(shown):
        assert main(command + ([] if network is None else ["--network", str(network)])) == 0
    return json.loads(shown.getvalue())


@pytest.mark.parametrize("hosts", [2, 4])
def test_each_rank_sums_its_part_with_those_that_have_it_too(hosts: int) -> None:
    alone, several = planned(1), planned(hosts, SLOW_GB_S)
    part_bytes = BYTES * alone["active_parameters"] / GPUS
    more_s = several["step_s"] - alone["step_s"]
    expected_s = 2 * (hosts - 1) / hosts * part_bytes / (SLOW_GB_S * 1e9)
    assert more_s == pytest.approx(expected_s, rel=0.1)
    assert several["plan"]["replicas"] == several["hosts"] == hosts
    assert several["tokens_per_s"] == pytest.approx(hosts * GPUS * 32 / several["step_s"])


def test_a_network_is_among_what_bounds_a_step() -> None:
    assumed = planned(2)
    given = planned(2, assumed["plan"]["network_gb_s"])
    assert assumed["step_s"] == pytest.approx(given["step_s"])
    assert assumed["plan"]["network_is_assumed"] and not given["plan"]["network_is_assumed"]
    slow, fast, none = (planned(*of)["plan"]["bounds"] for of in ((2, SLOW_GB_S), (2,), (1,)))
    assert next(iter(slow)) == "network" and slow["network"] > 0.5
    assert fast["network"] < 0.05 and "network" not in none
