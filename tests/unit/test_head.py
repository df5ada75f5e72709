"""The operator of a head in chunks against `cross_entropy(linear(...))`, in the same run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megacompile.ir.head import linear_cross_entropy
from megacompile.runtime.ops.head import _linear_cross_entropy, bind_operators

bind_operators()

WIDTH, CLASSES, CHUNK = 12, 97, 64
IGNORED = -100


@dataclass
class Head:
    hidden: Tensor  # (rows, WIDTH)
    weight: Tensor  # (CLASSES, WIDTH)
    bias: Tensor | None
    target: Tensor  # (rows,)
    class_weight: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def plain(self, mean: bool = True) -> Tensor:
        logits = F.linear(self.hidden, self.weight, self.bias)
        given = {"reduction": "mean" if mean else "sum", **self.options}
        return F.cross_entropy(logits, self.target, self.class_weight, **given)

    def chunked(self, mean: bool = True, chunk: int = CHUNK) -> Tensor:
        options = {"ignore_index": IGNORED, "label_smoothing": 0.0, "mean": mean, **self.options}
        inputs = (self.hidden, self.weight, self.bias, self.target, self.class_weight)
        return linear_cross_entropy(*inputs, chunk_rows=chunk, dtype=torch.float32, **options)

    def gradients(self, loss: Tensor, scale: float = 1.0) -> list[Tensor]:
        return list(torch.autograd.grad(loss * scale, self.leaves))


def make(
    rows: int, *, bias: bool = False, ignored: float = 0.25, weighted: bool = False, **options: Any
) -> Head:
    g = torch.Generator().manual_seed(0)
    target = torch.randint(0, CLASSES, (rows,), generator=g)
    target[torch.rand(rows, generator=g) < ignored] = IGNORED

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).requires_grad_()

    hidden, weight, offset = leaf(rows, WIDTH), leaf(CLASSES, WIDTH), leaf(CLASSES)
    of_class = torch.rand(CLASSES, generator=g) if weighted else None
    return Head(hidden, weight, offset if bias else None, target, of_class, options)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest element of what is wanted; NaN for NaN."""
    assert got.dtype == want.dtype and got.shape == want.shape
    atol = tolerance * float(want.detach().nan_to_num().abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=atol, equal_nan=True)


def same(head: Head, mean: bool, *, scale: float = 1.0, chunk: int = CHUNK) -> None:
    want, got = head.plain(mean), head.chunked(mean, chunk)
    close(got, want)
    pairs = zip(head.gradients(got, scale), head.gradients(want, scale), strict=True)
    for mine, theirs in pairs:
        close(mine, theirs)


def test_any_count_of_tokens_and_size_of_chunk() -> None:
    for rows, chunk in ((1, 64), (7, 64), (64, 64), (255, 1), (255, 63), (255, 1000), (1023, 64)):
        same(make(rows, bias=True, ignored=0.0), True, chunk=chunk)
        if rows > 1:
            same(make(rows), False, chunk=chunk)


def test_what_cross_entropy_takes() -> None:
    """Where every token is ignored the mean is NaN, its gradient is zero; the sum is zero."""
    for mean, weighted, label_smoothing, ignored in itertools.product(
        (True, False), (True, False), (0.0, 0.1, 1.0), (IGNORED, 3)
    ):
        options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": ignored}
        head = make(255, bias=True, weighted=weighted, **options)
        head.target[head.target == IGNORED] = ignored
        same(head, mean, scale=3.0)
        head = make(7, ignored=1.1, bias=True, weighted=weighted, label_smoothing=label_smoothing)
        loss = head.chunked(mean)
        assert torch.isnan(loss) if mean else loss == 0
        assert all(g.eq(0).all() for g in head.gradients(loss))
        same(head, mean)


def test_tokens_that_have_no_weight_or_no_number_and_classes_of_an_infinite_bias() -> None:
    head = make(7, ignored=0.0, weighted=True)
    assert head.class_weight is not None
    head.class_weight.zero_()
    same(head, True)
    assert torch.isnan(head.gradients(head.chunked())[0]).all()
    head = make(7, ignored=0.0, bias=True)
    head.target.clamp_(min=10)
    assert head.bias is not None
    with torch.no_grad():
        head.bias[:10] = float("-inf")
    same(head, True)
    head = make(7)
    head.target[3] = IGNORED
    with torch.no_grad():
        head.hidden[3] = float("nan")
    close(head.chunked(), head.plain())
    assert head.chunked().isfinite()


@pytest.mark.parametrize("target", [CLASSES, -1])
def test_a_target_that_is_no_class(target: int) -> None:
    head = make(7)
    head.target[3] = target
    for loss in (head.plain, head.chunked):
        with pytest.raises(IndexError, match=str(target)):
            loss()


# --- memory and work


class Watch(TorchDispatchMode):
    """The largest tensor that any operator gives, and how many matrix products there are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def watched(call: Callable[[], Any]) -> Watch:
    watch = Watch()
    with watch:
        call()
    return watch


def test_no_more_than_a_chunk_of_logits_and_no_work_that_nobody_wants() -> None:
    head, chunks = make(255), 4

    def run(*flags: bool) -> Watch:
        inputs = (head.hidden, head.weight, None, head.target, head.class_weight)
        return watched(lambda: _linear_cross_entropy(*inputs, IGNORED, 0.1, CHUNK, *flags))

    assert run(True, True, False).largest == CHUNK * CLASSES < 255 * CLASSES
    assert watched(head.plain).largest == 255 * CLASSES
    assert run(False, False, False).products == chunks
    assert run(True, False, False).products == 2 * chunks
    assert run(True, True, False).products == 3 * chunks
    with FlopCounterMode(display=False) as counter:
        head.chunked()
    assert counter.get_total_flops() == 3 * 2 * 255 * WIDTH * CLASSES
