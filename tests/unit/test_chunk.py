"""`chunk_head`: which heads it computes in chunks, for sizes that are fixed and that change.

Which it leaves as they are, and why: tests/messages/test_stages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from megacompile import Head, Lowering, compat
from megacompile.ir.capture import Capture
from megacompile.ir.head import linear_cross_entropy
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.capture.chunk import chunk_head, rows_of_a_chunk
from megacompile.runtime.ops.head import bind_operators
from tests import capturing

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


def flat(logits: Any, ids: Any, **options: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), **options)


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
    # mean is 1, sum is 2 there
    "low level": lambda head, x, ids: compat.CROSS_ENTROPY_LOSS(
        head(x).flatten(0, 1), ids.flatten(), None, 2, 7, 0.1
    ),
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


def chunked(given: Capture, **options: Any) -> tuple[Capture, tuple[str, ...]]:
    settings: dict[str, Any] = {"head": Head.CHUNKED, "lowering": Lowering.EAGER}
    settings["chunk_bytes"] = CHUNK_ROWS * ROW_BYTES
    before = str(given.module.graph)
    result = chunk_head(given, **{**settings, **options})
    assert str(given.module.graph) == before, "its input is as it was"
    return result


class Largest(fx.Interpreter):
    """Runs a graph; the size of the largest tensor that it computes."""

    numel = 0

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if n.op not in ("placeholder", "output") and isinstance(found, Tensor):
            self.numel = max(self.numel, found.numel())
        return found


def largest(of: Capture, *inputs: Any) -> int:
    runs = Largest(of.module)
    runs.run(*inputs)
    return runs.numel


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


def assert_close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("name", [*LOSSES, ""])
def test_what_is_computed_in_chunks(name: str) -> None:
    """Loss and gradients are those of the graph; no tensor as large as the logits is left."""
    before = made_of(LOSSES.get(name, hf), bias=bool(name))
    after, reasons = chunked(before)
    targets = [node.target for node in after.module.graph.nodes]
    assert linear_cross_entropy in targets and F.linear not in targets, reasons
    assert all("is computed in chunks of" in reason for reason in reasons)
    given = (X, WEIGHT, BIAS, IDS)
    rows = 5 if name == "steps" else BATCH * (LENGTH - 1)
    if name != "last alone":
        assert largest(after, *given) < rows * CLASSES <= largest(before, *given)
    assert_close(gradients(after, *given), gradients(before, *given))


# Sizes that change from call to call.


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
    after, (reason,) = chunked(before)
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
        after, _ = chunked(changing(shaped), **options, chunk_bytes=rows * ROW_BYTES)
        targets = [node.target for node in after.module.graph.nodes]
        assert (linear_cross_entropy in targets) == in_chunks

        def holds(n: int, conditions: Any = after.conditions) -> bool:
            assert conditions
            return all(bool(each.subs({ROWS: BATCH, ANY: n})) for each in conditions)

        assert [holds(n) for n in (LENGTH - 1, LENGTH, LENGTH + 1)] == (
            [False, True, True] if in_chunks else [True, True, False]
        )


# When it is worth it.


def test_what_the_option_leaves() -> None:
    given = made_of(hf)
    auto = {"head": Head.AUTO}
    assert chunked(given, head=Head.WHOLE)[0] is given
    assert chunked(given, **auto)[0] is given, "the eager lowering is bitwise"
    large = {**auto, "lowering": Lowering.INDUCTOR, "chunk_bytes": BATCH * LENGTH * ROW_BYTES}
    assert chunked(given, **large)[0] is given
    large["chunk_bytes"] = BATCH * LENGTH * ROW_BYTES - 1
    assert chunked(given, **large)[0] is not given


def test_chunks_are_tiles_and_equal() -> None:
    for rows, row_bytes, expected in (
        (65536, 2 * 152064, 3456),  # 19 chunks of 1 GiB at most, of whole tiles
        (16384, 2 * 152064, 3328),  # 5
        (100, 2 * 152064, 128),
        (4096, 2**30, 1),
        (4096, 2**24, 64),
    ):
        assert rows_of_a_chunk(rows, row_bytes, 2**30) == expected
