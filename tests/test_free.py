"""`insert_free`: where each value dies, and for whom its death waits."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.passes.schedule.free import insert_free
from megacompile.passes.schedule.slots import assign_slots
from tests.actions import apply, frees, parse, waits


def freed(line: str, *, delay: int = 1, **stubs: Any) -> Schedule:
    return apply(functools.partial(insert_free, delay=delay), parse(line, **stubs))


def out(line: str, *, delay: int = 1, **stubs: Any) -> str:
    """The last graph of `line`, with where each value dies."""
    return frees(list(freed(line, delay=delay, **stubs).graphs.values())[-1])


def test_a_value_dies_behind_its_last_reader() -> None:
    """The docstring's example; 2F reads the y1 that 1F gave."""
    assert out("0F 1F 2F 3F") == "0F 1F -y0_0 2F -y1_0 3F -y2_0"


def test_inputs_and_outputs_of_a_forward_are_not_its_own() -> None:
    assert "-x" not in out("0F 1F") and "-y1_0" not in out("0F 1F")


def test_residuals_live_on() -> None:
    schedule = freed("0F 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B")
    assert frees(schedule.forward) == "0F 1F 2F"


def test_a_backward_owns_what_it_is_given() -> None:
    """Its tangent, saved tensors and arguments: nobody else keeps them alive."""
    assert out("0F 1F | 1B 0RECOMPUTE 0B") == (
        "1B -t0 -s1_0 -g1_1 0RECOMPUTE -x 0B -s0_0_again -d1_0 -g0_0"
    )


def test_what_a_copy_reads_waits_for_it() -> None:
    """The copy has until the next backward is issued: the wait should find it done."""
    assert out("0F 1F | 1B 1OFFLOAD_GRAD 0RECOMPUTE 0B 0OFFLOAD_GRAD") == (
        "1B -t0 -s1_0 1OFFLOAD_GRAD 0RECOMPUTE -x "
        "0B -s0_0_again -d1_0 -g1_1(after=1OFFLOAD_GRAD) "
        "0OFFLOAD_GRAD -g0_0(after=0OFFLOAD_GRAD)"
    )


@pytest.mark.parametrize(("delay", "behind"), [(1, "1B"), (2, "0B"), (3, "0B")])
def test_the_delay_is_counted_in_backwards(delay: int, behind: str) -> None:
    line = "0F 1F 2F | 2B 2OFFLOAD_GRAD 1B 1OFFLOAD_GRAD 0B 0OFFLOAD_GRAD"
    before = out(line, delay=delay).split("-g2_2(after=2OFFLOAD_GRAD)")[0]
    assert [word for word in before.split() if word.endswith("B")][-1] == behind


def test_the_last_ones_wait_at_the_end() -> None:
    line = "0F | 0B 0OFFLOAD_GRAD"
    assert out(line, delay=5).endswith("0OFFLOAD_GRAD -g0_0(after=0OFFLOAD_GRAD)")


def test_a_buffer_and_what_was_fetched_into_it_are_names_of_the_sum() -> None:
    """A fetch fills its buffer, a sum replaces what was fetched: the memory dies with the sum."""
    line = "0F 1F | 1FETCH_GRAD 1B 1ADD_GRAD 1OFFLOAD_GRAD 0B"
    assert out(line) == (
        "1ALLOC_GRAD 1FETCH_GRAD 1B -t0 -s1_0 1ADD_GRAD -g1_1 -h1 -buf_g1 1OFFLOAD_GRAD "
        "0B -d1_0 -s0_0 -g0_0 -sum1(after=1OFFLOAD_GRAD)"
    )


def test_a_prefetch_that_waits_for_a_compute_reads_nothing_of_it() -> None:
    """`after=` needs the name: no wait is added for it."""
    line = "BEGIN 0PREFETCH@? 0F 1PREFETCH@? 1F"
    schedule = apply(insert_free, assign_slots(parse(line), slots=1, reuse=False))
    assert waits(schedule.forward) == ("BEGIN 0PREFETCH@0(after=BEGIN) 0F 1PREFETCH@0(after=0F) 1F")
    assert frees(schedule.forward) == "0PREFETCH@0 0F 1PREFETCH@0 1F -y0_0"


