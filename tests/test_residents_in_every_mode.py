"""Buckets that live on the device, with the update in the backward and with every dtype.

What is resident is updated by the same arithmetic as what is streamed, so a model with residents is
compared in every bit with the same model that streams everything.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.optim import SGD, AdamW, Optimizer

from megacompile import accumulate, full_parameters, megacompile, released, schedules, unmegacompile
from megacompile.cost.memory import Kind, device_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.errors import OptimizerError
from megacompile.ir import ops
from megacompile.ir.placement import Placement
from megacompile.verify.proof import HazardKind, hazards
from tests import inside
from tests.draws import drawn, pairwise
from tests.inside import residents

WIDTH = 72  # matrices of 5184 elements, which 8-bit states have blocks for
STEPS = 3

DTYPES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bf16 states": {"state_dtype": torch.bfloat16},
    "8-bit states": {"state_dtype": "int8"},
    "bf16 gradients": {"grad_dtype": torch.bfloat16},
    "masters": {"compute_dtype": torch.bfloat16},
    "masters, bf16 gradients": {"compute_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16},
    "masters, bf16 states": {"compute_dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    "masters, 8-bit states": {"compute_dtype": torch.bfloat16, "state_dtype": "int8"},
    "stochastic rounding": {"stochastic_rounding": True},
    "stochastic rounding, 8-bit states": {"stochastic_rounding": True, "state_dtype": "int8"},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.up(self.norm(x))) * self.scale
        return y


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stack(dtype: torch.dtype = torch.float32, layers: int = 4) -> Any:
    torch.manual_seed(0)
    return Stack(layers).to(dtype)


def batch(seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, WIDTH, generator=generator).to(dtype)


class Trained(NamedTuple):
    model: Any
    optimizer: Optimizer
    losses: list[float]


def made(
    resident: Any, *, in_backward: bool, optimizer: Any = None, layers: int = 2, **options: Any
) -> Trained:
    """A megacompiled model; `resident="half"` takes half of its buckets."""
    bf16 = options.get("stochastic_rounding", False)
    model = stack(torch.bfloat16 if bf16 else torch.float32, layers)
    make = optimizer or (lambda params: AdamW(params, lr=1e-2, weight_decay=0.1))
    of = make([p for p in model.parameters() if p.requires_grad])
    given = {"optimizer": of} if in_backward else {}
    options = {"device": "cpu", "lowering": "eager", "progress": False, **given, **options}
    if resident == "half":
        probe = copy.deepcopy(model)
        its = {"optimizer": make(list(probe.parameters()))} if in_backward else {}
        megacompile(probe, **{**options, **its})
        cost = OptimizerCost.of(inside.streamed(probe).options)
        sizes = [
            cost.resident_bytes(b.layout, [i for i, p in enumerate(b.params) if p.requires_grad])
            for b in inside.buckets(probe).values()
        ]
        resident = f"{math.ceil(sum(sizes[: len(sizes) // 2]))}"
    megacompile(model, resident=resident, **options)
    return Trained(model, of, [])


def train(trained: Trained, steps: int = STEPS, *, micro: int = 1, start: int = 0) -> Trained:
    model, optimizer, losses = trained
    dtype, device = next(model.parameters()).dtype, inside.streamed(model).options.device
    in_backward = inside.machine(model).in_backward is not None
    for i in range(start, start + steps):
        for k in range(micro):
            waits = in_backward and k + 1 < micro
            with accumulate(model) if waits else contextlib.nullcontext():
                loss = model(batch(micro * i + k, dtype).to(device))
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return trained


def assert_same(one: Trained, other: Trained) -> None:
    """In every bit: losses, parameters, states."""
    assert one.losses == other.losses
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    for name, value in mine.items():
        assert torch.equal(value.cpu(), theirs[name].cpu()), name
    of_mine, of_theirs = (t.optimizer.state_dict()["state"] for t in (one, other))
    assert of_mine.keys() == of_theirs.keys() and of_mine
    for key, state in of_mine.items():
        assert state.keys() == of_theirs[key].keys()
        for name, value in state.items():
            assert torch.equal(value.cpu(), of_theirs[key][name].cpu()), (key, name)


def backwards(model: Any) -> list[fx.Graph]:
    return [s.backward for s in schedules(model) if s.backward is not None]


def updates_in_place(model: Any) -> int:
    return sum(len(ops.nodes_of(graph, ops.update_in_place)) for graph in backwards(model))


@functools.cache
def all_streamed(dtypes: str, in_backward: bool) -> Trained:
    return train(made(0, in_backward=in_backward, **DTYPES[dtypes]))


@pytest.mark.parametrize(
    ("dtypes", "in_backward", "resident"), pairwise(DTYPES, [False, True], ["all", "half"])
)
def test_residents_are_bitwise_what_is_streamed(
    dtypes: str, in_backward: bool, resident: str
) -> None:
    streamed = all_streamed(dtypes, in_backward)
    there = train(made(resident, in_backward=in_backward, **DTYPES[dtypes]))
    assert len(residents(there.model)) == (2 if resident == "all" else 1)
    assert not residents(streamed.model)
    assert_same(streamed, there)
    assert updates_in_place(there.model) == (len(residents(there.model)) if in_backward else 0)


@pytest.mark.parametrize("in_backward", [False, True], ids=["exact", "in the backward"])
def test_masters_of_some_parameters(in_backward: bool) -> None:
    """Others of the same bucket have the dtype that is computed in."""
    found = []
    places: tuple[Any, ...] = (0, "all")
    for resident in places:
        model = stack(layers=2)
        for layer in model.layers:
            layer.norm.to(torch.bfloat16)
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        megacompile(
            model,
            device="cpu",
            lowering="eager",
            resident=resident,
            compute_dtype=torch.bfloat16,
            optimizer=optimizer if in_backward else None,
        )
        trained = Trained(model, optimizer, [])
        for i in range(STEPS):
            model(batch(i, torch.bfloat16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(trained)
    assert_same(*found)


@pytest.mark.parametrize(
    ("dtypes", "in_backward"),
    [
        ("as it is", True),
        ("masters, 8-bit states", False),
        pytest.param("as it is", False, marks=pytest.mark.thorough),
        pytest.param("masters, 8-bit states", True, marks=pytest.mark.thorough),
    ],
)
def test_with_inductor(dtypes: str, in_backward: bool) -> None:
    options = {**DTYPES[dtypes], "lowering": "inductor"}
    streamed = train(made(0, in_backward=in_backward, **options))
    there = train(made("half", in_backward=in_backward, **options))
    assert residents(there.model)
    if in_backward:
        assert_same(streamed, there)
    for want, got in zip(streamed.model.parameters(), there.model.parameters(), strict=True):
        assert (got - want).norm() <= 1e-3 * want.norm()  # C++ and torch round differently


@pytest.mark.parametrize(
    "make",
    [
        lambda params: SGD(params, lr=0.1),
        lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        lambda params: AdamW(params, lr=1e-2, amsgrad=True),
    ],
    ids=["sgd", "nesterov", "amsgrad"],
)
def test_other_rules_in_the_backward(make: Any) -> None:
    streamed, there = (
        train(made(resident, in_backward=True, optimizer=make)) for resident in (0, "half")
    )
    mine, theirs = streamed.model.state_dict(), there.model.state_dict()
    assert streamed.losses == there.losses
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


@pytest.mark.parametrize("dtypes", ["as it is", "bf16 gradients", "masters", "8-bit states"])
def test_micro_batches(dtypes: str) -> None:
    """The gradients so far of a resident bucket stay on the device."""
    streamed, there = (
        train(made(resident, in_backward=True, **DTYPES[dtypes]), micro=3)
        for resident in (0, "half")
    )
    assert_same(streamed, there)
    assert any(
        ops.nodes_of(graph, ops.update_in_place) and ops.nodes_of(graph, ops.add_grad)
        for graph in backwards(there.model)
    )


def test_nothing_of_a_resident_is_copied_in_a_step() -> None:
    """No fetch, no copy to the host, and no memory but parameters and states."""
    there = train(made("all", in_backward=True))
    (schedule,) = schedules(there.model)
    every = [op for graph in schedule.graphs.values() for op in ops.nodes_of(graph)]
    assert not [node for node in every if ops.copied_bytes(node)]
    assert not any(bucket.grads for bucket in inside.buckets(there.model).values())
    cost = OptimizerCost.of(inside.streamed(there.model).options)
    buckets = inside.buckets(there.model).values()
    taken = sum(b.layout.size_bytes for b in buckets)
    states = there.optimizer.state.values()
    taken += sum(v.nbytes for state in states for k, v in state.items() if k != "step")
    at = device_memory(schedule, optimizer=cost).peak.live_bytes
    assert at[Kind.PARAMETERS] == taken
    assert at[Kind.STATES] == at[Kind.SLOTS] == 0


def test_gradients_of_micro_batches_are_planned_for() -> None:
    there = made("all", in_backward=True)
    with accumulate(there.model):
        there.model(batch(0, torch.float32)).backward()
    gradients = sum(
        g.nbytes for b in inside.buckets(there.model).values() for g in b.grads.values()
    )
    there.model(batch(1, torch.float32)).backward()  # adds to them, and updates
    cost = OptimizerCost.of(inside.streamed(there.model).options)
    (program,) = (p for g in inside.streamed(there.model).graphs for p in g.programs.values())
    assert program is not None
    live = {
        variant.accumulate: [
            moment.live_bytes[Kind.GRADIENTS]
            for moment in device_memory(executor.schedule, optimizer=cost).moments
        ]
        for variant, executor in program.executors.items()
        if variant.accumulate or not variant.update
    }
    assert gradients and min(live[True]) >= gradients, "they are there before the second one"
    assert live[False][0] == 0 and live[False][-1] >= gradients, "the first one leaves them"


def test_plans_know_of_micro_batches() -> None:
    """Where their gradients do not fit beside all buckets, fewer buckets are resident."""
    there = train(made("all", in_backward=True, layers=4), 1)
    cost = OptimizerCost.of(inside.streamed(there.model).options)
    peak = device_memory(schedules(there.model), optimizer=cost, fused=False).peak.total_bytes
    budget = peak + sum(p.nbytes for p in there.model.parameters()) // 4
    streamed = train(made(0, in_backward=True, layers=4), micro=2)
    for micro, fewer in ((1, False), (2, True)):
        planned = made("auto", in_backward=True, layers=4, gpu_memory=budget)
        train(planned, micro=micro)
        assert (len(residents(planned.model)) < 4) == fewer
    assert_same(streamed, planned)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", ["as it is", "8-bit states", "masters", "masters, 8-bit states"])
@pytest.mark.parametrize("micro", [1, 3])
def test_on_a_gpu(dtypes: str, micro: int) -> None:
    """The kernel of the streamed update, on the bucket's own memory; norms are of the device.

    Inductor rounds a stage that is kept otherwise than one that is recomputed, and plans differ.
    """
    options = {**DTYPES[dtypes], "device": "cuda", "lowering": "inductor"}
    options["activations"] = "recompute"
    streamed, there = (
        train(made(resident, in_backward=True, **options), micro=micro) for resident in (0, "half")
    )
    assert residents(there.model)
    assert_same(streamed, there)
    norms = []
    for trained in (streamed, there):
        trained.model(batch(9, torch.float32).to("cuda")).backward()
        norms.append(nn.utils.clip_grad_norm_(trained.model.parameters(), torch.inf).cpu())
    torch.testing.assert_close(*norms)  # summed on the host, and on the device


def test_norms_of_gradients_that_are_used_up() -> None:
    norms = []
    for resident in (0, "half"):
        there = made(resident, in_backward=True, lowering="inductor")
        there.model(batch(0, torch.float32)).backward()
        norms.append(nn.utils.clip_grad_norm_(there.model.parameters(), torch.inf))
        with pytest.raises(OptimizerError, match="is not there"):
            there.model.layers[0].up.weight.grad.add_(1)
    assert torch.equal(*norms) and norms[0] > 0


def test_states_are_loaded_and_saved() -> None:
    reference = train(train(made(0, in_backward=True), 2), 2, start=2)
    before = train(made(0, in_backward=True), 2)
    after = made("half", in_backward=True)
    after.model.load_state_dict(before.model.state_dict())
    after.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
    after.losses.extend(before.losses)
    assert_same(reference, train(after, 2, start=2))


def test_unmegacompile_and_full_parameters() -> None:
    streamed, there = (train(made(resident, in_backward=True)) for resident in (0, "half"))
    for trained in (streamed, there):
        with torch.no_grad():
            for param in trained.model.parameters():
                param.mul_(0.5)
        train(trained, 1, start=STEPS)
    assert_same(streamed, there)
    whole = dict(full_parameters(there.model))
    assert all(torch.equal(value, whole[name]) for name, value in full_parameters(streamed.model))
    for trained in (streamed, there):
        unmegacompile(trained.model)
    assert_same(streamed, there)


def test_released_and_taken_back() -> None:
    streamed, there = (train(made(resident, in_backward=True)) for resident in (0, "half"))
    for trained in (streamed, there):
        with released(trained.model):
            pass
        train(trained, 1, start=STEPS)
    assert_same(streamed, there)
    assert len(residents(there.model)) == 1


def want(model: Any, *names: str) -> None:
    """Let these buckets live on the device from the next call on."""
    streamed = inside.streamed(model)
    keys = [b.layout.key for b in streamed.machine.buckets.values() if b.layout.name in names]
    compiler: Any = streamed.buckets.plans.compiler
    compiler.chooser._wanted = Placement(frozenset(keys))


@pytest.mark.parametrize("dtypes", drawn(list(DTYPES)[::2], list(DTYPES)[1::2]))
@pytest.mark.parametrize("in_backward", [False, True], ids=["exact", "in the backward"])
def test_buckets_move_between_steps(dtypes: str, in_backward: bool) -> None:
    """There and back: nothing of them is rounded, 8-bit states keep their codes."""
    options = {**DTYPES[dtypes], "in_backward": in_backward}
    streamed = all_streamed(dtypes, in_backward)
    there = made("auto", **options)
    for i, places in enumerate([("layers.0",), ("layers.1",), ()]):
        train(there, 1, start=i)
        want(there.model, *places)
        there.model(batch(9, next(there.model.parameters()).dtype))  # a call moves them
        assert residents(there.model) == set(places)
    assert_same(streamed, there)


def test_a_micro_batch_before_a_move() -> None:
    streamed, there = made(0, in_backward=True), made("auto", in_backward=True)
    for trained in (streamed, there):
        with accumulate(trained.model):
            trained.model(batch(0, torch.float32)).backward()
        if trained is there:
            want(there.model, "layers.1", "layers.3")
        trained.model(batch(1, torch.float32)).backward()
        trained.optimizer.step()
    assert residents(there.model) == {"layers.1"}
    assert_same(streamed, there)


# Proof.


def _schedule() -> Any:
    there = train(made("half", in_backward=True, layers=4), 1)
    (schedule,) = [s for s in schedules(there.model) if s.backward is not None]
    assert not hazards(schedule)
    changed = schedule.copy()
    assert changed.backward is not None
    first, *_ = ops.nodes_of(changed.backward, ops.update_in_place)
    return changed, first


def test_an_update_before_the_last_reader_is_found() -> None:
    schedule, update = _schedule()
    graph = schedule.backward
    bucket = ops.arguments(update)[0]
    taken = ops.nodes_of(graph, ops.resident)
    (weights,) = [node for node in taken if ops.arguments(node)[0].key == bucket.key]
    reader = max(weights.users)
    update.append(reader)
    found = {hazard.kind for hazard in hazards(schedule)}
    assert HazardKind.UPDATED_TOO_EARLY in found


def test_an_update_that_takes_other_gradients_is_found() -> None:
    schedule, update = _schedule()
    _, other = ops.nodes_of(schedule.backward, ops.update_in_place)
    update.args, other.args = (
        (update.args[0], *other.args[1:]),
        (other.args[0], *update.args[1:]),
    )
    assert HazardKind.WRONG_GRADIENTS in {hazard.kind for hazard in hazards(schedule)}


def test_a_streamed_bucket_that_is_updated_in_place_is_found() -> None:
    schedule, update = _schedule()
    (streamed, *_) = ops.nodes_of(schedule.backward, ops.update)
    update.args = (streamed.args[0], *update.args[1:])
    assert HazardKind.WRONG_UPDATE in {hazard.kind for hazard in hazards(schedule)}


def test_a_resident_bucket_that_is_not_updated_is_found() -> None:
    schedule, update = _schedule()
    update.replace_all_uses_with(update.prev)
    schedule.backward.erase_node(update)
    assert HazardKind.NOT_UPDATED in {hazard.kind for hazard in hazards(schedule)}


def test_a_resident_bucket_may_not_be_offloaded() -> None:
    schedule, update = _schedule()
    (brought, *_) = ops.nodes_of(schedule.backward, ops.offload_state)
    brought.args = (update.args[0], *brought.args[1:])
    assert HazardKind.WRONG_UPDATE in {hazard.kind for hazard in hazards(schedule)}
