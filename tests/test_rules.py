"""The update rules in plain torch against torch.optim, and compiled against themselves."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megacompile.runtime.optim import blockwise, stochastic
from megacompile.runtime.optim.adam import ADAM
from megacompile.runtime.optim.registry import KNOWN, RULES, known, rule_of
from megacompile.runtime.optim.sgd import SGD
from megacompile.runtime.optim.twin import function_of
from megacompile.runtime.optim.update import State

NUMEL = 5003
STEPS = 10

adam_, sgd_ = function_of(ADAM), function_of(SGD)


def grads(numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(numel).to(dtype) for _ in range(STEPS)]


def start(numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(numel).to(dtype)


def run_stock(
    make: Callable[..., torch.optim.Optimizer],
    param: Tensor,
    given: Sequence[Tensor],
    **options: Any,
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """(the parameter, its state, its group) after a step of torch.optim with each gradient."""
    leaf = torch.nn.Parameter(param.clone())
    optimizer = make([leaf], foreach=False, **options)
    for grad in given:
        leaf.grad = grad.clone()
        optimizer.step()
    return leaf.detach(), optimizer.state[leaf], optimizer.param_groups[0]


def distance(got: Tensor, want: Tensor) -> float:
    """Relative to the largest value."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


# --- against torch.optim

ADAM_CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw, lr in a tensor": (torch.optim.AdamW, {"lr": torch.tensor(1e-2, dtype=torch.float64)}),
    "adamw, no decay": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.0}),
    "adamw, maximize": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "adamw, amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "adamw, low betas": (torch.optim.AdamW, {"lr": 1e-2, "betas": (0.3, 0.6), "eps": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adam, decay": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam, all": (
        torch.optim.Adam,
        {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True},
    ),
    "adam, decoupled": (
        torch.optim.Adam,
        {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=["fp32", "fp64"]
)
@pytest.mark.parametrize("case", list(ADAM_CASES))
def test_adam_is_torchs(case: str, dtype: torch.dtype, tolerance: float) -> None:
    make, options = ADAM_CASES[case]
    given = grads(dtype=dtype)
    want, state, group = run_stock(make, start(dtype=dtype), given, **options)
    param = start(dtype=dtype)
    m, v = torch.zeros_like(param), torch.zeros_like(param)
    v_max = torch.zeros_like(param) if group["amsgrad"] else None
    for step, grad in enumerate(given, 1):
        hyper = torch.tensor(ADAM.hyper(group, step=torch.tensor(float(step))), dtype=dtype)
        adam_(param, grad, (m, v, v_max), None, hyper)
    assert distance(param, want) <= tolerance
    assert distance(m, state["exp_avg"]) <= tolerance
    assert distance(v, state["exp_avg_sq"]) <= tolerance
    if v_max is not None:
        assert distance(v_max, state["max_exp_avg_sq"]) <= tolerance


SGD_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "lr in a tensor": {"lr": torch.tensor(0.1, dtype=torch.float64), "momentum": 0.9},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "maximize": {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=["fp32", "fp64"]
)
@pytest.mark.parametrize("case", list(SGD_CASES))
def test_sgd_is_torchs(case: str, dtype: torch.dtype, tolerance: float) -> None:
    given = grads(dtype=dtype)
    options = {"lr": 0.1, **SGD_CASES[case]}
    want, state, group = run_stock(torch.optim.SGD, start(dtype=dtype), given, **options)
    param = start(dtype=dtype)
    # What is in the buffer before its first step does not matter.
    buffer = torch.full_like(param, torch.nan) if group["momentum"] else None
    for i, grad in enumerate(given):
        hyper = torch.tensor(SGD.hyper(group, first=i == 0), dtype=dtype)
        sgd_(param, grad, (buffer,), None, hyper)
    assert distance(param, want) <= tolerance
    if buffer is not None:
        assert distance(buffer, state["momentum_buffer"]) <= tolerance


def test_scale_is_a_factor_of_the_gradient() -> None:
    """As after clip_grad_norm_: each gradient a quarter."""
    quarters = [grad / 4 for grad in grads()]
    options = {"lr": 1e-2, "weight_decay": 0.1}
    want, _, group = run_stock(torch.optim.Adam, start(), quarters, **options)
    param, m, v = start(), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step, grad in enumerate(grads(), 1):
        hyper = torch.tensor(ADAM.hyper(group, step=step, scale=0.25))
        adam_(param, grad, (m, v, None), None, hyper)
    assert distance(param, want) <= 1e-6
    sgd = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "maximize": True}
    assert SGD.hyper(sgd, first=True, scale=0.25)[0] == -0.25


