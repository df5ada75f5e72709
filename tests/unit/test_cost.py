"""Kernels of ATen graphs: their bytes, memory and time, against counts by hand.

And device and host memory of schedules, against a replay that knows only values and sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from megacompile import Options, compat
from megacompile.cost.fusion import analyse
from megacompile.cost.hardware import Hardware
from megacompile.cost.memory import MemoryKind, device_memory
from megacompile.cost.optimizer import OptimizerCost, host_updates
from megacompile.cost.places import host_memory
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import tensors_bytes
from megacompile.ir.values import memory
from tests.planned import SPECS, built

UNIT = Hardware("unit", 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0)  # 1 TFLOP/s, 1 GB/s
HALF = torch.bfloat16
N = 64
SQUARE = N * N * 2  # bytes of a (64, 64) bf16 matrix


@torch.library.custom_op("tests::packed_mm", mutates_args=())
def packed_mm(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """A product with two weights packed into each number, which is in no registry."""
    return x.new_zeros(x.shape[0], 2 * packed.shape[0])


packed_mm.register_fake(lambda x, packed: x.new_empty(x.shape[0], 2 * packed.shape[0]))


def test_products_with_packed_weights_unpack_them_first() -> None:
    """They hold all unpacked bf16 weights while the product runs; other products need no memory."""
    packed = found(packed_mm, (8, N), (N, N))
    (kernel,) = of_kind("PRODUCT", packed)
    taken, given, unpacked = 8 * N * 2, 8 * 2 * N * 2, N * 2 * N * 2
    assert packed.peak_bytes == unpacked + given and kernel.flops == 2 * 8 * 2 * N * N
    assert kernel.size_bytes == taken + SQUARE + given + 2 * unpacked
    whole = found(packed_mm, (8, N), (N, 2 * N))  # as many numbers as weights
    assert whole.peak_bytes == given


def found(
    function: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = HALF, fused: bool = True
) -> Any:
    """The analysis of a function's ATen graph, traced as for Inductor."""
    with compat.fake_mode():
        inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]

        def flat(primals: Any, tangents: Any) -> Any:
            found = function(*primals)
            return found if isinstance(found, (tuple, list)) else (found,)

        graph = compat.trace(flat, inputs, [], compat.inductor_decompositions()).graph
    return analyse(graph, fused=fused)


def of_kind(kind: str, analysis: Any) -> list[Any]:
    """Kernels that matrix units bound, alone ("PRODUCT") or with softmax ("ATTENTION"), or
    "MEMORY"."""
    return [kernel for kernel in analysis.kernels if kernel.kind.name == kind]


def sizes(analysis: Any) -> list[int]:
    return [kernel.size_bytes for kernel in analysis.kernels]


