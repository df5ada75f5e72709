"""Experts: what they cost, what of a model is active, and the gradients of those nobody chose."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megacompile import compat
from megacompile.cli.target import LossAlone
from megacompile.cost.experts import active_parameters
from megacompile.cost.fusion import analyse
from megacompile.cost.hardware import H200
from megacompile.cost.kernels import Analysis, KernelBound
from megacompile.cost.ops import analysis_of
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.plan.abstract import abstract_options, abstract_programs
from tests import inside
from tests.zoo import assert_same, equal, twins

ROWS, EXPERTS, WIDTH, INNER = 64, 4, 32, 48
OFFSETS = torch.tensor([16, 16, 40, 64], dtype=torch.int32)  # the second expert has no row
SHAPES = (ROWS, WIDTH), (EXPERTS, WIDTH, INNER), (ROWS, INNER)
PRODUCT = 2 * ROWS * WIDTH * INNER


# --- what a product of experts costs


def analysed(function: Any, count: int, dtype: torch.dtype = torch.bfloat16) -> Analysis:
    """Of the first shapes."""
    with compat.fake_mode():
        inputs = [torch.empty(shape, dtype=dtype) for shape in SHAPES[:count]]

        def flat(primals: Any, tangents: Any) -> Any:
            result = function(*primals)
            return result if isinstance(result, (tuple, list)) else (result,)

        graph = compat.trace(flat, inputs, [], compat.inductor_decompositions()).graph
    return analyse(graph)


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    return functional.grouped_mm(x, weight, offs=OFFSETS)


def grouped_gradients(x: Tensor, weight: Tensor, up: Tensor) -> Any:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return torch.autograd.grad(grouped(x, weight), (x, weight), up)


def test_a_row_meets_one_expert() -> None:
    """All experts are read; gradients cost twice as much, and what stands in for it as much."""
    *_, kernel = analysed(grouped, 2).kernels
    assert kernel.kind is KernelBound.PRODUCT and kernel.flops == PRODUCT
    weights = EXPERTS * WIDTH * INNER
    assert kernel.size_bytes >= 2 * (weights + ROWS * (WIDTH + INNER))
    products = [kernel for kernel in analysed(grouped_gradients, 3).kernels if kernel.flops]
    assert [kernel.flops for kernel in products][-2:] == [PRODUCT] * 2

    pytest.importorskip("transformers.integrations.moe")
    operators = torch.ops.transformers
    for dtype in (torch.bfloat16, torch.float32):
        forward = analysed(lambda x, w: operators.grouped_mm_fallback(x, w, OFFSETS), 2, dtype)
        backward = analysed(
            lambda x, w, up: operators.grouped_mm_fallback_backward(x, w, OFFSETS, up),
            3,
            dtype,
        )
        assert (forward.work.flops, backward.work.flops) == (PRODUCT, 2 * PRODUCT)


@pytest.mark.parametrize(("dtype", "transposed"), [(torch.float32, False), (torch.float16, True)])
def test_the_operator_for_it_is_the_eager_one(dtype: torch.dtype, transposed: bool) -> None:
    """In every bit, and so are its gradients, of which the operator says how they lie."""
    torch.manual_seed(0)
    shape = (EXPERTS, INNER, WIDTH) if transposed else (EXPERTS, WIDTH, INNER)
    x, weight = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randn(shape, dtype=dtype)
    up = torch.randn(ROWS, INNER, dtype=dtype)
    found = []
    product = torch.ops.megacompile.grouped_mm
    for run in (
        lambda a, b: functional.grouped_mm(a, b, offs=OFFSETS),
        lambda a, b: product(a, b, OFFSETS),
    ):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        result = run(a, b.transpose(-2, -1) if transposed else b)
        result.backward(up)
        found.append((result.detach(), a.grad, b.grad))
    assert all(map(equal, *found))
    view = weight.transpose(-2, -1) if transposed else weight
    torch.library.opcheck(product.default, (x, view, OFFSETS), test_utils="test_faketensor")
    back = torch.ops.megacompile.grouped_mm_backward.default
    torch.library.opcheck(back, (up, x, view, OFFSETS), test_utils="test_faketensor")


# --- a model of experts beside a dense one

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "rms_norm_eps": 1e-5,
}


def mixtral(width: Mapping[str, int] = {}) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(**{**SIZES, **width}, attn_implementation="eager")
    config._experts_implementation = "grouped_mm"
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def mistral(width: Mapping[str, int] = {}) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {k: v for k, v in {**SIZES, **width}.items() if "experts" not in k}
    config = transformers.MistralConfig(**sizes, attn_implementation="eager")
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def schedules(model: nn.Module, tokens: tuple[int, int]) -> list[Schedule]:
    """What a H200 would run."""
    ids = torch.empty(*tokens, dtype=torch.int64, device="meta")
    options = abstract_options(resident=0)  # a stage a layer
    programs = abstract_programs(
        LossAlone(model.bfloat16()), (ids,), {}, options=options, hardware=H200
    )
    return [program.schedule(reuse=program is programs[-1]) for program in programs]


def test_what_of_a_model_is_active_and_how_long_it_takes() -> None:
    """A token passes the experts that it chooses, 2 of 8; a dense model as a whole. A layer of
    experts is no faster than a dense one of its active width."""
    wide = {"hidden_size": 1024, "intermediate_size": 1792, "num_hidden_layers": 2}
    with torch.device("meta"):
        models = [mixtral(wide), mistral({**wide, "intermediate_size": 2 * 1792})]
    made = [schedules(model, (4, 512)) for model in models]
    counts = [sum(p.numel() for p in model.parameters()) for model in models]
    experts = sum(p.numel() for name, p in models[0].named_parameters() if ".experts." in name)
    assert experts > counts[0] / 2
    assert active_parameters(made[0], counts[0], 4 * 512) == counts[0] - experts * 6 // 8
    assert active_parameters(made[1], counts[1], 4 * 512) == counts[1]
    for code in (Code.FORWARD, Code.BACKWARD):
        flops, seconds = [], []
        for programs in made:
            layer = next(s for s in programs[0].stages if s.name.endswith("layers.1"))
            analysis = analysis_of(layer.traced, code)
            flops.append(analysis.work.flops)
            seconds.append(analysis.seconds(H200))
        assert flops[1] <= flops[0] <= 1.02 * flops[1]  # the router's on top
        assert seconds[0] > seconds[1]


# --- experts that no token chose


class Listed(nn.Module):
    """Experts in a list, of which those without tokens are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:  # (tokens, width), and so its result
        shares = self.router(x).softmax(-1)
        chosen = shares.argmax(-1)
        out = x
        for i in chosen.unique().tolist():
            rows = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[i](x[rows]) * shares[rows, i, None])
        return out


