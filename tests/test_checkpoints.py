"""Checkpoints of optimizer states: what is saved and loaded is there again in every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from megacompile import megacompile
from megacompile.runtime.optim import blockwise
from megacompile.runtime.optim.states import BlockwiseTensor
from tests import zoo
from tests.training import assert_states_same, move

BF16 = torch.bfloat16
TIMES = 40  # saves and loads
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["float32", "bfloat16"])

Make = Callable[[nn.Module], Optimizer]

CASES: dict[str, Make] = {
    "adamw": lambda m: AdamW(m.parameters(), lr=1e-2),
    "adam, amsgrad": lambda m: Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "sgd, momentum": lambda m: SGD(m.parameters(), lr=1e-2, momentum=0.9),
}


class Net(nn.Module):
    """Large enough for 8-bit states, in blocks that are not all full; one weight is transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(67, 129)
        self.second = nn.Linear(129, 67)
        self.second.weight = nn.Parameter(torch.randn(129, 67).div(10).t())
        self.small = nn.Linear(67, 3)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.small(self.second(self.first(x).tanh())).square().mean()
        return loss


def streamed(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return megacompile(Net().to(dtype), **{"device": "cpu", "lowering": "eager", **options})


def train(model: nn.Module, optimizer: Optimizer, steps: int, start: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for i in range(start, start + steps):
        torch.manual_seed(i)
        x = torch.randn(4, 67).to(dtype)
        torch.manual_seed(7)  # of stochastic rounding
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


def quantized(model: nn.Module, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Copies of the codes and largest magnitudes of every 8-bit state."""
    found = []
    for param in model.parameters():
        for value in optimizer.state[param].values():
            if isinstance(value, BlockwiseTensor):
                value.settle()
                found.append((value.codes.clone(), value.absmax.clone()))
    return found


# --- 8-bit states


def some_blocks(signed: bool) -> Tensor:
    """(blocks, 256): of all magnitudes that there are, with a largest one of either sign."""
    torch.manual_seed(0)
    rows = torch.randn(4000, blockwise.BLOCK) * 10.0 ** -torch.rand(4000, blockwise.BLOCK).mul(8)
    if not signed:
        rows = rows.abs()
    magnitudes = 10.0 ** torch.linspace(-37.9, 38, len(rows), dtype=torch.float64)
    rows = rows.double() / rows.double().abs().amax(1, keepdim=True) * magnitudes[:, None]
    return torch.cat([rows.float(), rows[:500].float() * 1e-7])  # some are no normal numbers


@pytest.mark.parametrize("flush", [False, True], ids=["", "denormals are flushed"])
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_what_was_quantized_is_quantized_to_the_same(signed: bool, flush: bool) -> None:
    rows = some_blocks(signed)
    bad = torch.randn(5, blockwise.BLOCK).abs()
    bad[0, 3] = bad[1, 7] = torch.inf
    bad[1, 8] = bad[2, 0] = torch.nan
    bad[3, 5], bad[4] = -torch.inf if signed else torch.inf, 0.0
    numbers = torch.cat([rows, bad]).flatten()[:-100]  # the last block is short
    codes, absmax = blockwise.quantize(numbers, signed)
    torch.set_flush_denormal(flush)
    try:
        back = blockwise.dequantize(codes, absmax, signed)
        again, largest = blockwise.quantize(back, signed)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(codes, again)
    assert torch.equal(absmax.view(torch.int32), largest.view(torch.int32))


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("sign", [1, -1])
def test_every_code_stands_for_itself(signed: bool, sign: int) -> None:
    """With each exponent, and mantissas from the first to the last, of the largest magnitude."""
    codes = torch.arange(256, dtype=torch.uint8)
    if signed and sign < 0:
        codes[-1] = 0  # the largest of the block
    mantissas = torch.linspace(0, 2**23 - 1, 64).round().int()
    for exponent in range(1, 255):
        absmax = ((exponent << 23) | mantissas).view(torch.float32)
        absmax = absmax[absmax >= blockwise.SMALLEST]
        mine = codes.repeat(len(absmax))
        back = blockwise.dequantize(mine, absmax, signed)
        again, largest = blockwise.quantize(back, signed)
        assert torch.equal(again, mine)
        assert torch.equal(largest, absmax)


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_saves_and_loads_in_every_step(case: str, dtype: torch.dtype) -> None:
    whole, other = (streamed(dtype, state_dtype="int8") for _ in range(2))
    mine, theirs = CASES[case](whole), CASES[case](other)
    for i in range(TIMES):
        train(whole, mine, 1, start=i)
        train(other, theirs, 1, start=i)
        move((other, theirs), (other, theirs))
    zoo.assert_same(whole, other)
    assert_states_same(mine.state_dict()["state"], theirs.state_dict()["state"])
    train(whole, mine, 1, start=TIMES)
    train(other, theirs, 1, start=TIMES)
    pairs = list(zip(quantized(whole, mine), quantized(other, theirs), strict=True))
    assert len(pairs) == len([p for p in whole.parameters() if p.dim() > 1][:2]) * states_of(case)
    for (codes, absmax), (its_codes, its_absmax) in pairs:
        assert absmax.isfinite().all()
        assert torch.equal(codes, its_codes) and torch.equal(absmax, its_absmax)


def states_of(case: str) -> int:
    return {"adamw": 2, "adam, amsgrad": 3, "sgd, momentum": 1}[case]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_8_bit_states_resume_in_another_model(lowering: str) -> None:
    """With Inductor the codes are those of the rule in C++."""
    options: dict[str, Any] = {"state_dtype": "int8", "lowering": lowering}
    make = CASES["sgd, momentum"]
    whole, first, second = (streamed(**options) for _ in range(3))
    train(whole, make(whole), 6)
    mine, theirs = make(first), make(second)
    train(first, mine, 3)
    move((first, mine), (second, theirs))
    assert_states_same(mine.state_dict()["state"], theirs.state_dict()["state"])
    train(second, theirs, 3, start=3)
    zoo.assert_same(whole, second)


def test_8_bit_states_resume_in_the_backward() -> None:
    whole, first, second = (Net() for _ in range(3))
    optimizers = [CASES["adamw"](model) for model in (whole, first, second)]
    for model, optimizer in zip((whole, first, second), optimizers, strict=True):
        options: dict[str, Any] = {"optimizer": optimizer, "state_dtype": "int8"}
        megacompile(model, device="cpu", lowering="eager", **options)
    train(whole, optimizers[0], 6)
    train(first, optimizers[1], 3)
    move((first, optimizers[1]), (second, optimizers[2]))
    train(second, optimizers[2], 3, start=3)
    zoo.assert_same(whole, second)


@pytest.mark.parametrize("case", CASES)
def test_a_plain_optimizer_keeps_8_bit_states(case: str) -> None:
    """It loads the numbers that they stand for, steps, and what it saves without a step is the
    same again."""
    model, other = (streamed(state_dtype="int8") for _ in range(2))
    optimizer, its = CASES[case](model), CASES[case](other)
    train(model, optimizer, 3)
    plain = Net()
    of_plain = CASES[case](plain)
    move((model, optimizer), (plain, of_plain))
    assert_states_same(optimizer.state_dict()["state"], of_plain.state_dict()["state"])
    move((plain, of_plain), (other, its))
    train(plain, of_plain, 1, start=3)
    train(model, optimizer, 1, start=3)
    train(other, its, 1, start=3)
    zoo.assert_same(model, other)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4)


# --- stochastic rounding


@pytest.mark.parametrize("backward", [False, True], ids=["", "in the backward"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("state_dtype", [None, "int8"])
def test_stochastically_rounded_sgd_resumes(
    state_dtype: str | None, momentum: float, backward: bool
) -> None:
    made: list[tuple[Any, Optimizer]] = []
    for _ in range(3):
        model = Net().to(BF16)
        optimizer = SGD(model.parameters(), lr=1e-3, momentum=momentum)
        options: dict[str, Any] = {"optimizer": optimizer} if backward else {}
        options |= {"stochastic_rounding": True, "state_dtype": state_dtype}
        made.append((megacompile(model, device="cpu", lowering="eager", **options), optimizer))
    whole, first, second = made
    train(*whole, 6)
    train(*first, 3)
    move(first, second)
    train(*second, 3, start=3)
    zoo.assert_same(whole[0], second[0])
    assert_states_same(whole[1].state_dict()["state"], second[1].state_dict()["state"])
    plain = Net().to(BF16)
    of_plain = SGD(plain.parameters(), lr=1e-3, momentum=momentum)
    move(second, (plain, of_plain))
    train(plain, of_plain, 1, start=6)


def test_stochastic_rounding_differs_in_every_step_of_sgd() -> None:
    """And the parameter's version, which anybody may raise, has no part in it."""
    first, second = (streamed(BF16, stochastic_rounding=True) for _ in range(2))
    rounded = []
    for model in (first, second):
        optimizer = SGD(model.parameters(), lr=1e-3)
        for i in range(2):
            before = model.first.weight.detach().clone()
            train(model, optimizer, 1, start=1)
            rounded.append(model.first.weight.detach().clone())
            with torch.no_grad():
                model.first.weight.copy_(before)
                if model is second and i == 0:
                    model.first.weight.mul_(1)
            for other, value in zip(model.parameters(), Net().to(BF16).parameters(), strict=True):
                with torch.no_grad():
                    other.copy_(value)
    assert not torch.equal(rounded[0], rounded[1])
    assert torch.equal(rounded[0], rounded[2]) and torch.equal(rounded[1], rounded[3])
