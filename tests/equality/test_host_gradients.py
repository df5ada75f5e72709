"""`p.grad` on the host takes the factor of `clip_grad_norm_` without a pass over its memory, and
answers for its norm. On the device that is a matter of test_resident.py."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from megacompile import megacompile
from megacompile.errors import BackwardError
from tests.stateful.late import late
from tests.zoo import equal, uncompiled

SHAPES = [(4, 3), (5,), (), (2, 2, 2)]
Params = list[nn.Parameter]


class Weighted(nn.Module):
    """The gradients of its parameters are what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)

    def forward(self, *factors: Tensor) -> Tensor:
        products = [(p * factor).sum() for p, factor in zip(self.weights, factors, strict=True)]
        return torch.stack(products).sum()


def streamed(model: nn.Module) -> nn.Module:
    return megacompile(model, device="cpu", lowering="inductor", progress=False)


Both = Callable[..., tuple[Params, Params]]


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    """The parameters of a plain and a streamed model, behind a backward with the same gradients."""
    made: dict[torch.dtype, tuple[nn.Module, nn.Module]] = {}

    def backward(dtype: torch.dtype = torch.float32) -> tuple[Params, Params]:
        if dtype not in made:
            made[dtype] = Weighted(dtype), streamed(Weighted(dtype))
        torch.manual_seed(0)
        gradients = [torch.randn(shape).to(dtype) for shape in SHAPES]
        for model in made[dtype]:
            model.zero_grad()
            model(*gradients).backward()
        wants, params = (list(model.parameters()) for model in made[dtype])
        assert not any(is_plain(params))
        return wants, params

    with pytest.MonkeyPatch.context() as patched:  # stages run as they are, compiled by nobody
        patched.setattr(torch._inductor, "compile", uncompiled)
        yield backward


def grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


def is_plain(params: Params) -> list[bool]:
    """Which gradients are plain tensors: those that answer for nothing any more?"""
    return [type(grad(param)) is Tensor for param in params]


def assert_gradients(params: Params, wants: Params, *, bits: bool = False) -> None:
    for param, want in zip(params, wants, strict=True):
        if bits:
            assert equal(grad(param) + 0, grad(want) + 0)
        else:
            torch.testing.assert_close(grad(param) + 0, grad(want) + 0, rtol=1e-6, atol=0)


def test_clipping_reads_and_writes_nothing(both: Both) -> None:
    """Until somebody looks: the factor is noted."""
    for norm_type, foreach in itertools.product((2, math.inf), (None, True, False)):
        wants, params = both()
        for largest in (0.5, 0.1, 10.0):
            want = nn.utils.clip_grad_norm_(wants, largest, norm_type, foreach=foreach)
            got = nn.utils.clip_grad_norm_(params, largest, norm_type, foreach=foreach)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
            assert type(got) is Tensor and not any(is_plain(params)), (norm_type, foreach)
        gradient = grad(params[0])
        looks = gradient.shape, gradient.dtype, gradient.is_sparse
        assert looks == ((4, 3), torch.float32, False)
        assert not any(is_plain(params)), "looks that need no values"
        for each in (wants, params):
            grad(each[0]).mul_(-3)
        torch.testing.assert_close(grad(params[0]).norm(), grad(wants[0]).norm())
        assert_gradients(params, wants)
        assert all(is_plain(params))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_are_of_the_gradients_dtype(both: Both, dtype: torch.dtype) -> None:
    """As torch's are; so is the factor that gradients which are not served are multiplied by."""
    wants, params = both(dtype)
    for norm_type in (2, math.inf):
        want = nn.utils.get_total_norm(map(grad, wants), norm_type)
        got = nn.utils.get_total_norm([*map(grad, params[:2]), *map(grad, wants[2:])], norm_type)
        assert got.dtype is want.dtype is dtype
        torch.testing.assert_close(got, want)


def test_other_norms_are_computed_and_those_that_are_not_finite_refused(both: Both) -> None:
    wants, params = both()
    want = nn.utils.clip_grad_norm_(wants, 0.5, 3)
    assert equal(want, nn.utils.clip_grad_norm_(params, 0.5, 3))
    assert_gradients(params, wants, bits=True)
    wants, params = both()
    nn.utils.clip_grad_norm_(params, math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(params, 0.5, error_if_nonfinite=True)


EDITS: list[Callable[[Params], Any]] = [
    lambda params: grad(params[0]).add_(1),
    # autograd does that in C++, and asks nobody: the version tells
    lambda params: (params[1] * 3).sum().backward(),
    lambda params: setattr(params[2], "grad", grad(params[2]) + 0),
]


def test_an_edit_gives_the_norm_of_what_it_is_then(both: Both) -> None:
    for edit in EDITS:
        wants, params = both()
        for each in (wants, params):
            edit(each)
        want, got = (nn.utils.clip_grad_norm_(each, 0.5) for each in (wants, params))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        assert_gradients(params, wants)


USES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda g: g + 1,
    "item": lambda g: g[0, 0].item(),
    "numpy": lambda g: g.numpy().copy(),
    "deepcopy": copy.deepcopy,
    "mul by a tensor": lambda g: g.mul_(torch.ones(4, 3)),
    "zero_": lambda g: g.zero_(),
    "norm with dim": lambda g: torch.linalg.vector_norm(g, dim=0),
    "norm with out": lambda g: torch.linalg.vector_norm(g, out=torch.empty(())),
    "repr": repr,
}


def test_any_other_use_multiplies_first(both: Both) -> None:
    for name, use in USES.items():
        wants, params = both()
        want, got = grad(wants[0]), grad(params[0])
        for gradient in (want, got):
            gradient.mul_(torch.tensor(0.5))
        assert type(got) is not Tensor
        mine, theirs = use(want), use(got)
        if isinstance(mine, Tensor):
            assert equal(mine, theirs), name
        else:
            assert (mine == theirs) if isinstance(mine, (str, float)) else (mine == theirs).all()
        assert type(got) is Tensor and equal(want, got), name
        assert type(grad(params[1])) is not Tensor, "the others wait"


def test_accumulation_behind_clipping_is_refused(both: Both) -> None:
    """Half of the gradient would be scaled."""
    _, params = both()
    nn.utils.clip_grad_norm_(params, 0.5)
    (params[1] * 3).sum().backward()
    with pytest.raises(BackwardError, match="weights.1"):
        grad(params[1]).sum()


def test_scaling_waits_for_an_update_that_runs(both: Both) -> None:
    """Which takes the factor that there was."""
    model = streamed(Weighted(torch.float32))
    model(*(torch.ones(shape) for shape in SHAPES)).backward()
    params, workers = list(model.parameters()), late(model)
    grad(params[0]).mul_(0.5)
    SGD(params, lr=1.0).step()
    assert not workers.ran
    grad(params[0]).mul_(0.0)
    assert workers.ran
    assert [set(param.detach().flatten().tolist()) for param in params] == [{-0.5}, *[{-1.0}] * 3]
