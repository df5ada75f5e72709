"""What becomes of activations: every choice is bitwise the plain model, in whatever order.

And what waits on the host: its memory, and the device memory that it gives back.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.test_numbers import assert_same
from torch import Tensor, nn

from megacompile import HostMemoryError, compat, megacompile, schedules
from megacompile.ir import ops
from megacompile.ir.schedule import Plan, Schedule
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.schedule.plan import make_plan
from megacompile.plan import pipeline
from megacompile.runtime.device import activations
from megacompile.runtime.device.activations import HostPool, OnHost, taken
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.ops.bound import BoundOps
from tests import cases, inside, zoo
from tests.zoo import Stack, batch, loss_of, twins

CPU = torch.device("cpu")
CHOICES = ["keep", "selective", "recompute", "offload"]
Model = Any  # a megacompiled module


def pool(model: Model) -> HostPool:
    found: HostPool = inside.machine(model).activations
    return found


def offloading(layers: int = 5, **options: Any) -> tuple[Any, Any]:
    """(plain, streamed with activations that wait on the host)."""
    torch.manual_seed(0)
    model = Stack(layers=layers, block=lambda: zoo.Block(dropout=0.2))
    return twins(model, **{"activations": "offload", "lookahead": 1, **options})


# --- numbers


NAMED: list[Any] = [
    pytest.param(name, choice, marks=[pytest.mark.thorough] if name in cases.LONG else [])
    for name in cases.CASES
    for choice in ("selective", "offload")
]
NAMED += [(name, "keep") for name in ("demo gpt", "batch norm", "tied", "shared layer", "dropout")]


@pytest.mark.parametrize(("name", "choice"), NAMED)
def test_every_choice_is_bitwise_the_plain_model(name: str, choice: str) -> None:
    """Two steps, the second of which accumulates into the first."""
    case = cases.build(name)
    plain = copy.deepcopy(case.model)
    model: Model = megacompile(
        case.model, device="cpu", lowering="eager", lookahead=1, activations=choice
    )
    for i in range(2):
        losses = []
        for each in (plain, model):
            torch.manual_seed(i)
            loss = case.loss(each, i, CPU)
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses), f"loss {i}"
        assert_same(plain, model)
    waited = any(ops.nodes_of(each.forward, ops.offload_saved) for each in schedules(model))
    assert bool(pool(model).peak_bytes) == (choice == "offload" and name != "graph break")
    assert waited == bool(pool(model).peak_bytes)
    assert pool(model).held_bytes == pool(model).peak_bytes and pool(model).lent_bytes == 0


@pytest.mark.parametrize("name", ["demo gpt", "batch norm", "shared layer", "tied", "dropout"])
def test_some_stages_keep_half(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plans choose it: the last ones, beside others that are computed again whole."""

    def make(schedule: Schedule, *, keep: int, halves: bool, **options: Any) -> Schedule:
        keep = min(keep, 1) * (len(schedule.stages) + 1) // 2
        return make_plan(schedule, keep=keep, halves=True, **options)

    monkeypatch.setattr(pipeline, "make_plan", make)
    case = cases.build(name)
    plain, model = twins(case.model, lookahead=1)
    for i in range(2):
        for each in (plain, model):
            torch.manual_seed(i)
            case.loss(each, i, CPU).backward()
        assert_same(plain, model)
    (schedule, *_) = schedules(model)
    assert schedule.plan.saved_fractions and len(schedule.plan.keep) < len(schedule.stages)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_choice_is_what_runs(choice: str) -> None:
    _, model = offloading(activations=choice)
    loss_of(model(**batch())).backward()
    (schedule,) = schedules(model)
    assert schedule.backward is not None
    again = len(ops.nodes_of(schedule.backward, ops.recompute))
    assert (again > 0) == (choice in ("recompute", "offload"))
    fractions = {stage.traced.saved_fraction for stage in schedule.stages}
    assert fractions == ({0.5, 1.0} if choice == "selective" else {1.0})


def planned(monkeypatch: pytest.MonkeyPatch, change: Callable[[Schedule, bool], Plan]) -> None:
    """Let `change(schedule, keep_last)` make the plans."""
    plain = make_plan

    def make(schedule: Schedule, *, keep: int, **options: Any) -> Schedule:
        made = plain(schedule, keep=keep, **options)
        if schedule.backward is None:
            return made
        return replace(made, plan=change(schedule, bool(keep)))

    monkeypatch.setattr(pipeline, "make_plan", make)


