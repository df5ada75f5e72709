"""Views of a schedule: the Python that runs, tables, diffs."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Slot
from megacompile.ir.plan import Plan
from megacompile.ir.schedule import Schedule
from tests.edits import find
from tests.planned import EVERYTHING, built, planned, rows

SPECS: list[dict[str, Any]] = [
    {},
    {"training": False, "changes": {1}},
    {"reads": {3: "3 0"}},
    {"reuse": True, "random": {0, 2}},
    EVERYTHING,
    {"device_update": {0, 2}, "resident": {1}, "helps": True},
    {**EVERYTHING, "update": True},
    {"stages": 3, "update": True, "compute_dtype": torch.bfloat16, "accumulate": True},
    {"stages": 12, "slots": 3, "changes": range(12)},  # with long lines
]


def function(schedule: Schedule, name: str) -> str:
    return "def " + schedule.code().split("\n\ndef ")[1:][list(schedule.graphs).index(name)]


def steps(graph: fx.Graph) -> list[str]:
    """The ops of a graph in their order, and the names that it frees."""
    found = []
    for node in graph.nodes:
        if ops.op_of(node) is not None and node.target is not ops.free:
            found.append(ops.label(node))
        if node.target in (ops.free, ops.defer_free):
            found.append(node.args[0].name)
    return found


def steps_of_code(code: str) -> list[str]:
    """The same of a function, by its labels and its `del`."""
    said = re.findall(r"\bdel ([\w, ]+)|  # [a-z]\S* +([A-Z0-9]\S*)", code)
    words = [word for names, label in said for word in ([label] if label else names.split(", "))]
    return [word.strip() for word in words if word != "WAIT"]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_code_makes_the_calls_of_the_graph(spec: dict[str, Any]) -> None:
    """And drops what it frees, where it does."""
    schedule = built(**spec)
    for name, graph in schedule.graphs.items():
        code = function(schedule, name)
        assert steps_of_code(code) == steps(graph)
        lines = [line.split("  #")[0].rstrip() for line in code.splitlines()]
        assert max(map(len, lines)) <= 80


def test_many_results_are_returned_in_valid_code() -> None:
    """Around the line's width a returned pair needs its parentheses."""
    schedule = built()
    for count in range(1, 40):
        graph = fx.Graph()
        inputs = [graph.placeholder(f"x{i}") for i in range(count)]
        graph.output((tuple(inputs), ()))
        compile(replace(schedule, forward=graph).code(), "code", "exec")


@pytest.mark.parametrize("end", ["\n", "\f", "\0", "\u2028", "\udc80", "'\n"])
def test_names_from_outside_stay_within_their_comments(end: str) -> None:
    schedule = built(stages=3)
    name = f"A{end}import os{end}#"
    for stage in schedule.stages:
        object.__setattr__(stage, "name", f"layers.{name}")
    plan = Plan(reasons=(f"stage 2 (layers.{name}) is kept",))
    schedule = replace(schedule, name=name, plan=plan)
    text = schedule.code()
    assert [type(part) for part in ast.parse(text).body] == [ast.FunctionDef] * 3
    head = text[: text.index("\ndef ")].splitlines()
    assert all(line.startswith("#") for line in head if line)
    for shown in (text, schedule.table(), schedule.diff(built())):
        assert all(line.isprintable() for line in shown.split("\n"))


def test_variables_shadow_neither_ops_nor_objects() -> None:
    schedule = built(stages=2, training=False)
    x, begin = schedule.forward.find_nodes(op="placeholder")[0], find(schedule, "forward", "BEGIN")
    x.name, begin.name = "stage_0", "wait"
    find(schedule, "forward", "0F").name = "prefetch"
    nodes = [node for node in ast.walk(ast.parse(schedule.code())) if isinstance(node, ast.Name)]
    stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    assert not stored & {"stage_0", "wait", "prefetch"}


