"""Parameters come to their buckets in the background, while the model is captured."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import compat, megacompile
from megacompile.runtime.model import buckets
from megacompile.runtime.params.fill import Fill
from tests import inside
from tests.zoo import Stack, batch, equal

MIB = 2**20


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA."""
    monkeypatch.setattr(buckets, "fills_later", lambda params, device: True)


@pytest.fixture
def gate(later: None, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is filled until it is opened."""
    opened = threading.Event()
    stock = Fill._fill

    def held(self: Fill) -> None:
        assert opened.wait(60), "somebody waits for values too early"
        stock(self)

    monkeypatch.setattr(Fill, "_fill", held)
    return opened


def model() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def in_flight(made: nn.Module) -> int:
    machine = inside.machine(made)
    return sum(isinstance(b.pending.in_flight, Fill) for b in machine.buckets.values())


def test_a_capture_waits_for_no_value_and_a_plan_for_all(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model()
    made = megacompile(copy.deepcopy(plain))
    captured: list[int] = []
    chosen: list[int] = []
    machine = inside.machine(made)
    stock = type(machine).await_parameters

    def await_parameters(self: Any) -> None:
        captured.append(in_flight(made))
        gate.set()
        stock(self)
        chosen.append(in_flight(made))

    monkeypatch.setattr(type(machine), "await_parameters", await_parameters)
    inputs = batch()
    expected, got = plain(**inputs), made(**inputs)
    assert captured == [len(machine.buckets)] and chosen == [0]
    assert equal(expected, got)
    expected.backward()
    got.backward()
    pairs = zip(plain.parameters(), made.parameters(), strict=True)
    assert all(equal(a, b) and equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.parametrize(
    "use",
    [
        lambda made: [p.detach().clone() for p in made.parameters()],
        lambda made: list(made.state_dict().values()),
        lambda made: list(copy.deepcopy(made).parameters()),
        lambda made: [p.data.clone() for p in made.parameters()],
    ],
    ids=["read", "state_dict", "deepcopy", "data"],
)
def test_who_uses_a_parameter_waits_for_it(
    use: Callable[[nn.Module], list[torch.Tensor]], later: None
) -> None:
    """Though no thread does the work: who waits does it."""
    plain = model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fill, "begin", lambda self, thread: None)
        made = megacompile(copy.deepcopy(plain))
    assert in_flight(made) == len(inside.machine(made).buckets)
    assert all(equal(a, b) for a, b in zip(plain.parameters(), use(made), strict=True))


def test_what_fails_leaves_the_values_where_they_were(
    later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised once. The next call moves them."""
    plain = model()

    monkeypatch.setattr(Fill, "begin", lambda self, thread: None)
    made = megacompile(copy.deepcopy(plain))
    for bucket in inside.machine(made).buckets.values():
        work = bucket.pending.in_flight
        assert isinstance(work, Fill)
        work.settle = pages_run_out
        with pytest.raises(OSError, match="no pages"):
            bucket.pending.settle()
    assert all(equal(a, b) for a, b in zip(plain.parameters(), made.parameters(), strict=True))
    inputs = batch()
    assert equal(plain(**inputs), made(**inputs))


def pages_run_out() -> None:
    raise OSError("no pages")


def test_parameters_of_a_class_of_their_own_are_waited_for(later: None) -> None:
    """Their class is guarded too: whoever reads them waits."""

    class Own(nn.Parameter):
        pass

    made = nn.Linear(4, 4)
    made.weight = Own(made.weight.detach().clone())
    expected = made.weight.detach().clone()
    megacompile(made)
    assert in_flight(made) == 1
    assert equal(expected, made.weight.detach())
    assert in_flight(made) == 0


@pytest.mark.parametrize("options", [{"compute_dtype": torch.bfloat16}, {"resident": "all"}])
def test_what_is_computed_from_the_values_comes_at_once(
    options: dict[str, Any], later: None
) -> None:
    """A copy that is streamed is made of them; what lives on the device goes no long way."""
    made = megacompile(model(), **options)
    assert in_flight(made) == 0


def test_on_a_gpu_as_much_must_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user does next may need the memory that the parameters leave."""

    class OnGpu:
        device = torch.device("cuda")
        nbytes = 3 * MIB

    there = [OnGpu(), OnGpu()]
    for free, expected in ((6 * MIB, True), (6 * MIB - 1, False)):
        monkeypatch.setattr(compat, "free_device_bytes", lambda device, free=free: free)
        assert buckets.fills_later(there, torch.device("cuda")) is expected  # type: ignore[arg-type]
    assert buckets.fills_later([torch.ones(3)], torch.device("cuda"))
    assert not buckets.fills_later([torch.ones(3)], torch.device("cpu"))
