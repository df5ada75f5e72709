"""Models that see and hear: vision models of transformers, torchvision and timm, and models of
transformers for images with text and for sound.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.entry import (
    ALONE,
    BATCH,
    BOTH_SIDES,
    GROUPED,
    TINY,
    TURNS,
    Call,
    Entry,
    Family,
    Rounding,
    floats,
    ids,
    of_transformers,
)

# --- vision

PIXELS = 32
LAYERS = {name: TINY[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
SEEING = {**LAYERS, "num_hidden_layers": 2, "image_size": PIXELS, "patch_size": 8, "num_labels": 4}


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


def library(package: str, name: str, *, size: int = PIXELS, **config: Any) -> Entry:
    """A classifier of torchvision or timm, by its name or its class."""

    def build() -> nn.Module:
        of = importlib.import_module(package)
        if package == "timm":
            make = functools.partial(of.create_model, name, pretrained=False)
        else:
            make = getattr(of.models, name)
        return make(num_classes=4, **config)

    def call() -> Call:
        return {"x": floats(BATCH, 3, size, size)}

    return Entry(f"{package} {name}", Family.VISION, build, call, package)


torchvision = functools.partial(library, "torchvision")
timm = functools.partial(library, "timm")
SWIN = {
    "image_size": PIXELS,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 4,
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 4}
BACKBONE = {**RESNET, "model_type": "resnet", "layer_type": "basic", "out_features": ["stage2"]}
VISION: list[Entry] = [
    *classifier("vit", SEEING),
    *classifier("beit", {**SEEING, "layer_scale_init_value": 0.1}),
    *classifier("dinov2", {**SEEING, "mlp_ratio": 2}, note="its mask token is not used"),
    *classifier("swin", SWIN, **ALONE),
    *classifier("convnext", {**RESNET, "num_stages": 2, "drop_path_rate": 0.1}, **ALONE),
    *classifier("resnet", RESNET, **ALONE),
    *classifier(
        "mobilenet_v2", {"image_size": PIXELS, "depth_multiplier": 0.35, "num_labels": 4}, **ALONE
    ),
    *other(
        "vit_mae",
        "ViTMAEForPreTraining",
        {
            **SEEING,
            **{f"decoder_{name}": size for name, size in LAYERS.items()},
            "decoder_num_hidden_layers": 1,
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
            **BOTH_SIDES,
            "encoder_layers": 1,
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

# --- images and text

SIGHT = {**SEEING, "image_size": 16}
PATCHES = 4  # of an image
IMAGE_TOKEN, START_TOKEN, END_TOKEN, VIDEO_TOKEN = 60, 61, 62, 63


def _pairs() -> Call:
    return {
        "input_ids": ids(below=60),
        "pixel_values": floats(BATCH, 3, 16, 16),
        "return_loss": True,
    }


def _siglip() -> Call:
    return {**_pairs(), "input_ids": ids(BATCH, 8, below=60)}


def _prompt() -> Call:
    """Four tokens that stand for the image, before a text."""
    tokens = ids(BATCH, 12, below=60)
    tokens[:, 1 : 1 + PATCHES] = IMAGE_TOKEN
    return {
        "input_ids": tokens,
        "labels": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": floats(BATCH, 3, 16, 16),
    }


def _typed_prompt() -> Call:
    call = _prompt()
    return {**call, "token_type_ids": torch.zeros_like(call["input_ids"])}


def _qwen() -> Call:
    """16 patches in groups of 2 x 2."""
    tokens = ids(BATCH, 12, below=60)
    tokens[:, 1] = START_TOKEN
    tokens[:, 2 : 2 + PATCHES] = IMAGE_TOKEN
    return {
        "input_ids": tokens,
        "labels": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).long(),
        "pixel_values": floats(BATCH * 16, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
    }


QWEN: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": START_TOKEN,
    "vision_end_token_id": END_TOKEN,
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
TEXT_AND_IMAGE = "AutoModelForImageTextToText"
SIZES = "the sizes of the images are data: transformers loops over them and splits by them"
COUNTS = "transformers compares the number of an image's tokens with its features, by `item()`"
GROUPS = Rounding(
    1e-6,
    "where it is captured, transformers makes a mask that masks nothing: gradients of keys and "
    "values of grouped heads are added in another order",
)
PATCHED = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 8}
ROTATED = {**GROUPED, "rope_parameters": ROPE}
IMAGES: dict[str, Any] = {"image_token_index": IMAGE_TOKEN, "image_token_id": IMAGE_TOKEN}


def reader(
    kind: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    call: Callable[[], Call],
    *,
    head: str = TEXT_AND_IMAGE,
    note: str = "",
    rounding: dict[str, Rounding] | None = None,
    **config: Any,
) -> list[Entry]:
    """A model of images and text."""
    both = {"text_config": text, "vision_config": vision, **config}
    return of_transformers(Family.MULTIMODAL, head, kind, both, call, note=note, rounding=rounding)


MULTIMODAL: list[Entry] = [
    *reader("clip", TINY, SIGHT, _pairs, head="CLIPModel", projection_dim=16),
    *reader("siglip", TINY, SIGHT, _siglip, head="SiglipModel"),
    *reader(
        "llava",
        {**GROUPED, "model_type": "llama"},
        {**SIGHT, "model_type": "clip_vision_model"},
        _prompt,
        note=COUNTS,
        rounding={"sdpa": GROUPS},
        vision_feature_layer=-1,
        **IMAGES,
    ),
    *reader(
        "paligemma",
        {**GROUPED, "model_type": "gemma", "head_dim": 8},
        {**SIGHT, "model_type": "siglip_vision_model"},
        _typed_prompt,
        note=COUNTS,
        projection_dim=32,
        **IMAGES,
    ),
    *reader(
        "qwen2_vl",
        ROTATED,
        {**PATCHED, "embed_dim": 32, "mlp_ratio": 2},
        _qwen,
        note=SIZES,
        rounding={"sdpa": GROUPS},
        **QWEN,
    ),
    *reader(
        "qwen2_5_vl",
        ROTATED,
        {
            **PATCHED,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        _qwen,
        note=SIZES,
        rounding={"eager": TURNS, "sdpa": Rounding(1e-6, f"{GROUPS.why}; {TURNS.why}")},
        **QWEN,
    ),
]

# --- sound

WAVE = {
    **LAYERS,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
    "ctc_loss_reduction": "mean",
}


def _wave() -> Call:
    return {"input_values": floats(BATCH, 400), "labels": ids(BATCH, 5, below=32)}


def _spectrum() -> Call:
    return {"input_values": floats(BATCH, 32, 16), "labels": torch.tensor([0, 1])}


TRANSPOSED = "attention drops elements of a tensor that is transposed in eager code"
CTC = (
    "transformers branches on the labels, sets `requires_grad` in the forward, and selects labels "
    "by a mask for the loss"
)


def ctc(kind: str, **of_entry: Any) -> list[Entry]:
    return of_transformers(
        Family.AUDIO, "AutoModelForCTC", kind, WAVE, _wave, note=CTC, draws=TRANSPOSED, **of_entry
    )


AUDIO: list[Entry] = [
    *ctc("wav2vec2"),
    *ctc("hubert"),
    *ctc("wavlm", attention=("eager",)),
    *of_transformers(
        Family.AUDIO,
        "AutoModelForAudioClassification",
        "audio-spectrogram-transformer",
        {
            **LAYERS,
            "num_hidden_layers": 2,
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
        },
        _spectrum,
    ),
]

ENTRIES = [*VISION, *MULTIMODAL, *AUDIO]
