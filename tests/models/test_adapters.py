"""PEFT's adapters over quantized bases: losses, gradients and parameters of the plain model.

docs/recipes.md has the table. Where PEFT or the base's package refuses the plain model, the
streamed one is refused with the same words.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import megacompile
from tests import quantized
from tests.draws import drawn
from tests.models.test_quantized_bases import KINDS

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {  # the kind of config, and its options
    "LoRA": ("LoraConfig", {"r": 4, "init_lora_weights": False}),
    "DoRA": ("LoraConfig", {"r": 4, "init_lora_weights": False, "use_dora": True}),
    "VeRA": ("VeraConfig", {"r": 4, "init_weights": False}),
    "IA3": ("IA3Config", {"feedforward_modules": ["second.base"], "init_ia3_weights": False}),
    "LoHa": ("LoHaConfig", {"r": 4, "init_weights": False}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 4, "init_weights": False}),
}
NESTED, INT8 = "bitsandbytes nf4, nested", "bitsandbytes int8"
BASES = ["bf16", NESTED, INT8, "torchao int8", "torchao int4", "torchao float8"]
OFTEN = [
    *[("bf16", "DoRA"), ("bf16", "OFT"), (NESTED, "LoRA")],
    *[(INT8, "IA3"), ("torchao int4", "VeRA"), ("torchao float8", "LoHa")],
]
OTHERS = [pair for pair in itertools.product(BASES, ADAPTERS) if pair not in OFTEN]


def refused(base: str, adapter: str) -> str:
    """Why PEFT 0.21 refuses the plain model too; "": it does not."""
    if base.startswith("torchao") and adapter in ("VeRA", "OFT"):
        return "'get_apply_tensor_subclass' was not provided"
    return "mat1 and mat2 shapes cannot" if (base, adapter) == (NESTED, "LoHa") else ""


def adapted(base: str, adapter: str) -> nn.Module:
    quantize = (lambda layer: layer) if base == "bf16" else KINDS[base]()
    net = quantized.model(quantize, dtype=torch.bfloat16)
    kind, options = ADAPTERS[adapter]
    config = getattr(peft, kind)(target_modules=["first.base", "second.base"], **options)
    torch.manual_seed(1)
    return peft.get_peft_model(net, config)


def keep_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, DoRA of PEFT 0.21 exchanges an int8 weight in each forward for one that has lost
    its scales: the second step fails. On a GPU it keeps the weight, as it does here."""
    params = pytest.importorskip("bitsandbytes").nn.Int8Params
    theirs = params.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if self.dtype == torch.int8 else theirs(self, *args, **kwargs)

    monkeypatch.setattr(params, "to", to)


@pytest.mark.parametrize("pair", drawn(OFTEN, OTHERS), ids=", ".join)
def test_adapters_train_as_in_the_plain_model(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := refused(*pair):
        with pytest.raises((ValueError, RuntimeError), match=why):
            quantized.trained(adapted(*pair), steps=1)
        with pytest.raises((ValueError, RuntimeError), match=why):
            quantized.trained(megacompile(adapted(*pair), lowering="eager"), steps=1)
        return
    if pair == (INT8, "DoRA"):
        keep_scales(monkeypatch)
    expected = quantized.trained(adapted(*pair))
    found = quantized.trained(megacompile(adapted(*pair), lowering="eager"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
