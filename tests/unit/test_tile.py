"""Pieces in tiles: which nodes act on each token alone, what tiles compute, and what they need."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from megacompile.ir.tiles import Axis, Piece, Result, pieces_of
from megacompile.passes.stages.lower import lower_pieces
from megacompile.passes.stages.tile import tile
from megacompile.passes.stages.tokenwise import Tokens

W = 6  # of activations
X = (2, 10, W)  # batch, tokens, width
EACH_TOKEN = torch.arange(10.0)[:, None]
aten = torch.ops.aten
Function = Callable[..., tuple[Tensor, ...]]
Shapes = tuple[tuple[int, ...], ...]


def traced(function: Function, *shapes: tuple[int, ...], dtype: Any = None) -> fx.GraphModule:
    """The ATen graph of a function of activations, and of weights behind them."""
    inputs = [torch.randn(shape, dtype=dtype) for shape in shapes]
    return make_fx(lambda *given: tuple(function(*given)))(*inputs)


def tiled(
    module: fx.GraphModule, tokens: Tokens, tiles: int, *, weights: int = 1
) -> fx.GraphModule:
    """The last `weights` inputs have no tokens."""
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    return tile(module, tokens, tiles, frozenset(names[len(names) - weights :]))


def pieces(module: fx.GraphModule) -> list[Piece]:
    return [piece for _, piece in pieces_of(module.graph)]


def function_of(part: fx.GraphModule) -> Any:
    return part.forward


def in_pieces(
    module: fx.GraphModule, tokens: Tokens, tiles: int, shapes: Shapes, *, weights: int = 1
) -> list[Piece]:
    """The pieces of a graph, which gives what the whole graph gives, up to rounding."""
    made = tiled(module, tokens, tiles, weights=weights)
    found = pieces(made)
    run = lower_pieces(made, function_of) if found else made.forward
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    results = []
    for each in (run, module):
        torch.manual_seed(7)
        results.append(each(*inputs))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    return found


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def mm(x: Tensor, w: Tensor) -> Tensor:
    """A product, so that the piece around it is worth tiles."""
    return torch.mm(flat(x), w).view(*x.shape[:-1], -1)


def in_fp8(value: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """A cast, and the scale to take it back by: one, or one for each along another dimension."""
    amax = value.abs().max() if dim is None else value.abs().amax(dim, keepdim=True)
    return (value * (448 / amax)).to(torch.float8_e4m3fn), amax / 448


def scaled_mm(a: Tensor, b: Tensor, bias: Tensor | None = None, *, each: bool = True) -> Tensor:
    """A product of casts, with a scale for each row and column; or one for all."""
    (a, of_a), (b, of_b) = in_fp8(a, 1 if each else None), in_fp8(b, 0 if each else None)
    b = b.t().contiguous().t()
    return aten._scaled_mm(a, b, of_a, of_b, bias, out_dtype=torch.float32)


TOKENWISE: dict[str, Function] = {
    "product": lambda x, w: (mm(x, w),),
    "addmm": lambda x, w: (aten.addmm(w[0], flat(x), w),),
    "fp8, a scale for each token": lambda x, w: (scaled_mm(flat(x), w),),
    "fp8, one scale": lambda x, w: (scaled_mm(flat(x), w, each=False),),
    "fp8 with a bias": lambda x, w: (scaled_mm(flat(x), w, w[0]),),
    "fp8, tokens in columns": lambda x, w: (scaled_mm(w, flat(x).t()),),
    "of each matrix": lambda x, w: (torch.bmm(x, w.expand(2, W, W)),),
    "gelu between": lambda x, w: (mm(F.gelu(mm(x, w)), w),),
    "layer norm": lambda x, w: (mm(F.layer_norm(x, (W,), w[0], w[1]), w),),
    "rms norm": lambda x, w: (mm(F.rms_norm(x, (W,), w[0]), w),),
    "softmax over the width": lambda x, w: (mm(x, w).softmax(-1), mm(x, w).log_softmax(2)),
    "reductions over the width": lambda x, w: (
        *torch.var_mean(mm(x, w), -1),
        mm(x, w).argmax(-1),
        mm(x, w).amax(-1, keepdim=True) + x,
    ),
    "a reduction over the batch": lambda x, w: (mm(x, w).amax(0, keepdim=True),),
    "parts": lambda x, w: (
        mm(x, w).chunk(2, -1)[1] * 2,
        mm(x, w).unflatten(-1, (2, 3)).unbind(2)[0],
        mm(x, w)[..., 1:4],
        mm(x, w)[..., 2],
    ),
    "cat": lambda x, w: (torch.cat([mm(x, w), x], -1),),
    "heads": lambda x, w: (mm(x, w).view(2, 10, 2, 3).transpose(1, 2).contiguous(),),
    "permute": lambda x, w: (mm(x, w).permute(2, 1, 0),),
    "scaled by a table": lambda x, w: (mm(x, w) * torch.arange(10.0)[:, None],),
    "a constant of all tokens": lambda x, w: (mm(x, w) * EACH_TOKEN,),
    "constants": lambda x, w: (mm(x + torch.ones(2, 10, 1), w),),
    "a cast": lambda x, w: (mm(x, w).double(),),
    "where": lambda x, w: (torch.where(x > 0, mm(x, w), 0.0),),
    "squeeze": lambda x, w: (mm(x, w).unsqueeze(0).squeeze(0),),
    "slice scatter": lambda x, w: (aten.slice_scatter(torch.zeros_like(x), mm(x, w), 2, 0, 6),),
    "a sum over tokens": lambda x, w: (mm(x, w).sum((0, 1)), mm(x, w).sum()),
    "a gradient of a weight": lambda x, w: (flat(x).t() @ flat(mm(x, w)), mm(x, w)),
}


@pytest.mark.parametrize("name", TOKENWISE)
def test_what_acts_on_each_token_alone(name: str) -> None:
    """In two tiles and a rest, with a tile for each token, and along the first dimension."""
    module = traced(TOKENWISE[name], X, (W, W))
    for tiles, dim, count in ((3, 1, 3), (10, 1, 10), (2, 0, 2)):
        found = in_pieces(module, Tokens(X, dim), tiles, (X, (W, W)))
        (cut,) = [piece for piece in found if not piece.is_whole]
        assert cut.count == count and (dim == 0 or found[-1] is cut)


NOT_TOKENWISE: dict[str, Function] = {
    "softmax over tokens": lambda x, w: (mm(x, w).softmax(1),),
    "a running sum": lambda x, w: (mm(x, w).cumsum(1),),
    "turned round": lambda x, w: (mm(x, w).flip(1),),
    "shifted": lambda x, w: (mm(x, w).roll(1, 1),),
    "sorted": lambda x, w: (mm(x, w).sort(1)[0],),
    "the largest token": lambda x, w: (mm(x, w).amax(1),),
    "the mean token": lambda x, w: (mm(x, w).mean(1),),
    "the first tokens": lambda x, w: (mm(x, w)[:, :4],),
    "two behind one another": lambda x, w: (torch.cat([mm(x, w), x], 1),),
    "tokens in pairs": lambda x, w: (mm(x, w).view(2, 5, 2, W).sum(2),),
    "attention": lambda x, w: (torch.bmm(mm(x, w), x.transpose(1, 2)).softmax(1),),
    "a gradient of a weight in fp8": lambda x, w: (scaled_mm(flat(x).t(), flat(mm(x, w))),),
    "fp8 columns with a bias": lambda x, w: (scaled_mm(w, flat(mm(x, w)).t(), flat(x)[:, 0]),),
    "a layer norm over tokens": lambda x, w: (F.layer_norm(mm(x, w), (10, W)),),
}


@pytest.mark.parametrize("name", NOT_TOKENWISE)
def test_what_looks_at_other_tokens_gets_them_all(name: str) -> None:
    module = traced(NOT_TOKENWISE[name], X, (W, W))
    whole = {piece.is_whole for piece in in_pieces(module, Tokens(X, 1), 5, (X, (W, W)))}
    assert whole == {True, False}, "the product in front of it is in tiles"


def test_a_saved_tensor_that_is_called_like_an_operator() -> None:
    """A backward names its inputs like the forward's values: the first view is `view`."""
    module = traced(lambda x, y: (flat(x).t() @ y,), X, (20, W))
    saved = module.graph.find_nodes(op="placeholder")[1]
    for name in ("view", "mm", "ones", "x"):
        saved.name = saved.target = name
        module.recompile()
        (piece,) = in_pieces(module, Tokens(X, 1), 5, (X, (20, W)), weights=0)
        assert piece.results == ((Result.PRODUCT, None),), name


