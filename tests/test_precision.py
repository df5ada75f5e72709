"""Dtypes: compute_dtype, grad_dtype, state_dtype and stochastic rounding, against loops by hand."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from megacompile import megacompile
from megacompile.errors import OptionError, OptionTypeError
from megacompile.runtime.optim.adam import ADAM
from megacompile.runtime.optim.states import BlockwiseTensor
from megacompile.runtime.optim.twin import apply
from megacompile.runtime.optim.update import Update
from tests import inside, zoo
from tests.training import through_file
from tests.zoo import WIDTH, Inputs, equal

BF16 = torch.bfloat16
STEPS = 10


def net(dtype: torch.dtype = torch.float32) -> Any:
    """One parameter is frozen, some get no gradient."""
    return zoo.mixed()[0].to(dtype)


def data(seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
    return {name: value.to(dtype) for name, value in zoo.batch(seed).items()}


def streamed(model: Any, **options: Any) -> Any:
    return megacompile(copy.deepcopy(model), device="cpu", lowering="eager", **options)


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})


def train(
    model: Any,
    optimizer: Optimizer,
    steps: int = STEPS,
    *,
    start: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    for i in range(start, start + steps):  # without a seed: stochastic rounding has its own
        optimizer.zero_grad()
        model(**data(i, dtype)).backward()
        optimizer.step()


# --- compute_dtype


class ByHand:
    """float32 masters, a bfloat16 copy that computes, AdamW on the masters."""

    def __init__(self, model: Any) -> None:
        self.masters = copy.deepcopy(model)
        self.copy = copy.deepcopy(model).to(BF16)
        self.optimizer = adamw(self.masters)

    def refresh(self) -> None:
        with torch.no_grad():
            pairs = zip(self.masters.parameters(), self.copy.parameters(), strict=True)
            for master, copied in pairs:
                copied.copy_(master)

    def backward(self, inputs: Inputs, dtype: torch.dtype = torch.float32) -> Tensor:
        """`dtype` is of the gradients."""
        self.refresh()
        self.copy.zero_grad()
        with torch.autocast("cpu", BF16):  # the loss in float32, all else in bfloat16
            loss: Tensor = self.copy(**{k: v.to(BF16) for k, v in inputs.items()})
        loss.backward()
        for master, copied in zip(self.masters.parameters(), self.copy.parameters(), strict=True):
            gradient = None if copied.grad is None else copied.grad.to(dtype)
            master.grad = gradient if gradient is None else gradient.float()
        return loss.detach()

    def train(self, steps: int = STEPS, *, start: int = 0) -> None:
        for i in range(start, start + steps):
            self.backward(data(i))
            self.optimizer.step()


def test_a_bf16_copy_of_fp32_masters() -> None:
    by_hand, model = ByHand(net()), streamed(net(), compute_dtype=BF16)
    optimizer = adamw(model)
    by_hand.train()
    train(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.head.weight.grad.dtype == torch.float32
    assert model(data(1)["x"]).dtype == BF16
    zoo.assert_same(by_hand.masters, model)
    for want, got in zip(by_hand.masters.parameters(), model.parameters(), strict=True):
        for name, value in by_hand.optimizer.state[want].items():
            assert equal(value, optimizer.state[got][name])


def double(model: Any, _: Any) -> None:
    with torch.no_grad():
        model.head.weight.mul_(2)


def through_data(model: Any, _: Any) -> None:
    model.head.weight.data.mul_(2)


def replace_data(model: Any, _: Any) -> None:
    model.head.weight.data = model.head.weight.detach() * 2


def load(model: Any, _: Any) -> None:
    states = {k: v.clone() for k, v in model.state_dict().items()}
    states["head.weight"] *= 2
    model.load_state_dict(states)


def assign(model: Any, _: Any) -> None:
    states = {k: v.clone() for k, v in model.state_dict().items()}
    states["head.weight"] *= 2
    model.load_state_dict(states, assign=True)


def through_alias(_: Any, alias: Tensor) -> None:
    alias.mul_(2)


def initialize(model: Any, _: Any) -> None:
    torch.manual_seed(3)
    nn.init.normal_(model.head.weight)


EDITS: dict[str, Callable[[Any, Any], None]] = {
    edit.__name__: edit
    for edit in (double, through_data, replace_data, load, assign, through_alias, initialize)
}


@pytest.mark.parametrize("when", ["before a step", "after steps", "twice"])
@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_a_master_are_seen(edit: str, when: str) -> None:
    by_hand, model = ByHand(net()), streamed(net(), compute_dtype=BF16)
    optimizer = adamw(model)
    for made in (by_hand.masters, model):
        alias = made.head.weight.detach() if edit == "through_alias" else None
        if when != "before a step":
            if made is model:
                train(model, optimizer, 2)
            else:
                by_hand.train(2)
        EDITS[edit](made, alias)
        if when == "twice":
            made(**data(5)) if made is model else by_hand.refresh()
            EDITS[edit](made, alias)
    model.zero_grad()
    want = by_hand.backward(data(7))
    loss = model(**data(7))
    loss.backward()
    assert equal(want, loss.detach())
    assert by_hand.masters.head.weight.grad is not None
    assert equal(by_hand.masters.head.weight.grad, model.head.weight.grad)


@pytest.mark.parametrize("compute_dtype", [None, BF16])
def test_grad_dtype(compute_dtype: torch.dtype | None) -> None:
    model = streamed(net(), grad_dtype=BF16, compute_dtype=compute_dtype)
    optimizer = adamw(model)
    if compute_dtype is None:
        plain = net()
        plain(**data(0)).backward()
        model(**data(0)).backward()
        wants = [None if p.grad is None else p.grad.to(BF16) for p in plain.parameters()]
    else:
        by_hand = ByHand(net())
        by_hand.backward(data(0))
        model(**data(0)).backward()
        wants = [None if p.grad is None else p.grad for p in by_hand.copy.parameters()]
    for want, param in zip(wants, model.parameters(), strict=True):
        assert equal(want, param.grad)
    before = model.head.weight.detach().clone()
    optimizer.step()
    assert model.head.weight.dtype == torch.float32
    assert not torch.equal(model.head.weight.detach(), before)
    assert model.head.weight.grad.dtype == BF16
    train(model, optimizer, 3, start=1)


# --- states in another dtype


def test_fp32_states_of_a_bf16_model_are_the_rules() -> None:
    """Nothing else is rounded than the parameter, once a step."""
    start = net(BF16)
    model = streamed(start, state_dtype=torch.float32)
    optimizer = adamw(model)
    twin = copy.deepcopy(start)
    group = adamw(twin).param_groups[0]
    moments = {p: (torch.zeros(p.numel()), torch.zeros(p.numel())) for p in twin.parameters()}
    for i in range(STEPS):
        twin.zero_grad()
        twin(**data(i, BF16)).backward()
        for param in twin.parameters():
            if param.grad is not None:
                update = Update(
                    param=param.detach(),
                    grad=param.grad,
                    states=(*moments[param], None),
                    hyper=ADAM.hyper(group, step=i + 1),
                )
                apply(ADAM, update)
    train(model, optimizer, dtype=BF16)
    zoo.assert_same(twin, model)
    for mine, param in zip(twin.parameters(), model.parameters(), strict=True):
        if param in optimizer.state:
            state = optimizer.state[param]
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
            assert equal(moments[mine][0], state["exp_avg"].flatten())
            assert equal(moments[mine][1], state["exp_avg_sq"].flatten())


def test_fp32_states_stay_fp32_when_they_are_loaded() -> None:
    whole, first, second = (streamed(net(BF16), state_dtype=torch.float32) for _ in range(3))
    train(whole, adamw(whole), 6, dtype=BF16)
    mine, theirs = adamw(first), adamw(second)
    train(first, mine, 3, dtype=BF16)
    second.load_state_dict(through_file(first.state_dict()))
    theirs.load_state_dict(through_file(mine.state_dict()))
    assert theirs.state[second.head.weight]["exp_avg"].dtype == torch.float32
    train(second, theirs, 3, start=3, dtype=BF16)
    zoo.assert_same(whole, second)


def test_other_models_still_cast_what_they_load() -> None:
    streamed(net(BF16), state_dtype=torch.float32)
    plain = net(BF16)
    mine, donor = adamw(plain), net()
    theirs = adamw(donor)
    train(donor, theirs, 1)
    mine.load_state_dict(theirs.state_dict())
    assert mine.state[plain.head.weight]["exp_avg"].dtype == BF16


class Wide(nn.Module):
    """One matrix, large enough for 8-bit states, and a bias, which is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 512)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = (self.layer(x).view(-1, WIDTH, 32).mean(-1) - y).square().mean()
        return loss


