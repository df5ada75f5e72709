"""`ir`: where parameters lie in a bucket, what metas say, graphs copied, numbers printed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import ALIGNMENT_BYTES, Bucket, Slot
from megacompile.ir.capture import Ambient
from megacompile.ir.schedule import Plan, Schedule
from megacompile.ir.tensors import TensorMeta, short_dtype, tensors_bytes
from megacompile.text import format_bytes
from tests.layouts import layout_of
from tests.schedules import ACTIVATION, SAVED, Spec, build, find, set_arguments

CPU = torch.device("cpu")
EVERYTHING = Spec(
    stages=5,
    slots=3,
    accumulate=True,
    shared=True,
    reuse=True,
    random=frozenset({1}),
    keep=frozenset({2}),
    changes=frozenset({1, 3}),
)


def extent_bytes(bucket: Bucket, i: int) -> int:
    """From a parameter's first byte to behind its last one."""
    param = bucket.params[i]
    if param.numel == 0:
        return 0
    last = sum((n - 1) * step for n, step in zip(param.shape, param.stride, strict=True))
    return (last + 1) * param.dtype.itemsize


def channels_last() -> Tensor:
    return torch.empty(4, 3, 2, 5).to(memory_format=torch.channels_last)


TENSORS: dict[str, Callable[[], Tensor]] = {
    "matrix": lambda: torch.empty(5, 7),
    "transposed": lambda: torch.empty(5, 7).t(),
    "channels_last": channels_last,
    "permuted": lambda: torch.empty(2, 3, 4).permute(2, 0, 1),
    "every second column": lambda: torch.empty(6, 10)[:, ::2],
    "rows of a larger one": lambda: torch.empty(9, 4)[2:5],
    "columns of a larger one": lambda: torch.empty(9, 4)[:, 1:3],
    "expanded": lambda: torch.empty(1, 4).expand(3, 4),
    "overlapping": lambda: torch.empty(8).as_strided((3, 4), (2, 1)),
    "empty": lambda: torch.empty(0, 4),
    "scalar": lambda: torch.empty(()),
    "one element": lambda: torch.empty(1, 1, 1),
    "bf16": lambda: torch.empty(3, 5, dtype=torch.bfloat16),
    "f64": lambda: torch.empty(3, dtype=torch.float64),
    "i8": lambda: torch.empty(17, dtype=torch.int8),
    "bool": lambda: torch.empty(3, dtype=torch.bool),
    "complex": lambda: torch.empty(3, 2, dtype=torch.complex128),
}


# --- buckets


def test_parameters_follow_each_other_aligned() -> None:
    tensors = [torch.empty(64), torch.empty(65), torch.empty(2, dtype=torch.float64)]
    bucket = layout_of(tensors, key=7)
    assert [param.offset_bytes for param in bucket.params] == [0, 256, 768]
    assert bucket.size_bytes == 1024
    assert (bucket.key, bucket.name, bucket.label) == (7, "unit 7", "?")
    assert [param.name for param in bucket.params] == ["p0", "p1", "p2"]


