"""The rows' Triton kernel against the gradient that autograd finds of the same sum.

On a CUDA device it is compiled, and all of this file is marked `gpu`; elsewhere Triton's
interpreter runs it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = [pytest.mark.gpu] if ON_GPU else []


def chunk(count: int, classes: int, dtype: torch.dtype = FP32, *, weighted: bool = False) -> Any:
    """Rows of which every third is ignored."""
    g = torch.Generator().manual_seed(classes)
    logits = (4 * torch.randn(count, classes, generator=g)).to(dtype)
    valid = torch.arange(count) % 3 != 1
    target = torch.where(valid, torch.randint(0, classes, (count,), generator=g), 0)
    weight = torch.rand(classes, generator=g).to(DEVICE) if weighted else None
    return SimpleNamespace(
        logits=logits.to(DEVICE),
        target=target.to(DEVICE),
        valid=valid.to(DEVICE),
        class_weight=weight,
        weight_sum=float(classes) if weight is None else weight.sum(),
    )


def check(of: Any, label_smoothing: float = 0.0, *, block: int = 256) -> None:
    """Logarithms of sums, weighted sums and gradients; without a gradient the logits stay."""
    from megacompile.runtime.ops.cross_entropy_kernel import normalize_rows

    smooth, before = label_smoothing != 0, of.logits.clone()
    weight = torch.ones(before.shape[1], device=DEVICE)
    weight = weight if of.class_weight is None else of.class_weight
    a = weight[of.target] * of.valid * (1 - label_smoothing)
    b = of.valid * (label_smoothing / before.shape[1])
    z = before.float().requires_grad_()
    lse = z.logsumexp(1)
    loss = a * (lse - z.gather(1, of.target[:, None])[:, 0])
    weighted = (z * weight).sum(1) if smooth else None
    if weighted is not None:
        loss = loss + b * (of.weight_sum * lse - weighted)
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    for with_gradient in (False, True):
        mine, sums = normalize_rows(of, a, b, smooth=smooth, gradient=with_gradient, block=block)
        torch.testing.assert_close(mine, lse.detach(), rtol=1e-6, atol=1e-6)
        assert (sums is None) == (weighted is None)
        if sums is not None and weighted is not None:  # in another order: by what is added
            of_terms = (z * weight).abs().sum(1)
            torch.testing.assert_close(
                sums / of_terms, (weighted / of_terms).detach(), rtol=0.0, atol=1e-6
            )
        assert with_gradient or torch.equal(of.logits, before)
    # in the logits' dtype: a unit in the last place
    eps = torch.finfo(before.dtype).eps
    wanted = gradient.to(before.dtype)
    torch.testing.assert_close(of.logits, wanted, rtol=2 * eps, atol=1e-6)
    assert of.logits.isfinite().all()


@pytest.mark.parametrize(
    ("classes", "dtype", "weighted", "label_smoothing"),
    list(AllPairs([[1, 255, 256, 257, 1000], [FP32, BF16, FP16], [True, False], [0.0, 0.1]])),
)
def test_kernel_and_autograd(
    classes: int, dtype: torch.dtype, weighted: bool, label_smoothing: float
) -> None:
    """Smoothing over weighted classes is left to torch."""
    weighted = weighted and not label_smoothing
    check(chunk(5, classes, dtype, weighted=weighted), label_smoothing)


def test_blocks_of_infinite_logits_and_those_far_from_zero() -> None:
    """Masked classes at the start, at the end, and a whole block of them."""
    of = chunk(4, 1000)
    of.logits[:, :600] = float("-inf")
    of.logits[:, 900:] = float("-inf")
    of.target.fill_(700)
    check(of)
    of = chunk(4, 600)
    of.logits.add_(1e4)
    check(of)


@pytest.mark.gpu
def test_the_classes_of_a_large_model() -> None:
    check(chunk(300, 152064, BF16), 0.1, block=8192)
