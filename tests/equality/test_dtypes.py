"""Other dtypes against loops by hand: masters, gradients, states, stochastic rounding, checkpoints.

That each is the same wherever its buckets, states and saved tensors are: test_table.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from megacompile import megacompile
from megacompile.runtime.optim.adam import ADAM
from megacompile.runtime.optim.blockwise import BlockwiseTensor
from megacompile.runtime.optim.rule import Update
from megacompile.runtime.optim.twin import apply
from tests import zoo
from tests.equality import cells
from tests.equality.cells import Cell, Run
from tests.training import assert_states_same, move, through_file
from tests.zoo import Inputs, equal

BF16 = torch.bfloat16
STEPS = 6
Model = Any


def net(dtype: torch.dtype = torch.float32) -> Model:
    """One parameter is frozen, some get no gradient."""
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


# --- masters


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


def double(model: Model, alias: Tensor) -> None:
    with torch.no_grad():
        model.head.weight.mul_(2)


def through_data(model: Model, alias: Tensor) -> None:
    model.head.weight.data.mul_(2)


def replace_data(model: Model, alias: Tensor) -> None:
    model.head.weight.data = model.head.weight.detach() * 0.5


def load(model: Model, alias: Tensor, **how: Any) -> None:
    states = {k: v.clone() for k, v in model.state_dict().items()}
    states["head.weight"] *= 0.5
    model.load_state_dict(states, **how)


def assign(model: Model, alias: Tensor) -> None:
    load(model, alias, assign=True)


def through_alias(model: Model, alias: Tensor) -> None:
    alias.mul_(2)


EDITS = (double, through_alias, through_data, replace_data, load, assign)


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
    for edit in EDITS:
        for twice in (False, True):
            for made in (by_hand.masters, model):
                alias = made.head.weight.detach() if edit is through_alias else torch.empty(0)
                edit(made, alias)
                if twice:
                    made(**data(5))
                    edit(made, alias)
            model.zero_grad()
            want_loss = by_hand.backward(data(7))
            loss = model(**data(7))
            loss.backward()
            assert equal(want_loss, loss.detach()), edit.__name__
            assert equal(by_hand.masters.head.weight.grad, model.head.weight.grad), edit.__name__


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


# --- states


def test_fp32_states_of_a_bf16_model_are_the_rules() -> None:
    """Nothing else is rounded than the parameter, once a step; loaded, they stay what they are."""
    start = net(BF16)
    model, other = (streamed(start, state_dtype=torch.float32) for _ in range(2))
    optimizer, its = adamw(model), adamw(other)
    twin = copy.deepcopy(start)
    group = adamw(twin).param_groups[0]
    moments = {p: (torch.zeros(p.numel()), torch.zeros(p.numel())) for p in twin.parameters()}
    for i in range(STEPS):
        twin.zero_grad()
        twin(**data(i, BF16)).backward()
        for param in twin.parameters():
            if param.grad is not None:
                hyper = ADAM.hyper(group, step=i + 1)
                apply(ADAM, Update(param.detach(), param.grad, (*moments[param], None), hyper))
    train(model, optimizer, 3)
    move((model, optimizer), (other, its))
    assert its.state[other.head.weight]["exp_avg"].dtype == torch.float32
    for each, of in ((model, optimizer), (other, its)):
        train(each, of, STEPS - 3, start=3)
        zoo.assert_same(twin, each)
        for mine, param in zip(twin.parameters(), each.parameters(), strict=True):
            if param in of.state:
                assert equal(moments[mine][0], of.state[param]["exp_avg"].flatten())
                assert equal(moments[mine][1], of.state[param]["exp_avg_sq"].flatten())
    plain, donor = net(BF16), net()
    of_plain, of_donor = adamw(plain), adamw(donor)
    train(donor, of_donor, 1)
    of_plain.load_state_dict(of_donor.state_dict())
    assert of_plain.state[plain.head.weight]["exp_avg"].dtype == BF16, "torch's own still cast"


def quantized(run: Run) -> list[Tensor]:
    """Copies of the codes and largest magnitudes of every 8-bit state."""
    found = []
    for _, param in run.params():
        for value in run.optimizers[0].state[param].values():
            if isinstance(value, BlockwiseTensor):
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


# --- stochastic rounding


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
    options: dict[str, Any] = {"stochastic_rounding": True}
    first, again, other = (rounded(seed, **options) for seed in (7, 7, 8))
    assert all(map(torch.equal, first, again)) and not torch.equal(first[-1], other[-1])
    start = torch.cat([p.detach().flatten() for p in net(BF16).parameters()])
    nearest = rounded(7)[-1]
    assert (first[-1] != start).sum() > (nearest != start).sum()
    steps = [(a != b) for a, b in zip([start, *first], first, strict=False)]
    assert not torch.equal(steps[0], steps[1]), "each step has other numbers"


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


NOTHING: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "float32": (net, {}),
    "masters": (net, {"compute_dtype": BF16}),
    "frozen": (
        lambda: nn.Sequential(nn.Linear(2, 2, dtype=BF16).requires_grad_(False), nn.Linear(2, 2)),
        {},
    ),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_nothing_to_round_is_said_once(kind: str) -> None:
    """A script may ask for it whatever the dtype of its model."""
    make, options = NOTHING[kind]
    made = make()
    asked = {"device": "cpu", "stochastic_rounding": True, **options}
    with pytest.warns(UserWarning, match="stochastic_rounding=True") as said:
        megacompile(made, **asked)
    assert [str(each.filename) for each in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        megacompile(made, **asked)
        megacompile(net(BF16), **asked)
        megacompile(nn.Sequential(nn.Linear(2, 2, dtype=BF16), nn.LayerNorm(2)), **asked)
