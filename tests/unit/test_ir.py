"""`ir`: the vocabulary of ops, schedules and their copies, where parameters lie, what metas say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile.cost.hardware import H200
from megacompile.cost.memory import device_memory
from megacompile.cost.simulate import simulate
from megacompile.ir import ops
from megacompile.ir.buckets import ALIGNMENT_BYTES, Bucket
from megacompile.ir.ops.op import OPS, Show, Takes, Value, by_subject, op
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.tensors import TensorMeta
from megacompile.verify.proof import hazards
from tests.edits import edited, find
from tests.layouts import layout_of
from tests.planned import EVERYTHING, built, planned

BUCKET = Bucket(0, "layers.3", (), 0, "3")


# A new op is one declaration: the proof, the models of memory and the printed forms learn of it.


def largest(bucket: Any, weights: Any) -> Any:
    """The largest absolute value among the weights of a bucket."""


@pytest.fixture
def noting() -> Iterator[Schedule]:
    """A schedule in which the largest weight of bucket 0 is noted behind its prefetch."""
    declare = op(
        Stream.COMPUTE,
        by_subject,
        gives=Value.DONE,
        takes=(Takes(1, Value.WEIGHTS),),
        show=Show.CELL,
    )
    declare(largest)
    schedule = planned("0F 1F 2F 3F").copy()
    prefetch = find(schedule, "forward", "0PREFETCH@0")
    with schedule.forward.inserting_after(prefetch):
        ops.call(schedule.forward, largest, prefetch.args[0], prefetch)
    yield schedule
    del OPS[largest]


def test_a_declared_op_is_proved_shown_and_counted(noting: Schedule) -> None:
    assert hazards(noting) == []
    late = hazards(edited(noting, "forward: 0LARGEST before output"))
    assert {h.kind.value for h in late} <= {"slot refilled"} and late
    wrong = hazards(edited(noting, "forward: 0LARGEST[1] = 1PREFETCH@1"))
    assert ("wrong argument", "0LARGEST") in {(h.kind.value, h.label) for h in wrong}
    assert "0LARGEST" in noting.table()
    assert "largest(bucket_0, w0)" in noting.code()
    assert "LARGEST" in noting.diff(planned("0F 1F 2F 3F"))
    assert device_memory(noting).peak.total_bytes > 0
    assert "0LARGEST" in {event.label for event in simulate(noting, H200).events}


def shape_of(graph: fx.Graph) -> list[tuple[object, ...]]:
    return [
        (node.op, node.name, node.target, str(node.args), str(node.kwargs), dict(node.meta))
        for node in graph.nodes
    ]


@pytest.mark.parametrize("spec", [{"training": False}, EVERYTHING], ids=str)
def test_a_copy_says_the_same_with_nodes_of_its_own(spec: dict[str, Any]) -> None:
    schedule = built(**spec)
    copied = schedule.copy()
    before = list(map(shape_of, schedule.graphs.values()))
    assert before == list(map(shape_of, copied.graphs.values()))
    for field in dataclasses.fields(Schedule):
        a, b = getattr(schedule, field.name), getattr(copied, field.name)
        same_graph = field.name in ("forward", "backward", "update") and a is not None
        assert (a is b) is not same_graph, field.name
    for graph in copied.graphs.values():
        for node in reversed(graph.nodes):
            assert node.graph is graph and all(n.graph is graph for n in node.all_input_nodes)
            node.meta |= {"value": None, "more": 1}
            node.kwargs = {}
    assert list(map(shape_of, schedule.graphs.values())) == before, "the original stays"


TENSORS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.empty(5, 7).t(),
    "channels_last": lambda: torch.empty(4, 3, 2, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.empty(2, 3, 4).permute(2, 0, 1),
    "every second column": lambda: torch.empty(6, 10)[:, ::2],
    "rows of a larger one": lambda: torch.empty(9, 4)[2:5],
    "columns of a larger one": lambda: torch.empty(9, 4)[:, 1:3],
    "expanded": lambda: torch.empty(1, 4).expand(3, 4),
    "overlapping": lambda: torch.empty(8).as_strided((3, 4), (2, 1)),
    "empty": lambda: torch.empty(0, 4),
    "scalar": lambda: torch.empty(()),
    "bf16": lambda: torch.empty(3, 5, dtype=torch.bfloat16),
    "bool": lambda: torch.empty(3, dtype=torch.bool),
    "complex": lambda: torch.empty(3, 2, dtype=torch.complex128),
}
DENSE = ("transposed", "channels_last", "permuted", "rows of a larger one")
SPARSE = ("every second column", "columns of a larger one", "expanded", "overlapping")


@pytest.mark.parametrize("name", TENSORS)
def test_places_are_dense_and_metas_make_what_they_are_of(name: str) -> None:
    """The elements of a place are its memory: none twice, no gap between them."""
    tensor = TENSORS[name]()
    (param,) = layout_of([tensor]).params
    assert (param.shape, param.dtype) == (tuple(tensor.shape), tensor.dtype)
    assert (param.numel, param.size_bytes) == (tensor.numel(), tensor.numel() * tensor.itemsize)
    flat = torch.arange(param.numel)
    assert flat.as_strided(param.shape, param.stride).unique().numel() == param.numel
    if name in DENSE:
        assert param.stride == tensor.stride()
    if name in SPARSE:
        assert param.stride == torch.empty(tensor.shape).stride(), "it becomes contiguous"
    meta = TensorMeta.of(tensor)
    assert TensorMeta.of(meta.empty()) == TensorMeta.of(meta.zeros()) == meta
    assert meta.size_bytes == tensor.numel() * tensor.itemsize
    if name != "overlapping":  # zero_() would not know in which order
        assert not meta.zeros().any()


def test_parameters_follow_each_other_aligned() -> None:
    tensors = [torch.empty(64), torch.empty(65), torch.empty(2, dtype=torch.float64)]
    bucket = layout_of(tensors, key=7)
    assert [param.offset_bytes for param in bucket.params] == [0, 256, 768]
    assert (bucket.size_bytes, bucket.key, bucket.name, bucket.label) == (1024, 7, "unit 7", "?")
    bucket = layout_of([torch.empty(0), torch.empty(()), torch.empty(3, 0, 2), torch.empty(4)])
    assert [param.offset_bytes for param in bucket.params] == [0, 0, 256, 256]
    assert bucket.size_bytes == 512 and layout_of([torch.empty(0)]).size_bytes == 0
    end = 0
    mixed = layout_of([make() for make in TENSORS.values()])
    for param in mixed.params:
        assert param.offset_bytes % ALIGNMENT_BYTES == 0
        assert 0 <= param.offset_bytes - end < ALIGNMENT_BYTES
        end = param.offset_bytes + param.size_bytes
    assert end <= mixed.size_bytes < end + ALIGNMENT_BYTES


def test_leaves_of_metas_are_leaves_whatever_the_mode() -> None:
    meta = TensorMeta.of(nn.Parameter(torch.ones(2)))
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled):
            assert all(t.requires_grad and t.is_leaf for t in (meta.empty(), meta.zeros()))
    assert TensorMeta.of(torch.empty(100, 100)[:2, :3]).size_bytes == 24, "a view's own"
