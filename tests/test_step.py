"""`optimizer.step()` over streamed parameters, against the stock optimizer in the same run."""

from __future__ import annotations

import copy
import io
import os
import signal
import subprocess
import sys
import threading
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from megacompile import megacompile
from megacompile.errors import OptimizerError
from megacompile.runtime.optim.adam import ADAM
from megacompile.runtime.optim.twin import apply
from megacompile.runtime.optim.update import Update
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.guards import GuardedParameter
from megacompile.runtime.step import step as stepping
from megacompile.runtime.updates.flight import Flight
from megacompile.runtime.updates.update import BucketUpdate, Way, _Compiled
from tests import zoo
from tests.zoo import WIDTH, Inputs, assert_same, equal, twins

STEPS = 10
NAME = "layers.1.up.weight"  # a parameter to look at
BUCKET = "layers.1"  # where it lies

Make = Callable[[nn.Module], list[Optimizer]]


def net() -> Any:
    """An embedding, three layers and a head; one parameter is frozen, some get no gradient."""
    model, _ = zoo.unused()
    model.embed = nn.Embedding(8, WIDTH)
    model.layers[0].norm.weight.requires_grad_(False)
    return model


def data(seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randint(8, (4,), generator=generator),
        "y": torch.randn(4, WIDTH, generator=generator),
    }


def groups(model: nn.Module, *, matrices: bool | None = None) -> list[dict[str, Any]]:
    """Two parameter groups; `matrices` selects the layers' weights (True), or all others."""
    found: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for name, param in model.named_parameters():
        hidden = name.startswith("layers") and param.dim() == 2
        if matrices is None or hidden == matrices:
            found[param.dim() > 1].append(param)
    chosen: list[dict[str, Any]] = [{"params": found[1]}, {"params": found[0], "weight_decay": 0.0}]
    return [group for group in chosen if group["params"]]


def adamw(model: nn.Module, **options: Any) -> list[Optimizer]:
    return [AdamW(groups(model), **{"lr": 1e-2, "weight_decay": 0.1, **options})]


def sgd(model: nn.Module, **options: Any) -> list[Optimizer]:
    return [SGD(groups(model), lr=0.1, weight_decay=0.01, **options)]


def with_muon(model: nn.Module) -> list[Optimizer]:
    hidden = [g for g in groups(model, matrices=True)]
    return [Muon(hidden, lr=0.02), AdamW(groups(model, matrices=False), lr=1e-2)]


CASES: dict[str, Make] = {
    "adamw": adamw,
    "adam, amsgrad": lambda m: [Adam(groups(m), lr=1e-2, weight_decay=0.1, amsgrad=True)],
    "adam, maximize, tensor lr": lambda m: [
        Adam(groups(m), lr=torch.tensor(1e-3), maximize=True, foreach=False)
    ],
    "sgd": sgd,
    "sgd, momentum": lambda m: sgd(m, momentum=0.9, dampening=0.1),
    "sgd, nesterov": lambda m: sgd(m, momentum=0.9, nesterov=True),
    "muon": with_muon,
    "adafactor": lambda m: [Adafactor(groups(m), lr=1e-2)],
}


def schedulers(optimizers: list[Optimizer]) -> list[LRScheduler]:
    return [LambdaLR(optimizer, lambda i: 1.0 / (1 + i)) for optimizer in optimizers]


def backward(model: nn.Module, step: int, micro: int) -> None:
    loss: Tensor = model(**data(2 * step + micro)) / 2
    loss.backward()


def gradients(model: nn.Module, step: int) -> Tensor:
    """Two micro-batches, clipped; every other step the clipping changes something."""
    for micro in range(2):
        backward(model, step, micro)
    largest = 1e-2 if step % 2 else 1e3
    norm: Tensor = nn.utils.clip_grad_norm_(model.parameters(), largest)
    assert (float(norm) > largest) == bool(step % 2)
    return norm


