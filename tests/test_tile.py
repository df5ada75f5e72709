"""Pieces in tiles: which nodes act on each token alone, what tiles compute, and what they save."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from megacompile import compat, megacompile, schedules
from megacompile.cost.kernels import Kind
from megacompile.cost.ops import analysis_of
from megacompile.cost.pieces import analyse_pieces
from megacompile.errors import OptionError, OptionTypeError
from megacompile.ir.stages import Code
from megacompile.ir.tiles import Axis, Piece, Result, Tile, pieces_of
from megacompile.passes.stages.direct import direct
from megacompile.passes.stages.lower_pieces import lower_pieces
from megacompile.passes.stages.pieces import divide
from megacompile.passes.stages.tile import tile, tile_lengths
from megacompile.passes.stages.token_rules import reshaped
from megacompile.passes.stages.tokenwise import Tokens
from megacompile.plan.problem import Problem
from megacompile.plan.tiling import search_in_tiles
from tests import cases, test_joint_budgets
from tests.draws import drawn

W = 6  # of activations
X = (2, 10, W)  # batch, tokens, width
EACH_TOKEN = torch.arange(10.0)[:, None]
aten = torch.ops.aten


def traced(
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> fx.GraphModule:
    """The ATen graph of a function that gives a tuple, parameters after the activations."""
    inputs = [torch.randn(shape, dtype=dtype) for shape in shapes]
    module: fx.GraphModule = make_fx(lambda *given: tuple(function(*given)))(*inputs)
    return module


def in_pieces(
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    tiles: int = 3,
    dim: int = 1,
    weights: int = 1,
    samples: bool = False,
) -> tuple[list[Piece], list[Tensor], list[Tensor]]:
    """A function of activations and `weights` weights behind them, tiled: its pieces, what it gives
    and what it gives whole."""
    torch.manual_seed(0)
    module = traced(function, *shapes)
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    whole = frozenset(names[len(names) - weights :])
    made = tile(module, Tokens(shapes[0], dim, samples), tiles, whole)
    inputs = [torch.randn(shape) for shape in shapes]
    run = lower_pieces(made, direct) if pieces_of(made.graph) else direct(made)
    wanted = list(module(*inputs))
    return [piece for _, piece in pieces_of(made.graph)], list(run(*inputs)), wanted


def assert_equal(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


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
    made: Tensor = aten._scaled_mm(a, b, of_a, of_b, bias, out_dtype=torch.float32)
    return made


TOKENWISE: dict[str, Callable[[Tensor, Tensor], Any]] = {
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
    "softmax over the width": lambda x, w: (mm(x, w).softmax(-1),),
    "log softmax": lambda x, w: (mm(x, w).log_softmax(2),),
    "mean over the width": lambda x, w: (mm(x, w).mean(-1),),
    "keepdim": lambda x, w: (mm(x, w).amax(-1, keepdim=True) + x,),
    "variance": lambda x, w: torch.var_mean(mm(x, w), -1),
    "argmax": lambda x, w: (mm(x, w).argmax(-1),),
    "chunks": lambda x, w: (mm(x, w).chunk(2, -1)[1] * 2,),
    "unbind": lambda x, w: (mm(x, w).unflatten(-1, (2, 3)).unbind(2)[0],),
    "slice": lambda x, w: (mm(x, w)[..., 1:4],),
    "select": lambda x, w: (mm(x, w)[..., 2],),
    "cat": lambda x, w: (torch.cat([mm(x, w), x], -1),),
    "heads": lambda x, w: (mm(x, w).view(2, 10, 2, 3).transpose(1, 2).contiguous(),),
    "permute": lambda x, w: (mm(x, w).permute(2, 1, 0),),
    "scaled by a table": lambda x, w: (mm(x, w) * torch.arange(10.0)[:, None],),
    "a cast": lambda x, w: (mm(x, w).double(),),
    "where": lambda x, w: (torch.where(x > 0, mm(x, w), 0.0),),
    "squeeze": lambda x, w: (mm(x, w).unsqueeze(0).squeeze(0),),
    "slice scatter": lambda x, w: (aten.slice_scatter(torch.zeros_like(x), mm(x, w), 2, 0, 6),),
    "a sum over tokens": lambda x, w: (mm(x, w).sum((0, 1)),),
    "a sum of all": lambda x, w: (mm(x, w).sum(),),
    "a gradient of a weight": lambda x, w: (flat(x).t() @ flat(mm(x, w)), mm(x, w)),
    "a constant of all tokens": lambda x, w: (mm(x, w) * EACH_TOKEN,),
    "constants": lambda x, w: (mm(x + torch.ones(2, 10, 1), w),),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tiles", [2, 3, 10])
@pytest.mark.parametrize("name", TOKENWISE)
def test_what_acts_on_each_token_alone(name: str, tiles: int, dim: int) -> None:
    pieces, got, wanted = in_pieces(TOKENWISE[name], X, (W, W), tiles=tiles, dim=dim)
    (cut,) = [piece for piece in pieces if not piece.is_whole]
    assert cut.count == min(tiles, X[dim]) if 10 % tiles == 0 or dim == 0 else cut.count <= tiles
    assert_equal(got, wanted)


NOT_TOKENWISE: dict[str, Callable[[Tensor, Tensor], Any]] = {
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
    pieces, got, wanted = in_pieces(NOT_TOKENWISE[name], X, (W, W), tiles=5)
    assert any(piece.is_whole for piece in pieces), "the operator itself is not in tiles"
    assert any(not piece.is_whole for piece in pieces), "the product before it is"
    assert_equal(got, wanted)


def test_keys_are_whole_and_queries_in_tiles() -> None:
    """Attention by hand is a tile of queries at a time."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v),)

    pieces, got, wanted = in_pieces(attention, X, X, X, weights=0, tiles=5)
    (cut,) = [piece for piece in pieces if not piece.is_whole]
    assert cut.inputs.count(None) == 2 and cut.inputs.count(Axis(1)) == 1
    assert_equal(got, wanted)


