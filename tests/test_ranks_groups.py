"""Process groups belong to torch: a model that lives keeps none that was destroyed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megacompile import megacompile
from megacompile.errors import RankError
from tests import inside
from tests.processes import group_of_one


def step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()


def test_a_model_that_lives_keeps_no_group_that_was_destroyed() -> None:
    """Nor does what the models of the same ranks have together."""
    with group_of_one():
        mesh = init_device_mesh("cpu", (1,))
        model: Any = megacompile(nn.Linear(8, 4), mesh=mesh, device="cpu")
        step(model)
        ranks = inside.streamed(model).machine.ranks
        assert ranks is not None and ranks.group is not None
    assert [group() for group in ranks.groups] == [None]
    with pytest.raises(RankError, match=r"is gone.*destroy_process_group\(\) after the last"):
        _ = ranks.group
