"""`chunk_head`: which heads it computes in chunks, and why it leaves the others as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from megacompile import compat
from megacompile.ir.capture import Ambient, Capture, TensorInput
from megacompile.ir.head import linear_cross_entropy
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ParamRef
from megacompile.ir.tensors import TensorMeta
from megacompile.options import Head, Lowering
from megacompile.passes.capture import chunk
from megacompile.passes.capture.chunk import chunk_head
from megacompile.passes.capture.inline import inline_checkpoints
from megacompile.passes.capture.propagate import propagate
from megacompile.passes.stages.partition import partition
from megacompile.runtime.ops.head import bind_operators
from tests.capturing import CPU, Captured, capture, run_stages

bind_operators()

BATCH, LENGTH, WIDTH, CLASSES = 2, 9, 8, 40
IDS = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
CHUNK_ROWS = 5

Loss = Callable[["Model", Tensor, Tensor], Any]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "CHUNK_BYTES", CHUNK_ROWS * CLASSES * 4)


class Model(nn.Module):
    """An embedding, a layer, and `loss(model, hidden, ids)`."""

    def __init__(self, loss: Loss, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.register_buffer("class_weight", torch.linspace(0.5, 2, CLASSES))
        self.loss = loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:  # (batch, length) int64
        return self.loss(self, torch.tanh(self.layer(self.embed(ids))), ids)


def flat(logits: Tensor, ids: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), **options)


def chunked(captured: Captured, **options: Any) -> tuple[Capture, tuple[str, ...]]:
    settings: dict[str, Any] = {"head": Head.CHUNKED, "lowering": Lowering.EAGER, **options}
    before = str(captured.capture.module.graph)
    result = chunk_head(captured.capture, **settings)
    assert str(captured.capture.module.graph) == before, "its input is as it was"
    return result


def targets(of: Capture) -> list[Any]:
    return [node.target for node in of.module.graph.nodes]


def largest(of: Capture, *, rows: int) -> list[str]:
    """What a graph computes that is as large as the logits of `rows` tokens, or larger."""
    metas = propagate(of).of
    return [
        str(node)
        for node, meta in metas.items()
        if node.op not in ("placeholder", "get_attr")
        and isinstance(meta, TensorMeta)
        and torch.Size(meta.shape).numel() >= rows * CLASSES
    ]


# --- what is recognised


def hf(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """As transformers' ForCausalLMLoss does."""
    logits = m.head(x).float()
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, CLASSES), labels, ignore_index=-100, reduction="mean")


def hf_summed(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    logits = m.head(x).float()
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, CLASSES), labels, reduction="sum") / 13


def sliced(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """As transformers did before: shifted by slicing."""
    logits = m.head(x)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), ids[..., 1:].contiguous().view(-1))


def sized(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """As nanoGPT does: with sizes of the logits."""
    logits = m.head(x)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), ids.view(-1), ignore_index=-1)


def shaped(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    logits = m.head(x)
    b, t, c = logits.shape
    return F.cross_entropy(logits.view(b * t, c), ids.view(b * t))


def transposed(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).transpose(1, 2), ids)


def permuted(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x)[:, :-1].permute(0, 2, 1), ids[:, 1:])


