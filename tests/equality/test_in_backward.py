"""The update in the backward: near the plain loop, and what it refuses in time.

Loops over streamed and resident buckets, in every bit: test_table.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from megacompile import accumulate, megacompile, updates
from megacompile.errors import OptimizerError
from tests import inside, zoo
from tests.equality import cells
from tests.equality.cells import Cell
from tests.lion import Lion
from tests.training import groups
from tests.zoo import WIDTH, batch, mixed

Model = Any


@pytest.mark.parametrize("optimizer", ["adamw", "nesterov", "lion"])
def test_near_the_plain_loop(optimizer: str) -> None:
    """Also in micro-batches and with a schedule; what gets no gradient stays. Of Lion the sign of
    what is nearly 0 may be another."""
    run = cells.build(Cell(optimizer=optimizer, updater="backward"))
    for loop in ("once", "accumulated", "scheduled"):
        want = cells.expected(Cell(optimizer=optimizer, loop=loop))
        got = cells.trained(cells.on(run, loop))
        assert set(updates(run.model).values()) == {"in the backward"}
        held = [bucket.grads for bucket in inside.buckets(run.model).values()]
        assert loop != "once" or not any(held), "no gradient comes to the host"
        wants = {name.rpartition(" (")[0]: value for name, value in want.items()}
        for name, value in got.items():
            want_value = wants[name.rpartition(" (")[0]]
            if not name.startswith(("loss", "prediction", "drawn")) and value.numel() > 1:
                near = torch.isclose(value, want_value, rtol=1e-3, atol=1e-5)
                assert near.double().mean() > 0.99, (loop, name)
                if optimizer != "lion":
                    assert near.all() or (value - want_value).norm() < 1e-3 * want_value.norm()
    spare = run.model.spare.weight
    assert torch.equal(spare, run.start["spare.weight"]) and spare not in run.optimizers[0].state


# --- gradients that are used up


def pair() -> tuple[Model, Model, Optimizer]:
    """(plain, megacompiled with an optimizer, that)."""
    plain = mixed()[0]
    streamed = copy.deepcopy(plain)
    optimizer = AdamW(groups(streamed, lr=1e-3))
    megacompile(streamed, device="cpu", lowering="eager", optimizer=optimizer)
    return plain, streamed, optimizer


USES: dict[str, Callable[[Model], Any]] = {
    "norm": lambda m: m.head.weight.grad.norm(p=1),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "clipping": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3),
    "a second backward": lambda m: m(**batch(1)).backward(),
}


def test_what_comes_too_late_says_so() -> None:
    """And the step behind it is as if it had not been asked for."""
    _, streamed, optimizer = pair()
    for k, (use, function) in enumerate(USES.items(), 1):
        streamed(**batch(0)).backward()
        with pytest.raises(OptimizerError):
            function(streamed)
        assert streamed.head.weight.grad.shape == (WIDTH, WIDTH), use
        with torch.no_grad():
            streamed(**batch(2))  # it is captured, and asks each parameter for its gradient
        optimizer.step()
        assert streamed.head.weight.grad is None, use
        assert optimizer.state[streamed.head.weight]["step"] == k, use
    streamed(**batch(0)).backward()
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(OptimizerError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad(set_to_none=False)  # the update has been made all the same
    assert streamed.head.weight.grad.shape == (WIDTH, WIDTH)
    optimizer.step()
    assert optimizer.state[streamed.head.weight]["step"] == k + 1


def test_a_scaled_loss_is_refused_in_time() -> None:
    """Nothing is updated. A scaler that is not enabled, or of another loss, is no matter."""
    plain, streamed, optimizer = pair()
    mine = AdamW(groups(plain, lr=1e-3))
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    weight = torch.ones(2, requires_grad=True)
    for model, its in ((plain, mine), (streamed, optimizer)):
        for i in range(3):
            if model is streamed:
                loss = model(**batch(i))
                scaled: Any = scaler.scale([loss])[0] if i % 2 else scaler.scale(loss)
                with pytest.raises(OptimizerError):
                    scaled.backward()
                model.zero_grad()
            other: Any = scaler.scale(weight.sum())
            other.backward()
            loss = off.scale(model(**batch(i)))
            loss.backward()
            off.step(its)
            off.update()
            its.zero_grad()
    zoo.assert_close(plain, streamed)
    (streamed(**batch(0)) * scaler.get_scale()).backward()
    with pytest.raises(OptimizerError):
        scaler.unscale_(optimizer)


NORMS: dict[str, Callable[[nn.Module], Tensor]] = {
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), torch.inf),
    "not foreach": lambda m: nn.utils.clip_grad_norm_(m.parameters(), torch.inf, foreach=False),
    "of one": lambda m: torch.linalg.vector_norm(m.get_parameter("head.weight").grad),
    "a limit above it": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e6),
}


@pytest.mark.parametrize("resident", [0, "all"])
def test_the_norm_is_that_of_the_plain_loop(resident: Any) -> None:
    """Of a backward and of micro-batches, alone or with gradients of others."""
    plain = mixed()[0]
    streamed = copy.deepcopy(plain)
    mine, theirs = (SGD(groups(each), lr=0.1) for each in (plain, streamed))
    options: dict[str, Any] = {"optimizer": theirs, "resident": resident}
    megacompile(streamed, device="cpu", lowering="eager", **options)
    other = nn.Linear(3, 3)
    for i, norm in enumerate([*NORMS.values(), *NORMS.values()]):
        found = []
        for model, optimizer in ((plain, mine), (streamed, theirs)):
            if i >= len(NORMS):
                with accumulate(streamed) if model is streamed else nullcontext():
                    model(**batch(20 + i)).backward()
            model(**batch(i)).backward()
            found.append(norm(model))
            if i == 0:
                other.zero_grad()
                other(torch.ones(3)).sum().backward()
                params = [*model.parameters(), *other.parameters()]
                both = nn.utils.clip_grad_norm_(params, torch.inf)
                torch.testing.assert_close(both, (found[-1].square() + 4 * 3).sqrt())
            optimizer.step()
            optimizer.zero_grad()
        assert found[1].shape == () and found[1].dtype == found[0].dtype
        torch.testing.assert_close(*found, rtol=1e-5, atol=0)
    zoo.assert_close(plain, streamed)


def test_gradients_that_are_there() -> None:
    """Within `accumulate`, and those that `autograd.grad` gives, which updates nothing."""
    plain, streamed, optimizer = pair()
    before = streamed.head.weight.detach().clone()
    found = [
        torch.autograd.grad(model(**batch(0)), [model.head.weight, model.layers[1].up.weight])
        for model in (plain, streamed)
    ]
    assert all(map(zoo.equal, *found)) and streamed.head.weight.grad is None
    inputs = [{**batch(1), "x": batch(1)["x"].requires_grad_()} for _ in range(2)]
    plain(**inputs[0]).backward()
    with accumulate(streamed):
        streamed(**inputs[1]).backward()
    zoo.assert_same(plain, streamed)
    assert zoo.equal(inputs[0]["x"].grad, inputs[1]["x"].grad)
    want = nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
    assert zoo.equal(want, nn.utils.clip_grad_norm_(streamed.parameters(), 1e-2))
    zoo.assert_same(plain, streamed)
    assert torch.equal(streamed.head.weight, before)


def test_decoupled_decay_of_lion_is_its_own_step() -> None:
    """It is divided by an lr that no parameter group has: said once, and every bit is the plain
    one's."""
    plain, model = zoo.twins(mixed()[0])
    for each in (plain, model):
        optimizer = Lion(groups(each), lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for i in range(3):
                zoo.step(each, batch(i))
                optimizer.step()
                optimizer.zero_grad()
        assert sum("Lion" in str(w.message) for w in said) == (each is model)
    zoo.assert_same(plain, model)


def test_blocks_of_micro_batches_nest() -> None:
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    megacompile(model, device="cpu", lowering="eager", optimizer=optimizer, progress=False)
    before = model.weight.detach().clone()
    with accumulate(model):
        with accumulate(model):
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.weight, before)
    model(torch.ones(2, 4)).sum().backward()
    assert torch.allclose(model.weight, before - 0.1 * 6)