def test_mixed_dtypes_share_a_bucket() -> None:
    tensors = [make() for make in TENSORS.values()]
    bucket = layout_of(tensors)
    end = 0
    for param, tensor in zip(bucket.params, tensors, strict=True):
        assert (param.shape, param.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert param.offset_bytes % ALIGNMENT_BYTES == 0
        assert param.offset_bytes >= end, "it starts behind the one before"
        assert param.offset_bytes - end < ALIGNMENT_BYTES, "and wastes less than the alignment"
        end = param.offset_bytes + param.size_bytes
    assert end <= bucket.size_bytes < end + ALIGNMENT_BYTES


@pytest.mark.parametrize("name", TENSORS)
def test_places_are_dense(name: str) -> None:
    """The elements of a place are its memory: none twice, no gap between them."""
    tensor = TENSORS[name]()
    bucket = layout_of([tensor])
    (param,) = bucket.params
    assert (param.numel, param.size_bytes) == (tensor.numel(), tensor.numel() * tensor.itemsize)
    assert extent_bytes(bucket, 0) == param.size_bytes
    flat = torch.arange(param.numel)
    assert flat.as_strided(param.shape, param.stride).unique().numel() == param.numel


@pytest.mark.parametrize("name", ["matrix", "transposed", "channels_last", "permuted"])
def test_dense_strides_are_kept(name: str) -> None:
    tensor = TENSORS[name]()
    assert layout_of([tensor]).params[0].stride == tensor.stride()


@pytest.mark.parametrize(
    "name", ["every second column", "columns of a larger one", "expanded", "overlapping"]
)
def test_other_strides_become_contiguous(name: str) -> None:
    tensor = TENSORS[name]()
    assert not tensor.is_contiguous()
    assert layout_of([tensor]).params[0].stride == torch.empty(tensor.shape).stride()


def test_empty_and_scalar_parameters() -> None:
    bucket = layout_of([torch.empty(0), torch.empty(()), torch.empty(3, 0, 2), torch.empty(4)])
    assert [param.numel for param in bucket.params] == [0, 1, 0, 4]
    assert [param.offset_bytes for param in bucket.params] == [0, 0, 256, 256]
    assert bucket.size_bytes == 512
    assert layout_of([]).size_bytes == layout_of([torch.empty(0)]).size_bytes == 0


def test_a_layout_allocates_nothing() -> None:
    """The tensors may be larger than the memory."""
    huge = torch.empty(2**40, 2**10, dtype=torch.bfloat16, device="meta")
    assert layout_of([huge]).size_bytes == 2**51


def test_names_of_buckets_and_slots_are_names_in_code() -> None:
    bucket = layout_of([torch.empty(1)])
    assert repr(dataclasses.replace(bucket, label="3")) == "bucket_3"
    assert repr(dataclasses.replace(bucket, label="3.1")) == "bucket_3_1"
    assert repr(Slot(2, 8)) == "slot_2"
    assert repr(build(Spec()).stages[1]) == "stage_1"


# --- metas


@pytest.mark.parametrize("name", TENSORS)
def test_a_meta_makes_what_it_is_of(name: str) -> None:
    tensor = TENSORS[name]()
    meta = TensorMeta.of(tensor)
    for made in (meta.empty(), meta.zeros()):
        assert TensorMeta.of(made) == meta
    assert meta.size_bytes == tensor.numel() * tensor.itemsize
    if name != "overlapping":  # zero_() would not know in which order
        assert not meta.zeros().any()


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_a_meta_keeps_requires_grad(grad_enabled: bool) -> None:
    meta = TensorMeta.of(nn.Parameter(torch.ones(2)))
    with torch.set_grad_enabled(grad_enabled):
        for made in (meta.empty(), meta.zeros()):
            assert made.requires_grad and made.is_leaf
    assert not TensorMeta.of(torch.ones(2)).requires_grad


def test_metas_differ_where_tensors_do() -> None:
    tensors = [
        torch.empty(4, 4),
        torch.empty(4, 4).t(),
        torch.empty(4, 4, dtype=torch.float16),
        torch.empty(16),
        torch.empty(4, 4, requires_grad=True),
        torch.empty(4, 4, device="meta"),
    ]
    assert len({TensorMeta.of(tensor) for tensor in tensors}) == len(tensors)
    assert TensorMeta.of(torch.empty(4, 4)) == TensorMeta.of(torch.ones(4, 4))


def test_a_meta_makes_fake_tensors_under_a_fake_mode() -> None:
    meta = TensorMeta((2**40,), torch.float32, (1,))
    with compat.fake_mode():
        assert meta.empty().shape == (2**40,)


def test_the_bytes_of_a_view_are_its_own() -> None:
    assert TensorMeta.of(torch.empty(100, 100)[:2, :3]).size_bytes == 24


def test_a_meta_prints_as_dtype_and_shape() -> None:
    assert str(ACTIVATION) == "bf16[4, 8]"
    assert str(TensorMeta.of(torch.empty(()))) == "f32[]"


def test_bytes_of_nested_metas() -> None:
    value = (ACTIVATION, None, (ACTIVATION, (ACTIVATION,)), ())
    assert tensors_bytes(value) == 3 * ACTIVATION.size_bytes == 192
    assert tensors_bytes(None) == tensors_bytes(()) == 0


# --- ambient


def test_ambient_is_put_back() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        inside = Ambient.current(CPU)
    outside = Ambient.current(CPU)
    assert inside != outside
    with inside.apply():
        assert Ambient.current(CPU) == inside
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    with inside.apply(autocast=False):
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
    assert Ambient.current(CPU) == outside


# --- schedules


def shape_of(graph: fx.Graph) -> list[tuple[object, ...]]:
    """Everything a graph says, with nodes by their names."""
    return [
        (node.op, node.name, node.target, str(node.args), str(node.kwargs), dict(node.meta))
        for node in graph.nodes
    ]


@pytest.mark.parametrize("spec", [Spec(), Spec(training=False), EVERYTHING], ids=str)
def test_a_copied_graph_says_the_same_with_nodes_of_its_own(spec: Spec) -> None:
    for graph in build(spec).graphs.values():
        copied = compat.copy_graph(graph)
        assert shape_of(copied) == shape_of(graph)
        assert not set(copied.nodes) & set(graph.nodes)
        for node in copied.nodes:
            assert node.graph is copied
            assert all(taken.graph is copied for taken in node.all_input_nodes)


def test_changes_of_a_copy_leave_the_original() -> None:
    schedule = build(EVERYTHING)
    before = {name: shape_of(graph) for name, graph in schedule.graphs.items()}
    copied = schedule.copy()
    node = find(copied, "backward", "3B")
    node.meta["value"] = None
    node.meta["more"] = 1
    find(copied, "forward", "0PREFETCH@0").kwargs = {}
    set_arguments(find(copied, "forward", "1F"), *[None] * 4)
    for free in ops.nodes_of(copied.forward, ops.free):
        copied.forward.erase_node(free)
    assert {name: shape_of(graph) for name, graph in schedule.graphs.items()} == before


def test_names_that_python_has_too_survive_a_copy() -> None:
    graph = fx.Graph()
    taken = [graph.placeholder(name) for name in ("len", "x", "x_1", "forward", "float", "_x")]
    node = ops.call(graph, ops.snapshot, taken[0], name="print")
    graph.output((node, *taken))
    assert [n.name for n in compat.copy_graph(graph).nodes] == [n.name for n in graph.nodes]


def test_a_copied_schedule_is_the_same_but_for_its_graphs() -> None:
    for spec in (Spec(training=False), EVERYTHING):
        schedule = build(spec)
        copied = schedule.copy()
        for field in dataclasses.fields(Schedule):
            mine, theirs = getattr(schedule, field.name), getattr(copied, field.name)
            same_graph = field.name in ("forward", "backward", "update") and mine is not None
            assert (mine is theirs) is not same_graph, field.name


def test_a_schedule_knows_what_is_in_it() -> None:
    schedule = build(Spec(stages=3, shared=True))
    assert list(schedule.graphs) == ["forward", "backward", "update"]
    assert list(build(Spec(update=True)).graphs) == ["forward", "backward"]
    assert list(build(Spec(training=False)).graphs) == ["forward"]
    assert [bucket.key for bucket in schedule.buckets] == [0, 1, 2]
    assert schedule.gradient_params == {0: (0,), 1: (0,), 2: (0,)}
    assert [template.index for template in schedule.templates] == [0, 1, 2]
    assert schedule.templates[0].saved_bytes == SAVED * ACTIVATION.size_bytes
    last = schedule.stages[-1]
    assert [bucket.key for bucket in last.gradient_buckets] == [2, 0]
    assert last.buckets_read([1]) == (schedule.buckets[0],)
    assert last.buckets_read([2]) == ()
    assert schedule.plan == Plan()


def test_a_stage_without_a_template_says_so() -> None:
    stage = dataclasses.replace(build(Spec()).stages[1], template=None)
    with pytest.raises(AssertionError, match=r"stage 1 \(layers.1\) has no template yet"):
        _ = stage.traced


def test_a_schedule_prints_its_code() -> None:
    schedule = build(Spec())
    assert str(schedule) == schedule.code()
    assert schedule.table().startswith("forward\nstep | ")


# --- printed numbers


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (999 * 1024, "999 KiB"),
        (1000 * 1024, "0.977 MiB"),
        (445 * 2**20, "445 MiB"),
        (1.09 * 2**30, "1.09 GiB"),
        (22.04 * 2**30, "22 GiB"),
        (125 * 2**30, "125 GiB"),
        (1.5 * 2**40, "1.5 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_bytes_are_printed_with_three_digits(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize("exponent", [10, 20, 30])
def test_bytes_just_below_the_next_unit(exponent: int) -> None:
    """Three digits of 999.7 KiB are those of 1000 KiB, which is said in MiB."""
    assert "e+" not in format_bytes(999.7 * 2**exponent)


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float16, "f16"),
        (torch.float32, "f32"),
        (torch.float64, "f64"),
        (torch.int8, "i8"),
        (torch.int64, "i64"),
        (torch.uint8, "u8"),
        (torch.bool, "bool"),
        (torch.complex64, "complex64"),
        (torch.float8_e4m3fn, "f8_e4m3fn"),
    ],
)
def test_short_dtypes(dtype: torch.dtype, text: str) -> None:
    assert short_dtype(dtype) == text