def test_random_numbers_are_drawn_once() -> None:
    def dropped(x: Tensor, w: Tensor) -> tuple[Tensor]:
        torch.manual_seed(7)
        return (mm(F.dropout(mm(x, w), 0.5, training=True), w),)

    torch.manual_seed(0)
    module = traced(lambda x, w: (mm(aten.native_dropout(mm(x, w), 0.5, True)[0], w),), X, (W, W))
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    made = tile(module, Tokens(X, 1), 5, frozenset(names[1:]))
    inputs = torch.randn(X), torch.randn(W, W)
    results = []
    for function in (module, lower_pieces(made, direct)):
        torch.manual_seed(7)
        results.append(list(function(*inputs)))
    assert [piece.is_whole for _, piece in pieces_of(made.graph)] == [False, True, False]
    assert_equal(*results)


def test_without_a_product_a_graph_is_left_as_it_is() -> None:
    module = traced(lambda x, w: (F.gelu(x + w).sum(0),), X, (W,))
    assert tile(module, Tokens(X, 1), 5, frozenset()) is module


def test_a_norm_is_computed_again_where_another_piece_reads_it() -> None:
    def twice(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        normed = F.rms_norm(x, (W,))
        whole = mm(normed, w).softmax(1)
        return (mm(normed + whole, w),)

    pieces, got, wanted = in_pieces(twice, X, (W, W), tiles=5)
    assert [piece.is_whole for piece in pieces] == [False, True, False]
    assert len(pieces[0].results) == 1, "the norm does not leave its piece"
    assert_equal(got, wanted)


def test_what_had_gaps_keeps_the_order_of_its_dimensions() -> None:
    def query(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (mm(x, w).unflatten(-1, (2, 3)).transpose(1, 2)[..., :2],)

    (piece,), got, wanted = in_pieces(query, X, (W, W), tiles=5)
    assert wanted[0].stride() == (60, 3, 6, 1) and piece.metas[0].stride == (40, 2, 4, 1)
    assert_equal(got, wanted)


def test_what_only_whole_pieces_read_is_computed_there() -> None:
    def scaled(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        made = mm(x, w)
        return (mm(made / made.abs().amax(1, keepdim=True), w),)

    pieces, got, wanted = in_pieces(scaled, X, (W, W), tiles=5)
    assert [piece.is_whole for piece in pieces] == [False, True, False]
    assert len(pieces[0].results) == 1, "what it is an absolute value of, which others read too"
    assert_equal(got, wanted)


def test_what_is_computed_again_in_tiles_is_read_whole_where_that_is_needed() -> None:
    def attention(x: Tensor, w: Tensor) -> tuple[Tensor]:
        normed = F.rms_norm(x, (W,))
        whole = mm(normed, w).softmax(1)
        scores = torch.bmm(mm(normed + whole, w), x.transpose(1, 2)).softmax(-1)
        return (torch.bmm(scores, normed),)

    pieces, got, wanted = in_pieces(attention, X, (W, W), tiles=5)
    assert [piece.is_whole for piece in pieces] == [False, True, False]
    assert_equal(got, wanted)


def test_sums_of_halves_are_rounded_once() -> None:
    def gradient(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return flat(x).t() @ flat(x * w), (flat(x) @ w.expand(W, W)).sum(0)

    torch.manual_seed(0)
    shape = (1, 4096, W)
    inputs = torch.rand(shape, dtype=torch.bfloat16), torch.ones(W, dtype=torch.bfloat16)
    module = make_fx(gradient)(*inputs)
    made = tile(module, Tokens(shape, 1), 64, frozenset(["w_1"]))
    (_, piece), *_ = pieces_of(made.graph)
    assert {kind for kind, _ in piece.results} == {Result.PRODUCT, Result.SUM}
    exact = gradient(*(tensor.double() for tensor in inputs))
    for got, want in zip(lower_pieces(made, direct)(*inputs), exact, strict=True):
        assert got.dtype == torch.bfloat16
        error = ((got.double() - want).abs() / want.abs()).max()
        assert error < 2**-8, "half a step of bfloat16, as where nothing is cut"


@pytest.mark.parametrize(
    ("axis", "before", "after", "expected"),
    [
        (Axis(1), (2, 10, 6), (20, 6), Axis(0, outer=2)),
        (Axis(0, outer=2), (20, 6), (2, 10, 6), Axis(1)),
        (Axis(0), (2, 10, 6), (20, 6), Axis(0, inner=10)),
        (Axis(1), (2, 10, 6), (2, 10, 2, 3), Axis(1)),
        (Axis(1), (2, 10, 6), (2, 60), Axis(1, inner=6)),
        (Axis(1), (2, 10, 6), (4, 5, 6), None),
        (Axis(2), (1, 1, 10), (10,), Axis(0)),
    ],
)
def test_where_tokens_are_after_a_reshape(
    axis: Axis, before: tuple[int, ...], after: tuple[int, ...], expected: Axis | None
) -> None:
    made = reshaped(axis, before, after)
    assert made == expected
    if made is not None:
        x = torch.arange(float(torch.Size(before).numel())).view(before)
        part = axis.cut(x, 1, 1).reshape(made.shape(after, 1))
        assert torch.equal(part, made.cut(x.view(after), 1, 1))


def test_tiles_are_equal_but_for_the_last() -> None:
    assert tile_lengths(12, 4) == (3,)
    assert tile_lengths(10, 3) == (4, 2)
    assert tile_lengths(10, 10) == (1,)


def test_a_tile_needs_a_part_of_the_memory() -> None:
    def mlp(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (mm(F.gelu(mm(x, w)), w.t()),)

    module = traced(mlp, (1, 4096, 8), (8, 256))
    peaks = [
        analyse_pieces(tile(module, Tokens((1, 4096, 8), 1), n, frozenset(["arg1_1"])).graph)
        for n in (1, 2, 32)
    ]
    one, two, many = (analysis.peak_bytes for analysis in peaks)
    assert many < two < one and many < one / 10
    assert peaks[2].work.flops == peaks[0].work.flops, "the same operations"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_over_tokens_run_at_the_rate_of_their_dtype(dtype: torch.dtype) -> None:
    def gradient(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return flat(x).t() @ flat(x * w), mm(x * w, w.expand(W, W))

    module = traced(gradient, (1, 12, W), (W,), dtype=dtype)
    made = tile(module, Tokens((1, 12, W), 1), 4, frozenset(["arg1_1"]))
    products = [k for k in analyse_pieces(made.graph).kernels if k.kind is Kind.PRODUCT]
    assert {kernel.itemsize for kernel in products} == {dtype.itemsize}


def test_a_tile_is_gone_when_the_next_one_begins() -> None:
    def gradient(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return flat(x).t() @ flat(x * w), mm(x * w, w.expand(W, W))

    made = tile(traced(gradient, (1, 12, W), (W,)), Tokens((1, 12, W), 1), 4, frozenset(["arg1_1"]))
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


# Tiles of whole samples.

SAMPLES = (4, 10, W)


def attended(x: Tensor, mask: Tensor | None = None) -> Tensor:
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, mask, is_causal=mask is None)
    return mixed.transpose(1, 2).flatten(2)


def attended_backward(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Attention between two products, and the gradients of it."""
    with torch.enable_grad():
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = mm(attended(mm(x, w)), w)
        return (y.detach(), *torch.autograd.grad(y, [x, w], torch.ones_like(y)))


BY_SAMPLES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "forward": (lambda x, w: (mm(attended(mm(x, w)), w),), ()),
    "backward": (attended_backward, ()),
    "a mask of all": (lambda x, mask, w: (mm(attended(mm(x, w), mask), w),), ((10, 10),)),
    "a mask that samples share": (
        lambda x, mask, w: (mm(attended(mm(x, w), mask), w),),
        ((1, 1, 10, 10),),
    ),
    "a mask of each sample": (
        lambda x, mask, w: (mm(attended(mm(x, w), mask), w),),
        ((4, 1, 10, 10),),
    ),
}


@pytest.mark.parametrize("name", BY_SAMPLES)
@pytest.mark.parametrize("tiles", [2, 3, 4])
def test_attention_runs_in_tiles_of_whole_samples(name: str, tiles: int) -> None:
    function, masks = BY_SAMPLES[name]
    shapes = (SAMPLES, *masks, (W, W))
    pieces, got, wanted = in_pieces(function, *shapes, tiles=tiles, dim=0, samples=True)
    assert_equal(got, wanted)
    assert any(
        has_attention(tile) for piece in pieces if not piece.is_whole for tile in piece.tiles
    )
    assert not any(
        has_attention(tile) for piece in pieces if piece.is_whole for tile in piece.tiles
    )


@pytest.mark.parametrize(("dim", "samples"), [(0, False), (1, True)])
def test_attention_is_whole_in_tiles_of_tokens(dim: int, samples: bool) -> None:
    pieces, got, wanted = in_pieces(
        attended_backward, SAMPLES, (W, W), tiles=2, dim=dim, samples=samples
    )
    assert_equal(got, wanted)
    assert any(has_attention(tile) for piece in pieces if piece.is_whole for tile in piece.tiles)
    assert not any(
        has_attention(tile) for piece in pieces if not piece.is_whole for tile in piece.tiles
    )


def has_attention(part: Tile) -> bool:
    return any("scaled_dot_product" in str(node.target) for node in part.module.graph.nodes)


KERNELS = "flash efficient cudnn".split()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("batch", [2, 4])
def test_attention_of_gpus_is_cut_along_samples(kernel: str, batch: int) -> None:
    """Seeds are the same in each tile, also where there are as many as samples."""
    name = f"_scaled_dot_product_{kernel}_attention"
    forward, backward = (getattr(aten, name + way).default for way in ("", "_backward"))
    bias = () if kernel == "flash" else (None, True)

    def gradient(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q = mm(x, w).unflatten(-1, (4, -1)).transpose(1, 2)
        found = forward(q, q, q, *bias, 0.0, True)
        out, lse, rest = found[0], found[1], found[2:]
        if kernel == "efficient":
            given = (None, out, lse, *rest, 0.0, [True, True, True, False], True)
        elif kernel == "flash":
            given = (out, lse, *rest[:4], 0.0, True, *rest[4:6])
        else:
            given = (out, lse, *rest[4:6], None, *rest[:4], 0.0, True)
        first = backward(q, q, q, q, *given)[0]
        return (mm(first.transpose(1, 2).flatten(2), w),)

    shape = (batch, 128, 256)
    with compat.fake_mode():
        inputs = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in (shape, (256, 256))]
        module = compat.trace(lambda given, _: gradient(*given), inputs, [], {})
    module.graph.eliminate_dead_code()
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    made = tile(module, Tokens(shape, 0, samples=True), 2, frozenset(names[1:]))
    pieces = [piece for _, piece in pieces_of(made.graph)]
    assert [piece.is_whole for piece in pieces] == [False]
    assert [has_attention(tile) for tile in pieces[0].tiles] == [True]


# Whole models.


def trained(name: str, steps: int = 2, **options: Any) -> tuple[nn.Module, list[Any], list[Any]]:
    """A case's model with these options, and losses and gradients of it and of the plain one."""
    found: list[list[Any]] = []
    models = []
    for settings in (None, options):
        case = cases.build(name)
        model = case.model
        if settings is not None:
            model = megacompile(model, device="cpu", progress=False, **settings)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        seen: list[Any] = []
        for i in range(steps):
            torch.manual_seed(i)
            loss = case.loss(model, i, torch.device("cpu"))
            loss.backward()
            seen += [loss.detach()]
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        found.append(seen)
        models.append(model)
    return models[1], found[0], found[1]


def in_tiles(model: Any) -> list[Piece]:
    """The pieces of a model that run in tiles."""
    graphs = [
        graph.graph
        for schedule in schedules(model)
        for template in schedule.templates
        for graph in template.graphs.values()
    ]
    return [piece for graph in graphs for _, piece in pieces_of(graph) if not piece.is_whole]


SHORT = [name for name in cases.CASES if name not in cases.LONG]


@pytest.mark.parametrize("activations", ["recompute", "keep", "offload"])
@pytest.mark.parametrize("name", drawn(SHORT, cases.LONG))
def test_models_in_tiles_are_the_plain_ones(name: str, activations: str) -> None:
    model, plain, mine = trained(name, tiles=5, activations=activations)
    assert_equal(mine, plain)
    assert in_tiles(model) or name == "batch norm", "some piece runs in tiles"


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        *((name, "recompute") for name in SHORT),
        ("hf qwen2", "keep"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("hf qwen2", "recompute"),
                ("hf qwen2", "offload"),
                ("hf gpt2", "recompute"),
            )
        ),
    ],
)
def test_models_in_tiles_of_samples_are_the_plain_ones(name: str, activations: str) -> None:
    model, plain, mine = trained(name, tiles=2, activations=activations)  # of a batch of 2
    assert_equal(mine, plain)
    found = {index for schedule in schedules(model) for index in schedule.plan.samples}
    kept = activations == "keep" or name in ("hf gpt2", "graph break", "dropout")
    assert bool(found) != kept, (
        "no stage that draws random numbers or is kept runs sample by sample"
    )


def test_a_backward_sample_by_sample_needs_the_memory_of_some() -> None:
    """What a stage that is recomputed needs beside what it takes and gives."""
    found = []
    for tiles in (1, 2):
        model, *_ = trained("hf qwen2", steps=1, tiles=tiles, activations="recompute")
        (schedule,) = schedules(model)
        stage = schedule.stages[1].traced
        codes = [Code.BACKWARD] if stage.samples else [Code.RECOMPUTE, Code.BACKWARD]
        found.append(sum(analysis_of(stage, code, fused=False).peak_bytes for code in codes))
        assert stage.samples == (tiles == 2) and bool(stage.saved) == (tiles == 1)
    whole, by_samples = found
    assert by_samples < 0.8 * whole


@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        ("hf qwen2", 4),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("dropout", 4), ("demo gpt", 4), ("hf qwen2", 2))
        ),
    ],
)
def test_with_inductor(name: str, tiles: int) -> None:
    _, plain, mine = trained(name, tiles=tiles, lowering="inductor")
    if name != "dropout":  # Inductor draws other numbers
        assert_equal(mine, plain)