def test_new_states_at_the_end_of_a_backward_are_deferred() -> None:
    """The next forward should not wait for their copy; those further ahead wait as ever."""
    line = "0F 1F | 1FETCH_STATE 1B 1UPDATE 1OFFLOAD_STATE 0FETCH_STATE 0B 0UPDATE 0OFFLOAD_STATE"
    assert out(line) == (
        "1ALLOC_STATE 1FETCH_STATE 1B -t0 -s1_0 1UPDATE -g1_1 -s1 -buf_s1 1OFFLOAD_STATE "
        "0ALLOC_STATE 0FETCH_STATE 0B -d1_0 -s0_0 -new1(after=1OFFLOAD_STATE) "
        "0UPDATE -g0_0 -s0 -buf_s0 0OFFLOAD_STATE ~new0(after=0OFFLOAD_STATE)"
    )


def test_with_a_long_delay_more_is_deferred() -> None:
    line = "0F 1F | 1FETCH_STATE 1B 1UPDATE 1OFFLOAD_STATE 0FETCH_STATE 0B 0UPDATE 0OFFLOAD_STATE"
    assert " -new1(after=1OFFLOAD_STATE) 0UPDATE" in out(line, delay=3), "0B is still to come"
    line = "0F 1F | 1FETCH_STATE 1B 0B 1UPDATE 1OFFLOAD_STATE"
    assert out(line, delay=1).endswith("1OFFLOAD_STATE ~new1(after=1OFFLOAD_STATE)")


def test_gradients_at_the_end_of_a_backward_are_not_parked() -> None:
    """It ends with a wait for their copies anyway: the user may read them then."""
    assert "~" not in out("0F | 0B 0OFFLOAD_GRAD")
    assert out("0F | 0B 0NORM_GRAD 0OFFLOAD_GRAD").endswith(
        "0OFFLOAD_GRAD -n0(after=0OFFLOAD_GRAD) -g0_0(after=0OFFLOAD_GRAD)"
    )


LINES = [
    "0F 1F 2F",
    "0F 1F 2F | 2B 1B 0B",
    "0F 1F 2F | 2B 2OFFLOAD_GRAD 1RECOMPUTE 1B 1OFFLOAD_GRAD 0RECOMPUTE 0B 0OFFLOAD_GRAD",
    "0F 1F | 1FETCH_GRAD 1RECOMPUTE 1B 1ADD_GRAD 1OFFLOAD_GRAD 0FETCH_GRAD 0RECOMPUTE 0B "
    "0ADD_GRAD 0OFFLOAD_GRAD",
    "0F 1F | 1FETCH_STATE 1B 1UPDATE 1OFFLOAD_STATE 0FETCH_STATE 0B 0UPDATE 0OFFLOAD_STATE",
    "0F 1F | 1FETCH_GRAD 1FETCH_STATE 0FETCH_STATE 1B 1ADD_GRAD 1UPDATE 1OFFLOAD_STATE 0B "
    "0UPDATE 0OFFLOAD_STATE",
    "0F 1F | 1B 1NORM_GRAD 1OFFLOAD_GRAD 0B 0NORM_GRAD 0OFFLOAD_GRAD",
    "0PREFETCH@0 0F 1PREFETCH@1 1F | 1PREFETCH@0 1B 1OFFLOAD_GRAD 0PREFETCH@1 0B 0OFFLOAD_GRAD",
]


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("line", LINES)
def test_every_owned_value_dies_once_behind_its_readers(line: str, delay: int) -> None:
    for name, graph in freed(line, delay=delay).graphs.items():
        nodes = list(graph.nodes)
        releases = ops.nodes_of(graph, ops.free, ops.defer_free)
        died = {ops.arguments(n)[0]: n for n in releases}
        counts = Counter(ops.arguments(n)[0] for n in releases)
        returned = set(graph.output_node().all_input_nodes)
        owned = {n for n in nodes if _owns(n, name)} - returned
        assert counts == Counter(owned)
        for value, free in died.items():
            readers = [user for user in value.users if user is not free]
            assert all(nodes.index(reader) < nodes.index(free) for reader in readers)
            awaited: Any = free.kwargs["after"]
            assert all(ops.stream_of(node) is not Stream.COMPUTE for node in awaited)


def _owns(node: fx.Node, graph: str) -> bool:
    """Counted apart from the pass: results, buffers, sums, norms; the inputs of a backward."""
    if node.op == "placeholder":
        return graph == "backward"
    owners = [ops.alloc_grad, ops.fetch_grad, ops.add_grad, ops.norm_grad, ops.snapshot]
    owners += [ops.alloc_state, ops.fetch_state, ops.update]
    is_item = node.op == "call_function" and ops.op_of(node) is None
    return is_item or node.target in owners
