"""Packed parameters (quantized frozen bases) are streamed as they are, beside trained adapters."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
from torch import Tensor, nn

from megacompile import full_parameters, megacompile, packed, schedules, unmegacompile
from megacompile.compat import compiled_call
from megacompile.errors import ModelError
from megacompile.ir.capture import Wrapping
from megacompile.runtime.model.streamed import StreamedModel
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.wrappers import follow_parts
from tests import quantized
from tests.quantized import OWN, Int8, Packed, PackedLinear


def buckets(model: nn.Module) -> list[HostBucket]:
    streamed = compiled_call(model)
    assert isinstance(streamed, StreamedModel)
    return list(streamed.machine.buckets.values())


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("kind", OWN)
def test_leaves(kind: str) -> None:
    model = quantized.model(OWN[kind])
    names = [leaf.name for leaf in packed.leaves(model) if leaf.packed][:3]
    base = "layers.0.first.base.weight"
    assert (
        names[:2]
        == {
            "wrapper": [f"{base}.data8", f"{base}.scale"],
            "state": [base, f"{base}.state.scale"],
        }[kind]
    )
    plain = [leaf.name for leaf in packed.leaves(model) if not leaf.packed]
    assert set(plain) < set(dict(model.named_parameters()))


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("breaks", [False, True], ids=["captured", "eager code"])
def test_numbers_are_the_plain_ones(kind: str, breaks: bool) -> None:
    expected = quantized.trained(quantized.model(OWN[kind]))
    model = megacompile(quantized.model(OWN[kind], breaks=breaks), lowering="eager")
    assert same(quantized.trained(model), expected)


@pytest.mark.parametrize("kind", OWN)
def test_layers_are_stages_that_share_their_code(kind: str) -> None:
    model = megacompile(quantized.model(OWN[kind]), lowering="eager")
    quantized.trained(model, steps=1)
    (schedule,) = schedules(model)
    assert [len(stage.buckets) for stage in schedule.stages] == [1] * 5
    assert schedule.stages[2].template is schedule.stages[3].template


@pytest.mark.parametrize("kind", OWN)
def test_a_base_lies_in_its_bucket_and_has_no_gradients_nor_states(kind: str) -> None:
    model = megacompile(quantized.model(OWN[kind]), lowering="eager")
    quantized.trained(model)
    for bucket in buckets(model):
        for i, (place, param) in enumerate(zip(bucket.layout.params, bucket.params, strict=True)):
            assert bucket.holds(param)
            assert bucket.values[i].data_ptr() == param.data_ptr()
            if place.packed:
                assert not param.requires_grad and i not in bucket.grads
    layer = buckets(model)[1]
    assert {place.packed for place in layer.layout.params} == {True, False}
    assert {place.dtype for place in layer.layout.params} > {torch.float32}
    assert len(layer.grads) == 4


@pytest.mark.parametrize("kind", OWN)
def test_a_layer_that_is_frozen_whole_comes_and_never_goes(kind: str) -> None:
    """No gradients, no states and no copies to the host."""
    model = quantized.model(OWN[kind])
    model.layers[0].requires_grad_(False)
    megacompile(model, lowering="eager")
    quantized.trained(model)
    (schedule,) = schedules(model)
    assert schedule.stages[1].name.endswith("layers.0")
    assert set(re.findall(r"\b1[A-Z_]+", schedule.table())) == {"1PREFETCH", "1F"}
    assert set(re.findall(r"\b2[A-Z_]+", schedule.table())) >= {"2OFFLOAD_GRAD", "2UPDATE"}


@pytest.mark.parametrize("kind", OWN)
def test_outside_of_a_call_it_is_what_it_was(kind: str) -> None:
    plain = quantized.model(OWN[kind])
    model = quantized.model(OWN[kind])
    weights = dict(model.named_parameters())
    megacompile(model, lowering="eager")
    quantized.trained(model)
    base = "layers.1.second.base.weight"
    weight, expected = model.get_parameter(base), plain.get_parameter(base)
    assert weight is weights[base] and type(weight) is type(expected)
    assert isinstance(weight, nn.Parameter) and weight.device.type == "cpu"
    assert vars(weight).keys() == vars(expected).keys()
    module = model.layers[1]
    for _, param in module.named_parameters():
        for part in packed.members(module, param):
            assert type(part.tensor) in (Tensor, Packed)
    if isinstance(weight, Int8):
        assert isinstance(expected, Int8)
        assert torch.equal(weight.dense(), expected.dense())
    assert list(model.state_dict()) == list(plain.state_dict())
    copied = copy.deepcopy(model)
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        assert torch.equal(copied(ids), model(ids))


def test_state_dicts_are_loaded_and_saved() -> None:
    model = megacompile(quantized.model(quantized.wrapped), lowering="eager")
    ids = torch.arange(16).view(2, 8)
    before = model(ids).item()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        model.get_parameter("layers.0.first.base.weight").data8.zero_()  # type: ignore[attr-defined]
    assert model(ids).item() != before
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False))
    assert model(ids).item() == before


@pytest.mark.parametrize("kind", OWN)
def test_another_weight_is_taken_over(kind: str) -> None:
    plain, model = quantized.model(OWN[kind]), quantized.model(OWN[kind])
    megacompile(model, lowering="eager")
    quantized.trained(plain, steps=1), quantized.trained(model, steps=1)
    for made in (plain, model):
        torch.manual_seed(3)
        base = made.get_submodule("layers.1.first.base")
        base.weight = OWN[kind](nn.Linear(128, 256, bias=False)).weight
    assert same(quantized.trained(model), quantized.trained(plain))


def test_a_part_that_is_replaced_is_taken_over() -> None:
    model = megacompile(quantized.model(quantized.stateful), lowering="eager")
    ids = torch.arange(16).view(2, 8)
    before = model(ids).item()
    state = model.get_parameter("layers.0.first.base.weight").state  # type: ignore[attr-defined]
    state.scale = state.scale * 2
    changed = model(ids).item()
    assert changed != before
    assert any(bucket.holds(state.scale) for bucket in buckets(model))
    state.scale = state.scale / 2
    assert model(ids).item() == before


def test_tied_layers_are_one() -> None:
    def tied(quantize: quantized.Quantize) -> nn.Module:
        model = quantized.model(quantize)
        base = model.get_submodule("layers.0.first.base")
        model.get_submodule("layers.2.first").base = base
        return model

    for quantize in OWN.values():
        expected = quantized.trained(tied(quantize))
        assert same(quantized.trained(megacompile(tied(quantize), lowering="eager")), expected)


class Tasks(nn.Module):
    """A packed head for each task, and a number behind it among the inputs of a graph."""

    def __init__(self) -> None:
        super().__init__()
        layers = [quantized.wrapped(nn.Linear(8, size)) for size in (1, 3, 1, 3)]
        self.heads = nn.ParameterList([layer.weight for layer in layers])
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor, task: int, times: int) -> Tensor:
        weight = self.heads[task]
        torch._dynamo.graph_break()
        y = nn.functional.linear(self.scale.square(), weight) * times * x
        more = times * 3  # a number that the graph gives back
        torch._dynamo.graph_break()
        return y * more


def test_each_packed_parameter_that_is_an_argument_is_itself() -> None:
    torch.manual_seed(0)
    plain = Tasks()
    model = megacompile(copy.deepcopy(plain), lowering="eager")
    for task in (0, 1, 2, 3):
        for times in (1, 2, 5):
            mine, theirs = (each(torch.tensor(0.5), task, times) for each in (plain, model))
            mine.sum().backward()
            theirs.sum().backward()
            assert torch.equal(mine, theirs), (task, times)
    assert plain.scale.grad is not None and model.scale.grad is not None
    assert torch.equal(plain.scale.grad, model.scale.grad)


def test_checkpoints_are_looked_into() -> None:
    class Checkpointed(quantized.Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    for quantize in OWN.values():
        plain, model = quantized.model(quantize), quantized.model(quantize)
        plain.__class__ = model.__class__ = Checkpointed
        megacompile(model, lowering="eager")
        assert same(quantized.trained(model), quantized.trained(plain))
        (schedule,) = schedules(model)
        assert len(schedule.stages) == 5


@pytest.mark.parametrize("kind", OWN)
def test_with_compute_dtype_packed_parts_keep_theirs(kind: str) -> None:
    model = quantized.model(lambda layer: OWN[kind](layer.bfloat16()))
    megacompile(model, lowering="eager", compute_dtype=torch.bfloat16)
    quantized.trained(model)
    for bucket in buckets(model):
        for i, place in enumerate(bucket.layout.params):
            if place.packed:
                assert place.dtype == bucket.params[i].dtype
                assert bucket.streamed[i] is bucket.values[i]


@pytest.mark.parametrize("kind", OWN)
def test_no_weight_in_full_is_saved(kind: str) -> None:
    model = megacompile(quantized.model(OWN[kind]), lowering="eager")
    quantized.trained(model, steps=1)
    (schedule,) = schedules(model)
    for stage in schedule.stages[1:4]:
        assert stage.traced.has_backward
        assert all(128 * 256 > torch.Size(meta.shape).numel() for meta in stage.traced.saved)


@pytest.mark.parametrize("kind", OWN)
def test_unmegacompile_gives_a_plain_model(kind: str) -> None:
    plain, model = quantized.model(OWN[kind]), quantized.model(OWN[kind])
    megacompile(model, lowering="eager")
    assert same(quantized.trained(model, steps=1), quantized.trained(plain, steps=1))
    lay = buckets(model)
    unmegacompile(model)
    for leaf in packed.leaves(model):
        assert not any(bucket.holds(leaf.tensor) for bucket in lay)
    assert same(quantized.trained(model, steps=1), quantized.trained(plain, steps=1))


def test_weights_in_full_are_not_to_be_had() -> None:
    model = megacompile(quantized.model(quantized.wrapped), lowering="eager")
    with pytest.raises(ModelError, match="layer 'layers.0.first.base' is a quantized Int8"):
        full_parameters(model)


def test_a_trained_one_is_refused() -> None:
    model = quantized.model(quantized.wrapped)
    model.get_parameter("layers.0.first.base.weight").requires_grad_()
    with pytest.raises(ModelError, match="first.base.weight is a Int8 that requires grad"):
        megacompile(model)


def test_one_that_is_trained_later_is_refused() -> None:
    model = megacompile(quantized.model(quantized.wrapped), lowering="eager")
    model.get_parameter("layers.0.first.base.weight").requires_grad_()
    with pytest.raises(ModelError, match="is a Int8 that requires grad since"):
        model(torch.arange(16).view(2, 8))


def test_a_proxy_is_of_its_parameters_class() -> None:
    seen: list[bool] = []

    class Asks(PackedLinear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(isinstance(self.weight, Packed) and isinstance(self.weight, nn.Parameter))
            return super().forward(x)

    model = quantized.model(quantized.stateful)
    model.get_submodule("layers.0.first.base").__class__ = Asks
    megacompile(model, lowering="eager")(torch.arange(16).view(2, 8))
    assert seen and all(seen)


def test_a_wrapper_says_where_its_parts_are() -> None:
    model = quantized.wrapped(nn.Linear(4, 4, bias=False))
    weight = model.weight
    assert isinstance(weight, Int8)
    weight.data8, weight.scale = weight.data8.to("meta"), weight.scale.to("meta")
    follow_parts(model)
    assert model.weight is weight and weight.device.type == "meta"
    assert isinstance(weight, nn.Parameter) and weight.data8.device.type == "meta"


def test_a_wrapper_that_somebody_holds_cannot_move() -> None:
    import weakref

    model = quantized.wrapped(nn.Linear(4, 4, bias=False))
    weight = model.weight
    assert isinstance(weight, Int8)
    held = weakref.ref(weight)
    weight.data8, weight.scale = weight.data8.to("meta"), weight.scale.to("meta")
    with pytest.raises(ModelError, match=r"weight \(Int8\) cannot move from cpu to meta"):
        follow_parts(model)
    del held


def test_wrappings_are_equal_where_what_they_make_is() -> None:
    def wrapping(weight: Tensor) -> Wrapping:
        return packed.taken_apart(Int8.of(weight))[0]

    one = wrapping(torch.randn(3, 4))
    assert one == wrapping(torch.randn(3, 4)) and hash(one) == hash(wrapping(torch.randn(3, 4)))
    assert one != wrapping(torch.randn(3, 5))
    assert one != wrapping(torch.randn(3, 4).bfloat16())
    moved = packed.on_device(one, torch.device("meta"))
    assert moved.context["device"].type == "meta" and one.context["device"].type == "cpu"
