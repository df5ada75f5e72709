"""The operator of a head in chunks against `cross_entropy(linear(...))`, in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.head import main
from megacompile.ir.head import linear_cross_entropy
from megacompile.runtime.ops.head import _linear_cross_entropy, bind_operators

bind_operators()

WIDTH, CLASSES, CHUNK = 12, 97, 64
IGNORED = -100


@dataclass
class Head:
    """The inputs of a head, as leaves."""

    hidden: Tensor  # (rows, WIDTH)
    weight: Tensor  # (CLASSES, WIDTH)
    bias: Tensor | None
    target: Tensor  # (rows,)
    class_weight: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def plain(self, *, mean: bool) -> Tensor:
        logits = F.linear(self.hidden, self.weight, self.bias)
        loss = F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)),
            self.target,
            self.class_weight,
            reduction="mean" if mean else "sum",
            **self.options,
        )
        return loss

    def chunked(self, *, mean: bool, chunk: int = CHUNK, dtype: Any = torch.float32) -> Tensor:
        options = {"ignore_index": IGNORED, "label_smoothing": 0.0, **self.options}
        return linear_cross_entropy(
            self.hidden,
            self.weight,
            self.bias,
            self.target,
            self.class_weight,
            mean=mean,
            chunk_rows=chunk,
            dtype=dtype,
            **options,
        )

    def gradients(self, loss: Tensor, scale: float = 1.0) -> list[Tensor]:
        return list(torch.autograd.grad(loss * scale, self.leaves))


def make(
    rows: int,
    *,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    ignored: float = 0.25,
    weighted: bool = False,
    seed: int = 0,
    **options: Any,
) -> Head:
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(0, CLASSES, (rows,), generator=g)
    target[torch.rand(rows, generator=g) < ignored] = IGNORED
    return Head(
        hidden=torch.randn(rows, WIDTH, generator=g).to(dtype).requires_grad_(),
        weight=torch.randn(CLASSES, WIDTH, generator=g).to(dtype).requires_grad_(),
        bias=torch.randn(CLASSES, generator=g).to(dtype).requires_grad_() if bias else None,
        target=target,
        class_weight=torch.rand(CLASSES, generator=g) if weighted else None,
        options=options,
    )


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest element of what is wanted; NaN for NaN."""
    assert got.dtype == want.dtype and got.shape == want.shape
    atol = tolerance * float(want.detach().nan_to_num().abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=atol, equal_nan=True)


def same(head: Head, *, mean: bool, scale: float = 1.0, chunk: int = CHUNK) -> None:
    want, got = head.plain(mean=mean), head.chunked(mean=mean, chunk=chunk)
    close(got, want)
    pairs = zip(head.gradients(got, scale), head.gradients(want, scale), strict=True)
    for mine, theirs in pairs:
        close(mine, theirs)


@pytest.mark.parametrize("mean", [True, False])
def test_any_count_of_tokens_and_size_of_chunk(mean: bool) -> None:
    for rows in (1, 7, 64, 255, 1023):
        same(make(rows, bias=True, ignored=0.0), mean=mean)
        if rows > 1:
            same(make(rows), mean=mean)
    for chunk in (1, 63, 64, 255, 1000):
        same(make(255, bias=True), mean=mean, chunk=chunk)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_what_cross_entropy_takes(weighted: bool, label_smoothing: float, mean: bool) -> None:
    """Where every token is ignored the mean is NaN, its gradient is zero; the sum is zero."""
    for ignored in (-100, 3):
        options: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": ignored}
        head = make(255, bias=True, weighted=weighted, **options)
        head.target[head.target == IGNORED] = ignored
        same(head, mean=mean, scale=3.0)
    head = make(7, ignored=1.1, bias=True, weighted=weighted, label_smoothing=label_smoothing)
    loss = head.chunked(mean=mean)
    assert torch.isnan(loss) if mean else loss == 0
    assert all(g.eq(0).all() for g in head.gradients(loss))
    same(head, mean=mean)