def test_with_an_update_in_the_backward() -> None:
    case, plain = cases.build("demo gpt"), cases.build("demo gpt")
    mine = torch.optim.AdamW(case.model.parameters(), lr=0.01)
    model = megacompile(case.model, device="cpu", optimizer=mine, tiles=4, progress=False)
    theirs = torch.optim.AdamW(plain.model.parameters(), lr=0.01)
    for i in range(3):
        for each, of, optimizer in ((model, case, mine), (plain.model, plain, theirs)):
            of.loss(each, i, torch.device("cpu")).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal([*model.parameters()], [*plain.model.parameters()])


def test_evaluation_runs_in_tiles_too() -> None:
    case = cases.build("demo gpt")
    plain = copy.deepcopy(case.model).eval()
    model = megacompile(case.model, device="cpu", tiles=4, progress=False).eval()
    with torch.no_grad():
        losses = [case.loss(each, 0, torch.device("cpu")) for each in (model, plain)]
    torch.testing.assert_close(*losses)
    (schedule,) = schedules(model)
    graph = schedule.stages[1].traced.graphs[Code.FORWARD].graph
    assert any(not piece.is_whole for _, piece in pieces_of(graph))


def test_tiles_are_seen() -> None:
    model, *_ = trained("demo gpt", tiles=4)
    (schedule,) = schedules(model)
    assert ", 4 tiles" in str(schedule)
    assert any("runs in 4 tiles" in reason for reason in schedule.plan.reasons)
    whole, *_ = trained("demo gpt")
    template = schedules(whole)[0].stages[1].traced
    cut = schedule.stages[1].traced
    assert cut.saved_bytes < template.saved_bytes, "what tiles compute is not saved"
    assert (
        analysis_of(cut, Code.RECOMPUTE).work.flops
        < analysis_of(template, Code.RECOMPUTE).work.flops
    )


