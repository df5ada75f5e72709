"""The vocabulary: every op has its stream, its printed name, and one implementation that fits."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.stream import Stream
from megacompile.runtime.ops.bound import BoundOps
from megacompile.runtime.ops.group import OpGroup
from tests.schedules import Spec, build, find

BUCKET = Bucket(0, "layers.3", (), 0, "3")
STUBS: list[Callable[..., Any]] = [
    function
    for _, function in inspect.getmembers(ops, inspect.isfunction)
    if "unbound" in function.__code__.co_names
]


def documented() -> dict[str, tuple[str, str]]:
    """The table of the module's docstring: op -> (stream, label)."""
    row = re.compile(r"^    (\w+) +(\w+) +(\S+) +.*->")
    found = [row.match(line) for line in (ops.__doc__ or "").splitlines()]
    return {m[1]: (m[2], m[3]) for m in found if m and m[1] != "op"}


def arguments(op: Callable[..., Any]) -> tuple[object, ...]:
    """Positional arguments for the label of an op on stage 3, its bucket and slot 1."""
    values = {"stage": build(Spec()).stages[3], "bucket": BUCKET, "slot": Slot(1, 0)}
    return tuple(values.get(name) for name in inspect.signature(op).parameters)


# --- the vocabulary


def test_every_op_is_in_the_table_under_its_own_name() -> None:
    assert set(STUBS) == set(ops.OPS)
    assert {function.__name__: op.name for function, op in ops.OPS.items()} == {
        function.__name__: function.__name__ for function in STUBS
    }


def test_every_op_has_the_stream_and_label_that_are_documented() -> None:
    table = documented()
    assert sorted(table) == sorted(op.name for op in ops.OPS.values())
    for function, op in ops.OPS.items():
        stream, label = table[op.name]
        assert op.stream is Stream(stream), op.name
        assert op.label(arguments(function)) == ("FREE" if label == "-" else label), op.name


@pytest.mark.parametrize("op", STUBS, ids=lambda op: op.__name__)
def test_an_op_runs_through_the_executor_only(op: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match=f"op '{op.__name__}' runs through the executor"):
        op(*arguments(op)[: len(inspect.getfullargspec(op).args)])


@pytest.mark.parametrize("op", STUBS, ids=lambda op: op.__name__)
def test_the_executor_implements_an_op_with_the_same_arguments(op: Callable[..., Any]) -> None:
    def shape(function: Callable[..., Any]) -> list[tuple[str, object, object]]:
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]

    assert shape(getattr(BoundOps, op.__name__)) == shape(op)


def test_the_executor_implements_nothing_else() -> None:
    groups = [group for group in BoundOps.__mro__ if issubclass(group, OpGroup)]
    public = {name for group in groups for name in vars(group) if not name.startswith("_")}
    assert public == {op.name for op in ops.OPS.values()} | {"wait"}  # what a `free` waits with


# --- labels


@pytest.mark.parametrize(
    ("spec", "graph", "node", "label"),
    [
        (Spec(), "forward", ops.prefetch, "0PREFETCH@0"),
        (Spec(), "forward", ops.forward, "0F"),
        (Spec(), "backward", ops.prefetch, "3PREFETCH@0"),
        (Spec(), "backward", ops.recompute, "3RECOMPUTE"),
        (Spec(), "backward", ops.backward, "3B"),
        (Spec(), "backward", ops.offload_grad, "3OFFLOAD_GRAD"),
        (Spec(reuse=True), "backward", ops.reuse, "3REUSE@1"),
        (Spec(accumulate=True), "backward", ops.alloc_grad, "3ALLOC_GRAD"),
        (Spec(accumulate=True), "backward", ops.fetch_grad, "3FETCH_GRAD"),
        (Spec(accumulate=True), "backward", ops.add_grad, "3ADD_GRAD"),
        (Spec(random=frozenset({2})), "forward", ops.save_rng, "2RNG"),
        (Spec(changes=frozenset({2})), "forward", ops.snapshot, "SNAPSHOT"),
        (Spec(changes=frozenset({2})), "forward", ops.assign, "ASSIGN"),
        (Spec(norms=True), "backward", ops.norm_grad, "3NORM_GRAD"),
        (Spec(update=True), "backward", ops.alloc_state, "3ALLOC_STATE"),
        (Spec(update=True), "backward", ops.fetch_state, "3FETCH_STATE"),
        (Spec(update=True), "backward", ops.update, "3UPDATE"),
        (Spec(update=True), "backward", ops.offload_state, "3OFFLOAD_STATE"),
        (Spec(update=True), "backward", ops.defer_free, "DEFER_FREE"),
        (Spec(update=True), "forward", ops.drain, "DRAIN"),
        (Spec(), "forward", ops.begin, "BEGIN"),
        (Spec(), "backward", ops.free, "FREE"),
    ],
)
def test_labels_of_nodes(spec: Spec, graph: str, node: Callable[..., Any], label: str) -> None:
    found = ops.nodes_of(build(spec).graphs[graph], node)
    assert ops.label(found[0]) == label


