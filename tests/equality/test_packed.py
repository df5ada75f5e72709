"""Packed parameters (quantized frozen bases) are streamed as they are, beside trained adapters."""

from __future__ import annotations

import copy
import io
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import ModelError, megacompile, schedules, unmegacompile
from tests import inside, quantized
from tests.quantized import OWN, Int8, Packed, PackedLinear

IDS = torch.arange(16).view(2, 8)
BASE = "layers.0.first.base.weight"


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def streamed(kind: str, **options: Any) -> Any:
    return megacompile(quantized.model(OWN[kind], **options), device="cpu", lowering="eager")


@pytest.mark.parametrize("kind", OWN)
def test_training(kind: str) -> None:
    """The numbers, where the parts lie, what is copied, and what is left behind."""
    plain, model = quantized.model(OWN[kind]), quantized.model(OWN[kind])
    for made in (plain, model):
        made.layers[0].requires_grad_(False)  # comes and never goes
    weights = dict(model.named_parameters())
    megacompile(model, device="cpu", lowering="eager")
    assert same(quantized.trained(model), quantized.trained(plain))
    (schedule,) = schedules(model)
    assert [len(stage.buckets) for stage in schedule.stages] == [1] * 5
    assert set(re.findall(r"\b1[A-Z_]+", schedule.table())) == {"1PREFETCH", "1F"}
    assert set(re.findall(r"\b2[A-Z_]+", schedule.table())) >= {"2OFFLOAD_GRAD", "2UPDATE"}
    for stage in schedule.stages[2:4]:  # no weight in full is saved
        assert all(128 * 256 > torch.Size(meta.shape).numel() for meta in stage.traced.saved)
    buckets = list(inside.buckets(model).values())
    for bucket in buckets:
        for i, (place, param) in enumerate(zip(bucket.layout.params, bucket.params, strict=True)):
            assert bucket.holds(param) and bucket.values[i].data_ptr() == param.data_ptr()
            assert not place.packed or (not param.requires_grad and i not in bucket.grads)
    assert {place.packed for place in buckets[2].layout.params} == {True, False}
    assert len(buckets[2].grads) == 4
    weight, expected = model.get_parameter(BASE), plain.get_parameter(BASE)
    assert weight is weights[BASE] and type(weight) is type(expected)
    assert weight.device.type == "cpu" and vars(weight).keys() == vars(expected).keys()
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(IDS), model(IDS))
    for made in (plain, model):  # another weight is taken over
        torch.manual_seed(3)
        base = made.get_submodule("layers.1.first.base")
        base.weight = OWN[kind](nn.Linear(128, 256, bias=False)).weight
    assert same(quantized.trained(model), quantized.trained(plain))
    unmegacompile(model)
    for param in model.parameters():
        assert not any(bucket.holds(param) for bucket in buckets)
    assert same(quantized.trained(model, steps=1), quantized.trained(plain, steps=1))


@pytest.mark.parametrize("kind", OWN)
def test_in_eager_code_tied_and_in_checkpoints(kind: str) -> None:
    if kind == "state":
        expected = quantized.trained(quantized.model(OWN[kind]), steps=2)
        assert same(quantized.trained(streamed(kind, breaks=True), steps=2), expected)

    class Checkpointed(quantized.Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    plain, model = quantized.model(OWN[kind]), quantized.model(OWN[kind])
    for made in (plain, model):
        base = made.get_submodule("layers.0.first.base")
        made.get_submodule("layers.2.first").base = base
        made.__class__ = Checkpointed
    megacompile(model, device="cpu", lowering="eager")
    assert same(quantized.trained(model, steps=2), quantized.trained(plain, steps=2))
    assert len(schedules(model)[0].stages) == 5, "checkpoints are looked into"


class Asks(PackedLinear):
    """Notes whether its weight is of its own class, in a call too."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(isinstance(self.weight, Packed) and isinstance(self.weight, nn.Parameter))
        return super().forward(x)


SEEN: list[bool] = []


def test_parts_that_change() -> None:
    """They are taken over; state dicts are saved and loaded."""
    model = quantized.model(quantized.stateful)
    model.get_submodule("layers.0.first.base").__class__ = Asks
    megacompile(model, device="cpu", lowering="eager")
    before = model(IDS).item()
    assert SEEN and all(SEEN)
    state: Any = model.get_parameter(BASE).state  # type: ignore[attr-defined]
    state.scale = state.scale * 2
    assert model(IDS).item() != before
    assert any(bucket.holds(state.scale) for bucket in inside.buckets(model).values())
    state.scale = state.scale / 2
    assert model(IDS).item() == before
    model = streamed("wrapper")
    before = model(IDS).item()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        model.get_parameter(BASE).data8.zero_()
    assert model(IDS).item() != before
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False))
    assert model(IDS).item() == before


@pytest.mark.parametrize("kind", OWN)
def test_with_compute_dtype_packed_parts_keep_theirs(kind: str) -> None:
    model = quantized.model(lambda layer: OWN[kind](layer.bfloat16()))
    megacompile(model, device="cpu", lowering="eager", compute_dtype=torch.bfloat16)
    quantized.trained(model, steps=1)
    stages = schedules(model)[0].stages
    assert stages[2].template is stages[3].template, "equal layers share their code"
    for bucket in inside.buckets(model).values():
        for i, place in enumerate(bucket.layout.params):
            if place.packed:
                assert place.dtype == bucket.params[i].dtype
                assert bucket.streamed[i] is bucket.values[i]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_wrapper_moves_with_its_parts(is_held: bool) -> None:
    """On meta it is told where they are; what somebody holds cannot be told."""
    model: Any = nn.Sequential(quantized.wrapped(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4))
    weight = model[0].weight
    assert isinstance(weight, Int8)
    held = weakref.ref(weight) if is_held else None
    megacompile(model, device="cpu", lowering="eager")
    try:
        unmegacompile(model)
    except ModelError:
        assert held is not None, "it need not move"
    assert model[0].weight is weight and weight.device.type == "cpu"
