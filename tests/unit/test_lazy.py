"""`p.grad` on the host takes the factor of `clip_grad_norm_` without a pass over its memory, and
answers for its norm. On the device that is a matter of equality/test_resident.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.errors import BackwardError
from megacompile.runtime.params.lazy import HostGradient
from tests.zoo import equal

SHAPES = [(4, 3), (5,), (), (2, 2, 2)]
DTYPES = [torch.bfloat16, torch.float16, torch.float64]
Params = list[nn.Parameter]


def parameters() -> Params:
    """With gradients that are plain tensors."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape)
    return params


def grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


class Watched:
    """Parameters like `parameters()` with gradients on the host; counts the waits."""

    def __init__(self, *, norms: bool = True, lie: float = 1.0) -> None:
        """`lie` is a factor of the norms, to tell that they were used."""
        self.params = parameters()
        self.settled = 0
        self.guards = []
        for i, param in enumerate(self.params):
            values = grad(param)
            known = (lie * float(values.norm()), lie * float(values.abs().max()))
            norm = (lambda known=known: known) if norms else None
            self.guards.append(HostGradient(values, self._settle, norm, f"p{i}"))

    def _settle(self) -> None:
        self.settled += 1


def plain(params: Params) -> list[bool]:
    """Which gradients are plain tensors again?"""
    return [type(grad(param)) is Tensor for param in params]


def assert_gradients(params: Params, wants: Params, *, bits: bool = False) -> None:
    for param, want in zip(params, wants, strict=True):
        if bits:
            assert equal(grad(param) + 0, grad(want) + 0)
        else:
            torch.testing.assert_close(grad(param) + 0, grad(want) + 0, rtol=1e-6, atol=0)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_clipping_on_the_host(norm_type: float, foreach: bool | None) -> None:
    """The gradients are not read, and not written: the factor is noted."""
    wants, watched = parameters(), Watched()
    for largest in (0.5, 0.1, 10.0):
        want = nn.utils.clip_grad_norm_(wants, largest, norm_type, foreach=foreach)
        got = nn.utils.clip_grad_norm_(watched.params, largest, norm_type, foreach=foreach)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        scales = {guard.scale for guard in watched.guards}
        assert type(got) is Tensor and len(scales) == 1 and max(scales) < 1
    assert watched.settled, "it waits for an update that runs"
    assert not any(plain(watched.params))
    for params in (wants, watched.params):
        grad(params[0]).mul_(-3)
    torch.testing.assert_close(grad(watched.params[0]).norm(), grad(wants[0]).norm())
    assert_gradients(watched.params, wants)
    assert all(plain(watched.params)) and {guard.scale for guard in watched.guards} == {1.0}


def test_the_norms_are_those_it_was_given_and_looks_settle_nothing() -> None:
    watched = Watched(lie=10.0)
    total = nn.utils.get_total_norm([grad(p) for p in watched.params])
    want = nn.utils.get_total_norm([grad(p) for p in parameters()])
    torch.testing.assert_close(total, 10 * want, rtol=1e-6, atol=0)
    gradient = grad(watched.params[0])
    assert (gradient.shape, gradient.dtype, gradient.is_sparse) == ((4, 3), torch.float32, False)
    assert watched.settled == 0 and not any(plain(watched.params))
    for guard in watched.guards:
        guard.norms = lambda: (math.nan, math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(watched.params, 0.5, error_if_nonfinite=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_of_the_gradients_dtype(dtype: torch.dtype) -> None:
    """As torch's are; so is the factor that gradients which are not served are multiplied by."""
    values = torch.arange(1.0, 12.0).to(dtype)
    gradient = values.clone()
    largest = float(values.float().norm()), float(values.abs().max())
    HostGradient(gradient, lambda: None, lambda: largest, "p")
    for norm_type in (2, math.inf):
        want = nn.utils.get_total_norm([values, values], norm_type)
        got = nn.utils.get_total_norm([gradient, values], norm_type)
        assert got.dtype is want.dtype is dtype
        torch.testing.assert_close(got, want)


def test_norms_that_nobody_knows_are_computed() -> None:
    for norm_type, known in ((3, True), (2, False)):
        wants, watched = parameters(), Watched(norms=known, lie=10.0)
        want = nn.utils.clip_grad_norm_(wants, 0.5, norm_type)
        assert equal(want, nn.utils.clip_grad_norm_(watched.params, 0.5, norm_type))
        assert_gradients(watched.params, wants, bits=known)


EDITS: list[Callable[[Params], Any]] = [
    lambda params: grad(params[0]).add_(1),
    # autograd does that in C++, and asks nobody: the version tells
    lambda params: (params[1] * 3).sum().backward(),
    lambda params: setattr(params[2], "grad", grad(params[2]) + 0),
]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_gives_the_norm_of_what_it_is_then(edit: Callable[[Params], None]) -> None:
    wants, watched = parameters(), Watched()
    for params in (wants, watched.params):
        edit(params)
    want = nn.utils.clip_grad_norm_(wants, 0.5)
    got = nn.utils.clip_grad_norm_(watched.params, 0.5)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert_gradients(watched.params, wants)


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


@pytest.mark.parametrize("use", USES)
def test_any_other_use_multiplies_first(use: str) -> None:
    want, params = grad(parameters()[0]), Watched().params
    got = grad(params[0])
    for gradient in (want, got):
        gradient.mul_(torch.tensor(0.5))
    assert type(got) is not Tensor
    mine, theirs = USES[use](want), USES[use](got)
    if isinstance(mine, Tensor):
        assert equal(mine, theirs)
    else:
        assert (mine == theirs) if isinstance(mine, (str, float)) else (mine == theirs).all()
    assert type(got) is Tensor and equal(want, got)
    assert type(grad(params[1])) is not Tensor, "the others wait"


def test_accumulation_behind_clipping_is_refused() -> None:
    """Half of the gradient would be scaled."""
    params = Watched().params
    nn.utils.clip_grad_norm_(params, 0.5)
    (params[1] * 3).sum().backward()
    with pytest.raises(BackwardError, match="'p1'"):
        grad(params[1]).sum()