# --- low precision


def test_a_bf16_parameter_is_rounded_once() -> None:
    """One step from bf16 values with fp32 moments is the fp32 step, rounded to nearest."""
    grad = grads(dtype=torch.bfloat16)[0]
    low = start(dtype=torch.bfloat16)
    want, _, group = run_stock(torch.optim.AdamW, low.float(), [grad.float()], lr=1e-2)
    m, v = torch.zeros(NUMEL), torch.zeros(NUMEL)
    hyper = torch.tensor(ADAM.hyper(group))
    adam_(low, grad, (m, v, None), None, hyper)
    assert (low == want.bfloat16()).double().mean() > 0.999
    assert distance(low, want) <= 2.0**-8


def test_the_copy_is_the_rounded_master() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        master, copy = start(), torch.zeros(NUMEL, dtype=dtype)
        m, v = torch.zeros(NUMEL), torch.zeros(NUMEL)
        _, _, group = run_stock(torch.optim.AdamW, master, [])
        grad = grads(dtype=dtype)[0]
        adam_(master, grad, (m, v, None), copy, torch.tensor(ADAM.hyper(group)))
        assert torch.equal(copy, master.to(dtype))
        _, _, group = run_stock(torch.optim.SGD, master, [])
        sgd_(master, grad, (None,), copy, torch.tensor(SGD.hyper(group, first=True)))
        assert torch.equal(copy, master.to(dtype))


def test_out_leaves_the_parameter() -> None:
    _, _, group = run_stock(torch.optim.SGD, start(), [], lr=0.1)
    hyper = torch.tensor(SGD.hyper(group, first=True))
    param, out = start(), torch.zeros(NUMEL)
    sgd_(param, grads()[0], (None,), None, hyper, out=out)
    assert torch.equal(param, start())
    sgd_(param, grads()[0], (None,), None, hyper)
    assert torch.equal(param, out)


def quantized_zeros(numel: int) -> list[State]:
    return [blockwise.quantize(torch.zeros(numel), signed) for signed in (True, False, False)]


@pytest.mark.parametrize("amsgrad", [False, True], ids=["adam", "amsgrad"])
def test_8_bit_adam_follows_the_32_bit_one(amsgrad: bool) -> None:
    """After ten steps of correlated gradients the parameters moved alike, to a few percent."""
    bias = start() * 2
    given = [bias + grad for grad in grads()]
    options = {"lr": 1e-2, "amsgrad": amsgrad}
    want, _, group = run_stock(torch.optim.AdamW, start(), given, **options)
    param, (m, v, v_max) = start(), quantized_zeros(NUMEL)
    for step, grad in enumerate(given, 1):
        hyper = torch.tensor(ADAM.hyper(group, step=step))
        adam_(param, grad, (m, v, v_max if amsgrad else None), None, hyper)
    moved, wanted = param - start(), want - start()
    assert (moved - wanted).norm() < 0.05 * wanted.norm()


def test_8_bit_sgd_follows_the_32_bit_one() -> None:
    want, _, group = run_stock(torch.optim.SGD, start(), grads(), lr=0.1, momentum=0.9)
    param, buffer = start(), quantized_zeros(NUMEL)[0]
    for i, grad in enumerate(grads()):
        hyper = torch.tensor(SGD.hyper(group, first=i == 0))
        sgd_(param, grad, (buffer,), None, hyper)
    moved, wanted = param - start(), want - start()
    assert (moved - wanted).norm() < 0.03 * wanted.norm()


# --- stochastic rounding


def test_philox_is_the_published_one() -> None:
    """Its known answers for zeros (Random123's kat_vectors): the first word."""
    assert stochastic.philox(0, torch.tensor([0])).tolist() == [0x6627E8D5]


def test_stochastic_rounding_takes_the_neighbours() -> None:
    """Only the two of a value, the nearer the likelier; what bf16 has stays."""
    torch.manual_seed(0)
    values = torch.randn(2**16)
    rounded = stochastic.round_stochastic(values, torch.tensor(stochastic.seed_of(1, 2, 3))).float()
    error = (rounded - values).abs()
    gap = 2.0 ** (values.abs().log2().floor() - 7)
    assert (error < gap).all()
    assert 0.3 < (error > gap / 2).double().mean() * 2 < 0.7
    assert abs(float(((rounded - values) / gap).double().mean())) < 4 * 0.5 / 2**8
    exact = values.bfloat16()
    assert torch.equal(stochastic.round_stochastic(exact.float(), 9), exact)