def test_8_bit_states_are_close() -> None:
    plain = Wide()
    model = streamed(plain, state_dtype="int8")
    mine, theirs = adamw(plain, lr=1e-3), adamw(model, lr=1e-3)
    start = plain.layer.weight.detach().clone()
    train(plain, mine)
    train(model, theirs)
    assert isinstance(theirs.state[model.layer.weight]["exp_avg"], BlockwiseTensor)
    small = theirs.state[model.layer.bias]["exp_avg"] + 0
    assert type(small) is Tensor, "too small for blocks"
    moved = plain.layer.weight.detach() - start
    error = (model.layer.weight - plain.layer.weight).norm() / moved.norm()
    assert 0 < error < 0.1
    for name in ("exp_avg", "exp_avg_sq"):
        want = mine.state[plain.layer.weight][name]
        got = theirs.state[model.layer.weight][name] + 0
        assert (got - want).norm() < 0.1 * want.norm()


def test_8_bit_states_save_as_fp32_and_move() -> None:
    model = streamed(Wide(), state_dtype="int8")
    optimizer = adamw(model)
    train(model, optimizer, 3)
    states = optimizer.state_dict()
    for state in states["state"].values():
        for value in state.values():
            assert (type(value), value.dtype) == (Tensor, torch.float32)
    plain = Wide()
    plain.load_state_dict(through_file(model.state_dict()))
    of_plain = adamw(plain)
    of_plain.load_state_dict(through_file(states))
    train(plain, of_plain, 2, start=3)
    model.load_state_dict(through_file(plain.state_dict()))
    optimizer.load_state_dict(through_file(of_plain.state_dict()))
    train(model, optimizer, 2, start=5)
    assert isinstance(optimizer.state[model.layer.weight]["exp_avg"], BlockwiseTensor)
    assert optimizer.state[model.layer.weight]["step"] == 7
    reference = Wide()
    train(reference, adamw(reference), 7)
    assert (model.layer.weight - reference.layer.weight).norm() < 0.01 * (
        reference.layer.weight.norm()
    )


