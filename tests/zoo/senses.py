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
    TURNS,
    Call,
    Entry,
    Family,
    Rounding,
    configured,
    floats,
    ids,
    of_transformers,
)

# --- vision

PIXELS = 32


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


def classifier(kind: str, config: str, **of_entry: Any) -> list[Entry]:
    head = "AutoModelForImageClassification"
    return of_transformers(Family.VISION, head, kind, config, images, **of_entry)


def other(
    kind: str, head: str, config: str, call: Callable[[], Call], **of_entry: Any
) -> list[Entry]:
    return of_transformers(Family.VISION, head, kind, config, call, **of_entry)


def library(package: str, name: str, config: str = "", *, size: int = PIXELS) -> Entry:
    """A classifier of torchvision or timm, by its name or its class."""

    def build() -> nn.Module:
        of = importlib.import_module(package)
        if package == "timm":
            make = functools.partial(of.create_model, name, pretrained=False)
        else:
            make = getattr(of.models, name)
        return make(num_classes=4, **configured(config))

    def call() -> Call:
        return {"x": floats(BATCH, 3, size, size)}

    return Entry(f"{package} {name}", Family.VISION, build, call, package)


torchvision = functools.partial(library, "torchvision")
timm = functools.partial(library, "timm")


VISION: list[Entry] = [
    *classifier("vit", "SEEING"),
    *classifier("beit", "SEEING layer_scale_init_value=0.1"),
    *classifier("dinov2", "SEEING mlp_ratio=2", note="its mask token is not used"),
    *classifier("swin", "SWIN", **ALONE),
    *classifier("convnext", "RESNET num_stages=2 drop_path_rate=0.1", **ALONE),
    *classifier("resnet", "RESNET", **ALONE),
    *classifier("mobilenet_v2", "image_size=32 depth_multiplier=0.35 num_labels=4", **ALONE),
    *other(
        "vit_mae",
        "ViTMAEForPreTraining",
        "SEEING decoder_hidden_size=32 decoder_intermediate_size=48 decoder_num_attention_heads=4 "
        "decoder_num_hidden_layers=1",
        _unlabelled,
    ),
    *other(
        "segformer",
        "AutoModelForSemanticSegmentation",
        "depths=[1,1] num_encoder_blocks=2 sr_ratios=[2,1] hidden_sizes=[16,32] "
        "patch_sizes=[7,3] strides=[4,2] num_attention_heads=[1,2] mlp_ratios=[2,2] "
        "decoder_hidden_size=16 num_labels=4",
        _segmented,
        note="transformers registers hooks in the forward",
        **ALONE,
    ),
    *other(
        "detr",
        "AutoModelForObjectDetection",
        "backbone_config=BACKBONE use_timm_backbone=False BOTH_SIDES encoder_layers=1 "
        "num_queries=6 num_labels=4",
        _boxes,
        note="a random number decides on each layer, and numpy matches boxes in its loss",
        rounding={"eager": TURNS},
        **ALONE,
    ),
    torchvision("resnet18"),
    torchvision("efficientnet_b0", size=96),
    torchvision("regnet_y_400mf", size=64),
    torchvision("mobilenet_v3_small", size=64),
    torchvision("DenseNet", "growth_rate=8 block_config=(2,2) num_init_features=8"),
    torchvision("squeezenet1_1", size=64),
    torchvision(
        "SwinTransformer",
        "patch_size=[2,2] embed_dim=16 depths=[2,2] num_heads=[2,4] "
        "window_size=[4,4] stochastic_depth_prob=0.1",
    ),
    torchvision(
        "VisionTransformer",
        "image_size=32 patch_size=8 num_layers=2 num_heads=4 hidden_dim=32 mlp_dim=48",
    ),
    torchvision(
        "MaxVit",
        "input_size=(56,56) stem_channels=8 partition_size=7 block_channels=[8,16] "
        "block_layers=[1,1] head_dim=4 stochastic_depth_prob=0.1",
        size=56,
    ),
    timm("vit_tiny_patch16_224", "img_size=32 depth=2"),
    timm("convnextv2_atto"),
    timm("efficientnet_lite0"),
    timm("mixer_s32_224", "img_size=64", size=64),
    timm("swin_tiny_patch4_window7_224", "img_size=56 depths=(1,1,1,1)", size=56),
    timm("regnetx_002"),
    timm("resnet10t"),
    timm("maxvit_pico_rw_256", "img_size=64", size=64),
    timm("eva02_tiny_patch14_224", "img_size=28 depth=2", size=28),
]

