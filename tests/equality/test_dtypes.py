"""Other dtypes against loops by hand: masters, gradients, states, stochastic rounding, checkpoints.

That each is the same wherever its buckets, states and saved tensors are: test_table.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from megacompile import megacompile
from tests import zoo
from tests.equality import cells
from tests.equality.cells import Cell, Run
from tests.training import assert_states_same, move, through_file
from tests.zoo import Inputs, equal, uncompiled

BF16 = torch.bfloat16
STEPS = 6
Model = Any


def net(dtype: torch.dtype = torch.float32) -> Model:
    return zoo.mixed()[0].to(dtype)


def data(seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
    return {name: value.to(dtype) for name, value in zoo.batch(seed).items()}


def streamed(model: nn.Module, **options: Any) -> Model:
    return megacompile(copy.deepcopy(model), device="cpu", lowering="eager", **options)


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})


def train(model: Model, optimizer: Optimizer, steps: int = STEPS, *, start: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for i in range(start, start + steps):  # without a seed: stochastic rounding has its own
        optimizer.zero_grad()
        model(**data(i, dtype)).backward()
        optimizer.step()


def test_norms_of_doubles_are_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Inductor a backward may take norms along, which are of float32."""
    monkeypatch.setattr(torch._inductor, "compile", uncompiled)
    plain = net(torch.float64)
    ours = megacompile(copy.deepcopy(plain), device="cpu", lowering="inductor", progress=False)
    norms = []
    for model in (plain, ours):
        model(**data(0, torch.float64)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)


class ByHand:
    """float32 masters, a bfloat16 copy that computes, AdamW on the masters."""

    def __init__(self, model: Model) -> None:
        self.masters = copy.deepcopy(model)
        self.copy = copy.deepcopy(model).to(BF16)
        self.optimizer = adamw(self.masters)

    def backward(self, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.masters.parameters(), self.copy.parameters(), strict=True)
            for master, copied in pairs:
                copied.copy_(master)
        self.copy.zero_grad()
        with torch.autocast("cpu", BF16):  # the loss in float32, all else in bfloat16
            loss: Tensor = self.copy(**{k: v.to(BF16) for k, v in inputs.items()})
        loss.backward()
        for master, copied in zip(self.masters.parameters(), self.copy.parameters(), strict=True):
            master.grad = None if copied.grad is None else copied.grad.float()
        return loss.detach()


def load(model: Model, alias: Tensor, **how: Any) -> None:
    states = {k: v.clone() for k, v in model.state_dict().items()}
    states["head.weight"] *= 0.5
    model.load_state_dict(states, **how)


def replace_data(model: Model, alias: Tensor) -> None:
    model.head.weight.data = model.head.weight.detach() * 0.5


EDITS: dict[str, Callable[[Model, Tensor], object]] = {
    "in place": lambda model, _: model.head.weight.detach().mul_(2),
    "through an alias": lambda _, alias: alias.mul_(2),
    "through data": lambda model, _: model.head.weight.data.mul_(2),
    "other data": replace_data,
    "load": load,
    "assign": functools.partial(load, assign=True),
}


