"""Masks that are known to be causal, for one length or for all: found, told to attention, and only
those."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile import Lowering
from megacompile.ir.capture import Capture
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.capture.causal import use_causal_attention
from megacompile.passes.capture.propagate import propagate
from tests import capturing

ROWS, HEADS, LENGTH, WIDTH, WINDOW = 3, 2, 7, 4, 16
X = torch.ones(ROWS, HEADS, LENGTH, WIDTH)
GIVEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
ANY = capturing.symbol("n")
Numbers = tuple[int, int, int]  # that grow: i * a // b + c
Mask = Callable[[Any, Any, Any, Any], Any]  # of queries (n, 1), keys (1, n), an input, and n


def fixed(*masks: Mask, keys: int = LENGTH, returns: bool = False, uses: int = 1) -> Capture:
    """Attentions under each mask, whose length is LENGTH."""

    def function(x: Any, given: Any) -> Any:
        y, made = x[..., :keys, :], []
        for mask in masks:
            made.append(
                mask(torch.arange(LENGTH)[:, None], torch.arange(keys)[None], given, LENGTH)
            )
            for _ in range(uses):
                x = F.scaled_dot_product_attention(x, y, y, made[-1])
        return (x, made) if returns else x

    return capturing.traced(function, X, GIVEN)


def of_any_length(mask: Mask, *, fewer: int = 0) -> Capture:
    """The length is a symbol."""

    def function(n: Any, x: Any, given: Any) -> Any:
        queries, keys = torch.arange(n)[:, None], torch.arange(n - fewer)[None]
        y = x[:, :, : n - fewer]
        return F.scaled_dot_product_attention(x, y, y, mask(queries, keys, given, n))

    x = capturing.sized(TensorMeta.of(X), ROWS, HEADS, ANY, WIDTH)
    given = capturing.sized(TensorMeta.of(GIVEN), ANY, ANY)
    return capturing.traced(function, capturing.number("n", LENGTH), x, given)


def told(
    capture: Capture, lowering: Lowering = Lowering.INDUCTOR
) -> tuple[list[tuple[bool, bool]], torch.fx.Graph, tuple[str, ...], Callable[[int], bool]]:
    """(has a mask, is_causal) of each attention after the pass; the graph, lines, and a function
    that is true for lengths for which that holds."""
    made = capture.fresh()
    values = propagate(made)
    use_causal_attention(made, values=values, lowering=lowering)
    made.module.graph.lint()
    found = []
    for node in made.module.graph.find_nodes(
        op="call_function", target=F.scaled_dot_product_attention
    ):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        found.append((mask is not None, node.kwargs.get("is_causal", False)))
    holds = bool if values.symbols is None else values.symbols.fakes.holds
    return found, made.module.graph, tuple(values.reasons), holds


def _packed(q: Any, k: Any, given: Any, n: Any) -> Any:
    """As Hugging Face's 5.23: one document, found by the jumps of positions."""
    positions = (torch.arange(n) + 0)[None].expand(ROWS, -1)
    document = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(ROWS)[:, None, None, None]
    same = (document[batch, q[None, None]] == document[batch, k[None, None]]).to("cpu")
    within = positions[batch, k[None, None]] <= positions[batch, q[None, None]]
    return (q.new_ones((), dtype=torch.bool) & same & within).expand(ROWS, -1, -1, -1)


def _ones(n: Any) -> Any:
    return capturing.node(n, torch.ones, n, n, dtype=torch.bool)


