"""Vision models of transformers, torchvision and timm."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import BATCH, Call, Entry, Family, Rounding, floats
from tests.zoo.hugging_face import TURNS, of_transformers

PIXELS = 32
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": PIXELS,
    "patch_size": 8,
    "num_labels": 4,
}
ALONE = {"attention": ("eager",)}  # it has no other


def images() -> Call:
    return {"pixel_values": floats(BATCH, 3, PIXELS, PIXELS), "labels": torch.tensor([0, 1])}


def _unlabelled() -> Call:
    return {"pixel_values": floats(BATCH, 3, PIXELS, PIXELS)}


def _segmented() -> Call:
    return {**_unlabelled(), "labels": torch.arange(BATCH * 32 * 32).view(BATCH, 32, 32) % 4}


def _boxes() -> Call:
    box = {
        "class_labels": torch.tensor([1, 2]),
        "boxes": torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.7, 0.6, 0.3, 0.4]]),
    }
    return {**_unlabelled(), "labels": [box, box]}


def classifier(kind: str, config: dict[str, Any], **of_entry: Any) -> list[Entry]:
    head = "AutoModelForImageClassification"
    return of_transformers(Family.VISION, head, kind, config, images, **of_entry)


def other(
    kind: str, head: str, config: dict[str, Any], call: Callable[[], Call], **of_entry: Any
) -> list[Entry]:
    return of_transformers(Family.VISION, head, kind, config, call, **of_entry)


def torchvision(
    name: str, *, size: int = PIXELS, rounding: Rounding | None = None, **config: Any
) -> Entry:
    """A classifier of torchvision, by its name or its class."""

    def build() -> nn.Module:
        maker = getattr(importlib.import_module("torchvision").models, name)
        model: nn.Module = maker(num_classes=4, **config)
        return model

    call = functools.partial(_positional, "x", size)
    return Entry(f"torchvision {name}", Family.VISION, build, call, "torchvision", rounding)


def timm(
    name: str, *, size: int = PIXELS, rounding: Rounding | None = None, **config: Any
) -> Entry:
    """A classifier of timm."""

    def build() -> nn.Module:
        model: nn.Module = importlib.import_module("timm").create_model(
            name, pretrained=False, num_classes=4, **config
        )
        return model

    call = functools.partial(_positional, "x", size)
    return Entry(f"timm {name}", Family.VISION, build, call, "timm", rounding)


def _positional(name: str, size: int) -> Call:
    return {name: floats(BATCH, 3, size, size)}


SWIN = {
    "image_size": PIXELS,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 4,
}
BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage2"],
}
ENTRIES: list[Entry] = [
    *classifier("vit", TINY),
    *classifier("beit", {**TINY, "layer_scale_init_value": 0.1}),
    *classifier("dinov2", {**TINY, "mlp_ratio": 2}, note="its mask token is not used"),
    *classifier("swin", SWIN, **ALONE),
    *classifier(
        "convnext",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_stages": 2,
            "num_labels": 4,
            "drop_path_rate": 0.1,
        },
        **ALONE,
    ),
    *classifier(
        "resnet",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 4},
        **ALONE,
    ),
    *classifier(
        "mobilenet_v2", {"image_size": PIXELS, "depth_multiplier": 0.35, "num_labels": 4}, **ALONE
    ),
    *other(
        "vit_mae",
        "ViTMAEForPreTraining",
        {
            **TINY,
            "decoder_hidden_size": 32,
            "decoder_intermediate_size": 48,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
        },
        _unlabelled,
    ),
    *other(
        "segformer",
        "AutoModelForSemanticSegmentation",
        {
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "num_labels": 4,
        },
        _segmented,
        note="transformers registers hooks in the forward",
        **ALONE,
    ),
    *other(
        "detr",
        "AutoModelForObjectDetection",
        {
            "backbone_config": BACKBONE,
            "use_timm_backbone": False,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_queries": 6,
            "num_labels": 4,
        },
        _boxes,
        note="a random number decides on each layer, and numpy matches boxes in its loss",
        rounding={"eager": TURNS},
        **ALONE,
    ),
    torchvision("resnet18"),
    torchvision("efficientnet_b0", size=96),
    torchvision("regnet_y_400mf", size=64),
    torchvision("mobilenet_v3_small", size=64),
    torchvision("DenseNet", growth_rate=8, block_config=(2, 2), num_init_features=8),
    torchvision("squeezenet1_1", size=64),
    torchvision(
        "SwinTransformer",
        patch_size=[2, 2],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.1,
    ),
    torchvision(
        "VisionTransformer",
        image_size=PIXELS,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=48,
    ),
    torchvision(
        "MaxVit",
        size=56,
        input_size=(56, 56),
        stem_channels=8,
        partition_size=7,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.1,
    ),
    timm("vit_tiny_patch16_224", img_size=PIXELS, depth=2),
    timm("convnextv2_atto"),
    timm("efficientnet_lite0"),
    timm("mixer_s32_224", img_size=64, size=64),
    timm("swin_tiny_patch4_window7_224", img_size=56, size=56, depths=(1, 1, 1, 1)),
    timm("regnetx_002"),
    timm("resnet10t"),
    timm("maxvit_pico_rw_256", img_size=64, size=64),
    timm("eva02_tiny_patch14_224", img_size=28, size=28, depth=2),
]
