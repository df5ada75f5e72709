"""Masks of a length that changes from call to call are known for all lengths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile import compat
from megacompile.ir.capture import Ambient, Capture, ConstantInput, TensorInput
from megacompile.ir.tensors import TensorMeta
from megacompile.options import Lowering
from megacompile.passes.capture.affine import Unknown, of_tensor
from megacompile.passes.capture.causal import use_causal_attention
from megacompile.passes.capture.propagate import propagate
from megacompile.runtime.model.symbolic import SymbolicInputs
from tests.capturing import CPU

HEADS, LENGTH, WIDTH, WINDOW = 2, 7, 8, 16
Mask = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attends(nn.Module):
    def __init__(self, mask: Mask, *, keys: int = 0) -> None:
        super().__init__()
        self.mask, self.keys = mask, keys

    def forward(self, x: Tensor, given: Tensor) -> Tensor:  # (rows, HEADS, length, WIDTH)
        queries = torch.arange(x.shape[2])[:, None]
        keys = torch.arange(x.shape[2] - self.keys)[None, :]
        y = x[:, :, : x.shape[2] - self.keys]
        return F.scaled_dot_product_attention(x, y, y, self.mask(queries, keys, given))


class _Stop(Exception):
    """Carries what a graph was called with."""


def captured(model: nn.Module, rows: int = 3) -> Capture:
    """A graph whose rows and length are symbols."""

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        def stop(*inputs: Any) -> Any:
            raise _Stop(module, inputs)

        return stop

    def plain(arg: Any) -> Any:
        return TensorInput(TensorMeta.of(arg)) if isinstance(arg, Tensor) else ConstantInput(arg)

    torch.compiler.reset()
    x, given = torch.randn(rows, HEADS, LENGTH, WIDTH), torch.ones(rows, LENGTH, LENGTH).bool()
    with pytest.raises(_Stop) as stopped:
        torch.compile(lambda x, given: model(x, given), backend=backend, dynamic=True)(x, given)
    module, inputs = stopped.value.args
    described = compat.described_inputs(module)
    assert described is not None
    bound = SymbolicInputs(described).inputs(plain, inputs)
    return Capture("Attends", module, bound, CPU, Ambient.current(CPU))


def attention(mask: Mask, **options: Any) -> tuple[tuple[bool, bool], Capture, tuple[str, ...]]:
    """(has a mask, is_causal) after the pass; and what it gives."""
    made, lines = use_causal_attention(
        captured(Attends(mask, **options)), lowering=Lowering.INDUCTOR
    )
    made.module.graph.lint()
    (node,) = (n for n in made.module.graph.nodes if n.target is F.scaled_dot_product_attention)
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return (given is not None, node.kwargs.get("is_causal", False)), made, lines


def _packed(q: Tensor, k: Tensor, given: Tensor) -> Tensor:
    """As Hugging Face's: one document, found by the jumps of positions."""
    positions = (torch.arange(q.shape[0]) + 0)[None].expand(given.shape[0], -1)
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    document = jumps.cumsum(-1)
    batch = torch.arange(given.shape[0])[:, None, None, None]
    q, k = q[None, None], k[None, None]
    same = document[batch, q] == document[batch, k]
    mask = q.new_ones((), dtype=torch.bool) & same.to(q.device)
    mask = mask & (positions[batch, k] <= positions[batch, q])
    return mask.expand(given.shape[0], -1, q.shape[2], k.shape[3])


CAUSAL: dict[str, Mask] = {
    "<=": lambda q, k, given: k <= q,
    ">=": lambda q, k, given: q >= k,
    "<": lambda q, k, given: k < q + 1,
    ">": lambda q, k, given: q > k - 1,
    "difference": lambda q, k, given: (q - k) >= 0,
    "twice": lambda q, k, given: 2 * k <= q * 2 + 1,
    "method": lambda q, k, given: k.le(q),
    "tril": lambda q, k, given: torch.ones(q.shape[0], q.shape[0], dtype=torch.bool).tril(),
    "four dimensions": lambda q, k, given: (k <= q)[None, None].expand(3, HEADS, -1, -1),
    "an ellipsis": lambda q, k, given: (k <= q)[None, ..., :][None, :, :, :],
    "and all": lambda q, k, given: (k <= q) & (k >= 0),
    "and itself": lambda q, k, given: torch.logical_and(k <= q, q >= k),
    "packed": lambda q, k, given: _packed(q, k, given),
}
OTHERS: dict[str, Mask] = {
    "the other way": lambda q, k, given: q <= k,
    "strictly": lambda q, k, given: k < q,
    "one further": lambda q, k, given: k <= q + 1,
    "half": lambda q, k, given: 2 * k <= q,
    "a small window": lambda q, k, given: (k <= q) & (k > q - 3),
    "with what is given": lambda q, k, given: (k <= q) & given[0],
    "a diagonal": lambda q, k, given: torch.ones(q.shape[0], q.shape[0], dtype=torch.bool).tril(1),
    "transposed": lambda q, k, given: (k <= q).transpose(0, 1),
    "reshaped": lambda q, k, given: (k <= q).reshape(-1).reshape(q.shape[0], q.shape[0]),
    "not": lambda q, k, given: (k <= q) & (k == q),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_are_not_made(name: str) -> None:
    found, made, lines = attention(CAUSAL[name])
    assert found == (False, True)
    assert lines[0].startswith("1 attentions are causal without a mask")
    assert not made.conditions


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay(name: str) -> None:
    found, _, lines = attention(OTHERS[name])
    assert found == (True, False)
    assert lines == ("attention masks are made: what they allow is not known for every size",)


def test_fewer_keys_than_queries_are_another_square() -> None:
    assert attention(lambda q, k, given: k <= q, keys=2)[0] == (True, False)


def test_a_window_is_known_up_to_its_length() -> None:
    """Longer contexts get another program."""
    found, made, _ = attention(lambda q, k, given: (k <= q) & (k > q - WINDOW))
    assert found == (False, True)
    assert made.conditions
    symbols = propagate(made).symbols
    assert symbols is not None
    length = next(iter(made.conditions[0].free_symbols))
    rows = {s: 3 for s in symbols.planned}

    def holds(n: int) -> bool:
        return symbols.fakes.holds(*(rows | {length: n}).values())

    assert [holds(n) for n in (5, WINDOW, WINDOW + 1)] == [True, True, False]


def test_eager_lowering_is_bitwise() -> None:
    capture = captured(Attends(CAUSAL["<="]))
    assert use_causal_attention(capture, lowering=Lowering.EAGER) == (capture, ())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.arange(5),
        torch.arange(12).view(3, 4).t(),
        torch.ones(2, 3, dtype=torch.bool),
        torch.arange(3)[:, None] * 2 - torch.arange(4),
        torch.arange(4)[:, None].expand(4, 3),
    ],
)
def test_formulas_of_tensors(tensor: Tensor) -> None:
    found = of_tensor(tensor)
    for index in itertools.product(*map(range, tensor.shape)):
        value = found.base + sum(i * s for i, s in zip(index, found.steps, strict=True))
        assert value == int(tensor[index])


def test_other_tensors_have_none() -> None:
    for tensor in (torch.tensor([0, 1, 3]), torch.tensor([1.0]), torch.zeros(0).long()):
        with pytest.raises(Unknown):
            of_tensor(tensor)
