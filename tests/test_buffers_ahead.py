"""Host buffers that are made in the background, before anybody asks for them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megacompile import megacompile
from megacompile.errors import HostMemoryError
from megacompile.host_memory import MARGIN_BYTES
from megacompile.ir.schedule import Schedule
from megacompile.runtime.device import activations, buffers_ahead, host_budget
from megacompile.runtime.device.activations import HostPool
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.buffers_ahead import BuffersAhead, Wanted
from megacompile.runtime.device.host_budget import HostBudget
from tests import inside
from tests.test_activations import loss, offloading

CPU = torch.device("cpu")
PAGE = 4096


def plain_buffer(wanted: Wanted) -> HostBuffer:
    return HostBuffer(wanted.size_bytes, pin=wanted.pin)


class Slow:
    """Makes buffers once it `may`."""

    def __init__(self) -> None:
        self.began, self.may = threading.Event(), threading.Event()
        self.made: list[int] = []

    def __call__(self, wanted: Wanted) -> HostBuffer:
        self.began.set()
        assert self.may.wait(60)
        self.made.append(wanted.size_bytes)
        return plain_buffer(wanted)


def done(ahead: BuffersAhead | None) -> None:
    """Everything that it was given is made."""
    assert ahead is not None
    over = threading.Event()
    ahead._thread.submit(over.set)
    assert over.wait(60)


def test_a_buffer_is_given_to_who_asks_for_its_size_once() -> None:
    ahead = BuffersAhead(plain_buffer)
    ahead.begin([Wanted(PAGE, pin=False), Wanted(2 * PAGE, pin=False)])
    done(ahead)
    assert ahead.take(PAGE, pin=True) is None and ahead.take(3 * PAGE, pin=False) is None
    taken = ahead.take(PAGE, pin=False)
    assert taken is not None and len(taken) == PAGE
    assert ahead.take(PAGE, pin=False) is None


def test_what_is_not_begun_is_left_to_who_asks_and_what_is_begun_is_waited_for() -> None:
    slow = Slow()
    ahead = BuffersAhead(slow)
    ahead.begin(Wanted(n * PAGE, pin=False) for n in (1, 2, 2, 3))
    assert slow.began.wait(60)
    assert ahead.take(2 * PAGE, pin=False) is None, "the first of two"
    timer = threading.Timer(0.05, slow.may.set)
    timer.start()
    assert ahead.take(PAGE, pin=False) is not None
    timer.join()
    done(ahead)
    assert slow.made == [PAGE, 2 * PAGE, 3 * PAGE]
    assert ahead.take(2 * PAGE, pin=False) is not None


def test_what_nobody_will_ask_for_is_not_made() -> None:
    slow = Slow()
    ahead = BuffersAhead(slow)
    ahead.begin(Wanted(n * PAGE, pin=False) for n in (1, 2, 3))
    assert slow.began.wait(60)
    ahead.forget()
    slow.may.set()
    done(ahead)
    assert slow.made == [PAGE] and ahead.take(PAGE, pin=False) is None


def test_a_failure_is_not_told() -> None:
    def fails(wanted: Wanted) -> HostBuffer:
        raise HostMemoryError("none left")

    ahead = BuffersAhead(fails)
    ahead.begin([Wanted(PAGE, pin=False)])
    done(ahead)
    assert ahead.take(PAGE, pin=False) is None


def test_at_the_end_of_the_process_nothing_more_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_ahead, "is_over", lambda: True)
    ahead = BuffersAhead(plain_buffer)
    ahead.begin([Wanted(PAGE, pin=False)])
    done(ahead)
    assert ahead.take(PAGE, pin=False) is None


# --- with a budget


def test_the_budget_counts_it_once() -> None:
    budget = HostBudget(4 * PAGE)
    budget.make_ahead([Wanted(2 * PAGE, pin=False)], "states", CPU)
    done(budget._ahead)
    assert budget.held_bytes == 2 * PAGE
    mine = budget.make(2 * PAGE, "mine", pin=False)
    assert budget.held_bytes == 2 * PAGE == len(mine)


def test_what_nobody_asks_for_makes_room() -> None:
    budget = HostBudget(4 * PAGE)
    budget.make_ahead([Wanted(3 * PAGE, pin=False)], "states", CPU)
    done(budget._ahead)
    mine = budget.make(4 * PAGE, "mine", pin=False)
    assert budget.held_bytes == len(mine)
    with pytest.raises(HostMemoryError, match="host_memory is 16 KiB; 16 KiB of it are taken"):
        budget.make(PAGE, "more", pin=False)


def test_a_budget_that_is_gone_gets_nothing() -> None:
    began, may = threading.Event(), threading.Event()
    budget = HostBudget()
    budget.make_ahead([], "states", CPU)
    ahead = budget._ahead
    assert ahead is not None

    def busy() -> None:
        began.set()
        assert may.wait(60)

    ahead._thread.submit(busy)
    ahead.begin([Wanted(PAGE, pin=False)])
    assert began.wait(60)
    del budget
    may.set()
    done(ahead)
    assert ahead.take(PAGE, pin=False) is None


# --- of a model


AHEAD = "saved tensors, gradients and optimizer states"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The buffers that are made: for what, and their bytes. None is really page-locked."""
    found: list[tuple[str, int]] = []

    class Buffer(HostBuffer):
        def lock(self) -> None:
            """There is no CUDA."""

    def new(size_bytes: int, what: str, _: Callable[[], HostBuffer]) -> HostBuffer:
        found.append((what, size_bytes))
        return Buffer(size_bytes, pin=False)

    monkeypatch.setattr(host_budget, "_made", new)
    return found