def _scores(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
    return (torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v),)


def _norm_twice(x: Tensor, w: Tensor) -> tuple[Tensor]:
    normed = F.rms_norm(x, (W,))
    return (mm(normed + mm(normed, w).softmax(1), w),)


def _scaled(x: Tensor, w: Tensor) -> tuple[Tensor]:
    made = mm(x, w)
    return (mm(made / made.abs().amax(1, keepdim=True), w),)


def _norm_of_keys(x: Tensor, w: Tensor) -> tuple[Tensor]:
    normed = F.rms_norm(x, (W,))
    queries = mm(normed + mm(normed, w).softmax(1), w)
    return (torch.bmm(torch.bmm(queries, x.transpose(1, 2)).softmax(-1), normed),)


def _dropped(x: Tensor, w: Tensor) -> tuple[Tensor]:
    return (mm(aten.native_dropout(mm(x, w), 0.5, True)[0], w),)


@pytest.mark.parametrize(
    ("function", "results"),  # with how many values leave the first piece
    [
        (_norm_twice, 1),  # the norm is computed again where another piece reads it
        (_scaled, 1),  # and an absolute value where whole pieces alone do
        (_norm_of_keys, 3),  # the norm leaves it, for who needs it whole
        (_dropped, 1),  # random numbers are drawn once, for all tokens
    ],
)
def test_a_whole_piece_is_between_two_in_tiles(function: Function, results: int) -> None:
    found = in_pieces(traced(function, X, (W, W)), Tokens(X, 1), 5, (X, (W, W)))
    assert [piece.is_whole for piece in found] == [False, True, False]
    assert len(found[0].results) == results


