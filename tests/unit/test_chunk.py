"""`chunk_head`: which heads it computes in chunks, for sizes that are fixed and that change.

And the operator of such a head. Which it leaves as they are, and why:
tests/messages/test_stages.py.
"""

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

from megacompile import Head, Lowering
from megacompile.ir.capture import Capture
from megacompile.ir.head import linear_cross_entropy
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.capture.chunk import chunk_head, rows_of_a_chunk
from megacompile.passes.capture.propagate import Values, propagate
from megacompile.runtime.ops.head import _linear_cross_entropy, bind_operators
from tests import capturing
from tests.equality.nets import flat

bind_operators()

BATCH, LENGTH, WIDTH, CLASSES = 2, 9, 8, 40
CHUNK_ROWS = 5
ROW_BYTES = CLASSES * 4
IDS = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
X = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(4))
WEIGHT = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(5)) / 4
BIAS = torch.linspace(-1, 1, CLASSES)
ROWS, ANY = (capturing.symbol(name) for name in ("b", "n"))


class Projection:
    """A head, as the losses below call it."""

    def __init__(self, weight: Any, bias: Any) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Any) -> Any:
        return F.linear(x, self.weight, self.bias)


Loss = Callable[[Any, Any, Any], Any]  # of a head, hidden states and ids


def hf(head: Any, x: Any, ids: Any) -> Any:
    """As transformers' ForCausalLMLoss does."""
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    logits = head(x).float().view(-1, CLASSES)
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="mean")


def sliced(head: Any, x: Any, ids: Any) -> Any:
    """As transformers did before: shifted by slicing."""
    logits = head(x)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), ids[..., 1:].contiguous().view(-1))


def shaped(head: Any, x: Any, ids: Any) -> Any:
    logits = head(x)
    shape = logits.shape
    return F.cross_entropy(logits.view(shape[0] * shape[1], shape[2]), ids.view(-1))


def permuted(head: Any, x: Any, ids: Any) -> Any:
    return F.cross_entropy(head(x)[:, :-1].permute(0, 2, 1), ids[:, 1:])


def functional(head: Any, x: Any, ids: Any) -> Any:
    logits = F.linear(bias=head.bias, input=x.reshape(-1, WIDTH), weight=head.weight)
    return F.cross_entropy(target=ids.reshape(-1), input=torch.reshape(logits, (-1, CLASSES)))


def weighted(head: Any, x: Any, ids: Any) -> Any:
    weight, logits = torch.full((CLASSES,), 1.5), head(x).to(torch.float32)
    return flat(logits, ids, weight=weight, label_smoothing=0.1, ignore_index=7)


LOSSES: dict[str, Loss] = {
    "hf": hf,
    "sliced": sliced,
    "shaped": shaped,
    "permuted": permuted,
    # every second token of the second sequence
    "steps": lambda head, x, ids: F.cross_entropy(head(x)[1][::2], ids[1, ::2]),
    "last alone": lambda head, x, ids: F.cross_entropy(head(x)[0, -1], ids[0, 0]),
    "functional": functional,
    "weighted": weighted,
    "two heads of one weight": lambda head, x, ids: (
        flat(head(x), ids, reduction="sum") + flat(F.linear(x * 2, head.weight), ids)
    ),
}


def made_of(loss: Loss, *inputs: Any, bias: bool = True) -> Capture:
    """A captured graph of (hidden states, weight, bias, ids), or with sizes that change."""

    def function(x: Any, weight: Any, offset: Any, ids: Any) -> Any:
        return loss(Projection(weight, offset if bias else None), x, ids)

    return capturing.traced(function, *(inputs or (X, WEIGHT, BIAS, IDS)))


def chunked(given: Capture, **options: Any) -> tuple[Capture, tuple[str, ...], Values]:
    """The graph after the pass, its lines, and the values, which are those of the new graph."""
    settings: dict[str, Any] = {"head": Head.CHUNKED, "lowering": Lowering.EAGER}
    settings["chunk_bytes"] = CHUNK_ROWS * ROW_BYTES
    made = given.fresh()
    values = propagate(made)
    chunk_head(made, values=values, **{**settings, **options})
    again = propagate(made)
    for node in made.module.graph.nodes:
        assert values.of[node] == again.of[node]
        assert values.mutates[node] == again.mutates[node] == frozenset()
    return made, tuple(values.reasons), values


def is_unchanged(given: Capture, **options: Any) -> bool:
    return str(chunked(given, **options)[0].module.graph) == str(given.module.graph)


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


def largest(of: Capture, *inputs: Any) -> int:
    return watched(lambda: of.module(*inputs)).largest


def gradients(of: Capture, *inputs: Any) -> list[Tensor]:
    """The loss, and the gradients of all inputs that have one."""
    given = [
        t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in inputs
    ]
    loss = of.module(*given)
    loss.backward()
    found = [t.grad for t in given if isinstance(t, Tensor) and t.requires_grad]
    return [loss.detach(), *(g for g in found if g is not None)]


