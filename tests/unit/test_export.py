"""Schedules as graphs for other programs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest

from megacompile.ir import ops
from megacompile.verify.hazard import Order
from tests.schedules import Spec, build

SPECS = [
    Spec(),
    Spec(training=False),
    Spec(accumulate=True, shared=True),
    Spec(update=True),
    Spec(device=frozenset({0, 2}), resident=frozenset({1}), helps=True),
]


def edges(graph: nx.MultiDiGraph, kind: str) -> set[tuple[str, str]]:
    """By the labels of the ops."""
    label = nx.get_node_attributes(graph, "label")
    return {(label[a], label[b]) for a, b, data in graph.edges(data=True) if data["kind"] == kind}


def test_nodes_and_edges_of_a_small_forward(tmp_path: Path) -> None:
    graph = build(Spec(stages=3, training=False)).to_networkx()
    assert edges(graph, "data") >= {("0PREFETCH@0", "0F"), ("0F", "1F"), ("1F", "2F")}
    assert edges(graph, "after") == {
        ("BEGIN", "0PREFETCH@0"),
        ("BEGIN", "1PREFETCH@1"),
        ("0F", "2PREFETCH@0"),
    }
    assert ("0PREFETCH@0", "1PREFETCH@1") in edges(graph, "stream")
    assert edges(graph, "boundary") == set()
    (prefetch,) = [d for _, d in graph.nodes(data=True) if d["label"] == "2PREFETCH@0"]
    of_it = {"op": "prefetch", "graph": "forward", "stream": "h2d", "stage": 2, "slot": 0}
    assert (of_it | {"module": "layers.2", "bytes": 128}).items() <= prefetch.items()
    nx.write_graphml(graph, tmp_path / "schedule.graphml")
    again = nx.read_graphml(tmp_path / "schedule.graphml", force_multigraph=True)
    assert set(again.nodes) == set(graph.nodes)
    assert again.number_of_edges() == graph.number_of_edges()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_its_order_is_the_one_that_verify_proves(spec: Spec) -> None:
    """A path joins two ops of a graph where, and only where, they are ordered within a run."""
    schedule = build(spec)
    graph = schedule.to_networkx()
    kinds = nx.get_edge_attributes(graph, "kind").items()
    graph.remove_edges_from([edge for edge, kind in kinds if kind in ("token", "names")])
    for name, fx_graph in schedule.graphs.items():
        order = Order(fx_graph)
        nodes = ops.nodes_of(fx_graph)
        inside = graph.subgraph([k for k, d in graph.nodes(data=True) if d["graph"] == name])
        reach = {key: nx.descendants(inside, key) for key in inside}
        for first in nodes:
            for second in nodes:
                if first is not second:
                    there = f"{name}.{second.name}" in reach[f"{name}.{first.name}"]
                    assert there == order.before(first, second), (first, second)


def test_dot_has_every_node_in_the_cluster_of_its_stream() -> None:
    schedule = replace(build(Spec()), name='a "name" \\')
    text = schedule.to_dot()
    assert text.startswith('digraph "a \\"name\\" \\\\" {')
    graph = schedule.to_networkx()
    clusters = {
        name: re.findall(r'^    "([^"]+)" \[label=', body, re.MULTILINE)
        for name, body in re.findall(r'subgraph "cluster_(\w+)" \{\n(.*?)\n  \}', text, re.DOTALL)
    }
    wanted: dict[str, list[str]] = {}
    for key, data in graph.nodes(data=True):
        wanted.setdefault(f"{data['graph']}_{data['stream']}", []).append(key)
    assert clusters == wanted
    assert text.count(" -> ") == graph.number_of_edges()
    assert text.count("style=bold") == 1, "one boundary"
    assert text.count("{") == text.count("}")
