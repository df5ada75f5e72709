"""Training with torchao's float8 layers; skipped where torchao is not installed.

What makes equal layers share their code is tested without torchao, too.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import megacompile, schedules
from megacompile.cli import main
from megacompile.errors import MegacompileError
from megacompile.ir.stages import Code
from megacompile.ir.tiles import pieces_of
from tests.zoo import Language

float8 = pytest.importorskip("torchao.float8")

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
WIDTH, WORDS = 32, 48
IDS = torch.randint(0, WORDS, (4, 2, 40), generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        each = self.mixed(self.norm(x)).unflatten(-1, (2, 3 * WIDTH // 2)).transpose(1, 2)
        query, key, value = each.chunk(3, -1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.back(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.after(x))))


def decoder(recipe: str, *, layers: int = 2, **options: Any) -> Language:
    """In bfloat16, with the linear layers of its layers in float8."""
    torch.manual_seed(0)
    made = Language(WORDS, WIDTH, (Layer() for _ in range(layers))).to(torch.bfloat16)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, **options)
    float8.convert_to_float8_training(made.layers, config=config)
    return made


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Losses, gradients and in the end parameters, of steps of two micro-batches."""
    found = []
    for k, ids in enumerate(IDS, start=1):
        loss = model(ids)
        loss.backward()
        found.append(loss.detach().clone())
        if k % 2 == 0:
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize(
    ("recipe", "options", "emulate"),
    [
        ("tensorwise", {}, True),
        ("rowwise", {}, False),
        ("rowwise_with_gw_hp", {"activations": "selective"}, False),
        ("rowwise_with_gw_hp", {"activations": "offload"}, False),
        ("tensorwise", {"resident": "all"}, False),
    ],
    ids=str,
)
def test_training_is_equal_in_every_bit(
    recipe: str, options: dict[str, Any], emulate: bool
) -> None:
    """Of micro-batches, in every plan; FSDP's scales, computed ahead, change nothing."""
    plain = decoder(recipe, emulate=emulate)
    expected = trained(plain, adamw(plain))
    streamed = megacompile(decoder(recipe, emulate=emulate), lowering="eager", **options)
    found = trained(streamed, adamw(streamed))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    schedule = schedules(streamed)[-1]
    assert [len(stage.buckets) for stage in schedule.stages] == [1] * 4
    float8.precompute_float8_dynamic_scale_for_fsdp(streamed)
    assert torch.equal(streamed(IDS[0]), plain(IDS[0]))


@pytest.mark.parametrize(("recipe", "tiles"), [("tensorwise", 2), ("rowwise_with_gw_hp", 5)])
def test_in_tiles_it_is_equal_but_for_sums_over_tokens(recipe: str, tiles: int) -> None:
    """In bfloat16 they are rounded once, and not after each of two steps."""
    plain, model = decoder(recipe), decoder(recipe)
    streamed = megacompile(model, lowering="eager", tiles=tiles)
    losses = [made(IDS[0]) for made in (plain, streamed)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert max(errors(plain, streamed)) < 2**-8, "half a step of bfloat16"
    for stage in schedules(streamed)[-1].stages[1:3]:
        for code, graph in stage.traced.graphs.items():
            pieces = [piece for _, piece in pieces_of(graph.graph) if not piece.is_whole]
            nodes = [node for piece in pieces for node in piece.tiles[0].module.graph.nodes]
            targets = {node.target for node in nodes}
            assert torch.ops.aten._scaled_mm.default in targets, f"{code} has fp8 products in tiles"


def errors(plain: nn.Module, streamed: nn.Module) -> list[Tensor]:
    """Of each gradient, as a part of it."""
    found = []
    for one, other in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        found.append((one.grad - other.grad).norm() / one.grad.norm())
    return found


def test_inductor_is_equal_up_to_rounding() -> None:
    plain, model = decoder("tensorwise", layers=1), decoder("tensorwise", layers=1)
    streamed = megacompile(model, lowering="inductor")
    for made in (plain, streamed):
        made(IDS[0]).backward()
    # one step of e5m2 is a fourth, and few numbers round to another
    assert max(errors(plain, streamed)) < 2**-3


def test_weights_that_fsdp_would_gather_are_refused() -> None:
    model = decoder("tensorwise", enable_fsdp_float8_all_gather=True)
    with pytest.raises(MegacompileError, match="WeightWithDynamicFloat8CastTensor"):
        megacompile(model)(IDS[0])


def test_equal_layers_share_a_template_that_saves_no_weight() -> None:
    """Neither a weight nor its cast: a backward makes it again, from the parameter in its slot."""
    streamed = megacompile(decoder("tensorwise", layers=5), lowering="eager", activations="keep")
    streamed(IDS[0]).backward()
    stages = schedules(streamed)[-1].stages
    assert len(stages) == 7 and len({id(stage.template) for stage in stages}) == 3
    template = stages[1].template
    assert template is not None and Code.BACKWARD in template.graphs
    saved = {meta.shape for meta in template.saved}
    weights = {tuple(param.shape) for param in stages[1].buckets[0].params}
    assert not saved & (weights | {shape[::-1] for shape in weights if len(shape) == 2})


def test_plan_knows_how_fast_float8_is_and_what_it_saves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Products at twice the rate, and casts that take a part of it again, more with a scale for
    each row; saved in fp8, but for gradients of weights in bf16. No stage is so short that they run
    as one."""
    pytest.importorskip("transformers")
    steps, saved = {}, {}
    for recipe in ("bf16", *RECIPES):
        argv = ["plan", f"tests.configs:{recipe}", "--host-memory", "1TiB", "--batch", "8"]
        assert main([*argv, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        steps[recipe] = found["step_s"]
        saved[recipe] = found["plan"]["device"]["kinds"]["saved tensors"]
    assert steps["bf16"] / 2 < steps["tensorwise"] < 0.75 * steps["bf16"]
    assert steps["bf16"] / 2 < steps["rowwise"] < 0.85 * steps["bf16"]
    assert steps["rowwise"] < steps["rowwise_with_gw_hp"] < steps["bf16"]
    assert saved["tensorwise"] < 0.8 * saved["bf16"] > saved["rowwise"]
    assert saved["rowwise_with_gw_hp"] == pytest.approx(saved["bf16"], rel=0.01)