def test_8_bit_states_resume() -> None:
    """In every bit; more of it in tests/test_checkpoints.py."""
    whole, first, second = (streamed(Wide(), state_dtype="int8") for _ in range(3))
    train(whole, adamw(whole), 6)
    mine, theirs = adamw(first), adamw(second)
    train(first, mine, 3)
    second.load_state_dict(through_file(first.state_dict()))
    theirs.load_state_dict(through_file(mine.state_dict()))
    train(second, theirs, 3, start=3)
    zoo.assert_same(whole, second)


# --- stochastic rounding


def rounded(seed: int, lr: float = 1e-5, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = streamed(net(BF16), **options)
    torch.manual_seed(seed)
    train(model, adamw(model, lr=lr, weight_decay=0.0), 3, dtype=BF16)
    return model


@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_stochastic_rounding_is_by_the_seed(state_dtype: torch.dtype | None) -> None:
    options: dict[str, Any] = {"stochastic_rounding": True, "state_dtype": state_dtype}
    first, again, other = (rounded(seed, **options) for seed in (7, 7, 8))
    zoo.assert_same(first, again)
    assert not torch.equal(first.head.weight.detach(), other.head.weight.detach())


def test_stochastic_rounding_keeps_small_updates() -> None:
    start = net(BF16).head.weight.detach()
    nearest, random = (rounded(7, stochastic_rounding=flag).head.weight for flag in (False, True))
    changed = [(w.detach() != start).float().mean().item() for w in (nearest, random)]
    assert changed[1] > changed[0]


@pytest.mark.parametrize(
    ("model", "options", "dtypes"),
    [
        (net, {}, "float32"),
        (net, {"compute_dtype": BF16}, "float32"),
        (lambda: nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2)), {}, "float16, float32"),
        (lambda: nn.Sequential(nn.Linear(2, 2, dtype=BF16).requires_grad_(False), nn.Linear(2, 2)),
         {}, "float32"),
    ],
    ids=["float32", "compute_dtype", "mixed", "frozen"],
)  # fmt: skip
def test_nothing_to_round(model: Any, options: dict[str, Any], dtypes: str) -> None:
    """Said once; a script may ask for it whatever the dtype of its model."""
    made = model()
    asked = {"device": "cpu", "stochastic_rounding": True, **options}
    with pytest.warns(UserWarning, match=f"stochastic_rounding=True .* are {dtypes} ") as said:
        megacompile(made, **asked)
    assert [str(each.filename) for each in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        megacompile(made, **asked)
        megacompile(net(BF16), **asked)
        megacompile(nn.Sequential(nn.Linear(2, 2, dtype=BF16), nn.LayerNorm(2)), **asked)


def test_an_optimizer_without_stochastic_rounding_says_so() -> None:
    model = streamed(nn.Linear(8, 8, bias=False, dtype=BF16), stochastic_rounding=True)
    optimizer = torch.optim.Muon(model.parameters())
    model(torch.rand(2, 8, dtype=BF16)).sum().backward()
    with pytest.warns(UserWarning, match="Muon ignores stochastic_rounding"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


# --- options


@pytest.mark.parametrize(
    ("option", "error", "text"),
    [
        ({"compute_dtype": torch.float32}, OptionError, "compute_dtype=torch.float32; needed"),
        ({"compute_dtype": "bf16"}, OptionError, "compute_dtype='bf16'; needed None or one of"),
        ({"compute_dtype": 16}, OptionTypeError, "'compute_dtype' got 16"),
        ({"grad_dtype": torch.int8}, OptionError, "grad_dtype=torch.int8; needed"),
        ({"grad_dtype": 1.0}, OptionTypeError, "'grad_dtype' got 1.0"),
        ({"state_dtype": "int4"}, OptionError, "state_dtype='int4'; needed .*int8"),
        ({"state_dtype": torch.float64}, OptionError, "state_dtype=torch.float64"),
        ({"state_dtype": 8}, OptionTypeError, "'state_dtype' got 8"),
        ({"stochastic_rounding": 1}, OptionTypeError, "'stochastic_rounding' got 1"),
    ],
)
def test_bad_options(option: dict[str, Any], error: type[Exception], text: str) -> None:
    model = net()
    with pytest.raises(error, match=text):
        megacompile(model, device="cpu", **option)
    assert not inside.is_streamed(model)


def test_another_option_later_is_refused() -> None:
    model = streamed(net(), state_dtype="int8")
    with pytest.raises(OptionError, match="state_dtype: 'int8' -> None"):
        megacompile(model, device="cpu", lowering="eager")
