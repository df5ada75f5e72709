"""How the third graph and the tokens between graphs are shown: Python, table, diff, graph."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest

from megacompile.ir import ops
from megacompile.show import python
from megacompile.show.diff import differences
from megacompile.show.table import table
from tests import steps
from tests.schedules import find
from tests.test_export import edges

ON_DEVICE = frozenset({0})


def test_the_code_of_an_update() -> None:
    schedule = steps.made(device_update=ON_DEVICE)
    assert python.graph_code(schedule, "update") == (
        """\
def run_update(inputs):
    # g0_0 f32[8, 8]; s0 u8[640]
    # gradients_1: the last 1OFFLOAD_GRAD; gradients_2: the last 2OFFLOAD_GRAD;
    # gradients_0: the last 0OFFLOAD_GRAD
    (gradients_1, gradients_2, g0_0, s0, gradients_0) = inputs
    inputs.clear()
    u1 = update_host(bucket_1, after=(gradients_1,))  # host     1UPDATE         256 B
    u2 = update_host(bucket_2, after=(gradients_2,))  # host     2UPDATE         256 B
    help_host((u1, u2))                               # device   HELP_HOST
    new0 = update(bucket_0, None, g0_0, s0)           # compute  0UPDATE         640 B
    del s0                                            # compute  FREE
    so0 = offload_state(bucket_0, new0)               # d2h      0OFFLOAD_STATE  640 B
    defer_free(new0, after=(so0,))                    # compute  DEFER_FREE
    del new0
    defer_free(g0_0, after=(gradients_0,))            # compute  DEFER_FREE
    del g0_0
    # tokens
    return (u1, u2, so0),
"""
    )


def test_a_token_says_what_it_stands_for() -> None:
    schedule = steps.made(device_update=ON_DEVICE, accumulate=True)
    forward = python.graph_code(schedule, "forward").splitlines()
    assert forward[1:5] == [
        "    # x f32[4, 8]",
        "    # weights_0: the last 0OFFLOAD_STATE; weights_1: the last 1UPDATE;",
        "    # weights_2: the last 2UPDATE",
        "    x, weights_0, weights_1, weights_2 = inputs",
    ]
    backward = python.graph_code(schedule, "backward")
    assert "gradients_1: the last 1OFFLOAD_GRAD;" in backward
    assert "    # gradients of inputs, what is left for the update, tokens\n" in backward
    assert "    return (d0_0,), (sum0, s0), (o2, o1, o0)\n" in backward


def test_a_token_of_what_this_schedule_does_not_write() -> None:
    code = python.graph_code(steps.made("0F 1F"), "forward")
    assert "    # weights_0, weights_1: written by other schedules, if at all\n" in code


@pytest.mark.parametrize("count", [1, 2, 30])
def test_what_an_update_returns_is_one_tuple(count: int) -> None:
    """However long: the executor takes the tokens from the one item."""
    line = " ".join(f"{i}F" for i in range(count))
    line += " | " + " ".join(f"{i}B" for i in reversed(range(count)))
    schedule = steps.made(line)
    functions: dict[str, object] = {
        **python.names(schedule),
        "update_host": lambda bucket, after: bucket.label,
        "help_host": lambda updates: None,
    }
    exec(python.graph_code(schedule, "update"), functions)
    run = functions["run_update"]
    assert callable(run)
    assert run(list(range(count))) == (tuple(map(str, range(count))),)


def test_an_updates_table_has_the_streams_that_it_uses() -> None:
    update = table(steps.made(device_update=ON_DEVICE)).partition("\n\nupdate\n")[2]
    assert update == (
        """\
