"""`p.grad` that answers for its norm and takes factors, without a pass over its memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.errors import BackwardError
from megacompile.runtime.params.guards import GuardedTensor
from megacompile.runtime.params.lazy import HostGradient, lazy_of
from tests import zoo
from tests.zoo import twins

SHAPES = [(4, 3), (5,), (), (2, 2, 2)]


def parameters() -> list[nn.Parameter]:
    """With gradients that are plain tensors."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


class Watched:
    """Parameters like `parameters()` whose gradients are served; counts the waits."""

    def __init__(self, *, norms: bool = True, lie: float = 1.0) -> None:
        """`lie` is a factor of the norms, to tell that they were used."""
        self.params = parameters()
        self.settled = 0
        self.guards = []
        for i, param in enumerate(self.params):
            values = grad(param)
            known = (lie * float(values.norm()), lie * float(values.abs().max()))
            norm = (lambda known=known: known) if norms else None
            made = HostGradient(values, self._settle, norm, f"p{i}")
            self.guards.append(made)

    def _settle(self) -> None:
        self.settled += 1

    def scales(self) -> list[float]:
        return [guard.scale for guard in self.guards]

    def plain(self) -> list[bool]:
        """Which gradients are plain tensors again?"""
        return [type(grad(param)) is Tensor for param in self.params]


def assert_gradients(watched: Watched, wants: list[nn.Parameter], factor: float = 1.0) -> None:
    for param, want in zip(watched.params, wants, strict=True):
        torch.testing.assert_close(grad(param) + 0, grad(want) * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2, 2.0, math.inf])
def test_clip_grad_norm(norm_type: float, foreach: bool | None) -> None:
    """The gradients are not read, and not written: the factor is noted."""
    wants, watched = parameters(), Watched()
    memory = [grad(p).data_ptr() for p in wants]
    want = nn.utils.clip_grad_norm_(wants, 0.5, norm_type, foreach=foreach)
    got = nn.utils.clip_grad_norm_(watched.params, 0.5, norm_type, foreach=foreach)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert type(got) is Tensor
    assert not any(watched.plain())
    assert set(watched.scales()) == {watched.scales()[0]} and watched.scales()[0] < 1
    assert memory == [grad(p).data_ptr() for p in wants]
    assert_gradients(watched, wants)
    assert all(watched.plain())
    assert watched.scales() == [1.0] * len(SHAPES)


def test_the_norms_are_those_it_was_given() -> None:
    watched = Watched(lie=10.0)
    total = nn.utils.get_total_norm([grad(p) for p in watched.params])
    want = nn.utils.get_total_norm([grad(p) for p in parameters()])
    torch.testing.assert_close(total, 10 * want, rtol=1e-6, atol=0)
    assert watched.settled == 0 and not any(watched.plain())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_norms_are_of_the_gradients_dtype(dtype: torch.dtype, norm_type: float) -> None:
    """As torch's are; so is the factor that gradients which are not served are multiplied by."""
    values = torch.arange(1.0, 12.0).to(dtype)
    gradient = values.clone()
    largest = float(values.float().norm()), float(values.abs().max())
    HostGradient(gradient, lambda: None, lambda: largest, "p")
    want = nn.utils.get_total_norm([values, values], norm_type)
    got = nn.utils.get_total_norm([gradient, values], norm_type)
    assert got.dtype is want.dtype is dtype
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("norm_type", [1, 3, 0.5])
def test_other_norms_are_computed(norm_type: float) -> None:
    wants, watched = parameters(), Watched(lie=10.0)
    want = nn.utils.clip_grad_norm_(wants, 0.5, norm_type)
    got = nn.utils.clip_grad_norm_(watched.params, 0.5, norm_type)
    assert zoo.equal(want, got)
    assert all(watched.plain())
    for mine, theirs in zip(wants, watched.params, strict=True):
        assert zoo.equal(grad(mine), grad(theirs))


def test_unknown_norms_are_computed_and_factors_are_not_lost() -> None:
    wants, watched = parameters(), Watched(norms=False)
    assert zoo.equal(
        nn.utils.clip_grad_norm_(wants, 0.5), nn.utils.clip_grad_norm_(watched.params, 0.5)
    )
    assert_gradients(watched, wants)


def test_clipped_twice() -> None:
    wants, watched = parameters(), Watched()
    for largest in (0.5, 0.1, 10.0):
        want = nn.utils.clip_grad_norm_(wants, largest)
        got = nn.utils.clip_grad_norm_(watched.params, largest)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert not any(watched.plain())
    assert_gradients(watched, wants)


def test_a_factor_waits_for_an_update_that_runs() -> None:
    watched = Watched()
    grad(watched.params[0]).mul_(2)
    assert watched.settled == 1
    assert watched.scales() == [2.0, 1.0, 1.0, 1.0]
    assert not any(watched.plain())


def test_a_negative_factor() -> None:
    watched = Watched()
    want = float(grad(parameters()[0]).norm())
    grad(watched.params[0]).mul_(-3)
    assert float(grad(watched.params[0]).norm()) == pytest.approx(3 * want)


