"""What is said of graphs that are not scheduled, and of heads and masks that stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile.errors import UnsupportedGraphError
from megacompile.ir.buckets import Unit
from megacompile.ir.capture import ParamInput
from megacompile.ir.tensors import TensorMeta
from megacompile.options import Head, Lowering
from megacompile.passes.capture.causal import use_causal_attention
from megacompile.passes.capture.chunk import chunk_head
from megacompile.plan.abstract import abstract_options, abstract_schedules
from tests import handmade
from tests.capturing import Captured, Net, capture

BATCH, LENGTH, WIDTH, CLASSES = 2, 9, 8, 40
X, WEIGHT = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(CLASSES, WIDTH)
IDS = torch.zeros(BATCH, LENGTH, dtype=torch.int64)

Loss = Callable[[Any, Any, Any], Any]  # of hidden states, the head's weight and ids


def head(x: Any, w: Any) -> Any:
    return F.linear(x, w)


def flat(logits: Any, ids: Any, **options: Any) -> Any:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), **options)


def returned(x: Any, w: Any, ids: Any) -> Any:
    logits = head(x, w)
    return flat(logits, ids), logits


def accuracy(x: Any, w: Any, ids: Any) -> Any:
    logits = head(x, w)
    return flat(logits, ids), (logits.argmax(-1) == ids).sum()


def probabilities(x: Any, w: Any, ids: Any) -> Any:
    return F.cross_entropy(head(x, w).flatten(0, 1), torch.ones(18, CLASSES))


def gathered(x: Any, w: Any, ids: Any) -> Any:
    rows = torch.arange(2)
    return flat(head(x, w)[rows], ids[rows])


def input_changes(x: Any, w: Any, ids: Any) -> Any:
    x = x.clone()
    logits = head(x, w)
    x.add_(1)
    return flat(logits, ids) + x.mean()


def grad_mode(x: Any, w: Any, ids: Any) -> Any:
    logits = head(x, w)
    handmade.node(x, torch._C._set_grad_enabled, True)
    return flat(logits, ids)


def autocast(x: Any, w: Any, ids: Any) -> Any:
    mode = torch.amp.autocast_mode
    region = handmade.node(x, mode._enter_autocast, "cpu", torch.bfloat16, True, False)
    logits = head(x, w)
    handmade.node(x, mode._exit_autocast, region)
    return flat(logits.float(), ids)


# Behind "the head is whole: ".
WHOLE: list[tuple[Loss, str]] = [
    (returned, "the logits (linear) are returned to the caller; return the loss"),
    (accuracy, "the logits (linear) are also used by argmax"),
    (
        lambda x, w, ids: flat(torch.tanh(head(x, w) / 30) * 30, ids),
        "its logits come from mul (mul), not from linear",
    ),
    (
        lambda x, w, ids: flat(head(x, w), ids, reduction="none").mean(),
        "cross_entropy has reduction='none', a loss for each token",
    ),
    (probabilities, "the targets are f32[18, 40], not i64[18] class indices"),
    (lambda x, w, ids: flat(head(x, w)[..., :30], ids), "getitem takes a part of the classes"),
    (gathered, "getitem indexes the logits with more than slices"),
    (
        lambda x, w, ids: F.cross_entropy(head(x, w).view(-1, 20), ids.view(-1).repeat(2)),
        "view does not keep the 40 classes in the last dimension",
    ),
    (
        lambda x, w, ids: F.cross_entropy(head(x, w), torch.zeros(BATCH, CLASSES).long()),
        "the second dimension of [2, 9, 40] is not that of the classes",
    ),
    (
        lambda x, w, ids: flat(head(x, w).to(torch.bfloat16), ids),
        "to casts f32[2, 9, 40] to bf16[2, 9, 40] on cpu",
    ),
    (input_changes, "add_ changes what the head read, before the loss"),
    (grad_mode, "_set_grad_enabled changes grad mode or autocast between the head and its loss"),
    (autocast, "_exit_autocast changes grad mode or autocast between the head and its loss"),
    (
        lambda x, w, ids: flat(head(x, w), ids, size_average=False),
        "cross_entropy has size_average or reduce",
    ),
]


def chunked(loss: Loss, **options: Any) -> tuple[bool, str]:
    """Is the graph left as it is, and what is said of its only loss?"""
    given = handmade.traced(loss, X, WEIGHT, IDS)
    settings: dict[str, Any] = {"head": Head.CHUNKED, "lowering": Lowering.EAGER}
    made, (reason,) = chunk_head(given, **{**settings, "chunk_bytes": 5 * CLASSES * 4, **options})
    return made is given, reason


@pytest.mark.parametrize(("loss", "text"), WHOLE, ids=[text[:40] for _, text in WHOLE])
def test_heads_that_stay_whole(loss: Loss, text: str) -> None:
    assert chunked(loss) == (True, f"the head is whole: {text}")


AUTO: dict[str, Any] = {"head": Head.AUTO, "lowering": Lowering.INDUCTOR}
LARGE = BATCH * LENGTH * CLASSES * 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"head": Head.WHOLE}, "the head is whole: head='whole'"),
        (
            {"head": Head.AUTO},
            "the head is whole: lowering='eager' is bitwise, and head='chunked' is equal up to "
            "rounding",
        ),
        (
            {**AUTO, "chunk_bytes": LARGE},
            "the head is whole: its logits take 2.81 KiB, no more than 2.81 KiB",
        ),
        (
            {**AUTO, "chunk_bytes": LARGE - 1},
            "the head of 18 tokens by 40 classes (2.81 KiB of logits) is computed in chunks of 17 "
            "tokens",
        ),
        (
            {},
            "the head of 18 tokens by 40 classes (2.81 KiB of logits) is computed in chunks of 5 "
            "tokens",
        ),
    ],
)
def test_what_is_said_of_a_head(options: dict[str, Any], text: str) -> None:
    left, reason = chunked(lambda x, w, ids: flat(head(x, w), ids), **options)
    assert reason == text and left == text.startswith("the head is whole")


def test_what_is_said_without_a_head() -> None:
    left, reason = chunked(lambda x, w, ids: head(x, w).mean())
    assert (left, reason) == (True, "no head: no cross_entropy was captured")


def test_what_is_said_of_masks() -> None:
    def attends(n: Any, x: Any, given: Any, *, causal: bool) -> Any:
        queries, keys = torch.arange(n)[:, None], torch.arange(n)[None]
        mask = (keys <= queries) if causal else (keys <= queries) & given
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, x, x, mask)
        return x

    n, x = handmade.symbol("n"), torch.ones(1, 2, 7, 4)
    inputs = (
        handmade.number("n", 7),
        handmade.sized(TensorMeta.of(x), 1, 2, n, 4),
        handmade.sized(TensorMeta.of(torch.ones(7, 7, dtype=torch.bool)), n, n),
    )
    for causal, text in (
        (True, "2 attentions are causal without a mask, which would take 49 B"),
        (False, "attention masks are made: what they allow is not known for every size"),
    ):
        capture = handmade.traced(partial(attends, causal=causal), *inputs)
        assert use_causal_attention(capture, lowering=Lowering.INDUCTOR)[1] == (text,)


# Graphs that cannot be scheduled.


def changes_a_parameter(net: Net, x: Tensor) -> Any:
    with torch.no_grad():
        net.embed.weight.mul_(2)
    return net.head(net.embed(x))


def changes_a_view(net: Net, x: Tensor) -> Any:
    net.head.weight.detach()[0].zero_()
    return net.head(net.embed(x))


def with_weights(function: Callable[..., Any]) -> Captured:
    """A graph of one parameter, which Dynamo would not capture."""
    capture = handmade.of_params(handmade.traced(function, torch.ones(2)))
    (bucket,) = {item.bucket for item in capture.inputs if isinstance(item, ParamInput)}
    unit = Unit(bucket, frozenset(), frozenset(), repeated=False)
    return Captured(nn.Module(), capture, (unit,), ())


REFUSED: dict[str, Callable[[], Captured]] = {
    "parameter 'embed.weight' is changed in place by mul_": (
        lambda: capture(Net(changes_a_parameter), torch.ones(2, 4))
    ),
    "parameter 'head.weight' is changed in place by zero_": (
        lambda: capture(Net(changes_a_view), torch.ones(2, 4))
    ),
    "parameter 'p0' is an output": lambda: with_weights(lambda w: (w.sin(), w)),
    "traced: aten.nonzero.default\n\nWhile executing %nonzero : [num_users=1] = "
    "call_function[target=torch.nonzero](args = (%x0,), kwargs = {})": (
        lambda: with_weights(lambda w: torch.nonzero(w))
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_graphs_that_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedGraphError) as raised:
        REFUSED[text]().partition()
    assert str(raised.value).startswith(text)


def test_a_stage_that_cannot_be_traced_is_named() -> None:
    captured = capture(Net(Net.chain), torch.ones(2, 4))
    schedule = captured.with_tangent()
    graph = fx.Graph()
    inputs = [graph.placeholder(f"p{i}") for i in range(len(schedule.stages[1].primals))]
    graph.output((graph.call_function(torch.nonzero, (inputs[-1],)),))
    object.__setattr__(schedule.stages[1], "module", fx.GraphModule(nn.Module(), graph))
    with pytest.raises(UnsupportedGraphError, match="^stage 'layers.0': .*nonzero"):
        captured.passes()["templates"](schedule)


# Tiles.


@pytest.mark.parametrize(
    ("layer", "lines"),
    [
        (
            nn.Linear(8, 8),
            [
                "what acts on each token alone runs in 2 tiles, in 3 of 4 stages; their gradients "
                "of weights are added up in float32",
                "1 of 4 stages are not cut: no product of matrices in them acts on each token "
                "alone",
                "2 recomputed stages run tile by tile as a whole, including any attention, as over "
                "micro-batches",
            ],
        ),
        (nn.LayerNorm(8), ["nothing is cut: no product of matrices acts on each token alone"]),
    ],
)
def test_what_a_plan_says_of_tiles(layer: nn.Module, lines: list[str]) -> None:
    model = nn.Sequential(nn.Embedding(4, 8), *(copy.deepcopy(layer) for _ in range(3)))
    options = abstract_options(device="cpu", tiles=2)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    (schedule,) = abstract_schedules(model, (ids,), options=options)
    assert [r for r in schedule.plan.reasons if "tile" in r or "cut" in r] == lines