step | compute | d2h            | host    | device
   0 |         |                | 1UPDATE
   1 |         |                | 2UPDATE
   2 | 0UPDATE |                |         | HELP_HOST
   3 |         | 0OFFLOAD_STATE"""
    )
    resident = table(steps.made(resident=frozenset({0, 1, 2})))
    assert resident.partition("\n\nupdate\n")[2].splitlines() == [
        "step | compute",
        "   0 | 0UPDATE",
        "   1 | 1UPDATE",
        "   2 | 2UPDATE",
    ]


def test_other_tables_have_their_three_columns() -> None:
    blocks = table(steps.made(device_update=ON_DEVICE)).split("\n\n")
    heads = [[cell.strip() for cell in block.splitlines()[1].split("|")] for block in blocks]
    assert heads[0] == heads[1] == ["step", "h2d", "compute", "d2h"]


def test_marks_stand_in_an_update() -> None:
    schedule = steps.made()
    marks = {
        find(schedule, "update", "1UPDATE"): "too early",
        find(schedule, "update", "gradients_0"): "wrong gradients",
        schedule.graphs["update"].output_node(): "a token is missing",
    }
    lines = table(schedule, marks).partition("\n\nupdate\n")[2].splitlines()
    assert [line.partition("<--")[2].strip() for line in lines] == [
        "",
        "wrong gradients",
        "too early",
        "",
        "a token is missing",
    ]
    assert "gradients_0" in lines[1] and "1UPDATE" in lines[2] and "output" in lines[4]


def test_a_diff_has_a_line_for_each_bucket_that_is_updated() -> None:
    before, after = steps.made(), steps.made(device_update=ON_DEVICE)
    lines = before.diff(after).splitlines()
    assert "# updates: 3 on the host -> 2 on the host, 1 on the device" in lines
    assert lines[lines.index(" update") :] == [
        " update",
        "-  0 unit 0 | 0UPDATE",
        "   1 unit 1 | 1UPDATE",
        "   2 unit 2 | 2UPDATE",
        "            | HELP_HOST",
        "+  0 unit 0 | 0UPDATE 0OFFLOAD_STATE",
    ]


def test_a_diff_with_and_without_an_update() -> None:
    before, after = steps.made(), steps.made(in_backward=True)
    assert "updates: 3 on the host -> 3 in the backward" in differences(before, after)
    removed = [line for line in before.diff(after).splitlines() if line.startswith("-")]
    assert removed[-5:] == [
        "-update",
        "-  0 unit 0 | 0UPDATE",
        "-  1 unit 1 | 1UPDATE",
        "-  2 unit 2 | 2UPDATE",
        "-           | HELP_HOST",
    ]
    alone = replace(before, update=None)
    assert differences(before, alone) == ["updates: 3 on the host -> none"]


def test_tokens_are_edges_around_the_step() -> None:
    graph = steps.made(device_update=ON_DEVICE).to_networkx()
    assert edges(graph, "token") == {
        ("0OFFLOAD_STATE", "0PREFETCH@0"),
        ("1UPDATE", "1PREFETCH@1"),
        ("2UPDATE", "2PREFETCH@2"),
        ("2UPDATE", "2PREFETCH@0"),
        ("0OFFLOAD_STATE", "0PREFETCH@2"),
        ("0OFFLOAD_STATE", "0FETCH_STATE"),
        ("1OFFLOAD_GRAD", "1UPDATE"),
        ("2OFFLOAD_GRAD", "2UPDATE"),
    }
    crossing = {(a.split(".")[0], b.split(".")[0]) for a, b, kind in graph.edges if kind == "token"}
    assert crossing == {("update", "forward"), ("update", "backward"), ("backward", "update")}
    order = nx.MultiDiGraph(
        [(a, b) for a, b, kind in graph.edges if kind not in ("token", "names")]
    )
    assert nx.is_directed_acyclic_graph(order)


def test_who_waits_for_no_op_that_it_names() -> None:
    graph = steps.made(accumulate=True, device_update=ON_DEVICE).to_networkx()
    assert edges(graph, "names") >= {("0OFFLOAD_GRAD", "DEFER_FREE"), ("2UPDATE", "HELP_HOST")}
    assert ("0OFFLOAD_GRAD", "DEFER_FREE") not in edges(graph, "token")
    assert ("1OFFLOAD_GRAD", "1FETCH_GRAD") in edges(graph, "token"), "the backward before it"


def test_values_go_from_graph_to_graph() -> None:
    graph = steps.made(device_update=ON_DEVICE).to_networkx()
    data = {(a, b) for a, b, kind in graph.edges if kind == "data"}
    assert {("forward.f2", "backward.b2"), ("backward.b0", "update.new0")} <= data
    assert ("backward.s0", "update.new0") in data
    assert not any(a.startswith("update") and b.startswith("backward") for a, b in data)


def test_streams_of_the_update_have_no_order() -> None:
    schedule = steps.made()
    graph = schedule.to_networkx()
    assert not any(a.startswith("update") for a, b, kind in graph.edges if kind == "stream")
    assert edges(graph, "names") == {(f"{i}UPDATE", "HELP_HOST") for i in range(3)}
    text = schedule.to_dot()
    assert 'subgraph "cluster_update_host"' in text and 'subgraph "cluster_update_device"' in text
    assert text.count(" -> ") == graph.number_of_edges()
    (help_host,) = ops.nodes_of(schedule.graphs["update"], ops.help_host)
    assert f'"update.u0" -> "update.{help_host.name}" [style=dotted' in text