def everything(schedule: Schedule, keep_last: bool) -> Plan:
    """Stages in turn are kept whole, kept in part and recomputed; all but the last two wait."""
    able = [stage.index for stage in schedule.stages if stage.traced.has_backward]
    keep = frozenset(i for i in able if i % 3 and keep_last)
    fractions = tuple((i, 0.4) for i in sorted(keep) if i % 3 == 1)
    return Plan(keep, offload=frozenset(range(len(schedule.stages) - 2)), saved_fractions=fractions)


@pytest.mark.parametrize("name", ["demo gpt", "batch norm", "shared layer", "tied", "dropout"])
def test_a_mixed_plan_is_bitwise_the_plain_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved tensors wait on the host too, whole and in part."""
    planned(monkeypatch, everything)
    case = cases.build(name)
    plain, model = twins(case.model, lookahead=1)
    for i in range(2):
        for each in (plain, model):
            torch.manual_seed(i)
            case.loss(each, i, CPU).backward()
        assert_same(plain, model)
    (schedule,) = schedules(model)
    waiting = [node.name for node in ops.nodes_of(schedule.forward, ops.offload_saved)]
    assert any(each.startswith("s") for each in waiting) and any(each[0] == "y" for each in waiting)


@pytest.mark.skipif(not compat.has_cpp_compiler(), reason="Inductor needs a C++ compiler")
def test_a_mixed_plan_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, everything)
    torch.manual_seed(0)
    plain, model = twins(Stack(layers=4), lookahead=1, lowering="inductor", progress=False)
    for i in range(2):
        for each in (plain, model):
            loss(each, i).backward()
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert pool(model).peak_bytes


@pytest.mark.parametrize("guessed", [True, False], ids=["only the guess", "only the other"])
def test_a_backward_that_is_planned_otherwise_is_right_too(
    guessed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward left on the host what this backward looks for on the device, or other way."""

    def plan(schedule: Schedule, keep_last: bool) -> Plan:
        return Plan(offload=frozenset(range(4)) if keep_last is guessed else frozenset())

    planned(monkeypatch, plan)
    torch.manual_seed(0)
    plain, model = twins(Two(), lookahead=1)
    x = batch()["x"]
    for each in (plain, model):
        each(x)[1].sum().backward()
    zoo.assert_same(plain, model)
    assert pool(model).peak_bytes


class Skips(nn.Module):
    """Like a U-Net: what early layers give is read by late ones, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        down = []
        for layer in self.layers[:4]:
            x = layer(x).tanh()
            down.append(x)
        for layer in self.layers[4:]:
            x = layer(x * down.pop()).tanh()
        return x.square().mean()


@pytest.mark.parametrize("choice", CHOICES)
def test_skips_over_stages(choice: str) -> None:
    torch.manual_seed(0)
    plain, model = twins(Skips(), activations=choice, lookahead=1)
    x = torch.randn(3, 8)
    for _ in range(2):
        for each in (plain, model):
            each(x).backward()
        zoo.assert_same(plain, model)
    assert bool(pool(model).peak_bytes) == (choice == "offload")


def test_a_long_sequence() -> None:
    """2048 tokens through four layers of attention."""
    torch.manual_seed(0)
    net = cases.demo().GPT(layers=4, width=16, heads=2, context=2048)
    plain, model = twins(net, activations="offload", lookahead=1)
    ids = torch.randint(0, 64, (1, 2048))
    for each in (plain, model):
        each(ids, ids.roll(-1, 1))[1].backward()
    zoo.assert_same(plain, model)
    assert pool(model).peak_bytes >= 2 * 2048 * 16 * 4


def test_updates_in_the_backward() -> None:
    torch.manual_seed(0)
    net = Stack(layers=4)
    plain = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = megacompile(
        net, device="cpu", lowering="eager", optimizer=optimizer, activations="offload", lookahead=1
    )
    trains_alike(plain, model, optimizer)
    assert pool(model).peak_bytes


def trains_alike(plain: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Three steps of AdamW in both; `optimizer` is the model's. Equal but for rounding."""
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for i in range(3):
        for each, step in ((plain, reference), (model, optimizer)):
            loss_of(each(**batch(i))).backward()
            step.step()
            step.zero_grad()
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


# --- forwards and backwards in any order


def loss(model: Model, i: int) -> Tensor:
    torch.manual_seed(i)
    return loss_of(model(**batch(i)))


def retained(model: Model) -> None:
    once = loss(model, 0)
    once.backward(retain_graph=True)
    once.backward()


def first_then_second(model: Model) -> None:
    one, two = loss(model, 0), loss(model, 1)
    one.backward()
    two.backward()


def second_then_first(model: Model) -> None:
    one, two = loss(model, 0), loss(model, 1)
    two.backward()
    one.backward()