def test_stochastic_rounding_may_carry_into_the_exponent() -> None:
    value = torch.full((4096,), 2.0 - 2.0**-9)
    assert set(stochastic.round_stochastic(value, 1).tolist()) == {2.0 - 2.0**-7, 2.0}


def test_seeds_differ() -> None:
    seeds = {
        stochastic.seed_of(t, p, s) for t in (0, 1, 2**63 + 5) for p in range(20) for s in range(20)
    }
    assert len(seeds) == 3 * 20 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stochastic.seed_of(1, 2, 3) == stochastic.seed_of(1, 2, 3)


# --- compiled to C++


def compare_compiled(
    rule: Callable[..., None],
    tensors: Sequence[Any],
    hypers: Sequence[tuple[float, ...]],
    *,
    seeded: bool,
) -> tuple[list[Any], list[Any]]:
    """The tensors after steps of the compiled rule, and of the rule; it is compiled once."""
    compiled = torch.compile(rule, dynamic=True, fullgraph=True, options={"cpp_wrapper": True})
    mine, its = copying.deepcopy(list(tensors)), copying.deepcopy(list(tensors))
    try:
        for step, hyper in enumerate(hypers):
            seed = torch.tensor(stochastic.seed_of(0, 0, step)) if seeded else None
            compiled(*mine, torch.tensor(hyper), seed)
            rule(*its, torch.tensor(hyper), seed)
            torch.compiler.set_stance("fail_on_recompile")
    finally:
        torch.compiler.set_stance("default")
    return mine, its


def test_compiled_adam_is_the_rule() -> None:
    """With a bf16 parameter, stochastically rounded, and fp32 moments."""
    _, _, group = run_stock(torch.optim.AdamW, start(), [])
    hypers = [ADAM.hyper({**group, "lr": 1e-2 / step}, step=step) for step in (1, 2, 3)]
    param, grad = start(dtype=torch.bfloat16), grads(dtype=torch.bfloat16)[0]
    tensors = [param, grad, (torch.zeros(NUMEL), torch.zeros(NUMEL), None), None]
    mine, its = compare_compiled(adam_, tensors, hypers, seeded=True)
    assert all(distance(mine[2][k], its[2][k]) <= 1e-6 for k in range(2))
    assert distance(mine[0], its[0]) <= 2.0**-7
    assert (mine[0] != its[0]).double().mean() <= 1e-3


@pytest.mark.parametrize("nesterov", [False, True])
def test_compiled_8_bit_sgd_is_the_rule(nesterov: bool) -> None:
    """With an fp32 master and its copy."""
    options = {"momentum": 0.9, "nesterov": nesterov}
    _, _, group = run_stock(torch.optim.SGD, start(), [], lr=0.1, **options)
    hypers = [SGD.hyper(group, first=step == 0) for step in range(3)]
    copy = torch.zeros(NUMEL, dtype=torch.bfloat16)
    tensors = [start(), grads()[0], (quantized_zeros(NUMEL)[0],), copy]
    mine, its = compare_compiled(sgd_, tensors, hypers, seeded=False)
    assert distance(mine[0], its[0]) <= 1e-6
    assert (mine[2][0][0].int() - its[2][0][0].int()).abs().max() <= 1
    assert torch.equal(mine[3], mine[0].bfloat16())


# --- what is known of optimizers


def test_a_rule_knows_its_states() -> None:
    assert [len(rule.moments) for rule in (ADAM, SGD)] == [3, 1]
    assert ADAM.state_names({"amsgrad": False}) == ("exp_avg", "exp_avg_sq")
    assert ADAM.state_names({"amsgrad": True}) == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    assert SGD.state_names({"momentum": 0.9}) == ("momentum_buffer",)
    assert not SGD.has_states({"momentum": 0})
    assert [ADAM.signed(moment.name) for moment in ADAM.moments] == [True, False, False]


def test_an_optimizer_is_known_by_its_very_class() -> None:
    class Mine(torch.optim.AdamW):
        """May do anything in its step."""

    params = [torch.nn.Parameter(torch.zeros(1))]
    assert rule_of(torch.optim.AdamW(params)) is ADAM
    assert rule_of(Mine(params)) is None
    muon = known(torch.optim.Muon)
    assert muon is not None and muon not in RULES
    classes = [kind for each in KNOWN for kind in each.types]
    assert len(classes) == len(set(classes)), "an optimizer has two rules"


def test_states_that_may_be_missing_come_last() -> None:
    """The kernel is told of those that there are, and takes them for the first ones."""
    for rule in RULES:
        optional = [moment.option is not None for moment in rule.moments]
        assert optional == sorted(optional), rule.name
