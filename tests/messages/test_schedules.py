"""What errors about schedules say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import (
    eager,
    explain,
    full_parameters,
    megacompile,
    released,
    restoring,
    schedules,
    trace,
    unmegacompile,
    updates,
)
from megacompile.errors import AnomalyError, ModelError, ScheduleError
from megacompile.ir.schedule import Schedule
from tests import inside
from tests.edits import edited
from tests.planned import built
from tests.zoo import Stack, batch


def message(schedule: Schedule) -> list[str]:
    with pytest.raises(ScheduleError) as raised:
        inside.prove(schedule)
    return str(raised.value).splitlines()


def test_a_hazard_is_explained_and_marked_in_the_table() -> None:
    lines = message(edited(built(), "forward: 2PREFETCH@0 waits for tokens"))
    assert lines[:7] == [
        "schedule 'model' has 1 hazard:",
        "  forward: 0F reads stage 'unit 0' bucket 0 in slot 0, but 2PREFETCH@0 may overwrite it "
        "first: no edge orders 0F before it; add after=(0F) to 2PREFETCH@0",
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


class _Root(nn.Module):
    """Its gain's gradient is inf at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.gain.sqrt()


ON_A_MODEL = (schedules, updates, explain, trace, full_parameters, unmegacompile)
AROUND_A_BLOCK = (released, restoring, eager)
ANOMALIES = {  # (gain, factor of the loss) -> what is said
    (0.0, 1.0): r"backward of stage 'layers.1' \(2B\): NaN or inf in the gradient of parameter "
    r"'layers.1.gain'; what came in is finite: it arises in this stage",
    (math.nan, 1.0): r"\(\d+B\): NaN or inf.*look at the forward",
    (1.0, math.nan): r"comes in from the stage after it has that already",
}


def test_an_anomaly_is_traced_to_its_stage() -> None:
    torch.manual_seed(0)
    model: Any = Stack(layers=3, block=_Root)
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
    for model in (nn.Linear(2, 2), compiled):
        with pytest.raises(ModelError) as raised:
            found = function(model)
            if function in AROUND_A_BLOCK:
                found.__enter__()
        said = f"{name}(): Linear is not megacompiled; call model = megacompile(model) first"
        assert str(raised.value) == said