def retained_around_another(model: Model) -> None:
    """The second backward of the first forward comes when its memory could have been lent."""
    one = loss(model, 0)
    one.backward(retain_graph=True)
    loss(model, 1).backward()
    one.backward()


def one_never_comes(model: Model) -> None:
    lost = loss(model, 0)
    del lost
    gc.collect()
    loss(model, 1).backward()


def evaluated_in_between(model: Model) -> None:
    one = loss(model, 0)
    with torch.no_grad():
        loss(model, 1)
    one.backward()


ORDERS: list[Callable[[Model], None]] = [
    retained,
    first_then_second,
    second_then_first,
    retained_around_another,
    one_never_comes,
    evaluated_in_between,
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("choice", ["selective", "offload"])
def test_any_order_is_bitwise_the_plain_model(choice: str, order: Callable[[Model], None]) -> None:
    plain, model = offloading(activations=choice)
    for _ in range(2):
        order(plain)
        order(model)
        zoo.assert_same(plain, model)
        poison(pool(model))
    assert pool(model).lent_bytes == 0
    assert pool(model).held_bytes == pool(model).peak_bytes


def poison(of: HostPool) -> None:
    """NaN where nobody has anything: what is read there shows."""
    assert of.held_bytes == sum(buffer.size_bytes for buffer in of._free)
    for buffer in of._free:
        buffer.memory.bytes(buffer.size_bytes).fill_(255)


class Two(nn.Module):
    """Gives a loss and a prediction: the guess is that the loss gets the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(layers=5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        prediction = self.stack(x)
        return prediction.square().mean(), prediction


@pytest.mark.parametrize("choice", CHOICES)
def test_a_backward_of_another_output(choice: str) -> None:
    """What the forward left is found, though another backward was expected."""
    torch.manual_seed(0)
    plain, model = twins(Two(), activations=choice, lookahead=1)
    x = batch()["x"]
    for _ in range(2):
        for each in (plain, model):
            each(x)[1].sum().backward()
        zoo.assert_same(plain, model)
        for each in (plain, model):
            sum(out.sum() for out in each(x)).backward()
        zoo.assert_same(plain, model)


def test_a_backward_that_was_planned_otherwise_finds_what_it_needs() -> None:
    of = HostPool(pin=False)
    value = torch.randn(3, 4)
    waiting = of.store(value, None)
    assert torch.equal(taken({"copy": waiting}, "y", {"copy": "y"}, of, None), value)
    stored = taken({"y": value}, "copy", {"copy": "y"}, of, None)
    assert isinstance(stored, OnHost) and torch.equal(stored.back(None), value)
    assert taken({"y": value}, "y", {}, of, None) is value
    with pytest.raises(KeyError):
        taken({"y": value}, "z", {}, of, None)


# --- memory


def held_bytes(output: Tensor) -> int:
    """Device bytes that a forward left for its backward, but for the user's inputs."""
    call: Any = output.grad_fn
    saved_values = call.call.saved_values
    inputs = call.call.inputs_by_name
    return sum(
        value.nbytes
        for name, value in saved_values.items()
        if isinstance(value, Tensor) and name not in inputs
    )


def test_device_memory_at_the_turn_does_not_grow_with_depth() -> None:
    def at_the_boundary(choice: str) -> list[int]:
        found = []
        for layers in (6, 12):
            _, model = offloading(layers, activations=choice)
            found.append(held_bytes(loss(model, 0)))
        return found

    few, many = at_the_boundary("offload")
    assert few == many > 0
    few, many = at_the_boundary("recompute")
    assert few < many


def test_device_memory_is_given_back_while_the_forward_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each offload, no more than the last few values are alive."""
    values: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    plain = BoundOps.offload_saved

    def offload(self: Any, stage: Any, value: Any) -> Any:
        values.append(weakref.ref(value.value))
        alive.append(sum(each() is not None for each in values))
        return plain(self, stage, value)

    monkeypatch.setattr(BoundOps, "offload_saved", offload)
    _, model = offloading(16)
    output = loss(model, 0)
    assert len(values) == 15
    assert max(alive) <= 3
    assert not any(each() is not None for each in values), "none is alive at the boundary"
    output.backward()


def test_host_memory_is_reused_from_step_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = offloading()
    loss(model, 0).backward()
    held = pool(model).held_bytes
    monkeypatch.setattr(activations, "HostBuffer", None)  # no buffer is made any more
    for i in range(3):
        loss(model, i).backward()
        lost = loss(model, i)
        del lost
    assert pool(model).held_bytes == held


def test_an_evaluation_offloads_nothing() -> None:
    _, model = offloading()
    model.eval()
    with torch.no_grad():
        loss(model, 0)
    assert pool(model).peak_bytes == 0


# --- the pool


def test_what_is_lent_is_not_lent_again() -> None:
    of = HostPool(pin=False)
    first, second = torch.full((100,), 1.0), torch.full((100,), 2.0)
    one, two = of.store(first, None), of.store(second, None)
    assert torch.equal(one.back(None), first) and torch.equal(two.back(None), second)
    assert (of.lent_bytes, of.held_bytes, of.peak_bytes) == (800, 800, 800)
    del one
    assert (of.held_bytes, of.lent_bytes) == (800, 400)
    three = of.store(first, None)
    assert of.held_bytes == 800 and torch.equal(two.back(None), second)
    del two, three
    assert (of.held_bytes, of.lent_bytes) == (800, 0)


def test_a_smaller_value_takes_a_larger_buffer_but_not_a_huge_one() -> None:
    of = HostPool(pin=False)
    of.store(torch.zeros(1000), None)  # 4000 bytes, and free again
    half = of.store(torch.ones(500), None)
    assert of.held_bytes == 4000 and torch.equal(half.back(None), torch.ones(500))
    del half
    few = of.store(torch.ones(499), None)
    assert of.held_bytes == 1996, "the larger one went: no more is held than was in use at once"
    assert torch.equal(few.back(None), torch.ones(499))


def test_no_more_is_held_than_was_in_use_at_once() -> None:
    of = HostPool(pin=False)
    for size in (100, 1000, 30, 700, 5, 300):
        together = [of.store(torch.zeros(size), None) for _ in range(3)]
        assert of.held_bytes <= of.peak_bytes
        del together
    assert of.peak_bytes == 12000


def test_too_little_host_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "available_bytes", lambda: 300 * 2**20)
    of = HostPool(pin=False)
    small = of.store(torch.zeros(2**20), None)
    with pytest.raises(HostMemoryError) as raised:
        of.store(torch.zeros(20 * 2**20), None)
    assert str(raised.value) == (
        "offloading activations: 80 MiB more are needed on the host, beside 4 MiB that wait there, "
        "and 44 MiB are available; use activations='recompute', or a smaller batch"
    )
    assert of.lent_bytes == small.buffer.size_bytes
    assert of.held_bytes == 4 * 2**20


TENSORS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "expanded": lambda: torch.randn(3, 1).expand(3, 50),
    "a part": lambda: torch.randn(6, 12)[1:4, 2:9],
    "every other": lambda: torch.randn(40)[::2],
    "a row": lambda: torch.randn(4, 7)[2],
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(3, 0, 2),
    "bool": lambda: torch.randn(3, 5) > 0,
    "int64": lambda: torch.arange(7),
    "bf16": lambda: torch.randn(9).bfloat16(),
    "complex": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name: str) -> None:
    """Values and strides: these choose the kernels, and compiled code relies on them."""
    value = TENSORS[name]()
    of = HostPool(pin=False)
    waiting = of.store(value, None)
    assert of.lent_bytes <= value.numel() * value.element_size()
    wanted = value.clone()
    value = value.clone() if name == "expanded" else value.zero_()
    back = waiting.back(None)
    assert torch.equal(back, wanted)
    assert back.stride() == waiting.meta.stride == TensorMeta.of(TENSORS[name]()).stride
    assert back.dtype == wanted.dtype and back.shape == wanted.shape


def test_an_expanded_tensor_goes_once() -> None:
    of = HostPool(pin=False)
    kept = of.store(torch.randn(3, 1).expand(3, 50), None)
    assert of.lent_bytes == 12 and kept.empty().stride() == (1, 0)


def test_buffers_are_of_the_exact_size() -> None:
    of = HostPool(pin=False)
    kept = of.store(torch.zeros(33 * 2**18 + 3), None)
    size = 33 * 2**20 + 12
    assert kept.buffer.size_bytes == size
    assert isinstance(kept.buffer.memory, HostBuffer) and len(kept.buffer.memory) == size


@pytest.mark.parametrize("choice", ["selective", "offload", "keep"])
def test_choices_are_planned_for_too(choice: str) -> None:
    """A plan is sought by way of drafts, whose graphs are changed in place."""
    made = cases.build("dropout")
    plain, streamed = twins(made.model, activations=choice, gpu_memory="1GiB")
    for model in (plain, streamed):
        torch.manual_seed(0)
        for i in range(2):
            made.loss(model, i, torch.device("cpu")).backward()
    assert_same(plain, streamed)