def close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest element of what is wanted; NaN for NaN."""
    assert got.dtype == want.dtype and got.shape == want.shape
    atol = tolerance * float(want.detach().nan_to_num().abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=atol, equal_nan=True)


def assert_close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        close(one, other, 2e-5)


@pytest.mark.parametrize("name", [*LOSSES, ""])
def test_what_is_computed_in_chunks(name: str) -> None:
    """Loss and gradients are those of the graph; no tensor as large as the logits is left."""
    before = made_of(LOSSES.get(name, hf), bias=bool(name))
    after, reasons, _ = chunked(before)
    targets = [node.target for node in after.module.graph.nodes]
    assert linear_cross_entropy in targets and F.linear not in targets, reasons
    assert all("is computed in chunks of" in reason for reason in reasons)
    given = (X, WEIGHT, BIAS, IDS)
    rows = 5 if name == "steps" else BATCH * (LENGTH - 1)
    if name != "last alone":
        assert largest(after, *given) < rows * CLASSES <= largest(before, *given)
    assert_close(gradients(after, *given), gradients(before, *given))


def changing(loss: Loss) -> Capture:
    """Rows and lengths are symbols."""

    def function(b: Any, n: Any, x: Any, weight: Any, offset: Any, ids: Any) -> Any:
        return loss(Projection(weight, offset), x, ids)

    numbers = capturing.number("b", BATCH), capturing.number("n", LENGTH)
    x = capturing.sized(TensorMeta.of(X), ROWS, ANY, WIDTH)
    ids = capturing.sized(TensorMeta.of(IDS), ROWS, ANY)
    return capturing.traced(function, *numbers, x, WEIGHT, BIAS, ids)


@pytest.mark.parametrize("loss", [hf, shaped, permuted])
def test_lengths_and_batches_that_change(loss: Loss) -> None:
    before = changing(loss)
    after, (reason,), _ = chunked(before)
    assert "in chunks of at most 5 tokens" in reason
    for b, n in ((2, 9), (2, 14), (3, 30), (1, 3)):
        generator = torch.Generator().manual_seed(n)
        ids = torch.randint(CLASSES, (b, n), generator=generator)
        given = (b, n, torch.randn(b, n, WIDTH, generator=generator), WEIGHT, BIAS, ids)
        assert_close(gradients(after, *given), gradients(before, *given))


def test_many_logits_have_another_program() -> None:
    """With "auto" a size gets what it would get alone, whatever came before."""
    options = {"head": Head.AUTO, "lowering": Lowering.INDUCTOR}
    for rows, in_chunks in ((BATCH * LENGTH - 1, True), (BATCH * LENGTH, False)):
        after, _, values = chunked(changing(shaped), **options, chunk_bytes=rows * ROW_BYTES)
        targets = [node.target for node in after.module.graph.nodes]
        assert (linear_cross_entropy in targets) == in_chunks

        assert values.symbols is not None
        holds = values.symbols.fakes.holds
        assert [holds(BATCH, n) for n in (LENGTH - 1, LENGTH, LENGTH + 1)] == (
            [False, True, True] if in_chunks else [True, True, False]
        )


def test_what_the_option_leaves() -> None:
    given = made_of(hf)
    auto = {"head": Head.AUTO}
    assert is_unchanged(given, head=Head.WHOLE)
    assert is_unchanged(given, **auto), "the eager lowering is bitwise"
    large = {**auto, "lowering": Lowering.INDUCTOR, "chunk_bytes": BATCH * LENGTH * ROW_BYTES}
    assert is_unchanged(given, **large)
    large["chunk_bytes"] = BATCH * LENGTH * ROW_BYTES - 1
    assert not is_unchanged(given, **large)


def test_chunks_are_tiles_and_equal() -> None:
    for rows, row_bytes, expected in (
        (65536, 2 * 152064, 3456),  # 19 chunks of 1 GiB at most, of whole tiles
        (16384, 2 * 152064, 3328),  # 5
        (100, 2 * 152064, 128),
        (4096, 2**30, 1),
        (4096, 2**24, 64),
    ):
        assert rows_of_a_chunk(rows, row_bytes, 2**30) == expected


INNER, WORDS, CHUNK = 12, 97, 64
IGNORED = -100


@dataclass
class ChunkedHead:
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
) -> ChunkedHead:
    g = torch.Generator().manual_seed(0)
    target = torch.randint(0, WORDS, (rows,), generator=g)
    target[torch.rand(rows, generator=g) < ignored] = IGNORED

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).requires_grad_()

    hidden, weight, offset = (leaf(rows, INNER), leaf(WORDS, INNER), leaf(WORDS))
    of_class = torch.rand(WORDS, generator=g) if weighted else None
    return ChunkedHead(hidden, weight, offset if bias else None, target, of_class, options)


def same(head: ChunkedHead, mean: bool, *, scale: float = 1.0, chunk: int = CHUNK) -> None:
    want, got = head.plain(mean), head.chunked(mean, chunk)
    close(got, want)
    assert_close(head.gradients(got, scale), head.gradients(want, scale))


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


@pytest.mark.parametrize("target", [WORDS, -1])
def test_a_target_that_is_no_class(target: int) -> None:
    head = make(7)
    head.target[3] = target
    for loss in (head.plain, head.chunked):
        with pytest.raises(IndexError, match=str(target)):
            loss()


def test_no_more_than_a_chunk_of_logits_and_no_work_that_nobody_wants() -> None:
    head, chunks = make(255), 4

    def run(*flags: bool) -> Watch:
        inputs = (head.hidden, head.weight, None, head.target, head.class_weight)
        return watched(lambda: _linear_cross_entropy(*inputs, IGNORED, 0.1, CHUNK, *flags))

    assert run(True, True, False).largest == CHUNK * WORDS < 255 * WORDS
    assert watched(head.plain).largest == 255 * WORDS
    assert run(False, False, False).products == chunks
    assert run(True, False, False).products == 2 * chunks
    assert run(True, True, False).products == 3 * chunks
    with FlopCounterMode(display=False) as counter:
        head.chunked()
    assert counter.get_total_flops() == 3 * 2 * 255 * INNER * WORDS
