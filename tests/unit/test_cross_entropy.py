"""The rows' Triton kernel against its twin in plain torch, which other tests hold to torch.

On a CUDA device it is compiled, and all of this file is marked `gpu`; elsewhere Triton's
interpreter runs it.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megacompile.runtime.ops.head import normalize_plain, rows
from megacompile.runtime.ops.rows import Rows
from tests.draws import pairwise

pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BLOCK = 256

pytestmark = [pytest.mark.gpu] if ON_GPU else []


def chunk(count: int, classes: int, dtype: torch.dtype, *, weighted: bool) -> Rows:
    g = torch.Generator().manual_seed(classes)
    logits = (4 * torch.randn(count, classes, generator=g)).to(dtype)
    target = torch.randint(0, classes, (count,), generator=g)
    target[1::3] = -100
    weight = torch.rand(classes, generator=g).to(DEVICE) if weighted else None
    return Rows.of(logits.to(DEVICE), target.to(DEVICE), weight, -100)


def copy(of: Rows) -> Rows:
    return dataclasses.replace(of, logits=of.logits.clone())


def both(
    of: Rows, label_smoothing: float, *, gradient: bool = True
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """(lse, weighted sums, gradients) by the kernel and by the twin."""
    from megacompile.runtime.ops.cross_entropy_kernel import normalize_rows

    a, b = of.coefficients(label_smoothing)
    mine, theirs = copy(of), copy(of)
    smooth = label_smoothing != 0
    got = normalize_rows(mine, a, b, smooth=smooth, gradient=gradient, block=BLOCK)
    want = normalize_plain(theirs, a, b, smooth=smooth, gradient=gradient)
    return [*got, mine.logits], [*want, theirs.logits]


@pytest.mark.parametrize(
    ("classes", "dtype", "weighted", "label_smoothing"),
    pairwise([1, 255, 256, 257, 1000], [FP32, BF16, FP16], [True, False], [0.0, 0.1]),
)
def test_kernel_and_twin(
    classes: int, dtype: torch.dtype, weighted: bool, label_smoothing: float
) -> None:
    got, want = both(chunk(5, classes, dtype, weighted=weighted), label_smoothing)
    for mine, theirs, tolerance in zip(got, want, (1e-6, 1e-5, None), strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
        elif tolerance is None:  # the gradient, in the logits' dtype: a unit in the last place
            torch.testing.assert_close(mine, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
        else:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_without_a_gradient_the_logits_stay() -> None:
    of = chunk(5, 300, FP32, weighted=False)
    for *_, logits in both(of, 0.1, gradient=False):
        assert logits is not None and torch.equal(logits, of.logits)


def test_blocks_of_infinite_logits() -> None:
    """Masked classes at the start, at the end, and a whole block of them."""
    of = chunk(4, 1000, FP32, weighted=False)
    of.logits[:, :600] = float("-inf")
    of.logits[:, 900:] = float("-inf")
    of.target.fill_(700)
    got, want = both(of, 0.0)
    for mine, theirs in zip(got, want, strict=True):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
            assert mine.isfinite().all()


def test_logits_far_from_zero() -> None:
    of = chunk(4, 600, FP32, weighted=False)
    of.logits.add_(1e4)
    got, want = both(of, 0.0)
    torch.testing.assert_close(got[0], want[0], rtol=1e-7, atol=0)


@pytest.mark.gpu
def test_rows_on_the_gpu_are_those_of_the_twin() -> None:
    """`rows` takes the kernel there."""
    of = chunk(300, 152064, BF16, weighted=False)
    on_host = Rows.of(of.logits.cpu(), of.target.cpu(), None, ignore_index=-1)
    mine = copy(of)
    valid = mine.valid.cpu()
    on_host = dataclasses.replace(on_host, valid=valid)
    got, want = rows(mine, 0.0, gradient=True), rows(on_host, 0.0, gradient=True)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(mine.logits.cpu(), on_host.logits, rtol=2**-7, atol=1e-7)