def train(
    model: nn.Module,
    optimizers: list[Optimizer],
    steps: int = STEPS,
    *,
    start: int = 0,
    of: list[LRScheduler] | None = None,
) -> list[Tensor]:
    """Gives the gradient norms; the gradients of the last step stay."""
    norms = []
    for i in range(start, start + steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        norms.append(gradients(model, i))
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in of or []:
            scheduler.step()
    return norms


def assert_states_same(plain: Any, streamed: Any) -> None:
    """Equal in every bit: nested containers of an optimizer's state_dict()."""
    if isinstance(plain, Tensor):
        assert equal(plain, streamed)
    elif isinstance(plain, dict):
        assert plain.keys() == streamed.keys()
        for key in plain:
            assert_states_same(plain[key], streamed[key])
    elif isinstance(plain, list):
        for mine, theirs in zip(plain, streamed, strict=True):
            assert_states_same(mine, theirs)
    else:
        assert plain == streamed


def buckets(model: Any) -> dict[str, HostBucket]:
    """By name."""
    return {b.layout.name: b for b in model._compiled_call_impl.machine.buckets.values()}


def ways(model: Any) -> set[Way]:
    return set(model._compiled_call_impl.updates.ways.values())


# --- numbers


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_bitwise_the_stock_ones(case: str) -> None:
    plain, streamed = twins(net())
    optimizers = [CASES[case](model) for model in (plain, streamed)]
    found = [
        train(model, of, of=schedulers(of))
        for model, of in zip((plain, streamed), optimizers, strict=True)
    ]
    assert_states_same(found[0], found[1])
    assert_same(plain, streamed)
    for mine, theirs in zip(*optimizers, strict=True):
        assert_states_same(mine.state_dict(), theirs.state_dict())
    assert ways(streamed) == {Way.STOCK}
    assert streamed.layers[0].norm.weight.grad is None
    assert streamed.spare.weight.grad is None


def test_an_optimizer_without_an_update_of_ours_is_stock_and_said_once() -> None:
    plain, streamed = twins(net())
    mine, theirs = (RMSprop(groups(model), lr=1e-3) for model in (plain, streamed))
    train(plain, [mine])
    with pytest.warns(UserWarning, match="RMSprop keeps torch.optim's path on the host") as said:
        train(streamed, [theirs], 1)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(streamed, [theirs], STEPS - 1, start=1)
    assert_same(plain, streamed)
    assert ways(streamed) == set()


@pytest.mark.parametrize("make", [adamw, lambda m: sgd(m, momentum=0.9)], ids=["adamw", "sgd"])
def test_inductor_is_within_rounding(make: Make) -> None:
    plain, streamed = twins(net(), lowering="inductor", progress=False)
    mine, theirs = make(plain), make(streamed)
    norms = [
        train(model, of, of=schedulers(of)) for model, of in ((plain, mine), (streamed, theirs))
    ]
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
    for want, got in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()
        assert (got.grad is None) == (want.grad is None)


def test_a_state_is_a_view_of_the_buckets_flat_one() -> None:
    plain, streamed = twins(net())
    (mine,), (theirs,) = adamw(plain), adamw(streamed)
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        train(model, [optimizer], 2)
    for want, param in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert list(mine.state.get(want, {})) == list(theirs.state.get(param, {}))
    seen = 0
    for bucket in buckets(streamed).values():
        for i, param in enumerate(bucket.params):
            for name in ("exp_avg", "exp_avg_sq") if param in theirs.state else ():
                state, room = theirs.state[param][name], bucket.states_of(theirs)[name][i]
                assert isinstance(room, Tensor)
                assert state.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()
                assert (state.shape, state.stride()) == (param.shape, param.stride())
                seen += 1
    assert seen == 2 * sum(p.grad is not None for p in plain.parameters())


# --- overlap


class Gate:
    """Lets an update of a bucket run only when it is held no more, or when somebody waits for it.

    `waited` are the buckets that were waited for before they were done; `ran` those that are done.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = False
        self.waited: list[str] = []
        self.ran: list[str] = []
        self.fails = ""  # the bucket whose update raises
        self._queue: list[tuple[BucketUpdate, threading.Event]] = []
        run, wait, start = BucketUpdate.__call__, Flight.wait, stepping.Updates._start

        def gated_start(updates: Any, update: BucketUpdate, visible: Any) -> None:
            may = threading.Event()
            if not self.held:
                may.set()
            self._queue.append((update, may))
            start(updates, update, visible)

        def gated_run(update: BucketUpdate) -> None:
            name = update.bucket.layout.name
            assert next(may for queued, may in self._queue if queued is update).wait(60)
            if name == self.fails:
                raise ArithmeticError("out of numbers")
            run(update)
            self.ran.append(name)

        def gated_wait(flight: Any) -> None:
            if not flight.done():
                if self.held:
                    self.waited.append(flight.name)
                self.open(flight.name)
            wait(flight)

        monkeypatch.setattr(stepping.Updates, "_start", gated_start)
        monkeypatch.setattr(BucketUpdate, "__call__", gated_run)
        monkeypatch.setattr(Flight, "wait", gated_wait)

    def hold(self) -> None:
        self.held = True
        self._queue.clear()
        self.ran.clear()

    def open(self, last: str | None = None) -> None:
        """All of them, or those up to `last`: one thread runs them in order."""
        names = self.names()
        count = len(names) - names[::-1].index(last) if last in names else len(names)
        for _, may in self._queue[:count]:
            may.set()

    def names(self) -> list[str]:
        """The buckets whose updates were started."""
        return [update.bucket.layout.name for update, _ in self._queue]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.held = False
    made.open()


Pair = tuple[Any, Optimizer]


def in_flight(gate: Gate, **options: Any) -> tuple[Pair, Pair]:
    """(plain, its optimizer), (streamed, its optimizer): the third step of the latter is held."""
    plain, streamed = twins(net(), **options)
    (mine,), (theirs,) = adamw(plain), adamw(streamed)
    train(plain, [mine], 3)
    train(streamed, [theirs], 2)
    theirs.zero_grad()
    gradients(streamed, 2)
    gate.hold()
    theirs.step()
    assert (gate.ran, gate.waited) == ([], []), "step() does not wait"
    return (plain, mine), (streamed, theirs)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def lerped(model: Any, _: Optimizer) -> Any:
    return torch.ones(2 * WIDTH, WIDTH).lerp_(model.get_parameter(NAME), 0.25)


def edited(model: Any, _: Optimizer) -> Any:
    param = model.get_parameter(NAME)
    with torch.no_grad():
        param.mul_(2).add_(1)
    return param.detach().clone()


def filled(model: Any, _: Optimizer) -> Any:
    nn.init.constant_(model.get_parameter(NAME)[3:], 5.0)
    return model.get_parameter(NAME).detach().clone()


def eval_forward(model: Any, _: Optimizer) -> Any:
    with torch.no_grad():
        return model.eval()(data(99)["x"])


def state_of(model: Any, optimizer: Optimizer) -> Any:
    return optimizer.state[model.get_parameter(NAME)]["exp_avg_sq"].clone()


USES: dict[str, Callable[[Any, Optimizer], Any]] = {
    "p": lambda m, _: m.get_parameter(NAME) + 0,
    "p.sum()": lambda m, _: m.get_parameter(NAME).sum(),
    "p.numpy()": lambda m, _: torch.tensor(m.get_parameter(NAME).detach().numpy()),
    "p.data": lambda m, _: m.get_parameter(NAME).data.clone(),
    "p[0, 0].item()": lambda m, _: m.get_parameter(NAME)[0, 0].item(),
    "p.grad": lambda m, _: m.get_parameter(NAME).grad * 1,
    "a state": state_of,
    "state_dict": lambda m, _: m.state_dict(),
    "torch.save(state_dict)": lambda m, _: saved(m.state_dict()),
    "optimizer's torch.save": lambda _, o: saved(o.state_dict()),
    "optimizer's deepcopy": lambda _, o: copy.deepcopy(o.state_dict()),
    "deepcopy(model)": lambda m, _: copy.deepcopy(m).state_dict(),
    "deepcopy(p)": lambda m, _: copy.deepcopy(m.get_parameter(NAME)).detach(),
    "lerp_": lerped,
    "edit": edited,
    "init of a part": filled,
    "torch.stack": lambda m, _: torch.stack([m.get_parameter(NAME), torch.ones(32, 16)]),
    "foreach": lambda m, _: list(torch._foreach_mul([m.get_parameter(NAME).detach()], 2.0)),
    "parameters_to_vector": lambda m, _: nn.utils.parameters_to_vector(m.parameters()),
    "clip_grad_norm_": lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "eval forward": eval_forward,
    "a submodule alone": lambda m, _: m.layers[1](torch.ones(2, WIDTH)),
}


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("use", USES)
def test_a_use_waits_and_sees_the_new_value(gate: Gate, use: str) -> None:
    (plain, mine), (streamed, theirs) = in_flight(gate)
    want, got = USES[use](plain, mine), USES[use](streamed, theirs)
    assert BUCKET in gate.waited
    assert_states_same(detached(want), detached(got))
    assert type(streamed.get_parameter(NAME)) is nn.Parameter
    assert_same(plain, streamed)


def test_a_use_waits_for_its_bucket_alone(gate: Gate) -> None:
    _, (streamed, theirs) = in_flight(gate)
    param, last = streamed.get_parameter(NAME), streamed.head.weight
    assert isinstance(param, GuardedParameter)
    param.sum()
    assert gate.waited == [BUCKET]
    assert gate.ran[-1] == BUCKET and "head+spare" not in gate.ran
    assert type(param) is nn.Parameter
    assert type(param.grad) is Tensor
    assert type(theirs.state[param]["exp_avg"]) is Tensor
    assert isinstance(last, GuardedParameter) and isinstance(last, nn.Parameter)


def test_metadata_does_not_wait(gate: Gate) -> None:
    _, (streamed, theirs) = in_flight(gate)
    param = streamed.get_parameter(NAME)
    assert param.shape == (2 * WIDTH, WIDTH) and param.dtype == torch.float32
    assert (param.numel(), param.dim(), param.device.type) == (512, 2, "cpu")
    assert param.requires_grad and param.is_leaf and param.grad is not None
    assert isinstance(param, nn.Parameter) and isinstance(param, Tensor)
    assert param in theirs.state and len({param, param}) == 1
    assert sum(p.numel() for p in streamed.parameters() if p.requires_grad) > 0
    theirs.zero_grad()
    assert param.grad is None
    assert gate.waited == []


def test_the_next_forward_waits_bucket_after_bucket(gate: Gate) -> None:
    (plain, mine), (streamed, theirs) = in_flight(gate)
    order = gate.names()
    assert order.index("embed") < order.index("layers.0") < order.index("layers.2")
    assert order[-1] == "head+spare", "in the order in which the forward reads them"
    theirs.zero_grad()
    mine.zero_grad()
    assert gate.waited == []
    with torch.no_grad():
        assert equal(plain(**data(7)), streamed(**data(7)))
    assert gate.waited == [name for name in order if name in gate.waited]
    assert gate.waited[-1] == "head+spare"
    assert_same(plain, streamed)


def test_lr_changed_at_once_is_for_the_next_step(gate: Gate) -> None:
    (plain, _), (streamed, theirs) = in_flight(gate)
    for group in theirs.param_groups:
        group["lr"] = 1000.0
    assert gate.waited == []
    assert_same(plain, streamed)


def test_zeroed_gradients_are_not_those_of_the_step_in_flight(gate: Gate) -> None:
    (plain, mine), (streamed, theirs) = in_flight(gate)
    for optimizer in (mine, theirs):
        optimizer.zero_grad(set_to_none=False)
    assert BUCKET in gate.waited
    assert_same(plain, streamed)
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        for i in range(3, 6):
            gradients(model, i)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert_same(plain, streamed)


def test_the_next_backward_does_not_overwrite_gradients_in_flight(gate: Gate) -> None:
    (plain, mine), (streamed, theirs) = in_flight(gate)
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        optimizer.zero_grad()
        gradients(model, 3)
        optimizer.step()
    assert_same(plain, streamed)


ALIASES: dict[str, Callable[[Any, Optimizer], Any]] = {
    "p.detach()": lambda m, _: m.get_parameter(NAME).detach(),
    "p.data": lambda m, _: m.get_parameter(NAME).data,
    "a view": lambda m, _: m.get_parameter(NAME).detach()[2:],
    "numpy": lambda m, _: m.get_parameter(NAME).detach().numpy(),
    "state_dict": lambda m, _: m.state_dict(),
    "a state's view": lambda m, o: o.state[m.get_parameter(NAME)]["exp_avg"].view(-1),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_an_alias_makes_step_wait_for_its_bucket(gate: Gate, kind: str) -> None:
    _, streamed = twins(net())
    (optimizer,) = adamw(streamed)
    train(streamed, [optimizer], 2)
    alias = ALIASES[kind](streamed, optimizer)
    optimizer.zero_grad()
    gradients(streamed, 2)
    gate.hold()
    optimizer.step()
    assert BUCKET in gate.waited
    if kind != "state_dict":
        assert gate.waited == [BUCKET]
    del alias


# --- failures


@pytest.mark.parametrize("use", ["p", "call", "step", "load_state_dict"])
def test_a_failed_update_is_said_once_and_a_checkpoint_goes_on(gate: Gate, use: str) -> None:
    plain, streamed = twins(net())
    (mine,), (theirs,) = adamw(plain), adamw(streamed)
    train(plain, [mine], 2)
    train(streamed, [theirs], 2)
    checkpoint = copy.deepcopy((plain.state_dict(), mine.state_dict()))
    theirs.zero_grad()
    gradients(streamed, 2)
    gate.fails = BUCKET
    theirs.step()
    uses: dict[str, Callable[[], Any]] = {
        "p": lambda: streamed.get_parameter(NAME).sum(),
        "call": lambda: streamed(**data(0)),
        "step": lambda: theirs.step(),
        "load_state_dict": lambda: streamed.load_state_dict(checkpoint[0]),
    }
    with pytest.raises((OptimizerError, RuntimeError), match=f"'{BUCKET}'.*out of numbers") as e:
        uses[use]()
    if use != "load_state_dict":  # which collects errors as text
        assert isinstance(e.value, OptimizerError)
        assert isinstance(e.value.__cause__, ArithmeticError)
    gate.fails = ""
    uses[use]()
    streamed.get_parameter(NAME).sum()
    streamed.load_state_dict(checkpoint[0])
    theirs.load_state_dict(checkpoint[1])
    train(plain, [mine], 3, start=2)
    train(streamed, [theirs], 3, start=2)
    assert_same(plain, streamed)
    assert_states_same(mine.state_dict(), theirs.state_dict())


# --- other loops


@pytest.mark.parametrize("keyword", [False, True])
def test_closures(keyword: bool) -> None:
    plain, streamed = twins(net())
    found: list[list[float]] = []
    for model in (plain, streamed):
        (optimizer,) = sgd(model, momentum=0.9)
        losses: list[float] = []

        def closure(model: nn.Module = model, optimizer: Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = model(**data(3))
            loss.backward()
            return float(loss.detach())

        step: Any = optimizer.step
        for _ in range(4):
            losses.append(step(closure=closure) if keyword else step(closure))
        found.append(losses)
    assert found[0] == found[1] and len(set(found[0])) == 4
    assert_same(plain, streamed)


def test_two_optimizers_over_halves() -> None:
    plain, streamed = twins(net())
    for model in (plain, streamed):
        params = list(model.parameters())
        half = len(params) // 2
        train(model, [AdamW(params[:half], lr=1e-2), SGD(params[half:], lr=0.1, momentum=0.9)])
    assert_same(plain, streamed)


def test_one_of_two_optimizers_over_one_bucket() -> None:
    plain, streamed = twins(net())
    for model in (plain, streamed):
        params = list(model.parameters())
        first, second = AdamW(params[::2], lr=1e-2), AdamW(params[1::2], lr=1e-3)
        for i in range(6):
            gradients(model, i)
            (first if i % 3 else second).step()
            model.zero_grad()
    assert_same(plain, streamed)


def test_grad_scaler() -> None:
    plain, streamed = twins(net())
    for model in (plain, streamed):
        (optimizer,) = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
        for i in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(model(**data(i)) * 4).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert 1.0 < scaler.get_scale() < 2.0**127, "some steps were skipped"
        assert 0 < optimizer.state[model.get_parameter(NAME)]["step"] < STEPS
    zoo_differences = [d for d in zoo.differences(plain, streamed) if not d.endswith(".grad")]
    assert zoo_differences == []


def test_a_group_added_later() -> None:
    plain, streamed = twins(net())
    for model in (plain, streamed):
        optimizer = AdamW(model.layers.parameters(), lr=1e-2)
        train(model, [optimizer], 3)
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 1e-3})
        train(model, [optimizer], 3, start=3)
    assert_same(plain, streamed)


def test_gradients_that_the_user_set() -> None:
    plain, streamed = twins(net())
    for model in (plain, streamed):
        (optimizer,) = adamw(model)
        for i in range(4):
            optimizer.zero_grad()
            gradients(model, i)
            param = model.get_parameter(NAME)
            param.grad = param.grad * 2 if i % 2 else torch.full_like(param, 0.1)
            model.spare.weight.grad = torch.ones(2, 2)
            model.head.bias.grad = None
            optimizer.step()
    assert_same(plain, streamed)


def test_hooks_of_the_user_see_the_gradients() -> None:
    plain, streamed = twins(net())
    seen: list[list[int]] = []
    for model in (plain, streamed):
        (optimizer,) = adamw(model)
        counts: list[int] = []

        def count(*_: Any, model: nn.Module = model, counts: list[int] = counts) -> None:
            counts.append(sum(p.grad is not None for p in model.parameters()))

        optimizer.register_step_pre_hook(count)
        optimizer.register_step_post_hook(count)
        train(model, [optimizer], 3)
        seen.append(counts)
    assert seen[0][-1] > 0
    assert seen[0] == seen[1]
    assert_same(plain, streamed)


def test_optimizers_of_other_models_are_left_alone() -> None:
    _, streamed = twins(net())
    train(streamed, adamw(streamed), 1)
    other, twin = net(), net()
    train(other, adamw(other), 3)
    train(twin, adamw(twin), 3)
    assert ways(streamed) == {Way.STOCK}
    assert_same(other, twin)
    assert not any(isinstance(p, GuardedParameter) for p in other.parameters())


# --- checkpoints


@pytest.mark.parametrize("case", ["adamw", "adam, amsgrad", "sgd, momentum", "muon", "adafactor"])
def test_states_move_between_plain_and_streamed(case: str) -> None:
    make = CASES[case]
    plain, streamed = twins(net())
    reference = copy.deepcopy(plain)
    train(reference, make(reference), 9)
    on = make(plain)
    train(plain, on, 3)
    there = make(streamed)
    move((plain, on), (streamed, there))
    train(streamed, there, 3, start=3)
    move((streamed, there), (plain, on))
    train(plain, on, 3, start=6)
    assert_same(reference, plain)


def move(source: tuple[Any, list[Optimizer]], target: tuple[Any, list[Optimizer]]) -> None:
    """Through a file."""
    target[0].load_state_dict(saved(source[0].state_dict()))
    for mine, theirs in zip(source[1], target[1], strict=True):
        theirs.load_state_dict(saved(mine.state_dict()))


def test_states_loaded_while_gradients_accumulate() -> None:
    plain, streamed = twins(net())
    donor = net()
    of_donor = adamw(donor)
    train(donor, of_donor, 4)
    for model in (plain, streamed):
        optimizers = adamw(model)
        train(model, optimizers, 2)
        model.zero_grad()
        backward(model, 2, 0)
        move((donor, of_donor), (model, optimizers))
        backward(model, 2, 1)
        optimizers[0].step()
        train(model, optimizers, 2, start=3)
    assert_same(plain, streamed)


def test_states_loaded_while_a_step_is_in_flight(gate: Gate) -> None:
    donor = net()
    of_donor = adamw(donor)
    train(donor, of_donor, 4)
    (plain, mine), (streamed, theirs) = in_flight(gate)
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        move((donor, of_donor), (model, [optimizer]))
    assert_same(plain, streamed)
    gate.held = False
    gate.open()
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        train(model, [optimizer], 2, start=3)
    assert_same(plain, streamed)


def test_states_that_the_user_set() -> None:
    """What the user puts into `optimizer.state` is what the next step reads."""
    plain, streamed = twins(net())
    for model in (plain, streamed):
        (optimizer,) = adamw(model)
        train(model, [optimizer], 2)
        state = optimizer.state[model.get_parameter(NAME)]
        state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)
        optimizer.state[model.head.weight]["exp_avg_sq"].mul_(4)
        del optimizer.state[model.head.bias]
        train(model, [optimizer], 2, start=2)
    assert_same(plain, streamed)


# --- a process that is killed

CHECKPOINT_AT, KILLED_AT = 3, 6


def train_until_killed(folder: str) -> None:
    """Runs in a process of its own, which dies in the middle of step `KILLED_AT`."""
    torch.set_num_threads(1)
    model = megacompile(net(), device="cpu", lowering="eager")
    (optimizer,) = adamw(model)
    train(model, [optimizer], CHECKPOINT_AT)
    torch.save((model.state_dict(), optimizer.state_dict()), Path(folder, "new"))
    os.replace(Path(folder, "new"), Path(folder, "checkpoint"))
    train(model, [optimizer], KILLED_AT - CHECKPOINT_AT, start=CHECKPOINT_AT)
    run, started = BucketUpdate.__call__, threading.Event()

    def slow(update: BucketUpdate) -> None:
        if update.bucket.layout.name == BUCKET:
            started.set()
            threading.Event().wait()  # for ever
        run(update)

    optimizer.zero_grad()
    gradients(model, KILLED_AT)
    BucketUpdate.__call__ = slow  # type: ignore[assignment, method-assign]
    optimizer.step()
    assert started.wait(60)
    Path(folder, "in_flight").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_in_the_middle_of_a_step_and_resumed(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    code = f"from tests import test_step; test_step.train_until_killed({str(tmp_path)!r})"
    killed = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "in_flight").exists()
    whole, resumed = twins(net())
    train(whole, adamw(whole), STEPS)
    (optimizer,) = adamw(resumed)
    states = torch.load(tmp_path / "checkpoint")
    resumed.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    train(resumed, [optimizer], STEPS - CHECKPOINT_AT, start=CHECKPOINT_AT)
    assert_same(whole, resumed)


def test_a_rule_in_the_background_is_out_of_the_compilers_hands() -> None:
    """Dynamo, while it compiles, changes and restores the random state of the whole process, and a
    reset frees what another thread runs: so the code runs without it."""
    rule = _Compiled(ADAM)
    wants: dict[torch.dtype, Tensor] = {}
    updates = {}
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.rand(64, generator=generator).to(dtype) for _ in range(4)]
        group = torch.optim.AdamW([nn.Parameter(tensors[0])]).param_groups[0]
        states = (tensors[2], tensors[3], None)
        updates[dtype] = Update(tensors[0], tensors[1], states, ADAM.hyper(group))
        wanted = copy.deepcopy(updates[dtype])
        apply(ADAM, wanted)
        wants[dtype] = wanted.param
        rule.prepare(updates[dtype])
    other = _Compiled(ADAM)  # finds both in Dynamo's cache, the older one behind
    other.prepare(updates[torch.float32])
    for made, dtype in ((other, torch.float32), (rule, torch.bfloat16)):
        before = torch.get_rng_state()
        torch.compiler.reset()
        with unittest.mock.patch.object(torch, "compile", side_effect=AssertionError):
            made(updates[dtype])
        assert torch.equal(torch.get_rng_state(), before)
        torch.testing.assert_close(updates[dtype].param, wants[dtype], rtol=1e-6, atol=1e-6)
