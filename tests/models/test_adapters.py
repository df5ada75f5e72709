"""PEFT's adapters over quantized bases: losses, gradients and parameters of the plain model.

docs/recipes.md has the table. Where PEFT or the base's package refuses the plain model, the
streamed one is refused with the same words.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megacompile import megacompile
from tests import quantized
from tests.draws import drawn
from tests.models.test_quantized_bases import KINDS

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")

LAYERS = ["first", "second"]
ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=LAYERS, init_lora_weights=False),
    "DoRA": lambda: peft.LoraConfig(
        r=4, target_modules=LAYERS, init_lora_weights=False, use_dora=True
    ),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=LAYERS, init_weights=False),
    "IA3": lambda: peft.IA3Config(
        target_modules=LAYERS, feedforward_modules=["second"], init_ia3_weights=False
    ),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=LAYERS, init_weights=False),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=LAYERS, init_weights=False),
}
BASES = [
    "bf16",
    "bitsandbytes nf4, nested",
    "bitsandbytes int8",
    "torchao int8",
    "torchao int4",
    "torchao float8",
]
REFUSED = {  # by PEFT 0.21, for the plain model too
    ("bitsandbytes nf4, nested", "LoHa"): "mat1 and mat2 shapes cannot be multiplied",
    **{
        (base, adapter): "'get_apply_tensor_subclass' was not provided"
        for base in BASES
        for adapter in ("VeRA", "OFT")
        if base.startswith("torchao")
    },
}


class Block(nn.Module):
    """A norm, and two layers that adapters are put around."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 2 * width, bias=False)
        self.second = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.second(torch.relu(self.first(self.norm(x))))
        return result


class Net(nn.Module):
    """An embedding, two blocks, a head and the loss."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 50, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


def adapted(base: str, adapter: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net().to(torch.bfloat16)
    if base != "bf16":
        quantize = KINDS[base]()
        for block in net.layers:
            for name in LAYERS:
                setattr(block, name, quantize(getattr(block, name)))
    torch.manual_seed(1)
    made: nn.Module = peft.get_peft_model(net, ADAPTERS[adapter]())
    return made


def keep_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, DoRA of PEFT 0.21 exchanges an int8 weight in each forward for one that has lost
    its scales: the second step fails. On a GPU it keeps the weight, as it does here."""
    params = pytest.importorskip("bitsandbytes").nn.Int8Params
    theirs = params.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if self.dtype == torch.int8 else theirs(self, *args, **kwargs)

    monkeypatch.setattr(params, "to", to)


OFTEN = [
    *[("bf16", "DoRA"), ("bf16", "OFT"), ("bitsandbytes nf4, nested", "LoRA")],
    *[("bitsandbytes int8", "IA3"), ("torchao int4", "VeRA"), ("torchao float8", "LoHa")],
]
OTHERS = [pair for pair in itertools.product(BASES, ADAPTERS) if pair not in OFTEN]


@pytest.mark.parametrize("pair", drawn(OFTEN, OTHERS), ids=", ".join)
def test_adapters_train_as_in_the_plain_model(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = pair
    if why := REFUSED.get((base, adapter)):
        with pytest.raises((ValueError, RuntimeError), match=why):
            quantized.trained(adapted(base, adapter), steps=1)
        with pytest.raises((ValueError, RuntimeError), match=why):
            quantized.trained(megacompile(adapted(base, adapter), lowering="eager"), steps=1)
        return
    if (base, adapter) == ("bitsandbytes int8", "DoRA"):
        keep_scales(monkeypatch)
    expected = quantized.trained(adapted(base, adapter))
    found = quantized.trained(megacompile(adapted(base, adapter), lowering="eager"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