def test_keys_are_whole_and_queries_in_tiles() -> None:
    """Attention by hand is a tile of queries at a time."""
    module = traced(_scores, X, X, X)
    found = in_pieces(module, Tokens(X, 1), 5, (X, X, X), weights=0)
    (cut,) = [piece for piece in found if not piece.is_whole]
    assert sorted(cut.inputs, key=str) == [Axis(1), None, None]


def test_what_had_gaps_keeps_the_order_of_its_dimensions() -> None:
    def query(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (mm(x, w).unflatten(-1, (2, 3)).transpose(1, 2)[..., :2],)

    module = traced(query, X, (W, W))
    (piece,) = in_pieces(module, Tokens(X, 1), 5, (X, (W, W)))
    (given,) = module(torch.randn(X), torch.randn(W, W))
    assert given.stride() == (60, 3, 6, 1) and piece.metas[0].stride == (40, 2, 4, 1)


def test_sums_of_halves_are_rounded_once() -> None:
    def gradient(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return flat(x).t() @ flat(x * w), (flat(x) @ w.expand(W, W)).sum(0)

    torch.manual_seed(0)
    shape = (1, 4096, W)
    inputs = torch.rand(shape, dtype=torch.bfloat16), torch.ones(W, dtype=torch.bfloat16)
    made = tiled(make_fx(gradient)(*inputs), Tokens(shape, 1), 64)
    assert {kind for kind, _ in pieces(made)[0].results} == {Result.PRODUCT, Result.SUM}
    exact = gradient(*(tensor.double() for tensor in inputs))
    for got, want in zip(lower_pieces(made, function_of)(*inputs), exact, strict=True):
        assert got.dtype == torch.bfloat16
        error = ((got.double() - want).abs() / want.abs()).max()
        assert error < 2**-8, "half a step of bfloat16, as where nothing is cut"


def _of_weights(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return flat(x).t() @ flat(x * w), mm(x * w, w.expand(W, W))


def test_a_tile_is_gone_when_the_next_one_begins() -> None:
    made = tiled(traced(_of_weights, (1, 12, W), (W,)), Tokens((1, 12, W), 1), 4)
    before: list[weakref.ref[Tensor]] = []
    left: list[int] = []

    def lower(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        def run(*inputs: Tensor) -> Sequence[Any]:
            left.append(sum(value() is not None for value in before))
            values = list(module(*inputs))
            before[:] = [weakref.ref(value) for value in values]
            return values

        return run

    lower_pieces(made, lower)(torch.randn(1, 12, W), torch.randn(W))
    assert left == [0] * 4