def trained(made: list[tuple[str, int]], steps: int, **options: Any) -> tuple[Any, Any]:
    """(a model whose buckets are as if a GPU copied from them, its optimizer), trained for some
    steps beside the plain one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    plain, streamed = copy.deepcopy(model), model
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, streamed)]
    if options.pop("in_backward", False):
        options["optimizer"] = optimizers[1]
    streamed = megacompile(streamed, device="cpu", progress=False, **options)
    for bucket in inside.machine(streamed).buckets.values():
        bucket.pin = True
    del made[:]
    for i in range(steps):
        for each, optimizer in zip((plain, streamed), optimizers, strict=True):
            torch.manual_seed(i)
            loss = each(torch.randn(2, 64)).square().sum()
            if each is streamed and not i:  # what is not begun would be made by who asks for it
                done(inside.machine(streamed).host_budget._ahead)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if "state_dtype" not in options:
        for p, q in zip(plain.parameters(), streamed.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    return streamed, optimizers[1]


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "int8"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_first_step_finds_its_memory(
    made: list[tuple[str, int]], in_backward: bool, state_dtype: Any
) -> None:
    options = {} if state_dtype is None else {"state_dtype": state_dtype}
    if not in_backward:
        options["lowering"] = "inductor"  # else the optimizer's own step makes states
    model, optimizer = trained(made, 1, in_backward=in_backward, **options)
    machine = inside.machine(model)
    done(machine.host_budget._ahead)
    kinds = {what for what, _ in made}
    parameters = sum(bucket.layout.size_bytes for bucket in machine.buckets.values())
    size = sum(size for _, size in made)
    assert kinds == {AHEAD}, "nothing else was made"
    assert size == machine.host_budget.held_bytes - parameters, "and nothing of it was for nothing"
    numel = sum(param.numel() for param in model.parameters())
    least = {None: 8.0, torch.bfloat16: 4.0, "int8": 2.0}[state_dtype] + 4.0 * (not in_backward)
    assert numel * least <= size < 1.2 * numel * least and optimizer.state


def test_the_first_forward_finds_the_memory_of_what_it_saves(made: list[tuple[str, int]]) -> None:
    """It is made behind the plan, ahead of that of gradients, and only once."""
    _, model = offloading()
    machine = inside.machine(model)
    machine.activations.pin = True
    make_ahead = machine.make_ahead

    def all_of_it(schedule: Schedule) -> None:
        make_ahead(schedule)
        done(machine.host_budget._ahead)

    machine.make_ahead = all_of_it
    del made[:]

    def step() -> None:
        loss(model, 0).backward()

    with mock.patch.object(HostPool, "_make", autospec=True, side_effect=HostPool._make) as asked:
        step()
        lent = asked.call_count
        step()
    sizes = sorted(call.args[1] for call in asked.call_args_list)
    assert lent == asked.call_count > 1, "a second step asks for nothing"
    assert sorted(size for what, size in made if what == AHEAD) == sizes, "all of it, and no more"
    assert "what waits for its backward" not in dict(made)


def test_memory_made_ahead_for_others_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for its backward comes before what nobody has asked for."""
    budget = HostBudget()
    pool = HostPool(pin=False, budget=budget)
    budget.make_ahead([Wanted(2 * PAGE, pin=False)], "states", CPU)
    done(budget._ahead)

    def free() -> int:
        return MARGIN_BYTES + (2 if budget._ahead is not None else 5) * PAGE

    monkeypatch.setattr(activations, "available_bytes", free)
    lent = pool.lend(4 * PAGE)
    assert lent.size_bytes == 4 * PAGE
    assert budget.held_bytes == 4 * PAGE


def test_a_second_step_gives_back_what_was_not_needed(made: list[tuple[str, int]]) -> None:
    model, first = trained(made, 1)
    budget = inside.machine(model).host_budget
    held = budget.held_bytes
    budget.make_ahead([Wanted(PAGE, pin=False)], AHEAD, CPU)
    done(budget._ahead)
    assert budget.held_bytes == held + PAGE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
    assert budget.held_bytes == held and budget._ahead is None and first.state


@pytest.mark.parametrize("later", ["optimizer", "stock"])
def test_states_that_nobody_knows_of_are_not_guessed(
    made: list[tuple[str, int]], later: str
) -> None:
    """The optimizer comes behind the first call, or makes its states itself (eager lowering)."""
    model = megacompile(nn.Linear(64, 64), device="cpu", progress=False, lowering="eager")
    for bucket in inside.machine(model).buckets.values():
        bucket.pin = True
    optimizer = torch.optim.AdamW(model.parameters()) if later == "stock" else None
    del made[:]
    model(torch.randn(2, 64)).sum().backward()
    done(inside.machine(model).host_budget._ahead)
    del optimizer
    assert [what for what, _ in made] == [AHEAD], "its gradients"


def test_what_only_evaluates_gets_nothing(made: list[tuple[str, int]]) -> None:
    model = megacompile(nn.Linear(64, 64), device="cpu", progress=False)
    for bucket in inside.machine(model).buckets.values():
        bucket.pin = True
    optimizer = torch.optim.AdamW(model.parameters())
    del made[:]
    with torch.no_grad():
        model(torch.randn(2, 64))
    assert not made and optimizer.param_groups
