"""Quantized bases of torchao and bitsandbytes, and PEFT's adapters over them: the plain model's
losses, gradients and parameters. Packages that are not there are skipped. docs/recipes.md has the
table. Where PEFT or the base's package refuses the plain model, the streamed one is refused with
the same words. The mechanism alone: tests/equality."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import megacompile, schedules
from tests import inside, quantized
from tests.draws import drawn
from tests.equality.nets import from_config
from tests.quantized import Quantize
from tests.training import losses_of
from tests.zoo import tokens

Make = Callable[[], Quantize]
IDS = torch.arange(16).view(2, 8)
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # its stubs lack it


def torchao(name: str, **options: Any) -> Quantize:
    api = pytest.importorskip("torchao.quantization")

    def quantize(layer: nn.Linear) -> nn.Linear:
        api.quantize_(layer, getattr(api, name)(**options))
        return layer

    return quantize


def torchao_nf4() -> Quantize:
    place = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
    nf4 = pytest.importorskip(place)

    def quantize(layer: nn.Linear) -> nn.Linear:
        layer.weight = nn.Parameter(nf4.to_nf4(layer.weight.detach(), 64, 256), requires_grad=False)
        return layer

    return quantize


def bnb(kind: str, **options: Any) -> Quantize:
    module = getattr(pytest.importorskip("bitsandbytes").nn, kind)

    def quantize(layer: nn.Linear) -> nn.Linear:
        bias = layer.bias is not None
        made = module(layer.in_features, layer.out_features, bias=bias, **options)
        made.load_state_dict(layer.state_dict())
        if made.bias is not None:  # bitsandbytes would cast it in the forward, which is refused
            made.bias.data = made.bias.data.to(layer.weight.dtype)
        return made.to("cpu")

    return quantize


def bnb_4bit(**options: Any) -> Quantize:
    return bnb("Linear4bit", **options)


KINDS: dict[str, Make] = {
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao int4": lambda: torchao("IntxWeightOnlyConfig", weight_dtype=INT4),
    "torchao float8": lambda: torchao("Float8WeightOnlyConfig"),
    "torchao nf4": torchao_nf4,
    "bitsandbytes nf4": lambda: bnb_4bit(quant_type="nf4", compress_statistics=False),
    "bitsandbytes nf4, nested": lambda: bnb_4bit(quant_type="nf4", compress_statistics=True),
    "bitsandbytes fp4": lambda: bnb_4bit(quant_type="fp4", compress_statistics=True),
    "bitsandbytes int8": lambda: bnb("Linear8bitLt", has_fp16_weights=False),
}


def model(kind: str) -> quantized.Model:
    return quantized.model(KINDS[kind](), dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_equal_in_every_bit(kind: str) -> None:
    """And the state dict is the plain one."""
    plain, streamed = model(kind), megacompile(model(kind), lowering="eager")
    streamed(IDS)
    expected, found = plain.state_dict(), streamed.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value)
        if type(value) is torch.Tensor:
            assert torch.equal(found[name], value)
    again = model(kind)
    with torch.no_grad():
        again.get_parameter("layers.0.first.up.weight").zero_()
    again.load_state_dict(found, strict=False)  # of bitsandbytes, 4 bits are loaded by others
    assert torch.equal(again(IDS), plain(IDS))
    pairs = zip(quantized.trained(streamed), quantized.trained(plain), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    schedule = schedules(streamed)[-1]  # bitsandbytes notes a dtype in the first call
    assert [len(stage.buckets) for stage in schedule.stages] == [1] * 5


def test_a_4_bit_product_is_one_node_for_dynamo() -> None:
    """Dynamo would capture forward and backward of bitsandbytes' function at each of its uses."""
    package = pytest.importorskip("bitsandbytes")
    theirs = package.matmul_4bit
    streamed = megacompile(model("bitsandbytes nf4, nested"), lowering="eager")
    streamed(IDS).backward()
    assert package.matmul_4bit is theirs
    graph = inside.graphs(streamed)[-1].module.graph
    assert len([n for n in graph.nodes if "matmul_4bit" in str(n.target)]) == 6
    assert not [n for n in graph.nodes if "autograd_function" in str(n.target)]


def peft_model(folder: Path | None = None) -> Any:
    peft = pytest.importorskip("peft")
    quantize = bnb_4bit(quant_type="nf4", compute_dtype=torch.bfloat16)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    base = from_config("qwen2", **sizes, **heads, _attn_implementation="sdpa").to(torch.bfloat16)
    for layer in base.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, quantize(child))
    base.is_loaded_in_4bit = True  # as from_pretrained() notes: PEFT asks
    if folder is not None:
        return peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config)


def losses(made: Any, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-2)
    return losses_of(made, optimizer, map(tokens, range(steps)))


def test_qlora_with_peft(tmp_path: Path) -> None:
    plain, streamed = peft_model(), megacompile(peft_model(), lowering="eager")
    expected = losses(plain)
    assert losses(streamed) == pytest.approx(expected, rel=2e-3)
    assert len(schedules(streamed)) == 1
    streamed.save_pretrained(tmp_path)
    again = peft_model(tmp_path)
    adapters = dict(streamed.named_parameters())
    for name, param in again.named_parameters():
        if "lora_" in name:
            assert torch.equal(param, adapters[name])
    merged = streamed.merge_and_unload()
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    ids = torch.arange(16)[None]
    with torch.no_grad():
        assert merged(input_ids=ids).logits.isfinite().all()


# --- PEFT's adapters


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
    peft = pytest.importorskip("peft")
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
