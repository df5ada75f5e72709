"""Plans of models with packed parameters, from shapes alone."""

from __future__ import annotations

import pytest
import torch

from megacompile import megacompile, packed, schedules
from megacompile.plan.abstract import abstract_schedules
from tests import quantized
from tests.quantized import OWN

IDS = torch.arange(16).view(2, 8)


@pytest.mark.parametrize("kind", OWN)
def test_a_plan_knows_the_leaves_of_packed_parameters(kind: str) -> None:
    model = quantized.model(OWN[kind])
    before = [leaf.tensor for leaf in packed.leaves(model)]
    (plan,) = abstract_schedules(model, (IDS,))
    assert [leaf.tensor for leaf in packed.leaves(model)] == before
    streamed = megacompile(model, lowering="eager")
    quantized.trained(streamed, steps=1)
    (schedule,) = schedules(streamed)
    assert [b.size_bytes for b in plan.buckets] == [b.size_bytes for b in schedule.buckets]
    for one, other in zip(plan.stages, schedule.stages, strict=True):
        assert [bucket.name for bucket in one.buckets] == [b.name for b in other.buckets]
        assert len(one.primals) == len(other.primals)
    trained = {bucket.key for bucket in plan.buckets if "layers" in bucket.name}
    assert plan.gradient_params.keys() == trained