@pytest.mark.filterwarnings("ignore:megacompile. .* shares ")
def test_a_bf16_copy_of_fp32_masters() -> None:
    """Also where the master is edited, between steps and twice between two forwards."""
    by_hand, model = ByHand(net()), streamed(net(), compute_dtype=BF16)
    optimizer = adamw(model)
    for i in range(STEPS):
        by_hand.backward(data(i))
        by_hand.optimizer.step()
    train(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.head.weight.grad.dtype == torch.float32 and model(data(1)["x"]).dtype == BF16
    zoo.assert_same(by_hand.masters, model)
    for want, got in zip(by_hand.masters.parameters(), model.parameters(), strict=True):
        for name, value in by_hand.optimizer.state[want].items():
            assert equal(value, optimizer.state[got][name])
    for name, edit in EDITS.items():
        for twice in (False, True):
            for made in (by_hand.masters, model):
                alias = made.head.weight.detach()
                alias = alias if name == "through an alias" else torch.empty(0)
                edit(made, alias)
                if twice:
                    made(**data(5))
                    edit(made, alias)
            model.zero_grad()
            want_loss = by_hand.backward(data(7))
            loss = model(**data(7))
            loss.backward()
            assert equal(want_loss, loss.detach()), name
            assert equal(by_hand.masters.head.weight.grad, model.head.weight.grad), name


@pytest.mark.parametrize("compute_dtype", [None, BF16])
def test_gradients_are_rounded_once(compute_dtype: torch.dtype | None) -> None:
    model = streamed(net(), grad_dtype=BF16, compute_dtype=compute_dtype)
    by_hand, plain = ByHand(net()), net()
    model(**data(0)).backward()
    by_hand.backward(data(0))
    plain(**data(0)).backward()
    of = plain if compute_dtype is None else by_hand.copy
    for want, param in zip(of.parameters(), model.parameters(), strict=True):
        assert equal(None if want.grad is None else want.grad.to(BF16), param.grad)
    adamw(model).step()
    assert model.head.weight.dtype == torch.float32 and model.head.weight.grad.dtype == BF16


def test_fp32_states_of_a_bf16_model() -> None:
    """Nothing else is rounded than the parameter, once a step; loaded, they stay what they are."""
    start = net(BF16)
    model, other = (streamed(start, state_dtype=torch.float32) for _ in range(2))
    optimizer, its = adamw(model), adamw(other)
    twin, wide = copy.deepcopy(start), net()
    exact = adamw(wide)
    for i in range(STEPS):
        twin.zero_grad()
        twin(**data(i, BF16)).backward()
        with torch.no_grad():
            for param, of in zip(twin.parameters(), wide.parameters(), strict=True):
                of.copy_(param)
                of.grad = None if param.grad is None else param.grad.float()
            exact.step()
            for param, of in zip(twin.parameters(), wide.parameters(), strict=True):
                param.copy_(of)
    train(model, optimizer, 3)
    move((model, optimizer), (other, its))
    for each, adam in ((model, optimizer), (other, its)):
        train(each, adam, STEPS - 3, start=3)
        for want, got in zip(twin.parameters(), each.parameters(), strict=True):
            assert int((want != got).sum()) <= 1, "the rule's last bits may be other ones"
        for state in exact.state, adam.state:
            assert {v.dtype for s in state.values() for v in s.values()} == {torch.float32}
        wanted, states = exact.state_dict()["state"], adam.state_dict()["state"]
        torch.testing.assert_close(states, wanted, rtol=1e-5, atol=1e-8)
    zoo.assert_same(model, other)


def quantized(run: Run) -> list[Tensor]:
    """Copies of the codes and largest magnitudes of every 8-bit state."""
    found = []
    for _, param in run.params():
        for value in run.optimizers[0].state[param].values():
            if hasattr(value, "codes"):
                value.settle()
                found += [value.codes.clone(), value.absmax.clone()]
    return found


@pytest.mark.parametrize("updater", ["step", "backward"])
@pytest.mark.parametrize(
    ("optimizer", "numbers"), [("amsgrad", "8-bit states"), ("nesterov", "rounded, 8 bits")]
)
def test_8_bit_states_resume(optimizer: str, updater: str, numbers: str) -> None:
    """A run that saves and loads in every step is the run that does not, in another model and an
    own too; saved they are float32, which a plain optimizer takes and gives back."""
    cell = Cell("unused", optimizer, numbers, updater=updater)
    whole, other = cells.build(cell), cells.build(cell)
    for i in range(5):
        for run in (whole, other):
            run.zero()
            run.backward(run.loss(i))
            torch.manual_seed(7)  # of stochastic rounding
            run.step()
        saved = other.optimizers[0].state_dict()
        for state in saved["state"].values():
            assert {type(value) for value in state.values()} == {Tensor}
        if i == 3 and numbers == "8-bit states":  # with bfloat16 parameters torch would cast them
            plain = cells.plain(cell)
            made = cells.optimizers(optimizer, plain)[0]
            made.load_state_dict(through_file(saved))
            saved = made.state_dict()
        if i == 2:
            other = cells.build(cell)
            other.model.load_state_dict(through_file(whole.model.state_dict()))
        other.optimizers[0].load_state_dict(through_file(saved))
    zoo.assert_same(whole.model, other.model)
    mine, theirs = (run.optimizers[0].state_dict()["state"] for run in (whole, other))
    if numbers == "8-bit states":
        assert_states_same(mine, theirs)
    for run in (whole, other):
        run.zero()
        run.backward(run.loss(9))
        torch.manual_seed(7)
        run.step()
    codes = quantized(whole)
    assert codes and all(map(torch.equal, codes, quantized(other)))


def rounded(seed: int, **options: Any) -> list[Tensor]:
    """The parameters of a model after each of three small steps."""
    model = streamed(net(BF16), **options)
    optimizer = adamw(model, lr=1e-5, weight_decay=0.0)
    torch.manual_seed(seed)
    found = []
    for i in range(3):
        train(model, optimizer, 1, start=i)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return found


def test_stochastic_rounding_is_by_the_seed_and_keeps_small_updates() -> None:
    first, again, other = (rounded(seed, stochastic_rounding=True) for seed in (7, 7, 8))
    assert all(map(torch.equal, first, again)) and not torch.equal(first[-1], other[-1])
    start = torch.cat([p.detach().flatten() for p in net(BF16).parameters()])
    assert (first[-1] != start).sum() > (rounded(7)[-1] != start).sum()


class Alike(nn.Module):
    """Two parameters of a bucket that have equal values and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(1024, dtype=BF16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.a + x * self.b).sum()


def test_parameters_of_a_bucket_are_rounded_apart() -> None:
    model = streamed(Alike(), stochastic_rounding=True)
    model(torch.ones(1024, dtype=BF16)).backward()
    SGD(model.parameters(), lr=1e-3).step()
    assert not torch.equal(model.a, model.b)


def test_sgd_without_states_rounds_otherwise_in_every_step() -> None:
    """And the parameter's version, which anybody may raise, has no part in it."""
    rounds = []
    for edited in (False, True):
        model = streamed(net(BF16), stochastic_rounding=True)
        start = copy.deepcopy(model.state_dict())
        optimizer = SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(7)
        for _ in range(2):
            train(model, optimizer, 1, start=1)
            rounds.append(model.head.weight.detach().clone())
            model.load_state_dict(start)
            if edited:
                with torch.no_grad():
                    model.head.weight.mul_(1)
    assert not torch.equal(rounds[0], rounds[1])
    assert torch.equal(rounds[0], rounds[2]) and torch.equal(rounds[1], rounds[3])