def steps(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Every second token of the second sequence."""
    return F.cross_entropy(m.head(x)[1][::2], ids[1, ::2])


def last_alone(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x)[0, -1], ids[0, 0])


def functional(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    logits = F.linear(bias=m.head.bias, input=x.reshape(-1, WIDTH), weight=m.head.weight)
    return F.cross_entropy(target=ids.reshape(-1), input=torch.reshape(logits, (-1, CLASSES)))


def low_level(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Mean is 1, sum is 2 there."""
    logits = torch._C._nn.linear(x, m.head.weight, m.head.bias).flatten(0, 1)
    loss: Tensor = compat.CROSS_ENTROPY_LOSS(logits, ids.flatten(), None, 2, 7, 0.1)
    return loss


def module_loss(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    weight = m.get_buffer("class_weight")
    loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1, ignore_index=7)
    result: Tensor = loss(m.head(x).to(torch.float32).flatten(0, 1), ids.flatten())
    return result


def under_checkpoint(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda x, ids: flat(m.head(x), ids), x, ids, use_reentrant=False)
    return result


def twice(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Two heads, the first one's input changed in place after the last of its readers."""
    first = flat(m.head(x), ids, reduction="sum")
    return first + flat(F.linear(x * 2, m.embed.weight), ids)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "loss",
    [
        hf,
        hf_summed,
        sliced,
        sized,
        shaped,
        transposed,
        permuted,
        steps,
        last_alone,
        functional,
        low_level,
        module_loss,
        under_checkpoint,
        twice,
    ],
)
def test_what_is_computed_in_chunks(loss: Loss, bias: bool) -> None:
    """Loss and gradients are those of the model; no tensor as large as the logits is left."""
    captured = capture(Model(loss, bias=bias), IDS)
    after, reasons = chunked(captured)
    assert linear_cross_entropy in targets(after), reasons
    assert targets(after).count(F.linear) == 1, "that of the layer"
    assert all(reason.startswith("the head of ") for reason in reasons)
    few: dict[Loss, int] = {steps: 5, last_alone: 4}
    rows = few.get(loss, BATCH * (LENGTH - 1))
    assert largest(inline_checkpoints(captured.capture), rows=rows)
    assert not largest(after, rows=rows)

    schedule = partition(after, captured.units)
    params = dict(captured.model.named_parameters())
    want = captured.model(IDS)
    (got,) = run_stages(captured, schedule)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert got.dtype == want.dtype
    theirs = torch.autograd.grad(want, list(params.values()), allow_unused=True)
    mine = torch.autograd.grad(got, list(params.values()), allow_unused=True)
    for name, a, b in zip(params, mine, theirs, strict=True):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def test_questions_of_size_become_numbers() -> None:
    """Dynamo writes none of these where it knows the sizes; other tracers do."""

    def function(x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        logits = F.linear(x, weight)
        shape = logits.shape
        loss = F.cross_entropy(logits.view(shape[0] * shape[1], logits.size(-1)), y.view(-1))
        return loss, logits.dim()

    x, weight = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(CLASSES, WIDTH)
    inputs = tuple(TensorInput(TensorMeta.of(t)) for t in (x, weight, IDS))
    module = fx.symbolic_trace(function)
    traced = Capture("traced", module, inputs, CPU, Ambient.current(CPU))
    after, (reason,) = chunk_head(traced, head=Head.CHUNKED, lowering=Lowering.EAGER)
    assert "in chunks of 5 tokens" in reason and not largest(after, rows=BATCH * LENGTH)
    got, dims = after.module(x, weight, IDS)
    torch.testing.assert_close(got, module(x, weight, IDS)[0])
    assert dims == 3


def test_a_loss_in_bfloat16_stays_one() -> None:
    """Without a cast the loss has the dtype of the logits; ours is rounded once, at the end."""
    captured = capture(Model(sized).bfloat16(), IDS)
    after, _ = chunked(captured)
    (got,) = run_stages(captured, partition(after, captured.units))
    want = captured.model(IDS)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2**-7, atol=0)


def test_the_reason_says_what_was_found() -> None:
    _, reasons = chunked(capture(Model(hf), IDS))
    assert reasons == (
        "the head of 18 tokens by 40 classes (2.81 KiB of logits) is computed in chunks "
        "of 5 tokens",
    )


def test_the_head_stays_in_its_module() -> None:
    """In its meta; so the head's bucket is read by the stage that the loss is in."""
    captured = capture(Model(hf), IDS, limit_bytes=4 * WIDTH * WIDTH)  # a unit a module
    after, _ = chunked(captured)
    head = captured.capture.module.graph.find_nodes(op="call_function", target=F.linear)[-1]
    for new in after.module.graph.find_nodes(op="call_function", target=linear_cross_entropy):
        assert compat.module_calls(new) == compat.module_calls(head) != []
    schedule: Schedule = partition(after, captured.units)
    last = schedule.stages[-1]
    names = [captured.param_name(last, i) for i in range(len(last.primals))]
    assert "head.weight" in names and len(schedule.stages) > 1
    assert all(
        not isinstance(ref, ParamRef) or captured.param_name(stage, i) != "head.weight"
        for stage in schedule.stages[:-1]
        for i, ref in enumerate(stage.primals)
    )
    assert [meta.shape for meta in last.outputs] == [()]


# --- what is left as it is


def returned(m: Model, x: Tensor, ids: Tensor) -> Any:
    logits = m.head(x)
    return flat(logits, ids), logits


def returned_in_float(m: Model, x: Tensor, ids: Tensor) -> Any:
    logits = m.head(x).float().view(-1, CLASSES)
    return F.cross_entropy(logits, ids.view(-1)), logits


def also_accuracy(m: Model, x: Tensor, ids: Tensor) -> Any:
    logits = m.head(x)
    return flat(logits, ids), (logits.argmax(-1) == ids).sum()


def two_losses(m: Model, x: Tensor, ids: Tensor) -> Any:
    logits = m.head(x)
    return flat(logits, ids) + logits.logsumexp(-1).square().mean()


def capped(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return flat(torch.tanh(m.head(x) / 30) * 30, ids)


def masked_in_place(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    logits = m.head(x)
    logits[..., :3] = float("-inf")
    return flat(logits, ids.clamp(min=3))


def per_token(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return flat(m.head(x), ids, reduction="none").mean()


def probabilities(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    wanted = F.one_hot(ids, CLASSES).float()
    return F.cross_entropy(m.head(x).flatten(0, 1), wanted.flatten(0, 1))


def part_of_the_classes(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return flat(m.head(x)[..., :30], ids.clamp(max=29))


def gathered(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    rows = torch.tensor([1, 0])
    return flat(m.head(x)[rows], ids[rows])


def other_classes(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).view(-1, CLASSES // 2), ids.view(-1).repeat(2) % 20)


def positions_as_classes(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x), torch.zeros(BATCH, CLASSES, dtype=torch.int64))


def cast_down(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return flat(m.head(x).bfloat16().float(), ids)


def cast_by_to(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return flat(m.head(x).to(torch.bfloat16), ids)


def bits(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    logits = F.linear(x.half(), m.head.weight.half())
    return flat(logits.view(torch.bfloat16).float(), ids)


def no_linear(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return flat(torch.matmul(x, m.head.weight.t()), ids)


def input_changes(m: Model, x: Tensor, ids: Tensor) -> Any:
    x = x.clone()
    logits = m.head(x)
    x.add_(1)
    return flat(logits, ids) + x.mean()


def grad_mode(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits = m.head(x)
    return flat(logits, ids) + x.mean()


def autocast_head(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = m.head(x)
    return flat(logits.float(), ids)


def old_arguments(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    return flat(m.head(x), ids, size_average=False)


REFUSED: dict[Loss, str] = {
    returned: "the logits (logits) are returned to the caller; return the loss",
    returned_in_float: "the logits (logits) are returned to the caller; return the loss",
    also_accuracy: "the logits (logits) are also used by argmax",
    two_losses: "the logits (logits) are also used by logsumexp",
    capped: "its logits come from mul",
    masked_in_place: "the logits (logits) are also used by setitem",
    per_token: "has reduction='none', a loss for each token",
    probabilities: "the targets are f32[18, 40], not i64[18] class indices",
    part_of_the_classes: "takes a part of the classes",
    gathered: "indexes the logits with more than slices",
    other_classes: "does not keep the 40 classes in the last dimension",
    positions_as_classes: "the second dimension of [2, 9, 40] is not that of the classes",
    cast_down: "its logits come from bfloat16",
    cast_by_to: "casts f32[2, 9, 40] to bf16[2, 9, 40]",
    bits: "its logits come from view",
    no_linear: "its logits come from matmul (matmul), not from linear",
    input_changes: "changes what the head read, before the loss",
    grad_mode: "changes grad mode or autocast between the head and its loss",
    autocast_head: "changes grad mode or autocast between the head and its loss",
    old_arguments: "has size_average or reduce",
}


@pytest.mark.parametrize("loss", REFUSED)
def test_what_is_left_as_it_is(loss: Loss) -> None:
    captured = capture(Model(loss), IDS)
    after, reasons = chunked(captured)
    assert after is captured.capture
    assert len(reasons) == 1 and reasons[0].startswith("the head is whole: ")
    assert REFUSED[loss] in reasons[0], reasons[0]


def test_a_graph_without_a_loss() -> None:
    captured = capture(Model(lambda m, x, ids: m.head(x).mean()), IDS)
    assert chunked(captured) == (captured.capture, ("no head: no cross_entropy was captured",))
    assert chunked(captured, head=Head.AUTO) == (captured.capture, ())


# --- when it is worth it


def test_whole_leaves_everything() -> None:
    captured = capture(Model(hf), IDS)
    assert chunked(captured, head=Head.WHOLE) == (
        captured.capture,
        ("the head is whole: head='whole'",),
    )


def test_auto_is_bitwise_with_the_eager_lowering() -> None:
    captured = capture(Model(hf), IDS)
    after, (reason,) = chunked(captured, head=Head.AUTO)
    assert after is captured.capture and "lowering='eager' is bitwise" in reason


def test_auto_takes_large_logits_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(Model(hf), IDS)
    options = {"head": Head.AUTO, "lowering": Lowering.INDUCTOR}
    logits = BATCH * LENGTH * CLASSES * 4
    monkeypatch.setattr(chunk, "CHUNK_BYTES", logits)
    after, (reason,) = chunked(captured, **options)
    assert after is captured.capture
    assert reason == "the head is whole: its logits take 2.81 KiB, no more than 2.81 KiB"
    monkeypatch.setattr(chunk, "CHUNK_BYTES", logits - 1)
    after, (reason,) = chunked(captured, **options)
    assert after is not captured.capture and "in chunks of 17 tokens" in reason


@pytest.mark.parametrize(
    ("rows", "row_bytes", "expected"),
    [
        (65536, 2 * 152064, 3456),  # 19 chunks of 1 GiB at most, of whole tiles
        (16384, 2 * 152064, 3328),  # 5
        (100, 2 * 152064, 128),
        (4096, 2**30, 1),
        (4096, 2**24, 64),
        (65537, 2 * 151936, 3456),
    ],
)
def test_chunks_are_tiles_and_equal(rows: int, row_bytes: int, expected: int) -> None:
    limit = 2**30
    found = chunk.rows_of_a_chunk(rows, row_bytes, limit)
    assert found == expected
    assert found == 1 or found * row_bytes <= limit
