"""What a plan says of heads, masks and tiles, of models that are only shapes.

And errors about schedules.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import (
    eager,
    explain,
    full_parameters,
    megacompile,
    released,
    schedules,
    trace,
    unmegacompile,
    updates,
)
from megacompile.errors import AnomalyError, ModelError, ScheduleError
from megacompile.ir.schedule import Schedule
from tests import inside
from tests.edits import edited
from tests.equality.nets import Applies, flat
from tests.planned import built
from tests.zoo import Stack, batch

ROWS, LENGTH, WIDTH, CLASSES = 2, 9, 8, 40

Loss = Callable[[Tensor, Tensor, Tensor], Any]  # of hidden states, the head's weight and ids


def reasons(model: nn.Module, *inputs: Tensor, **options: Any) -> tuple[str, ...]:
    (program,) = inside.abstract(model, inputs, **options)
    return program.stages.plan.reasons


def of_head(loss: Loss, length: int = LENGTH, **options: Any) -> str:
    weight = nn.Parameter(torch.empty(CLASSES, WIDTH, device="meta"))
    model = Applies(lambda m, x, ids: loss(x, m.weight, ids), weight=weight)
    x = torch.empty(ROWS, length, WIDTH, device="meta")
    ids = torch.empty(ROWS, length, dtype=torch.int64, device="meta")
    (reason,) = reasons(model, x, ids, **options)
    return reason


def returned(x: Any, w: Any, ids: Any) -> Any:
    logits = F.linear(x, w)
    return flat(logits, ids), logits


def accuracy(x: Any, w: Any, ids: Any) -> Any:
    logits = F.linear(x, w)
    return flat(logits, ids), (logits.argmax(-1) == ids).sum()


def gathered(x: Any, w: Any, ids: Any) -> Any:
    rows = torch.arange(2)
    return flat(F.linear(x, w)[rows], ids[rows])


def input_changes(x: Any, w: Any, ids: Any) -> Any:
    x = x.clone()
    logits = F.linear(x, w)
    x.add_(1)
    return flat(logits, ids) + x.mean()


def grad_mode(x: Any, w: Any, ids: Any) -> Any:
    logits = F.linear(x, w)
    with torch.no_grad():
        other = x.sum()
    return flat(logits, ids) + other


def autocast(x: Any, w: Any, ids: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(x, w)
    return flat(logits.float(), ids)


# Behind "the head is whole: ".
WHOLE: list[tuple[str, Loss]] = [
    ("the logits (logits) are returned to the caller; return the loss", returned),
    ("the logits (logits) are also used by argmax", accuracy),
    (
        "its logits come through mul (mul)",
        lambda x, w, ids: flat(torch.tanh(F.linear(x, w) / 30) * 30, ids),
    ),
    (
        "cross_entropy has reduction='none', size_average or reduce",
        lambda x, w, ids: flat(F.linear(x, w), ids, reduction="none").mean(),
    ),
    (
        "the targets are f32[18, 40], not i64[18] class indices",
        lambda x, w, ids: F.cross_entropy(F.linear(x, w).flatten(0, 1), torch.ones(18, CLASSES)),
    ),
    (
        "its logits come through getitem (getitem)",
        lambda x, w, ids: flat(F.linear(x, w)[..., :30], ids),
    ),
    ("its logits come through getitem (getitem)", gathered),
    (
        "its logits come through view (view)",
        lambda x, w, ids: F.cross_entropy(F.linear(x, w).view(-1, 20), ids.view(-1).repeat(2)),
    ),
    (
        "the second dimension of [2, 9, 40] is not that of the classes",
        lambda x, w, ids: F.cross_entropy(F.linear(x, w), torch.zeros(ROWS, CLASSES).long()),
    ),
    (
        "its logits come through to (to)",
        lambda x, w, ids: flat(F.linear(x, w).to(torch.bfloat16), ids),
    ),
    ("add_ changes its input, weight, grad mode or autocast in between", input_changes),
    ("_set_grad_enabled changes its input, weight, grad mode or autocast in between", grad_mode),
    ("_exit_autocast changes its input, weight, grad mode or autocast in between", autocast),
    (
        "cross_entropy has reduction='mean', size_average or reduce",
        lambda x, w, ids: flat(F.linear(x, w), ids, size_average=False),
    ),
]


@pytest.mark.filterwarnings("ignore:megacompile", "ignore:size_average")
def test_heads_that_stay_whole() -> None:
    said = [of_head(loss, head="chunked") for _, loss in WHOLE]
    assert said == [f"the head is whole: {text}" for text, _ in WHOLE]


LONG = 2**30 // 4 // ROWS // CLASSES  # its logits take a GiB, nearly
CHUNKS: dict[str, tuple[int, dict[str, Any]]] = {
    "the head is whole: head='whole'": (LENGTH, {"head": "whole"}),
    "the head is whole: lowering='eager' is bitwise; head='chunked' is equal up to rounding": (
        LENGTH, {}
    ),
    "the head is whole: its logits take 1 GiB, no more than 1 GiB": (
        LONG, {"lowering": "inductor"}
    ),
    f"the head of {2 * LONG + 2} tokens by 40 classes (1 GiB of logits) is computed in chunks of "
    "3355520 tokens": (LONG + 1, {"lowering": "inductor"}),
    "the head of 18 tokens by 40 classes (2.81 KiB of logits) is computed in chunks of 128 "
    "tokens": (LENGTH, {"head": "chunked"}),
}  # fmt: skip


def test_what_is_said_of_a_head() -> None:
    said = [
        of_head(lambda x, w, ids: flat(F.linear(x, w), ids), length, **options)
        for length, options in CHUNKS.values()
    ]
    assert said == list(CHUNKS)
    none = of_head(lambda x, w, ids: F.linear(x, w).mean(), head="chunked")
    assert none == "no head: no cross_entropy was captured"


def test_what_is_said_of_masks() -> None:
    def attends(m: Any, x: Tensor) -> Tensor:
        mask = torch.arange(x.shape[2])[None] <= torch.arange(x.shape[2])[:, None]
        x = m.layer(x)
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, x, x, mask)
        return x.sum()

    model = Applies(attends, layer=nn.Linear(4, 4))
    said = "2 attentions are causal without a mask, which would take 49 B"
    assert reasons(model, torch.ones(1, 2, 7, 4), lowering="inductor") == (said,)


@pytest.mark.parametrize(
    ("layer", "lines"),
    [
        (
            nn.Linear(8, 8),
            [
                "1 of 4 stages are not tiled: they have no tokenwise matrix product",
                "stages 1 to 2: recomputed, 2 tiles",
                "stage 3: kept, 2 tiles",
            ],
        ),
        (nn.LayerNorm(8), ["4 of 4 stages are not tiled: they have no tokenwise matrix product"]),
    ],
)
def test_what_a_plan_says_of_tiles(layer: nn.Module, lines: list[str]) -> None:
    model = nn.Sequential(nn.Embedding(4, 8), *(copy.deepcopy(layer) for _ in range(3)))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    (program,) = inside.abstract(model, (ids,), tiles=2, lowering="inductor")
    found = program.schedule().plan.reasons
    assert [r for r in found if "tile" in r or "cut" in r] == lines


def message(schedule: Schedule) -> list[str]:
    with pytest.raises(ScheduleError) as raised:
        inside.prove(schedule)
    return str(raised.value).splitlines()


def test_a_hazard_is_explained_and_marked_in_the_table() -> None:
    lines = message(edited(built(), "forward: 2PREFETCH@0 waits for tokens"))
    assert lines[:7] == [
        "schedule 'model' has 1 hazard:",
        "  forward: 0F reads stage 'unit 0' bucket 0 in slot 0, but 2PREFETCH@0 may overwrite it "
        "first: no edge orders 0F before it; raise slots, or add after=(0F) to 2PREFETCH@0",
        "",
        "forward",
        "step | h2d                     | compute | d2h",
        "   0 | 0PREFETCH@0 1PREFETCH@1 | 0F      |      <-- 0F: slot refilled",
        "   1 | 2PREFETCH@0             | 1F      |      <-- 2PREFETCH@0: slot refilled",
    ]
    schedule = built(stages=8)
    lines = message(replace(schedule, slots=schedule.slots[:1]))
    assert lines[0] == "schedule 'model' has 8 hazards:"
    assert lines[6] == "  ... and 3 more"


def root() -> Applies:
    """Its gain's gradient is inf at 0."""
    layers = {"linear": nn.Linear(16, 16), "gain": nn.Parameter(torch.ones(16))}
    return Applies(lambda m, x: x + m.linear(x) * m.gain.sqrt(), **layers)


