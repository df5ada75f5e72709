"""Edges within a graph, and between graphs, of schedules written by hand."""

from __future__ import annotations

from torch import fx

from megacompile.ir.edges import EdgeKind, edges, handed, stands_for, waits_for
from megacompile.ir.values import label
from tests.schedules import Spec, build, find


def name(node: fx.Node) -> str:
    return node.name if node.op == "placeholder" else label(node)


def test_what_an_op_waits_for() -> None:
    """Values, tokens and readers of a slot; an item of a tuple stands for its op."""
    schedule = build(Spec(stages=3))
    prefetch = find(schedule, "forward", "2PREFETCH@0")
    assert sorted(map(name, waits_for(prefetch))) == ["0F", "weights_2"]
    assert [*map(name, waits_for(find(schedule, "forward", "2F")))] == ["2PREFETCH@0", "1F"]


def test_an_op_that_names_others_waits_for_none() -> None:
    schedule = build(Spec(device=frozenset({0}), helps=True))
    assert schedule.update is not None
    helper = next(node for node in schedule.update.nodes if "help" in node.name)
    assert helper.all_input_nodes and waits_for(helper) == []
    assert any(edge.second is helper for edge in edges(schedule.update)), "a picture shows them"


def test_edges_by_kind_in_the_order_of_the_program() -> None:
    graph = build(Spec(stages=2)).forward
    found = {(name(edge.first), name(edge.second), edge.kind) for edge in edges(graph)}
    assert found >= {
        ("0F", "1F", EdgeKind.DATA),
        ("0F", "1F", EdgeKind.STREAM),
        ("0PREFETCH@0", "1PREFETCH@1", EdgeKind.STREAM),
        ("weights_1", "1PREFETCH@1", EdgeKind.AFTER),
    }
    position = {node: i for i, node in enumerate(graph.nodes)}
    seconds = [position[edge.second] for edge in edges(graph)]
    assert seconds == sorted(seconds)


def test_what_a_placeholder_stands_for_is_what_an_earlier_graph_hands_on() -> None:
    """A saved value, gradients and states that are left, the last write of a part of a bucket."""
    schedule = build(Spec(stages=2, device=frozenset({0})))
    assert schedule.backward is not None and schedule.update is not None
    given = {graph: handed(schedule, graph) for graph in schedule.graphs}
    assert len(given["forward"]) == len(schedule.saved_values)

    def makers(graph: fx.Graph, *earlier: str) -> dict[str, str]:
        made = {what: node for each in earlier for what, node in given[each].items()}
        inputs = ((n.name, stands_for(schedule, n)) for n in graph.find_nodes(op="placeholder"))
        return {value: name(made[what]) for value, what in inputs if what in made}

    assert makers(schedule.backward, "forward")["y0_0"] == "0F"
    update = makers(schedule.update, "forward", "backward")
    assert update["gradients_1"] == "1OFFLOAD_GRAD"
    assert {update[left] for left in schedule.left} <= {"0B", "0FETCH_STATE"}
    assert makers(schedule.forward, "update")["weights_1"] == "1UPDATE"