def test_what_nobody_takes_is_dropped() -> None:
    schedule = built(stages=2)
    backward = schedule.graphs["backward"]
    item, last = (find(schedule, "backward", name) for name in ("d0_0", "s0_1_again"))
    backward.output_node().args = (((None,), (), ()),)
    for dropped in (item, last):
        for free in [user for user in dropped.users if user.target is ops.free]:
            backward.erase_node(free)
    last.replace_all_uses_with(find(schedule, "backward", "s0_0_again"))
    for dropped in (item, last):
        backward.erase_node(dropped)
    code = function(schedule, "backward")
    assert "s0_0_again, _ = recompute(stage_0" in code
    assert re.search(r"_, g0_0 = backward\(stage_0[^#]*#.*\n[^#]*del _ ", code)


def test_a_tuple_that_is_only_waited_for_does_not_keep_its_items() -> None:
    schedule = built(stages=3, training=False)
    third = find(schedule, "forward", "2PREFETCH@0")
    third.kwargs = {"after": (find(schedule, "forward", "0F"),)}
    assert "f0 = y0_0, = forward(stage_0" in function(schedule, "forward")


def test_the_table_has_a_row_for_each_step() -> None:
    text = built(stages=2, update=True).table()
    assert text.partition("backward\n")[2] == (
        """\
step | h2d                                               | compute            | d2h
   0 | 1PREFETCH@0 0PREFETCH@1 1FETCH_STATE 0FETCH_STATE | 1RECOMPUTE
   1 |                                                   | 1B
   2 |                                                   | 1NORM_GRAD 1UPDATE
   3 |                                                   | 0RECOMPUTE         | 1OFFLOAD_STATE
   4 |                                                   | 0B
   5 |                                                   | 0NORM_GRAD 0UPDATE
   6 |                                                   |                    | 0OFFLOAD_STATE"""
    )


def test_a_diff_has_the_lines_of_the_python_that_change() -> None:
    before = built(stages=3, training=False)
    after = before.copy()
    assert before.diff(after) == ""
    find(after, "forward", "2PREFETCH@0").kwargs = {"after": (find(after, "forward", "1F"),)}
    changed = [line for line in before.diff(after).splitlines() if line[:2] in ("- ", "+ ")]
    assert len(changed) >= 2 and "2PREFETCH@0" in changed[0]
    plan = rows(3, {1}, reasons=("there is room",))
    slots = (*before.slots, Slot(2, 128))
    found = before.diff(replace(before, plan=plan, slots=slots))
    assert "+# plan: there is room" in found and "3 slots of 640 B" in found


def edges(graph: nx.MultiDiGraph, kind: str) -> set[tuple[str, str]]:
    """By the labels of the ops."""
    label = nx.get_node_attributes(graph, "label")
    return {(label[a], label[b]) for a, b, data in graph.edges(data=True) if data["kind"] == kind}


def test_tokens_are_edges_around_the_step_and_streams_of_the_update_have_no_order() -> None:
    tokens = edges(planned("0F 1F 2F", inductor=True, device_update=0.4).to_networkx(), "token")
    assert {("0OFFLOAD_STATE", "0PREFETCH@0"), ("2UPDATE", "2PREFETCH@2")} < tokens
    assert {("0OFFLOAD_STATE", "0FETCH_STATE"), ("1OFFLOAD_GRAD", "1UPDATE")} < tokens
    assert len(tokens) == 8
    schedule = built(stages=3, helps=True)
    graph = schedule.to_networkx()
    assert not any(a.startswith("update") for a, b, kind in graph.edges if kind == "stream")
    assert edges(graph, "names") == {(f"{i}UPDATE", "HELP_HOST") for i in range(3)}


def test_nodes_and_edges_of_a_small_forward(tmp_path: Path) -> None:
    graph = built(stages=3, training=False).to_networkx()
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
    assert (of_it | {"module": "unit 2", "bytes": 256}).items() <= prefetch.items()
    nx.write_graphml(graph, tmp_path / "schedule.graphml")
    again = nx.read_graphml(tmp_path / "schedule.graphml", force_multigraph=True)
    assert set(again.nodes) == set(graph.nodes)
    assert again.number_of_edges() == graph.number_of_edges()