CAST = torch.float8_e4m3fn
CHAIN = ((N, N),)
BOTH = ((N, N), (N, N))
KERNELS: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], list[int]]] = [
    (lambda x: (x * 2 + 1).relu().exp(), CHAIN, [2 * SQUARE]),  # a chain is one
    (lambda x, w: ((x * 2) @ w).relu(), BOTH, [2 * SQUARE, 3 * SQUARE, 2 * SQUARE]),
    # both elementwise kernels read x; the second cannot begin before the product is done
    (lambda x, w: ((x * 2) @ w) + x, BOTH, [2 * SQUARE, 3 * SQUARE, 3 * SQUARE]),
    (lambda x, w: (x.view(N, N) @ w.t()).reshape(N * N), ((N * N,), (N, N)), [3 * SQUARE]),
    (lambda x: x / x.sum(-1, keepdim=True), CHAIN, [2 * SQUARE]),  # a norm reads its input once
    (lambda x: (x.sum(-1), x.sum(0)), CHAIN, [SQUARE + N * 2] * 2),  # sums over columns do not
    (lambda x: x[: N // 2] * 2, CHAIN, [SQUARE]),
    # a scale for each row is found in the kernel that casts
    (lambda x: (x / x.abs().amax(1, keepdim=True)).to(CAST), CHAIN, [SQUARE + SQUARE // 2]),
]


@pytest.mark.parametrize(("function", "shapes", "wanted"), KERNELS)
def test_what_kernels_move(function: Any, shapes: Any, wanted: list[int]) -> None:
    analysis = found(function, *shapes)
    assert sizes(analysis) == wanted
    products = of_kind("PRODUCT", analysis)
    assert all(k.flops == 2 * N**3 for k in products)
    assert {k.itemsize for k in products} <= {HALF.itemsize}
    assert len(found(function, *shapes, fused=False).kernels) >= len(wanted)


def test_what_is_indexed_is_read_and_written_where_it_lies() -> None:
    lookup = found(lambda weight: nn.functional.embedding(torch.zeros(4).long(), weight), (6400, N))
    assert sum(sizes(lookup)) < 4 * N * 2 * 3
    put = found(lambda base, new: base.index_put((torch.zeros(N).long(),), new), (6400, N), (N, N))
    whole = 2 * 100 * SQUARE  # which is copied
    assert sizes(put)[-1] == whole + 3 * SQUARE + 8 * N


def test_values_behind_one_that_is_none_are_themselves() -> None:
    def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        options = ([N], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
        return torch.ops.aten.convolution_backward.default(grad, x, weight, *options)[1:]

    of_weight, of_bias = found(backward, (1, N, N, N), (1, 3, N, N), (N, 3, 1, 1)).returned
    assert of_weight is not None and of_weight.size_bytes == 2 * 3 * N
    assert of_bias is not None and of_bias.size_bytes == 2 * N


SHAPES = 3 * [(2, 4, 128, 32)]


def attention_of(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def attention_gradients(q: Any, k: Any, v: Any) -> Any:
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(attention_of(*inputs).sum(), inputs)


def test_attention_has_two_products_and_five_in_its_backward() -> None:
    """Half of each if it is causal. The queries' gradients are summed in float32."""
    size = 2 * 4 * 128 * 32
    kinds = (HALF, torch.float32)
    halves, wholes = (found(attention_gradients, *SHAPES, dtype=kind) for kind in kinds)
    flops = [kernel.flops for kernel in of_kind("ATTENTION", halves)]
    assert flops == [2 * 2 * size * 128, 5 * 2 * size * 128]
    causal = found(functools.partial(attention_of, causal=True), *SHAPES)
    assert sum(kernel.flops for kernel in causal.kernels) == flops[0] // 2
    assert halves.peak_bytes > 4 * size + 3 * 2 * size  # and the three gradients
    assert wholes.peak_bytes - halves.peak_bytes >= 3 * 2 * size


def _gated(*weights: torch.Tensor) -> list[torch.Tensor]:
    x, a, b, c, d = weights
    up, gate = x @ a + x @ b, x @ c + x @ d
    return [up, gate, up * gate]


def _twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return y.exp() @ w + y.sin() @ w


PEAKS: list[tuple[Callable[..., Any], int, bool, int]] = [  # shapes, fused, squares at once
    (lambda x, w: (x @ w).relu() @ w, 2, True, 2),  # relu is in place of the product
    (lambda x, w: [a := x @ w, b := a @ w, b @ a], 2, True, 3),
    # one kernel makes both sums and what reads them: four products are there, and one result
    (_gated, 5, True, 5),
    (_gated, 5, False, 4),  # up, and x @ c + x @ d with both of its terms
    (_twice, 2, True, 3),  # what two nodes read is not written into
    # a sum is realized because it is a reduction; its readers share its kernel
    (lambda x, w: (x @ w) * (x @ w).sum(-1, keepdim=True).exp(), 2, True, 2),
]


@pytest.mark.parametrize(("function", "inputs", "fused", "squares"), PEAKS)
def test_peak_memory_by_hand(function: Any, inputs: int, fused: bool, squares: int) -> None:
    peak_bytes = found(function, *[(N, N)] * inputs, fused=fused).peak_bytes
    assert squares * SQUARE <= peak_bytes <= squares * SQUARE + 2 * N


def test_a_chunk_of_logits_is_there_while_a_head_is_computed() -> None:
    rows, classes, chunk = 512, 1000, 256

    def head(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        flags = (-100, 0.0, chunk, True, False, False)
        operator, target = torch.ops.megacompile.linear_cross_entropy, torch.zeros(rows).long()
        return operator(hidden, weight, None, target, None, *flags)[:2]

    gradient = rows * N * 4
    peak = found(head, (rows, N), (classes, N)).peak_bytes
    assert 0 <= peak - (gradient + 4 + chunk * classes * 2) <= rows * 8


def test_returned_memory_is_shared_by_views() -> None:
    given = found(lambda x, w: ((y := x @ w), y.view(-1), x.t()), (N, N), (N, N))
    first, second, third = given.returned
    assert first is not None and second is not None and third is not None
    assert (first.memory, third.memory) == (second.memory, -1)  # the first input's


def test_the_slower_of_rate_and_bandwidth_counts() -> None:
    """The rate depends on the dtype and the kind, and a launch takes time too."""
    machine = UNIT.replace(matmul32_tflop_s=0.5, sustained=0.8, attention_share=0.25)
    with_fp8 = machine.replace(matmul8_tflop_s=2.0)
    work, size = 10**12, 10**9
    (product,) = found(torch.matmul, (N, N), (N, N)).kernels
    product = replace(product, flops=work, size_bytes=0, reached=1.0)
    (attention,) = of_kind("ATTENTION", found(attention_of, *SHAPES))
    attention = replace(attention, flops=work, size_bytes=0, reached=1.0)
    (chain,) = found(lambda x: x * 2, (N, N)).kernels
    chain = replace(chain, size_bytes=size, reached=1.0)
    for kernel, hardware, wanted_s in (
        (product, machine, 1 / 0.8),
        (replace(product, itemsize=4), machine, 2 / 0.8),
        (attention, machine, 4.0),
        (replace(attention, reached=0.5), machine, 8.0),
        (replace(product, itemsize=1), with_fp8, 0.5 / 0.8),
        (replace(product, itemsize=1), machine, 1 / 0.8),  # without kernels for it
        (replace(product, flops=10**6, size_bytes=size), UNIT, 1.0),
        (chain, UNIT.replace(launch_s=0.5), 1.5),
    ):
        assert kernel.seconds(hardware) == pytest.approx(wanted_s)


def fp8_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`x @ w.t()` in fp8, with one scale per tensor."""
    cast = []
    for each in (x, w):
        scale = 448.0 / each.abs().max().float()
        cast.append(((each.float() * scale).to(torch.float8_e4m3fn), scale.reciprocal()))
    (a, a_scale), (b, b_scale) = cast
    return compat.SCALED_MM(a, b.t(), a_scale, b_scale, out_dtype=HALF)


def test_an_fp8_product_is_counted() -> None:
    """Each factor is read for its scale and again for the cast; the product reads the casts."""
    kernels = found(fp8_product, (N, N), (N, N)).kernels
    *casts, product = kernels
    assert (product.kind.name, product.itemsize, product.flops) == ("PRODUCT", 1, 2 * N**3)
    numbers = 4 + 4  # bytes of two scales
    assert product.size_bytes == SQUARE // 2 + SQUARE // 2 + SQUARE + numbers
    read_twice_and_written = 2 * (2 * SQUARE + SQUARE // 2)
    assert sum(k.size_bytes for k in casts) == pytest.approx(read_twice_and_written, rel=0.01)


_COMPUTES = (ops.forward, ops.recompute, ops.backward)


def replay(schedule: Schedule) -> list[int]:
    """Total bytes at each op that makes memory, without the code under test."""
    slots = sum(slot.size_bytes for slot in schedule.slots)
    inputs = sum(_size(n) for n in schedule.forward.find_nodes(op="placeholder"))
    alive: dict[str, int] = {}  # the name of what owns memory -> bytes
    held: dict[str, set[str]] = {}  # owner -> values that name it
    totals = []
    left = [
        _node(n.args[0])
        for graph in schedule.graphs.values()
        for n in ops.nodes_of(graph, ops.defer_free)
    ]
    deferred = {memory(node).name: max(_size(node), _size(memory(node))) for node in left}
    before = sum(deferred.values())
    borrowed = {n.name for n in schedule.forward.find_nodes(op="placeholder")}

    def own(name: str, owner: str, size: int) -> None:
        if name not in borrowed:
            alive.setdefault(owner, size)
            held.setdefault(owner, set()).add(name)

    def drop(name: str) -> None:
        for owner in list(held):
            held[owner].discard(name)
            if not held[owner]:
                del held[owner], alive[owner]

    for graph_name, graph in schedule.graphs.items():
        if graph_name == "backward":
            given = graph.find_nodes(op="placeholder")
            wanted = {n.name for n in given}
            for name in [n for names in list(held.values()) for n in names]:
                if name not in wanted:
                    drop(name)
            for node in given:
                owner = next((o for o in held if node.name in held[o]), node.name)
                own(node.name, owner, _size(node))
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if node.target in _COMPUTES:
                items = list(ops.items(node))
                extra = sum(_size(item) for _, item in items)
                totals.append(slots + inputs + before + sum(alive.values()) + extra)
                for _, item in items:
                    own(item.name, item.name, _size(item))
            elif ops.effects(node).owns:
                owner = memory(node).name  # which may stand for what an earlier graph has left
                owner = next((o for o in held if owner in held[o]), owner)
                own(node.name, owner, _size(node))
                alive[owner] = max(alive[owner], _size(node))  # an update adds new parameters
                totals.append(slots + inputs + before + sum(alive.values()))
            elif node.target is ops.free:
                drop(_node(node.args[0]).name)
            elif node.target in (ops.defer_free, ops.drain):
                before = 0
    return totals


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


def _size(node: fx.Node) -> int:
    return tensors_bytes(node.meta.get("value"))


REPLAYED = [spec for spec in SPECS.values() if not {"offload", "resident"} & spec.keys()]
REPLAYED += [{"stages": 6, "slots": 3, "reuse": True}, {"device_update": {0, 2}, "helps": True}]


@pytest.mark.parametrize("spec", REPLAYED, ids=str)
def test_schedules_match_the_replay(spec: dict[str, Any]) -> None:
    schedule = built(**spec)
    found = [moment.total_bytes for moment in device_memory(schedule).moments]
    assert found == replay(schedule)


def test_what_a_backward_leaves_lives_until_a_forward_drains_it() -> None:
    """States of a bucket whose copy the next forward need not wait for; of two graphs: the later
    one's backward runs first, and both have deferred at the end."""
    schedule = built(update=True)
    backward = schedule.graphs["backward"]
    values = [ops.arguments(n)[0] for n in ops.nodes_of(backward, ops.defer_free)]
    deferred = sum(_size(value) for value in values if value.target is ops.update)
    moments = device_memory([schedule, schedule]).moments
    forwards = [m.live_bytes[MemoryKind.STATES] for m in moments if m.graph == "forward"]
    assert deferred > 0 and forwards == [2 * deferred] * 3 + [0] * 5
    found = [m for m in moments if (m.graph, m.label) == ("backward", "3RECOMPUTE")]
    states = [m.live_bytes[MemoryKind.STATES] for m in found]
    assert states == [states[0], deferred + states[0]], "the second's new ones"


P, G, S, M = MemoryKind.PARAMETERS, MemoryKind.GRADIENTS, MemoryKind.STATES, MemoryKind.MASTERS
NARROW = OptimizerCost(master_bytes=4.0, grad_bytes=2.0)
COSTS: list[tuple[OptimizerCost | None, dict[MemoryKind, int], int]] = [
    # bytes of a bf16 parameter on the host, and moved in its update
    (None, {P: 2, G: 2}, 0),
    (OptimizerCost(), {P: 2, G: 2, S: 4}, 14),
    (OptimizerCost(states=0), {P: 2, G: 2}, 6),
    (OptimizerCost(state_bytes=4.0), {P: 2, G: 2, S: 8}, 22),
    (OptimizerCost(state_bytes=4.0, in_backward=True), {P: 2, S: 8}, 0),
    (NARROW, {P: 2, M: 4, G: 2, S: 8}, 28),  # 12 read and written, 2 + 2
    (OptimizerCost(master_bytes=4.0), {P: 2, M: 4, G: 4, S: 8}, 30),
]


@pytest.mark.parametrize(("cost", "expected", "moved"), COSTS)
def test_host_bytes_a_parameter(
    cost: OptimizerCost | None, expected: dict[MemoryKind, int], moved: int
) -> None:
    schedule = built(update=cost is not None and cost.in_backward, dtype=torch.bfloat16)
    numel = sum(p.numel for b in schedule.buckets for p in b.params)
    found = host_memory(schedule, cost)
    assert {kind: n for kind, n in found.items() if n} == {
        k: n * numel for k, n in expected.items()
    }
    assert set(host_memory(built(training=False, dtype=torch.bfloat16), cost)) <= {P, M}
    if cost is not None:
        updates = host_updates(schedule, cost)
        assert [u.bucket.label for u in updates] == (["0", "1", "2", "3"] if moved else [])
        assert all(u.size_bytes == u.numel * moved for u in updates)


def test_costs_follow_the_options() -> None:
    given: list[tuple[dict[str, Any], OptimizerCost]] = [
        ({}, OptimizerCost()),
        ({"state_dtype": "int8"}, OptimizerCost(state_bytes=1 + 1 / 64, arithmetic_s=2.5)),
        ({"stochastic_rounding": True}, OptimizerCost(arithmetic_s=0.8)),
        ({"compute_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}, NARROW),
    ]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for options, expected in given:
        assert OptimizerCost.of(Options.resolve(device="cpu", **options)) == expected
        in_backward = Options.resolve(device="cpu", optimizer=optimizer, **options)
        found = OptimizerCost.of(in_backward, states=1)
        assert found.in_backward and found.arithmetic_s == 0.0 and found.states == 1
