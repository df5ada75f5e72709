"""The head in chunks where sizes or numbers change from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import schedules
from megacompile.ir import head
from megacompile.ir.capture import Capture
from megacompile.ir.schedule import Schedule
from megacompile.options import Head, Lowering
from megacompile.passes.capture import chunk
from megacompile.plan import pipeline
from tests import inside
from tests.zoo import equal, twins

WIDTH, CLASSES, CHUNK_ROWS = 8, 40, 16


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "CHUNK_BYTES", CHUNK_ROWS * CLASSES * 4)
    for module in (chunk, head):
        monkeypatch.setattr(module, "ALIGNED_ROWS", 2)  # so that chunks are smaller than the most


Loss = Callable[["Model", Tensor, Tensor, int], Tensor]


class Model(nn.Module):
    """An embedding, a layer, and `loss(model, hidden, ids, count)`."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.loss = loss

    def forward(self, ids: Tensor, count: int = 7) -> Tensor:  # (rows, length) int64
        return self.loss(self, torch.tanh(self.layer(self.embed(ids))), ids, count)


def hf(m: Model, x: Tensor, ids: Tensor, count: int) -> Tensor:
    """As transformers' ForCausalLMLoss does with `num_items_in_batch`."""
    logits = m.head(x).float()
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, CLASSES), labels, reduction="sum") / count


def sliced(m: Model, x: Tensor, ids: Tensor, count: int) -> Tensor:
    logits = m.head(x)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), ids[..., 1:].contiguous().view(-1))


def shaped(m: Model, x: Tensor, ids: Tensor, count: int) -> Tensor:
    """With sizes of the logits."""
    logits = m.head(x)
    rows, length, classes = logits.shape
    return F.cross_entropy(logits.view(rows * length, classes), ids.view(rows * length))


def kept(m: Model, x: Tensor, ids: Tensor, count: int) -> Tensor:
    """The last `count` tokens."""
    logits = m.head(x)[:, ids.shape[1] - count :, :]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, ids.shape[1] - count :])


LOSSES = [hf, sliced, shaped, kept]


def tokens(rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + length)
    return torch.randint(CLASSES, (rows, length), generator=generator)


def made(loss: Loss, head: str) -> tuple[Any, Any]:
    return twins(Model(loss), head=head, progress=False)


def gradients(model: nn.Module, *args: Any) -> list[Tensor]:
    """The loss, and the gradients."""
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def logits_in(schedule: Schedule, rows: int) -> list[str]:
    """What the stages compute with a number for each of `rows` tokens and each class."""
    return [
        str(node)
        for stage in schedule.stages
        for module in stage.traced.graphs.values()
        for node in module.graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor)
        and CLASSES in value.shape
        and value.numel() >= rows * CLASSES
    ]


def check(loss: Loss, calls: list[tuple[Any, ...]], *, head: str = "chunked") -> Any:
    """Streams calls with symbols: near to plain, and the very bits of calls with fixed sizes."""
    plain, streamed = made(loss, head)
    _, fixed = made(loss, head)
    for args in calls:
        found = gradients(streamed, *args)
        for mine, theirs in zip(gradients(plain, *args), found, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-5 * float(mine.abs().max()))
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            assert all(map(equal, gradients(fixed, *args), found))
    assert all(schedule.symbols is None for schedule in schedules(fixed))
    return streamed


@pytest.mark.parametrize("loss", LOSSES)
def test_lengths_and_batches(loss: Loss) -> None:
    sizes = [(2, 9), (2, 14), (3, 30), (3, 11)]
    streamed = check(loss, [(tokens(*size),) for size in sizes])
    schedule = schedules(streamed)[-1]
    assert schedule.symbols is not None
    assert len(schedule.symbols.planned) == 2
    assert "is computed in chunks of at most 16 tokens" in schedule.plan.reasons[0]
    assert not logits_in(schedule, 60)
    assert "head of " in str(schedule)


def test_a_number_of_items_leaves_the_head_in_chunks() -> None:
    """Trainer's `num_items_in_batch`: nothing of the head is a symbol."""
    x = tokens(3, 20)
    streamed = check(hf, [(x, 200), (x, 190), (x, 31), (x, 17)])
    schedule = schedules(streamed)[-1]
    assert schedule.symbols is not None
    assert schedule.plan.reasons[0].startswith(
        "the head of 60 tokens by 40 classes (9.38 KiB of logits) is computed in chunks of 16 "
    )
    assert not logits_in(schedule, 60)


def test_many_logits_have_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto" a size gets what it would get alone, whatever came before."""

    def auto(capture: Capture, **_: object) -> tuple[Capture, tuple[str, ...]]:
        return chunk.chunk_head(capture, head=Head.AUTO, lowering=Lowering.INDUCTOR)

    monkeypatch.setattr(pipeline, "chunk_head", auto)
    streamed = check(sliced, [(tokens(2, n),) for n in (5, 7, 20, 6, 9, 10, 33)], head="auto")
    programs = inside.programs(streamed)
    reasons = [program.stages.plan.reasons[0] for program in programs]
    assert [reason.startswith("the head is whole") for reason in reasons] == [True, True, False]
    assert [program.holds([9]) for program in programs[1:]] == [True, False]
    assert [program.holds([10]) for program in programs[1:]] == [False, True]
