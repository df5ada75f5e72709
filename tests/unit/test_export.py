"""Schedules as graphs for other programs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import networkx as nx

from tests.schedules import Spec, build


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


def test_dot_has_every_node_in_the_cluster_of_its_stream() -> None:
    schedule = replace(build(Spec()), name='a "name" \\')
    text = schedule.to_dot()
    assert text.startswith('digraph "a \\"name\\" \\\\" {')
    graph = schedule.to_networkx()
    found = re.findall(r'subgraph "cluster_(\w+)" \{\n(.*?)\n  \}', text, re.DOTALL)
    clusters = {
        (name, key)
        for name, body in found
        for key in re.findall(r'^    "([^"]+)" \[label=', body, re.MULTILINE)
    }
    of_nodes = {(f"{d['graph']}_{d['stream']}", key) for key, d in graph.nodes(data=True)}
    assert clusters == of_nodes
    assert text.count(" -> ") == graph.number_of_edges()
    assert text.count("style=bold") == 1, "one boundary"
    assert text.count("{") == text.count("}")