USES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda g: g + 1,
    "clone": lambda g: g.clone(),
    "sum": lambda g: g.sum(),
    "item": lambda g: g[0, 0].item(),
    "numpy": lambda g: g.numpy().copy(),
    "deepcopy": copy.deepcopy,
    "mul by a tensor": lambda g: g.mul_(torch.ones(4, 3)),
    "zero_": lambda g: g.zero_(),
    "norm with dim": lambda g: torch.linalg.vector_norm(g, dim=0),
    "detach": lambda g: g.detach().clone(),
    "repr": repr,
    "div_": lambda g: g.div_(2),
}


@pytest.mark.parametrize("use", USES)
def test_any_other_use_multiplies_first(use: str) -> None:
    want, watched = grad(parameters()[0]), Watched()
    got = grad(watched.params[0])
    for gradient in (want, got):
        gradient.mul_(0.5)
    assert isinstance(got, GuardedTensor)
    mine, theirs = USES[use](want), USES[use](got)
    if isinstance(mine, Tensor):
        assert zoo.equal(mine, theirs)
    elif isinstance(mine, (str, float)):
        assert mine == theirs
    else:
        assert (mine == theirs).all()
    assert type(got) is Tensor and zoo.equal(want, got)
    assert watched.plain() == [True, False, False, False]


def test_metadata_is_no_use() -> None:
    watched = Watched()
    gradient = grad(watched.params[0])
    assert (gradient.shape, gradient.dtype, gradient.numel()) == ((4, 3), torch.float32, 12)
    assert gradient.layout is torch.strided and not gradient.is_sparse
    assert not any(watched.plain()) and watched.settled == 0
    assert lazy_of(gradient) is watched.guards[0]
    assert lazy_of(None) is None and lazy_of(torch.ones(1)) is None


def test_an_edit_gives_the_norm_of_what_it_is_then() -> None:
    wants, watched = parameters(), Watched()
    for params in (wants, watched.params):
        grad(params[0]).add_(1)
    want = nn.utils.clip_grad_norm_(wants, 0.5)
    got = nn.utils.clip_grad_norm_(watched.params, 0.5)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert_gradients(watched, wants)


def test_an_edit_that_nobody_was_asked_about() -> None:
    """Autograd accumulates in C++: the version tells."""
    wants, watched = parameters(), Watched(lie=10.0)
    for params in (wants, watched.params):
        (params[1] * 3).sum().backward()
    want = nn.utils.clip_grad_norm_(wants, 0.5)
    got = nn.utils.clip_grad_norm_([watched.params[1]], 1e9)
    torch.testing.assert_close(got, torch.linalg.vector_norm(grad(parameters()[1]) + 3))
    assert float(want) > float(got)


def test_accumulation_behind_clipping_is_refused() -> None:
    """Half of the gradient would be scaled."""
    watched = Watched()
    nn.utils.clip_grad_norm_(watched.params, 0.5)
    (watched.params[1] * 3).sum().backward()
    with pytest.raises(BackwardError, match="'p1' was scaled .*call that backward before you clip"):
        watched.guards[1].check(grad(watched.params[1]))
    with pytest.raises(BackwardError, match="'p1' was scaled"):
        grad(watched.params[1]).sum()


def test_mixed_with_plain_gradients() -> None:
    wants, watched = parameters(), Watched()
    plain = grad(watched.params[2]) + 0
    watched.params[2].grad = plain
    want = nn.utils.clip_grad_norm_(wants, 0.5)
    got = nn.utils.clip_grad_norm_(watched.params, 0.5)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert_gradients(watched, wants)


def test_nan_norms() -> None:
    wants = parameters()
    grad(wants[0])[0, 0] = math.nan
    watched = Watched()
    for guard in watched.guards:
        guard.norms = lambda: (math.nan, math.nan)
    assert nn.utils.clip_grad_norm_(watched.params, 0.5).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(wants, 0.5, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(watched.params, 0.5, error_if_nonfinite=True)


def test_end_to_end() -> None:
    """Norms are taken by the schedule; clipping opens no gradient, and the step takes the factor.

    Then: accumulation on top of clipped gradients, and a use of them.
    """
    plain, streamed = twins(zoo.unused()[0], lowering="inductor", progress=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, streamed)]

    def assert_close() -> None:
        for want, got in zip(plain.parameters(), streamed.parameters(), strict=True):
            torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-7)

    for i in range(4):
        for model in (plain, streamed):
            zoo.step(model, zoo.batch(i))
            if i % 2:
                zoo.step(model, zoo.batch(i + 10))  # accumulates
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (plain, streamed)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        guards = [lazy_of(p.grad) for p in streamed.parameters() if p.grad is not None]
        assert all(isinstance(guard, HostGradient) and guard.scale < 1 for guard in guards)
        if i == 2:
            for model in (plain, streamed):  # a backward behind the clipping, of the model itself
                zoo.step(model, zoo.batch(i + 20))
        for optimizer in optimizers:
            optimizer.step()
        assert_close()
        for optimizer in optimizers:
            optimizer.zero_grad()