def test_tokens_of_no_weight_and_classes_of_an_infinite_bias() -> None:
    head = make(7, ignored=0.0, weighted=True)
    assert head.class_weight is not None
    head.class_weight.zero_()
    same(head, mean=True)
    assert torch.isnan(head.gradients(head.chunked(mean=True))[0]).all()
    head = make(7, ignored=0.0, bias=True)
    head.target.clamp_(min=10)
    assert head.bias is not None
    with torch.no_grad():
        head.bias[:10] = float("-inf")
    same(head, mean=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_as_exact_as_the_plain_head(dtype: torch.dtype) -> None:
    """Errors against float64, where many chunks are added up."""
    head = make(1023, dtype=dtype)
    exact = make(1023, dtype=dtype)
    exact.hidden, exact.weight = (t.detach().double().requires_grad_() for t in head.leaves)
    want = exact.gradients(exact.plain(mean=True))
    plain = head.gradients(head.plain(mean=True))
    got = head.gradients(head.chunked(mean=True, chunk=16))
    for mine, theirs, true in zip(got, plain, want, strict=True):
        assert mine.dtype == dtype
        error, allowed = ((g.double() - true).norm() for g in (mine, theirs))
        assert error <= allowed, (error / true.norm(), allowed / true.norm())


def test_a_loss_scale_saves_float16_from_underflow() -> None:
    """A mean over many tokens is divided where the scale is multiplied, not before."""
    head = make(4096, dtype=torch.float16, ignored=0.0)
    scale = 2.0**16
    got = head.gradients(head.chunked(mean=True), scale)[0]
    exact = make(4096, dtype=torch.float16, ignored=0.0)
    exact.hidden, exact.weight = (t.detach().double().requires_grad_() for t in head.leaves)
    want = exact.gradients(exact.plain(mean=True), scale)[0]
    assert (got.double() - want).norm() <= 2e-3 * want.norm()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    head = make(255, bias=True)
    want = head.gradients(head.plain(mean=True))
    names = ["hidden", "weight", "bias"]
    getattr(head, frozen).requires_grad_(False)
    loss = head.chunked(mean=True)
    rest = [n for n in names if n != frozen]
    found = torch.autograd.grad(loss, [getattr(head, n) for n in rest])
    for name, got in zip(rest, found, strict=True):
        close(got, want[names.index(name)])


def test_backward_twice_over_one_graph() -> None:
    """Saved gradients are scaled into new memory."""
    head = make(255)
    loss = head.chunked(mean=True)
    first = torch.autograd.grad(loss, head.leaves, retain_graph=True)
    again = torch.autograd.grad(loss, head.leaves, torch.tensor(2.0))
    for one, two in zip(first, again, strict=True):
        close(two, 2 * one)


class Seen(TorchDispatchMode):
    """The dtypes that the operator gets, and which gradients it is to compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "linear_cross_entropy" in str(func):
            self.calls.append((args[0].dtype, args[1].dtype, *args[-3:]))
        return func(*args, **(kwargs or {}))


def test_autocast_and_no_grad() -> None:
    """In autocast it computes in bf16, but for double precision; without grad no gradients."""
    head, wide = make(255, bias=True), make(7, dtype=torch.float64)
    with Seen() as seen:
        with torch.autocast("cpu", torch.bfloat16):
            want, got = head.plain(mean=True), head.chunked(mean=True)
            wide.chunked(mean=True)
        with torch.no_grad():
            assert not head.chunked(mean=True).requires_grad
    bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
    assert seen.calls[0] == (bf16, bf16, True, True, True)
    assert seen.calls[1] == (f64, f64, True, True, False)
    assert seen.calls[2] == (f32, f32, False, False, False)
    close(got, want, 1e-4)
    for mine, theirs in zip(head.gradients(got), head.gradients(want), strict=True):
        close(mine, theirs, 1e-2)  # bf16


def test_what_is_in_an_ignored_row_does_not_count() -> None:
    head = make(7)
    head.target[3] = IGNORED
    with torch.no_grad():
        head.hidden[3] = float("nan")
    close(head.chunked(mean=True), head.plain(mean=True))
    assert head.chunked(mean=True).isfinite()


@pytest.mark.parametrize("target", [CLASSES, -1])
def test_a_target_that_is_no_class(target: int) -> None:
    head = make(7)
    head.target[3] = target
    for loss in (head.plain, head.chunked):
        with pytest.raises(IndexError, match=str(target)):
            loss(mean=True)


# --- memory and work


class Watch(TorchDispatchMode):
    """The largest tensor that an operator gives, and how many matrix products there are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0
        self.products = 0

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


def run(head: Head, *flags: bool) -> Callable[[], Any]:
    rest = (head.class_weight, IGNORED, 0.1, CHUNK)
    return lambda: _linear_cross_entropy(head.hidden, head.weight, None, head.target, *rest, *flags)


def test_no_more_than_a_chunk_of_logits() -> None:
    head = make(1023)
    largest = max(CHUNK * CLASSES, head.weight.numel(), head.hidden.numel())
    assert watched(run(head, True, True, False)).largest == largest < 1023 * CLASSES
    assert watched(lambda: head.plain(mean=True)).largest == 1023 * CLASSES


def test_no_work_for_gradients_that_nobody_wants() -> None:
    head, chunks = make(255), 4
    with FlopCounterMode(display=False) as counter:
        head.chunked(mean=True)
    assert counter.get_total_flops() == 3 * 2 * 255 * WIDTH * CLASSES
    assert watched(run(head, False, False, False)).products == chunks
    assert watched(run(head, True, False, False)).products == 2 * chunks
    assert watched(run(head, True, True, False)).products == 3 * chunks
    with torch.no_grad():
        assert watched(lambda: head.plain(mean=True)).products == 1


@pytest.mark.thorough
def test_the_benchmark_on_a_small_head() -> None:
    sizes = "--device cpu --dtype float32 --tokens 255 --width 32 --vocabulary 500 --steps 1"
    rows = main([*sizes.split(), "--chunk-mib", "0.1", "1"])
    for row in rows[:3]:
        assert row["loss"] == rows[0]["loss"]
        assert all(float(str(row[f"error of {name}"])) < 1e-6 for name in ("dx", "dW"))
