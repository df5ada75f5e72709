"""Experts: what they cost, what of a model is active, and the gradients of those nobody chose."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megacompile import compat, megacompile
from megacompile.cli.target import LossAlone
from megacompile.cost.experts import active_parameters
from megacompile.cost.fusion import analyse
from megacompile.cost.hardware import H200
from megacompile.cost.kernels import Kind
from megacompile.cost.ops import analysis_of
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.plan.abstract import abstract_options, abstract_programs
from tests import inside
from tests.test_cost import found, traced
from tests.zoo import equal

ROWS, EXPERTS, WIDTH, INNER = 64, 4, 32, 48
OFFSETS = torch.tensor([16, 16, 40, 64], dtype=torch.int32)  # the second expert has no row


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    return functional.grouped_mm(x, weight, offs=OFFSETS)


def grouped_gradients(x: Tensor, weight: Tensor, up: Tensor) -> Any:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return torch.autograd.grad(grouped(x, weight), (x, weight), up)


# --- what a product of experts costs


def test_a_row_meets_one_expert() -> None:
    (kernel,) = found(grouped, (ROWS, WIDTH), (EXPERTS, WIDTH, INNER)).kernels[-1:]
    assert kernel.kind is Kind.PRODUCT
    assert kernel.flops == 2 * ROWS * WIDTH * INNER
    weights = EXPERTS * WIDTH * INNER
    assert kernel.size_bytes >= 2 * (weights + ROWS * (WIDTH + INNER))  # all experts are read


def test_its_gradients_cost_twice_as_much() -> None:
    shapes = (ROWS, WIDTH), (EXPERTS, WIDTH, INNER), (ROWS, INNER)
    analysis = found(grouped_gradients, *shapes)
    products = [kernel for kernel in analysis.kernels if kernel.flops]
    assert [kernel.flops for kernel in products][-2:] == [2 * ROWS * WIDTH * INNER] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_stands_in_for_it_costs_as_much(dtype: torch.dtype) -> None:
    pytest.importorskip("transformers.integrations.moe")
    fallback = torch.ops.transformers.grouped_mm_fallback

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = fallback(x, weight, OFFSETS)
        return result

    def backward(x: Tensor, weight: Tensor, up: Tensor) -> Any:
        return torch.ops.transformers.grouped_mm_fallback_backward(x, weight, OFFSETS, up)

    shapes = (ROWS, WIDTH), (EXPERTS, WIDTH, INNER), (ROWS, INNER)
    counts = [
        analyse(traced(function, *shapes[:count], dtype=dtype)).work.flops
        for function, count in ((forward, 2), (backward, 3))
    ]
    assert counts == [2 * ROWS * WIDTH * INNER, 4 * ROWS * WIDTH * INNER]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
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


def test_what_transformers_captures_for_it_is_replaced() -> None:
    pytest.importorskip("transformers.integrations.moe")
    fallback = torch.ops.transformers.grouped_mm_fallback
    ours = torch.ops.megacompile.grouped_mm.default
    cpu = torch.device("cpu")
    captured: list[Any] = [fallback, fallback.default]
    for target in captured:
        assert compat.eager_grouped_mm(target, cpu) is ours
    others: list[Any] = [torch.add, torch.ops.aten.mm.default, ours, "method"]
    for target in others:
        assert compat.eager_grouped_mm(target, cpu) is None


def test_experts_in_float32_are_scheduled() -> None:
    """Without a warning that all of it runs in eager mode, and bitwise as the plain model."""
    torch.manual_seed(0)
    plain = mixtral()
    model = copy.deepcopy(plain)
    megacompile(model, device="cpu", lowering="eager", progress=False)
    ids = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="megacompile")
        losses = [each(input_ids=ids, labels=ids).loss for each in (plain, model)]
        for loss in losses:
            loss.backward()
    assert torch.equal(*losses)
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert want.grad is not None and got.grad is not None
        assert torch.equal(want.grad, got.grad)


# --- a model of experts beside a dense one


def schedules(model: nn.Module, tokens: tuple[int, int]) -> list[Schedule]:
    """What a H200 would run."""
    ids = torch.empty(*tokens, dtype=torch.int64, device="meta")
    programs = abstract_programs(
        LossAlone(model), (ids,), {}, options=abstract_options(), hardware=H200
    )
    return [program.schedule(reuse=program is programs[-1]) for program in programs]


def mixtral(implementation: str = "grouped_mm", width: Mapping[str, int] = {}) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(**{**SIZES, **width}, attn_implementation="eager")
    config._experts_implementation = implementation
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "rms_norm_eps": 1e-5,
}


def test_a_layer_of_experts_is_no_faster_than_a_dense_one_of_its_active_width() -> None:
    transformers = pytest.importorskip("transformers")
    wide = {"hidden_size": 1024, "intermediate_size": 1792}
    dense = {**SIZES, **wide, "intermediate_size": 2 * 1792}
    for name in ("num_local_experts", "num_experts_per_tok"):
        dense.pop(name)
    config = transformers.MistralConfig(**dense, attn_implementation="eager")
    with torch.device("meta"):
        models = [mixtral(width=wide), transformers.AutoModelForCausalLM.from_config(config)]
    for code in (Code.FORWARD, Code.BACKWARD):
        flops, seconds = [], []
        for model in models:
            schedule = schedules(model.bfloat16(), (4, 512))[0]
            layer = next(s for s in schedule.stages if s.name.endswith("layers.1"))
            analysis = analysis_of(layer.traced, code)
            flops.append(analysis.work.flops)
            seconds.append(analysis.seconds(H200))
        assert flops[1] <= flops[0] <= 1.02 * flops[1]  # the router's on top
        assert seconds[0] > seconds[1]


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_a_token_passes_the_experts_that_it_chooses(implementation: str) -> None:
    with torch.device("meta"):
        model = mixtral(implementation)
    count = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert experts > count / 2
    made = schedules(model.bfloat16(), (2, 16))
    assert active_parameters(made, count, 32) == count - experts * 6 // 8


def test_a_dense_model_is_active_as_a_whole() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {k: v for k, v in SIZES.items() if "experts" not in k}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes))
    count = sum(p.numel() for p in model.parameters())
    assert active_parameters(schedules(model.bfloat16(), (2, 16)), count, 32) == count


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
    plain = nn.Sequential(*layers)
    streamed = megacompile(copy.deepcopy(plain), device="cpu", lowering="eager")
    for model in (plain, streamed):
        model(torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))).sum().backward()
    without = 0
    for (name, want), got in zip(plain.named_parameters(), streamed.parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None), name
        without += want.grad is None
        if want.grad is not None and got.grad is not None:
            assert torch.equal(want.grad, got.grad), name
    assert without >= 4


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.filterwarnings("ignore:megacompile")
def test_stacked_experts_without_tokens_have_zeros(implementation: str) -> None:
    """And host memory: a step may choose any of them, so there is memory for all."""
    torch.manual_seed(0)
    plain = mixtral(implementation)
    streamed = megacompile(copy.deepcopy(plain), device="cpu", lowering="eager")
    ids = torch.tensor([[1, 2, 1, 2]])
    for model in (plain, streamed):
        model(input_ids=ids, labels=ids).loss.backward()
    zeros = 0
    for (name, want), got in zip(plain.named_parameters(), streamed.parameters(), strict=True):
        assert want.grad is not None and got.grad is not None
        assert torch.equal(want.grad, got.grad), name
        if ".experts." in name:
            zeros += sum(not expert.any() for expert in got.grad)
    assert zeros > 0
    for bucket in inside.buckets(streamed).values():
        assert len(bucket.grads) == len(bucket.params)
