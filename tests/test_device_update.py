"""Buckets that the backward hands over, and `optimizer.step()` updates on the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.optim import SGD, AdamW, Optimizer

from megacompile import megacompile, schedules, updates
from megacompile.errors import OptionError, OptionTypeError
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.updates.flight import Flight
from megacompile.verify.hazard import HazardKind
from megacompile.verify.proof import hazards
from tests import inside
from tests.training import adamw, data, net, schedulers, sgd, train
from tests.zoo import assert_close, twins

SHARE = 0.7  # of the parameters of `net()`: the embedding and layers
CLOSE = 1e-4  # Adam makes whole steps of small gradients, with what they were rounded by
THERE = {"embed", "layers.0", "layers.1"}  # what the backward leaves


def pair(make: Callable[..., list[Optimizer]] = adamw, **options: Any) -> Any:
    """A plain model and a streamed one that hands over, with an optimizer each."""
    plain, streamed = twins(net(), lowering="inductor", device_update=SHARE, **options)
    return (plain, make(plain)), (streamed, make(streamed))


def there(model: nn.Module) -> set[str]:
    """The buckets whose last update was made on the device."""
    return {name for name, way in updates(model).items() if way == "on the device"}


def step(model: nn.Module, optimizers: list[Optimizer], i: int) -> None:
    model(**data(i)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "make",
    [adamw, lambda m: [SGD(m.parameters(), lr=1e-3)], lambda m: sgd(m, momentum=0.9)],
    ids=["adamw", "sgd", "momentum"],
)
def test_ten_steps_are_the_stock_ones(make: Callable[..., list[Optimizer]]) -> None:
    """Groups, clipping, accumulation and a scheduler; the first step learns the states."""
    plain, streamed = pair(make)
    for model, optimizers in (plain, streamed):
        train(model, optimizers, of=schedulers(optimizers))
    assert there(streamed[0]) == THERE
    assert_close(plain[0], streamed[0], tolerance=CLOSE)
    for want, got in zip(plain[1], streamed[1], strict=True):
        saved, here = want.state_dict()["state"], got.state_dict()["state"]
        assert saved.keys() == here.keys()
        for key in saved:
            for name, value in saved[key].items():
                assert (here[key][name] - value).norm() <= 1e-4 * value.norm()


def test_the_schedule_shows_it() -> None:
    _, (model, optimizers) = pair()
    step(model, optimizers, 0)
    schedule: Schedule = schedules(model)[0]
    assert {bucket.name for bucket in map(bucket_updated, updates_of(schedule))} == THERE
    table, text = schedule.table(), str(schedule)
    assert "0OFFLOAD_STATE" in table[table.index("update") :]
    assert any("updates buckets" in reason for reason in schedule.plan.reasons)
    backward, update = text[text.index("def run_backward") :].split("def run_update")
    kept = [line for line in backward.splitlines() if line.strip().startswith(("del", "wait"))]
    assert not any(" s0" in line or "_s0" in line for line in kept)
    assert "new0 = update(bucket_0, None," in update


def updates_of(schedule: Schedule) -> list[fx.Node]:
    """The updates on the device of what the backward leaves."""
    assert schedule.update is not None
    return ops.nodes_of(schedule.update, ops.update)


def bucket_updated(node: fx.Node) -> Bucket:
    bucket: Bucket = ops.arguments(node)[0]
    return bucket


def _planted(fault: Callable[[Schedule], None]) -> list[HazardKind]:
    """What `verify` finds in a schedule with updates on the device, with a fault in it."""
    _, (model, optimizers) = pair()
    step(model, optimizers, 0)
    broken = schedules(model)[0].copy()
    fault(broken)
    return [hazard.kind for hazard in hazards(broken)]


def _free_what_is_left(schedule: Schedule) -> None:
    assert schedule.backward is not None
    output = schedule.backward.output_node()
    with schedule.backward.inserting_before(output):
        ops.call(schedule.backward, ops.free, ops.returned(schedule.backward)[1][1], after=())


def _swap_states(schedule: Schedule) -> None:
    first, second, *_ = updates_of(schedule)
    a, b = ops.arguments(first), ops.arguments(second)
    first.args, second.args = (*a[:3], b[3]), (*b[:3], a[3])


def _swap_gradients(schedule: Schedule) -> None:
    first, second, *_ = updates_of(schedule)
    a, b = ops.arguments(first), ops.arguments(second)
    first.args, second.args = (*a[:2], b[2], a[3]), (*b[:2], a[2], b[3])


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (_free_what_is_left, HazardKind.DOUBLE_FREE),
        (_swap_states, HazardKind.WRONG_STATE),
        (_swap_gradients, HazardKind.WRONG_GRADIENTS),
    ],
)
def test_verify_finds_it(fault: Callable[[Schedule], None], kind: HazardKind) -> None:
    assert kind in _planted(fault)


def _half(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(0.5)


def _half_data(param: nn.Parameter) -> None:
    param.data.mul_(0.5)


def _half_grad(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad.mul_(torch.full_like(param.grad, 0.5))


def _new_grad(param: nn.Parameter) -> None:
    param.grad = torch.ones_like(param)


def _no_grad(param: nn.Parameter) -> None:
    param.grad = None


def _grad_of_another(param: nn.Parameter, model: Any) -> None:
    param.grad = model.layers[0].up.weight.grad


EDITS = {
    "parameter": _half,
    "p.data": _half_data,
    "gradient": _half_grad,
    "another gradient": _new_grad,
    "no gradient": _no_grad,
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_is_changed_before_the_step_is_seen(edit: str) -> None:
    """Its bucket is updated on the host; the others are not reused up."""
    both = pair()
    for model, optimizers in both:
        step(model, optimizers, 0)
        step(model, optimizers, 1)
        model(**data(2)).backward()
        EDITS[edit](model.layers[1].up.weight)
        for optimizer in optimizers:
            optimizer.step()
    assert there(both[1][0]) == THERE - {"layers.1"}
    assert_close(both[0][0], both[1][0], tolerance=CLOSE)


@pytest.mark.parametrize("how", ["in place", "replaced", "loaded", "by an alias"])
def test_states_that_are_changed_before_the_step_are_seen(how: str) -> None:
    both = pair()
    for model, (optimizer,) in both:
        step(model, [optimizer], 0)
        alias = optimizer.state[model.layers[1].up.weight]["exp_avg"].view(-1)
        step(model, [optimizer], 1)
        if how != "by an alias":
            del alias
        model(**data(2)).backward()
        state = optimizer.state[model.layers[1].up.weight]
        if how == "in place":
            state["exp_avg"].mul_(2)
        elif how == "replaced":
            state["exp_avg"] = state["exp_avg"] * 2
        elif how == "loaded":
            saved = optimizer.state_dict()
            for entry in saved["state"].values():
                entry["exp_avg"] = entry["exp_avg"] * 2
            optimizer.load_state_dict(saved)
        else:
            alias.mul_(2)
        optimizer.step()
    want = set() if how == "loaded" else THERE - {"layers.1"}
    assert there(both[1][0]) == want
    assert_close(both[0][0], both[1][0], tolerance=CLOSE)


def test_accumulation_takes_the_sum() -> None:
    both = pair()
    for model, optimizers in both:
        for i in range(4):
            model(**data(2 * i)).backward()
            step(model, optimizers, 2 * i + 1)
    assert there(both[1][0]) == THERE
    assert_close(both[0][0], both[1][0], tolerance=CLOSE)


def test_gradients_can_be_read_after_the_step() -> None:
    both = pair()
    for model, (optimizer,) in both:
        for i in range(3):
            optimizer.zero_grad()
            model(**data(i)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
    for want, got in zip(both[0][0].parameters(), both[1][0].parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None)
        if want.grad is not None:
            torch.testing.assert_close(got.grad + 0, want.grad, rtol=1e-5, atol=1e-8)


def test_a_backward_that_hands_nothing_over_withdraws() -> None:
    """`autograd.grad` of the same parameters in between leaves the offer; a backward does not."""
    both = pair()
    for model, optimizers in both:
        step(model, optimizers, 0)
        step(model, optimizers, 1)
        model(**data(2)).backward()
        torch.autograd.grad(model(**data(3)), [model.layers[1].up.weight])
        for optimizer in optimizers:
            optimizer.step()
    assert_close(both[0][0], both[1][0], tolerance=CLOSE)


def test_8_bit_states_and_stochastic_rounding() -> None:
    model = net().bfloat16()
    megacompile(
        model,
        device="cpu",
        lowering="inductor",
        device_update=SHARE,
        state_dtype=torch.float32,
        stochastic_rounding=True,
    )
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for i in range(3):
        loss = model(
            **{k: v.bfloat16() if v.is_floating_point() else v for k, v in data(i).items()}
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert there(model) == THERE
    assert optimizer.state[model.embed.weight]["exp_avg"].dtype == torch.float32


def test_float32_masters() -> None:
    both = pair(compute_dtype=torch.bfloat16)
    for model, optimizers in both:
        for i in range(4):
            step(model, optimizers, i)
    assert there(both[1][0]) == THERE
    for bucket in inside.buckets(both[1][0]).values():
        for master, copy in zip(bucket.values, bucket.streamed, strict=True):
            assert torch.equal(master.to(copy.dtype), copy)


def test_the_default_on_the_cpu_hands_nothing_over() -> None:
    _, streamed = twins(net(), lowering="inductor")
    step(streamed, [SGD(streamed.parameters(), lr=0.1)], 0)
    assert schedules(streamed)[0].plan.device_update == frozenset()


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range(value: float) -> None:
    with pytest.raises(OptionError, match="device_update"):
        megacompile(net(), device="cpu", lowering="inductor", device_update=value)


def test_a_share_of_the_wrong_type_or_in_the_wrong_mode() -> None:
    with pytest.raises(OptionTypeError, match="device_update"):
        megacompile(net(), device="cpu", lowering="inductor", device_update="all")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="eager"):
        megacompile(net(), device="cpu", lowering="eager", device_update=0.5)
    model = net()
    with pytest.raises(OptionError, match="optimizer="):
        megacompile(
            model,
            device="cpu",
            lowering="inductor",
            device_update=0.5,
            optimizer=AdamW(model.parameters()),
        )


# What the next forward does with it.


def test_its_memory_is_taken_back_in_the_forward() -> None:
    """Behind the middle, and behind the last stage that reads what the device has updated."""
    _, (model, optimizers) = pair()
    step(model, optimizers, 0)
    schedule: Schedule = schedules(model)[0]
    actions = ops.actions(schedule.forward).split()
    readers = [actions.index(f"{stage}F") for stage in (0, 1, 2)]
    assert max(readers) < actions.index("DRAIN") < actions.index("4F")
    _, (other, optimizers) = twins_that_keep()
    step(other, optimizers, 0)
    assert "DRAIN" not in ops.actions(schedules(other)[0].forward)


def twins_that_keep() -> Any:
    plain, streamed = twins(net(), lowering="inductor", device_update=0)
    return (plain, adamw(plain)), (streamed, adamw(streamed))


def test_what_is_on_its_way_lands_before_its_memory_goes() -> None:
    _, (model, optimizers) = pair()
    step(model, optimizers, 0)
    machine = inside.machine(model)
    bucket = machine.buckets[0]
    bucket.pending.settle()
    future: Future[None] = Future()
    bucket.pending.start(Flight(future, "embed", {0: torch.ones(1)}), [0], [])
    machine.device_update.flying.append(bucket)
    threading.Timer(0.1, future.set_result, [None]).start()
    machine.device_update.wait_for_copies()
    assert future.done()
    assert bucket.pending.in_flight is None and machine.device_update.flying == []


def test_states_that_were_made_for_the_host_are_locked_when_a_copy_is_foreseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another plan may hand over other buckets; copies of pageable memory would block the link."""
    locked: list[HostBuffer] = []
    monkeypatch.setattr(HostBuffer, "lock", lambda buffer: locked.append(buffer))
    _, (model, optimizers) = pair()
    for bucket in inside.buckets(model).values():
        bucket.pin = True  # as on a GPU
    step(model, optimizers, 0)
    locked.clear()
    step(model, optimizers, 1)
    held = {
        id(buffer())
        for bucket in inside.buckets(model).values()
        if bucket.layout.name in THERE
        for owned in bucket.states._owned.values()
        for buffer in owned.buffers
    }
    assert {id(buffer) for buffer in locked} == held
    assert len(held) == 2 * len(THERE)


def test_locking_keeps_what_is_there() -> None:
    buffer = HostBuffer(2**16, pin=False)
    values = buffer.bytes(2**16)
    values.fill_(7)
    calls: list[tuple[int, int, int]] = []

    class Runtime:
        def cudaHostRegister(self, *args: int) -> int:
            calls.append(args)  # type: ignore[arg-type]
            return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", Runtime)
        buffer.lock()
        buffer.lock()
    assert calls == [(values.data_ptr(), 2**16, 0)]
    assert bool(values.eq(7).all())


@pytest.mark.gpu
def test_late_locking_on_the_gpu() -> None:
    buffer = HostBuffer(2**20, pin=False)
    values = buffer.bytes(2**20)
    values.fill_(7)
    assert not values.is_pinned()
    buffer.lock()
    assert values.is_pinned()
    assert bool(values.cuda(non_blocking=True).eq(7).all())