def test_a_prefetch_says_which_bucket_and_slot() -> None:
    graph = fx.Graph()
    second = Bucket(9, "layers.3.mlp", (), 0, "3.1")
    assert ops.label(ops.call(graph, ops.prefetch, BUCKET, Slot(1, 0))) == "3PREFETCH@1"
    assert ops.label(ops.call(graph, ops.prefetch, second, Slot(0, 0))) == "3.1PREFETCH@0"
    assert ops.label(ops.call(graph, ops.prefetch, BUCKET, None)) == "3PREFETCH@?"


def test_what_is_no_op_goes_by_its_own_name() -> None:
    schedule = build(Spec())
    for name in ("x", "output", "y0_0"):
        node = find(schedule, "forward", name)
        assert (ops.op_of(node), ops.label(node)) == (None, name)
        assert ops.stream_of(node) is Stream.COMPUTE


# --- nodes


def test_a_call_is_a_node_with_the_arguments_it_was_given() -> None:
    graph = fx.Graph()
    begin = ops.call(graph, ops.begin, name="start")
    node = ops.call(graph, ops.prefetch, BUCKET, Slot(1, 0), name="w", after=(begin,))
    assert (node.op, node.name, node.target) == ("call_function", "w", ops.prefetch)
    assert ops.arguments(node) == (BUCKET, Slot(1, 0))
    assert node.kwargs == {"after": (begin,)}
    assert begin.kwargs == {} and node in begin.users
    assert ops.call(graph, ops.prefetch, BUCKET, None, after=()).kwargs == {"after": ()}
    assert ops.stream_of(node) is Stream.H2D and ops.stream_of(begin) is Stream.COMPUTE


def test_a_node_of_another_vocabulary_is_our_bug() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.relu, (graph.placeholder("x"),))
    with pytest.raises(KeyError):
        ops.op_of(node)


def test_nodes_are_found_in_program_order() -> None:
    graph = build(Spec(stages=2)).forward
    labels = [ops.label(n) for n in ops.nodes_of(graph, ops.forward, ops.prefetch)]
    assert labels == ["0PREFETCH@0", "1PREFETCH@1", "0F", "1F"]
    assert {n.target for n in ops.nodes_of(graph)} <= set(ops.OPS)
    assert not ops.nodes_of(graph, ops.backward)
    ours = {n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem}
    assert set(ops.nodes_of(graph)) == ours


def test_items_of_a_node_that_gives_a_tuple() -> None:
    schedule = build(Spec(keep=frozenset({1})))
    assert [(k, n.name) for k, n in ops.items(find(schedule, "forward", "1F"))] == [
        (0, "y1_0"),
        (1, "y1_1"),
        (2, "y1_2"),
    ]
    assert list(ops.items(find(schedule, "forward", "1PREFETCH@1"))) == []


def test_what_a_graph_returns() -> None:
    schedule = build(Spec(stages=1))
    outputs, saved_values = ops.returned(schedule.forward)
    assert [n.name for n in outputs] == ["y0_0"]
    assert tuple(n.name for n in saved_values) == schedule.saved_values
    assert schedule.backward is not None
    assert ops.returned(schedule.backward) is not None


def test_actions_are_the_labels_without_what_only_manages_memory() -> None:
    schedule = build(Spec(stages=2, slots=2, accumulate=True))
    assert schedule.backward is not None
    assert ops.actions(schedule.forward) == "0PREFETCH@0 1PREFETCH@1 0F 1F"
    assert ops.actions(schedule.backward) == (
        "1PREFETCH@0 0PREFETCH@1 1FETCH_GRAD 1RECOMPUTE 1B 1ADD_GRAD 1OFFLOAD_GRAD "
        "0FETCH_GRAD 0RECOMPUTE 0B 0ADD_GRAD 0OFFLOAD_GRAD"
    )
    updating = build(Spec(stages=2, slots=2, update=True))
    assert updating.backward is not None
    assert ops.actions(updating.backward) == (
        "1PREFETCH@0 0PREFETCH@1 1FETCH_STATE 1RECOMPUTE 1B 1UPDATE 1OFFLOAD_STATE "
        "0FETCH_STATE 0RECOMPUTE 0B 0UPDATE 0OFFLOAD_STATE"
    )