ON_A_MODEL = (schedules, updates, explain, trace, full_parameters, unmegacompile)
AROUND_A_BLOCK = (released, eager)
ANOMALIES = {  # (gain, factor of the loss) -> what is said
    (0.0, 1.0): r"backward of stage 'layers.1' \(2B\): NaN or inf in the gradient of parameter "
    r"'layers.1.gain'; no later stage has it, so it arises in this one",
    (math.nan, 1.0): r"\(\d+B\): NaN or inf.*in its forward",
    (1.0, math.nan): r"in the code after the model",
}


def test_an_anomaly_is_traced_to_its_stage() -> None:
    torch.manual_seed(0)
    model: Any = Stack(layers=3, block=root)
    megacompile(model, device="cpu", lowering="eager", detect_anomaly=True)
    for (gain, factor), wanted in ANOMALIES.items():
        with torch.no_grad():
            model.layers[1].gain[:3] = gain
        loss = model(**batch())
        with pytest.raises(AnomalyError, match=wanted):
            (loss * factor).backward()


@pytest.mark.parametrize("function", [*ON_A_MODEL, *AROUND_A_BLOCK], ids=lambda f: f.__name__)
def test_a_model_that_is_not_megacompiled(function: Any) -> None:
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    name = function.__name__
    for model in (nn.Linear(2, 2), compiled, torch.optim.SGD(compiled.parameters())):
        with pytest.raises(ModelError) as raised:
            found = function(model)
            if function in AROUND_A_BLOCK:
                found.__enter__()
        kind = type(model).__name__
        said = f"{name}(): {kind} is not megacompiled; call model = megacompile(model) first"
        assert str(raised.value) == said