@pytest.mark.filterwarnings("ignore:megacompile")
def test_listed_experts_without_tokens_have_no_gradient() -> None:
    torch.manual_seed(0)
    layers = [Listed(), Listed()]
    with torch.no_grad():
        for layer in layers:
            layer.router.bias[1] = -1e3
    plain, streamed = twins(nn.Sequential(*layers))
    for model in (plain, streamed):
        model(torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))).sum().backward()
    assert_same(plain, streamed)
    assert sum(p.grad is None for p in plain.parameters()) >= 4


def test_stacked_experts_without_tokens_have_zeros() -> None:
    """And host memory: a step may choose any of them, so there is memory for all. In float32 they
    are scheduled, without a warning that all of it runs in eager mode."""
    torch.manual_seed(0)
    plain, streamed = twins(mixtral())
    ids = torch.tensor([[1, 2, 1, 2]])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="megacompile")
        for model in (plain, streamed):
            model(input_ids=ids, labels=ids).loss.backward()
    assert_same(plain, streamed)
    grads = [p.grad for name, p in plain.named_parameters() if ".experts." in name]
    assert sum(not expert.any() for grad in grads if grad is not None for expert in grad) > 0
    for bucket in inside.buckets(streamed).values():
        assert len(bucket.grads) == len(bucket.params)