CAUSAL: dict[str, Mask] = {
    "<=": lambda q, k, given, n: k <= q,
    ">=": lambda q, k, given, n: q >= k,
    "<": lambda q, k, given, n: k < q + 1,
    "torch.le": lambda q, k, given, n: torch.le(k, q),
    "tril": lambda q, k, given, n: _ones(n).tril(),
    "an ellipsis": lambda q, k, given, n: (k <= q)[None, ..., :][None, :, :, :],
    "and all": lambda q, k, given, n: (k <= q) & (k >= 0),
    "and itself": lambda q, k, given, n: torch.logical_and(k <= q, q >= k),
    "packed": _packed,
    "difference": lambda q, k, given, n: (q - k) >= 0,
    "by name": lambda q, k, given, n: torch.le(other=q, input=k),
    "view": lambda q, k, given, n: (k <= q).view(1, 1, n, n).contiguous(),
    "twice": lambda q, k, given, n: 2 * k <= q * 2 + 1,
    "one chunk": lambda q, k, given, n: (k <= q) & (k // 100 == q // 100),
}
FOR_ONE_LENGTH = {"one chunk"}


def _written(q: Any, k: Any, given: Any, n: Any) -> Any:
    mask = k <= q
    mask.logical_or_(given)
    return mask


def _of_batch(q: Any, k: Any) -> Any:
    return (k <= q).expand(ROWS, 1, -1, -1)


OTHERS: dict[str, Mask] = {
    "the other way": lambda q, k, given, n: q <= k,
    "strictly": lambda q, k, given, n: k < q,
    "one further": lambda q, k, given, n: k <= q + 1,
    "a window": lambda q, k, given, n: (k <= q) & (k > q - 3),
    "one text sees further": lambda q, k, given, n: (
        k <= q + (torch.arange(ROWS) // 2)[:, None, None, None]
    ),
    "given": lambda q, k, given, n: given,
    "with what is given": lambda q, k, given, n: (k <= q) & given,
    "a diagonal": lambda q, k, given, n: _ones(n).tril(1),
    "not": lambda q, k, given, n: (k <= q) & (k == q),
    "written to": _written,
    "random": lambda q, k, given, n: (k <= q) & (torch.rand(LENGTH, LENGTH) < 0.5),
    "documents": lambda q, k, given, n: (k <= q) & (k // 3 == q // 3),
    "or": lambda q, k, given, n: (k <= q) | (k == 6),
    "as large as a mask": lambda q, k, given, n: (k > q - 3).expand_as(_of_batch(q, k)),
    "of a mask's dtype": lambda q, k, given, n: (k > q - 3).to(_of_batch(q, k)),
    "the other way, by name": lambda q, k, given, n: torch.le(other=k, input=q),
    "below every number": lambda q, k, given, n: (
        k < torch.full((LENGTH, 1), torch.iinfo(torch.int64).min)
    ),
    "reshaped": lambda q, k, given, n: (k <= q).reshape(-1).reshape(n, n),
}
OTHERS_FOR_ALL = (*list(OTHERS)[:8], "reshaped")


OPERATORS = {getattr(operator, name) for name in ("le", "lt", "ge", "gt", "eq", "ne")}
OPERATORS |= {operator.add, operator.sub, operator.and_}


def both_ways(mask: Mask) -> list[Capture]:
    """With operators, and with methods: Dynamo of torch 2.11 writes some, as `a.__eq__(b)`."""
    made = [fixed(mask, uses=2) for _ in range(2)]
    for node in made[1].module.graph.nodes:
        method = f"__{getattr(node.target, '__name__', '').strip('_')}__"
        tensor = node.args and isinstance(node.args[0], torch.fx.Node)
        if node.target in OPERATORS and tensor and hasattr(Tensor, method):
            node.op, node.target = "call_method", method
    return made


def test_causal_masks_are_not_made() -> None:
    for name, mask in CAUSAL.items():
        for capture in both_ways(mask):
            found, graph, (line,), _ = told(capture)
            assert found == [(False, True)] * 2, name
            assert line.startswith("2 attentions are causal")
            targets = {node.target for node in graph.nodes}
            assert not targets & {operator.le, "__le__", torch.ones}, name
        if name not in FOR_ONE_LENGTH:
            found, _, _, holds = told(of_any_length(mask))
            assert found == [(False, True)] and all(map(holds, (2, LENGTH, 5000))), name


def test_other_masks_stay() -> None:
    for name, mask in OTHERS.items():
        for capture in both_ways(mask):
            found, graph, lines, _ = told(capture)
            assert (found, lines) == ([(True, False)] * 2, ()), name
            assert str(graph) == str(capture.module.graph)
        if name in OTHERS_FOR_ALL:
            found, _, lines, _ = told(of_any_length(mask))
            assert found == [(True, False)] and len(lines) == 1, name


def test_masks_that_allow_everything_go_and_those_that_are_returned_are_made() -> None:
    everything: Mask = lambda q, k, given, n: (k >= 0) & (q >= 0)  # noqa: E731
    cached: Mask = lambda q, k, given, n: k < q + n  # noqa: E731  # as behind a cache's length
    for capture in (fixed(everything), of_any_length(everything), of_any_length(cached)):
        assert told(capture)[0] == [(False, False)]
    found, graph, *_ = told(fixed(CAUSAL["<="], returns=True))
    assert found == [(False, True)]
    assert [n for n in graph.nodes if n.target is operator.le]


def test_what_is_left_as_it_is() -> None:
    """Where keys and queries differ in number, is_causal has changed between versions of torch."""
    assert told(fixed(CAUSAL["<="], keys=LENGTH - 2))[0] == [(True, False)]
    assert told(of_any_length(CAUSAL["<="], fewer=2))[0] == [(True, False)]

    def with_another_number(x: Any) -> Any:
        mask = torch.arange(LENGTH)[None] <= torch.arange(LENGTH)[:, None]
        number = torch.ones((), dtype=torch.long).cumsum(0)  # has no dimension
        return F.scaled_dot_product_attention(x, x, x, mask) * number

    assert told(capturing.traced(with_another_number, X))[0] == [(False, True)]

    def fewer_queries(x: Any) -> Any:
        mask = torch.arange(LENGTH)[None] <= torch.arange(LENGTH - 2)[:, None]
        return F.scaled_dot_product_attention(x[..., : LENGTH - 2, :], x, x, mask)

    assert told(capturing.traced(fewer_queries, X))[0] == [(True, False)]
    for capture in (fixed(CAUSAL["<="]), of_any_length(CAUSAL["<="])):
        _, graph, lines, _ = told(capture, lowering=Lowering.EAGER)
        assert str(graph) == str(capture.module.graph) and not lines, "it is bitwise"


def test_a_window_is_known_up_to_its_length() -> None:
    """Longer contexts get another program."""
    mask: Mask = lambda q, k, given, n: (k <= q) & (k > q - WINDOW)  # noqa: E731
    found, _, _, holds = told(of_any_length(mask))
    assert found == [(False, True)]
    assert [holds(n) for n in (5, WINDOW, WINDOW + 1)] == [True, True, False]


def test_masks_of_any_device_may_be_given_by_name() -> None:

    def function(x: Any) -> Any:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="meta")
        mask = mask.to(torch.device("meta")).tril()
        y = F.scaled_dot_product_attention(x, key=x, value=x, attn_mask=mask)
        return F.scaled_dot_product_attention(query=y, key=x, value=x, attn_mask=mask)

    meta = TensorMeta(tuple(X.shape), X.dtype, X.stride(), device=torch.device("meta"))
    assert told(capturing.traced(function, meta))[0] == [(False, True)] * 2


def _stepped(keys: Numbers, queries: Numbers, compare: Any, *, keys_first: bool) -> Mask:
    """A comparison of a number for each key with one for each query."""

    def mask(q: Any, k: Any, given: Any, n: Any) -> Any:
        sides = [i * of[0] // of[1] + of[2] for i, of in ((k, keys), (q, queries))]
        return compare(*(sides if keys_first else sides[::-1]))

    return mask


COMPARES = (operator.le, operator.lt, operator.ge, operator.gt, operator.eq)


def test_what_is_known_is_what_would_be_computed() -> None:
    """Any numbers for keys and queries are compared as torch does: they do not wrap around, and
    those that have no arithmetic do not fail. None is taken for what it is not."""
    kinds: list[Numbers] = [(1, 1, 0), (1, 2, 0), (2, 1, 0), (1, 1, 1), (0, 1, 3), (3, 2, -1)]
    dtypes = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.float32)
    masks = [
        _stepped(keys, queries, compare, keys_first=first)
        for keys, queries in itertools.product(kinds, kinds)
        for compare in COMPARES
        for first in (True, False)
    ]
    masks += [
        lambda q, k, given, n, of=of, to=to, cmp=cmp: cmp((k - 3).to(of), (q * 0).to(to))  # type: ignore[misc]
        for of, to in itertools.product(dtypes, dtypes)
        for cmp in COMPARES
    ]
    # a scalar takes the dtype of the other side: 300 is 44 in 8 bits
    small = torch.uint8
    masks.append(lambda q, k, given, n: (k * 0 + 50).to(small).expand(n, n) <= torch.tensor(300))
    masks.append(lambda q, k, given, n: k * 1.1 <= q)  # nor are they rounded
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    found, *_ = told(fixed(*masks))
    square = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for mask, (has_mask, causal) in zip(masks, found, strict=True):
        real = mask(q, k, GIVEN, LENGTH)
        assert has_mask or torch.equal(real, square if causal else torch.ones_like(square))
    assert set(found) == {(True, False), (False, True), (False, False)}