def test_only_stages_with_something_in_tiles_are_said_to_run_in_them() -> None:
    model, *_ = trained("demo gpt", steps=1, tiles=4)
    (schedule,) = schedules(model)
    cut = [
        stage.index
        for stage in schedule.stages
        for graph in stage.traced.graphs.values()
        if any(not piece.is_whole for _, piece in pieces_of(graph.graph))
    ]
    assert schedule.plan.tiles == tuple((index, 4) for index in dict.fromkeys(cut))
    assert [stage.traced.tiles for stage in schedule.stages] == [1, 4, 4, 4, 4]
    reasons = schedule.plan.reasons
    assert any("runs in 4 tiles, in 4 of 5 stages; " in reason for reason in reasons)
    assert any(reason.startswith("1 of 5 stages are not cut: ") for reason in reasons)


def test_where_nothing_can_be_cut_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{divide.__module__}.PRODUCTS", frozenset())
    models = [trained("demo gpt", steps=1, **how)[0] for how in ({}, {"tiles": 4})]
    whole, cut = (schedules(model)[0] for model in models)
    assert not cut.plan.tiles and "4 tiles" not in str(cut)
    assert any(reason.startswith("nothing is cut: ") for reason in cut.plan.reasons)
    saved = [[stage.traced.saved for stage in each.stages] for each in (whole, cut)]
    assert saved[0] == saved[1], "nothing is computed again for it"


def test_no_more_tiles_are_tried_where_nothing_can_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{divide.__module__}.PRODUCTS", frozenset())
    tried: list[Problem] = []
    tower = test_joint_budgets.problem()
    monkeypatch.setattr(tower.drafts.pipeline, "templates", {})  # others are cut
    assert search_in_tiles(tower, tried.append) is None
    assert tried == [tower]


def test_sizes_that_change_are_not_cut() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    plain = copy.deepcopy(net)
    model = megacompile(net, device="cpu", tiles=2, dynamic=True, progress=False)
    for rows in (8, 6):
        x = torch.randn(rows, 4)
        assert torch.equal(model(x).sum(), plain(x).sum())
    reasons = schedules(model)[0].plan.reasons
    assert any("are not cut: their sizes change" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0, OptionError, "got tiles=0; needed at least 1"),
        (True, OptionTypeError, "needed 'auto' or an int"),
        (2.0, OptionTypeError, "needed 'auto' or an int"),
        ("many", OptionTypeError, "needed 'auto' or an int"),
    ],
)
def test_bad_input(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        megacompile(nn.Linear(2, 2), device="cpu", tiles=value)