# --- images and text


PATCHES = 4  # of an image
IMAGE_TOKEN, START_TOKEN, END_TOKEN, VIDEO_TOKEN = 60, 61, 62, 63


def _pairs() -> Call:
    return {
        "input_ids": ids(below=60),
        "pixel_values": floats(BATCH, 3, 16, 16),
        "return_loss": True,
    }


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


SIZES = "the sizes of the images are data: transformers loops over them and splits by them"
COUNTS = "transformers compares the number of an image's tokens with its features, by `item()`"
GROUPS = Rounding(
    1e-6,
    "where it is captured, transformers makes a mask that masks nothing: gradients of keys and "
    "values of grouped heads are added in another order",
)


def reader(
    kind: str,
    text: str,
    vision: str,
    more: str,
    call: Callable[[], Call],
    head: str = "AutoModelForImageTextToText",
    **of_entry: Any,
) -> list[Entry]:
    """A model of images and text."""
    config = {"text_config": configured(text), "vision_config": configured(vision)}
    config |= configured(more)
    return of_transformers(Family.MULTIMODAL, head, kind, config, call, **of_entry)


MULTIMODAL: list[Entry] = [
    *reader("clip", "TINY", "SIGHT", "projection_dim=16", _pairs, "CLIPModel"),
    *reader("siglip", "TINY", "SIGHT", "", _pairs, "SiglipModel"),
    *reader(
        "llava",
        "GROUPED model_type=llama",
        "SIGHT model_type=clip_vision_model",
        "vision_feature_layer=-1 IMAGES",
        _prompt,
        note=COUNTS,
        rounding={"sdpa": GROUPS},
    ),
    *reader(
        "paligemma",
        "GROUPED model_type=gemma head_dim=8",
        "SIGHT model_type=siglip_vision_model",
        "projection_dim=32 IMAGES",
        _typed_prompt,
        note=COUNTS,
    ),
    *reader(
        "qwen2_vl",
        "ROTATED",
        "PATCHED embed_dim=32 mlp_ratio=2",
        "QWEN",
        _qwen,
        note=SIZES,
        rounding={"sdpa": GROUPS},
    ),
    *reader(
        "qwen2_5_vl",
        "ROTATED",
        "PATCHED intermediate_size=48 out_hidden_size=32 window_size=32 fullatt_block_indexes=[1]",
        "QWEN",
        _qwen,
        note=SIZES,
        rounding={"eager": TURNS, "sdpa": Rounding(1e-6, f"{GROUPS.why}; {TURNS.why}")},
    ),
]

# --- sound


def _wave() -> Call:
    return {"input_values": floats(BATCH, 400), "labels": ids(BATCH, 5, below=32)}


TRANSPOSED = "attention drops elements of a tensor that is transposed in eager code"
CTC = (
    "transformers branches on the labels, sets `requires_grad` in the forward, and selects labels "
    "by a mask for the loss"
)


def ctc(kind: str, **of_entry: Any) -> list[Entry]:
    return of_transformers(
        Family.AUDIO, "AutoModelForCTC", kind, "WAVE", _wave, note=CTC, draws=TRANSPOSED, **of_entry
    )


AUDIO: list[Entry] = [
    *ctc("wav2vec2"),
    *ctc("hubert"),
    *ctc("wavlm", attention=("eager",)),
    *of_transformers(
        Family.AUDIO,
        "AutoModelForAudioClassification",
        "audio-spectrogram-transformer",
        "SIZES num_hidden_layers=2 max_length=32 num_mel_bins=16 patch_size=8 "
        "frequency_stride=8 time_stride=8",
        lambda: {"input_values": floats(BATCH, 32, 16), "labels": torch.tensor([0, 1])},
    ),
]

ENTRIES = [*VISION, *MULTIMODAL, *AUDIO]
