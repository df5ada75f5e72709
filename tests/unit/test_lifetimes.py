"""Lifetimes of a graph made by hand, and of steps that are strings of values."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from torch import fx

from megacompile.ir import ops
from megacompile.ir.lifetimes import endings, outliving, sharing
from tests.schedules import Spec, build, call


def sums(*returned: str) -> fx.Graph:
    """A graph that adds new gradients to those on the host, and returns some of its values."""
    bucket = build(Spec()).buckets[0]
    graph = fx.Graph()
    new = graph.placeholder("new")
    buffer = call(graph, ops.alloc_grad, bucket, name="buffer")
    fetched = call(graph, ops.fetch_grad, bucket, buffer, name="fetched")
    total = call(graph, ops.add_grad, bucket, fetched, new, name="total")
    call(graph, ops.norm_grad, bucket, total, name="norm")
    graph.output(tuple(node for node in graph.nodes if node.name in returned))
    return graph


def names(nodes: Collection[fx.Node]) -> str:
    return " ".join(node.name for node in sorted(nodes))


def test_values_share_the_memory_that_they_fill() -> None:
    shared = {root.name: names(nodes) for root, nodes in sharing(sums("norm")).items()}
    assert shared.pop("buffer") == "buffer fetched total"
    assert shared == {name: name for name in ("new", "norm", "output")}


@pytest.mark.parametrize(
    ("returned", "kept"),
    [
        ("", ""),
        ("norm", "norm"),
        ("new norm", "new norm"),
        ("total", "buffer fetched total"),  # every name of the memory
        ("fetched norm", "buffer fetched total norm"),
        ("buffer", "buffer"),  # the memory as it was made; what fills it later has frees
    ],
)
def test_memory_outlives_its_graph_if_what_fills_it_is_returned(returned: str, kept: str) -> None:
    assert names(outliving(sums(*returned.split()))) == kept


@pytest.mark.parametrize(
    ("steps", "last"),
    [
        ("a b c", "a b c"),
        ("a ab b", "- a b"),
        ("ab c ba", "- c ab"),
        ("ab bc c abc", "- - - abc"),
        ("a - a", "- - a"),
    ],
)
def test_the_last_step_that_uses_a_value_ends_it(steps: str, last: str) -> None:
    found = endings([step.strip("-") for step in steps.split()])
    assert found == [set(values.strip("-")) for values in last.split()]
    assert endings([]) == []
